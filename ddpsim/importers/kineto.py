"""Traces of PyTorch's profiler (Kineto): what a step's forward, backward and optimizer take.

A kernel belongs to what the host did when it launched it: inside `Optimizer.*`, on the backward's
thread, before the backward or after it. Left out as DDP's own, which the simulation adds: copies
between gradients and buckets, the buffers' broadcast, collectives. A gradient is ready when its
`AccumulateGrad` has ended and what was launched until then is done.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from statistics import median_low
from typing import Any, NamedTuple

from ddpsim.errors import ImportFailedError
from ddpsim.importers.intervals import Intervals
from ddpsim.importers.kineto_file import Event, TraceFile, read_trace_file
from ddpsim.scenario.quantity import SourceFile

__all__ = ["Gradient", "KinetoTrace", "MeasuredCollective", "Piece", "read_trace"]

_ACCUMULATE = "torch::autograd::AccumulateGrad"
_NODE = "autograd::engine::evaluate_function: "
_OLD_NODE = re.compile(r"Backward\d*$")  # torch before 1.11 records the nodes alone
_OF_DDP = (
    *("torch::distributed::", "torch.distributed.", "c10d::", "nccl:", "gloo:"),
    *("record_param_comms", "aten::flatten_dense_tensors", "aten::unflatten_dense_tensors"),
)
_LOADER = "enumerate(DataLoader)"
_DDP_FORWARD = "DistributedDataParallel.forward"
_MOST_BETWEEN = 0.1  # of a backward's work, launched by the thread that does not run it
# c10::Half of an op is Half of a collective
_DTYPES = {"float": "float32", "double": "float64", "half": "float16", "bfloat16": "bfloat16"}
# a call of the CUDA runtime that takes longer waits for the device (a full queue, a synchronise)
_LONGEST_CALL_US = 100.0
# a longer pause between two kernels of which both are launched is a wait, not the device's own
_LONGEST_PAUSE_US = 10.0
_MOST_ELEMENTS = 10**12
_S = 1e-6


class Piece(NamedTuple):
    """Seconds that the device works, and that the host takes to launch it."""

    device_s: float
    host_s: float


class Gradient(NamedTuple):
    """What a trace with shapes tells of a gradient; None without."""

    shape: tuple[int, ...] | None
    dtype: str | None

    @property
    def numel(self) -> int | None:
        """Its elements."""
        return None if self.shape is None else prod(self.shape)


class MeasuredCollective(NamedTuple):
    """One collective of the rank, waiting for late peers included; None: size not recorded."""

    operation: str
    elements: int | None
    dtype: str | None
    duration_s: float
    of_gradients: bool


@dataclass(frozen=True)
class KinetoStep:
    """One step: `backward[i]` ends with `gradients[i]`, one more piece is the tail.

    `length_s` is by the host's clock, `loader_s` its wait for a batch; `beside_comm_s` of the
    device's work was done while a collective was under way.
    """

    name: str
    length_s: float
    forward: tuple[Piece, ...]
    backward: tuple[Piece, ...]
    optimizer: Piece
    gradients: tuple[Gradient, ...]
    collectives: tuple[MeasuredCollective, ...]
    loader_s: float
    beside_comm_s: float

    @property
    def device_s(self) -> float:
        """All the device's work."""
        return sum(piece.device_s for piece in self._pieces)

    @property
    def host_s(self) -> float:
        """All that the host takes to launch it, waits left out."""
        return sum(piece.host_s for piece in self._pieces)

    @property
    def busy_s(self) -> float:
        """What the longer of the two takes."""
        return max(self.device_s, self.host_s)

    @property
    def _pieces(self) -> tuple[Piece, ...]:
        return (*self.forward, *self.backward, self.optimizer)

    @property
    def bucket_elements(self) -> tuple[int, ...] | None:
        """Elements of the gradients' all-reduces as launched; None where one has no size."""
        sizes = [c.elements for c in self.collectives if c.of_gradients]
        return None if None in sizes else tuple(size for size in sizes if size is not None)


@dataclass(frozen=True)
class KinetoTrace:
    """A trace's steps without its first, and the `typical` one: the median by `busy_s`."""

    source: str
    steps: tuple[KinetoStep, ...]
    typical: KinetoStep
    left_out: int
    on_gpu: bool
    device: str | None
    world_size: int | None


