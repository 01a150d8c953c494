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
from ddpsim.cluster.topology.link import Link
from ddpsim.cluster.transfers import RingTransfer
from ddpsim.engine.reference.messages import RingSteps
from ddpsim.result.timeline import MessageSpan


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


def test_equal_links_end_together_at_the_closed_form() -> None:
    ring = RingTransfer(steps=6, step_ns=(10, 10, 10, 10))
    assert ends_of(ring, [5, 0, 3, 100])[0].tolist() == [100 + 6 * 10] * 4


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
