"""The journal of a sweep: one line a point, sound whenever the process dies."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from math import inf
from pathlib import Path
from stat import S_ISREG
from types import TracebackType
from typing import Any, cast

from ddpsim.errors import DdpsimError
from ddpsim.result.model import Brief, Distribution, Memory

SCHEMA = "ddpsim.sweep-journal/1"

Outcome = Brief | str  # figures, or why there are none


class JournalError(DdpsimError):
    """A journal cannot be used."""


class Journal:
    """An append-only file of JSON lines: a header, then the outcome of each point by its key.

    Lines are written whole and in one go, so that a killed process loses at most the points under
    way; a torn last line, which a full disk leaves, is cut off at the next start. One process at a
    time has the file. Without `resume` a sweep that `finish` has marked begins anew. Raises
    JournalError for a file that is no journal, is in use, or holds an unfinished sweep without
    `resume`.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.path = path
        self.outcomes: dict[str, Outcome] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            self._lock()
            self._read(resume=resume)
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> Journal:  # noqa: PYI034 -- typing.Self is of Python 3.11
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._file)

    def add(self, outcomes: Mapping[str, Outcome]) -> None:
        """Append outcomes. Raises JournalError, after which the journal is sound."""
        lines = [_written(key, outcome) for key, outcome in outcomes.items()]
        self._append("".join(lines).encode())
        self.outcomes |= outcomes

    def finish(self) -> None:
        """Mark the sweep as complete."""
        self._append(_FINISHED)

    def _append(self, data: bytes) -> None:
        before = os.fstat(self._file).st_size
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            os.ftruncate(self._file, before)
            raise JournalError(
                f"{self.path}: {error.strerror}; it holds {len(self.outcomes):,} points: mend "
                "this, and go on with --resume"
            ) from None
        except BaseException:
            os.ftruncate(self._file, before)
            raise

    def _lock(self) -> None:
        if not S_ISREG(os.fstat(self._file).st_mode):
            raise JournalError(f"{self.path}: is no regular file; choose another -o")
        try:
            import fcntl  # noqa: PLC0415 -- not on Windows, where two sweeps must not share a file
        except ImportError:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise JournalError(
                f"{self.path}: another sweep is writing it; wait for it, or choose another -o"
            ) from None

    def _read(self, *, resume: bool) -> None:
        with os.fdopen(os.dup(self._file), "rb") as file:
            file.seek(0)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        if not whole and (not content or _HEADER.startswith(content)):
            os.ftruncate(self._file, 0)
            self._append(_HEADER)
            return
        header, *lines = whole.splitlines(keepends=True) or [b""]
        if header != _HEADER:
            raise JournalError(
                f"{self.path}: this is no journal of a sweep ({SCHEMA}); choose another -o"
            )
        if not resume and lines and lines[-1] == _FINISHED:
            lines, whole = [], header
        elif not resume and lines:
            count = f"{len(lines):,} point{'s' * (len(lines) > 1)}"
            raise JournalError(
                f"{self.path} holds {count} of a sweep: add --resume to go on with them, or "
                "remove the file to start again"
            )
        self.outcomes = dict(self._parsed(lines))
        os.ftruncate(self._file, len(whole))

    def _parsed(self, lines: Iterable[bytes]) -> Iterable[tuple[str, Outcome]]:
        number = 1
        try:
            for number, line in enumerate(lines, 2):  # noqa: B007 -- for the message
                if line != _FINISHED:
                    yield _read(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise JournalError(
                f"{self.path}:{number}: this line is no point of a sweep; remove it, and its "
                "point is computed again"
            ) from None


_HEADER = (json.dumps({"schema": SCHEMA}) + "\n").encode()
_FINISHED = b'{"finished": true}\n'


def _written(key: str, outcome: Outcome) -> str:
    entry = {"problem": outcome} if isinstance(outcome, str) else {"brief": asdict(outcome)}
    return json.dumps({"key": key, **entry}) + "\n"


def _read(line: dict[str, Any]) -> tuple[str, Outcome]:
    if "problem" in line:
        return str(line["key"]), str(line["problem"])
    fields = dict(line["brief"])
    times, memory = fields.pop("iteration_time_s"), fields.pop("memory_bytes_per_gpu")
    count = fields.pop("world_size")
    figures = {**fields, **times}
    counts = {**memory, "world_size": count}
    if counts["activations"] is None:  # unknown
        del counts["activations"]
    sound = all(_is_figure(value, float, int) for value in figures.values())
    if not sound or not all(_is_figure(value, int) for value in counts.values()):
        raise ValueError
    brief = Brief(
        **fields,
        iteration_time_s=Distribution(**times),
        memory_bytes_per_gpu=Memory(**memory),
        world_size=count,
    )
    return str(line["key"]), brief


def _is_figure(value: object, *kinds: type) -> bool:
    """Whether a value is a number as a `Brief` holds it: of such a type, finite, not negative."""
    return type(value) in kinds and 0 <= cast("float", value) < inf
