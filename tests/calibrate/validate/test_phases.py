"""A simulated step is cut where DDP's own log cuts a real one."""

from __future__ import annotations

import pytest

from calibrate.validate.report import Split
from calibrate.validate.steady_step import usual_phases
from ddpsim.result.timeline import RankTimeline, Span, Timeline


def _split(forward: float, backward: float, exposed: float, optimizer: float) -> Split:
    parts = {"forward": forward, "backward": backward, "exposed": exposed, "optimizer": optimizer}
    return Split(**parts, all_reduce=None)


def _lane(backward_ns: int) -> RankTimeline:
    """Two alike steps: buffers, forward, backward with a copy, waits and copies back, optimizer."""
    lane = RankTimeline()
    for _ in range(2):
        now = lane.step_ends_ns[-1] if lane.step_ends_ns else 0
        for kind, length_ns in (
            ("buffers", 1),
            ("comm_wait", 2),  # of the buffers: DDP's forward
            ("forward", 10),
            ("backward", backward_ns),
            ("bucket_copy", 3),
            ("comm_wait", 7),
            ("copy_back", 4),
            ("comm_wait", 5),
            ("copy_back", 4),
            ("optimizer", 6),
        ):
            if kind == "backward":
                lane.backward_starts_ns.append(now)
                now += 2  # launches it: the backward's
            if kind == "optimizer":
                now += 1
            lane.compute.append(Span(kind, now, now + length_ns))  # type: ignore[arg-type]
            now += length_ns
        lane.step_ends_ns.append(now)
    return lane


def test_copies_back_are_exposed_and_waits_belong_to_what_came_before() -> None:
    timeline = Timeline({0: _lane(20)}, 1, 0, [0])
    assert usual_phases(timeline, (0,)) == _split(13e-9, 25e-9, 20e-9, 7e-9)


def test_ranks_count_alike() -> None:
    timeline = Timeline({0: _lane(20), 1: _lane(30)}, 1, 0, [0, 0])
    assert usual_phases(timeline, (0, 1)).backward == pytest.approx(30e-9)
    assert usual_phases(timeline, (1,)).backward == pytest.approx(35e-9)


def test_micro_batches_add_up() -> None:
    lane, now = RankTimeline(backward_starts_ns=[30]), 0
    for kind in ("forward", "backward", "forward", "backward", "comm_wait", "optimizer"):
        lane.compute.append(Span(kind, now, now + 10))  # type: ignore[arg-type]
        now += 10
    lane.step_ends_ns.append(now)
    found = usual_phases(Timeline({0: lane}, 0, 0, [0]), (0,))
    assert found == _split(20e-9, 20e-9, 10e-9, 10e-9)


def test_what_is_gathered_for_the_backward_is_its_own() -> None:
    """fully_shard waits for parameters, and copies them out, before the backward's first work."""
    lane, now = RankTimeline(backward_starts_ns=[20]), 0
    for kind in ("comm_wait", "forward", "comm_wait", "unshard", "backward", "optimizer"):
        lane.compute.append(Span(kind, now, now + 10))  # type: ignore[arg-type]
        now += 10
    lane.step_ends_ns.append(now)
    found = usual_phases(Timeline({0: lane}, 0, 0, [0]), (0,))
    assert (found.forward, found.optimizer) == (20e-9, 10e-9)
    assert found.backward + found.exposed == pytest.approx(30e-9)
