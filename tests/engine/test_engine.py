"""The engine: shortcuts equal the plain model to the nanosecond, and nothing gets lost."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from random_jobs import models, scenarios
from simpy import Environment
from simulated_jobs import simulated

from ddpsim.cluster.algorithms.max_plus import ring_ends_ns
from ddpsim.cluster.build import build_network
from ddpsim.cluster.cost import LinkCost, SingleRankCost
from ddpsim.cluster.interference import InterferingCost, Kept
from ddpsim.cluster.topology.link import Link
from ddpsim.cluster.transfers import Interference, RingTransfer, Slowing, WholeTransfer
from ddpsim.engine.noise import BURST_BYTES, draw_kept_deviations, draw_slowdowns, draw_stalls
from ddpsim.engine.program import Program
from ddpsim.engine.reference.comm_lane import Collective, CommLane
from ddpsim.engine.reference.messages import RingSteps
from ddpsim.engine.reference.network import Network
from ddpsim.engine.reference.rank import Rank
from ddpsim.engine.reference.shared_link import SharedLink
from ddpsim.engine.reference.stream import Stream
from ddpsim.engine.request import Request
from ddpsim.engine.run import EngineMode, Simulated, run
from ddpsim.errors import SimulationError
from ddpsim.prediction.api import load_scenario
from ddpsim.prediction.program import compile_program
from ddpsim.prediction.resolve import resolve
from ddpsim.result.metrics import BreakdownNs, Step, percentile, steps_of
from ddpsim.result.timeline import CommSpan, MessageSpan, RankTimeline, Span
from ddpsim.scenario.run import Jitter, Stalls
from ddpsim.scenario.schema import Scenario
from ddpsim.strategies.ddp.strategy import DistributedDataParallel
from ddpsim.strategies.instructions import Await, Communicate, Compute
from ddpsim.workload.build import build_model
from ddpsim.workload.model import Buffer, Model

MODES: tuple[EngineMode, ...] = ("auto", "reference")
FREE = LinkCost((Link(0.0, 1e30),) * 4)


def slowest_steps(done: Simulated) -> list[Step]:
    return all_steps(done, done.timeline.slowest_rank)


def all_steps(done: Simulated, rank: int) -> list[Step]:
    """Of those that repeat exactly, the first one again and again."""
    steps = steps_of(done.timeline.ranks[rank])
    return steps + steps[-1:] * done.timeline.repeats


def seen_from_its_start(step: Step) -> tuple[Any, ...]:
    """All that happens on the device in a step."""
    start_ns = step.start_ns
    compute = [(s.kind, s.start_ns - start_ns, s.end_ns - start_ns) for s in step.compute]
    comm = [(*s[:4], *(moment_ns - start_ns for moment_ns in s[4:])) for s in step.comm]
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


@settings(max_examples=150, deadline=None)
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


@settings(max_examples=150, deadline=None)
@given(scenarios(noisy=True), models())
def test_ring_shortcuts_equal_the_plain_model(scenario: Scenario, model: Model) -> None:
    """Stragglers and jitter: closed form and recurrence give every rank's ticks, span by span."""
    assert_alike(*(simulated(scenario, model, mode) for mode in MODES))


FACTORS = st.integers(100, 250).map(lambda percent: percent / 100)
SHARES = st.floats(0.01, 1)
KEPT_FIGURES = st.tuples(SHARES, st.floats(0, 0.5), st.none() | SHARES)
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


def interfering(scenario: Scenario, model: Model, mode: Any = "auto", **slowdowns: Any) -> Any:
    program = compile_program(scenario, model)
    cost = InterferingCost(build_network(scenario).cost, **slowdowns)
    return run(Request(program, cost, scenario.cluster.world_size), mode)


@settings(max_examples=150, deadline=None)
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


