"""A trace's events, and what they are: steps, threads, what DDP adds, work by its launch.

A file is a Chrome trace, gzipped or not, of which the events of PyTorch's profiler (Kineto) are
read and no others. Old and new names of categories are read alike. Times are microseconds, as the
file has them.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, count, pairwise
from json import JSONDecodeError
from sys import getsizeof
from typing import Any, Literal, NamedTuple, TextIO

from ddpsim.errors import shown
from ddpsim.files import json_value, no_collection
from ddpsim.importers.text import ForeignFile, foreign, foreign_text, held_bytes
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
ACCUMULATE = "torch::autograd::AccumulateGrad"
_NODE = "autograd::engine::evaluate_function: "
_OLD_NODE = re.compile(r"Backward\d*$")  # torch before 1.11 records the nodes alone
OF_DDP = (
    *("torch::distributed::", "torch.distributed.", "c10d::", "nccl:", "gloo:"),
    *("record_param_comms", "aten::flatten_dense_tensors", "aten::unflatten_dense_tensors"),
)
_COLLECTIVE_CALL = "c10d::"
BROADCAST = "c10d::broadcast_"
# of torch.utils.checkpoint with use_reentrant=True, Megatron's and DeepSpeed's alike
_CHECKPOINT = "CheckpointFunctionBackward"
OPTIMIZER_STEP = "Optimizer.step"
_READ = "aten::_local_scalar_dense"
_LOADER = "enumerate(DataLoader)"
# a call of the CUDA runtime that takes longer waits for the device (a full queue, a synchronise)
_LONGEST_CALL_US = 100.0
# a longer pause between two kernels of which both are launched is a wait, not the device's own
_LONGEST_PAUSE_US = 10.0
_MOST_LOST = 0.05  # of the kernels' time: as much as a prediction may be off by other reasons
_MOST_THREADS = 64  # of the backward: torch has one a device
MOST = 10**12  # of elements, and of numbers of launches


class Event(NamedTuple):
    """Something with a length, on a thread of the host or a stream of the device."""

    kind: Kind
    name: str
    thread: int | str
    start_us: float
    end_us: float
    args: dict[str, Any]


@dataclass(frozen=True)
class TraceFile(ForeignFile):
    """A file's events, and what its head says of the job and of the devices."""

    events: list[Event]
    distributed: dict[str, Any]
    devices: dict[int, str]


