"""Traces of PyTorch's profiler (Kineto): what a step's parts take, on one rank and on several.

A kernel belongs to what the host did when it launched it: inside `Optimizer.*`, on the backward's
thread, before the backward or after it. Left out as DDP's own, which the simulation adds: copies
between gradients and buckets, the buffers' broadcast, collectives. A gradient is ready when its
`AccumulateGrad` has ended and what was launched until then is done.

The job itself measures how much longer work takes while a collective is in flight: the same kernels
come in every step and in every layer of a kind; on a CPU, the same operators on inputs of the same
sizes. Some run beside a collective and some do not.

Traces of several ranks are aligned by their steps and by their collectives. The rank that joins a
collective last waits for nobody: its time is the transfer's, and what the others take longer is
their wait. Ranks leave a collective together, which tells how far their clocks are apart.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import median, median_low
from typing import NamedTuple

from ddpsim.importers.kineto.events import (
    TIMED,
    Event,
    Lost,
    TraceEvents,
    TraceFile,
    Window,
    is_communication,
    read_trace_file,
    spans_of,
    within,
)
from ddpsim.importers.kineto.measured import (
    KinetoStep,
    MeasuredCollective,
    Piece,
    StepParts,
    range_of_unlike,
)
from ddpsim.importers.kineto.step import DDP_FORWARD, read_step
from ddpsim.importers.text import ForeignFile
from ddpsim.scenario.quantity import SourceFile

_ENOUGH = 3  # of each way, of which a median tells
_VERSION = re.compile(r"2\.\d{1,2}(\.\d{1,2})?")  # of NCCL, such as 2.17.1
_WHOLE = 0.95  # of an event's time beside a collective, or below 1 - that
_SUFFIXES = (".json", ".json.gz")
_SLOWER = 1.08  # times the others' compute: GPUs of a kind differ by 1.5 % (published)
Ranks = Mapping[int, Sequence[KinetoStep]]  # the same steps of each rank


class BothWays(NamedTuple):
    """Seconds of the work that was done beside a collective, and what it takes alone."""

    beside_s: float = 0.0
    alone_s: float = 0.0


@dataclass(frozen=True)
class KinetoTrace:
    """A trace's steps without its first, and the `typical` one: the median by `busy_s`.

    `lost`: kernels that are in no step, as their launch is not recorded. `optimizer`: the name of
    torch's class, in lower case. `both_ways`: work that ran beside collectives and alone.
    `nccl`: its version.
    """

    source: str
    steps: tuple[KinetoStep, ...]
    typical: KinetoStep
    left_out: int
    on_gpu: bool
    device: str | None
    world_size: int | None
    lost: Lost
    rank: int | None = None
    optimizer: str | None = None
    both_ways: BothWays = field(default_factory=BothWays)
    nccl: str | None = None


def read_trace(source: SourceFile) -> KinetoTrace:
    """Read a trace of whole training steps; raises ImportFailedError, which says what to do."""
    file = read_trace_file(source)
    trace = TraceEvents(file)
    whole = (_read_whole_step(trace, window) for window in trace.windows)
    steps = _lasting(step for step in whole if step)
    if not steps:
        raise file.wrong("none of its steps holds a backward; record whole training steps")
    steady = steps[1:] or steps
    _check_steps_alike(file, steady)
    middle_s = median_low(step.busy_s for step in steady)
    typical = next(step for step in steady if step.busy_s == middle_s)
    _check(file, trace, steady, typical)
    version = file.distributed.get("nccl_version")
    return KinetoTrace(
        source=file.name,
        steps=steady,
        typical=typical,
        left_out=len(steps) - len(steady),
        on_gpu=bool(trace.kernels),
        device=file.devices.get(trace.device) if trace.kernels else None,
        world_size=_whole(file, "world_size"),
        lost=trace.lost,
        rank=_whole(file, "rank"),
        optimizer=trace.optimizer_name,
        both_ways=both_ways(trace),
        nccl=version if isinstance(version, str) and _VERSION.fullmatch(version) else None,
    )


def _lasting(steps: Iterable[KinetoStep]) -> tuple[KinetoStep, ...]:
    """Adds how long after the one before each is done."""
    series: list[KinetoStep] = []
    for step in steps:
        if not series:
            series.append(step)
            continue
        lasts_s = max(0.0, step.done_s - series[-1].done_s)
        parts = step.parts._replace(other=step.parts.other + lasts_s - step.length_s)
        series.append(replace(step, lasts_s=lasts_s, parts=parts))
    return tuple(series)


def _whole(file: TraceFile, key: str) -> int | None:
    """A whole number of the head's distributedInfo."""
    number = file.distributed.get(key)
    return number if isinstance(number, int) else None


