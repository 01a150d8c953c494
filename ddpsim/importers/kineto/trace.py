"""Traces of PyTorch's profiler (Kineto): what a step's forward, backward and optimizer take.

A kernel belongs to what the host did when it launched it: inside `Optimizer.*`, on the backward's
thread, before the backward or after it. Left out as DDP's own, which the simulation adds: copies
between gradients and buckets, the buffers' broadcast, collectives. A gradient is ready when its
`AccumulateGrad` has ended and what was launched until then is done.

The job itself measures how much longer work takes while a collective is in flight: the same kernels
come in every step and in every layer of a kind; on a CPU, the same operators on inputs of the same
sizes. Some run beside a collective and some do not.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median, median_low
from typing import NamedTuple

from ddpsim.errors import ImportFailedError
from ddpsim.importers.kineto.events import (
    Lost,
    TraceEvents,
    Window,
    is_communication,
    spans_of,
    within,
)
from ddpsim.importers.kineto.file import TIMED, Event, TraceFile, read_trace_file
from ddpsim.importers.kineto.measured import KinetoStep, Piece, StepParts, range_of_unlike
from ddpsim.importers.kineto.step import DDP_FORWARD, read_step
from ddpsim.scenario.quantity import SourceFile

_ENOUGH = 3  # of each way, of which a median tells
_VERSION = re.compile(r"2\.\d{1,2}(\.\d{1,2})?")  # of NCCL, such as 2.17.1
_WHOLE = 0.95  # of an event's time beside a collective, or below 1 - that


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
    found = (read_whole_step(trace, window) for window in trace.windows)
    steps = _lasting(step for step in found if step)
    if not steps:
        raise ImportFailedError(
            file.name, "none of its steps holds a backward; record whole training steps"
        )
    steady = steps[1:] or steps
    _check_alike(file, steady)
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
    """With how long after the one before each is done."""
    found: list[KinetoStep] = []
    for step in steps:
        if not found:
            found.append(step)
            continue
        lasts_s = max(0.0, step.done_s - found[-1].done_s)
        parts = step.parts._replace(other=step.parts.other + lasts_s - step.length_s)
        found.append(replace(step, lasts_s=lasts_s, parts=parts))
    return tuple(found)


def _whole(file: TraceFile, key: str) -> int | None:
    """A whole number of the head's distributedInfo."""
    number = file.distributed.get(key)
    return number if isinstance(number, int) else None


def _check_alike(file: TraceFile, steady: Sequence[KinetoStep]) -> None:
    if unlike := range_of_unlike(len(step.gradients) for step in steady):
        raise ImportFailedError(
            file.name,
            f"its steps make {unlike} gradients; record whole steps that are alike, one backward "
            "in each",
        )
    if unlike := range_of_unlike(len(step.micro_batches) for step in steady):
        raise ImportFailedError(
            file.name,
            f"its steps have {unlike} micro-batches; call prof.step() after each step of the "
            "optimizer",
        )
    without = [step.name for step in steady if not step.has_optimizer]
    if 0 < len(without) < len(steady):
        raise ImportFailedError(
            file.name,
            f"{len(without)} of {len(steady)} steps, such as {without[0]}, run no Optimizer.step, "
            "and the others do; record one optimizer step in each: call prof.step() after it "
            "alone, and record steps of one micro-batch (ddp.accumulation_steps then repeats it)",
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
            raise ImportFailedError(
                file.name,
                f"its {part} does no work {where}in {typical.name}; record whole steps with "
                "activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]",
            )
    ranks = _whole(file, "world_size") or 1
    if ranks > 1 and not any(step.collectives for step in steady):
        raise ImportFailedError(
            file.name,
            f"says that it is of {ranks} ranks, but holds no communication; record a step in which "
            "DDP reduces (no no_sync), or a run without torch.distributed",
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
    known = [each for each in beside if min(len(beside[each]), len(alone[each])) >= _ENOUGH]
    return BothWays(
        sum(len(beside[each]) * median(beside[each]) for each in known) * 1e-6,
        sum(len(beside[each]) * median(alone[each]) for each in known) * 1e-6,
    )


def _work(trace: TraceEvents) -> Iterator[tuple[Hashable, Event]]:
    """Work that may be compared, by what it is."""
    for kernel in trace.kernels:
        if not is_communication(kernel):
            yield (kernel.name, str(kernel.args.get("grid"))), kernel
    for op in trace.ops if not trace.kernels else ():
        if op.name in TIMED and op.args.get("Input Dims"):
            yield (op.name, str(op.args["Input Dims"])), op


def read_whole_step(trace: TraceEvents, window: Window) -> KinetoStep | None:
    """A step with all its micro-batches; None if it has no backward.

    Raises ImportFailedError for one whose parts are not micro-batches of one model under DDP.
    """
    parts = [read_step(trace, each) for each in _windows(trace, window)]
    told = [part for part in parts if part is not None]
    if len(told) < len(parts):
        return read_step(trace, window)
    return _joined(trace, window, told) if len(told) > 1 else told[0]


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
        raise ImportFailedError(
            trace.name,
            f"{window.name} runs forwards and backwards of {unlike} gradients; record steps whose "
            "micro-batches are alike",
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
