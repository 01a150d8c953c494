"""Read what others wrote within bounds, and write our own files whole or not at all.

What a user names is opened here, and JSON is parsed here: a test holds that no other module does.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any

_STANDARD_INPUT = Path("-")
_MOST_CONTAINERS = 5_000_000  # lists and objects, of which each takes up to 90 bytes
_DEEPEST, _TOO_DEEP = 100, "it is nested too deeply"
_DECODER = json.JSONDecoder(strict=False)


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file to read bytes, without waiting as a pipe's reader waits for a writer.

    Raises OSError for anything else; its text says what the path is, and what to do.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
    handle = os.open(path, flags | getattr(os, "O_BINARY", 0))
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder; name a file in it", str(path))
    is_pipe = stat.S_ISFIFO(mode)
    kind = "a pipe; save what it gives to a file and name that" if is_pipe else "no regular file"
    raise OSError(errno.EINVAL, f"it is {kind}", str(path))


def read_given(path: Path, most_bytes: int) -> bytes:
    """Read a regular file, the standard input (`-`), or a pipe that the shell opened for us.

    Such a pipe is that of `<(command)`: unlike a named one it has a writer. Raises OSError.
    """
    if path == _STANDARD_INPUT:
        if sys.stdin is None:
            raise OSError(errno.EBADF, "the standard input is closed; name a file", "-")
        return _within(sys.stdin.buffer.read(most_bytes + 1), most_bytes, path)
    if path.is_fifo() and path.resolve().name.startswith("pipe:"):
        with path.open("rb") as pipe:
            return _within(pipe.read(most_bytes + 1), most_bytes, path)
    return read_regular(path, most_bytes)


def read_regular(path: Path, most_bytes: int) -> bytes:
    """Read a regular file whole; raises OSError as `open_regular`, or where it is larger."""
    with open_regular(path) as file:
        return _within(file.read(most_bytes + 1), most_bytes, path)


def _within(content: bytes, most_bytes: int, path: Path) -> bytes:
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes >> 20} MiB", str(path))
    return content


def json_of(text: str) -> Any:
    """Parse a JSON document; raises ValueError, in our words where it is deep or bloated."""
    if text.count("{") + text.count("[") > _MOST_CONTAINERS:
        raise ValueError(f"it holds more than {_MOST_CONTAINERS:,} lists and objects")
    start = len(text) - len(text.lstrip(" \t\n\r"))
    value, end = json_value(text, start)
    if text[end:].strip(" \t\n\r"):
        raise json.JSONDecodeError("Extra data", text, end)
    return value


def json_value(text: str, at: int) -> tuple[Any, int]:
    """Parse the JSON value that begins at a place of a text; also says where it ends.

    Raises ValueError where it is nested deeper than 100, or holds a number of thousands of digits,
    and its child JSONDecodeError where what follows could mend it.
    """
    try:
        value, end = _DECODER.raw_decode(text, at)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except json.JSONDecodeError:
        raise
    except ValueError:
        raise ValueError("a number in it has thousands of digits") from None
    if text.count("[", at, end) + text.count("{", at, end) > _DEEPEST and _is_deep(value):
        raise ValueError(_TOO_DEEP)
    return value, end


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_DEEPEST):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [one for each in inner for one in each if isinstance(one, (dict, list))]
        if not level:
            return False
    return True


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep Python's garbage collector away from what makes many objects, or is timed.

    Of millions of events none is garbage, and looking for it doubles the time of reading; of
    torch's objects a pass takes 0.3 s.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file whole: a reader sees the old or the new one. Raises OSError with its name.

    Text is UTF-8, and what that lacks is escaped. A link stays one, to the new file; what is no
    file, such as /dev/null, is only written to.
    """
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
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
    import tempfile  # noqa: PLC0415 -- a prediction reads files alone, and starts sooner

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
