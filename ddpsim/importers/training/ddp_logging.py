"""What DDP logs of itself: `model._get_ddp_logging_data()`, as JSON or as Python prints it.

Source: torch/csrc/distributed/c10d/logger.cpp (set_construction_data_and_log,
set_runtime_stats_and_log). Times are nanoseconds.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ddpsim.errors import ImportFailedError

__all__ = ["DdpLogging", "ddp_logging", "logged_data"]

_DATA = re.compile(r"\{[^{}]*[\"']bucket_sizes[\"'][^{}]*\}")
_MOST = 10**15


class DdpLogging(NamedTuple):
    """One rank's: None where it is not told. Sizes in bytes, times in seconds."""

    world_size: int | None
    backend: str | None
    bucket_bytes: tuple[int, ...]
    cap_bytes: int | None
    find_unused_parameters: bool
    gradient_as_bucket_view: bool
    static_graph: bool
    broadcast_buffers: bool
    comm_hook: str | None
    parameters: int | None
    parameter_bytes: int | None
    forward_s: float | None
    backward_s: float | None
    comm_s: float | None


def logged_data(text: str) -> Mapping[str, Any] | None:
    """The last of DDP's data in a text, whatever else stands there; None: there is none."""
    for found in reversed(_DATA.findall(text)):
        for parse in (json.loads, ast.literal_eval):
            try:
                data = parse(found)
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                continue
            if isinstance(data, dict):
                return data
    return None


def ddp_logging(name: str, data: Mapping[str, Any]) -> DdpLogging:
    """Read it; raises ImportFailedError where it is not of DDP."""
    sizes = data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes")
    if not isinstance(sizes, (str, list)):
        raise ImportFailedError(name, "its bucket_sizes are no list of bytes, as DDP logs them")
    told = sizes if isinstance(sizes, list) else sizes.split(",")
    buckets = tuple(size for each in told if (size := _whole(each)))
    return DdpLogging(
        world_size=_whole(data.get("world_size")),
        backend=_text(data.get("backend_name")),
        bucket_bytes=buckets,
        cap_bytes=_whole(data.get("bucket_cap_bytes")),
        find_unused_parameters=_is_on(data, "find_unused_parameters"),
        gradient_as_bucket_view=_is_on(data, "gradient_as_bucket_view"),
        static_graph=_is_on(data, "static_graph"),
        broadcast_buffers=_is_on(data, "broadcast_buffers"),
        comm_hook=_text(data.get("comm_hook")),
        parameters=_whole(data.get("num_parameter_tensors")),
        parameter_bytes=_whole(data.get("total_parameter_size_bytes")),
        forward_s=_seconds(data, "avg_forward_compute_time"),
        backward_s=_seconds(data, "avg_backward_compute_time"),
        comm_s=_seconds(data, "avg_backward_comm_time"),
    )


def _whole(value: Any) -> int | None:
    """A whole number above zero, within reason."""
    if isinstance(value, str) and value.strip().isdecimal() and len(value) < 20:
        value = int(value)
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return value if is_whole and 0 < value <= _MOST else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value not in ("", "N/A") else None


def _is_on(data: Mapping[str, Any], key: str) -> bool:
    return data.get(key) in (1, True, "1", "True")


def _seconds(data: Mapping[str, Any], key: str) -> float | None:
    whole = _whole(data.get(key))
    return None if whole is None else whole * 1e-9