@settings(max_examples=300, deadline=None)
@given(st.data(), scenarios(noisy=True, gloo=False), models())
def test_ranks_without_events_equal_the_plain_model(
    data: st.DataObject, scenario: Scenario, model: Model
) -> None:
    """NCCL with all that may differ between ranks, compute slowed down under every collective."""
    cluster, ranks = scenario.cluster, scenario.cluster.world_size
    weak = st.dictionaries(st.integers(0, ranks - 1), st.sampled_from([0.2, 0.7]), max_size=2)
    changed = {
        "algorithm": data.draw(st.sampled_from(ALGORITHMS)),
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


@settings(max_examples=50, deadline=None)
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


def test_good_and_bad_steps_of_a_rank_cancel() -> None:
    drawn = draw_kept_deviations(0, 3, 50, BURST_BYTES)
    assert drawn.shape == (3, 50, 2)
    assert drawn.mean(axis=(1, 2)) == pytest.approx([0] * 3, abs=1e-9)
    assert drawn.std(axis=(1, 2)) == pytest.approx([1] * 3, rel=0.03)
    assert (drawn == draw_kept_deviations(0, 3, 50, BURST_BYTES)).all()
    assert draw_kept_deviations(0, 3, 50, BURST_BYTES - 1).shape == (3, 50, 1)
    assert (drawn[0] != drawn[1]).any()


def test_what_a_rank_keeps_varies_as_far_up_as_down() -> None:
    half = Interference(compute=Fraction(2), kept_spread=0.25)
    slowings = [half.compute_on(deviations) for deviations in (0, -1, 1, -9, 9)]
    factors = [2, 4, Fraction(1333, 1000), 20, Fraction(1053, 1000)]  # 5 to 95 % of its speed
    assert slowings == [(factor, factor) for factor in factors]
    two = replace(half, crowded_compute=Fraction(4))
    assert two.compute_on(0) == (2, 4)
    assert two.compute_on(0.4) == (Fraction(1667, 1000), Fraction(2857, 1000))
    assert replace(half, compute=Fraction(5)).compute_on(0) == (5, 5)  # no less beside several
    assert Interference(kept_spread=0.25).compute_on(-1) == (1, 1)  # what nothing slows


@pytest.mark.parametrize(
    ("deviations", "after_ns", "blocking", "end_ns"),
    [
        (0.0, 0, False, 350),  # 50 done by 100, then 250 more
        (-1.0, 0, False, 375),  # 25 done by 100
        (0.0, 40, False, 350),  # the hook's work is elsewhere
        (0.0, 40, True, 388),  # of its 40 a twentieth is left: 52 done by 140
    ],
)
def test_compute_under_a_collective_and_its_hook_has_a_worked_example(
    deviations: float, after_ns: int, blocking: bool, end_ns: int
) -> None:
    """Compute of 300 under a transfer of 100, of which it keeps half: 0.25 more or less."""
    env = Environment()

    class Halving(OneTransfer):
        def transfer(self, *_: Any) -> WholeTransfer:
            return WholeTransfer(0, 100, interference=Interference(Fraction(2), kept_spread=0.25))

    compute, ready = Stream(env, None, paced=True), env.event()
    lane = CommLane(
        env,
        0,
        Network(env, Halving(), 1, shared=True, slows_compute=True),
        compute,
        None,
        workers=2,
        spins=False,
        blocking=blocking,
    )
    ready.succeed(0)
    launched = Communicate(0, 0, "all_reduce", 8, after_ns=after_ns)
    lane.launch(Collective("k", launched, ready, env.event(), deviations))
    compute.launch("backward", 300)
    end = compute.record()
    env.run(until=end)
    assert env.now == end_ns


@pytest.mark.parametrize(("blocking", "ends_ns"), [(False, [120, 220]), (True, [120, 240])])
def test_a_hooks_work_holds_a_thread_but_no_stream(blocking: bool, ends_ns: list[int]) -> None:
    """Two collectives of 100 each, and 20 after each of them: a GPU does that beside the second."""
    env, ends = Environment(), []

    class Hundred(OneTransfer):
        def transfer(self, *_: Any) -> WholeTransfer:
            return WholeTransfer(0, 100)

    network, compute = Network(env, Hundred(), 1), Stream(env, None)
    lane = CommLane(
        env, 0, network, compute, None, workers=1, spins=not blocking, blocking=blocking
    )
    for key in ("a", "b"):
        ready, done = env.event().succeed(0), env.event()
        done.callbacks.append(lambda _: ends.append(int(env.now)))
        launched = Communicate(0, 0, "all_reduce", 8, after_ns=20)
        lane.launch(Collective(key, launched, ready, done))
    env.run()
    assert ends == ends_ns


def test_a_bucket_with_an_unused_parameter_waits_for_the_map() -> None:
    """Which goes after all buckets (torch: reducer.cpp, finalize_bucket_dense)."""
    ddp = ddp_of(one_bucket()[0])
    (bucket,) = ddp.rebuilt_buckets
    first, second = (bucket._replace(parameters=(i,)) for i in (0, 1))
    forward, backward = ddp.model.first
    model = replace(ddp.model, ready_order=(0,), first=(forward, backward[:2]))
    reducer = replace(
        ddp.reducer,
        ready_order=(0,),
        unused=(1,),
        copy_in=ddp.reducer.copy_in[:1] * 2,
        used_map_bytes=8,
    )
    ddp = replace(ddp, model=model, reducer=reducer)
    for order, last in (
        ((first, second), [0, "copy", 1, 2, "copy"]),
        ((second, first), [0, 1, 2, "copy", 1, "copy"]),
    ):
        found = [
            each.number if isinstance(each, Await) else "copy"
            for each in replace(ddp, rebuilt_buckets=order).step(1)
            if isinstance(each, Await) or (isinstance(each, Compute) and each.kind == "copy_back")
        ]
        assert found == last


@settings(max_examples=100, deadline=None)
@given(scenarios(), models(), FACTORS)
def test_interference_never_helps(scenario: Scenario, model: Model, factor: float) -> None:
    """One collective at a time; with two workers a delay may help, as in any list schedule."""
    assume(scenario.ddp.backend == "nccl")
    alone = interfering(scenario, model)
    for which in ("compute", "comm"):
        slowed = interfering(scenario, model, **{which: factor})
        ends = [list(accumulate(s.length_ns for s in slowest_steps(d))) for d in (alone, slowed)]
        # as many steps as both were simulated for
        assert all(before <= after for before, after in zip(*ends, strict=False))


def test_interference_has_a_worked_example() -> None:
    """Compute of 100 under a transfer of 50, both twice as slow: 100 together, then 50 alone."""
    env = Environment()
    compute, link = Stream(env, None, paced=True), SharedLink(env)
    twice = Slowing(Fraction(2), Fraction(2))
    ends: dict[str, int] = {}

    def transfer() -> Any:
        compute.slow_down(twice)
        link.set_computing(True)
        yield link.transfer(50, slowdown=Fraction(2))
        ends["transfer"] = int(env.now)
        compute.recover(twice)

    compute.launch("backward", 100)
    compute.record().callbacks.append(lambda _: ends.update(compute=int(env.now)))
    env.process(transfer())
    env.run()
    assert ends == {"transfer": 100, "compute": 150}


def test_compute_keeps_more_beside_one_transfer_than_beside_two() -> None:
    """Beside one it keeps half, beside two a fifth: 25 done by 50, 35 by 100, 60 by 150."""
    env = Environment()
    compute, ended = Stream(env, None, paced=True), []

    def transfer(begins_ns: int, ends_ns: int) -> Any:
        yield env.timeout(begins_ns)
        slowing = Slowing(Fraction(2), Fraction(5))
        compute.slow_down(slowing)
        yield env.timeout(ends_ns - begins_ns)
        compute.recover(slowing)

    compute.launch("backward", 70)
    compute.record().callbacks.append(lambda _: ended.append(int(env.now)))
    env.process(transfer(0, 100))
    env.process(transfer(50, 150))
    env.run()
    assert ended == [160]


def test_crowding_has_a_worked_example() -> None:
    """Two of 100 that crowd each other by a half: 300 for both; the last 10 of one go alone."""
    env = Environment()
    link, ends = SharedLink(env), []

    def transfer(work_ns: int) -> Any:
        yield link.transfer(work_ns, crowded=Fraction(3, 2))
        ends.append(int(env.now))

    env.process(transfer(100))
    env.process(transfer(110))
    env.run()
    assert ends == [300, 310]


@pytest.mark.parametrize(("busy", "end_ns"), [(False, 120), (True, 150)])
def test_a_transfer_that_begins_under_compute_is_delayed_once(busy: bool, end_ns: int) -> None:
    env = Environment()
    cost = InterferingCost(OneTransfer(), comm_delay_s=30e-9)
    network = Network(env, cost, 1, shared=True)
    network.computes(0, busy=busy)
    meeting = network.join("k", "all_reduce", 8, 0)
    env.run()
    assert meeting.ends[0].processed
    assert env.now == end_ns


@pytest.mark.parametrize(
    ("size_bytes", "slowdown"),
    [
        (0, Fraction(11, 10)),
        (30, Fraction(1467, 1000)),  # half way from all to half of it
        (60, Fraction(22, 10)),  # in 120 ns: 0.5 GB/s, which is a point
        (120, Fraction(3143, 1000)),
        (180, Fraction(55, 10)),
        (190, Fraction(7071, 1000)),  # beyond the points what is lacking grows with the bytes
        (600, Fraction(22)),  # as far as it goes: 5 % are left
    ],
)
def test_compute_keeps_what_was_measured_and_between_that_a_line(
    size_bytes: int, slowdown: Fraction
) -> None:
    points = (Kept(0.5e9, 0.5), Kept(1.5e9, 0.2))
    cost = InterferingCost(OneTransfer(), compute=1.1, kept=points)
    assert cost.transfer("all_reduce", size_bytes).interference.compute == slowdown


def test_less_than_a_twentieth_is_left_only_where_that_was_measured() -> None:
    cost = InterferingCost(OneTransfer(), kept=(Kept(1e9, 0.01),))
    assert cost.transfer("all_reduce", 10**6).interference.compute == 100


@pytest.mark.parametrize(("size_bytes", "spread"), [(0, 0), (30, 0.05), (60, 0.1), (600, 0.2)])
def test_between_points_the_spread_is_a_line_too(size_bytes: int, spread: float) -> None:
    cost = InterferingCost(OneTransfer(), kept=(Kept(0.5e9, 0.5, 0.1), Kept(1.5e9, 0.2, 0.2)))
    found = cost.transfer("all_reduce", size_bytes).interference.kept_spread
    assert found == pytest.approx(spread)


@pytest.mark.parametrize(("power", "slowdown"), [(1, 2), (2, 4), (0.5, 1.414), (0, 1)])
def test_a_model_is_slowed_down_by_a_power_of_what_slows_down_layers(
    power: float, slowdown: float
) -> None:
    points = (Kept(0.5e9, 0.5, 0.1, 0.8), Kept(1.5e9, 0.2, 0.1, 0.8))
    cost = InterferingCost(OneTransfer(), kept=points, exponent=power)
    found = cost.transfer("all_reduce", 60).interference
    assert found.crowded_compute == pytest.approx(slowdown, abs=1e-3)
    assert found.compute == pytest.approx(1.25**power, abs=1e-3)
    assert found.kept_spread == pytest.approx(power * 0.5 ** (power - 1) * 0.1)


def test_what_float16_costs_more_all_models_lose_alike() -> None:
    """The power is of what is kept beside float32, and the rest comes on top."""
    half, single = (Kept(1e9, 0.4, 0.1, 0.6),), (Kept(1e9, 0.5, 0.1, 0.8),)
    for power in (0.5, 1, 2):
        cost = InterferingCost(OneTransfer(), kept=half, kept_beside_single=single, exponent=power)
        found = cost.transfer("all_reduce", 120).interference
        assert found.crowded_compute == pytest.approx(2**power * 0.5 / 0.4, abs=1e-3)
        assert found.compute == pytest.approx(1.25**power * 0.8 / 0.6, abs=1e-3)
        assert found.kept_spread == pytest.approx(power * 0.5 ** (power - 1) * 0.1)


@dataclass
class OneTransfer:
    """20 ns of latency and 100 on the link, whatever is sent."""

    latency_ns: int = 20
    transfer_ns: int = 100
    burst_ns: int = 0

    def transfer(self, *_: Any) -> WholeTransfer:
        return WholeTransfer(self.latency_ns, self.transfer_ns, burst_ns=self.burst_ns)

    def stretched(self, _: float) -> Any:
        return self


PLAIN = load_scenario(
    {
        "schema": "ddpsim/1",
        "workload": {"model": "resnet18", "batch_per_rank": 8},
        "cluster": {"nodes": 1, "gpus_per_node": 1, "device": "a100-sxm-40gb"},
    }
)
OBSERVED = ((1.0, 1.2), (1.1, 1.4), (0.9, 1.0))


def _draws(ranks: int, iterations: int, **run_options: Any) -> Any:
    cluster = PLAIN.cluster.model_copy(update={"nodes": 1, "gpus_per_node": ranks})
    options = PLAIN.run.model_copy(update=run_options)
    return draw_slowdowns(cluster, options, iterations, OBSERVED)


def test_the_warm_up_does_not_vary() -> None:
    cluster = PLAIN.cluster.model_copy(update={"gpus_per_node": 2})
    noisy = PLAIN.run.model_copy(
        update={"jitter": Jitter(sigma=0.1), "stalls": Stalls(probability=0.5, duration="1 ms")}
    )
    steady, drawn = (draw_slowdowns(cluster, noisy, 6, warmup=count) for count in (0, 3))
    assert steady is not None
    assert drawn is not None
    assert (drawn[:, :3] == 1).all()
    assert (drawn[:, 3:] == steady).all()
    stalls, later = (draw_stalls(noisy, 2, 50, warmup=count) for count in (0, 3))
    assert stalls is not None
    assert later is not None
    assert not later[:, :3].any()
    assert (later[:, 3:] == stalls).all()
    kept = draw_kept_deviations(0, 2, 6, BURST_BYTES, warmup=3)
    assert not kept[:, :3].any()
    assert (kept[:, 3:] == draw_kept_deviations(0, 2, 6, BURST_BYTES)).all()


def test_two_broadcasts_of_buffers_are_in_flight() -> None:
    """As in torch's broadcast_coalesced: the second is launched before the first is copied back."""
    model = replace(build_model(PLAIN), buffers=(Buffer("float32", 1000), Buffer("int64", 20)))
    loop = compile_program(PLAIN, model).steady_step
    sent = [i for i, each in enumerate(loop) if isinstance(each, Communicate)][:2]
    waits = [i for i, each in enumerate(loop) if isinstance(each, Await)][:2]
    assert sent[1] < waits[0] < waits[1]


def test_iterations_of_all_ranks_are_drawn_together_and_none_twice_before_the_others() -> None:
    first, second = _draws(2, 6)
    factors = [(a / 1.1, b / 1.1) for a, b in OBSERVED]  # the mean of the medians 1.0 and 1.2
    drawn = list(zip(first, second, strict=True))
    for three in (drawn[:3], drawn[3:]):
        assert sorted(three) == [pytest.approx(pair) for pair in sorted(factors)]


def test_other_ranks_draw_each_for_itself_relative_to_the_medians() -> None:
    pool = sorted([1.0, 1.1, 0.9, 1.0, 1.4 / 1.2, 1.0 / 1.2])
    for rank in _draws(3, 6):
        assert sorted(rank) == pytest.approx(pool)


def test_a_stated_jitter_goes_before_what_was_observed() -> None:
    assert _draws(2, 4, jitter=Jitter(sigma=0)) is None
    assert (_draws(2, 4, jitter=Jitter(sigma=0.1)) != _draws(2, 4)).any()
    assert (_draws(2, 4, seed=1) != _draws(2, 4, seed=2)).any()


def test_a_critical_path_passes_collectives_that_take_no_time() -> None:
    """The wait ends at 30 with a collective of no length that queued behind one of 10 to 30."""
    step = Step(
        0,
        30,
        0,
        (),
        (Span("backward", 0, 10), Span("comm_wait", 10, 30)),
        (
            CommSpan("all_reduce", 0, 8, 1, 10, 10, 10, 30),
            CommSpan("all_reduce", 1, 8, 1, 10, 30, 30, 30),
        ),
    )
    assert [(s.start_ns, s.end_ns) for s in step.critical_path()] == [(0, 10), (10, 30)]


BY_HAND = Step(
    100,
    200,
    120,
    (Span("data_wait", 95, 104), Span("data_wait", 192, 196)),
    (
        Span("buffers", 106, 108),
        Span("comm_wait", 108, 110),
        Span("forward", 110, 120),
        Span("backward", 123, 140),
        Span("bucket_copy", 140, 142),
        Span("backward", 145, 150),
        Span("comm_wait", 150, 170),  # from 168 on for a hook's own work
        Span("copy_back", 170, 172),
        Span("optimizer", 172, 190),
    ),
    (
        CommSpan("broadcast", -1, 8, 0, 105, 105, 106, 110),
        CommSpan("all_reduce", 0, 8, 1, 142, 142, 144, 160),
        CommSpan("all_reduce", 1, 8, 1, 150, 160, 163, 168),
    ),
)


def test_where_the_time_of_a_step_goes_by_hand() -> None:
    """Gaps of 6 (4 for data), 3, 3 and 10 (4 for data); 22 of waits, of which a hook's own 2."""
    found = BY_HAND.breakdown()
    assert found == BreakdownNs(
        data_wait=4 + 4,
        forward=10,
        backward_compute=17 + 2 + 5,
        exposed_comm=22 - 2,
        optimizer=18,
        other=2 + 2 + 2 + (2 + 3 + 3 + 6),
    )
    assert found.total == BY_HAND.length_ns == 100
    assert BY_HAND.host_bound_ns() == 2 + 3 + 3 + 6
    assert BY_HAND.backward_ns() == 150 - 120
    assert BY_HAND.moved(7).breakdown() == found
    assert sum([found, found], BreakdownNs()).total == 200
    assert (found + found).forward == 20
    assert (BY_HAND.moved(7).start_ns, BY_HAND.moved(7).backward_start_ns) == (107, 127)


def test_what_collectives_take_of_a_step_by_hand() -> None:
    """In flight from 105 to 110 and from 142 to 168; peers are late by 1, 2 and 3."""
    assert BY_HAND.comm_ns() == 5 + 26
    assert BY_HAND.skew_ns() == 1 + 2 + 3
    assert BY_HAND.late_peers_ns() == 3  # before the other two compute was at work, or idle
    assert BY_HAND.idle_comm_ns() == 1 + 3  # from 105 to 106, from 142 to 145
    assert BY_HAND.exposed_ns(BY_HAND.comm[:1]) == 2
    assert BY_HAND.moved(7).comm_ns() == 31


def test_a_critical_path_by_hand() -> None:
    """Bucket 1 queued behind bucket 0, which compute was the last to join; then what came first."""
    found = [(link.kind, link.start_ns, link.end_ns) for link in BY_HAND.critical_path()]
    assert found == [
        ("data_wait", 0, 5),
        ("late peer", 5, 6),
        ("broadcast", 6, 10),
        ("forward", 10, 20),
        ("host", 20, 23),
        ("backward", 23, 40),
        ("bucket_copy", 40, 42),
        ("late peer", 42, 44),
        ("all_reduce of bucket 0", 44, 60),
        ("late peer", 60, 63),
        ("all_reduce of bucket 1", 63, 68),
        ("comm_hook", 68, 70),
        ("copy_back", 70, 72),
        ("optimizer", 72, 90),
        ("data_wait", 90, 100),
    ]


@pytest.mark.parametrize(
    ("ready_ns", "path"),
    [
        (20, [("backward", 10), ("all_reduce of bucket 0", 30), ("all_reduce of bucket 1", 60)]),
        (30, [("backward", 30), ("all_reduce of bucket 1", 60)]),
    ],
    ids=["queued behind it", "not ready before"],
)
def test_a_critical_path_goes_by_what_a_collective_waited_for(
    ready_ns: int, path: list[tuple[str, int]]
) -> None:
    """Bucket 0 from 10 to 30, bucket 1 from 30 to 60; the backward ends between, at 50."""
    step = Step(
        0,
        60,
        0,
        (),
        (Span("backward", 0, 50), Span("comm_wait", 50, 60)),
        (
            CommSpan("all_reduce", 0, 8, 1, 10, 10, 10, 30),
            CommSpan("all_reduce", 1, 8, 1, ready_ns, 30, 30, 60),
        ),
    )
    assert [(link.kind, link.end_ns) for link in step.critical_path()] == path


def test_a_wait_for_data_over_several_steps_is_in_each() -> None:
    """And what ends with a step is its own."""
    lanes = RankTimeline(
        host=[Span("data_wait", 2, 4), Span("data_wait", 5, 25), Span("data_wait", 30, 31)],
        compute=[Span("optimizer", 0, 10), Span("optimizer", 15, 20), Span("optimizer", 21, 40)],
        comm=[CommSpan("all_reduce", 0, 8, 1, 8, 8, 8, 10)],
        step_ends_ns=[10, 20, 40],
        backward_starts_ns=[0, 10, 20],
    )
    first, second, third = steps_of(lanes)
    assert [(s.start_ns, s.end_ns) for s in (first, second, third)] == [(0, 10), (10, 20), (20, 40)]
    assert first.host == (Span("data_wait", 2, 4), Span("data_wait", 5, 25))
    assert second.host == (Span("data_wait", 5, 25),)
    assert third.host == (Span("data_wait", 5, 25), Span("data_wait", 30, 31))
    assert [len(each.compute) for each in (first, second, third)] == [1, 1, 1]
    assert [len(each.comm) for each in (first, second, third)] == [1, 0, 0]


@pytest.mark.parametrize("rank", [0, 10, 50, 90, 100])
@pytest.mark.parametrize("values", [(3.0,), (5.0, 1.0), (4.0, 1.0, 9.0, 2.0)])
def test_percentiles_are_numpys(values: tuple[float, ...], rank: float) -> None:
    assert percentile(values, rank) == pytest.approx(float(np.percentile(values, rank)))


@st.composite
def rings(draw: st.DrawFn) -> tuple[RingTransfer, list[int]]:
    """A ring of up to 64 ranks whose links repeat, of few or of many kinds, and its arrivals."""
    period, repeats = draw(st.integers(1, 16)), draw(st.integers(1, 4))
    kinds = draw(st.lists(st.integers(0, 10**6), min_size=1, max_size=period))
    costs = draw(st.lists(st.sampled_from(kinds), min_size=period, max_size=period))
    ranks = max(2, period * repeats)
    ticks = st.integers(0, draw(st.sampled_from([0, 10, 10**8])))
    arrivals = draw(st.lists(ticks, min_size=ranks, max_size=ranks))
    return RingTransfer(2 * (ranks - 1), tuple(costs), start_ns=draw(st.integers(0, 99))), arrivals


def ends_of(ring: RingTransfer, arrivals: Any) -> Any:
    begun_ns = np.array(arrivals, dtype=float) + ring.start_ns
    return ring_ends_ns(ring.step_ns, ring.steps, begun_ns)


def by_definition(ring: RingTransfer, arrivals: list[int]) -> list[int]:
    """t_r(s+1) = max(t_r(s), t_(r-1)(s)) + c_r."""
    ends = [arrival + ring.start_ns for arrival in arrivals]
    costs = ring.step_ns * (len(arrivals) // len(ring.step_ns))
    for _ in range(ring.steps):
        ends = [max(ends[r], ends[r - 1]) + costs[r] for r in range(len(ends))]
    return ends


@settings(max_examples=500, deadline=None)
@given(rings())
def test_a_ring_ends_by_its_longest_ways(given_ring: tuple[RingTransfer, list[int]]) -> None:
    ring, arrivals = given_ring
    found, _ = ends_of(ring, [arrivals, arrivals[::-1]])
    assert found[0].tolist() == by_definition(ring, arrivals)
    assert found[1].tolist() == by_definition(ring, arrivals[::-1])


@settings(max_examples=100, deadline=None)
@given(rings())
def test_the_plain_ring_is_its_definition(given_ring: tuple[RingTransfer, list[int]]) -> None:
    """Message by message, each of them seen."""
    ring, arrivals = given_ring
    env, ends, messages = Environment(), dict[int, int](), list[MessageSpan]()
    steps = RingSteps(env, ring, lambda rank: ends.update({rank: int(env.now)}), messages.append)
    for rank, arrival in enumerate(arrivals):
        env.timeout(arrival).callbacks.append(lambda _, rank=rank: steps.join(rank))
    env.run()
    assert [ends[rank] for rank in range(ring.ranks)] == by_definition(ring, arrivals)
    assert len(messages) == ring.ranks * ring.steps
    taken = {(span.target, span.end_ns - span.start_ns) for span in messages}
    costs = ring.step_ns * (ring.ranks // len(ring.step_ns))
    assert taken == set(enumerate(costs))


@settings(max_examples=200, deadline=None)
@given(rings(), st.integers(1, 4))
def test_one_period_of_a_ring_stands_for_all(
    given_ring: tuple[RingTransfer, list[int]], repeats: int
) -> None:
    ring, arrivals = given_ring
    whole = replace(ring, steps=2 * (len(arrivals) * repeats - 1))
    found, _ = ends_of(whole, arrivals)
    assert found.tolist() * repeats == by_definition(whole, arrivals * repeats)


@pytest.mark.parametrize(
    ("links", "way"),
    [((7, 7, 7), "closed-form"), ((7, 9, 7), "recurrence"), ((7, 9) * 9, "max-plus")],
)
def test_the_way_a_ring_was_found_is_told(links: tuple[int, ...], way: str) -> None:
    ring = RingTransfer(2 * (len(links) - 1), links)
    assert ends_of(ring, range(len(links)))[1] == way


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
    auto, plain = (run(Request(program, months, 4), mode, every_rank=True) for mode in MODES)
    assert auto.ranks_simulated == plain.ranks_simulated == 4
    assert slowest_steps(auto)[-1].length_ns == slowest_steps(plain)[-1].length_ns


def test_equal_links_end_together_at_the_closed_form() -> None:
    ring = RingTransfer(steps=6, step_ns=(10, 10, 10, 10))
    assert ends_of(ring, [5, 0, 3, 100])[0].tolist() == [100 + 6 * 10] * 4


@settings(max_examples=200, deadline=None)
@given(models(), scenarios(max_nodes=2))
def test_every_gradient_byte_is_reduced_once(model: Model, scenario: Scenario) -> None:
    done = simulated(scenario, model)
    for step in slowest_steps(done):
        buckets = [span for span in step.comm if span.bucket >= 0]
        assert sum(span.size_bytes for span in buckets) == model.gradient_bytes
        assert sum(span.num_params for span in buckets) == len(model.parameters)
        assert sorted(span.bucket for span in buckets) == list(range(len(buckets)))


@settings(max_examples=200, deadline=None)
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


@settings(max_examples=100, deadline=None)
@given(scenarios(), models())
def test_one_rank_communicates_nothing(scenario: Scenario, model: Model) -> None:
    program = compile_program(scenario, model)
    for step in steps_of(run(Request(program, SingleRankCost(), 1)).timeline.ranks[0]):
        assert step.comm_ns() == 0
        assert step.breakdown().exposed_comm == 0


@settings(max_examples=100, deadline=None)
@given(scenarios(), models())
def test_a_free_network_is_pure_compute(scenario: Scenario, model: Model) -> None:
    program = compile_program(scenario, model)
    free, alone = run(Request(program, FREE, 4)), run(Request(program, SingleRankCost(), 1))
    assert slowest_steps(free)[-1].length_ns == slowest_steps(alone)[-1].length_ns


@settings(max_examples=100, deadline=None)
@given(scenarios(), models(), st.floats(1.0, 20.0))
def test_more_bandwidth_is_never_slower(scenario: Scenario, model: Model, factor: float) -> None:
    program = compile_program(scenario, model)
    world_size = scenario.cluster.world_size
    cost = build_network(scenario).cost
    asked = (Request(program, c, world_size) for c in (cost.stretched(1 / factor), cost))
    faster, usual = (list(accumulate(s.length_ns for s in slowest_steps(run(a)))) for a in asked)
    # as many steps as both were simulated for
    assert all(ours_ns <= theirs_ns for ours_ns, theirs_ns in zip(faster, usual, strict=False))


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 64), st.integers(1, 10**9))
def test_ring_volume_is_the_textbooks(ranks: int, size_bytes: int) -> None:
    """2(N-1) chunks of M/N bytes, each rounded up to a byte: 2(N-1)/N M within a byte a step."""
    one_byte_per_ns = LinkCost((Link(0.0, 1e9),) * ranks)
    ring = one_byte_per_ns.transfer("all_reduce", size_bytes)
    assert isinstance(ring, RingTransfer)
    volume = ring.steps * ring.step_ns[0]
    exact = Fraction(2 * (ranks - 1) * size_bytes, ranks)
    assert exact <= volume < exact + ring.steps


def test_worked_ring_example() -> None:
    """100 MB on 8 ranks at 10 GB/s and 10 us: 14 steps of 10 us + 1.25 ms."""
    ring = LinkCost((Link(10e-6, 10e9),) * 8).transfer("all_reduce", 100_000_000)
    assert ring == RingTransfer(14, (1_260_000,) * 8)


def ddp_of(program: Program) -> DistributedDataParallel:
    assert isinstance(program.strategy, DistributedDataParallel)
    return program.strategy


def one_bucket(**changes: Any) -> tuple[Program, Scenario]:
    """ResNet-18 as one bucket on 4 ranks; only the fields of interest are not zero."""
    scenario = Scenario.model_validate(
        {
            "schema": "ddpsim/1",
            "workload": {"model": "resnet18", "batch_per_rank": 8, "step_time": "40 ms"},
            "ddp": {"bucket_cap_mb": 1000, "broadcast_buffers": False},
            "cluster": {"nodes": 1, "gpus_per_node": 4, "device": "v100-sxm-16gb"},
            "run": {"iterations": 1},
        }
    )
    return replace(compile_program(scenario, build_model(scenario)), **changes), scenario


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
    assert step.length_ns == compute + copies + ring.start_ns + 6 * ring.step_ns[0] + ends
    assert step.breakdown().exposed_comm == ring.start_ns + 6 * ring.step_ns[0]


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
    assert lengths[0] < lengths[1] == lengths[2]
    timeline = run(Request(program, cost, 4, uneven), observed=range(4)).timeline
    assert timeline.slowest_rank == 3
    assert steps_of(timeline.ranks[3])[-1].skew_ns() == 0
    assert steps_of(timeline.ranks[0])[-1].skew_ns() > 0


def test_two_workers_share_the_link() -> None:
    """Two transfers of 10 ticks, the second 4 later: 4 alone, 12 at half rate, 4 alone."""
    env = Environment()
    link, ends = SharedLink(env), []

    def transfer(delay: int) -> Any:
        yield env.timeout(delay)
        yield link.transfer(10)
        ends.append(int(env.now))

    env.process(transfer(0))
    env.process(transfer(4))
    env.run()
    assert ends == [16, 20]


TRANSFERS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 60)), min_size=1, max_size=6)
SHARES = st.integers(1, 8).map(lambda part: Fraction(part, 8))


