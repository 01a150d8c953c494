"""What a step must keep to: `fits, step < 500 ms, exposed < 10 %`."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from ddpsim.result.model import Memory, Result
from ddpsim.units import (
    format_bytes,
    format_duration,
    format_number,
    format_percent,
    parse_bytes,
    parse_duration,
)

_CONDITION = re.compile(r"(?P<name>[a-z]+)\s*(?P<sign><=|>=|<|>)\s*(?P<limit>.+)")
_SIGNS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_WANTED = (
    "write conditions with commas between: fits, step < 500 ms, exposed < 10 %, memory < 70 GiB, "
    "scaling > 80 %, mfu > 30 %, throughput > 1000 (samples/s)"
)


@dataclass(frozen=True)
class _Figure:
    """A figure of a result, how its limit is read, and how both are said."""

    of: Callable[[Result], float | None]
    read: Callable[[str], float]
    say: Callable[[float], str]


def _share(text: str) -> float:
    return _number(text.removesuffix("%")) / 100


def _number(text: str) -> float:
    return float(text.removesuffix("samples/s"))


_FIGURES = {
    "step": _Figure(lambda r: r.iteration_time_s.mean, parse_duration, format_duration),
    "memory": _Figure(lambda r: r.memory_bytes_per_gpu.total, parse_bytes, format_bytes),
    "throughput": _Figure(lambda r: r.throughput_samples_per_s, _number, format_number),
    "scaling": _Figure(lambda r: r.scaling_efficiency, _share, format_percent),
    "mfu": _Figure(lambda r: r.training.mfu if r.training else None, _share, format_percent),
    "exposed": _Figure(
        lambda r: r.exposed_comm_s / r.iteration_time_s.mean, _share, format_percent
    ),
}
_EXPOSED_TIME = _Figure(lambda r: r.exposed_comm_s, parse_duration, format_duration)


@dataclass(frozen=True)
class Requirement:
    """One condition; without a figure: that the job fits into memory."""

    text: str
    figure: _Figure | None = None
    sign: str = "<"
    limit: float = 0.0

    def failure(self, result: Result) -> str | None:
        """Why a result does not meet it; None where it does."""
        if self.figure is None:
            return memory_failure(result.memory_bytes_per_gpu)
        value = self.figure.of(result)
        if value is None:
            return f"{self.text} cannot be told: it is not known here"
        if _SIGNS[self.sign](value, self.limit):
            return None
        return f"{self.text} is not met: it is {self.figure.say(value)}"


def memory_failure(memory: Memory) -> str | None:
    """Why a job does not fit on its device; None where it does."""
    if memory.fits:
        return None
    needed, there = format_bytes(memory.total), format_bytes(memory.device)
    return f"does not fit: {needed} of {there} a GPU"


def parse_requirements(text: str) -> tuple[Requirement, ...]:
    """The conditions in a text; raises ValueError for what is none."""
    return tuple(_parsed(" ".join(part.split())) for part in text.split(","))


def _parsed(text: str) -> Requirement:
    if text == "fits":
        return Requirement(text)
    condition = _CONDITION.fullmatch(text)
    figure = _FIGURES.get(condition["name"]) if condition else None
    if not condition or not figure:
        raise ValueError(f"{text!r} is no condition; {_WANTED}")
    limit = condition["limit"].strip()
    if condition["name"] == "exposed" and not limit.endswith("%"):
        figure = _EXPOSED_TIME
    try:
        return Requirement(text, figure, condition["sign"], figure.read(limit))
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None