def read_trace_file(source: SourceFile) -> TraceFile:
    """Read a trace; raises ImportFailedError, which says what to do."""
    file = ForeignFile(source.given)
    with foreign_text(source, _HOW) as text, no_collection():
        stream = JsonStream(text, _LARGEST)
        try:
            mark = stream.next_mark()
            if mark not in ("{", "["):
                what = "this is no JSON, and a trace is" if mark else "the file is empty"
                raise file.wrong(f"{what}; {_HOW}")
            head, events = _read(file, stream)
        except TooLargeError as error:
            raise file.wrong(
                f"{error}; record fewer steps (torch.profiler.schedule), without with_stack"
            ) from None
        except ValueError as error:
            raise file.wrong(
                f"the JSON is cut off or broken ({error}); let the profiler end before copying it",
                stream.line,
            ) from None
    if events is None:
        raise file.wrong(f"has no list of traceEvents; {_HOW}")
    if "ddpsim" in head:
        raise file.wrong(f"was simulated by ddpsim trace, not measured; {_HOW}")
    if not events or "schemaVersion" not in head:
        raise file.wrong(f"holds no event of PyTorch's profiler; {_HOW}")
    distributed = head.get("distributedInfo")
    devices = head.get("deviceProperties", head.get(_OLD_DEVICES))
    return TraceFile(
        file.name,
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


def _read(file: ForeignFile, stream: JsonStream) -> tuple[dict[str, Any], list[Event] | None]:
    """What the head says, and the events; None where there is no list of them."""
    head: dict[str, Any] = {}
    events: list[Event] | None = None
    if stream.next_mark() != "{":
        stream.value()
        return head, None
    for key in stream.members():
        if key == "traceEvents" and stream.next_mark() == "[":
            events = _events(file, stream)
            continue
        value = stream.value()
        if key in _HEAD:
            head[key] = value
    if stream.next_mark():
        raise ValueError("more follows")
    return head, events


def _events(file: ForeignFile, stream: JsonStream) -> list[Event]:
    """What is read of the list that follows; raises TooLargeError where it takes much memory."""
    events, shared, own_bytes = list[Event](), _Shared(), 0
    for item in stream.items():
        event = _event(file, shared, item)
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


def _event(file: ForeignFile, shared: _Shared, item: Any) -> Event | None:
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
        raise file.wrong(f"{shown(title)} has no place in time (its ts, dur and tid); {_HOW}")
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


class Intervals:
    """A union of intervals (start, end)."""

    def __init__(self, intervals: Iterable[tuple[float, float]]) -> None:
        self.starts: list[float] = []
        self.ends: list[float] = []
        for start, end in sorted(intervals):
            if self.ends and start <= self.ends[-1]:
                self.ends[-1] = max(self.ends[-1], end)
            elif end > start:
                self.starts.append(start)
                self.ends.append(end)
        lengths = (end - start for start, end in zip(self.starts, self.ends, strict=True))
        self._before = [0.0, *accumulate(lengths)]

    @property
    def length(self) -> float:
        """How long they take together."""
        return self._before[-1]

    def __contains__(self, time: float) -> bool:
        index = bisect_right(self.starts, time) - 1
        return index >= 0 and time < self.ends[index]

    def beginning_at(self, start: float) -> float:
        """How long the one is that begins then; 0 where none does."""
        index = bisect_right(self.starts, start) - 1
        return self.ends[index] - start if index >= 0 and self.starts[index] == start else 0.0

    def beginning_within(self, start: float, end: float) -> Iterable[tuple[float, float]]:
        """Picks events that begin from `start` on and before `end`."""
        those = slice(bisect_left(self.starts, start), bisect_left(self.starts, end))
        return zip(self.starts[those], self.ends[those], strict=True)

    def within(self, start: float, end: float) -> float:
        """How much of the time from `start` to `end` they take."""
        return max(0.0, self._until(end) - self._until(start)) if end > start else 0.0

    def _until(self, time: float) -> float:
        index = bisect_right(self.starts, time) - 1
        if index < 0:
            return 0.0
        return self._before[index] + min(time, self.ends[index]) - self.starts[index]


class Window(NamedTuple):
    """A step by the host's clock."""

    name: str
    start_us: float
    end_us: float


class DeviceWork(NamedTuple):
    """What the device did for one launch: work on the compute streams, or a collective."""

    launch: Event
    event: Event
    work_us: float


class Lost(NamedTuple):
    """Kernels whose launch is not recorded: how many, and their time as a share of all kernels'."""

    kernels: int
    time_s: float
    share: float


class TraceEvents:
    """A file's events by what they are."""

    def __init__(self, file: TraceFile) -> None:
        self.wrong = file.wrong
        by_start = sorted(file.events, key=lambda event: (event.start_us, -event.end_us))
        self.ops = [event for event in by_start if event.kind == "op"]
        self.calls = [event for event in by_start if event.kind == "runtime"]
        self.kernels = [event for event in by_start if event.kind == "gpu"]
        self.accumulated = [op for op in self.ops if op.name == ACCUMULATE]
        if not self.accumulated:
            lacks = "no GPU kernel and no backward" if not self.kernels else "no op of the backward"
            raise file.wrong(
                f"holds {lacks} (no AccumulateGrad); record whole training steps with "
                "activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
            )
        if len(self.backward_threads) > _MOST_THREADS:
            raise file.wrong("runs its backward on too many threads; record one process")
        self.device = self._one_device()

    def _one_device(self) -> int:
        of_kernels = (event.args.get("device") for event in self.kernels)
        devices = sorted({device for device in of_kernels if isinstance(device, int)})
        if len(devices) > 1:
            raise self.wrong(
                f"holds kernels of {len(devices)} devices ({', '.join(map(str, devices))}); "
                "record one process with one GPU",
            )
        return devices[0] if devices else 0

    @cached_property
    def windows(self) -> list[Window]:
        """The steps: from ProfilerStep, or else each from one optimizer's last step to the next."""
        marked = [op for op in self.ops if op.name.startswith("ProfilerStep#")]
        if marked:
            # each event is then of few steps, and reading takes time in proportion to the file
            if sum(op.end_us - op.start_us for op in marked) > 2 * spans_of(marked).length:
                raise self.wrong(
                    "its steps (ProfilerStep) overlap; record one process with one profiler"
                )
            return [Window(op.name, op.start_us, op.end_us) for op in marked]
        # when each step's last optimizer ended: none follows before the next gradient
        every_us = sorted(op.end_us for op in self.ops if op.name.startswith(OPTIMIZER_STEP))
        ready_us = sorted(op.end_us for op in self.accumulated)
        before = [bisect_right(ready_us, end_us) for end_us in every_us]
        following = zip(every_us, before, [*before, -1][1:], strict=True)
        ends_us = [end_us for end_us, i, j in following if i != j]
        if not ends_us:
            raise self.wrong(
                "has no ProfilerStep and no Optimizer.step: where a step ends is not known; give "
                "the profiler a schedule (torch.profiler.schedule), without which it writes no "
                "ProfilerStep, and call prof.step() after each step"
            )
        spans = pairwise([self.ops[0].start_us, *ends_us])
        return [Window(f"step {i}", start, end) for i, (start, end) in enumerate(spans, 1)]

    @cached_property
    def main(self) -> int | str:
        """The thread that trains."""
        marks = ("ProfilerStep#", OPTIMIZER_STEP)
        return next(op.thread for op in self.ops if op.name.startswith(marks))

    @cached_property
    def backward_threads(self) -> set[int | str]:
        """The threads of the backward; on a CPU it is the main one."""
        return {op.thread for op in self.accumulated}

    @cached_property
    def marks_nodes(self) -> bool:
        """Whether the file tells of each node all that the engine does for it."""
        return any(op.name.startswith(_NODE) for op in self.ops)

    @cached_property
    def nodes(self) -> list[Event]:
        """What autograd's engine carries out, one after the other."""
        if self.marks_nodes:
            return [op for op in self.ops if op.name.startswith(_NODE)]
        of_backward = [op for op in self.ops if op.thread in self.backward_threads]
        if self.main not in self.backward_threads:
            return of_backward
        return [op for op in of_backward if op.name == ACCUMULATE or _OLD_NODE.search(op.name)]

    @cached_property
    def ddp(self) -> dict[int | str, Intervals]:
        """When the host is busy with what DDP adds, by thread."""
        by_thread: dict[int | str, list[tuple[float, float]]] = defaultdict(list)
        for op in self.ops:
            if op.name.startswith(OF_DDP):
                by_thread[op.thread].append((op.start_us, op.end_us))
        for thread, hooks in self.hooks.items():
            by_thread[thread] += zip(hooks.starts, hooks.ends, strict=True)
        for thread in list(by_thread):
            by_thread[thread] += _copies_back(op for op in self.ops if op.thread == thread)
        by_thread[self.main] += self.broadcasts
        return {thread: Intervals(spans) for thread, spans in by_thread.items()}

    @cached_property
    def broadcasts(self) -> list[tuple[float, float]]:
        """When the main thread broadcasts buffers; gloo's host waits in the midst of it."""
        spans, began_us = [], None
        for op in (op for op in self.ops if op.thread == self.main):
            if op.name == BROADCAST and began_us is None:
                began_us = op.start_us
            elif "unflatten_dense_tensors" in op.name and began_us is not None:
                spans.append((began_us, op.end_us))
                began_us = None
        return spans

    @cached_property
    def checkpoints(self) -> Intervals:
        """When a reentrant checkpoint has a backward of its own, whose leaves are not all ours."""
        return spans_of(op for op in self.ops if op.name == _CHECKPOINT)

    @cached_property
    def hooks(self) -> dict[int | str, Intervals]:
        """When DDP's hooks run, by thread: in a gradient's node, after the gradient is there."""
        by_thread: dict[int | str, list[tuple[float, float]]] = defaultdict(list)
        ends = {
            thread: sorted(op.end_us for op in self.accumulated if op.thread == thread)
            for thread in self.backward_threads
        }
        for node in self.nodes:
            if node.name == _NODE + ACCUMULATE:
                ready = ends.get(node.thread, [])
                first = bisect_right(ready, node.start_us)
                if first < len(ready) and ready[first] < node.end_us:
                    by_thread[node.thread].append((ready[first], node.end_us))
        return {thread: Intervals(spans) for thread, spans in by_thread.items()}

    @cached_property
    def _collective_calls(self) -> list[Event]:
        return [op for op in self.ops if op.name.startswith(_COLLECTIVE_CALL)]

    def last_collective_call(self, at_us: float) -> Event | None:
        """The host's last call of a collective until then; None if the file tells of none."""
        index = bisect_right(self._collective_calls, at_us, key=lambda call: call.start_us)
        return self._collective_calls[index - 1] if index else None

    @cached_property
    def loader(self) -> Intervals:
        """When the main thread waits for a batch."""
        return self._spans(_LOADER)

    @cached_property
    def optimizer(self) -> Intervals:
        """When the main thread is in the optimizer, zero_grad included."""
        return self._spans("Optimizer.")

    @cached_property
    def reads(self) -> list[Event]:
        """When the main thread reads a value and waits for it, as `.item()` does of a loss.

        Those of the optimizer are its own: its counts of steps are on the host.
        """
        waits = [call for call in self.calls if "Synchronize" in call.name]
        started_us = sorted(call.start_us for call in waits if call.thread == self.main)
        named = (op for op in self.ops if op.name == _READ and op.thread == self.main)
        return [
            op
            for op in named
            if bisect_left(started_us, op.start_us) < bisect_right(started_us, op.end_us)
            and op.start_us not in self.optimizer
        ]

    @cached_property
    def optimizer_name(self) -> str | None:
        """Name of the optimizer, `adamw` of `Optimizer.step#AdamW.step`; None: not told."""
        named = (op.name for op in self.ops if op.name.startswith(f"{OPTIMIZER_STEP}#"))
        first = next(named, "#").partition("#")[2].partition(".")[0]
        return first.lower() or None

    def _spans(self, prefix: str) -> Intervals:
        return spans_of(
            op for op in self.ops if op.name.startswith(prefix) and op.thread == self.main
        )

    @cached_property
    def unpaid(self) -> dict[int | str, Intervals]:
        """When the host does nothing for the model, by thread: DDP's work, the loader's, waits."""
        by_thread: dict[int | str, list[tuple[float, float]]] = defaultdict(list)
        for thread, spans in self.ddp.items():
            by_thread[thread] += zip(spans.starts, spans.ends, strict=True)
        by_thread[self.main] += zip(self.loader.starts, self.loader.ends, strict=True)
        for call in self.calls:
            usual_us = 0.0 if "Synchronize" in call.name else _LONGEST_CALL_US
            if call.end_us - call.start_us > usual_us:
                by_thread[call.thread].append((call.start_us + usual_us, call.end_us))
        return {thread: Intervals(spans) for thread, spans in by_thread.items()}

    def host_us(self, thread: int | str, start_us: float, end_us: float) -> float:
        """The host's work for the model on a thread."""
        if end_us <= start_us:
            return 0.0
        unpaid = self.unpaid.get(thread)
        return end_us - start_us - (unpaid.within(start_us, end_us) if unpaid else 0.0)

    @cached_property
    def _launches(self) -> dict[int | None, Event]:
        """The host's calls by their correlation."""
        launches = {count_of(call.args.get("correlation")): call for call in self.calls}
        launches.pop(None, None)
        return launches

    def _launch(self, kernel: Event) -> Event | None:
        return self._launches.get(count_of(kernel.args.get("correlation")))

    @cached_property
    def lost(self) -> Lost:
        """Compute kernels that no launch is told of, and that no part of a step therefore holds.

        Those before a stream's first known launch were launched before the recording began.
        """
        begun: set[int | str] = set()
        count, lost_us, all_us = 0, 0.0, 0.0
        for kernel in self.kernels:
            if is_communication(kernel):
                continue
            is_known = self._launch(kernel) is not None
            if is_known:
                begun.add(kernel.thread)
            if kernel.thread in begun:
                all_us += kernel.end_us - kernel.start_us
                count += not is_known
                lost_us += 0.0 if is_known else kernel.end_us - kernel.start_us
        return Lost(count, lost_us * 1e-6, lost_us / all_us if all_us else 0.0)

    @cached_property
    def gpu(self) -> list[DeviceWork]:
        """All that the device did, by its launch; raises ImportFailedError if much has none."""
        works, covered_us = [], float("-inf")
        for event in self.kernels:
            launch = self._launch(event)
            if launch is None:
                continue
            if is_communication(event):
                works.append(DeviceWork(launch, event, 0.0))
                continue
            start_us = max(event.start_us, covered_us)
            if launch.end_us <= covered_us < event.start_us <= covered_us + _LONGEST_PAUSE_US:
                start_us = covered_us
            works.append(DeviceWork(launch, event, max(0.0, event.end_us - start_us)))
            covered_us = max(covered_us, event.end_us)
        if self.kernels and 2 * len(works) < len(self.kernels):
            raise self.wrong(
                f"the launch of {len(self.kernels) - len(works)} of {len(self.kernels)} kernels is "
                "not recorded; record with ProfilerActivity.CPU too"
            )
        if self.lost.share > _MOST_LOST:
            raise self.wrong(
                f"the launch of {self.lost.kernels} kernels, {100 * self.lost.share:.0f} % of the "
                "kernels' time, is not recorded, so where they belong is not known; record with "
                "ProfilerActivity.CPU too, and fewer steps (torch.profiler.schedule)"
            )
        return sorted(works, key=lambda work: work.launch.start_us)

    @cached_property
    def _launched_us(self) -> list[float]:
        return [work.launch.start_us for work in self.gpu]

    @cached_property
    def communication(self) -> Intervals:
        """When a collective is under way on the device."""
        return spans_of(event for event in self.kernels if is_communication(event))

    def launched(self, window: Window) -> list[DeviceWork]:
        """What the device did of a window's launches."""
        first = bisect_left(self._launched_us, window.start_us)
        return self.gpu[first : bisect_left(self._launched_us, window.end_us)]

    def is_left_out(self, launch: Event) -> bool:
        """Whether a launch is DDP's or the loader's."""
        ddp = self.ddp.get(launch.thread)
        if ddp is not None and launch.start_us in ddp:
            return True
        return launch.thread == self.main and launch.start_us in self.loader


def spans_of(events: Iterable[Event]) -> Intervals:
    """When some of these events are under way."""
    return Intervals((event.start_us, event.end_us) for event in events)


def within(events: Sequence[Event], window: Window) -> Sequence[Event]:
    """Picks those that begin in a window from events in the order of their start."""
    first = bisect_left(events, window.start_us, key=lambda event: event.start_us)
    return events[first : bisect_left(events, window.end_us, key=lambda event: event.start_us)]


def _copies_back(ops: Iterable[Event]) -> Iterator[tuple[float, float]]:
    """What follows an unflatten: DDP copies the broadcast buffers back, one by one."""
    end_us, follows = float("-inf"), False
    for op in ops:
        if op.start_us < end_us:
            continue
        follows = "unflatten_dense_tensors" in op.name or (follows and op.name == "aten::copy_")
        if follows:
            end_us = op.end_us
            yield op.start_us, op.end_us


def is_communication(event: Event) -> bool:
    """Whether a kernel is NCCL's or RCCL's."""
    return event.name.lower().startswith(("nccl", "rccl"))


def count_of(value: Any) -> int | None:
    """A whole number above zero, within reason; None if it is none."""
    return value if isinstance(value, int) and 0 < value <= MOST else None
