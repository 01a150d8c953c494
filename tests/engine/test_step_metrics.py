"""Where the time of a step goes, and its critical path."""

from __future__ import annotations

import numpy as np
import pytest

from ddpsim.result.metrics import BreakdownNs, Step, percentile, steps_of
from ddpsim.result.timeline import CommSpan, RankTimeline, Span


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


def test_a_wait_for_a_collectives_own_copies_follows_compute() -> None:
    """On its stream from 10 to 12; the collective before it has long ended."""
    spans = (Span("backward", 0, 10), Span("comm_wait", 10, 30))
    sent = (
        CommSpan("all_reduce", 0, 8, 1, 1, 1, 1, 4),
        CommSpan("all_reduce", 1, 8, 1, 12, 12, 12, 30),
    )
    found = Step(0, 30, 0, (), spans, sent).critical_path()
    kinds = [(link.kind, link.end_ns) for link in found]
    assert kinds == [("backward", 10), ("comm_hook", 12), ("all_reduce of bucket 1", 30)]


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


def test_a_collective_without_length_between_two_steps_is_of_the_one_that_launched_it() -> None:
    """Number 1 at the end of the first step and number 0 at the start of the second."""
    numbered = [(0, 8), (1, 10), (0, 10), (1, 20)]
    lanes = RankTimeline(
        comm=[CommSpan("all_reduce", n, 8, 1, *(ns,) * 4, number=n) for n, ns in numbered],
        step_ends_ns=[10, 20],
        backward_starts_ns=[0, 10],
    )
    steps = steps_of(lanes)
    assert [[(span.number, span.end_ns) for span in step.comm] for step in steps] == [
        [(0, 8), (1, 10)],
        [(0, 10), (1, 20)],
    ]


@pytest.mark.parametrize("rank", [0, 10, 50, 90, 100])
@pytest.mark.parametrize("values", [(3.0,), (5.0, 1.0), (4.0, 1.0, 9.0, 2.0)])
def test_percentiles_are_numpys(values: tuple[float, ...], rank: float) -> None:
    assert percentile(values, rank) == pytest.approx(float(np.percentile(values, rank)))
