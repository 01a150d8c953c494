"""What DDP logs of itself: `model._get_ddp_logging_data()`, as JSON or as Python prints it.

Source: torch/csrc/distributed/c10d/logger.cpp (set_construction_data_and_log,
set_runtime_stats_and_log). Times are nanoseconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from ddpsim.errors import ImportFailedError

_MARK = re.compile(r"""["']bucket_sizes["']""")
_ENTRY = re.compile(
    r"""["'](\w{1,80})["']:[ \t\r\n]{0,8}(?:"([^"]*)"|'([^']*)'|\[([^][]*)\]|([^][,}"'\s]{1,40}))"""
)
_BRACE = re.compile(r"[{}]")
_LONGEST = 2**20  # characters from { to }
_MOST = 10**15
_UNTOLD = ("", "N/A", "None", "null")


def _whole(value: str | None) -> int | None:
    """A whole number above zero, within reason."""
    is_whole = value is not None and value.strip().isdecimal() and len(value) < 20
    number = int(value or 0) if is_whole else 0
    return number if 0 < number <= _MOST else None


def _seconds(value: str | None) -> float | None:
    whole = _whole(value)
    return None if whole is None else whole * 1e-9


_Whole = Annotated[int | None, BeforeValidator(_whole)]
_Seconds = Annotated[float | None, BeforeValidator(_seconds)]
_Text = Annotated[str | None, BeforeValidator(lambda value: None if value in _UNTOLD else value)]
_IsOn = Annotated[bool, BeforeValidator(lambda value: value in ("1", "True", "true"))]
_Sizes = Annotated[
    tuple[int, ...],
    BeforeValidator(lambda value: [size for each in value.split(",") if (size := _whole(each))]),
]


class DdpLogging(BaseModel):
    """One rank's: None where it is not told. Sizes in bytes, times in seconds."""

    world_size: _Whole = None
    backend: _Text = Field(None, alias="backend_name")
    bucket_bytes: _Sizes = Field(min_length=1)
    cap_bytes: _Whole = Field(None, alias="bucket_cap_bytes")
    find_unused_parameters: _IsOn = False
    gradient_as_bucket_view: _IsOn = False
    static_graph: _IsOn = False
    broadcast_buffers: _IsOn = False
    comm_hook: _Text = None
    parameters: _Whole = Field(None, alias="num_parameter_tensors")
    parameter_bytes: _Whole = Field(None, alias="total_parameter_size_bytes")
    forward_s: _Seconds = Field(None, alias="avg_forward_compute_time")
    backward_s: _Seconds = Field(None, alias="avg_backward_compute_time")
    comm_s: _Seconds = Field(None, alias="avg_backward_comm_time")


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
    try:
        return DdpLogging.model_validate({**data, "bucket_bytes": sizes})
    except ValidationError:
        told = "its bucket_sizes are no list of bytes, as DDP logs them"
        raise ImportFailedError(name, told) from None
