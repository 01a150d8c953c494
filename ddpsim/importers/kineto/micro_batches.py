"""Steps of gradient accumulation: parted at their forwards, and put together again."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from ddpsim.errors import ImportFailedError
from ddpsim.importers.kineto.events import TraceEvents, Window, within
from ddpsim.importers.kineto.measured import KinetoStep, Piece, StepParts, range_of_unlike
from ddpsim.importers.kineto.step import DDP_FORWARD, read_step

__all__ = ["read_whole_step"]


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
