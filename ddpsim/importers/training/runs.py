"""Runs in what a training program printed, and the steady step of the longest one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from ddpsim.units import format_duration
from ddpsim.wording import counted

LONGEST_S = 3.6e6
MAY_ACCUMULATE = (
    "an iteration is a step; if gradients accumulate, it is a micro-batch (ddp.accumulation_steps)"
)
_WIDE = 1.02  # of times, above which both ends are shown
_FEW = 3  # times, of which the first counts where it is no slower
_SLOWER = 1.1  # assumed: of the first steps, which compile and fill caches


class Reading(NamedTuple):
    """A time that a program printed. `at`: epoch and step, which rise as long as a run lasts.

    `step_s`: with the wait for data `data_s` and the optimizer `optimizer_s`, None where they are
    not told. `micro_batches`: of a step. `source`: the rank or the pod that printed it.
    """

    source: str
    at: tuple[int, ...]
    step_s: float
    data_s: float | None = None
    optimizer_s: float | None = None
    micro_batches: int | None = None


class StepLines(NamedTuple):
    """A step that a program printed, in seconds, and what else its lines say.

    `facts` are sentences; `micro_batches`: of a step; `assumed`: what the lines do not tell.
    """

    program: str
    step_s: float
    facts: tuple[str, ...]
    micro_batches: int = 1
    assumed: tuple[str, ...] = ()


class TooLittle(NamedTuple):
    """What was recognised, and what it lacks to tell a step."""

    program: str
    lacks: str


def steady(readings: Sequence[Reading]) -> list[Reading]:
    """Readings without the first half: first steps are slower, and bars average.

    Of few readings those count that are no slower than the later half.
    """
    later = readings[len(readings) // 2 :]
    if len(readings) > _FEW:
        return [*later]
    most = _SLOWER * median(each.step_s for each in later)
    return [each for each in readings if each.step_s <= most]


def middle(readings: Sequence[Reading]) -> float:
    """The median of the steady steps."""
    return median(each.step_s for each in steady(readings))


def span(times_s: Sequence[float]) -> list[str]:
    """The shortest and the longest of times, where they differ."""
    least, most = min(times_s), max(times_s)
    if most < _WIDE * least:
        return []
    return [f"times from {format_duration(least)} to {format_duration(most)}"]


def longest(readings: Iterable[Reading]) -> tuple[list[Reading], list[str]]:
    """The run with the most steps, and what to say of the others.

    Each source has runs of its own. A count that falls begins a run.
    """
    runs: dict[str, list[list[Reading]]] = defaultdict(list)
    for each in readings:
        of_source = runs[each.source]
        if not of_source or each.at < of_source[-1][-1].at:
            of_source.append([])
        of_source[-1].append(each)
    every = [run for of_source in runs.values() for run in of_source]
    taken = max(reversed(every), key=_steps)
    return taken, apart([run for run in every if run is not taken], middle(taken))


def _steps(run: Sequence[Reading]) -> tuple[object, ...]:
    first, last = run[0].at, run[-1].at
    risen = tuple(b - a for a, b in zip(first, last, strict=True))
    return risen, len(run), last


def apart(others: Sequence[Sequence[Reading]], step_s: float) -> list[str]:
    """What is said of runs that are left out: how many, and the steps that differ."""
    if not others:
        return []
    times = [middle(run) for run in others]
    differ = [time_s for time_s in times if not 1 / _SLOWER < time_s / step_s < _SLOWER]
    said = f"left out: {counted(len(others), 'other run')}"
    if not differ:
        return [f"{said} with the same step"]
    ends = dict.fromkeys(format_duration(time_s) for time_s in (min(differ), max(differ)))
    return [f"{said}, {len(differ)} with another step ({' to '.join(ends)})"]
