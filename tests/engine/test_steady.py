"""The mean steady step alone: as the whole simulation says, and no bound that it is outside of."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jobs.random_jobs import models, scenarios

from ddpsim.cluster.build import build_network
from ddpsim.cluster.interference import InterferingCost
from ddpsim.cluster.network import NO_TRAFFIC, Traffic
from ddpsim.engine.batch import mean_steps_s, run_many, step_ranges_s
from ddpsim.engine.fast.work_sums import WorkSums
from ddpsim.engine.least import least_step_s
from ddpsim.engine.noise import draw_slowdowns, lasting_factors
from ddpsim.engine.request import Request
from ddpsim.engine.run import run
from ddpsim.prediction.job import Job
from ddpsim.prediction.program import compile_program
from ddpsim.prediction.resolve import resolve
from ddpsim.result.summary import lengths_ns, mean_step_s
from ddpsim.scenario.run import Jitter, Stragglers
from ddpsim.scenario.schema import Scenario
from ddpsim.units import NS_PER_S
from ddpsim.workload.model import Model

STRAGGLERS = {"distribution": "lognormal", "sigma": 0.1}


def check(request: Request) -> float:
    """The mean step, with and without what the last job on these ranks left behind."""
    whole = run(replace(request, sums=None)).timeline
    (first_s,), (later_s,) = mean_steps_s([request]), mean_steps_s([request])
    each_s = [length_ns / NS_PER_S for length_ns in lengths_ns(whole)]
    assert min(each_s) <= first_s <= max(each_s)
    if whole.repeats:
        assert first_s == later_s == mean_step_s(whole)
        ((least_s, most_s),) = step_ranges_s([request], lambda *_: True)
        assert least_s <= first_s <= most_s
    return first_s


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
@example(("resnet18", False), "auto", 1, 1, "compute", 1.0, 23)
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


def test_one_rank_that_is_slower_than_usual() -> None:
    """Its job, and each variant of it, however often it is asked for."""
    cluster = {"nodes": 1, "gpus_per_node": 1, "stragglers": STRAGGLERS | {"sigma": 0.5}}
    workload = {"model": "resnet18", "batch_per_rank": 256}
    slow = job(cluster=cluster, workload=workload)
    usual = job(cluster=cluster | {"stragglers": None}, workload=workload)
    (usual_s,) = mean_steps_s([usual.calm_request()])
    factor = lasting_factors(slow.scenario.cluster, slow.scenario.run.seed)[0]
    assert check(slow.calm_request()) == pytest.approx(factor * usual_s, rel=0.01)


def test_ranks_around_a_long_ring() -> None:
    """Nothing but how they stand to each other has to settle: as in a ring of 512."""
    cluster = {"nodes": 256, "algorithm": "ring", "inter_node": {"bandwidth": "100 Gbit/s"}}
    check(job(cluster=cluster, ddp={"broadcast_buffers": False}).calm_request())


def test_a_host_that_is_slower_than_its_device() -> None:
    """Steps are not as if all was launched before."""
    asked = job(workload={"model": "resnet18", "batch_per_rank": 1})
    slow, usual = asked.calm_request(host=50.0), asked.calm_request()
    assert check(slow) > 10 * check(usual)
    assert mean_steps_s([usual, slow]) == [check(usual), check(slow)]


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


def test_hosts_that_wait_in_each_step() -> None:
    """A GradScaler's wait: the clock of each host is a part of what a step begins with."""
    cluster = {"nodes": 64, "algorithm": "ring", "inter_node": {"bandwidth": "100 Gbit/s"}}
    asked = job(
        cluster=cluster,
        workload={"model": "resnet18", "batch_per_rank": 32, "precision": "amp-fp16"},
        ddp={"broadcast_buffers": False},
    )
    assert asked.program.synchronizes
    check(asked.calm_request())


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
    least_s, mean_s = least_step_s(request), mean_step_s(run(request).timeline)
    assert least_s <= mean_s
    return least_s / mean_s


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
    fast = {"machine": "p4d.24xlarge", "nodes": 2, "stragglers": None}
    asked = {
        "schema": "ddpsim/1",
        "workload": {"model": "resnet18", "batch_per_rank": 256},
        "cluster": fast,
        "run": {"jitter": {"sigma": 0.05}, "iterations": 10},
    }
    assert part_that_is_told(resolve(Scenario.model_validate(asked))) > 0.96


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
