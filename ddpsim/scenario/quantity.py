"""Pydantic field types: quantities that must carry their unit, and files named by a scenario."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import (
    GetCoreSchemaHandler,
    PlainSerializer,
    PlainValidator,
    SerializationInfo,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic_core import core_schema

from ddpsim import units
from ddpsim.errors import shown


class _Unit(NamedTuple):
    """Text with a unit, from `least` to `most`: far beyond any machine, but safe to reckon with.

    It is written in `unit`, and read back as the very same number.
    """

    parse: Callable[[str], float]
    unit: str
    example: str
    least: str
    most: str

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        written = core_schema.plain_serializer_function_ser_schema(
            lambda number: f"{number!r} {self.unit}", return_schema=core_schema.str_schema()
        )
        return core_schema.no_info_before_validator_function(
            self._number, handler(source), serialization=written
        )

    def __get_pydantic_json_schema__(self, *_: Any) -> dict[str, Any]:
        return {"type": "string", "pattern": r"^\s*[0-9.].*[A-Za-z]", "examples": [self.example]}

    def _number(self, value: Any) -> float:
        if isinstance(value, str):
            number = self.parse(value)
            if not self.parse(self.least) <= number <= self.parse(self.most):
                raise ValueError(f"{value!r} is out of range: wanted {self.least} to {self.most}")
            return number
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        wrong = "has no unit" if is_number else "is not a quantity"
        raise ValueError(f"{shown(value)} {wrong}; write for instance '{self.example}'")


Duration = Annotated[float, _Unit(units.parse_duration, "s", "5 ms", "0 s", "1000 h")]
LongDuration = Annotated[float, _Unit(units.parse_duration, "s", "50000 h", "1 s", "1000000000 h")]
Size = Annotated[float, _Unit(units.parse_bytes, "B", "40 GiB", "1 B", "1000 TB")]
Bandwidth = Annotated[
    float, _Unit(units.parse_bytes_per_s, "B/s", "100 Gbit/s", "1 kbit/s", "1000 TB/s")
]
FlopsPerSecond = Annotated[
    float, _Unit(units.parse_flops_per_s, "FLOP/s", "312 TFLOP/s", "1 MFLOP/s", "100 PFLOP/s")
]
SampleRate = Annotated[
    float,
    _Unit(
        units.parse_samples_per_s,
        "samples/s",
        "2500 samples/s",
        "0.001 samples/s",
        "1000000000 samples/s",
    ),
]


@dataclass(frozen=True)
class SourceFile:
    """A file named in a scenario: as it was written there, and where that is."""

    given: str
    path: Path


def source_file(value: Any, info: ValidationInfo) -> SourceFile:
    """The file that a scenario names, from the scenario's folder; raises ValueError."""
    source = _source(value, info)
    if source.path.is_dir():
        raise ValueError(f"{shown(source.given)} is a directory; name a file in it")
    return source


def _source(value: Any, info: ValidationInfo) -> SourceFile:
    if isinstance(value, SourceFile):
        return value
    if not isinstance(value, (str, Path)) or not str(value):
        raise ValueError(f"{shown(value)} is not a file name")
    name, context = str(value), info.context or {}
    base: Path = context.get("base", Path())
    allowed: frozenset[str] | None = context.get("files")
    if allowed is not None and name not in allowed:
        raise ValueError(f"{shown(name)} is not a file that this scenario named when it was opened")
    path = base / name
    try:
        is_there = path.is_file() or path.is_dir()
    except OSError as error:  # a name too long, a folder that may not be searched
        raise ValueError(f"{shown(name)} cannot be read: {error.strerror}") from None
    if not is_there and path.exists():
        raise ValueError(f"{shown(name)} is a pipe or a device; name a file")
    if not is_there:
        raise ValueError(f"no such file: {shown(name)} ({_where(name, base)})")
    return SourceFile(name, path)


def _where(name: str, base: Path) -> str:
    rule = "paths are relative to the scenario's folder"
    if not Path(name).is_file():
        return rule
    return f"{rule}: from there this one is {shown(os.path.relpath(name, base))}"


def _written(source: SourceFile, info: SerializationInfo) -> str:
    """Path that a scenario names; a context is told the folder that this starts from."""
    name = Path(source.given)
    if isinstance(info.context, dict) and not name.is_absolute():
        info.context["base"] = Path(*source.path.parts[: -len(name.parts)])
    return source.given


SourceFileField = Annotated[
    SourceFile,
    PlainValidator(source_file),
    PlainSerializer(_written),
    WithJsonSchema({"type": "string"}),
]
SourceField = Annotated[  # a file, or a folder
    SourceFile,
    PlainValidator(_source),
    PlainSerializer(_written),
    WithJsonSchema({"type": "string"}),
]
