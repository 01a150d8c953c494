"""A model's table: its parameters, and its costs as polynomials."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo.blocks import Block
from zoo.models import Spec
from zoo.operator_costs import COSTS, Cost
from zoo.polynomials import CHECK_BATCH, FIT_BATCHES, Fit, Fits, Steps, error, fit_columns
from zoo.recording import measure, trained_parameters

SCHEMA = "ddpsim.model/1"


def dtype_column(group: Iterable[Tensor]) -> Any:
    """The dtypes as a list of names, or one name if they are all equal."""
    names = [str(tensor.dtype).removeprefix("torch.") for tensor in group]
    return names[0] if len(set(names)) == 1 else names


def tensor_columns(named: dict[str, Any]) -> dict[str, Any]:
    """Name, shape and dtype columns of named tensors."""
    shapes = [list(tensor.shape) for tensor in named.values()]
    return {"name": list(named), "shape": shapes, "dtype": dtype_column(named.values())}


def parameter_columns(model: nn.Module) -> dict[str, Any]:
    """The "parameters" object: tensor columns and the class of the owning module."""
    named = trained_parameters(model)
    owners = [type(model.get_submodule(name.rpartition(".")[0])).__name__ for name in named]
    return {**tensor_columns(named), "module": owners}


def number(value: Fraction) -> int | float:
    """An integer if integral, else the float that is exactly equal."""
    if value.denominator == 1:
        return value.numerator
    if Fraction(float(value)) != value:
        raise ValueError(f"{value} is not exact in binary")
    return float(value)


def coefficients(fits: list[Fit]) -> dict[str, list[int | float]]:
    """The fixed, c0, c1 and c2 columns of folded fits; all-zero columns are left out."""
    columns = {"fixed": [number(one.fixed[0]) for one in fits]}
    for power in range(len(fits[0].slope)):
        columns[f"c{power}"] = [number(one.slope[power]) for one in fits]
    return {name: values for name, values in columns.items() if any(values)}


def phase_columns(phase: str, segments: list[Cost], fits: Fits) -> dict[str, Any]:
    """The cost columns of the "forward" or "backward" object."""
    costs = {cost: coefficients(fits[f"{phase}.{cost}"]) for cost in COSTS}
    return {**costs, "kernels": [segment.kernels for segment in segments]}


def block_columns(blocks: list[Block], fits: Fits) -> dict[str, Any]:
    """The "blocks" object: what a checkpoint of each block does not keep, and what it reruns.

    "others_bytes" has one row more, of the end of the forward; "rerun" is the last row's.
    """
    if not blocks:
        return {"name": []}
    kept = {key: coefficients(fits[key]) for key in ("own_bytes", "others_bytes")}
    rerun = phase_columns("rerun", [block.rerun for block in blocks], fits)
    return {"name": [block.name for block in blocks], **kept, "rerun": rerun}


def source(spec: Spec) -> str:
    """Where the numbers come from, with versions."""
    version = import_module(spec.library).__version__.partition("+")[0]
    torch_version = torch.__version__.partition("+")[0]
    return (
        f"{spec.library} {version} {spec.call} on the meta device, torch {torch_version}; "
        "FLOPs by torch.utils.flop_counter"
    )


@dataclass(frozen=True)
class Table:
    """The JSON object of one model, and how exact its polynomials are."""

    content: dict[str, Any]
    exactness: str


def measure_all(
    spec: Spec, model: nn.Module, batches: Iterable[int], sizes: Iterable[int]
) -> Steps:
    """Steps at every (batch, x) of a grid; the same operators must run in all of them."""
    grid = [(batch, size) for size in sizes for batch in batches]
    steps = {
        (batch, spec.size.x(size)): measure(model, spec.loss(model, batch, size))
        for batch, size in grid
    }
    first, *others = steps.values()
    if any(step.structure() != first.structure() for step in others):
        raise RuntimeError(f"{spec.name}: the operators depend on the batch or the size")
    return steps


def check(spec: Spec, model: nn.Module, fits: Fits, folded: Fits) -> str:
    """Compare with steps that the fit has not seen; say how exact the folded form is."""
    steps = measure_all(spec, model, [CHECK_BATCH], {spec.size.default, spec.size.check})
    for (batch, x), step in steps.items():
        if error(fits, step, batch, x) != (0.0, 0.0):
            raise RuntimeError(f"{spec.name}: no exact polynomial at batch {batch}, x {x}")
    batch, x = CHECK_BATCH, spec.size.x(spec.size.check)
    segment, total = error(folded, steps[batch, x], batch, x)
    if segment == 0.0:
        return "exact"
    where = f"batch {batch} and {spec.size.entry['key']} {spec.size.check}"
    errors = f"totals within {total:.2g}, segments within {segment:.2g}"
    return f"exact at the default size; at {where} {errors}"


def make_table(spec: Spec) -> Table:
    """Measure one model."""
    with torch.device("meta"):
        model = spec.build().train()
    steps = measure_all(spec, model, FIT_BATCHES, spec.size.points)
    step = next(iter(steps.values()))
    fits = fit_columns(steps)
    default = spec.size.x(spec.size.default)
    folded = {column: [one.folded(default) for one in rows] for column, rows in fits.items()}
    saved = {key: values[0] for key, values in coefficients(folded["saved_bytes"]).items()}
    content = {
        "schema": SCHEMA,
        "name": spec.name,
        "title": spec.title,
        "family": spec.family,
        "source": source(spec),
        "parameter_count": sum(tensor.numel() for tensor in trained_parameters(model).values()),
        "size": spec.size.entry,
        "parameters": parameter_columns(model),
        "buffers": tensor_columns(dict(model.named_buffers())),
        "ready_order": step.ready,
        "forward": {"module": step.modules, **phase_columns("forward", step.forward, folded)},
        "backward": phase_columns("backward", step.backward, folded),
        "saved_bytes": saved,
        "blocks": block_columns(step.blocks, folded),
    }
    return Table(content, check(spec, model, fits, folded))


def render(value: Any, indent: str = "") -> str:
    """JSON text with one line per key and every array on one line."""
    if not isinstance(value, dict):
        return json.dumps(value, separators=(",", ":"))
    inner = indent + "  "
    lines = [f"{inner}{json.dumps(key)}: {render(item, inner)}" for key, item in value.items()]
    return "{\n" + ",\n".join(lines) + "\n" + indent + "}" if lines else "{}"


def write(path: Path, text: str) -> None:
    """Replace a file in one step."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
