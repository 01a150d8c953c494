"""Dumps of PyTorch's flight recorder (TORCH_FR_BUFFER_SIZE), as pickle or JSON.

Source: torch/csrc/distributed/c10d/FlightRecorderDetail.hpp; a pickle holds dicts, lists, strings
and numbers alone, and nothing else is read: a pickle may otherwise run code.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import isfinite, prod
from statistics import median
from typing import Any, NamedTuple

from ddpsim.errors import ImportFailedError
from ddpsim.files import json_of
from ddpsim.importers.kineto.measured import ITEM_BYTES
from ddpsim.importers.text import foreign
from ddpsim.scenario.quantity import SourceFile

_TYPES = {"float": "float32", "double": "float64", "half": "float16", "bfloat16": "bfloat16"}
_MOST = 10**12
_DEEPEST = 100
_LARGEST_BYTES = 2**26
_MOST_INSTRUCTIONS = 8_000_000  # of a pickle: each makes at most one object
_PLAIN = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.EMPTY_DICT, pickle.EMPTY_LIST),
    *(pickle.APPEND, pickle.APPENDS, pickle.SETITEM, pickle.SETITEMS, pickle.NONE, pickle.NEWTRUE),
    *(pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
    *(pickle.BINFLOAT, pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.BINUNICODE8),
    *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET),
)


class FlightRecorder(NamedTuple):
    """One rank's: its job's size, all-reduces by bytes and their median seconds where told."""

    world_size: int | None
    backend: str
    nccl: str | None
    all_reduces: dict[int, int]
    seconds: dict[int, float]


class _Pickled(io.BytesIO):
    """A pickle that ends after so many instructions, each of which is read by itself."""

    left = _MOST_INSTRUCTIONS

    def read(self, size: int | None = -1, /) -> bytes:
        if size == 1:
            self.left -= 1
        return super().read(size) if self.left > 0 else b""


class _Plain(pickle._Unpickler):  # noqa: SLF001 -- the C one makes room for any index of its memo
    """Of dicts, lists, strings and numbers alone; raises KeyError for any other instruction."""

    dispatch = {  # noqa: RUF012 -- as the class above has it
        code: load
        for code, load in pickle._Unpickler.dispatch.items()  # noqa: SLF001
        if bytes([code]) in _PLAIN
    }


def unpickled(source: SourceFile) -> Any:
    """Plain data of a pickle; raises ImportFailedError for what is no dump."""
    name = source.given
    with foreign(source) as file:
        content = file.read(_LARGEST_BYTES + 1)
    if len(content) > _LARGEST_BYTES:
        raise ImportFailedError(name, "is larger than 64 MiB; dump fewer entries")
    try:
        return _Plain(_Pickled(content)).load()
    except Exception:  # noqa: BLE001 -- a broken pickle raises what it likes
        raise ImportFailedError(
            name, "is a pickle, but no dump of PyTorch's flight recorder (plain data alone is read)"
        ) from None


def is_dump(data: Any) -> bool:
    """Whether it has what a dump has."""
    return isinstance(data, dict) and isinstance(data.get("entries"), list) and "version" in data


def flight_recorder(name: str, data: Mapping[str, Any]) -> FlightRecorder:
    """Read one; raises ImportFailedError where it holds no collective of a size."""
    entries = [each for each in data["entries"] if isinstance(each, dict)]
    counts: Counter[int] = Counter()
    times: dict[int, list[float]] = defaultdict(list)
    for size, seconds in _reduced(entries):
        counts[size] += 1
        if seconds:
            times[size].append(seconds)
    if not counts:
        raise ImportFailedError(name, "holds no all-reduce whose size is recorded")
    backends = Counter(_text(each.get("profiling_name")).partition(":")[0] for each in entries)
    version = data.get("nccl_version") or data.get("comm_lib_version")
    return FlightRecorder(
        _world_size(data.get("pg_config")),
        "gloo" if backends.most_common(1)[0][0] == "gloo" else "nccl",
        version if isinstance(version, str) and version else None,
        dict(sorted(counts.items())),
        {size: median(each) for size, each in sorted(times.items())},
    )


def _reduced(entries: list[dict[str, Any]]) -> Iterator[tuple[int, float | None]]:
    for each in entries:
        called = _text(each.get("profiling_name")).lower().replace("_", "")
        if not called.endswith("allreduce"):
            continue
        size = _size_bytes(each.get("input_sizes"), each.get("input_dtypes"))
        took_ms = each.get("duration_ms")
        is_time = isinstance(took_ms, (int, float)) and isfinite(took_ms) and 0 < took_ms < 1e9
        if size:
            yield size, took_ms * 1e-3 if is_time else None  # type: ignore[operator]


def _size_bytes(sizes: Any, dtypes: Any) -> int:
    """Of the first input; 0 where it is not told."""
    shape = sizes[0] if isinstance(sizes, list) and sizes else None
    if not isinstance(shape, list) or not all(type(each) is int and each > 0 for each in shape):
        return 0
    dtype = _text(dtypes[0]).lower() if isinstance(dtypes, list) and dtypes else ""
    size = prod(shape) * ITEM_BYTES.get(_TYPES.get(dtype, ""), 0) if len(shape) < _DEEPEST else 0
    return size if size <= _MOST else 0


def _text(value: Any) -> str:
    """Empty for what is none: a list that holds itself many times over has no end as text."""
    return value if isinstance(value, str) else ""


def _world_size(groups: Any) -> int | None:
    """That of the largest group; its ranks are a list, in older versions as text."""
    sizes = []
    for each in groups.values() if isinstance(groups, dict) else ():
        ranks = each.get("ranks") if isinstance(each, dict) else None
        with suppress(ValueError):
            ranks = json_of(ranks) if isinstance(ranks, str) else ranks
        sizes += [len(ranks)] if isinstance(ranks, list) and ranks else []
    return max(sizes, default=None)
