"""The phases of a simulated step, cut as DDP's own log and the rounds cut a measured one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from calibrate.fit.estimates import trimmed_mean
from ddpsim.result.metrics import Step, steps_of
from ddpsim.result.timeline import Kind, Timeline
from ddpsim.units import NS_PER_S

__all__ = ["Phases", "usual_phases"]

_FORWARD: frozenset[Kind] = frozenset(("data_wait", "stall", "forward", "buffers"))
_BACKWARD: frozenset[Kind] = frozenset(("backward", "bucket_copy"))


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds of a step, in all four.

    `forward` holds the broadcast of buffers; `backward` ends with its last work, hooks and copies
    to buckets included; `exposed` from there until every gradient has been copied back
    (torch's reducer.cpp: the end of the backward's compute, and of its communication).
    """

    forward: float
    backward: float
    exposed: float
    optimizer: float


def usual_phases(timeline: Timeline, ranks: Iterable[int]) -> Phases:
    """What they usually take in the steady steps, the mean over these ranks of the timeline.

    Slow steps are left out as of measured ones (`calibrate.fit.estimates.trimmed_mean`).
    """
    lanes = (steps_of(timeline.ranks[rank])[timeline.warmup :] for rank in ranks)
    each = [
        [trimmed_mean(part) for part in zip(*map(_phases_ns, lane), strict=True)] for lane in lanes
    ]
    return Phases(*(fmean(part) / NS_PER_S for part in zip(*each, strict=True)))


def _phases_ns(step: Step) -> tuple[int, int, int, int]:
    """What lies between two pieces of work belongs to the later one, a wait to the earlier.

    What fully_shard gathers once the backward has begun, before its first work, is the backward's.
    """
    spent = {"forward": 0, "backward": 0, "exposed": 0, "optimizer": 0}
    phase, now = "forward", step.start_ns
    for span in step.compute:
        begun = span.start_ns >= step.backward_start_ns
        if span.kind in _FORWARD:
            phase = "forward"
        elif span.kind in _BACKWARD or (begun and phase == "forward"):
            phase = "backward"
        elif span.kind == "optimizer":
            phase = "optimizer"
        elif phase == "backward":
            phase = "exposed"
        spent[phase] += span.end_ns - now
        now = span.end_ns
    spent["optimizer"] += step.end_ns - now
    return spent["forward"], spent["backward"], spent["exposed"], spent["optimizer"]
