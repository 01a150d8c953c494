"""What holds of every step: nothing gets lost, and closed forms."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs.engine_runs import ddp_of, one_bucket, slowest_steps
from jobs.random_jobs import STAGED_HOOKS, models, scenarios
from jobs.simulated_jobs import simulated

from ddpsim.cluster.build import build_network
from ddpsim.cluster.cost import LinkCost, SingleRankCost
from ddpsim.cluster.topology.paths import Link
from ddpsim.cluster.transfers import RingTransfer
from ddpsim.engine.request import Request
from ddpsim.engine.run import run
from ddpsim.prediction.program import compile_program
from ddpsim.result.metrics import BreakdownNs, steps_of
from ddpsim.scenario.schema import Scenario
from ddpsim.workload.build import build_model
from ddpsim.workload.model import Model

STAGED = {str(options["comm_hook"]) for options in STAGED_HOOKS}
FREE = LinkCost((Link(0.0, 1e30),) * 4)


@settings(max_examples=80)
@given(models(), scenarios(max_nodes=2))
def test_every_gradient_byte_is_reduced_once(model: Model, scenario: Scenario) -> None:
    done = simulated(scenario, model)
    for step in slowest_steps(done):
        sent = [span for span in step.comm if span.bucket >= 0]
        buckets = list({span.bucket: span for span in sent}.values())
        assert len(buckets) == len(sent) or scenario.ddp.comm_hook in STAGED
        assert sum(span.size_bytes for span in buckets) == model.gradient_bytes
        assert sum(span.num_params for span in buckets) == len(model.parameters)
        assert sorted(span.bucket for span in buckets) == list(range(len(buckets)))


@settings(max_examples=80)
@given(scenarios(noisy=True), models())
def test_time_is_conserved(scenario: Scenario, model: Model) -> None:
    """The breakdown sums to the step, spans do not overlap, and the critical path is the step."""
    for rank in simulated(scenario, model).timeline.ranks.values():
        for step in steps_of(rank):
            assert step.breakdown().total == step.length_ns
            assert min(step.breakdown().__getattribute__(p) for p in BreakdownNs.__slots__) >= 0
            edges = [edge for span in step.compute for edge in (span.start_ns, span.end_ns)]
            assert edges == sorted(edges)
            assert step.skew_ns() <= step.comm_ns() <= step.length_ns
            path = step.critical_path()
            assert path[0].start_ns == 0
            assert path[-1].end_ns == step.length_ns
            assert all(a.end_ns == b.start_ns for a, b in pairwise(path))


@settings(max_examples=60)
@given(scenarios(), models())
def test_one_rank_communicates_nothing(scenario: Scenario, model: Model) -> None:
    program = compile_program(scenario, model)
    for step in steps_of(run(Request(program, SingleRankCost(), 1)).timeline.ranks[0]):
        assert step.comm_ns() == 0
        assert step.breakdown().exposed_comm == 0


@settings(max_examples=60)
@given(scenarios(), models())
def test_a_free_network_is_pure_compute(scenario: Scenario, model: Model) -> None:
    program = compile_program(scenario, model)
    free, alone = run(Request(program, FREE, 4)), run(Request(program, SingleRankCost(), 1))
    assert slowest_steps(free)[-1].length_ns == slowest_steps(alone)[-1].length_ns


@settings(max_examples=60)
@given(scenarios(), models(), st.floats(1.0, 20.0))
def test_more_bandwidth_is_never_slower(scenario: Scenario, model: Model, factor: float) -> None:
    program = compile_program(scenario, model)
    world_size = scenario.cluster.world_size
    cost = build_network(scenario).cost
    asked = (Request(program, c, world_size) for c in (cost.stretched(1 / factor), cost))
    faster, usual = (list(accumulate(s.length_ns for s in slowest_steps(run(a)))) for a in asked)
    # as many steps as both were simulated for
    assert all(ours_ns <= theirs_ns for ours_ns, theirs_ns in zip(faster, usual, strict=False))


def test_a_single_bucket_has_a_closed_form() -> None:
    """Forward + backward and copies + 2(N-1)c + copy back + optimizer, when no launch delays it."""
    program, scenario = one_bucket()
    ddp = ddp_of(program)
    ddp = replace(ddp, reducer=replace(ddp.reducer, launch_collective_ns=0))
    cost = build_network(scenario).cost
    step = slowest_steps(run(Request(replace(program, strategy=ddp), cost, 4)))[-1]
    ring = cost.transfer("all_reduce", ddp.rebuilt_buckets[0].wire_bytes)
    assert isinstance(ring, RingTransfer)
    forward, backward = ddp.model.first
    compute = sum(work.device_ns for work in (*forward, *backward))
    copies = sum(copy.device_ns for copy in ddp.reducer.copy_in)
    ends = ddp.rebuilt_buckets[0].copy_back.device_ns + ddp.model.optimizer.device_ns
    reduced_ns = ring.start_ns + 6 * (ring.busy_ns[0] + ring.latency_ns[0])
    assert step.length_ns == compute + copies + reduced_ns + ends
    assert step.breakdown().exposed_comm == reduced_ns


def test_initial_buckets_hide_nothing() -> None:
    """Before the rebuild one bucket holds all: its all-reduce starts when backward is over."""
    program, scenario = one_bucket()
    first = slowest_steps(run(Request(program, build_network(scenario).cost, 4)))[0]
    backward_end = max(s.end_ns for s in first.compute if s.kind in {"backward", "bucket_copy"})
    assert all(c.joined_ns >= backward_end for c in first.comm)


def test_the_slowest_rank_sets_the_pace() -> None:
    program, scenario = one_bucket()
    cost = build_network(scenario).cost
    steps = program.warmup + program.iterations
    even = np.ones((4, steps))
    uneven, all_slow = even * [[1], [1], [1], [1.5]], even * 1.5
    lengths = [
        slowest_steps(run(Request(program, cost, 4, slowdowns)))[-1].length_ns
        for slowdowns in (even, uneven, all_slow)
    ]
    assert lengths[0] < lengths[1] <= lengths[2]
    ring = cost.transfer("all_reduce", 10**6)
    assert isinstance(ring, RingTransfer)
    assert lengths[2] - lengths[1] <= ring.steps * ring.latency_ns[0]  # others wait for it alone
    timeline = run(Request(program, cost, 4, uneven), observed=range(4)).timeline
    assert timeline.slowest_rank == 3
    assert steps_of(timeline.ranks[3])[-1].skew_ns() == 0
    assert steps_of(timeline.ranks[0])[-1].skew_ns() > 0


def test_a_slow_loader_sets_the_pace() -> None:
    program, scenario = one_bucket()
    from ddpsim.engine.program import Loader

    slow = replace(program, loader=Loader(batch_ns=200_000_000, capacity=4), iterations=3)
    steps = slowest_steps(run(Request(slow, build_network(scenario).cost, 4)))[slow.warmup :]
    assert [step.length_ns for step in steps] == [200_000_000] * 3
    assert all(step.breakdown().data_wait > 0 for step in steps)
    fast = replace(slow, loader=Loader(batch_ns=1000, capacity=4))
    assert (
        slowest_steps(run(Request(fast, build_network(scenario).cost, 4)))[-1].breakdown().data_wait
        == 0
    )


def test_accumulation_communicates_once_a_step() -> None:
    single, scenario = one_bucket()
    options = scenario.ddp.model_copy(update={"accumulation_steps": 3})
    program = compile_program(scenario.model_copy(update={"ddp": options}), build_model(scenario))
    ddp = ddp_of(program)
    (forward, backward), (_, later_backward) = ddp.model.first, ddp.model.later
    cost = build_network(scenario).cost
    three, one = (slowest_steps(run(Request(p, cost, 4)))[-1] for p in (program, single))
    assert len(three.comm) == len(one.comm)
    works = zip(backward, later_backward, ddp.model.ready_order, strict=False)
    for first, later, parameter in works:
        added_ns, copied_ns = (
            later.device_ns - first.device_ns,
            ddp.reducer.copy_in[parameter].device_ns,
        )
        assert copied_ns - 1 <= added_ns <= 1.5 * copied_ns + 1  # three passes, not two; or a floor
    later_ns = sum(work.device_ns for work in later_backward)
    forward_ns = sum(work.device_ns for work in forward)
    assert three.length_ns == one.length_ns + 2 * (forward_ns + later_ns)


def test_a_later_micro_batch_takes_what_was_measured_of_it() -> None:
    _, scenario = one_bucket()
    ddp = scenario.ddp.model_copy(update={"accumulation_steps": 2})
    scenario = scenario.model_copy(update={"ddp": ddp})
    model = build_model(scenario)
    measured = replace(model, later=(0.9, 1.25))
    work = ddp_of(compile_program(scenario, measured)).model
    for first, later, times in zip(work.first, work.later, measured.later, strict=True):
        for one, other in zip(first, later, strict=True):
            assert abs(other.device_ns - times * one.device_ns) <= 1
            assert other.host_ns == one.host_ns
    assert ddp_of(compile_program(scenario, model)).model.later[0] == work.first[0]