def read_trace(source: SourceFile) -> KinetoTrace:
    """Read a trace of whole training steps; raises ImportFailedError, which says what to do."""
    file = read_trace_file(source)
    trace = _Trace(file)
    steps = tuple(step for step in map(trace.step, trace.windows) if step)
    steady = steps[1:] or steps
    if len({len(step.gradients) for step in steady}) > 1:
        counts = sorted({len(step.gradients) for step in steady})
        raise ImportFailedError(
            file.name,
            f"its steps make {counts[0]} to {counts[-1]} gradients; record whole steps that are "
            "alike, one backward in each",
        )
    middle_s = median_low(step.busy_s for step in steady)
    typical = next(step for step in steady if step.busy_s == middle_s)
    _check(file, trace, steady, typical)
    return KinetoTrace(
        source=file.name,
        steps=steady,
        typical=typical,
        left_out=len(steps) - len(steady),
        on_gpu=bool(trace.kernels),
        device=file.devices.get(trace.device) if trace.kernels else None,
        world_size=_world_size(file),
    )


def _world_size(file: TraceFile) -> int | None:
    size = file.distributed.get("world_size")
    return size if isinstance(size, int) else None


def _check(
    file: TraceFile, trace: _Trace, steady: Sequence[KinetoStep], typical: KinetoStep
) -> None:
    parts = {"forward": typical.forward, "backward": typical.backward}
    for part, pieces in parts.items():
        if sum(piece.device_s for piece in pieces) <= 0:
            where = "on the GPU " if trace.kernels else ""
            raise ImportFailedError(
                file.name,
                f"its {part} does no work {where}in {typical.name}; record whole steps with "
                "activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]",
            )
    if (_world_size(file) or 1) > 1 and not any(step.collectives for step in steady):
        raise ImportFailedError(
            file.name,
            f"says that it is of {_world_size(file)} ranks, but holds no communication; record a "
            "step in which DDP reduces (no no_sync), or a run without torch.distributed",
        )


class _Window(NamedTuple):
    """A step by the host's clock."""

    name: str
    start_us: float
    end_us: float


class _Gpu(NamedTuple):
    """What the device did for one launch: work on the compute streams, or a collective."""

    launch: Event
    event: Event
    work_us: float


