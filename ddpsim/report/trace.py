"""A timeline as Chrome trace events: a file for each rank as PyTorch's profiler writes it, which
HolisticTraceAnalysis (HTA) reads, and one of all ranks for Perfetto.

A rank's kernels are what its streams work on. Waits are none: HTA would count them as compute.
What HTA needs of a file, or says something wrong without: docs/how-to/report.md.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from operator import le
from typing import Any, NamedTuple

from ddpsim.result.metrics import Step, free_lanes, steps_of
from ddpsim.result.timeline import CommSpan, Timeline

_WORK = {
    "forward": "forward",
    "backward": "backward",
    "bucket_copy": "gradient to bucket",
    "copy_back": "bucket to gradients",
    "buffers": "buffers to and from their broadcast",
    "input_copy": "inputs to the device",
    "unshard": "gathered parameters, copied out",
    "optimizer": "optimizer",
    "unscale": "gradients unscaled and checked",
    "clip": "gradients' norm and scaling",
    "zero_grad": "gradients filled with zeros",
    "item": "value to the host",
    "averaging": "parameters to and from their average",
}
_WAITS = {
    "comm_wait": "wait for communication",
    "stall": "stall",
    "data": "wait for a batch",
    "host": "wait for the host",
}
# names of NCCL's kernels go on with type, algorithm and protocol, which a timeline does not know;
# HTA takes what matches ^nccl.*Kernel for communication
_NCCL = {
    "all_reduce": "ncclDevKernel_AllReduce",
    "all_gather": "ncclDevKernel_AllGather",
    "reduce_scatter": "ncclDevKernel_ReduceScatter",
    "broadcast": "ncclDevKernel_Broadcast",
    "reduce": "ncclDevKernel_Reduce",
    "send": "ncclDevKernel_SendRecv",
}
_COMPUTE_STREAM, _NCCL_STREAM = 7, 20  # as PyTorch's profiler often numbers them
_CPU_PID = 100_000  # a process of its own, apart from those named after GPUs
_STEPS_TID, _COMPUTE_TID, _COMM_TID = 1, 2, 3  # of a rank in the merged file


class _Slice(NamedTuple):
    """Something on a track, in ticks from the trace's origin; `waits`: it is no work.

    `names`: of the module or the gradient that it is of, or of the first and the last.
    """

    name: str
    start_ns: int
    end_ns: int
    waits: bool = False
    names: tuple[str, ...] = ()

    @property
    def of(self) -> dict[str, str]:
        """The arguments that show, at a click, whose work a slice is."""
        return {"of": " ... ".join(self.names)} if self.names else {}

    @property
    def category(self) -> str:
        """The category that the profiler gives it on a CPU."""
        return "user_annotation" if self.waits else "cpu_op"


@dataclass(frozen=True)
class Overlap:
    """Ticks of a rank in the steps shown; `idle_comm_ns` as `Step` has it."""

    comm_ns: int
    exposed_ns: int
    idle_comm_ns: int

    @property
    def fraction(self) -> float | None:
        """1 - exposed / comm, as a result has it; None without communication."""
        return 1 - self.exposed_ns / self.comm_ns if self.comm_ns else None

    @property
    def under_kernels(self) -> float | None:
        """HTA's overlap: the part of communication during which a compute kernel runs."""
        hidden_ns = self.comm_ns - self.exposed_ns - self.idle_comm_ns
        return hidden_ns / self.comm_ns if self.comm_ns else None