@settings(max_examples=200, deadline=None)
@given(TRANSFERS, SHARES)
@example([(0, 40), (0, 40)], Fraction(1, 4))
def test_sharing_is_exact(transfers: list[tuple[int, int]], share: Fraction) -> None:
    """Against a brute-force fluid model: the rate is 1/k while k transfers are in flight.

    Whatever `share` of the network they need: the hop that makes it so little is shared too.
    """
    ends = shared_ends_ns(transfers, share, Fraction(0))
    for ours, exact in zip(ends, fluid_ends(transfers), strict=True):
        assert exact <= ours <= exact + len(transfers)


@settings(max_examples=200, deadline=None)
@given(TRANSFERS, SHARES, SHARES, SHARES)
def test_more_of_other_traffic_never_helps(
    transfers: list[tuple[int, int]], share: Fraction, other: Fraction, more: Fraction
) -> None:
    traffic = (Fraction(0), other, other + more)
    last_ns = [max(shared_ends_ns(transfers, share, each)) for each in traffic]
    assert last_ns == sorted(last_ns)


def shared_ends_ns(transfers: list[tuple[int, int]], share: Fraction, other: Fraction) -> list[int]:
    """When transfers end that begin at such ticks and take so many alone, beside another job."""
    env, ends = Environment(), [0] * len(transfers)
    link = SharedLink(env)
    link.set_other(other)

    def transfer(index: int, begin: int, work: int) -> Any:
        yield env.timeout(begin)
        yield link.transfer(work, share)
        ends[index] = int(env.now)

    for index, (begin, work) in enumerate(transfers):
        env.process(transfer(index, begin, work))
    env.run()
    return ends


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 40),
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 60)), min_size=1, max_size=6),
)
def test_a_rested_link_is_a_token_bucket(most: int, transfers: list[tuple[int, int]]) -> None:
    """Against a bucket of `most` that fills by one a tick of silence, and is empty at first."""
    env, ends = Environment(), list[int]()
    cost = OneTransfer(burst_ns=most)
    network = Network(env, cost, 1, shared=True)

    def one_after_another() -> Any:
        for number, (silence, work) in enumerate(transfers):
            yield env.timeout(silence)
            cost.transfer_ns = work
            yield network.join(number, "all_reduce", 8, 0).ends[0]
            ends.append(int(env.now))

    env.process(one_after_another())
    env.run()
    now = bucket = 0
    for (silence, work), end in zip(transfers, ends, strict=True):
        bucket = min(most, bucket + silence)
        at_once = min(bucket, work)
        now, bucket = now + silence + cost.latency_ns + work - at_once, bucket - at_once
        assert end == now


