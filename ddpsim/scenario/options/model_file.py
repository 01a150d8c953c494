"""A model's file (schema `ddpsim.model/3`): what it is, and what was captured or measured of it.

All is checked before anything is read of it. docs/reference/files.md says what each field is.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from math import prod
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ddpsim.errors import shown
from ddpsim.files import json_of, read_regular
from ddpsim.scenario.suggest import in_own_words

MODEL_SCHEMA = "ddpsim.model/3"
_AGAIN = "make it anew with `calibrate capture` or `calibrate profile`"
_MOST_BYTES = 64 * 2**20  # of a file; one of 70 billion parameters takes a tenth of a megabyte

# of parameters: torch lets no integers and no bool require gradients (torch/csrc/autograd), and
# complex ones, which it does and DDP reduces, are not modelled
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
LATER = ("later_forward_s", "later_backward_s")  # of a second micro-batch: both or neither
_DTYPES = (
    *(*ITEM_BYTES, "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
    *("bool", "complex128", "complex64", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"),
    *("float8_e5m2fnuz", "float8_e8m0fnu"),
)
_SLACK = 1.05  # medians, each taken on its own, need not add up

_Place = Annotated[int, Field(ge=0)]
_Extent = Annotated[int, Field(ge=0, le=2**48)]
_Figure = Annotated[float, Field(ge=-1e24, le=1e24)]
_Seconds = Annotated[float, Field(ge=0, le=1e7)]
_SomeSeconds = Annotated[float, Field(gt=0, le=1e7)]
_Exponent = Annotated[float, Field(ge=0, le=10)]
_Name = Annotated[str, Field(min_length=1)]
_FIGURES = 10  # of an operator, its kind apart
_ALWAYS: tuple[Literal["fp32", "amp"], ...] = ("fp32", "amp")


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Tensors(_Part):
    """Columns; of a tensor whose shape nobody knows, `shape` is the number of elements."""

    known_dtypes: ClassVar[Collection[str]] = _DTYPES
    called: ClassVar[str] = "a buffer"
    name: list[str] = Field(default_factory=list)
    shape: list[list[_Extent] | _Extent] = Field(default_factory=list)
    dtype: str | list[str] = "float32"
    module: list[str] | None = None
    sparse: list[_Place] = Field(default_factory=list)

    @model_validator(mode="after")
    def _of_one_length(self) -> Tensors:
        for column in (self.shape, self.dtype, self.module):
            if isinstance(column, list) and len(column) != len(self.name):
                raise ValueError(f"{len(self.name)} names, and a column of {len(column)}")
        choices = self.known_dtypes
        unknown = next((dtype for dtype in self.dtypes if dtype not in choices), None)
        if unknown is not None:
            wanted = f"wanted one of {', '.join(choices)}"
            raise ValueError(f"{shown(unknown)} is no dtype of {self.called}; {wanted}")
        return self

    @property
    def dtypes(self) -> list[str]:
        """The dtype of each."""
        return self.dtype if isinstance(self.dtype, list) else [self.dtype] * len(self.name)

    @property
    def numels(self) -> list[int]:
        """Elements of each."""
        return [prod(shape) if isinstance(shape, list) else shape for shape in self.shape]

    @property
    def extents(self) -> list[tuple[int, ...] | None]:
        """The shape of each; None where only the number of elements is told."""
        return [tuple(shape) if isinstance(shape, list) else None for shape in self.shape]


class _Parameters(Tensors):
    known_dtypes: ClassVar[Collection[str]] = ITEM_BYTES.keys()
    called: ClassVar[str] = "a parameter that gets a gradient"
    name: list[str] = Field(min_length=1)

    @model_validator(mode="after")
    def _each_once(self) -> _Parameters:
        if len(set(self.name)) < len(self.name):
            twice = next(name for name in self.name if self.name.count(name) > 1)
            raise ValueError(
                f"lists {shown(twice)} twice; a parameter stands there once, shared ones too"
            )
        return self


class _Frozen(Tensors):
    place: list[_Place]

    @model_validator(mode="after")
    def _of_rising_places(self) -> _Frozen:
        if len(self.place) != len(self.name) or sorted(set(self.place)) != self.place:
            raise ValueError("place: wanted a rising one of each name")
        return self


class Measured(_Part):
    """What was measured of the model on one device; other keys are not read."""

    model_config = ConfigDict(extra="ignore", strict=True)

    source: str = ""
    device: _Name | None = None
    scaled_to: _Name | None = None
    optimizer: _Name | None = None
    batch_per_rank: int = Field(ge=1)
    seq_len: int | None = None
    image_size: int | None = None
    compiled: bool = False
    forward_s: _SomeSeconds
    backward_s: _SomeSeconds
    optimizer_s: _Seconds
    later_forward_s: _SomeSeconds | None = None
    later_backward_s: _SomeSeconds | None = None
    with_ddp_s: _SomeSeconds | None = None
    iterations_s: list[list[_SomeSeconds]] = Field(default_factory=list)
    ready_origin: Literal["first_gradient", "backward_start"]
    ready_s: list[_Seconds | None]
    ddp_hook_s: list[_Seconds | None] | None = None
    activation_bytes: Annotated[float, Field(ge=0, le=1e15)] | None = None
    sigma: Annotated[float, Field(ge=0, le=1)] | None = None
    interference_exponent: _Exponent | None = None
    interference_exponent_stderr: _Exponent = 0.0
    warnings: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _times_agree(self) -> Measured:
        ready = [seconds for seconds in self.ready_s if seconds is not None]
        if not ready:
            raise ValueError("no parameter has a ready time: all of ready_s are null")
        if max(ready) > _SLACK * self.backward_s:
            raise ValueError(
                f"ready_s has {max(ready):g}, but the whole backward takes {self.backward_s:g}; "
                "wanted seconds in both"
            )
        if (self.later_forward_s is None) != (self.later_backward_s is None):
            raise ValueError(f"one of {' and '.join(LATER)} stands alone; wanted both")
        ranks = {len(row) for row in self.iterations_s}
        if len(ranks) > 1 or 0 in ranks:
            raise ValueError("iterations_s: wanted a number for each rank in every iteration")
        step_s = self.forward_s + self.backward_s + self.optimizer_s
        if self.with_ddp_s is not None and self.with_ddp_s <= step_s:
            raise ValueError(
                f"with_ddp_s is {self.with_ddp_s:g}, but the step without DDP takes {step_s:g}: "
                "DDP only adds to it; measure both in turns, or leave it out"
            )
        return self


class _Step(_Part):
    forward: list[_Place]
    backward: list[_Place]
    saved_bytes: list[_Place] = Field(min_length=1, max_length=1)
    own_bytes: list[_Place]
    others_bytes: list[_Place]
    rerun: list[tuple[int, int]]


class _Batch(_Part):
    only: int = Field(ge=1)
    because: str


class _Size(_Part):
    key: Literal["seq_len", "image_size"]
    default: int = Field(ge=1)
    variable: Literal["seq_len", "pixels", "none"]
    multiple_of: int = Field(ge=1)
    min: int = Field(ge=1)
    max: int
    because: str | None = None


class _Captured(_Part):
    source: str
    parameter_count: int
    batch: _Batch | None
    size: _Size | None
    ready_order: list[_Place]
    forward_modules: list[str]
    blocks: list[str]
    input_bytes: _Place
    steps: dict[Literal["fp32", "amp", "half"], _Step]
    polynomials: list[Annotated[list[_Figure], Field(max_length=6)]]
    operators: list[list[str | int]]
    rows: list[list[_Place]]

    @model_validator(mode="after")
    def _places_are_there(self) -> _Captured:
        """Each place is one of what it is a place in."""
        if len(set(self.ready_order)) != len(self.ready_order):
            raise ValueError("ready_order: a parameter is ready twice")
        _within([self.input_bytes], len(self.polynomials), "input_bytes")
        for one in self.operators:
            kind, *figures = one
            if not isinstance(kind, str) or len(figures) != _FIGURES:
                raise ValueError(f"operators: wanted a kind and {_FIGURES} places in each")
            _within(figures, len(self.polynomials), "operators")
        for row in self.rows:
            _within(row, len(self.operators), "rows")
        for key in _ALWAYS:
            if key not in self.steps:
                raise ValueError(f"steps: {key} is missing")
        for name, step in self.steps.items():
            self._check_step(name, step)
        return self

    def _check_step(self, name: str, step: _Step) -> None:
        blocks = len(self.blocks)
        wanted = (
            (step.forward, len(self.forward_modules), "forward"),
            (step.backward, len(self.ready_order) + 1, "backward"),
            (step.own_bytes, blocks, "own_bytes"),
            (step.others_bytes, blocks + 1, "others_bytes"),
            (step.rerun, blocks, "rerun"),
        )
        for column, length, key in wanted:
            if len(column) != length:
                raise ValueError(f"steps.{name}.{key}: {len(column)} entries, wanted {length}")
        _within([*step.forward, *step.backward], len(self.rows), f"steps.{name}")
        kept = [*step.saved_bytes, *step.own_bytes, *step.others_bytes]
        _within(kept, len(self.polynomials), f"steps.{name}")


class _File(_Part):
    schema_: Literal["ddpsim.model/3"] = Field(alias="schema")
    name: str = ""
    title: str = ""
    family: str = "own"
    parameters: _Parameters
    frozen: _Frozen | None = None
    buffers: Tensors = Field(default_factory=Tensors)
    captured: _Captured | None = None
    measured: Measured | None = None

    @model_validator(mode="after")
    def _parts_fit(self) -> _File:
        """Each column has an entry for each parameter, each place is one of theirs."""
        if self.captured is None and self.measured is None:
            raise ValueError("nothing is captured or measured of the model")
        count = len(self.parameters.name)
        if self.captured:
            _within(self.captured.ready_order, count, "captured.ready_order")
            if not all(isinstance(shape, list) for shape in self.parameters.shape):
                raise ValueError("parameters.shape: a captured model has shapes")
        if self.measured:
            for key in ("ready_s", "ddp_hook_s"):
                column = getattr(self.measured, key)
                if column is not None and len(column) != count:
                    raise ValueError(f"measured.{key}: {len(column)} entries, wanted {count}")
            if 0 in self.parameters.numels:
                raise ValueError("parameters: DDP reduces none without elements; leave it out")
        return self


def _within(places: list[Any], count: int, key: str) -> None:
    wrong = next((p for p in places if not isinstance(p, int) or not 0 <= p < count), None)
    if wrong is not None:
        raise ValueError(f"{key}: {shown(wrong)} is no place among {count}")


class ModelFile(NamedTuple):
    """A model's file; `table`: the model and its captured part as one, or None without it."""

    document: dict[str, Any]
    table: dict[str, Any] | None
    parameters: Tensors
    buffers: Tensors
    measured: Measured | None

    @property
    def unused(self) -> list[str]:
        """Names of the parameters that never get a gradient: by what was measured, if it was."""
        if self.measured:
            ready = {i for i, time_s in enumerate(self.measured.ready_s) if time_s is not None}
        else:
            ready = set((self.table or {})["ready_order"])
        return [name for i, name in enumerate(self.parameters.name) if i not in ready]


