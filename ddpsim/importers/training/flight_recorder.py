"""Dumps of PyTorch's flight recorder (TORCH_FR_BUFFER_SIZE), as pickle or JSON.

Source: torch/csrc/distributed/c10d/FlightRecorderDetail.hpp; a pickle holds dicts, lists, strings
and numbers alone, and nothing else is read: a pickle may otherwise run code.
"""

from __future__ import annotations

import io
import json
import pickle
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from math import isfinite, prod
from statistics import median
from typing import Any, NamedTuple

from ddpsim.errors import ImportFailedError
from ddpsim.importers.kineto.measured import ITEM_BYTES

__all__ = ["FlightRecorder", "flight_recorder", "is_dump", "unpickled"]

_TYPES = {"float": "float32", "double": "float64", "half": "float16", "bfloat16": "bfloat16"}
_MOST = 10**12
_DEEPEST = 100
_DEEP = 1 << 26  # bytes of a dump that are read


class FlightRecorder(NamedTuple):
    """One rank's: its job's size, all-reduces by bytes and their median seconds where told."""

    world_size: int | None
    backend: str
    nccl: str | None
    all_reduces: dict[int, int]
    seconds: dict[int, float]


class _Plain(pickle.Unpickler):
    """Of plain data; raises UnpicklingError for anything with a class."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name}")


def unpickled(name: str, content: bytes) -> Any:
    """Plain data of a pickle; raises ImportFailedError for what is no dump."""
    if len(content) > _DEEP:
        raise ImportFailedError(name, "is larger than 64 MiB; dump fewer entries")
    try:
        return _Plain(io.BytesIO(content)).load()
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
    backends = Counter(str(each.get("profiling_name", "")).partition(":")[0] for each in entries)
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
        called = str(each.get("profiling_name", "")).lower().replace("_", "")
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
    dtype = str(dtypes[0]).lower() if isinstance(dtypes, list) and dtypes else ""
    size = prod(shape) * ITEM_BYTES.get(_TYPES.get(dtype, ""), 0) if len(shape) < _DEEPEST else 0
    return size if size <= _MOST else 0


def _world_size(groups: Any) -> int | None:
    """That of the largest group."""
    listed = [
        each.get("ranks")
        for each in (groups.values() if isinstance(groups, dict) else ())
        if isinstance(each, dict)
    ]
    sizes = [len(ranks) for ranks in map(_ranks, listed) if ranks]
    return max(sizes, default=None)


def _ranks(told: Any) -> list[Any]:
    """A list, or one in a string, as older versions have it."""
    if isinstance(told, str):
        try:
            told = json.loads(told)
        except (ValueError, RecursionError):
            return []
    return told if isinstance(told, list) else []
