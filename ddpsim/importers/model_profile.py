"""Measured models: gradient-ready times as our JSON or as CSV, and bare parameter lists.

The JSON (schema `ddpsim.model-profile/1`) lists `parameters` in registration order, each with
`name`, `numel`, `dtype` and `ready_s` (null: never ready), beside `forward_s`, `backward_s`,
`optimizer_s`, `ready_origin` and `batch_per_rank`. The CSV has the columns `order`, `param_name`,
`numel`, `ready_us`, in backward order.
"""

from __future__ import annotations

import csv
import json
import math
from dataclasses import dataclass
from typing import Any, Literal

from ddpsim.errors import ImportFailedError
from ddpsim.scenario.quantity import SourceFile

__all__ = ["ITEM_BYTES", "ModelProfile", "ProfiledParameter", "read_parameters", "read_profile"]

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4}
_PROFILE_SCHEMA = "ddpsim.model-profile/1"
Origin = Literal["first_gradient", "backward_start"]


@dataclass(frozen=True, slots=True)
class ProfiledParameter:
    """One parameter; `ready_s` counts from the profile's origin, None if never ready."""

    name: str
    numel: int
    dtype: str
    dimensions: int | None = None
    ready_s: float | None = None
    sparse: bool = False


@dataclass(frozen=True)
class ModelProfile:
    """A model as measured on one device; `in_registration_order` is False for a backward list."""

    source: str
    parameters: tuple[ProfiledParameter, ...]
    in_registration_order: bool
    ready_origin: Origin | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    optimizer_s: float | None = None
    batch_per_rank: int | None = None
    buffers: tuple[tuple[str, int], ...] = ()


def read_profile(source: SourceFile) -> ModelProfile:
    """Read a profile, JSON or CSV by its first character; raises ImportFailedError."""
    text = _text(source)
    return (
        _read_json(source.given, text)
        if text.lstrip().startswith("{")
        else _read_csv(source.given, text)
    )


def read_parameters(source: SourceFile) -> ModelProfile:
    """Read a parameter list (CSV: name, shape, dtype; shape as `512x512`, or `512`)."""
    rows = _table(source.given, _text(source), ("name", "shape", "dtype"))
    parameters = []
    for line, row in rows:
        shape = [
            _whole(source.given, line, part, "shape") for part in row["shape"].lower().split("x")
        ]
        dtype = _dtype(source.given, line, row["dtype"])
        parameters.append(ProfiledParameter(row["name"], math.prod(shape), dtype, len(shape)))
    return ModelProfile(source.given, tuple(parameters), in_registration_order=True)


def _text(source: SourceFile) -> str:
    try:
        text = source.path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ImportFailedError(
            source.given, "this is not text; wanted a JSON profile or a CSV table"
        ) from error
    if not text.strip():
        raise ImportFailedError(
            source.given, "the file is empty; wanted a JSON profile or a CSV table"
        )
    return text


def _read_csv(name: str, text: str) -> ModelProfile:
    parameters, latest = [], 0.0
    for line, row in _table(name, text, ("param_name", "numel", "ready_us")):
        ready_s = _number(name, line, row["ready_us"], "ready_us") * 1e-6
        if ready_s < latest:
            raise ImportFailedError(
                name, "ready_us goes back in time: the rows must stand in backward order", line
            )
        latest = ready_s
        numel = _whole(name, line, row["numel"], "numel")
        parameters.append(ProfiledParameter(row["param_name"], numel, "float32", ready_s=ready_s))
    return ModelProfile(name, tuple(parameters), in_registration_order=False)


def _table(name: str, text: str, columns: tuple[str, ...]) -> list[tuple[int, dict[str, str]]]:
    lines = text.splitlines()
    reader = csv.DictReader(lines)
    missing = [column for column in columns if column not in (reader.fieldnames or ())]
    if missing:
        raise ImportFailedError(
            name, f"lacks the column {missing[0]}; wanted {','.join(columns)}", 1
        )
    rows = [(line, row) for line, row in enumerate(reader, 2)]
    for line, row in rows:
        if None in row.values():
            raise ImportFailedError(name, "this row has too few columns", line)
    if not rows:
        raise ImportFailedError(name, "lists no parameter")
    return rows


def _read_json(name: str, text: str) -> ModelProfile:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ImportFailedError(name, f"this is not JSON: {error.msg}", error.lineno) from None
    if data.get("schema") != _PROFILE_SCHEMA:
        raise ImportFailedError(
            name, f"has the schema {data.get('schema')!r}; wanted {_PROFILE_SCHEMA!r}"
        )
    try:
        return _profile(name, data)
    except (KeyError, TypeError, AttributeError) as error:
        raise ImportFailedError(name, f"lacks or misstates {error}; see docs/formats.md") from None


def _profile(name: str, data: dict[str, Any]) -> ModelProfile:
    parameters = tuple(
        ProfiledParameter(
            name=item["name"],
            numel=_whole(name, 0, item["numel"], f"numel of {item['name']}"),
            dtype=_dtype(name, 0, item["dtype"]),
            ready_s=_ready(name, item),
            sparse=bool(item.get("sparse", False)),
        )
        for item in data["parameters"]
    )
    if not any(parameter.ready_s is not None for parameter in parameters):
        raise ImportFailedError(name, "lists no parameter that becomes ready")
    if data["ready_origin"] not in ("first_gradient", "backward_start"):
        raise ImportFailedError(name, "ready_origin must be first_gradient or backward_start")
    times = {
        key: _number(name, 0, data[key], key) for key in ("forward_s", "backward_s", "optimizer_s")
    }
    return ModelProfile(
        name,
        parameters,
        in_registration_order=True,
        ready_origin=data["ready_origin"],
        batch_per_rank=_whole(name, 0, data["batch_per_rank"], "batch_per_rank"),
        buffers=tuple((b["dtype"], int(b["numel"])) for b in data.get("buffers", ())),
        **times,
    )


def _ready(name: str, item: dict[str, Any]) -> float | None:
    ready = item["ready_s"]
    return None if ready is None else _number(name, 0, ready, f"ready_s of {item['name']}")


def _dtype(name: str, line: int, text: str) -> str:
    dtype = text.strip().removeprefix("torch.")
    if dtype not in ITEM_BYTES:
        raise ImportFailedError(
            name, f"unknown dtype {text!r}; wanted one of {', '.join(ITEM_BYTES)}", line
        )
    return dtype


def _number(name: str, line: int, value: Any, what: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise ImportFailedError(name, f"{value!r} is no number for {what}", line)
    return number


def _whole(name: str, line: int, value: Any, what: str) -> int:
    number = _number(name, line, value, what)
    if number != int(number) or number < 1:
        raise ImportFailedError(name, f"{value!r} is no whole number above zero for {what}", line)
    return int(number)
