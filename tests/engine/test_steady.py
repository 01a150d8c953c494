"""The mean steady step alone: as the whole simulation says, and no bound that it is outside of."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs.random_jobs import models, scenarios

from ddpsim.cluster.build import build_network
from ddpsim.cluster.interference import InterferingCost
from ddpsim.cluster.network import NO_TRAFFIC, Traffic
from ddpsim.engine.batch import run_many
from ddpsim.engine.fast.work_sums import WorkSums
from ddpsim.engine.least import least_step_s
from ddpsim.engine.noise import draw_slowdowns
from ddpsim.engine.request import Request
from ddpsim.engine.run import run
from ddpsim.engine.steady import steady_ranges_s
from ddpsim.prediction.job import Job
from ddpsim.prediction.program import compile_program
from ddpsim.prediction.resolve import resolve
from ddpsim.result.summary import mean_step_s
from ddpsim.scenario.options.disturbances import Stragglers
from ddpsim.scenario.run import Jitter
from ddpsim.scenario.schema import Scenario
from ddpsim.workload.model import Model

STRAGGLERS = {"distribution": "lognormal", "sigma": 0.1}


def whole_s(request: Request) -> float:
    return mean_step_s(run(replace(request, sums=None)).timeline)


def check(request: Request) -> int:
    """How many ranges were needed. Steps that never get alike are held by all but the last."""
    *ranges, (last_s, same_s) = steady_ranges_s(request)
    assert last_s == same_s
    whole = run(replace(request, sums=None)).timeline
    exact_s = mean_step_s(whole)
    if whole.repeats:
        assert last_s == exact_s
    assert all(least <= each <= most for least, most in ranges for each in (last_s, exact_s))
    ranges.append((last_s, last_s))
    for (least, most), (later_least, later_most) in pairwise(ranges):
        assert least <= later_least <= later_most <= most
    return len(ranges)


def job(model: str = "resnet18", **sections: Any) -> Job:
    cluster = {"nodes": 4, "gpus_per_node": 2, "device": "a100-sxm-40gb", "stragglers": STRAGGLERS}
    asked = {
        "schema": "ddpsim/1",
        "workload": {"model": model, "batch_per_rank": 32},
        "cluster": cluster | sections.pop("cluster", {}),
    }
    return resolve(Scenario.model_validate(asked | sections))


@settings(max_examples=30)
@given(models(), scenarios(gloo=False), st.floats(0.01, 0.5), st.sampled_from(["ring", "tree"]))
def test_random_jobs(model: Model, scenario: Scenario, sigma: float, algorithm: str) -> None:
    cluster = scenario.cluster.model_copy(
        update={
            "stragglers": Stragglers(distribution="lognormal", sigma=sigma),
            "algorithm": algorithm,
        }
    )
    scenario = scenario.model_copy(update={"cluster": cluster})
    found = resolve(scenario)
    check(replace(found, model=model, program=compile_program(scenario, model)).calm_request())


@settings(max_examples=30)
@given(
    st.sampled_from([("resnet18", True), ("resnet18", False), ("bert-base", True)]),
    st.sampled_from(["auto", "ring", "hierarchical"]),
    st.sampled_from([1, 8, 64]),
    st.sampled_from([1, 10, 100]),
    st.sampled_from(["compute", "host", "network", "interference"]),
    st.floats(0.3, 3),
    st.integers(0, 99),
)
def test_models(
    model: tuple[str, bool],
    algorithm: str,
    batch: int,
    gigabits: int,
    term: str,
    factor: float,
    seed: int,
) -> None:
    inter_node = {"bandwidth": f"{gigabits} Gbit/s", "latency": "5 us"}
    name, broadcast = model
    asked = job(
        name,
        cluster={"algorithm": algorithm, "inter_node": inter_node},
        workload={"model": name, "batch_per_rank": batch},
        ddp={"broadcast_buffers": broadcast},
        run={"seed": seed},
    )
    check(asked.calm_request(**{term: factor}))


def test_ranks_that_begin_together_need_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    request = job(cluster={"algorithm": "ring"}).calm_request()
    exact_s = whole_s(request)
    monkeypatch.setattr("ddpsim.engine.fast.lanes.Lanes.train", None)
    monkeypatch.setattr("ddpsim.engine.fast.lanes.Lanes.trained", None)
    _, (least_s, most_s) = steady_ranges_s(request)
    assert least_s == most_s == exact_s


def test_ranks_that_do_not_are_told_more_closely_step_by_step() -> None:
    cluster = {"nodes": 256, "algorithm": "ring", "inter_node": {"bandwidth": "100 Gbit/s"}}
    asked = job(cluster=cluster, ddp={"broadcast_buffers": False})
    assert check(asked.calm_request()) > 2


def test_steps_that_come_again_in_a_cycle_end_the_warm_up() -> None:
    """Two lengths in turn, around a ring of 64 ranks: the mean step is that of both."""
    slow_network = {"bandwidth": "60 Gbit/s", "latency": "25 us"}
    asked = job(
        cluster={
            "device": "a100-sxm-80gb",
            "nodes": 16,
            "gpus_per_node": 4,
            "algorithm": "ring",
            "inter_node": slow_network,
            "stragglers": {"distribution": "lognormal", "sigma": 0.03},
        },
        workload={"model": "resnet18", "batch_per_rank": 16},
        ddp={"strategy": "fully_shard"},
        run={"iterations": 6, "seed": 2},
    )
    found = run(asked.request()).timeline
    ends_ns = found.slowest.step_ends_ns[found.warmup - 1 :]
    first_ns, second_ns, *others_ns = (after - before for before, after in pairwise(ends_ns))
    assert not found.repeats
    assert others_ns == 2 * [first_ns, second_ns]
    assert asked.step_s() == (first_ns + second_ns) / 2 / 1e9


def test_hosts_that_wait_in_each_step_are_told_step_by_step() -> None:
    """A GradScaler's wait: the clock of each host is a part of what a step begins with."""
    cluster = {"nodes": 64, "algorithm": "ring", "inter_node": {"bandwidth": "100 Gbit/s"}}
    asked = job(
        cluster=cluster,
        workload={"model": "resnet18", "batch_per_rank": 32, "precision": "amp-fp16"},
        ddp={"broadcast_buffers": False},
    )
    assert asked.program.synchronizes
    assert check(asked.calm_request()) > 2


