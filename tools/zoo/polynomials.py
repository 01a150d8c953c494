"""Costs as polynomials in the batch, fitted to steps of a few batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from zoo.recording import Step


def evaluate(coefficients: Sequence[Fraction], x: int) -> Fraction:
    """Value of a polynomial with ascending coefficients at x."""
    return sum((value * x**power for power, value in enumerate(coefficients)), Fraction(0))


def interpolate(points: Sequence[tuple[int, Fraction]]) -> list[Fraction]:
    """Ascending coefficients of the polynomial through all points (Newton's form)."""
    result = [Fraction(0)] * len(points)
    basis = [Fraction(1)]
    for x, y in points:
        scale = (y - evaluate(result, x)) / evaluate(basis, x)
        for power, value in enumerate(basis):
            result[power] += scale * value
        shifted, scaled = [Fraction(0), *basis], [*(-x * value for value in basis), Fraction(0)]
        basis = [a + b for a, b in zip(shifted, scaled, strict=True)]
    return result


@dataclass(frozen=True)
class Fit:
    """fixed(x) + batch * slope(x): two polynomials with ascending exact coefficients."""

    fixed: list[Fraction]
    slope: list[Fraction]

    def at(self, batch: int, x: int) -> Fraction:
        """The value at a batch size and x."""
        return evaluate(self.fixed, x) + batch * evaluate(self.slope, x)

    def folded(self, x: int) -> Fit:
        """The format's form: the batch-independent part frozen at one x."""
        return Fit([evaluate(self.fixed, x)], self.slope)


Steps = dict[tuple[int, int], Step]


Fits = dict[str, list[Fit]]


FIT_BATCHES = (2, 3)
CHECK_BATCH = 5


def fit(grid: dict[tuple[int, int], int]) -> Fit:
    """The exact fit through values at (batch, x), two batch sizes at each x."""
    low, high = FIT_BATCHES
    fixed, slope = [], []
    for x in sorted({x for _, x in grid}):
        per_sample = Fraction(grid[high, x] - grid[low, x], high - low)
        slope.append((x, per_sample))
        fixed.append((x, grid[low, x] - low * per_sample))
    return Fit(interpolate(fixed), interpolate(slope))


def fit_columns(steps: Steps) -> Fits:
    """Fit every segment of every column; steps at (batch, x)."""
    grids = {point: step.values() for point, step in steps.items()}
    first = next(iter(grids.values()))
    return {
        column: [
            fit({point: values[column][row] for point, values in grids.items()})
            for row in range(len(first[column]))
        ]
        for column in first
    }


def error(fits: Fits, step: Step, batch: int, x: int) -> tuple[float, float]:
    """Largest relative error of any one segment's value, and of any column's total."""

    def relative(predicted: Fraction, measured: int) -> float:
        return float(abs(predicted - measured) / max(measured, 1))

    segment = total = 0.0
    for column, values in step.values().items():
        predicted = [one.at(batch, x) for one in fits[column]]
        segment = max([segment, *map(relative, predicted, values)])
        total = max(total, relative(sum(predicted, Fraction(0)), sum(values)))
    return segment, total