@dataclass(frozen=True)
class Traced:
    """Some ranks and steps of a timeline, and whose they are.

    `steps` count from 0, the warm-up's first; `choice` says in words which ranks these are.
    `names`: of the first and the last parameter of each bucket of a steady step.
    """

    timeline: Timeline
    ranks: Sequence[int]
    steps: Sequence[int]
    choice: str
    name: str
    world_size: int
    first_ranks: Sequence[int]
    device: str
    backend: str
    names: Mapping[int, tuple[str, str]] = field(default_factory=dict)

    @property
    def has_kernels(self) -> bool:
        """Whether anything runs on GPUs; gloo's jobs run on CPUs."""
        return self.backend == "nccl"

    def _place(self, rank: int) -> tuple[int, int]:
        """Node of a rank, and its number there."""
        node = bisect_right(self.first_ranks, rank) - 1
        return node, rank - self.first_ranks[node]

    def overlap(self, rank: int) -> Overlap:
        """Sums up the communication of one rank over the steps shown."""
        steps = self._lanes(rank).steps
        return Overlap(
            sum(step.comm_ns() for step in steps),
            sum(step.breakdown().exposed_comm for step in steps),
            sum(step.idle_comm_ns() for step in steps),
        )

    def of_rank(self, rank: int) -> str:
        """One rank's file in the dialect of PyTorch's profiler (Kineto)."""
        gpu, lanes = self._place(rank)[1], self._lanes(rank)
        header = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": gpu, "name": self.device}] if self.has_kernels else [],
            # HTA looks for "rank" in the text, and for a space behind its colon
            "distributedInfo": {
                "backend": self.backend,
                "rank": rank,
                "world_size": self.world_size,
            },
        }
        events = self._kernels(lanes, gpu) if self.has_kernels else self._cpu_work(lanes, rank)
        return self._file(header, events)

    def merged(self) -> str:
        """All ranks' file for Perfetto: a process for each, slices that nest, arrows."""
        flows = count(1)

        def events() -> Iterator[str]:
            for rank in self.ranks:
                yield from self._process(rank, self._lanes(rank), flows)

        return self._file({}, events())

    def _file(self, header: Mapping[str, Any], events: Iterable[str]) -> str:
        ours = {
            "schema": "ddpsim.trace/1",
            "note": "simulated, not measured",
            "scenario": self.name,
            "ranks_shown": f"{len(self.ranks)} of {self.world_size}: {self.choice}",
            "slowest_rank": self.timeline.slowest_rank,
            "first_step": self.steps[0],
            "last_step": self.steps[-1],
            "warmup_steps": self.timeline.warmup,
        }
        keys = {**header, "ddpsim": ours, "displayTimeUnit": "ms"}
        lines = [f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in keys.items()]
        return "".join(["{\n", *lines, '"traceEvents": [\n', ",\n".join(events), "\n]}\n"])

    @cached_property
    def _origin_ns(self) -> int:
        """The start of the first step shown, on the rank that comes to it first."""
        return min(self._steps(rank, 0)[0].start_ns for rank in self.ranks)

    def _steps(self, rank: int, origin_ns: int) -> list[Step]:
        """The steps shown; those after the last one in the timeline are the same again."""
        steps = steps_of(self.timeline.ranks[rank])
        last = len(steps) - 1
        return [
            steps[min(number, last)].moved(
                max(0, number - last) * steps[last].length_ns - origin_ns
            )
            for number in self.steps
        ]

    def _lanes(self, rank: int) -> _Lanes:
        return _Lanes(self._steps(rank, self._origin_ns))

    def _kernels(self, lanes: _Lanes, gpu: int) -> Iterator[str]:
        streams = {_COMPUTE_STREAM: "compute stream", **_nccl_streams(lanes, _NCCL_STREAM)}
        yield from _named(gpu, "python", f"GPU {gpu}", streams)
        yield from _named(_CPU_PID, "python", "CPU", {1: "what the compute stream waits for"})
        on = {"cat": "kernel", "pid": gpu}
        for piece in lanes.compute:
            if piece.waits:
                yield _complete(piece, {"cat": piece.category, "pid": _CPU_PID, "tid": 1})
            else:
                stream = {"device": gpu, "stream": _COMPUTE_STREAM}
                yield _complete(piece, {**on, "tid": _COMPUTE_STREAM}, stream | piece.of)
        for thread, span in lanes.threaded:
            number = _NCCL_STREAM + thread
            stream = {"device": gpu, "stream": number}
            kernel = _Slice(_NCCL[span.operation], span.joined_ns, span.end_ns)
            yield _complete(kernel, {**on, "tid": number}, stream | self._facts(span))

    def _cpu_work(self, lanes: _Lanes, rank: int) -> Iterator[str]:
        threads = {1: "main thread"} | {tid: f"gloo thread {tid - 1}" for tid in lanes.threads(2)}
        yield from _named(_CPU_PID + rank, "python", "CPU", threads)
        for piece in lanes.compute:
            place = {"cat": piece.category, "pid": _CPU_PID + rank, "tid": 1}
            yield _complete(piece, place, piece.of)
        for thread, span in lanes.threaded:
            shown = _Slice(f"gloo:{span.operation}", span.joined_ns, span.end_ns)
            place = {"cat": shown.category, "pid": _CPU_PID + rank, "tid": 2 + thread}
            yield _complete(shown, place, self._facts(span))

    def _process(self, rank: int, lanes: _Lanes, flows: Iterator[int]) -> Iterator[str]:
        """A rank in the merged file."""
        node, device = self._place(rank)
        kind = "GPU" if self.has_kernels else "process"
        label = "the slowest" if rank == self.timeline.slowest_rank else ""
        threads = {_STEPS_TID: "steps"}
        if self.has_kernels:
            threads |= {_COMPUTE_TID: "compute stream", **_nccl_streams(lanes, _COMM_TID)}
        else:
            comm = {tid: f"gloo thread {tid - 2}" for tid in lanes.threads(_COMM_TID)}
            threads |= {_COMPUTE_TID: "main thread", **comm}
        yield from _named(rank, f"rank {rank}: node {node}, {kind} {device}", label, threads)
        for number, step in zip(self.steps, lanes.steps, strict=True):
            shown = _Slice(f"step {number}", step.start_ns, step.end_ns)
            yield _complete(shown, {"pid": rank, "tid": _STEPS_TID}, tail=_TAIL)
        for piece in lanes.compute:
            yield _complete(piece, {"pid": rank, "tid": _COMPUTE_TID}, piece.of, tail=_TAIL)
        for thread, span in lanes.threaded:
            place = {"pid": rank, "tid": _COMM_TID + thread}
            shown = _Slice(_called(span), span.joined_ns, span.end_ns)
            yield _complete(shown, place, self._facts(span), tail=_TAIL)
            if span.met_ns > span.joined_ns:
                late = _Slice("waiting for late peers", span.joined_ns, span.met_ns)
                yield _complete(late, place, tail=_TAIL)
        for work_ns, thread, span, copy_ns in lanes.arrows():
            places = [(_COMPUTE_TID, work_ns), (_COMM_TID + thread, span.joined_ns)]
            places += [(_COMPUTE_TID, copy_ns)] if copy_ns is not None else []
            yield from _flow(f"bucket {span.bucket}", rank, places, next(flows))

    def _facts(self, span: CommSpan) -> dict[str, Any]:
        """The arguments of a collective's slice, with moments from the trace's origin."""
        bucket = {"bucket": span.bucket, "parameters": span.num_params} if span.bucket >= 0 else {}
        ends = zip(
            ("first_parameter", "last_parameter"), self.names.get(span.bucket, ()), strict=False
        )
        return {
            "Collective name": span.operation.replace("_", ""),
            "Group size": self.world_size,
            **bucket,
            **dict(ends),
            "bytes": span.size_bytes,
            "ready_us": span.ready_ns / 1000,
            "joined_us": span.joined_ns / 1000,
            "all_joined_us": span.met_ns / 1000,
            "waiting_for_late_peers_us": (span.met_ns - span.joined_ns) / 1000,
        }


