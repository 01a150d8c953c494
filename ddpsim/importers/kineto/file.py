"""The events of a PyTorch profiler (Kineto) trace, and no others: a Chrome trace, gzipped or not.

Old and new names of categories are read alike. Times are microseconds, as the file has them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from json import JSONDecodeError
from sys import getsizeof
from typing import Any, Literal, NamedTuple, TextIO

from ddpsim.errors import ImportFailedError, shown
from ddpsim.files import json_value, no_collection
from ddpsim.importers.text import foreign, foreign_text, held_bytes
from ddpsim.scenario.quantity import SourceFile

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
_HEAD = ("ddpsim", "schemaVersion", "distributedInfo", "deviceProperties", _OLD_DEVICES)
_NOTHING: dict[str, Any] = {}
_LARGEST = 2**30  # characters
_EVENT_BYTES, _ENTRY_BYTES = 200, 200  # with its times; of a dictionary
_MOST_BYTES, _MOST_BYTES_A_CHARACTER = 1.4e9, 1.9  # of events
_BEGINNING = 4096
_MOST_SHARED = 100_000
_LATEST_US = 1e16  # some 300 years: nanoseconds taken for microseconds are beyond it
_HOW = "wanted a trace that torch.profiler exported (prof.export_chrome_trace)"
_MOST_ITEMS = 12_000_000  # of a list: 1 GiB of events has fewer
_LONGEST_VALUE = 2**24  # characters of a value in a stream
_CHUNK = 2**20  # characters
_SPACE = re.compile(r"[ \t\n\r]*")


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
    with foreign_text(source, _HOW) as text, no_collection():
        stream = JsonStream(text, _LARGEST)
        try:
            mark = stream.next_mark()
            if mark not in ("{", "["):
                what = "this is no JSON, and a trace is" if mark else "the file is empty"
                raise ImportFailedError(name, f"{what}; {_HOW}")
            head, events = _read(name, stream)
        except TooLargeError as error:
            raise ImportFailedError(
                name, f"{error}; record fewer steps (torch.profiler.schedule), without with_stack"
            ) from None
        except ValueError as error:
            raise ImportFailedError(
                name,
                f"the JSON is cut off or broken ({error}); let the profiler end before copying it",
                stream.line,
            ) from None
    if events is None:
        raise ImportFailedError(name, f"has no list of traceEvents; {_HOW}")
    if "ddpsim" in head:
        raise ImportFailedError(name, f"was simulated by ddpsim trace, not measured; {_HOW}")
    if not events or "schemaVersion" not in head:
        raise ImportFailedError(name, f"holds no event of PyTorch's profiler; {_HOW}")
    distributed = head.get("distributedInfo")
    devices = head.get("deviceProperties", head.get(_OLD_DEVICES))
    return TraceFile(
        name,
        events,
        distributed if isinstance(distributed, dict) else {},
        {
            item["id"]: str(item.get("name"))
            for item in (devices if isinstance(devices, list) else ())
            if isinstance(item, dict) and isinstance(item.get("id"), int)
        },
    )


def is_of_traces(source: SourceFile) -> bool:
    """Whether it is a folder, or a file that begins as a trace of PyTorch's profiler does."""
    if source.path.is_dir():
        return True
    with foreign(source) as file:
        return b'"schemaVersion"' in file.read(_BEGINNING)


def _read(name: str, stream: JsonStream) -> tuple[dict[str, Any], list[Event] | None]:
    """What the head says, and the events; None where there is no list of them."""
    head: dict[str, Any] = {}
    events: list[Event] | None = None
    if stream.next_mark() != "{":
        stream.value()
        return head, None
    for key in stream.members():
        if key == "traceEvents" and stream.next_mark() == "[":
            events = _events(name, stream)
            continue
        value = stream.value()
        if key in _HEAD:
            head[key] = value
    if stream.next_mark():
        raise ValueError("more follows")
    return head, events


def _events(name: str, stream: JsonStream) -> list[Event]:
    """What is read of the list that follows; raises TooLargeError where it takes much memory."""
    events, shared, own_bytes = list[Event](), _Shared(), 0
    for item in stream.items():
        event = _event(name, shared, item)
        if event is None:
            continue
        events.append(event)
        own_bytes += _EVENT_BYTES + (getsizeof(event.args) if event.args else 0)
        if own_bytes + shared.held_bytes > max(_MOST_BYTES, _MOST_BYTES_A_CHARACTER * stream.taken):
            raise TooLargeError(f"its events take more than {_MOST_BYTES / 1e9:g} GB of memory")
    return events


