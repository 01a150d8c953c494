"""Measured models: gradient-ready times as our JSON or as CSV, and bare parameter lists.

The JSON (schema `ddpsim.model-profile/1`) lists `parameters` in registration order, each with
`name`, `numel`, `dtype` and `ready_s` (null: never ready), beside `forward_s`, `backward_s`,
`optimizer_s`, `ready_origin` and `batch_per_rank`. A parameter may tell `ddp_hook_s`, what DDP's
hook on it takes on a CPU; `iterations_s`, whole steps as measured ([iteration][rank]), may tell
their spread, `sigma` how far the times may be off, `with_ddp_s` the whole step under DDP on that
device alone, and `later_forward_s` with `later_backward_s` what a second micro-batch of a step
takes, its gradients added to those there. `interference_exponent` is the power of what usual layers
keep of their speed beside all-reduces that this model keeps, `interference_exponent_stderr` its
standard error. `compiled` is true where the times are those under torch.compile; its `ready_s` are
those without, in proportion. `activation_bytes` is what the step's peak holds beyond parameters,
gradients, optimizer state and buffers. `device` and `optimizer` say with which ones all of it was
measured, `warnings` what predictions from it leave out. The CSV has the columns `order`,
`param_name`, `numel`, `ready_us`, in backward order.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from json import JSONDecodeError
from typing import Any, Literal, NamedTuple

from ddpsim.errors import ImportFailedError, shown
from ddpsim.files import json_of
from ddpsim.importers.text import header_of, number, read_text, table, whole
from ddpsim.scenario.quantity import SourceFile

__all__ = [
    "ITEM_BYTES",
    "LATER",
    "SCHEMA",
    "InterferenceExponent",
    "ModelProfile",
    "ProfiledParameter",
    "profile_of",
    "read_parameters",
    "read_profile",
]

# of parameters: torch lets no integers and no bool require gradients (torch/csrc/autograd), and
# complex ones, which it does and DDP reduces, are not modelled
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_BUFFER_DTYPES = (
    *(*ITEM_BYTES, "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
    *("bool", "complex128", "complex64", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"),
    *("float8_e5m2fnuz", "float8_e8m0fnu"),
)
_LIST_COLUMNS = ("name", "shape", "dtype")
# a shape as torch prints it, quoted or not: its commas are not the table's
_TUPLE = re.compile(r',\s*"?(?:torch\.Size)?\(\[?([\d\s,]*)\]?\)"?(?=\s*(?:,|$))')
_WANTED = "a JSON profile or a CSV table"
_LONGEST_S = 1e7
_LARGEST_EXPONENT = 10.0
_SLACK = 1.05  # medians, each taken on its own, need not add up
LATER = ("later_forward_s", "later_backward_s")  # of a second micro-batch: both or neither
SCHEMA = "ddpsim.model-profile/1"
Origin = Literal["first_gradient", "backward_start"]


@dataclass(frozen=True, slots=True)
class ProfiledParameter:
    """One parameter; `ready_s` counts from the profile's origin, None if never ready.

    `ddp_hook_s`: DDP's hook, copy into the bucket and all, under torch's default options; None:
    not measured. `rows`: the extent of the first dimension; None: not told.
    """

    name: str
    numel: int
    dtype: str
    dimensions: int | None = None
    ready_s: float | None = None
    sparse: bool = False
    ddp_hook_s: float | None = None
    rows: int | None = None


class InterferenceExponent(NamedTuple):
    """A power of what usual layers keep of their speed, and its standard error."""

    value: float
    stderr: float


@dataclass(frozen=True)
class ModelProfile:
    """A model as measured on one device; `in_registration_order` is False for a backward list.

    `device`: as torch calls the one that the times were measured on; `scaled_to`: the one that they
    were scaled to from there; `optimizer`: whose step was measured; `activation_bytes`: at the
    step's peak beyond parameters, gradients, optimizer state and buffers. None: not told.
    `sigma`: how far the times may be off, the standard deviation of their logarithm; None: unknown.
    `interference_exponent`: None where it was not measured.
    """

    source: str
    parameters: tuple[ProfiledParameter, ...]
    in_registration_order: bool
    ready_origin: Origin | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    optimizer_s: float | None = None
    batch_per_rank: int | None = None
    buffers: tuple[tuple[str, int], ...] = ()
    iterations_s: tuple[tuple[float, ...], ...] = ()
    device: str | None = None
    optimizer: str | None = None
    activation_bytes: int | None = None
    scaled_to: str | None = None
    sigma: float | None = None
    with_ddp_s: float | None = None
    later_forward_s: float | None = None
    later_backward_s: float | None = None
    interference_exponent: InterferenceExponent | None = None
    compiled: bool = False
    warnings: tuple[str, ...] = ()


def read_profile(source: SourceFile) -> ModelProfile:
    """Read a profile, JSON or CSV by its first character; raises ImportFailedError."""
    return profile_of(source.given, read_text(source, _WANTED))


def profile_of(name: str, text: str) -> ModelProfile:
    """What a file of this name and text says; raises ImportFailedError."""
    return _read_json(name, text) if text.lstrip().startswith("{") else _read_csv(name, text)


def read_parameters(source: SourceFile) -> ModelProfile:
    """Read a parameter list (CSV: name, shape, dtype; shape as in `_shape`)."""
    lines = read_text(source, "a CSV table: name,shape,dtype").splitlines()
    header = header_of(lines, _LIST_COLUMNS) or 0
    rows = [_TUPLE.sub(_without_commas, line) for line in lines[header:]]
    parameters: list[ProfiledParameter] = []
    lines_by_name: dict[str, int] = {}
    for line, row in table(source.given, rows, _LIST_COLUMNS, header + 1):
        first = lines_by_name.setdefault(row["name"], line)
        if first != line:
            raise ImportFailedError(
                source.given,
                f"{shown(row['name'])} stands in line {first} already; a parameter has one row, "
                "shared ones too",
                line,
            )
        shape = _shape(source.given, line, row["shape"])
        whole(source.given, line, math.prod(shape), "the number of elements")
        dtype = _dtype(source.given, line, row["dtype"])
        parameters.append(
            ProfiledParameter(
                *(row["name"], math.prod(shape), dtype, len(shape)),
                rows=shape[0] if shape else None,
            )
        )
    return ModelProfile(source.given, tuple(parameters), in_registration_order=True)


def _without_commas(shape: re.Match[str]) -> str:
    return f",{'x'.join(shape[1].replace(',', ' ').split()) or '()'}"


def _shape(name: str, line: int, text: str) -> list[int]:
    """Extents as `512x512` or `512`, as torch prints them (`(512, 512)`), `()` of a scalar."""
    what = "shape (written 512x512, (512, 512), 512, or () for a scalar)"
    extents = [] if text.strip() == "()" else text.lower().split("x")
    return [whole(name, line, extent, what) for extent in extents]


def _read_csv(name: str, text: str) -> ModelProfile:
    parameters, latest = [], 0.0
    for line, row in table(name, text.splitlines(), ("param_name", "numel", "ready_us")):
        ready_s = number(name, line, row["ready_us"], "ready_us") * 1e-6
        if ready_s < latest:
            raise ImportFailedError(
                name, "ready_us goes back in time: the rows must stand in backward order", line
            )
        latest = ready_s
        numel = whole(name, line, row["numel"], "numel")
        parameters.append(ProfiledParameter(row["param_name"], numel, "float32", ready_s=ready_s))
    if latest == 0:
        raise ImportFailedError(
            name, "ready_us is 0 for every parameter; wanted when each is ready"
        )
    _check_names(name, parameters)
    return ModelProfile(name, tuple(parameters), in_registration_order=False)


def _read_json(name: str, text: str) -> ModelProfile:
    try:
        data = json_of(text)
    except JSONDecodeError as error:
        raise ImportFailedError(name, f"this is not JSON: {error.msg}", error.lineno) from None
    except ValueError as error:
        raise ImportFailedError(name, f"this is no profile: {error}") from None
    if data.get("schema") != SCHEMA:
        found = shown(data.get("schema"))
        raise ImportFailedError(name, f"its schema is {found}; wanted {SCHEMA!r}")
    return _profile(name, data)


def _profile(name: str, data: dict[str, Any]) -> ModelProfile:
    parameters = tuple(_parameter(name, item) for item in _items(name, data, "parameters"))
    _check_names(name, parameters)
    ready = [(p.ready_s, p.name) for p in parameters if p.ready_s is not None]
    if not ready:
        raise ImportFailedError(name, "no parameter has a ready time: all its ready_s are null")
    origin = _value(name, data, "ready_origin", "the profile")
    if origin not in ("first_gradient", "backward_start"):
        wanted = "wanted first_gradient or backward_start"
        raise ImportFailedError(name, f"ready_origin is {shown(origin)}; {wanted}")
    forward_s, backward_s, optimizer_s = (
        _seconds(name, _value(name, data, key, "the profile"), key, above_zero=key != "optimizer_s")
        for key in ("forward_s", "backward_s", "optimizer_s")
    )
    later_forward_s, later_backward_s = _later(name, data)
    latest_s, latest = max(ready)
    if latest_s > _SLACK * backward_s:
        raise ImportFailedError(
            name,
            f"ready_s of {shown(latest)} is {latest_s:g}, but the whole backward takes "
            f"{backward_s:g}; wanted seconds in both",
        )
    return ModelProfile(
        name,
        parameters,
        in_registration_order=True,
        ready_origin=origin,
        forward_s=forward_s,
        backward_s=backward_s,
        optimizer_s=optimizer_s,
        batch_per_rank=whole(
            name, 0, _value(name, data, "batch_per_rank", "the profile"), "batch_per_rank"
        ),
        buffers=tuple(_buffer(name, item) for item in _items(name, data, "buffers", needed=False)),
        iterations_s=_iterations(name, data.get("iterations_s", [])),
        device=_name(name, data, "device"),
        optimizer=_name(name, data, "optimizer"),
        activation_bytes=None
        if data.get("activation_bytes") is None
        else round(number(name, 0, data["activation_bytes"], "activation_bytes")),
        scaled_to=_name(name, data, "scaled_to"),
        sigma=None if data.get("sigma") is None else _sigma(name, data["sigma"]),
        with_ddp_s=_with_ddp(name, data.get("with_ddp_s"), forward_s + backward_s + optimizer_s),
        later_forward_s=later_forward_s,
        later_backward_s=later_backward_s,
        interference_exponent=_exponent(name, data),
        compiled=_flag(name, data, "compiled"),
        warnings=_warnings(name, data.get("warnings", [])),
    )


def _check_names(name: str, parameters: Sequence[ProfiledParameter]) -> None:
    seen: set[str] = set()
    for parameter in parameters:
        if parameter.name in seen:
            raise ImportFailedError(
                name,
                f"lists {shown(parameter.name)} twice; a parameter stands there once, shared ones "
                "too",
            )
        seen.add(parameter.name)


def _name(name: str, data: dict[str, Any], key: str) -> str | None:
    value = data.get(key)
    if value is not None and not (isinstance(value, str) and value):
        raise ImportFailedError(name, f"{key} is {shown(value)}; wanted a name")
    return value


def _flag(name: str, data: dict[str, Any], key: str) -> bool:
    value = data.get(key, False)
    if not isinstance(value, bool):
        raise ImportFailedError(name, f"{key} is {shown(value)}; wanted true or false")
    return value


def _warnings(name: str, lines: Any) -> tuple[str, ...]:
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise ImportFailedError(name, "warnings must be a list of texts")
    return tuple(lines)


def _sigma(name: str, value: Any) -> float:
    return number(name, 0, value, "sigma", most=1.0)


def _exponent(name: str, data: dict[str, Any]) -> InterferenceExponent | None:
    known = data.get("interference_exponent")
    if known is None:
        return None
    value = number(name, 0, known, "interference_exponent", most=_LARGEST_EXPONENT)
    key = "interference_exponent_stderr"
    return InterferenceExponent(
        value, number(name, 0, data.get(key, 0), key, most=_LARGEST_EXPONENT)
    )


def _with_ddp(name: str, value: Any, step_s: float) -> float | None:
    if value is None:
        return None
    with_ddp_s = _seconds(name, value, "with_ddp_s", above_zero=True)
    if with_ddp_s <= step_s:
        raise ImportFailedError(
            name,
            f"with_ddp_s is {with_ddp_s:g}, but the step without DDP takes {step_s:g}: DDP only "
            "adds to it; measure both in turns, or leave it out",
        )
    return with_ddp_s


def _later(name: str, data: dict[str, Any]) -> tuple[float | None, float | None]:
    """A later micro-batch's forward and backward; one does not say the other."""
    given = [key for key in LATER if data.get(key) is not None]
    if not given:
        return None, None
    if len(given) < len(LATER):
        raise ImportFailedError(name, f"{given[0]} stands alone; wanted {' and '.join(LATER)}")
    forward_s, backward_s = (_seconds(name, data[key], key, above_zero=True) for key in LATER)
    return forward_s, backward_s


