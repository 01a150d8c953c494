"""A model captured: its step recorded at a few batches and sizes, and written as a document."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from calibrate.capture.document import (
    Columns,
    Document,
    Inexact,
    Point,
    Steps,
    StructureChanges,
    parameter_columns,
    same_structure,
    step_columns,
    tensor_columns,
)
from calibrate.capture.record import Recorded, Recording, record, trained_parameters
from calibrate.capture.shapes import Shapes, tensors
from calibrate.capture.sources import Sizes, Source
from calibrate.measure.errors import MeasureError
from calibrate.measure.model.training import Made
from calibrate.measure.model.user_code import users_own_errors
from ddpsim.scenario.options.model_file import MODEL_SCHEMA

_FIT_BATCHES = (2, 3)
_CHECK_BATCH = 5
_ALWAYS: tuple[Recorded, ...] = ("fp32", "amp")  # "half": where the code runs in it


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
    for free in _ranges(source):
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


def _ranges(source: Source) -> Iterator[_Range]:
    """What to try, the freest first."""
    for sizes in source.sizes:
        yield _Range(sizes, None)
    yield _Range(None, None)
    yield _Range(None, source.batch)


def _document(recorder: _Recorder, free: _Range, reason: str) -> Document:
    source = recorder.source
    points = free.points(source)
    x = free.sizes.x if free.sizes else lambda _: 1
    recorded: dict[Point, dict[Recorded, Recording]] = {}
    for batch, size in points:
        step = recorded[batch, x(size or 1)] = recorder.at((batch, size))
        same_structure(next(iter(recorded.values()))["fp32"], step["fp32"])
    columns = Columns(list(recorded))
    steps = {
        precision: step_columns(columns, {at: step[precision] for at, step in recorded.items()})
        for precision in _ALWAYS
    }
    with suppress(KeyError, StructureChanges, Inexact):
        halves = {at: step["half"] for at, step in recorded.items()}
        if _order(halves) == _order({at: step["fp32"] for at, step in recorded.items()}):
            steps["half"] = step_columns(columns, halves)
    input_bytes = columns.figure(tuple(recorder.input_bytes[point] for point in points))
    first, model = recorder.at(points[0])["fp32"], recorder.model
    if model is None:
        raise ValueError("no step was recorded")
    named = trained_parameters(model)
    everything = dict(model.named_parameters())
    frozen = {name: tensor for name, tensor in everything.items() if name not in named}
    places = [place for place, name in enumerate(everything) if name in frozen]
    captured = {
        "source": f"{source.told} on shapes alone, torch {torch.__version__.partition('+')[0]}",
        "parameter_count": sum(tensor.numel() for tensor in named.values()),
        "batch": None if free.batch is None else {"only": free.batch, "because": reason},
        "size": _size(source, free, reason),
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


def _size(source: Source, free: _Range, reason: str) -> dict[str, Any] | None:
    if free.sizes:
        return free.sizes.entry(is_free=True)
    if not source.sizes:
        return None
    return source.sizes[0].entry(is_free=False) | {"because": reason}