@settings(max_examples=15)
@given(models(), scenarios(gloo=False), st.floats(0.01, 0.5))
def test_sums_of_works_change_nothing(model: Model, scenario: Scenario, sigma: float) -> None:
    """Every rank's lanes, where ranks differ for good: works summed, or one by one."""
    stragglers = Stragglers(distribution="lognormal", sigma=sigma)
    cluster = scenario.cluster.model_copy(update={"stragglers": stragglers})
    scenario = scenario.model_copy(update={"cluster": cluster})
    program, ranks = compile_program(scenario, model), cluster.world_size
    slowdowns = draw_slowdowns(cluster, scenario.run, 1)
    assert slowdowns is not None
    sums = WorkSums(slowdowns[:, 0])
    drawn = sums.slowdowns(program.warmup + program.iterations)
    cost = InterferingCost(build_network(scenario).cost, 1.3)
    request = Request(program, cost, ranks, drawn, sums=sums)
    summed, each = (
        run(asked, observed=range(ranks)) for asked in (request, replace(request, sums=None))
    )
    assert summed == each


def test_works_between_collectives_that_follow_each_other() -> None:
    """A slow period that is over before a rank goes on counts no work as undone."""
    slow = {"stragglers": {"factors": {1: 1.2}}}
    request = job(cluster=slow, ddp={"strategy": "per_parameter"}).request()
    summed, each = (run(r, observed=range(8)) for r in (request, replace(request, sums=None)))
    assert summed == each


def part_that_is_told(found: Job) -> float:
    """Of a mean steady step, by the least that it can take: never more than all."""
    request = found.request()
    least_s, closer_s = least_step_s(request), least_step_s(request, closely=True)
    mean_s = mean_step_s(run(request).timeline)
    assert max(least_s, closer_s) <= mean_s
    return closer_s / mean_s


BURSTS = Traffic(Fraction(1), Fraction(1, 2), 400_000, 1_000_000)


@settings(max_examples=25)
@given(
    models(),
    scenarios(gloo=False),
    st.sampled_from((0.0, 0.001, 0.3)),
    st.sampled_from((NO_TRAFFIC, BURSTS)),
    st.sampled_from((1.0, 1.3, 2.5)),
)
def test_no_step_is_shorter_than_the_least(
    model: Model, scenario: Scenario, sigma: float, traffic: Traffic, slowing: float
) -> None:
    jittery = scenario.run.model_copy(update={"jitter": Jitter(sigma=sigma)})
    scenario = scenario.model_copy(update={"run": jittery})
    known = resolve(scenario)
    cost = InterferingCost(known.network.cost, slowing)
    network = replace(known.network, traffic=traffic, cost=cost)
    program = compile_program(scenario, model)
    part_that_is_told(replace(known, model=model, program=program, network=network))


def test_ranks_meet_once_a_step() -> None:
    """So that a step is nearly told by the rank whose works are the longest in it."""
    jitter = {"jitter": {"sigma": 0.05}, "iterations": 10}
    for machine in ("p4d.24xlarge", "dgx-h100"):
        fast = {"machine": machine, "nodes": 2, "stragglers": None}
        asked = {
            "schema": "ddpsim/1",
            "workload": {"model": "resnet18", "batch_per_rank": 256},
            "cluster": fast,
            "run": jitter,
        }
        assert part_that_is_told(resolve(Scenario.model_validate(asked))) > 0.999


@pytest.mark.parametrize(("batch", "at_least"), [(1, 0.95), (256, 0.8)])
def test_a_step_is_nearly_that_of_its_host_or_its_device(batch: int, at_least: float) -> None:
    asked = {
        "schema": "ddpsim/1",
        "workload": {"model": "resnet18", "batch_per_rank": batch},
        "cluster": {"machine": "dgx-h100", "nodes": 2},
        "run": {"jitter": {"sigma": 0.02}},
    }
    assert part_that_is_told(resolve(Scenario.model_validate(asked))) > at_least


def test_equal_jobs_are_simulated_once() -> None:
    """Caps beyond the model's size all give two buckets."""
    asked = {
        "schema": "ddpsim/1",
        "workload": {"model": "resnet18", "batch_per_rank": 8},
        "cluster": {"machine": "dgx-h100", "nodes": 1},
        "run": {"jitter": {"sigma": 0.02}, "iterations": 2},
    }
    caps = (1, 100, 200, 400)
    jobs = [
        resolve(Scenario.model_validate(asked | {"ddp": {"bucket_cap_mb": cap}})) for cap in caps
    ]
    alone = [run_many([job.request()])[0] for job in jobs]
    together = run_many([job.request() for job in jobs])
    assert together == alone
    assert together[1] is together[2] is together[3]
    assert alone[1] != alone[0]
