"""The events of a PyTorch profiler (Kineto) trace, and no others: a Chrome trace, gzipped or not.

Old and new names of categories are read alike. Times are microseconds, as the file has them.
"""

from __future__ import annotations

import gc
import gzip
import json
import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from sys import intern
from typing import IO, Any, Literal, NamedTuple, cast

from ddpsim.errors import ImportFailedError, shown
from ddpsim.scenario.quantity import SourceFile

__all__ = ["TIMED", "Event", "TraceFile", "is_of_traces", "read_trace_file"]

Kind = Literal["op", "runtime", "gpu"]

# since torch 1.12 in lower case; before, with capitals. Source: libkineto's ActivityType.cpp
_KINDS: dict[str, Kind] = {
    **dict.fromkeys(("cpu_op", "user_annotation", "Operator"), "op"),
    **dict.fromkeys(("cuda_runtime", "cuda_driver", "Runtime"), "runtime"),
    **dict.fromkeys(("kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset"), "gpu"),
}
_ARGS: dict[Kind, tuple[str, ...]] = {
    "op": ("Input Dims", "Input type"),
    "runtime": ("correlation",),
    "gpu": (
        *("correlation", "device", "grid", "block"),
        *("Collective name", "In msg nelems", "dtype"),
    ),
}
# ops in which a CPU spends its time, told apart by the sizes of their inputs
TIMED = ("aten::mm", "aten::addmm", "aten::bmm", "aten::convolution", "aten::convolution_backward")
_SIZED = ("torch::autograd::AccumulateGrad", "gloo:", *TIMED)  # ops of which the sizes are read
_OLD_DEVICES = "computeProperties"  # the key of the first versions
_NOTHING: dict[str, Any] = {}
_LARGEST_BYTES = 2**30
_BEGINNING = 4096
_LATEST_US = 1e16  # some 300 years: nanoseconds taken for microseconds are beyond it
_HOW = "wanted a trace that torch.profiler exported (prof.export_chrome_trace)"


class Event(NamedTuple):
    """Something with a length, on a thread of the host or a stream of the device."""

    kind: Kind
    name: str
    thread: int | str
    start_us: float
    end_us: float
    args: dict[str, Any]


class TraceFile(NamedTuple):
    """A file's events, and what its head says of the job and of the devices."""

    name: str
    events: list[Event]
    distributed: dict[str, Any]
    devices: dict[int, str]


def read_trace_file(source: SourceFile) -> TraceFile:
    """Read a trace; raises ImportFailedError, which says what to do."""
    name = source.given
    document = _parsed(name, _content(source))
    events = document.get("traceEvents") if isinstance(document, dict) else None
    if not isinstance(document, dict) or not isinstance(events, list):
        raise ImportFailedError(name, f"has no list of traceEvents; {_HOW}")
    if "ddpsim" in document:
        raise ImportFailedError(name, f"was simulated by ddpsim trace, not measured; {_HOW}")
    kept = [event for event in events if isinstance(event, Event)]
    if not kept or "schemaVersion" not in document:
        raise ImportFailedError(name, f"holds no event of PyTorch's profiler; {_HOW}")
    for event in kept:
        _check(name, event)
    distributed = document.get("distributedInfo")
    devices = document.get("deviceProperties", document.get(_OLD_DEVICES))
    return TraceFile(
        name,
        kept,
        distributed if isinstance(distributed, dict) else {},
        dict(_devices(devices)),
    )


def is_of_traces(source: SourceFile) -> bool:
    """Whether it is a folder, or a file that begins as a trace of PyTorch's profiler does."""
    if source.path.is_dir():
        return True
    try:
        with _opened(source) as file:
            return b'"schemaVersion"' in file.read(_BEGINNING)
    except (OSError, EOFError, zlib.error):
        return False


def _opened(source: SourceFile) -> IO[bytes]:
    """The file, unzipped where it is zipped."""
    with source.path.open("rb") as plain:
        is_zipped = plain.read(2) == b"\x1f\x8b"
    if is_zipped:
        return cast("IO[bytes]", gzip.open(source.path))
    return source.path.open("rb")


def _content(source: SourceFile) -> bytes:
    """The file's bytes, unzipped where it is zipped."""
    name = source.given
    try:
        with _opened(source) as file:
            content = file.read(_LARGEST_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise ImportFailedError(name, "the gzip file is cut off or broken; copy it anew") from None
    except OSError as error:
        raise ImportFailedError(name, f"cannot be read: {error.strerror}") from None
    if not content.strip():
        raise ImportFailedError(name, f"the file is empty; {_HOW}")
    if len(content) > _LARGEST_BYTES:
        raise ImportFailedError(
            name,
            "holds more than 1 GiB of JSON; record fewer steps (torch.profiler.schedule), "
            "without with_stack",
        )
    return content


def _parsed(name: str, content: bytes) -> Any:
    try:
        with _no_collector():
            return json.loads(content, object_hook=_event, strict=False)
    except UnicodeDecodeError:
        raise ImportFailedError(name, f"this is not text; {_HOW}") from None
    except json.JSONDecodeError as error:
        raise ImportFailedError(
            name,
            f"the JSON is cut off or broken ({error.msg}); let the profiler end before copying it",
            error.lineno,
        ) from None
    except (RecursionError, ValueError):  # ValueError: a number of thousands of digits
        raise ImportFailedError(name, f"is too deep, or a number is too long; {_HOW}") from None


@contextmanager
def _no_collector() -> Iterator[None]:
    """Millions of small objects are made and none is garbage: looking for it doubles the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _event(item: dict[str, Any]) -> Any:
    """Called for every object of the JSON, the innermost first: what is no event stays itself."""
    if "ph" not in item:
        return item
    category = item.get("cat")
    kind = _KINDS.get(category) if isinstance(category, str) else None
    if item["ph"] != "X" or kind is None:
        return None
    start_us, end_us = item.get("ts"), math.nan
    with suppress(KeyError, TypeError, OverflowError):  # then it is no time: _check says so
        end_us = item["ts"] + item["dur"]
    # the same names come back thousands of times
    name = intern(str(item.get("name")))
    args = _kept(kind, name, item.get("args"))
    return Event(kind, name, item.get("tid", 0), start_us, end_us, args)  # type: ignore[arg-type]


def _kept(kind: Kind, name: str, args: Any) -> dict[str, Any]:
    """What is read of an event's arguments, which are most of a file."""
    if not isinstance(args, dict) or (kind == "op" and not name.startswith(_SIZED)):
        return _NOTHING
    return {key: args[key] for key in _ARGS[kind] if key in args}


def _check(name: str, event: Event) -> None:
    is_typed = isinstance(event.thread, (int, str)) and isinstance(event.start_us, (int, float))
    if not is_typed or not -_LATEST_US < event.start_us <= event.end_us < _LATEST_US:
        raise ImportFailedError(
            name, f"{shown(event.name)} has no place in time (its ts, dur and tid); {_HOW}"
        )


def _devices(properties: Any) -> Iterator[tuple[int, str]]:
    for item in properties if isinstance(properties, list) else ():
        if isinstance(item, dict) and isinstance(item.get("id"), int):
            yield item["id"], str(item.get("name"))