class _Lanes:
    """One rank's steps as slices, none of them empty."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = steps

    @cached_property
    def compute(self) -> list[_Slice]:
        """Work and waits of a rank, in order; together they fill the steps."""
        works = (span for step in self.steps for span in step.compute)
        gaps = ((*gap, ()) for step in self.steps for gap in step.gaps())
        called = _WORK | _WAITS
        slices = (
            _Slice(called[kind], start_ns, end_ns, kind not in _WORK, names)
            for kind, start_ns, end_ns, names in (*works, *gaps)
            if end_ns > start_ns
        )
        return sorted(slices, key=lambda piece: piece.start_ns)

    @cached_property
    def comm(self) -> list[CommSpan]:
        """The collectives that took time, in the order in which the rank joined them."""
        spans = (span for step in self.steps for span in step.comm if span.end_ns > span.joined_ns)
        return sorted(spans, key=lambda span: span.joined_ns)

    @cached_property
    def threaded(self) -> list[tuple[int, CommSpan]]:
        """Collectives with the first free thread of each, from 0 on; NCCL needs one."""
        return list(zip(free_lanes(self.comm), self.comm, strict=True))

    def threads(self, first: int) -> range:
        """Numbers for the threads of collectives."""
        return range(first, first + 1 + max((thread for thread, _ in self.threaded), default=-1))

    def arrows(self) -> Iterator[_Arrow]:
        """Arrows from the work that made a bucket ready to its all-reduce and its copy back."""
        threads = {span: thread for thread, span in self.threaded}
        for step in self.steps:
            works = [(s.end_ns, s.start_ns) for s in step.compute if s.kind in _WORK]
            copies = [s.start_ns for s in step.compute if s.kind == "copy_back"]
            reduced = (s for s in step.comm if s.bucket >= 0)
            buckets = sorted(reduced, key=lambda s: (s.number, s.bucket))
            # copies that take no time are missing: the others' buckets are then unknown
            ends_ns = [s.end_ns for s in buckets]
            is_one_each = len(copies) == len(buckets) and all(map(le, ends_ns, copies))
            starts_ns = copies if is_one_each else [None] * len(buckets)
            for span, copy_ns in zip(buckets, starts_ns, strict=True):
                before = bisect_right(works, (span.ready_ns, span.ready_ns))
                if before and span in threads:
                    yield _Arrow(works[before - 1][1], threads[span], span, copy_ns)


class _Arrow(NamedTuple):
    """Starts of work, of a collective and of its copy back, which may be unknown."""

    work_ns: int
    thread: int
    span: CommSpan
    copy_ns: int | None


# Perfetto multiplies by 1000 in floating point and cuts: a quarter of a nanosecond more keeps each
# moment exact, and so slices that touch from overlapping (json_utils.cc, CoerceToTs)
_TAIL = "25"


def _nccl_streams(lanes: _Lanes, first: int) -> dict[int, str]:
    """Names of NCCL's streams by number: one, or one for each group that communicates at once."""
    others = {tid: f"NCCL stream {tid - first + 1}" for tid in lanes.threads(first)}
    return others | {first: "NCCL stream"}


