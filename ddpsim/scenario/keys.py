"""The keys of the format, as the schema has them."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from ddpsim.scenario.document import KeyPath
from ddpsim.scenario.schema import Scenario


def all_keys() -> list[str]:
    """Every key of the format, as a dotted path."""
    return [".".join(path) for path, _ in described(Scenario)]


def keys_named(name: str) -> Iterator[tuple[str, str]]:
    """Keys of the format with this name, or this path, as dotted paths with their meaning."""
    wanted = tuple(name.split("."))
    for path, meaning in described(Scenario):
        if path[-len(wanted) :] == wanted:
            yield ".".join(path), meaning


def described(
    model: type[BaseModel], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], str]]:
    """All keys below a model, the outer ones first."""
    for name, field in model.model_fields.items():
        key_path = (*path, field.alias or name)
        yield key_path, field.description or ""
        inner = _model_in(field.annotation)
        yield from described(inner, key_path) if inner else ()


def keys_at(path: KeyPath) -> list[str]:
    """Keys that may stand in the mapping at a path of the document."""
    model = model_at(path)
    return (
        [] if model is None else [field.alias or key for key, field in model.model_fields.items()]
    )


def description_at(path: KeyPath) -> str:
    """What the format says of the key at a path."""
    model = model_at(path[:-1])
    fields = model.model_fields if model else {}
    return next(f.description or "" for key, f in fields.items() if (f.alias or key) == path[-1])


def model_at(path: KeyPath) -> type[BaseModel] | None:
    """The model whose keys stand at a path of the document."""
    annotation: Any = Scenario
    for step in path:
        model = _model_in(annotation)
        if model is None:
            annotation = _values_in(annotation)
            continue
        fields = {field.alias or key: field for key, field in model.model_fields.items()}
        if str(step) not in fields:
            return None
        annotation = fields[str(step)].annotation
    return _model_in(annotation)


def _values_in(annotation: Any) -> Any:
    """What a mapping holds; None for anything else."""
    if typing.get_origin(annotation) is dict:
        return typing.get_args(annotation)[1]
    parts = (_values_in(part) for part in typing.get_args(annotation))
    return next((part for part in parts if part is not None), None)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    origin = typing.get_origin(annotation)
    # dict[int, ...] is a type itself on Python 3.10, but no class
    if origin is None and isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if origin in (typing.Union, types.UnionType, typing.Annotated):
        return next((m for part in typing.get_args(annotation) if (m := _model_in(part))), None)
    return None
