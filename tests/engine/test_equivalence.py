"""Every shortcut of the engine equals the plain model to the nanosecond."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs.engine_runs import (
    FACTORS,
    MODES,
    all_steps,
    interfering,
    one_bucket,
    slowest_steps,
)
from jobs.random_jobs import models, scenarios
from jobs.simulated_jobs import simulated

from ddpsim.cluster.build import build_network
from ddpsim.cluster.interference import InterferingCost, Kept
from ddpsim.cluster.transfers import RingTransfer
from ddpsim.engine.noise import draw_kept_deviations, draw_slowdowns
from ddpsim.engine.request import Request
from ddpsim.engine.run import Simulated, run
from ddpsim.prediction.api import load_scenario
from ddpsim.prediction.program import compile_program
from ddpsim.prediction.resolve import resolve
from ddpsim.result.metrics import Step
from ddpsim.scenario.run import Jitter
from ddpsim.scenario.schema import Scenario
from ddpsim.workload.model import Model


def seen_from_its_start(step: Step) -> tuple[Any, ...]:
    """All that happens on the device in a step."""
    start_ns = step.start_ns
    compute = [(s.kind, s.start_ns - start_ns, s.end_ns - start_ns) for s in step.compute]
    comm = [(*s[:4], *(ns - start_ns for ns in s[4:8]), *s[8:]) for s in step.comm]
    return step.length_ns, step.backward_start_ns - start_ns, compute, comm, step.breakdown()


def assert_alike(fast: Simulated, plain: Simulated) -> None:
    """Every rank's spans, tick by tick, and what is said of all ranks."""
    assert fast.timeline.slowest_rank == plain.timeline.slowest_rank
    assert fast.timeline.late_peers_ns == plain.timeline.late_peers_ns
    for rank in plain.timeline.ranks:
        pairs = zip(all_steps(fast, rank), all_steps(plain, rank), strict=True)
        assert all(seen_from_its_start(f) == seen_from_its_start(p) for f, p in pairs)
    if not fast.timeline.repeats:
        assert fast.timeline == plain.timeline


@settings(max_examples=60)
@given(scenarios(), models())
def test_folded_ranks_equal_the_plain_model(scenario: Scenario, model: Model) -> None:
    """Identical ranks: one simulated rank gives the slowest rank's times, breakdown and buckets."""
    fast, plain = simulated(scenario, model), simulated(scenario, model, "reference")
    assert fast.ranks_simulated in {1, scenario.cluster.gpus_per_node}
    assert plain.ranks_simulated == scenario.cluster.world_size
    fast_steps, plain_steps = slowest_steps(fast), slowest_steps(plain)
    assert [s.length_ns for s in fast_steps] == [s.length_ns for s in plain_steps]
    assert [s.breakdown() for s in fast_steps] == [s.breakdown() for s in plain_steps]
    assert [s.comm_ns() for s in fast_steps] == [s.comm_ns() for s in plain_steps]


@settings(max_examples=60)
@given(scenarios(noisy=True), models())
def test_ring_shortcuts_equal_the_plain_model(scenario: Scenario, model: Model) -> None:
    """Stragglers and jitter: closed form and recurrence give every rank's ticks, span by span."""
    assert_alike(*(simulated(scenario, model, mode) for mode in MODES))


KEPT_SHARES = st.floats(0.01, 1)


KEPT_FIGURES = st.tuples(KEPT_SHARES, st.floats(0, 0.5), st.none() | KEPT_SHARES)


KEPT = st.dictionaries(st.floats(1e6, 1e10), KEPT_FIGURES, max_size=3).map(
    lambda points: tuple(Kept(rate, *figures) for rate, figures in sorted(points.items()))
)


INTERFERENCES = st.fixed_dictionaries(
    {
        "compute": FACTORS,
        "comm": FACTORS,
        "kept": KEPT,
        "crowded_s_per_byte": st.floats(0, 1e-8),
        "comm_delay_s": st.floats(0, 1e-3),
    }
)


@settings(max_examples=60)
@given(scenarios(), models(), INTERFERENCES)
def test_folded_ranks_equal_the_plain_model_under_interference(
    scenario: Scenario, model: Model, slowdowns: dict[str, Any]
) -> None:
    fast, plain = (interfering(scenario, model, m, **slowdowns) for m in ("auto", "reference"))
    fast_steps, plain_steps = slowest_steps(fast), slowest_steps(plain)
    assert [s.length_ns for s in fast_steps] == [s.length_ns for s in plain_steps]
    assert [s.breakdown() for s in fast_steps] == [s.breakdown() for s in plain_steps]
    for step in slowest_steps(plain):
        assert step.breakdown().total == step.length_ns


ALGORITHMS = ["auto", "ring", "tree", "hierarchical", "halving_doubling", "direct"]


