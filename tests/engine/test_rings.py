"""A ring all-reduce takes what its definition says."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simpy import Environment

from ddpsim.cluster.algorithms.max_plus import ring_ends_ns
from ddpsim.cluster.cost import LinkCost
from ddpsim.cluster.topology.paths import Link
from ddpsim.cluster.transfers import Operation, RingTransfer, duration_ns
from ddpsim.engine.reference.messages import RingSteps
from ddpsim.result.timeline import MessageSpan


@st.composite
def rings(draw: st.DrawFn) -> tuple[RingTransfer, list[int]]:
    """A ring of up to 64 ranks whose links repeat, of few or of many kinds, and its arrivals."""
    period, repeats = draw(st.integers(1, 16)), draw(st.integers(1, 4))
    busy_ns, latency_ns = (
        tuple(draw(st.lists(st.sampled_from(kinds), min_size=period, max_size=period)))
        for kinds in (
            draw(st.lists(st.integers(0, most), min_size=1, max_size=period))
            for most in (10**6, draw(st.sampled_from([0, 10**3, 10**6, 10**7])))
        )
    )
    ranks = max(2, period * repeats)
    ticks = st.integers(0, draw(st.sampled_from([0, 10, 10**8])))
    arrivals = draw(st.lists(ticks, min_size=ranks, max_size=ranks))
    start_ns, turns = draw(st.integers(0, 99)), draw(st.integers(1, 2))
    steps = turns * (ranks - 1)
    return RingTransfer(steps, busy_ns, latency_ns, start_ns=start_ns, turns=turns), arrivals


def ends_of(ring: RingTransfer, arrivals: Any) -> Any:
    begun_ns = np.array(arrivals, dtype=float) + ring.start_ns
    return ring_ends_ns(ring.busy_ns, ring.latency_ns, ring.steps, begun_ns)


def by_definition(ring: RingTransfer, arrivals: list[int]) -> list[int]:
    """u_r(s+1) = max(u_r(s), t_(r-1)(s)) + b_r, and t_r(s) = u_r(s) + l_r from the first on."""
    left = arrived = [arrival + ring.start_ns for arrival in arrivals]
    repeats = len(arrivals) // len(ring.busy_ns)
    busy, latency = ring.busy_ns * repeats, ring.latency_ns * repeats
    for _ in range(ring.steps):
        left = [max(left[r], arrived[r - 1]) + busy[r] for r in range(len(left))]
        arrived = [left[r] + latency[r] for r in range(len(left))]
    return arrived


@settings(max_examples=500)
@given(rings())
def test_a_ring_ends_by_its_longest_ways(given_ring: tuple[RingTransfer, list[int]]) -> None:
    ring, arrivals = given_ring
    found, _ = ends_of(ring, [arrivals, arrivals[::-1]])
    assert found[0].tolist() == by_definition(ring, arrivals)
    assert found[1].tolist() == by_definition(ring, arrivals[::-1])


@settings(max_examples=100)
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
    repeats = ring.ranks // len(ring.busy_ns)
    whole = list(map(sum, zip(ring.busy_ns, ring.latency_ns, strict=True))) * repeats
    assert taken == set(enumerate(whole))


@settings(max_examples=300)
@given(rings(), st.integers(1, 4))
def test_the_time_without_arrays_is_the_last_ranks(
    given_ring: tuple[RingTransfer, list[int]], repeats: int
) -> None:
    """Where all join at once, of a ring whose links repeat."""
    ring, arrivals = given_ring
    together = [0] * (len(arrivals) * repeats)
    whole = replace(ring, steps=ring.turns * (len(together) - 1))
    assert duration_ns(whole) == max(by_definition(whole, together))


@settings(max_examples=100)
@given(rings(), st.integers(1, 10**5))
def test_a_ring_takes_no_less_with_more_latency(
    given_ring: tuple[RingTransfer, list[int]], more_ns: int
) -> None:
    """And no more than that latency on every step."""
    ring, _ = given_ring
    later = replace(ring, latency_ns=tuple(ns + more_ns for ns in ring.latency_ns))
    assert 0 <= duration_ns(later) - duration_ns(ring) <= ring.steps * more_ns


@settings(max_examples=200)
@given(rings(), st.integers(1, 4))
def test_one_period_of_a_ring_stands_for_all(
    given_ring: tuple[RingTransfer, list[int]], repeats: int
) -> None:
    ring, arrivals = given_ring
    whole = replace(ring, steps=ring.turns * (len(arrivals) * repeats - 1))
    found, _ = ends_of(whole, arrivals)
    assert found.tolist() * repeats == by_definition(whole, arrivals * repeats)


@pytest.mark.parametrize(
    ("links", "way"),
    [((7, 7, 7), "closed-form"), ((7, 9, 7), "recurrence"), ((7, 9) * 9, "max-plus")],
)
def test_the_way_a_ring_was_found_is_told(links: tuple[int, ...], way: str) -> None:
    ring = RingTransfer(2 * (len(links) - 1), links, (0,) * len(links))
    assert ends_of(ring, range(len(links)))[1] == way


def test_equal_links_end_together_at_the_closed_form() -> None:
    ring = RingTransfer(steps=6, busy_ns=(10, 10, 10, 10), latency_ns=(0, 0, 0, 0))
    assert ends_of(ring, [5, 0, 3, 100])[0].tolist() == [100 + 6 * 10] * 4
    slow = replace(ring, latency_ns=(7, 7, 7, 7))
    assert ends_of(slow, [5, 5, 5, 5])[0].tolist() == [5 + 6 * 17] * 4


def test_latency_passes_while_the_link_is_busy() -> None:
    """Two nodes of four: a slow hop's latency counts once a turn, not with every chunk.

    14 steps; a turn of 8 hops takes 2 x (10 + 100) + 6 x (10 + 2) = 292, so that a step takes 36.5
    on average, where 14 x 110 would be 1540.
    """
    ring = RingTransfer(14, (10,) * 8, (100, 2, 2, 2, 100, 2, 2, 2))
    assert duration_ns(ring) == 4 * 110 + 10 * 12


@settings(max_examples=200)
@given(st.integers(2, 64), st.integers(1, 10**9))
def test_ring_volume_is_the_textbooks(ranks: int, size_bytes: int) -> None:
    """2(N-1) chunks of M/N bytes, each rounded up to a byte: 2(N-1)/N M within a byte a step."""
    one_byte_per_ns = LinkCost((Link(0.0, 1e9),) * ranks)
    ring = one_byte_per_ns.transfer("all_reduce", size_bytes)
    assert isinstance(ring, RingTransfer)
    volume = ring.steps * ring.busy_ns[0]
    exact = Fraction(2 * (ranks - 1) * size_bytes, ranks)
    assert exact <= volume < exact + ring.steps


@pytest.mark.parametrize("operation", ["reduce_scatter", "all_gather"])
def test_worked_ring_example(operation: Operation) -> None:
    """100 MB on 8 ranks at 10 GB/s and 10 us: 14 steps of 10 us + 1.25 ms, or one turn of 7."""
    cost = LinkCost((Link(10e-6, 10e9),) * 8)
    ring = cost.transfer("all_reduce", 100_000_000)
    assert ring == RingTransfer(14, (1_250_000,) * 8, (10_000,) * 8)
    assert duration_ns(ring) == 17_640_000
    half = cost.transfer(operation, 100_000_000)
    assert half == replace(ring, steps=7, turns=1)
    assert duration_ns(half) == 8_820_000
