"""Our JSON files: read with one clear error, written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from ddpsim.errors import ImportFailedError
from ddpsim.importers.text import parsed

__all__ = ["load_json", "write_atomically"]

_Model = TypeVar("_Model", bound=BaseModel)


def load_json(model: type[_Model], path: Path, wanted: str) -> _Model:
    """A file as one of our models, called `wanted`; raises ImportFailedError with what is wrong."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ImportFailedError(str(path), f"cannot be read: {error.strerror}") from None
    return parsed(model, str(path), text, wanted)


def write_atomically(path: Path, text: str) -> None:
    """Write a text file whole: a reader sees the old or the new one. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o666 & ~_umask())
        Path(name).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise


def _umask() -> int:
    """What this process takes away from a new file's permissions; mkstemp takes away all."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
