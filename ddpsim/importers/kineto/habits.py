"""How a traced loop uses DDP, told by its calls: also of steps that hold several micro-batches."""

from __future__ import annotations

from typing import NamedTuple

from ddpsim.importers.kineto.events import TraceEvents, Window, within
from ddpsim.importers.kineto.file import read_trace_file
from ddpsim.scenario.quantity import SourceFile

__all__ = ["Habits", "read_habits"]

DDP_FORWARD = "DistributedDataParallel.forward"
_REDUCES = "c10d::allreduce_"


class Habits(NamedTuple):
    """Micro-batches of a step, and whether those before the last one reduce; None: not told."""

    micro_batches: int
    all_reduce: bool | None


def read_habits(source: SourceFile) -> Habits:
    """Of the last whole step; raises ImportFailedError for what is no trace of training."""
    trace = TraceEvents(read_trace_file(source))
    return _of(trace, trace.windows[-1])


def _of(trace: TraceEvents, window: Window) -> Habits:
    ops = within(trace.ops, window)
    forwards = [op for op in ops if op.name == DDP_FORWARD]
    calls = [op for op in ops if op.name == _REDUCES]
    if len(forwards) < 2 or not calls:
        return Habits(len(forwards), None)
    return Habits(len(forwards), calls[0].start_us < forwards[-1].start_us)