def _check_steps_alike(file: TraceFile, steady: Sequence[KinetoStep]) -> None:
    if unlike := range_of_unlike(len(step.gradients) for step in steady):
        raise file.wrong(
            f"its steps make {unlike} gradients; record whole steps that are alike, one backward "
            "in each"
        )
    if unlike := range_of_unlike(len(step.micro_batches) for step in steady):
        raise file.wrong(
            f"its steps have {unlike} micro-batches; call prof.step() after each step of the "
            "optimizer"
        )
    without = [step.name for step in steady if not step.has_optimizer]
    if 0 < len(without) < len(steady):
        raise file.wrong(
            f"{len(without)} of {len(steady)} steps, such as {without[0]}, run no Optimizer.step, "
            "and the others do; record one optimizer step in each: call prof.step() after it "
            "alone, and record steps of one micro-batch (ddp.accumulation_steps then repeats it)"
        )


def _check(
    file: TraceFile, trace: TraceEvents, steady: Sequence[KinetoStep], typical: KinetoStep
) -> None:
    every = typical.micro_batches
    passes = [("forward", each.forward) for each in every]
    passes += [("backward", each.backward) for each in every]
    for part, pieces in passes:
        if sum(piece.device_s for piece in pieces) <= 0:
            where = "on the GPU " if trace.kernels else ""
            raise file.wrong(
                f"its {part} does no work {where}in {typical.name}; record whole steps with "
                "activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
            )
    ranks = _whole(file, "world_size") or 1
    if ranks > 1 and not any(step.collectives for step in steady):
        raise file.wrong(
            f"says that it is of {ranks} ranks, but holds no communication; record a step in which "
            "DDP reduces (no no_sync), or a run without torch.distributed"
        )


def both_ways(trace: TraceEvents) -> BothWays:
    """Compare each kind of work beside and without collectives, by its medians."""
    beside: dict[Hashable, list[float]] = defaultdict(list)
    alone: dict[Hashable, list[float]] = defaultdict(list)
    gloo = (op for op in trace.ops if op.name.startswith("gloo:"))
    collectives = trace.communication if trace.kernels else spans_of(gloo)
    for what, event in _work(trace):
        length_us = event.end_us - event.start_us
        share = collectives.within(event.start_us, event.end_us) / length_us if length_us else 0.5
        if share > _WHOLE:
            beside[what].append(length_us)
        elif share < 1 - _WHOLE:
            alone[what].append(length_us)
    both = [each for each in beside if min(len(beside[each]), len(alone[each])) >= _ENOUGH]
    return BothWays(
        sum(len(beside[each]) * median(beside[each]) for each in both) * 1e-6,
        sum(len(beside[each]) * median(alone[each]) for each in both) * 1e-6,
    )


def _work(trace: TraceEvents) -> Iterator[tuple[Hashable, Event]]:
    """Work that may be compared, by what it is."""
    for kernel in trace.kernels:
        if not is_communication(kernel):
            yield (kernel.name, str(kernel.args.get("grid"))), kernel
    for op in trace.ops if not trace.kernels else ():
        if op.name in TIMED and op.args.get("Input Dims"):
            yield (op.name, str(op.args["Input Dims"])), op


def _read_whole_step(trace: TraceEvents, window: Window) -> KinetoStep | None:
    """A step with all its micro-batches; None if it has no backward.

    Raises ImportFailedError for one whose parts are not micro-batches of one model under DDP.
    """
    parts = [read_step(trace, each) for each in _windows(trace, window)]
    micro = [part for part in parts if part is not None]
    if len(micro) < len(parts):
        return read_step(trace, window)
    return _joined(trace, window, micro) if len(micro) > 1 else micro[0]


def _windows(trace: TraceEvents, window: Window) -> Iterator[Window]:
    """One for each call of DDP's forward that follows a backward; a batch belongs to the next."""
    forwards = [op for op in within(trace.ops, window) if op.name == DDP_FORWARD]
    marks_us = [window.start_us]
    for first, second in pairwise(forwards):
        between = Window("", first.start_us, second.start_us)
        ends_us = [op.end_us for op in within(trace.accumulated, between)]
        if not ends_us:
            continue
        ended_us = max(ends_us)
        loads_us = trace.loader.starts
        first_load = bisect_left(loads_us, ended_us)
        marks_us.append(min([*loads_us[first_load : first_load + 1], second.start_us]))
    for start_us, end_us in pairwise([*marks_us, window.end_us]):
        yield Window(window.name, start_us, end_us)


