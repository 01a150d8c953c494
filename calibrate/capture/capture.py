"""A model captured: its step recorded at a few batches and sizes, and written as a document.

Figures are exact polynomials in the batch b and a size x: fixed + x + x^2 + b + b x + b x^2, each
with a coefficient; without a size fixed + b, of a fixed batch fixed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from calibrate.capture.record import Recorded, Recording, record, trained_parameters
from calibrate.capture.shapes import Shapes, tensors
from calibrate.capture.sources import Sizes, Source
from calibrate.measure.errors import MeasureError
from calibrate.measure.model.training import Made, users_own_errors
from ddpsim.scenario.options.model_file import MODEL_SCHEMA
from ddpsim.workload.operators import Operator

Document = dict[str, Any]
Point = tuple[int, int]  # batch and size
Steps = Mapping[Point, Recording]
# of 1, x, x^2, b, b x, b x^2, without zeros at the end
Polynomial = tuple[Fraction, ...]
_POWERS = 3  # of x
_FIT_BATCHES = (2, 3)
_CHECK_BATCH = 5
_ALWAYS: tuple[Recorded, ...] = ("fp32", "amp")  # "half": where the code runs in it


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


def _step_columns(columns: Columns, steps: Steps) -> Document:
    """The object of one step: its rows, and what autograd keeps; raises StructureChanges."""
    recordings = list(steps.values())
    first = recordings[0]
    for other in recordings[1:]:
        _same_structure(first, other)

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


def _same_structure(step: Recording, other: Recording) -> None:
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
    for x, measures in by_size.items():
        if len(measures) < 2 and len(points) > 1:
            continue  # a point that checks
        (low, first), *others = measures
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

    terms, basis = [Fraction(0)] * _POWERS, [Fraction(1)]
    for x, value in points:
        scale = (value - at(x, terms)) / at(x, basis)
        terms = [a + scale * b for a, b in zip_longest(terms, basis, fillvalue=Fraction(0))]
        basis = [
            a - x * b for a, b in zip([Fraction(0), *basis], [*basis, Fraction(0)], strict=True)
        ]
    return terms


@dataclass(frozen=True)
class _Range:
    """What is free: sizes, or none; the batch, or one alone."""

    sizes: Sizes | None
    batch: int | None  # None: it is free

    def points(self, source: Source) -> list[tuple[int, int | None]]:
        """Batches and sizes to record: those of the fit, then those that check it."""
        if self.batch is not None:
            return [(self.batch, source.default)]
        if self.sizes is None:
            return [(batch, source.default) for batch in (*_FIT_BATCHES, _CHECK_BATCH)]
        fitted = [(batch, size) for batch in _FIT_BATCHES for size in self.sizes.points]
        return [*fitted, (_CHECK_BATCH, self.sizes.check)]


@dataclass
class _Recorder:
    """Steps of a source, each recorded once."""

    source: Source
    steps: dict[tuple[int, int | None], dict[Recorded, Recording]] = field(default_factory=dict)
    input_bytes: dict[tuple[int, int | None], int] = field(default_factory=dict)
    model: nn.Module | None = None

    def at(self, point: tuple[int, int | None]) -> dict[Recorded, Recording]:
        """Both recordings at a batch and a size; raises MeasureError."""
        if point not in self.steps:
            made = self.source.make(*point)
            self.model = made.model
            loss = partial(_loss, self.source.title, made)
            with users_own_errors(self.source.title):
                if any(map(is_lazy, made.model.parameters())):
                    with Shapes():
                        made.forward()
                self.steps[point] = {
                    precision: record(made.model, loss, precision) for precision in _ALWAYS
                }
            in_half = made._replace(inputs=tree_map_only(Tensor, _in_half, made.inputs))
            halved = partial(_loss, self.source.title, in_half)
            with suppress(Exception):  # code may make float32 of its own
                self.steps[point]["half"] = record(made.model, halved, "half")
            inputs = tensors(made.inputs)
            self.input_bytes[point] = sum(one.numel() * one.element_size() for one in inputs)
        return self.steps[point]


def _loss(title: str, made: Made) -> Tensor:
    """The loss of a step; raises MeasureError where it is none."""
    loss: object = made.forward()  # what the user's own function returned
    if not isinstance(loss, Tensor):
        wrong = f"is of type {type(loss).__name__}: return a tensor"
    elif loss.numel() != 1:
        wrong = f"has the shape {list(loss.shape)}: return its mean or sum"
    elif not loss.requires_grad:
        wrong = "depends on no parameter that is trained: look for detach()"
    else:
        return loss
    raise MeasureError(f"the loss of {title} {wrong}")


def capture(source: Source) -> Document:
    """The document of a model (schema `ddpsim.model/3`); raises MeasureError with what to do."""
    recorder, reason = _Recorder(source), ""
    ranges = [*(_Range(sizes, None) for sizes in source.sizes), _Range(None, None)]
    for free in (*ranges, _Range(None, source.batch)):  # the freest first
        try:
            return _document(recorder, free, reason)
        except StructureChanges:  # noqa: PERF203 - a handful of ranges
            reason = "other operators run at another one"
        except Inexact:
            reason = "its figures are no polynomial"
        except MeasureError as error:
            if free.batch is not None:
                raise
            reason = f"another one fails: {error}"
    raise ValueError("the last range is one point, which holds itself")


def _document(recorder: _Recorder, free: _Range, reason: str) -> Document:
    source = recorder.source
    points = free.points(source)
    x = free.sizes.x if free.sizes else lambda _: 1
    recorded: dict[Point, dict[Recorded, Recording]] = {}
    for batch, size in points:
        step = recorded[batch, x(size or 1)] = recorder.at((batch, size))
        _same_structure(next(iter(recorded.values()))["fp32"], step["fp32"])
    columns = Columns(list(recorded))
    steps = {
        precision: _step_columns(columns, {at: step[precision] for at, step in recorded.items()})
        for precision in _ALWAYS
    }
    with suppress(KeyError, StructureChanges, Inexact):
        halves = {at: step["half"] for at, step in recorded.items()}
        if _order(halves) == _order({at: step["fp32"] for at, step in recorded.items()}):
            steps["half"] = _step_columns(columns, halves)
    input_bytes = columns.figure(tuple(recorder.input_bytes[point] for point in points))
    first, model = recorder.at(points[0])["fp32"], recorder.model
    if model is None:
        raise ValueError("no step was recorded")
    named = trained_parameters(model)
    everything = dict(model.named_parameters())
    frozen = {name: tensor for name, tensor in everything.items() if name not in named}
    places = [place for place, name in enumerate(everything) if name in frozen]
    sizes = free.sizes.entry(is_free=True) if free.sizes else None
    if not free.sizes and source.sizes:
        sizes = source.sizes[0].entry(is_free=False) | {"because": reason}
    captured = {
        "source": f"{source.origin} on shapes alone, torch {torch.__version__.partition('+')[0]}",
        "parameter_count": sum(tensor.numel() for tensor in named.values()),
        "batch": None if free.batch is None else {"only": free.batch, "because": reason},
        "size": sizes,
        "ready_order": first.ready,
        "forward_modules": first.modules,
        "blocks": [block.name for block in first.blocks],
        "input_bytes": input_bytes,
        "steps": steps,
        **columns.document(),
    }
    return {
        "schema": MODEL_SCHEMA,
        "name": source.name,
        "title": source.title,
        "family": source.family,
        "parameters": {
            **parameter_columns(model, named),
            **({"sparse": sorted(first.sparse)} if first.sparse else {}),
        },
        **({"frozen": tensor_columns(frozen) | {"place": places}} if frozen else {}),
        "buffers": tensor_columns(dict(model.named_buffers())),
        "captured": captured,
    }


def _in_half(tensor: Tensor) -> Tensor:
    return tensor.bfloat16() if tensor.dtype == torch.float32 else tensor


def _order(steps: Steps) -> list[Any]:
    """What a document says once for all of a model's steps."""
    return [
        (one.modules, one.ready, [block.name for block in one.blocks]) for one in steps.values()
    ]
