"""Traces of PyTorch's profiler (Kineto): what a step's forward, backward and optimizer take.

A kernel belongs to what the host did when it launched it: inside `Optimizer.*`, on the backward's
thread, before the backward or after it. Left out as DDP's own, which the simulation adds: copies
between gradients and buckets, the buffers' broadcast, collectives. A gradient is ready when its
`AccumulateGrad` has ended and what was launched until then is done.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low

from ddpsim.errors import ImportFailedError
from ddpsim.importers.kineto.events import Lost, TraceEvents
from ddpsim.importers.kineto.file import TraceFile, read_trace_file
from ddpsim.importers.kineto.interference import BothWays, both_ways
from ddpsim.importers.kineto.measured import (
    Gradient,
    KinetoStep,
    MeasuredCollective,
    Piece,
    range_of_unlike,
)
from ddpsim.importers.kineto.micro_batches import read_whole_step
from ddpsim.scenario.quantity import SourceFile

__all__ = ["Gradient", "KinetoStep", "KinetoTrace", "MeasuredCollective", "Piece", "read_trace"]


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
    return KinetoTrace(
        source=file.name,
        steps=steady,
        typical=typical,
        left_out=len(steps) - len(steady),
        on_gpu=bool(trace.kernels),
        device=file.devices.get(trace.device) if trace.kernels else None,
        world_size=_world_size(file),
        lost=trace.lost,
        rank=_whole(file, "rank"),
        optimizer=trace.optimizer_name,
        both_ways=both_ways(trace),
        nccl=_nccl(file),
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


def _world_size(file: TraceFile) -> int | None:
    return _whole(file, "world_size")


def _nccl(file: TraceFile) -> str | None:
    """NCCL's version, such as 2.17.1."""
    version = file.distributed.get("nccl_version")
    is_one = isinstance(version, str) and re.fullmatch(r"2\.\d{1,2}(\.\d{1,2})?", version)
    return version if is_one else None


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
    if (_world_size(file) or 1) > 1 and not any(step.collectives for step in steady):
        raise ImportFailedError(
            file.name,
            f"says that it is of {_world_size(file)} ranks, but holds no communication; record a "
            "step in which DDP reduces (no no_sync), or a run without torch.distributed",
        )