class _Shared:
    """Names, sizes and types: they come back in each step, and each is held once."""

    def __init__(self) -> None:
        self._seen: dict[str, Any] = {}
        self.held_bytes = 0

    def __call__(self, value: Any) -> Any:
        """An equal value that was seen before, or this one."""
        if isinstance(value, int):
            return value
        key = value if isinstance(value, str) else f"\0{value!r}"
        if key in self._seen:
            return self._seen[key]
        self.held_bytes += held_bytes(value) + _ENTRY_BYTES + len(key)
        if len(self._seen) < _MOST_SHARED:
            self._seen[key] = value
        return value


def _event(name: str, shared: _Shared, item: Any) -> Event | None:
    """What is read of an item; None: nothing."""
    if not isinstance(item, dict):
        return None
    category = item.get("cat")
    kind = _KINDS.get(category) if isinstance(category, str) else None
    if item.get("ph") != "X" or kind is None:
        return None
    start_us, end_us = item.get("ts"), math.nan
    with suppress(KeyError, TypeError, OverflowError):  # then it is no time
        end_us = item["ts"] + item["dur"]
    title = shared(str(item.get("name")))
    args = _kept(kind, title, item.get("args"), shared)
    event = Event(kind, title, item.get("tid", 0), start_us, end_us, args)  # type: ignore[arg-type]
    is_typed = isinstance(event.thread, (int, str)) and isinstance(start_us, (int, float))
    if not is_typed or not -_LATEST_US < event.start_us <= event.end_us < _LATEST_US:
        raise ImportFailedError(
            name, f"{shown(title)} has no place in time (its ts, dur and tid); {_HOW}"
        )
    return event


def _kept(kind: Kind, name: str, args: Any, shared: _Shared) -> dict[str, Any]:
    """What is read of an event's arguments, which are most of a file."""
    if not isinstance(args, dict) or (kind == "op" and not name.startswith(_SIZED)):
        return _NOTHING
    return {key: shared(args[key]) for key in _ARGS[kind] if key in args}


class TooLargeError(ValueError):
    """A stream is longer than what is read of it."""


class JsonStream:
    """Values of a JSON text in the order in which they stand, each forgotten after its use.

    At most `most` characters are read. All methods raise ValueError in our words where the text
    is no JSON, and TooLargeError where it, one list or one value is too large.
    """

    def __init__(self, text: TextIO, most: int) -> None:
        self._text, self._most, self._left = text, most, most
        self._held, self._at, self._lines = "", 0, 0

    @property
    def taken(self) -> int:
        """How many characters were read."""
        return self._most - self._left

    @property
    def line(self) -> int:
        """The line that was reached, from 1."""
        return self._lines + self._held.count("\n", 0, self._at) + 1

    def members(self) -> Iterator[str]:
        """Names of the object that follows; the caller takes each one's value before the next."""
        for _ in self._entries("{", "}"):
            if self.next_mark() != '"':
                raise ValueError("Expecting property name enclosed in double quotes")
            name: str = self.value()
            self._expect(":")
            yield name

    def items(self) -> Iterator[Any]:
        """Values of the list that follows."""
        for place in self._entries("[", "]"):
            if place == _MOST_ITEMS:
                raise TooLargeError(f"a list holds more than {_MOST_ITEMS:,} items")
            yield self.value()

    def _entries(self, begin: str, end: str) -> Iterator[int]:
        """Places of the entries of what follows; the caller takes each before the next."""
        self._expect(begin)
        if self.next_mark() == end:
            self._at += 1
            return
        for place in count():
            yield place
            if self._expect(f",{end}") == end:
                return

    def next_mark(self) -> str:
        """The character that a value or the rest begins with; empty at the end."""
        while True:
            self._at = _SPACE.match(self._held, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._held):
                return self._held[self._at]
            if not self._more():
                return ""

    def value(self) -> Any:
        """Parse the value that follows."""
        self.next_mark()
        while True:
            try:
                value, end = json_value(self._held, self._at)
            except JSONDecodeError as error:  # or the rest of it is still to come
                if len(self._held) - self._at > _LONGEST_VALUE:
                    raise TooLargeError(f"a value is broken ({error.msg}) or too long") from None
                begun = self._at
                if not self._more():
                    self._at = error.pos - begun
                    raise ValueError(error.msg) from None
                continue
            if end == len(self._held) and self._more():  # a number may go on
                continue
            self._at = end
            return value

    def _expect(self, marks: str) -> str:
        mark = self.next_mark()
        if not mark or mark not in marks:
            raise ValueError(f"expecting {' or '.join(map(repr, marks))}")
        self._at += 1
        return mark

    def _more(self) -> bool:
        """Hold as much again as is held and unused; False at the end of the text."""
        self._lines += self._held.count("\n", 0, self._at)
        rest = self._held[self._at :]
        new = self._text.read(max(_CHUNK, len(rest)))
        self._left -= len(new)
        if self._left < 0:
            raise TooLargeError(f"holds more than {self._most >> 30} GiB of JSON")
        self._held, self._at = rest + new, 0
        return bool(new)
