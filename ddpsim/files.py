"""Files that last are written whole or not at all."""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

__all__ = ["write_atomically"]


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file whole: a reader sees the old or the new one. Raises OSError with its name.

    A link stays one, to the new file; what is no file, such as /dev/null, is only written to.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        _replace(path, data)
    except OSError as error:  # the name of the file in the making would tell nobody anything
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None


def _replace(path: Path, data: bytes) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(_mode(path))
        Path(name).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise


def _mode(path: Path) -> int:
    """A file's own permissions; of a new one what the umask leaves (mkstemp takes away all)."""
    if path.exists():
        return stat.S_IMODE(path.stat().st_mode)
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
