"""Transfers share a link, beside each other and beside other traffic."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from jobs.engine_runs import OneTransfer
from simpy import Environment

from ddpsim.engine.reference.network import Network
from ddpsim.engine.reference.shared_link import SharedLink


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


@settings(max_examples=200)
@given(TRANSFERS, SHARES)
@example([(0, 40), (0, 40)], Fraction(1, 4))
def test_sharing_is_exact(transfers: list[tuple[int, int]], share: Fraction) -> None:
    """Against a brute-force fluid model: the rate is 1/k while k transfers are in flight.

    Whatever `share` of the network they need: the hop that makes it so little is shared too.
    """
    ends = shared_ends_ns(transfers, share, Fraction(0))
    for ours, exact in zip(ends, fluid_ends(transfers), strict=True):
        assert exact <= ours <= exact + len(transfers)


@settings(max_examples=200)
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


@settings(max_examples=200)
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
