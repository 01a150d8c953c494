"""What torch itself tells of a job: dumps of its flight recorder, and what DDP logs of itself.

Dumps (TORCH_FR_BUFFER_SIZE) are pickle or JSON. Source:
torch/csrc/distributed/c10d/FlightRecorderDetail.hpp; a pickle holds dicts, lists, strings and
numbers alone, and nothing else is read: a pickle may otherwise run code. DDP's own data
(`model._get_ddp_logging_data()`) come as JSON or as Python prints them; source:
torch/csrc/distributed/c10d/logger.cpp (set_construction_data_and_log,
set_runtime_stats_and_log). Their times are nanoseconds.
"""

from __future__ import annotations

import io
import pickle
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from math import isfinite, prod
from statistics import median
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

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
_MARK = re.compile(r"""["']bucket_sizes["']""")
_ENTRY = re.compile(
    r"""["'](\w{1,80})["']:[ \t\r\n]{0,8}(?:"([^"]*)"|'([^']*)'|\[([^][]*)\]|([^][,}"'\s]{1,40}))"""
)
_BRACE = re.compile(r"[{}]")
_LONGEST = 2**20  # characters from { to }
_MOST_LOGGED = 10**15
_UNTOLD = ("", "N/A", "None", "null")


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
    """Unpickles dicts, lists, strings and numbers alone; raises KeyError for anything else."""

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
    """Bytes of the first input; 0 where it is not told."""
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
    """Size of the largest group; its ranks are a list, in older versions as text."""
    sizes = []
    for each in groups.values() if isinstance(groups, dict) else ():
        ranks = each.get("ranks") if isinstance(each, dict) else None
        with suppress(ValueError):
            ranks = json_of(ranks) if isinstance(ranks, str) else ranks
        sizes += [len(ranks)] if isinstance(ranks, list) and ranks else []
    return max(sizes, default=None)


def _whole(value: str | None) -> int | None:
    """A whole number above zero, within reason."""
    is_whole = value is not None and value.strip().isdecimal() and len(value) < 20
    number = int(value or 0) if is_whole else 0
    return number if 0 < number <= _MOST_LOGGED else None


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
    return {entry[1]: "".join(filter(None, entry.groups()[1:])) for entry in _ENTRY.finditer(last)}


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
        problem = "its bucket_sizes are no list of bytes, as DDP logs them"
        raise ImportFailedError(name, problem) from None
