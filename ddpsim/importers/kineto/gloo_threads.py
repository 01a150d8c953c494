"""How long gloo's threads take to begin a collective that the host has asked for.

torch gives gloo two threads, which take collectives in the order in which they are asked for
(ProcessGroupGloo.cpp). On a machine whose cores are busy a thread that was woken waits for one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from ddpsim.importers.kineto.events import TraceEvents, Window, within
from ddpsim.importers.kineto.file import Event

__all__ = ["delays_us"]

_THREADS = 2


def delays_us(trace: TraceEvents, window: Window, ops: Sequence[Event]) -> Iterator[float]:
    """Of each of gloo's ops of a step, by their start: since it was asked for and one was free.

    0 where no call is told.
    """
    calls = [op for op in within(trace.ops, window) if op.name.startswith("c10d::")]
    if len(calls) != len(ops):
        yield from (0.0 for _ in ops)
        return
    latest_us = [-inf] * _THREADS  # ends of so many collectives, ascending
    for call, op in zip(calls, ops, strict=True):
        free_us = max(latest_us[0], call.start_us)
        latest_us = sorted([*latest_us, op.end_us])[1:]
        yield max(0.0, op.start_us - free_us)
