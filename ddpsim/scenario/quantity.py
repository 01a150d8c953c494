"""Pydantic field types: quantities that must carry their unit, and files named by a scenario."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    BeforeValidator,
    PlainSerializer,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
)

from ddpsim import units

__all__ = [
    "Bandwidth",
    "Duration",
    "FlopsPerSecond",
    "SampleRate",
    "Size",
    "SourceFile",
    "SourceFileField",
]


def _with_unit(parse: Callable[[str], float], example: str) -> BeforeValidator:
    def validate(value: Any) -> float:
        if isinstance(value, str):
            return parse(value)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if not math.isfinite(value):
                raise ValueError(f"{value} is not a quantity; write for instance '{example}'")
            unit = example.split(maxsplit=1)[1]
            raise ValueError(f"{value} has no unit; write for instance '{value} {unit}'")
        raise ValueError(f"{value!r} is not a quantity; write for instance '{example}'")

    return BeforeValidator(validate)


def _schema(example: str) -> WithJsonSchema:
    return WithJsonSchema(
        {"type": "string", "pattern": r"^\s*[0-9.].*[A-Za-z]", "examples": [example]}
    )


Duration = Annotated[float, _with_unit(units.parse_duration, "5 ms"), _schema("5 ms")]
Size = Annotated[float, _with_unit(units.parse_bytes, "40 GiB"), _schema("40 GiB")]
Bandwidth = Annotated[
    float, _with_unit(units.parse_bytes_per_s, "100 Gbit/s"), _schema("100 Gbit/s")
]
FlopsPerSecond = Annotated[
    float, _with_unit(units.parse_flops_per_s, "312 TFLOP/s"), _schema("312 TFLOP/s")
]
SampleRate = Annotated[
    float, _with_unit(units.parse_samples_per_s, "2500 samples/s"), _schema("2500 samples/s")
]


@dataclass(frozen=True)
class SourceFile:
    """A file named in a scenario: as it was written there, and where that is."""

    given: str
    path: Path


def _source_file(value: Any, info: ValidationInfo) -> SourceFile:
    if isinstance(value, SourceFile):
        return value
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r} is not a file name")
    base: Path = (info.context or {}).get("base", Path())
    path = base / value
    if not path.exists():
        raise ValueError(f"no such file: {value!r} (paths are relative to the scenario's folder)")
    if not path.is_file():
        raise ValueError(f"{value!r} is not a file")
    return SourceFile(value, path)


SourceFileField = Annotated[
    SourceFile,
    PlainValidator(_source_file),
    PlainSerializer(lambda source: source.given),
    WithJsonSchema({"type": "string"}),
]
