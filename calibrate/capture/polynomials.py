"""Figures of a step as exact polynomials in the batch b and a size x, from steps of a few of both.

A figure is fixed + x + x^2 + b + b x + b x^2, each with a coefficient; without a size it is
fixed + b, of a fixed batch it is fixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import cache

__all__ = ["Inexact", "Point", "Polynomial", "fit", "value_at"]

Point = tuple[int, int]  # batch and size
# of 1, x, x^2, b, b x, b x^2, without zeros at the end
Polynomial = tuple[Fraction, ...]

_POWERS = 3  # of x


class Inexact(Exception):  # noqa: N818 -- it is a finding, and ends as a fixed size
    """No polynomial of the form holds."""


def value_at(polynomial: Polynomial, point: Point) -> Fraction:
    """The figure at a batch and a size."""
    batch, x = point
    terms = (1, x, x * x, batch, batch * x, batch * x * x)
    return sum((a * b for a, b in zip(polynomial, terms, strict=False)), Fraction(0))


def fit(points: Sequence[Point], values: Sequence[int]) -> Polynomial:
    """The polynomial through values at points, of which two have each size but the last few.

    Points that the fit does not need check it: raises Inexact where one is off.
    """
    by_size: dict[int, list[tuple[int, int]]] = {}
    for (batch, x), value in zip(points, values, strict=True):
        by_size.setdefault(x, []).append((batch, value))
    fixed, slope = [], []
    for x, found in by_size.items():
        if len(found) < 2 and len(points) > 1:
            continue  # a point that checks
        (low, first), *others = found
        per_sample = Fraction(0)
        if others:
            high, second = others[0]
            per_sample = Fraction(second - first) / (high - low)
        fixed.append((x, first - low * per_sample))
        slope.append((x, per_sample))
    coefficients = [*_through(tuple(fixed)), *_through(tuple(slope))]
    while coefficients and not coefficients[-1]:
        coefficients.pop()
    polynomial = tuple(coefficients)
    for point, value in zip(points, values, strict=True):
        if value_at(polynomial, point) != value:
            raise Inexact
    return polynomial


def _through(points: tuple[tuple[int, Fraction], ...]) -> list[Fraction]:
    """Ascending coefficients of the polynomial in x through at most three points."""
    if len({value for _, value in points}) == 1:
        return [points[0][1], Fraction(0), Fraction(0)]
    inverse = _inverse(tuple(x for x, _ in points))
    found = [
        sum((weight * value for weight, (_, value) in zip(row, points, strict=True)), Fraction(0))
        for row in inverse
    ]
    return found + [Fraction(0)] * (_POWERS - len(found))


@cache
def _inverse(xs: tuple[int, ...]) -> list[list[Fraction]]:
    """Rows that turn values at `xs` into coefficients, by Lagrange's basis polynomials."""
    rows = [[Fraction(0)] * len(xs) for _ in xs]
    for place, x in enumerate(xs):
        basis = [Fraction(1)]
        for other in xs:
            if other != x:
                raised, scaled = [Fraction(0), *basis], [*(-other * a for a in basis), Fraction(0)]
                basis = [(a + b) / (x - other) for a, b in zip(raised, scaled, strict=True)]
        for power, coefficient in enumerate(basis):
            rows[power][place] = coefficient
    return rows
