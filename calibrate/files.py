"""Our JSON files, read with one clear error."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from ddpsim.errors import ImportFailedError
from ddpsim.importers.text import parsed

__all__ = ["load_json"]

_Model = TypeVar("_Model", bound=BaseModel)


def load_json(model: type[_Model], path: Path, wanted: str) -> _Model:
    """A file as one of our models, called `wanted`; raises ImportFailedError with what is wrong."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ImportFailedError(str(path), f"cannot be read: {error.strerror}") from None
    return parsed(model, str(path), text, wanted)