class _Trace:
    """A file's events by what they are."""

    def __init__(self, file: TraceFile) -> None:
        self.name = file.name
        by_start = sorted(file.events, key=lambda event: (event.start_us, -event.end_us))
        self.ops = [event for event in by_start if event.kind == "op"]
        self.calls = [event for event in by_start if event.kind == "runtime"]
        self.kernels = [event for event in by_start if event.kind == "gpu"]
        self.accumulated = [op for op in self.ops if op.name == _ACCUMULATE]
        if not self.accumulated:
            lacks = "no GPU kernel and no backward" if not self.kernels else "no op of the backward"
            raise ImportFailedError(
                file.name,
                f"holds {lacks} (no AccumulateGrad); record whole training steps with "
                "activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]",
            )
        self.device = self._one_device()

    def _one_device(self) -> int:
        told = (event.args.get("device") for event in self.kernels)
        devices = sorted({device for device in told if isinstance(device, int)})
        if len(devices) > 1:
            raise ImportFailedError(
                self.name,
                f"holds kernels of {len(devices)} devices ({', '.join(map(str, devices))}); "
                "record one process with one GPU",
            )
        return devices[0] if devices else 0

    @cached_property
    def windows(self) -> list[_Window]:
        """The steps: from ProfilerStep, or else each from one optimizer step's end to the next."""
        marked = [op for op in self.ops if op.name.startswith("ProfilerStep#")]
        if marked:
            return [_Window(op.name, op.start_us, op.end_us) for op in marked]
        ends = [op.end_us for op in self.ops if op.name.startswith("Optimizer.step")]
        if not ends:
            raise ImportFailedError(
                self.name,
                "has no ProfilerStep and no Optimizer.step: where a step ends is not known; call "
                "prof.step() after each",
            )
        spans = pairwise([self.ops[0].start_us, *ends])
        return [_Window(f"step {i}", start, end) for i, (start, end) in enumerate(spans, 1)]

    @cached_property
    def main(self) -> int | str:
        """The thread that trains."""
        marks = ("ProfilerStep#", "Optimizer.step")
        return next(op.thread for op in self.ops if op.name.startswith(marks))

    @cached_property
    def backward_threads(self) -> set[int | str]:
        """The threads of the backward; on a CPU it is the main one."""
        return {op.thread for op in self.accumulated}

    @cached_property
    def nodes(self) -> list[Event]:
        """What autograd's engine carries out, one after the other."""
        found = [op for op in self.ops if op.name.startswith(_NODE)]
        if found:
            return found
        of_backward = [op for op in self.ops if op.thread in self.backward_threads]
        if self.main not in self.backward_threads:
            return of_backward
        return [op for op in of_backward if op.name == _ACCUMULATE or _OLD_NODE.search(op.name)]

    @cached_property
    def ddp(self) -> dict[int | str, Intervals]:
        """By thread, when the host is busy with what DDP adds."""
        found: dict[int | str, list[tuple[float, float]]] = defaultdict(list)
        for op in self.ops:
            if op.name.startswith(_OF_DDP):
                found[op.thread].append((op.start_us, op.end_us))
        for thread, spans in self._hooks():
            found[thread] += spans
        for thread in list(found):
            found[thread] += _copies_back(op for op in self.ops if op.thread == thread)
        return {thread: Intervals(spans) for thread, spans in found.items()}

    def _hooks(self) -> Iterator[tuple[int | str, list[tuple[float, float]]]]:
        """DDP's hooks run in the node of a gradient, after the gradient is there."""
        ends = {
            thread: sorted(op.end_us for op in self.accumulated if op.thread == thread)
            for thread in self.backward_threads
        }
        for node in self.nodes:
            if node.name == _NODE + _ACCUMULATE:
                ready = ends.get(node.thread, [])
                first = bisect_right(ready, node.start_us)
                if first < len(ready) and ready[first] < node.end_us:
                    yield node.thread, [(ready[first], node.end_us)]

    @cached_property
    def loader(self) -> Intervals:
        """When the main thread waits for a batch."""
        return self._spans(_LOADER)

    @cached_property
    def optimizer(self) -> Intervals:
        """When the main thread is in the optimizer, zero_grad included."""
        return self._spans("Optimizer.")

    def _spans(self, prefix: str) -> Intervals:
        named = (op for op in self.ops if op.name.startswith(prefix) and op.thread == self.main)
        return Intervals((op.start_us, op.end_us) for op in named)

    @cached_property
    def unpaid(self) -> dict[int | str, Intervals]:
        """By thread, what is no work of the host for the model: DDP's, the loader's, waits."""
        found: dict[int | str, list[tuple[float, float]]] = defaultdict(list)
        for thread, spans in self.ddp.items():
            found[thread] += zip(spans.starts, spans.ends, strict=True)
        found[self.main] += zip(self.loader.starts, self.loader.ends, strict=True)
        for call in self.calls:
            usual_us = 0.0 if "Synchronize" in call.name else _LONGEST_CALL_US
            if call.end_us - call.start_us > usual_us:
                found[call.thread].append((call.start_us + usual_us, call.end_us))
        return {thread: Intervals(spans) for thread, spans in found.items()}

    def host_us(self, thread: int | str, start_us: float, end_us: float) -> float:
        """The host's work for the model on a thread."""
        if end_us <= start_us:
            return 0.0
        unpaid = self.unpaid.get(thread)
        return end_us - start_us - (unpaid.within(start_us, end_us) if unpaid else 0.0)

    @cached_property
    def gpu(self) -> list[_Gpu]:
        """All that the device did, by its launch; raises ImportFailedError if none is there."""
        launches = {_count(call.args.get("correlation")): call for call in self.calls}
        launches.pop(None, None)
        found, covered_us = [], float("-inf")
        for event in self.kernels:
            launch = launches.get(_count(event.args.get("correlation")))
            if launch is None:
                continue
            if _is_communication(event):
                found.append(_Gpu(launch, event, 0.0))
                continue
            start_us = max(event.start_us, covered_us)
            if launch.end_us <= covered_us < event.start_us <= covered_us + _LONGEST_PAUSE_US:
                start_us = covered_us
            found.append(_Gpu(launch, event, max(0.0, event.end_us - start_us)))
            covered_us = max(covered_us, event.end_us)
        if self.kernels and 2 * len(found) < len(self.kernels):
            raise ImportFailedError(
                self.name,
                f"the launch of {len(self.kernels) - len(found)} of {len(self.kernels)} kernels is "
                "not recorded; record with ProfilerActivity.CPU too",
            )
        return sorted(found, key=lambda work: work.launch.start_us)

    @cached_property
    def _launched_us(self) -> list[float]:
        return [work.launch.start_us for work in self.gpu]

    @cached_property
    def communication(self) -> Intervals:
        """When a collective is under way on the device."""
        kernels = (event for event in self.kernels if _is_communication(event))
        return Intervals((event.start_us, event.end_us) for event in kernels)

    def step(self, window: _Window) -> KinetoStep | None:
        """What a window holds; None if it holds no backward."""
        nodes = list(_within(self.nodes, window))
        ready = list(_within(self.accumulated, window))
        if not ready or not nodes:
            return None
        return _Step(self, window, nodes, ready).told()

    def launched(self, window: _Window) -> list[_Gpu]:
        """What the device did of a window's launches."""
        first = bisect_left(self._launched_us, window.start_us)
        return self.gpu[first : bisect_left(self._launched_us, window.end_us)]

    def is_left_out(self, launch: Event) -> bool:
        """Whether a launch is DDP's or the loader's."""
        ddp = self.ddp.get(launch.thread)
        if ddp is not None and launch.start_us in ddp:
            return True
        return launch.thread == self.main and launch.start_us in self.loader