def _called(span: CommSpan) -> str:
    if span.bucket >= 0:
        return f"{span.operation} bucket {span.bucket}"
    tells = span.is_of_norm or span.operation == "all_reduce"
    return f"{span.operation} of {span.cause}" if tells and span.cause else span.operation


def _us(ticks_ns: int) -> str:
    """Microseconds with every nanosecond."""
    return f"{ticks_ns // 1000}.{ticks_ns % 1000:03d}"


def _complete(
    piece: _Slice,
    place: Mapping[str, Any],
    args: Mapping[str, Any] | None = None,
    *,
    tail: str = "",
) -> str:
    where = _compact(place)[1:-1]
    more = f',"args":{_compact(args)}' if args else ""
    start, lasts = _us(piece.start_ns) + tail, _us(piece.end_ns - piece.start_ns) + tail
    return f'{{"ph":"X","name":"{piece.name}",{where},"ts":{start},"dur":{lasts}{more}}}'


def _flow(name: str, pid: int, places: Sequence[tuple[int, int]], number: int) -> Iterator[str]:
    """An arrow over slices, each found by its track and start."""
    for phase, (tid, start_ns) in zip(["s", *"t" * (len(places) - 2), "f"], places, strict=True):
        event = {"ph": phase, "cat": "bucket", "name": name, "id": number, "pid": pid, "tid": tid}
        end = ',"bp":"e"' if phase == "f" else ""
        yield f'{_compact(event)[:-1]},"ts":{_us(start_ns)}{_TAIL}{end}}}'


def _named(pid: int, process: str, label: str, threads: Mapping[int, str]) -> Iterator[str]:
    """What a process and its threads are called."""
    facts: list[tuple[str, int, dict[str, Any]]] = [("process_name", 0, {"name": process})]
    if label:
        facts.append(("process_labels", 0, {"labels": label}))
    facts.append(("process_sort_index", 0, {"sort_index": pid}))
    for tid, name in threads.items():
        facts.append(("thread_name", tid, {"name": name}))
        facts.append(("thread_sort_index", tid, {"sort_index": tid}))
    for name, tid, args in facts:
        event = {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0.0, "args": args}
        yield _compact(event)


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
