"""Measured models: a model's file or a CSV of gradient-ready times, and bare parameter lists.

The CSV has the columns `order`, `param_name`, `numel`, `ready_us`, in backward order.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

from ddpsim.errors import ImportFailedError, shown
from ddpsim.importers.text import ForeignFile, header_of, read_text
from ddpsim.scenario.options.model_file import ITEM_BYTES, ModelFile, parse_model_file
from ddpsim.scenario.quantity import SourceFile

_LIST_COLUMNS = ("name", "shape", "dtype")
# a shape as torch prints it, quoted or not: its commas are not the table's
_TUPLE = re.compile(r',\s*"?(?:torch\.Size)?\(\[?([\d\s,]*)\]?\)"?(?=\s*(?:,|$))')
_WANTED = "a model's file or a CSV table"
Origin = Literal["first_gradient", "backward_start"]


@dataclass(frozen=True, slots=True)
class ProfiledParameter:
    """One parameter; `ready_s` counts from the profile's origin, None if never ready.

    `ddp_hook_s`: DDP's hook, copy into the bucket and all, under torch's default options; None:
    not measured. `shape`: its extents; None: not told.
    """

    name: str
    numel: int
    dtype: str
    ready_s: float | None = None
    sparse: bool = False
    ddp_hook_s: float | None = None
    shape: tuple[int, ...] | None = None

    @property
    def dimensions(self) -> int | None:
        """How many it has; None: not told."""
        return None if self.shape is None else len(self.shape)


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
    seq_len: int | None = None
    image_size: int | None = None
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
    if not text.lstrip().startswith("{"):
        return _read_csv(name, text)
    try:
        return measured_profile(name, parse_model_file(text))
    except ValueError as error:
        raise ImportFailedError(name, str(error)) from None


def read_parameters(source: SourceFile) -> ModelProfile:
    """Read a parameter list (CSV: name, shape, dtype; shape as in `_shape`)."""
    lines = read_text(source, "a CSV table: name,shape,dtype").splitlines()
    header, file = header_of(lines, _LIST_COLUMNS) or 0, ForeignFile(source.given)
    rows = [
        _TUPLE.sub(lambda at: f",{'x'.join(at[1].replace(',', ' ').split()) or '()'}", line)
        for line in lines[header:]
    ]
    parameters: list[ProfiledParameter] = []
    lines_by_name: dict[str, int] = {}
    for line, row in file.table(rows, _LIST_COLUMNS, header + 1):
        first = lines_by_name.setdefault(row["name"], line)
        if first != line:
            already = f"{shown(row['name'])} stands in line {first} already"
            raise file.wrong(f"{already}; a parameter has one row, shared ones too", line)
        shape = _shape(file, line, row["shape"])
        numel = file.whole(line, math.prod(shape), "the number of elements")
        dtype = _dtype(file, line, row["dtype"])
        parameters.append(ProfiledParameter(row["name"], numel, dtype, shape=tuple(shape)))
    return ModelProfile(source.given, tuple(parameters), in_registration_order=True)


def _shape(file: ForeignFile, line: int, text: str) -> list[int]:
    """Extents as `512x512` or `512`, as torch prints them (`(512, 512)`), `()` of a scalar."""
    what = "shape (written 512x512, (512, 512), 512, or () for a scalar)"
    extents = [] if text.strip() == "()" else text.lower().split("x")
    return [file.whole(line, extent, what) for extent in extents]


def _read_csv(name: str, text: str) -> ModelProfile:
    parameters, names, latest, file = [], set[str](), 0.0, ForeignFile(name)
    for line, row in file.table(text.splitlines(), ("param_name", "numel", "ready_us")):
        title, ready_s = row["param_name"], file.number(line, row["ready_us"], "ready_us") * 1e-6
        if ready_s < latest:
            back = "ready_us goes back in time: the rows must stand in backward order"
            raise file.wrong(back, line)
        if title in names:
            again = f"lists {shown(title)} twice; a parameter stands there once, shared ones too"
            raise file.wrong(again)
        names.add(title)
        latest, numel = ready_s, file.whole(line, row["numel"], "numel")
        parameters.append(ProfiledParameter(title, numel, "float32", ready_s=ready_s))
    if latest == 0:
        raise file.wrong("ready_us is 0 for every parameter; wanted when each is ready")
    return ModelProfile(name, tuple(parameters), in_registration_order=False)


def measured_profile(name: str, file: ModelFile) -> ModelProfile:
    """The measured part of a model's file; raises ImportFailedError where it has none."""
    parameters, measured = file.parameters, file.measured
    if measured is None:
        raise ImportFailedError(
            name,
            "holds no measurement: use it as workload.model, or add one with `calibrate profile`",
        )
    hooks = measured.ddp_hook_s or [None] * len(parameters.name)
    values: dict[str, Any] = {
        field.name: getattr(measured, field.name, None) for field in fields(ModelProfile)
    }
    exponent, kept = measured.interference_exponent, measured.activation_bytes
    return ModelProfile(
        **values
        | {
            "source": name,
            "parameters": tuple(
                ProfiledParameter(
                    *(title, numel, dtype, ready_s, place in parameters.sparse, hook_s, shape)
                )
                for place, (title, numel, dtype, shape, ready_s, hook_s) in enumerate(
                    zip(
                        *(parameters.name, parameters.numels, parameters.dtypes),
                        *(parameters.extents, measured.ready_s, hooks),
                        strict=True,
                    )
                )
            ),
            "in_registration_order": True,
            "buffers": tuple(zip(file.buffers.dtypes, file.buffers.numels, strict=True)),
            "iterations_s": tuple(map(tuple, measured.iterations_s)),
            "interference_exponent": exponent
            if exponent is None
            else InterferenceExponent(exponent, measured.interference_exponent_stderr),
            "warnings": tuple(measured.warnings),
            "activation_bytes": None if kept is None else round(kept),
        }
    )


def _dtype(file: ForeignFile, line: int, text: str) -> str:
    dtype = str(text).strip().removeprefix("torch.")
    if dtype not in ITEM_BYTES:
        wanted = f"wanted one of {', '.join(ITEM_BYTES)}"
        what = f"unknown dtype {shown(text)}"
        if dtype.startswith(("int", "uint", "bool")):
            what = f"{shown(text)} is no dtype of a parameter that gets a gradient"
            wanted = f"list those alone, {wanted}"
        raise file.wrong(f"{what}; {wanted}", line)
    return dtype
