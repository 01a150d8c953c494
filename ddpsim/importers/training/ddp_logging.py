"""What DDP logs of itself: `model._get_ddp_logging_data()`, as JSON or as Python prints it.

Source: torch/csrc/distributed/c10d/logger.cpp (set_construction_data_and_log,
set_runtime_stats_and_log). Times are nanoseconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ddpsim.errors import ImportFailedError

_MARK = re.compile(r"""["']bucket_sizes["']""")
_ENTRY = re.compile(
    r"""["'](\w{1,80})["']:[ \t\r\n]{0,8}(?:"([^"]*)"|'([^']*)'|\[([^][]*)\]|([^][,}"'\s]{1,40}))"""
)
_BRACE = re.compile(r"[{}]")
_LONGEST = 2**20  # characters from { to }
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


def logged_data(log: Iterable[str]) -> Mapping[str, str] | None:
    """The last of DDP's data in a log, whatever else stands there; None: there is none."""
    last = None
    for text in _braced(log):
        if _MARK.search(text):
            last = text
    if last is None:
        return None
    return {found[1]: "".join(filter(None, found.groups()[1:])) for found in _ENTRY.finditer(last)}


def _braced(log: Iterable[str]) -> Iterator[str]:
    """What stands between { and } with no other brace in it, up to 1 Mi characters."""
    parts, left = list[str](), 0  # nothing is left outside of braces
    for line in log:
        if not left and "{" not in line:
            continue
        at = 0
        for brace in _BRACE.finditer(line):
            if left > 0 and brace[0] == "}":
                yield "".join([*parts, line[at : brace.start()]])
            parts, left, at = [], _LONGEST if brace[0] == "{" else 0, brace.end()
        if left > 0:
            parts.append(line[at:])
            left = max(0, left - len(parts[-1]))


def ddp_logging(name: str, data: Mapping[str, str]) -> DdpLogging:
    """Read it; raises ImportFailedError where it is not of DDP."""
    sizes = data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes", "")
    buckets = tuple(size for each in sizes.split(",") if (size := _whole(each)))
    if not buckets:
        raise ImportFailedError(name, "its bucket_sizes are no list of bytes, as DDP logs them")
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


def _whole(value: str | None) -> int | None:
    """A whole number above zero, within reason."""
    is_whole = value is not None and value.strip().isdecimal() and len(value) < 20
    number = int(value or 0) if is_whole else 0
    return number if 0 < number <= _MOST else None


def _text(value: str | None) -> str | None:
    return None if value in ("", "N/A", "None", "null") else value


def _is_on(data: Mapping[str, str], key: str) -> bool:
    return data.get(key) in ("1", "True", "true")


def _seconds(data: Mapping[str, str], key: str) -> float | None:
    whole = _whole(data.get(key))
    return None if whole is None else whole * 1e-9
