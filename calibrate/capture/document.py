"""Recordings of a step at several batches and sizes as the document of a model."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from calibrate.capture.polynomials import Point, Polynomial, fit
from calibrate.capture.record import Recording
from ddpsim.workload.operators import Operator

__all__ = [
    "Columns",
    "Document",
    "Steps",
    "StructureChanges",
    "parameter_columns",
    "render",
    "same_structure",
    "step_columns",
    "tensor_columns",
]

Document = dict[str, Any]
Steps = Mapping[Point, Recording]
Item = TypeVar("Item", bound=Hashable)


class StructureChanges(Exception):  # noqa: N818 -- it is a finding, and ends as a fixed size
    """Other operators run at another batch or size."""


class _Distinct(Generic[Item]):
    """Numbers things as they come, each once."""

    def __init__(self) -> None:
        self._places: dict[Item, int] = {}

    def place(self, item: Item) -> int:
        """Its number."""
        return self._places.setdefault(item, len(self._places))

    def __iter__(self) -> Iterator[Item]:
        return iter(self._places)


class Columns:
    """What the steps of a model share: distinct polynomials, operators and rows of operators."""

    def __init__(self, points: Sequence[Point]) -> None:
        self._points = points
        self._fits: dict[tuple[int, ...], int] = {}
        self._polynomials = _Distinct[Polynomial]()
        self._operators = _Distinct[tuple[Any, ...]]()
        self._rows = _Distinct[tuple[int, ...]]()

    def figure(self, values: tuple[int, ...]) -> int:
        """The place of the polynomial through a figure's values at all points; raises Inexact."""
        known = self._fits.get(values)
        if known is None:
            known = self._polynomials.place(fit(self._points, values))
            self._fits[values] = known
        return known

    def row(self, rows: Sequence[Sequence[Operator]]) -> int:
        """The place of a row that ran so at each point; raises StructureChanges."""
        if len({len(row) for row in rows}) > 1:
            raise StructureChanges
        return self._rows.place(tuple(map(self._operator, zip(*rows, strict=True))))

    def _operator(self, same: tuple[Operator, ...]) -> int:
        kind = same[0].kind
        if any(one.kind != kind for one in same):
            raise StructureChanges
        figures = (self.figure(values) for values in zip(*(one[1:] for one in same), strict=True))
        return self._operators.place((kind, *figures))

    def document(self) -> Document:
        """The "polynomials", "operators" and "rows" of the document."""
        return {
            "polynomials": [[_number(value) for value in one] for one in self._polynomials],
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


def _number(value: Fraction) -> int | float:
    """An integer if it is one, else the nearest float."""
    return value.numerator if value.denominator == 1 else float(value)


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