def table_of(document: dict[str, Any]) -> dict[str, Any]:
    """The model and its captured part as one."""
    shared = {key: value for key, value in document.items() if key not in ("captured", "measured")}
    captured: dict[str, Any] = document["captured"]
    return shared | captured


def read_model_file(given: str, path: Path) -> ModelFile:
    """Read a model's file, which the user calls `given`; raises ValueError."""
    try:
        state = path.stat()
        return _read(given, path, state.st_mtime_ns, state.st_size)
    except OSError as error:
        raise ValueError(f"{shown(given)} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{shown(given)}: {error}") from None


@cache
def _read(given: str, path: Path, changed_ns: int, size_bytes: int) -> ModelFile:  # noqa: ARG001 - of the cache
    return parse_model_file(read_regular(path, _MOST_BYTES).decode("utf-8-sig"))


def parse_model_file(text: str) -> ModelFile:
    """Parse the text of a model's file; raises ValueError."""
    try:
        document: Any = json_of(text)
    except ValueError as error:
        raise ValueError(f"this is no JSON: {error}") from None
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != MODEL_SCHEMA:
        raise ValueError(f"its schema is {shown(schema)}; wanted {MODEL_SCHEMA}: {_AGAIN}")
    try:
        file = _File.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(
            key for key in map(str, first["loc"]) if key.isalnum() or key.isidentifier()
        )
        what = f"{place}: {in_own_words(first)}" if place else in_own_words(first)
        raise ValueError(f"this is no {MODEL_SCHEMA}: {what}; {_AGAIN}") from None
    table = table_of(document) if file.captured else None
    return ModelFile(document, table, file.parameters, file.buffers, file.measured)
