"""The samples that a target needs by global batch, from measured steps."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import exp, log
from pathlib import Path

from ddpsim.errors import ImportFailedError, InputError, blamed_on
from ddpsim.importers.text import read_text, table, whole
from ddpsim.scenario.quantity import SourceFile

__all__ = ["StepsByBatch", "read_steps_by_batch"]

_COLUMNS = ("batch", "steps")
_NOISE = 0.8  # of the samples that a smaller batch needs (assumed): fewer is another target


@dataclass(frozen=True)
class StepsByBatch:
    """Measured steps to one target, `points` of global batch and steps, by batch."""

    source: str
    points: tuple[tuple[int, int], ...]

    def growth(self, batch: int) -> float:
        """How many times the samples of the smallest measured batch another one needs.

        Between two measured batches samples are a power of the batch. Raises InputError outside.
        """
        (least, steps), (most, _) = self.points[0], self.points[-1]
        if not least <= batch <= most:
            raise InputError(
                "steps_by_batch",
                f"a global batch of {batch:,} lies outside of {least:,} to {most:,}, which "
                f"{self.source} has steps for",
            )
        return self._samples(batch) / (least * steps)

    def _samples(self, batch: int) -> float:
        below = max(point for point in self.points if point[0] <= batch)
        above = min(point for point in self.points if point[0] >= batch)
        samples = [size * steps for size, steps in (below, above)]
        if below == above:
            return float(samples[0])
        part = log(batch / below[0]) / log(above[0] / below[0])
        return exp((1 - part) * log(samples[0]) + part * log(samples[1]))


def read_steps_by_batch(path: str | Path) -> StepsByBatch:
    """A CSV with the columns batch and steps; raises InputError with file, line and fault."""
    name, points = str(path), dict[int, int]()
    with blamed_on("steps_by_batch"):
        if not Path(path).is_file():
            raise ImportFailedError(name, f"no such file; wanted a CSV of {','.join(_COLUMNS)}")
        content = read_text(SourceFile(name, Path(path)), "a CSV of batch,steps")
        for line, row in table(name, content.splitlines(), _COLUMNS):
            batch, steps = (whole(name, line, row[column], column) for column in _COLUMNS)
            if batch in points:
                raise ImportFailedError(name, f"has the batch {batch} twice; keep one", line)
            points[batch] = steps
        if len(points) == 1:
            raise ImportFailedError(name, "has one batch; two at least have others between them")
        by_batch = tuple(sorted(points.items()))
        _check_is_plausible(name, by_batch)
    return StepsByBatch(name, by_batch)


def _check_is_plausible(name: str, points: tuple[tuple[int, int], ...]) -> None:
    """A larger batch needs no more steps, and no fewer samples, to the same target."""
    for (smaller, steps), (batch, fewer) in pairwise(points):
        told = f"has {steps:,} steps at batch {smaller:,} and {fewer:,} at {batch:,}"
        if fewer > steps:
            raise ImportFailedError(name, f"{told}; wanted no more at a larger batch")
        if batch * fewer < _NOISE * smaller * steps:
            raise ImportFailedError(
                name,
                f"{told}, which are fewer samples; wanted steps to one and the same target",
            )
