"""How far compute and transfers slow each other, by worked examples."""

from __future__ import annotations

from fractions import Fraction
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import assume, given, settings
from jobs.engine_runs import FACTORS, OneTransfer, all_steps, interfering
from jobs.random_jobs import models, scenarios
from simpy import Environment

from ddpsim.cluster.interference import InterferingCost, Kept
from ddpsim.cluster.transfers import Interference, Slowing, WholeTransfer
from ddpsim.engine.reference.comm_lane import Collective, CommLane
from ddpsim.engine.reference.network import Network
from ddpsim.engine.reference.shared_link import SharedLink
from ddpsim.engine.reference.stream import Stream
from ddpsim.engine.run import Simulated
from ddpsim.scenario.schema import Scenario
from ddpsim.strategies.instructions import Communicate
from ddpsim.workload.model import Model


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


@settings(max_examples=40)
@given(scenarios(), models(), FACTORS)
def test_interference_never_helps(scenario: Scenario, model: Model, factor: float) -> None:
    """One collective at a time; with two workers a delay may help, as in any list schedule."""
    assume(scenario.ddp.backend == "nccl")
    alone = interfering(scenario, model, "reference")
    for which in ("compute", "comm"):
        slowed = interfering(scenario, model, "reference", **{which: factor})
        # as many steps as both were simulated for
        ends = zip(*map(_ends_ns, (alone, slowed)), strict=False)
        assert all(before <= after for before, after in ends)


def _ends_ns(done: Simulated) -> list[int]:
    """Of each step, on the rank that ends it last: that may be another one in each."""
    ranks = ([s.length_ns for s in all_steps(done, rank)] for rank in done.timeline.ranks)
    return [max(ends) for ends in zip(*map(accumulate, ranks), strict=True)]


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
