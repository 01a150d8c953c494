"""Recordings of a step at several batches and sizes as the document of a model.

Figures are exact polynomials in the batch b and a size x: fixed + x + x^2 + b + b x + b x^2, each
with a coefficient; without a size fixed + b, of a fixed batch fixed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn

from calibrate.capture.record import Recording
from ddpsim.workload.operators import Operator

Document = dict[str, Any]
Point = tuple[int, int]  # batch and size

Steps = Mapping[Point, Recording]

# of 1, x, x^2, b, b x, b x^2, without zeros at the end
Polynomial = tuple[Fraction, ...]
_POWERS = 3  # of x


class StructureChanges(Exception):  # noqa: N818 -- it is a finding, and ends as a fixed size
    """Other operators run at another batch or size."""


class Columns:
    """What the steps of a model share: polynomials, operators and rows, each once."""

    def __init__(self, points: Sequence[Point]) -> None:
        self._points = points
        self._fits: dict[tuple[int, ...], int] = {}
        self._polynomials: dict[Polynomial, int] = {}
        self._operators: dict[tuple[Any, ...], int] = {}
        self._rows: dict[tuple[int, ...], int] = {}

    def figure(self, values: tuple[int, ...]) -> int:
        """The place of the polynomial through a figure's values at all points; raises Inexact."""
        if values not in self._fits:
            fitted = fit(self._points, values)
            self._fits[values] = self._polynomials.setdefault(fitted, len(self._polynomials))
        return self._fits[values]

    def row(self, rows: Sequence[Sequence[Operator]]) -> int:
        """The place of a row that ran so at each point; raises StructureChanges."""
        if len({len(row) for row in rows}) > 1:
            raise StructureChanges
        operators = tuple(map(self._operator, zip(*rows, strict=True)))
        return self._rows.setdefault(operators, len(self._rows))

    def _operator(self, same: tuple[Operator, ...]) -> int:
        kind = same[0].kind
        if any(one.kind != kind for one in same):
            raise StructureChanges
        figures = (self.figure(values) for values in zip(*(one[1:] for one in same), strict=True))
        return self._operators.setdefault((kind, *figures), len(self._operators))

    def document(self) -> Document:
        """The "polynomials", "operators" and "rows" of the document."""
        return {
            "polynomials": [
                [a.numerator if a.denominator == 1 else float(a) for a in one]
                for one in self._polynomials
            ],
            "operators": [list(one) for one in self._operators],
            "rows": [list(one) for one in self._rows],
        }


def step_columns(columns: Columns, steps: Steps) -> Document:
    """The object of one step: its rows, and what autograd keeps; raises StructureChanges."""
    recordings = list(steps.values())
    first = recordings[0]
    for other in recordings[1:]:
        same_structure(first, other)

    def rows(phase: str) -> list[int]:
        runs = zip(*(getattr(one, phase) for one in recordings), strict=True)
        return [columns.row(same) for same in runs]

    def figures(name: str) -> list[int]:
        return [
            columns.figure(values)
            for values in zip(*(getattr(one, name) for one in recordings), strict=True)
        ]

    return {
        "forward": rows("forward"),
        "backward": rows("backward"),
        "saved_bytes": figures("saved_bytes"),
        "own_bytes": figures("own_bytes"),
        "others_bytes": figures("others_bytes"),
        "rerun": [[block.row, block.operators] for block in first.blocks],
    }


def same_structure(step: Recording, other: Recording) -> None:
    """Raise StructureChanges where two steps are not the same but for their figures."""
    if _structure(step) != _structure(other):
        raise StructureChanges


def _structure(step: Recording) -> tuple[Any, ...]:
    blocks = [(block.name, block.row, block.operators) for block in step.blocks]
    lengths = [len(row) for row in (*step.forward, *step.backward)]
    return step.modules, step.ready, lengths, blocks


def parameter_columns(model: nn.Module, named: Mapping[str, Tensor]) -> Document:
    """Tensor columns, and the class of the module that owns each."""
    owners = [type(model.get_submodule(name.rpartition(".")[0])).__name__ for name in named]
    return {**tensor_columns(named), "module": owners}


def tensor_columns(named: Mapping[str, Tensor]) -> Document:
    """Name, shape and dtype of named tensors; one dtype where all have it."""
    dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in named.values()]
    shapes = [list(tensor.shape) for tensor in named.values()]
    dtype = dtypes[0] if len(set(dtypes)) == 1 else dtypes
    return {"name": list(named), "shape": shapes, "dtype": dtype}


def render(value: Any, indent: str = "") -> str:
    """JSON text with one line per key and every array on one line."""
    if not isinstance(value, dict):
        return json.dumps(value, separators=(",", ":"))
    inner = indent + "  "
    lines = [f"{inner}{json.dumps(key)}: {render(item, inner)}" for key, item in value.items()]
    return "{\n" + ",\n".join(lines) + "\n" + indent + "}" if lines else "{}"


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
    coefficients = [*_through(fixed), *_through(slope)]
    while coefficients and not coefficients[-1]:
        coefficients.pop()
    polynomial = tuple(coefficients)
    for point, value in zip(points, values, strict=True):
        if value_at(polynomial, point) != value:
            raise Inexact
    return polynomial


def _through(points: Sequence[tuple[int, Fraction]]) -> list[Fraction]:
    """Ascending coefficients of the polynomial in x through at most three points, by Newton."""

    def at(x: int, coefficients: Sequence[Fraction]) -> Fraction:
        return sum((a * x**power for power, a in enumerate(coefficients)), Fraction(0))

    found, basis = [Fraction(0)] * _POWERS, [Fraction(1)]
    for x, value in points:
        scale = (value - at(x, found)) / at(x, basis)
        found = [a + scale * b for a, b in zip_longest(found, basis, fillvalue=Fraction(0))]
        basis = [
            a - x * b for a, b in zip([Fraction(0), *basis], [*basis, Fraction(0)], strict=True)
        ]
    return found
