"""Step times in what training programs print: nanoGPT, torchtitan, Lightning, and tqdm's bars.

Sources of the lines: nanoGPT train.py; torchtitan components/metrics.py and tools/logging.py;
tqdm's bar_format, which Lightning, accelerate's examples and transformers' Trainer print.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timezone
from itertools import pairwise
from math import nan
from statistics import median
from typing import NamedTuple

__all__ = ["StepLines", "step_lines"]

_NUMBER = r"(\d{1,12}(?:\.\d{1,9})?)"
_NANOGPT = re.compile(rf"^iter (\d{{1,12}}): loss [^,\n]{{1,30}}, time {_NUMBER}ms", re.MULTILINE)
_TITAN = re.compile(
    r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) - \w+ - INFO - (?:\x1b\[\d+m)*step:\s*(\d{1,12})\b"
)
_BAR = re.compile(
    rf"\d{{1,12}}/\d{{1,12}} \[[\d:]{{1,12}}<[\d:?]{{1,12}}, +{_NUMBER} ?(it/s|s/it)"
    r"([^\n\r]{0,80})"
)
_ENOUGH = 3  # times, below which lines may be of anything
_LONGEST_S = 3.6e6


class StepLines(NamedTuple):
    """The program that printed them, how many there are, and the median step in seconds."""

    program: str
    lines: int
    step_s: float


def step_lines(text: str) -> StepLines | None:
    """The lines of the first program that printed enough of them; None: none did.

    Of the times the later half counts: the first steps are slower, and bars average.
    """
    for program, times_s in _found(text):
        steady_s = [s for s in times_s[len(times_s) // 2 :] if 0 < s < _LONGEST_S]
        if len(times_s) >= _ENOUGH and steady_s:
            return StepLines(program, len(times_s), median(steady_s))
    return None


def _found(text: str) -> Iterator[tuple[str, list[float]]]:
    yield "nanoGPT", [float(ms) * 1e-3 for _, ms in _NANOGPT.findall(text)]
    yield "torchtitan", list(_between_stamps(text))
    bars = _BAR.findall(text)
    is_lightning = any("v_num=" in rest for *_, rest in bars)
    program = "Lightning" if is_lightning else "tqdm (accelerate, transformers' Trainer)"
    yield program, [_seconds(number, unit) for number, unit, _ in bars]


def _between_stamps(text: str) -> Iterator[float]:
    """torchtitan prints a rate of tokens: the stamps of its lines tell the steps."""
    stamped = [(_moment_s(stamp), int(step)) for stamp, step in _TITAN.findall(text)]
    for (before_s, first), (after_s, last) in pairwise(stamped):
        if last > first:
            yield (after_s - before_s) / (last - first)


def _moment_s(stamp: str) -> float:
    """Seconds since some moment; differences alone count. Not a number for no moment."""
    try:
        return (
            datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S,%f")
            .replace(tzinfo=timezone.utc)
            .timestamp()
        )
    except ValueError:
        return nan


def _seconds(number: str, unit: str) -> float:
    value = float(number)
    if unit == "s/it":
        return value
    return 1 / value if value else 0.0
