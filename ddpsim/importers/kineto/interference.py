"""How much longer the same work takes while a collective is in flight: measured by the job itself.

The same kernels come in every step and in every layer of a kind; on a CPU, the same operators on
inputs of the same sizes. Some run beside a collective and some do not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from statistics import median
from typing import NamedTuple

from ddpsim.importers.intervals import Intervals
from ddpsim.importers.kineto.events import TraceEvents, is_communication
from ddpsim.importers.kineto.file import TIMED, Event

__all__ = ["BothWays", "both_ways"]

_ENOUGH = 3  # of each way, of which a median tells
_WHOLE = 0.95  # of an event's time beside a collective, or below 1 - that


class BothWays(NamedTuple):
    """Seconds of the work that was done beside a collective, and what it takes alone."""

    beside_s: float = 0.0
    alone_s: float = 0.0


def both_ways(trace: TraceEvents) -> BothWays:
    """Of all kinds of work that ran both ways, each by its medians."""
    beside: dict[Hashable, list[float]] = defaultdict(list)
    alone: dict[Hashable, list[float]] = defaultdict(list)
    collectives = trace.communication if trace.kernels else _of_gloo(trace)
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


def _of_gloo(trace: TraceEvents) -> Intervals:
    return Intervals((op.start_us, op.end_us) for op in trace.ops if op.name.startswith("gloo:"))