class _Step:
    """One step of a trace, with the marks that part it."""

    def __init__(
        self, trace: _Trace, window: _Window, nodes: Sequence[Event], ready: Sequence[Event]
    ) -> None:
        self.trace, self.window = trace, window
        self.ready = sorted(ready, key=lambda op: op.end_us)
        self.ready_us = [op.end_us for op in self.ready]
        self.begins_us = min(node.start_us for node in nodes)
        self.ends_us = max(node.end_us for node in nodes)
        self.forward: list[_Gpu] = []
        self.backward: list[list[_Gpu]] = [[] for _ in range(len(self.ready) + 1)]
        self.optimizer: list[_Gpu] = []
        self.collectives: list[_Gpu] = []
        for work in trace.launched(window):
            self._put(work)

    def _put(self, work: _Gpu) -> None:
        """Sort a launch into the step's parts."""
        thread, at_us = work.launch.thread, work.launch.start_us
        is_main = thread == self.trace.main
        if _is_communication(work.event):
            self.collectives.append(work)
        elif self.trace.is_left_out(work.launch):
            return
        elif is_main and at_us in self.trace.optimizer:
            self.optimizer.append(work)
        elif self.begins_us <= at_us <= self.ends_us:
            self.backward[bisect_right(self.ready_us, at_us)].append(work)
        elif at_us < self.begins_us:
            self.forward.append(work)
        else:
            self.optimizer.append(work)

    def _check_one_backward(self) -> None:
        """A second forward between the gradients: micro-batches, or two models in turns."""
        main = self.trace.main
        works = [work for part in self.backward for work in part]
        theirs_us = sum(work.work_us for work in works if work.launch.thread == main)
        is_mixed = main not in self.trace.backward_threads and theirs_us > _MOST_BETWEEN * sum(
            work.work_us for work in works
        )
        forwards = [op for op in _within(self.trace.ops, self.window) if op.name == _DDP_FORWARD]
        if is_mixed or len(forwards) > 1:
            raise ImportFailedError(
                self.trace.name,
                f"{self.window.name} runs several forwards and backwards; record steps of one "
                "micro-batch (ddp.accumulation_steps then repeats it)",
            )

    def told(self) -> KinetoStep:
        """The step's times; raises ImportFailedError if it is several."""
        self._check_one_backward()
        window = self.window
        backward = tuple(self._backward())
        forward = tuple(self._forward())
        return KinetoStep(
            name=window.name,
            length_s=(window.end_us - window.start_us) * _S,
            forward=forward,
            backward=backward,
            optimizer=self._optimizer(),
            gradients=tuple(_gradient(op.args) for op in self.ready),
            collectives=tuple(self._told_collectives()),
            loader_s=self.trace.loader.within(window.start_us, window.end_us) * _S,
            beside_comm_s=self._beside_communication_us() * _S,
        )

    def _piece(self, works: Iterable[_Gpu], host_us: float) -> Piece:
        """On a CPU the host is the device."""
        if not self.trace.kernels:
            return Piece(host_us * _S, 0.0)
        return Piece(sum(work.work_us for work in works) * _S, host_us * _S)

    def _forward_host_us(self, start_us: float, end_us: float) -> float:
        optimizer_us = self.trace.optimizer.within(start_us, end_us)
        return max(0.0, self.trace.host_us(self.trace.main, start_us, end_us) - optimizer_us)

    def _forward(self) -> Iterator[Piece]:
        """A piece a launch, so that the device begins before the host has launched all."""
        before_us = self.window.start_us
        for work in self.forward:
            yield self._piece([work], self._forward_host_us(before_us, work.launch.end_us))
            before_us = max(before_us, work.launch.end_us)
        yield self._piece([], self._forward_host_us(before_us, self.begins_us))

    def _backward(self) -> Iterator[Piece]:
        threads = [op.thread for op in self.ready]
        marks_us = [self.begins_us, *self.ready_us, self.ends_us]
        for thread, works, (start_us, end_us) in zip(
            [*threads, threads[-1]], self.backward, pairwise(marks_us), strict=True
        ):
            yield self._piece(works, self.trace.host_us(thread, start_us, end_us))

    def _optimizer(self) -> Piece:
        """Also zero_grad, and what follows the backward: clipping, metrics."""
        trace, window = self.trace, self.window
        waited_us = (
            op.end_us
            for op in _within(trace.ops, window)
            if op.name.startswith(_OF_DDP) and op.end_us < window.end_us
        )
        from_us = max([self.ends_us, *waited_us])
        host_us = trace.host_us(trace.main, from_us, window.end_us)
        host_us += trace.optimizer.within(window.start_us, self.begins_us)
        return self._piece(self.optimizer, host_us)

    def _told_collectives(self) -> Iterator[MeasuredCollective]:
        for work in self.collectives:
            event = work.event
            name = str(event.args.get("Collective name", "")) or event.name
            yield MeasuredCollective(
                _operation(name),
                _count(event.args.get("In msg nelems")),
                _dtype(event.args.get("dtype")),
                (event.end_us - event.start_us) * _S,
                self._is_of_gradients(work.launch.start_us) and _operation(name) == "all_reduce",
            )
        for op in _within(self.trace.ops, self.window):
            if op.name.startswith("gloo:"):
                shape, dtype = _gradient(op.args)
                yield MeasuredCollective(
                    _operation(op.name),
                    None if shape is None else prod(shape),
                    dtype,
                    (op.end_us - op.start_us) * _S,
                    op.name == "gloo:all_reduce" and op.start_us >= self.begins_us,
                )

    def _is_of_gradients(self, at_us: float) -> bool:
        """Whether a collective was launched by the hook of a gradient."""
        index = bisect_right(self.ready_us, at_us) - 1
        if index < 0:
            return False
        hooks = self.trace.ddp.get(self.ready[index].thread)
        return hooks is not None and at_us in hooks

    def _beside_communication_us(self) -> float:
        works = (*self.forward, *(w for works in self.backward for w in works), *self.optimizer)
        comm = self.trace.communication
        return sum(comm.within(work.event.start_us, work.event.end_us) for work in works)


def _within(events: Sequence[Event], window: _Window) -> Sequence[Event]:
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


def _is_communication(event: Event) -> bool:
    return event.name.lower().startswith(("nccl", "rccl"))


_OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce")


def _operation(name: str) -> str:
    """`allreduce`, `ncclKernel_AllReduce_RING_LL_Sum_float` and `gloo:all_reduce` are one."""
    plain = name.lower().replace("_", "")
    return next((known for known in _OPERATIONS if known.replace("_", "") in plain), name)


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and 0 < value <= _MOST_ELEMENTS else None


def _gradient(args: dict[str, Any]) -> Gradient:
    """Of the first input."""
    dims, types = args.get("Input Dims"), args.get("Input type")
    shape = dims[0] if isinstance(dims, list) and dims else None
    dtype = types[0] if isinstance(types, list) and types else None
    return Gradient(_shape(shape), _dtype(dtype))


def _shape(extents: Any) -> tuple[int, ...] | None:
    if not isinstance(extents, list) or not all(isinstance(extent, int) for extent in extents):
        return None
    return tuple(extents) if 0 < prod(extents) <= _MOST_ELEMENTS else None


def _dtype(name: Any) -> str | None:
    return _DTYPES.get(str(name).removeprefix("c10::").lower())