def _iterations(name: str, rows: Any) -> tuple[tuple[float, ...], ...]:
    """[iteration][rank], as many ranks in each."""
    is_table = isinstance(rows, list) and all(isinstance(row, list) and row for row in rows)
    if not is_table or len({len(row) for row in rows}) > 1:
        raise ImportFailedError(
            name, "iterations_s must be a list of iterations, each a list of one number per rank"
        )
    return tuple(
        tuple(_seconds(name, value, "iterations_s", above_zero=True) for value in row)
        for row in rows
    )


def _parameter(name: str, item: dict[str, Any]) -> ProfiledParameter:
    title = str(_value(name, item, "name", "a parameter"))
    ready_s, hook_s = _value(name, item, "ready_s", shown(title)), item.get("ddp_hook_s")
    numel = whole(name, 0, _value(name, item, "numel", shown(title)), f"numel of {shown(title)}")
    return ProfiledParameter(
        name=title,
        numel=numel,
        dtype=_dtype(name, 0, _value(name, item, "dtype", shown(title))),
        ready_s=None if ready_s is None else _seconds(name, ready_s, f"ready_s of {shown(title)}"),
        sparse=bool(item.get("sparse", False)),
        ddp_hook_s=None
        if hook_s is None
        else _seconds(name, hook_s, f"ddp_hook_s of {shown(title)}"),
        rows=None if item.get("rows") is None else _rows(name, title, item["rows"], numel),
    )


