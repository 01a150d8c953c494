"""A captured model's file (schema `ddpsim.model/2`), checked before anything is read of it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ddpsim.errors import shown
from ddpsim.files import json_of, read_regular
from ddpsim.scenario.suggest import in_own_words

__all__ = ["MODEL_SCHEMA", "read_captured"]

MODEL_SCHEMA = "ddpsim.model/2"
_AGAIN = "make it anew with `calibrate capture`"
_MOST_BYTES = 64 * 2**20  # of a file; one of 70 billion parameters takes a tenth of a megabyte

_Place = Annotated[int, Field(ge=0)]
_Figure = Annotated[float, Field(ge=-1e24, le=1e24)]
_FIGURES = 10  # of an operator, its kind apart
_ALWAYS: tuple[Literal["fp32", "amp"], ...] = ("fp32", "amp")


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class _Tensors(_Part):
    name: list[str]
    shape: list[list[Annotated[int, Field(ge=0, le=2**48)]]]
    dtype: str | list[str]
    module: list[str] | None = None
    sparse: list[_Place] = Field(default_factory=list)

    @model_validator(mode="after")
    def _of_one_length(self) -> _Tensors:
        for column in (self.shape, self.dtype, self.module):
            if isinstance(column, list) and len(column) != len(self.name):
                raise ValueError(f"{len(self.name)} names, and a column of {len(column)}")
        return self


class _Frozen(_Tensors):
    place: list[_Place]

    @model_validator(mode="after")
    def _of_rising_places(self) -> _Frozen:
        if len(self.place) != len(self.name) or sorted(set(self.place)) != self.place:
            raise ValueError("place: wanted a rising one of each name")
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
    schema_: Literal["ddpsim.model/2"] = Field(alias="schema")
    name: str
    title: str
    family: str
    source: str
    parameter_count: int
    batch: _Batch | None
    size: _Size | None
    parameters: _Tensors
    frozen: _Frozen | None = None
    buffers: _Tensors
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
        parameters = len(self.parameters.name)
        _within(self.ready_order, parameters, "ready_order")
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


def _within(places: list[Any], count: int, key: str) -> None:
    wrong = next((p for p in places if not isinstance(p, int) or not 0 <= p < count), None)
    if wrong is not None:
        raise ValueError(f"{key}: {shown(wrong)} is no place among {count}")


def read_captured(given: str, path: Path) -> dict[str, Any]:
    """A captured model's document; `given`: what the user calls it. Raises ValueError."""
    try:
        state = path.stat()
        return _read(given, path, state.st_mtime_ns, state.st_size)
    except OSError as error:
        raise ValueError(f"{shown(given)} cannot be read: {error.strerror}") from None


@cache
def _read(given: str, path: Path, changed_ns: int, size_bytes: int) -> dict[str, Any]:  # noqa: ARG001 - of the cache
    if size_bytes > _MOST_BYTES:
        raise ValueError(f"{shown(given)} is too large to be a captured model: {size_bytes} bytes")
    try:
        document: dict[str, Any] = json_of(read_regular(path, _MOST_BYTES).decode("utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"{shown(given)} is no JSON: {error}") from None
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != MODEL_SCHEMA:
        hint = _AGAIN
        if isinstance(schema, str) and schema.startswith("ddpsim.model-profile/"):
            hint = "use it as workload.profile"
        raise ValueError(
            f"{shown(given)} is no {MODEL_SCHEMA}: its schema is {shown(schema)}; {hint}"
        )
    try:
        _Captured.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        what = f"{place}: {in_own_words(first)}" if place else in_own_words(first)
        raise ValueError(f"{shown(given)} is no {MODEL_SCHEMA}: {what}; {_AGAIN}") from None
    return document