def _joined(trace: TraceEvents, window: Window, parts: Sequence[KinetoStep]) -> KinetoStep:
    """The last one, with the others before it and the optimizer's work of all."""
    if unlike := range_of_unlike(len(part.gradients) for part in parts):
        raise trace.wrong(
            f"{window.name} runs forwards and backwards of {unlike} gradients; record steps whose "
            "micro-batches are alike"
        )
    *earlier, last = parts
    optimizers = [part.optimizer for part in parts]
    length_s = sum(part.length_s for part in parts)
    return replace(
        last,
        length_s=length_s,
        lasts_s=length_s,
        start_s=parts[0].start_s,
        optimizer=Piece(*map(sum, zip(*optimizers, strict=True))),
        collectives=tuple(each for part in parts for each in part.collectives),
        loader_s=sum(part.loader_s for part in parts),
        beside_comm_s=sum(part.beside_comm_s for part in parts),
        reads=sum(part.reads for part in parts),
        ddp_host_s=sum(part.ddp_host_s for part in parts),
        parts=StepParts(*map(sum, zip(*(part.parts for part in parts), strict=True))),
        earlier=tuple(replace(part, optimizer=Piece(0.0, 0.0)) for part in earlier),
    )


@dataclass(frozen=True)
class RankTraces:
    """What the traces of a job's ranks say together, in seconds; medians over steps.

    `steps`: by rank, those that every rank recorded; `transfers`: of each of them.
    """

    source: str
    world_size: int | None
    traces: Mapping[int, KinetoTrace]
    steps: Mapping[int, tuple[KinetoStep, ...]]
    transfers: tuple[tuple[Transfer, ...], ...]

    @property
    def is_whole(self) -> bool:
        """Whether every rank of the job was recorded."""
        return len(self.traces) == (self.world_size or 1)

    @property
    def on_gpu(self) -> bool:
        """Whether all are of GPUs."""
        return all(trace.on_gpu for trace in self.traces.values())

    @cached_property
    def _every(self) -> list[KinetoStep]:
        return [step for of_rank in self.steps.values() for step in of_rank]

    @property
    def step_s(self) -> float:
        """Typical time of a step over all ranks and steps."""
        return median(step.length_s for step in self._every)

    @property
    def data_wait_s(self) -> float:
        """The wait for a batch, of all ranks and steps."""
        return median(step.loader_s for step in self._every)

    @property
    def exposed_s(self) -> float:
        """Collectives with no compute of the model under way; on a CPU the main thread's waits.

        Of usual ranks: one that is slow waits for nobody.
        """
        slow = self.straggler[0] if self.straggler else None
        usual = [step for rank, steps in self.steps.items() if rank != slow for step in steps]
        if self.on_gpu:
            return median(
                max(0.0, sum(each.duration_s for each in step.collectives) - step.beside_comm_s)
                for step in usual
            )
        return median(step.parts.exposed_comm for step in usual)

    @property
    def looks_for_unused(self) -> bool:
        """Whether DDP reduces its map of used parameters: an int32 of each."""
        return any(
            each.operation == "all_reduce"
            and each.dtype == "int32"
            and each.elements == len(step.gradients)
            for step in self._every
            for each in step.collectives
        )

    @property
    def reads_values(self) -> bool:
        """Whether the host waits in every step to read a value from the device."""
        return all(step.reads for step in self._every)

    @cached_property
    def compute_s(self) -> dict[int, float]:
        """Work of each rank in a step."""
        return {rank: median(s.busy_s for s in of_rank) for rank, of_rank in self.steps.items()}

    @property
    def typical_rank(self) -> int:
        """The rank whose work is the median one."""
        order = sorted(self.traces, key=lambda rank: self.compute_s[rank])
        return order[(len(order) - 1) // 2]

    @property
    def typical(self) -> KinetoTrace:
        """The trace of that rank."""
        return self.traces[self.typical_rank]

    @property
    def busy_s(self) -> tuple[tuple[float, ...], ...]:
        """Each rank's own work in each step, [step][rank]."""
        return tuple(
            zip(*([s.busy_s for s in of_it] for of_it in self.steps.values()), strict=True)
        )

    @property
    def straggler(self) -> tuple[int, float] | None:
        """The rank that computes longer than the others, and how many times: always.

        In every micro-batch of every step. None: there is no such rank.
        """
        if len(self.compute_s) < 2:
            return None
        slowest = max(self.compute_s, key=lambda rank: self.compute_s[rank])
        others = [seconds for rank, seconds in self.compute_s.items() if rank != slowest]
        times = self.compute_s[slowest] / median(others) if median(others) else 1.0
        place = list(self.steps).index(slowest)
        is_always = all(
            micro[place].busy_s == max(each.busy_s for each in micro)
            for steps in zip(*self.steps.values(), strict=True)
            for micro in zip(*(step.micro_batches for step in steps), strict=True)
        )
        return (slowest, times) if times > _SLOWER and is_always else None

    @property
    def interference(self) -> float | None:
        """How many times as long the same work takes beside a collective.

        None where nothing ran both ways, or noise hides it: a collective makes no work faster.
        """
        pairs = [trace.both_ways for trace in self.traces.values()]
        beside_s, alone_s = (sum(times) for times in zip(*pairs, strict=True))
        return beside_s / alone_s if beside_s > alone_s else None

    @property
    def all_reduces(self) -> tuple[tuple[int, float], ...]:
        """Bytes and time alone of each all-reduce of gradients, in the order of a step.

        None of a single rank, whose times hold its waits.
        """
        if len(self.traces) == 1:
            return ()
        by_place: dict[tuple[int, int], list[float]] = defaultdict(list)
        for each in (each for of_step in self.transfers for each in of_step):
            if each.of_gradients and each.size_bytes:
                by_place[each.size_bytes, each.number].append(each.alone_s)
        return tuple((size, median(times)) for (size, _), times in by_place.items())

    @property
    def points(self) -> dict[int, float]:
        """Seconds of an all-reduce by its bytes, alone on the links; of one rank with its waits."""
        by_size: dict[int, list[float]] = defaultdict(list)
        for each in (each for of_step in self.transfers for each in of_step):
            if each.operation == "all_reduce" and each.size_bytes and each.alone_s:
                by_size[each.size_bytes].append(each.alone_s)
        return {size: median(by_size[size]) for size in sorted(by_size)}


def read_rank_traces(source: SourceFile) -> RankTraces:
    """Read a folder with one trace a rank, or one trace; raises ImportFailedError."""
    traces, file = _by_rank(source), ForeignFile(source.given)
    sizes = {trace.world_size for trace in traces.values()}
    if len(sizes) > 1:
        raise file.wrong("its traces are of jobs of different sizes; keep one job")
    named = {rank: {s.name: s for s in trace.steps} for rank, trace in traces.items()}
    first = next(iter(named.values()))
    common = [name for name in first if all(name in steps for steps in named.values())]
    if not common:
        raise file.wrong("its traces have no step in common; record the same steps on every rank")
    steps = {rank: tuple(of_rank[name] for name in common) for rank, of_rank in named.items()}
    counts = {
        sum(each.of_gradients for each in step.collectives)
        for of_rank in steps.values()
        for step in of_rank
    }
    if len(steps) > 1 and len(counts) > 1:
        raise file.wrong(
            f"its steps hold {min(counts)} to {max(counts)} all-reduces of gradients; record whole "
            "steps of one job, alike on every rank"
        )
    by_step = tuple(map(tuple, transfers(steps)))
    return RankTraces(source.given, sizes.pop(), traces, steps, by_step)


def _by_rank(source: SourceFile) -> dict[int, KinetoTrace]:
    traces: dict[int, KinetoTrace] = {}
    for file in _files_of(source):
        trace = read_trace(file)
        rank = 0 if trace.rank is None else trace.rank
        if rank in traces:
            twice = f"is of rank {rank}, as {traces[rank].source} is"
            raise ForeignFile(file.given).wrong(twice)
        traces[rank] = trace
    return dict(sorted(traces.items()))


def _files_of(source: SourceFile) -> list[SourceFile]:
    """The traces of a folder, or the one trace; raises ImportFailedError where there is none."""
    if not source.path.is_dir():
        return [source]
    names = sorted(file.name for file in source.path.iterdir() if file.name.endswith(_SUFFIXES))
    if not names:
        lacks = f"holds no trace: no file ends in {' or '.join(_SUFFIXES)}"
        raise ForeignFile(source.given).wrong(lacks)
    return [SourceFile(str(Path(source.given) / name), source.path / name) for name in names]


class Transfer(NamedTuple):
    """One collective of a step: from when the last rank had joined until it ended.

    `alone_s`: what it would have taken with no other in flight, each of which gets an equal part of
    the link. By rank, `late_s`: how long it had waited for the last one; `lag_s`: how long after
    the end it left; `delay_s`: how long a thread took to begin it. `number`: its place among those
    of its operation and size in the step.
    """

    operation: str
    size_bytes: int
    number: int
    of_gradients: bool
    start_s: float
    end_s: float
    alone_s: float
    late_s: dict[int, float]
    lag_s: dict[int, float]
    delay_s: dict[int, float]

    @property
    def duration_s(self) -> float:
        """Time from the last rank's joining to the end."""
        return self.end_s - self.start_s


def clocks_apart_s(ranks: Ranks) -> dict[int, float]:
    """How far each rank's clock is ahead of the first one's: 0 where nothing tells."""
    first = next(iter(ranks.values()))
    ends_s = {key: each.end_s for step in enumerate(first) for key, each in _keyed(*step)}
    apart: dict[int, float] = {}
    for rank, steps in ranks.items():
        seen = [
            each.end_s - ends_s[key]
            for step in enumerate(steps)
            for key, each in _keyed(*step)
            if key in ends_s
        ]
        apart[rank] = median(seen) if seen else 0.0
    return apart


def transfers(ranks: Ranks) -> list[list[Transfer]]:
    """Transfers of each step that every rank recorded, in the order of their ends."""
    apart_s = clocks_apart_s(ranks)
    count = len(next(iter(ranks.values())))
    return [_of_step(number, ranks, apart_s) for number in range(count)]


def _of_step(step: int, ranks: Ranks, apart_s: Mapping[int, float]) -> list[Transfer]:
    seen: dict[tuple[object, ...], dict[int, MeasuredCollective]] = defaultdict(dict)
    for rank, steps in ranks.items():
        for key, each in _keyed(step, steps[step]):
            seen[key][rank] = each
    common = [
        _met(key[-1], by_rank, apart_s)  # type: ignore[arg-type]
        for key, by_rank in seen.items()
        if len(by_rank) == len(ranks)
    ]
    return _as_if_alone(sorted(common, key=lambda each: each.end_s))


def _keyed(
    number: int, step: KinetoStep
) -> Iterator[tuple[tuple[object, ...], MeasuredCollective]]:
    """Collectives by step, operation, size and their place among those."""
    seen: Counter[tuple[str, int]] = Counter()
    for each in sorted(step.collectives, key=lambda each: each.start_s):
        what = each.operation, each.size_bytes
        yield (number, *what, seen[what]), each
        seen[what] += 1


def _met(
    number: int, by_rank: Mapping[int, MeasuredCollective], apart_s: Mapping[int, float]
) -> Transfer:
    one = next(iter(by_rank.values()))
    shortest_s = min(each.duration_s for each in by_rank.values())
    begun_s = max(each.start_s - apart_s[rank] for rank, each in by_rank.items())
    left_s = min(each.end_s - apart_s[rank] for rank, each in by_rank.items())
    if one.operation == "all_reduce" and begun_s < left_s:  # clocks may be farther apart than told
        shortest_s = min(shortest_s, left_s - begun_s)
    end_s = begun_s + shortest_s
    return Transfer(
        *(one.operation, one.size_bytes, number, one.of_gradients, begun_s, end_s, shortest_s),
        late_s={rank: begun_s - each.start_s + apart_s[rank] for rank, each in by_rank.items()},
        lag_s={
            rank: max(0.0, each.end_s - apart_s[rank] - end_s) for rank, each in by_rank.items()
        },
        delay_s={rank: each.delay_s for rank, each in by_rank.items()},
    )


def _as_if_alone(of_step: Sequence[Transfer]) -> list[Transfer]:
    """Each gets an equal part of the link while several are in flight."""
    changes: Counter[float] = Counter()
    for each in of_step:
        changes[each.start_s] += 1
        changes[each.end_s] -= 1
    share_s: dict[float, float] = {}  # what one that was always in flight has got by then
    got_s, flying, before_s = 0.0, 0, 0.0
    for moment_s in sorted(changes):
        got_s += (moment_s - before_s) / flying if flying else 0.0
        share_s[moment_s], before_s = got_s, moment_s
        flying += changes[moment_s]
    return [each._replace(alone_s=share_s[each.end_s] - share_s[each.start_s]) for each in of_step]