def test_another_jobs_traffic_leaves_a_link_no_rest() -> None:
    env = Environment()
    link = SharedLink(env)
    env.run(until=30)
    link.set_other(Fraction(1, 2))
    env.run(until=100)
    link.set_other(Fraction(0))
    env.run(until=105)
    assert (link.burst(20, 15), link.burst(20, 100), link.burst(20, 100)) == (15, 5, 0)


def fluid_ends(transfers: list[tuple[int, int]]) -> list[Fraction]:
    now, left = Fraction(0), {i: Fraction(work) for i, (_, work) in enumerate(transfers)}
    ends = [Fraction(0)] * len(transfers)
    while left:
        active = [i for i in left if transfers[i][0] <= now]
        starts = [Fraction(transfers[i][0]) for i in left if transfers[i][0] > now]
        finish = [now + left[i] * len(active) for i in active]
        upcoming = min(starts + finish)
        for i in active:
            left[i] -= (upcoming - now) / len(active)
            if left[i] == 0:
                ends[i] = upcoming
                del left[i]
        now = upcoming
    return ends


def test_streams_are_fifo_with_cudas_verbs() -> None:
    env, spans = Environment(), list[Span]()
    stream, other = Stream(env, spans.append), Stream(env, None)
    stream.launch("forward", 10)
    done = stream.record()
    other.wait(done, "comm_wait")
    other.launch("backward", 5)
    end = other.record()
    stream.launch("optimizer", 3)
    env.run(until=end)
    assert (done.value, env.now) == (10, 15)
    assert spans == [Span("forward", 0, 10), Span("optimizer", 10, 13)]