@pytest.mark.slow
@settings(max_examples=60)
@given(st.data(), scenarios(noisy=True, gloo=False), models())
def test_ranks_without_events_equal_the_plain_model(
    data: st.DataObject, scenario: Scenario, model: Model
) -> None:
    """NCCL with all that may differ between ranks, compute slowed down under every collective."""
    cluster, ranks = scenario.cluster, scenario.cluster.world_size
    weak = st.dictionaries(st.integers(0, ranks - 1), st.sampled_from([0.2, 0.7]), max_size=2)
    gathers = {"quantization_pertensor", "quantization_perchannel", "top_k"}
    # all-gathers, which no other algorithm prices
    synced = scenario.workload.sync_batch_norm or scenario.ddp.comm_hook in gathers
    changed = {
        "algorithm": data.draw(st.sampled_from(ALGORITHMS[:2] if synced else ALGORITHMS)),
        "weak_links": (data.draw(weak) or None) if ranks > 1 else None,
    }
    run_options = {"jitter": data.draw(st.sampled_from([None, Jitter(sigma=0.2)]))}
    scenario = scenario.model_copy(
        update={
            "cluster": cluster.model_copy(update=changed),
            "run": scenario.run.model_copy(update=run_options),
        }
    )
    program = replace(compile_program(scenario, model), iterations=data.draw(st.integers(1, 4)))
    iterations = program.warmup + program.iterations
    slowed = {"compute": data.draw(FACTORS), "kept": data.draw(KEPT)}
    cost = InterferingCost(build_network(scenario).cost, **slowed)
    slowdowns = draw_slowdowns(scenario.cluster, scenario.run, iterations)
    stalls = None
    if data.draw(st.booleans()):
        stalled = st.lists(st.sampled_from([0, 10**6]), min_size=iterations, max_size=iterations)
        stalls = np.array([data.draw(stalled) for _ in range(ranks)])
    fast, plain = (
        run(Request(program, cost, ranks, slowdowns, stalls), mode, observed=range(ranks))
        for mode in MODES
    )
    assert "lanes" in fast.paths
    assert_alike(fast, plain)


@settings(max_examples=50)
@given(scenarios(), models(), KEPT, st.integers(0, 9))
def test_ranks_that_fare_unevenly_are_all_simulated(
    scenario: Scenario, model: Model, kept: tuple[Kept, ...], seed: int
) -> None:
    program, ranks = compile_program(scenario, model), scenario.cluster.world_size
    cost = InterferingCost(build_network(scenario).cost, kept=kept)
    drawn = draw_kept_deviations(seed, ranks, program.warmup + program.iterations, 100 * 2**20)
    fast, plain = (
        run(Request(program, cost, ranks, kept_deviations=drawn), mode, observed=range(ranks))
        for mode in MODES
    )
    assert fast.ranks_simulated == ranks
    assert_alike(fast, plain)


def test_a_clock_too_long_for_arrays_is_left_to_the_plain_model() -> None:
    """Links so slow that a step takes months: SimPy counts with whole numbers of any size."""
    program, scenario = one_bucket()
    months = build_network(scenario).cost.stretched(1e12)
    slowdowns = np.ones((4, program.warmup + program.iterations))
    found = [run(Request(program, months, 4, slowdowns), mode, observed=range(4)) for mode in MODES]
    assert "ring:steps" in found[0].paths
    assert_alike(*found)


def test_who_stands_for_others_without_events_does_not_with_them() -> None:
    """Nodes of two ranks and a slow network, months long: every rank is simulated then."""
    program, _ = one_bucket()
    links = {
        "nodes": 2,
        "gpus_per_node": 2,
        "algorithm": "ring",
        "intra_node": {"bandwidth": "10 GB/s", "latency": "1 us"},
        "inter_node": {"bandwidth": "1 Gbit/s", "latency": "9 us"},
    }
    uneven = load_scenario(
        {
            "schema": "ddpsim/1",
            "workload": {"model": "resnet18", "batch_per_rank": 8},
            "cluster": {"device": "a100-sxm-40gb", **links},
        }
    )
    months = build_network(uneven).cost.stretched(1e12)
    auto, plain = (run(Request(program, months, 4), mode) for mode in MODES)
    assert auto.ranks_simulated == plain.ranks_simulated == 4
    assert slowest_steps(auto)[-1].length_ns == slowest_steps(plain)[-1].length_ns


@pytest.mark.parametrize("nodes", [1, 2, 16_384, 125_000])
def test_folded_ranks_need_no_room_of_their_own(nodes: int) -> None:
    """A ring over equal nodes is known by one of them, and its links by one node's."""
    cluster = {"nodes": nodes, "gpus_per_node": 8, "device": "a100-sxm-80gb", "algorithm": "ring"}
    workload = {"model": "resnet18", "batch_per_rank": 8}
    scenario = Scenario.model_validate(
        {"schema": "ddpsim/1", "workload": workload, "cluster": cluster}
    )
    job = resolve(scenario)
    rings = [t for t in job.program.transfers(job.network.cost) if isinstance(t, RingTransfer)]
    assert {(ring.ranks, len(ring.busy_ns)) for ring in rings} == {(8 * nodes, 8)}
    assert run(job.request()).ranks_simulated == (1 if nodes == 1 else 8)


def test_steps_that_repeat_are_simulated_once() -> None:
    program, scenario = one_bucket(iterations=1000)
    cost = build_network(scenario).cost
    alone = run(Request(program, cost, 4))
    together = run(Request(program, cost, 4, np.ones((4, program.warmup + 1000))))
    for done in (alone, together):
        assert len(done.timeline.slowest.step_ends_ns) + done.timeline.repeats == 1002
        assert done.timeline.repeats >= 995


def test_a_filling_loader_does_not_repeat_before_it_has_drained() -> None:
    """Its queue hides for some steps that it is too slow: these are not the last ones."""
    program, scenario = one_bucket(iterations=40)
    from ddpsim.engine.program import Loader

    step_ns = slowest_steps(run(Request(program, build_network(scenario).cost, 4)))[-1].length_ns
    slow = replace(program, loader=Loader(batch_ns=round(step_ns * 1.01), capacity=8))
    fast, plain = (
        [s.length_ns for s in slowest_steps(run(Request(slow, build_network(scenario).cost, 4), m))]
        for m in MODES
    )
    assert fast == plain