def _rows(name: str, title: str, value: Any, numel: int) -> int:
    rows = whole(name, 0, value, f"rows of {shown(title)}")
    if numel % rows:
        raise ImportFailedError(
            name, f"{shown(title)} has {numel} elements, which are no {rows} rows of equal length"
        )
    return rows


def _seconds(name: str, value: Any, what: str, *, above_zero: bool = False) -> float:
    return number(name, 0, value, what, above_zero=above_zero, most=_LONGEST_S)


def _buffer(name: str, item: dict[str, Any]) -> tuple[str, int]:
    numel = whole(name, 0, _value(name, item, "numel", "a buffer"), "numel of a buffer")
    return _dtype(name, 0, _value(name, item, "dtype", "a buffer"), _BUFFER_DTYPES), numel


def _items(
    name: str, data: dict[str, Any], key: str, *, needed: bool = True
) -> list[dict[str, Any]]:
    items = _value(name, data, key, "the profile") if needed else data.get(key, [])
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ImportFailedError(name, f"{key} must be a list of objects")
    return items


def _value(name: str, item: dict[str, Any], key: str, owner: str) -> Any:
    if key not in item:
        raise ImportFailedError(name, f"{owner} lacks {key!r}; see docs/reference/files.md")
    return item[key]


def _dtype(name: str, line: int, text: Any, known: Collection[str] = ITEM_BYTES.keys()) -> str:
    dtype = str(text).strip().removeprefix("torch.")
    if dtype not in known:
        wanted = f"wanted one of {', '.join(known)}"
        what = f"unknown dtype {shown(text)}"
        if dtype.startswith(("int", "uint", "bool")):
            what = f"{shown(text)} is no dtype of a parameter that gets a gradient"
            wanted = f"list those alone, {wanted}"
        raise ImportFailedError(name, f"{what}; {wanted}", line)
    return dtype