def test_a_rank_that_never_comes_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    program, scenario = one_bucket()
    train = Rank.train

    def leave_early(self: Rank) -> Any:
        if self.rank == 2:
            yield self.env.timeout(1)
            return
        yield from train(self)

    monkeypatch.setattr(Rank, "train", leave_early)
    steps = program.warmup + program.iterations
    with pytest.raises(SimulationError, match="the simulated job hangs") as caught:
        run(Request(program, build_network(scenario).cost, 4, np.ones((4, steps))), "reference")
    assert "rank 0 waits for its compute stream" in str(caught.value)
    assert "ranks [0, 1, 3] wait for [2]" in str(caught.value)


def test_a_meeting_waits_for_all() -> None:
    env = Environment()

    class Fixed:
        def transfer(self, operation: str, size_bytes: int) -> WholeTransfer:
            return WholeTransfer(5, 100)

        def stretched(self, factor: float) -> Any:
            return self

    network = Network(env, Fixed(), 2)
    ends = []

    def member(rank: int, delay: int) -> Any:
        yield env.timeout(delay)
        meeting = network.join("k", "all_reduce", 8, rank)
        yield meeting.ends[rank]
        ends.append((rank, int(env.now), meeting.met_ns))

    env.process(member(0, 0))
    env.process(member(1, 40))
    env.run()
    assert ends == [(0, 145, 40), (1, 145, 40)]


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
    assert {(ring.ranks, len(ring.step_ns)) for ring in rings} == {(8 * nodes, 8)}
    assert run(job.request()).ranks_simulated == 1


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
