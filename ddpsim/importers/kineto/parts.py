"""What the time of a traced step went to, in the terms of a simulated one's breakdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ddpsim.importers.intervals import Intervals
from ddpsim.importers.kineto.events import (
    BROADCAST,
    OF_DDP,
    DeviceWork,
    TraceEvents,
    Window,
    is_communication,
    spans_of,
    within,
)
from ddpsim.importers.kineto.measured import OwnOfDdp, StepParts

_S = 1e-6
_COPY_BACK = "copy_bucket_to_grad"


@dataclass(frozen=True)
class Marks:
    """A step's window, and when its backward begins and ends and the optimizer follows."""

    window: Window
    backward_begins_us: float
    backward_ends_us: float
    reduced_us: float

    @property
    def length_us(self) -> float:
        """By the host's clock."""
        return self.window.end_us - self.window.start_us


def host_parts(trace: TraceEvents, marks: Marks, forward_s: float, optimizer_s: float) -> StepParts:
    """Of a CPU, where the main thread computes: what it does not do between marks is a wait."""
    window, ends_us = marks.window, marks.backward_ends_us
    waits_us = _idle_us(trace, ends_us, marks.reduced_us) + Intervals(
        _waits_us(trace, marks)
    ).within(window.start_us, ends_us)
    return _parts(
        marks,
        data_wait=trace.loader.within(window.start_us, window.end_us) * _S,
        forward=forward_s,
        backward_compute=(ends_us - marks.backward_begins_us) * _S,
        exposed_comm=waits_us * _S,
        optimizer=optimizer_s,
    )


def own_of_ddp(trace: TraceEvents, marks: Marks) -> OwnOfDdp:
    """Of a CPU; the waits for gloo in the midst of a broadcast are none of it."""
    window, begins_us = marks.window, marks.backward_begins_us
    forward = window._replace(end_us=begins_us)
    calls_us = [op.start_us for op in within(trace.ops, forward) if op.name == BROADCAST]
    spans = trace.ddp.get(trace.main, Intervals([]))
    waits = Intervals(_waits_us(trace, marks))
    before_us = 0.0
    if calls_us:
        zeroed_us = trace.optimizer.within(window.start_us, calls_us[0])
        before_us = trace.host_us(trace.main, window.start_us, calls_us[0]) - zeroed_us
    return OwnOfDdp(
        max(0.0, before_us) * _S,
        tuple(
            _S * max(0.0, spans.within(start_us, end_us) - waits.within(start_us, end_us))
            for start_us, end_us in pairwise([window.start_us, *calls_us, begins_us])
        ),
        tuple(
            (op.end_us - op.start_us) * _S
            for op in within(trace.ops, Window("", marks.backward_ends_us, marks.reduced_us))
            if op.thread == trace.main and op.name.endswith(_COPY_BACK)
        ),
    )


def _waits_us(trace: TraceEvents, marks: Marks) -> Iterator[tuple[float, float]]:
    """When the main thread waits while buffers are broadcast."""
    for start_us, end_us in trace.broadcasts:
        if marks.window.start_us <= start_us < marks.backward_begins_us:
            at_work = _at_work(trace, start_us, end_us)
            yield from zip([start_us, *at_work.ends], [*at_work.starts, end_us], strict=True)


def _idle_us(trace: TraceEvents, start_us: float, end_us: float) -> float:
    """How long the main thread carries nothing out."""
    return max(0.0, end_us - start_us - _at_work(trace, start_us, end_us).within(start_us, end_us))


def _at_work(trace: TraceEvents, start_us: float, end_us: float) -> Intervals:
    return spans_of(
        op
        for op in within(trace.ops, Window("", start_us, end_us))
        if op.thread == trace.main and op.name.startswith(("aten::", *OF_DDP))
    )


def device_parts(
    trace: TraceEvents,
    marks: Marks,
    forward: Sequence[DeviceWork],
    backward: Sequence[DeviceWork],
    optimizer: Sequence[DeviceWork],
) -> StepParts:
    """Of a GPU, which may work beyond the end of the host's step as it did at the beginning."""
    window, loader = marks.window, trace.loader
    device = spans_of(work.event for work in trace.launched(window))
    waits_us = sum(
        end - start - device.within(start, end)
        for start, end in loader.beginning_within(window.start_us, window.end_us)
    )
    return _parts(
        marks,
        data_wait=waits_us * _S,
        forward=_work_s(forward),
        backward_compute=_work_s(backward),
        exposed_comm=_awaited_us(trace, window) * _S,
        optimizer=_work_s(optimizer),
    )


def _awaited_us(trace: TraceEvents, window: Window) -> float:
    """How long kernels that are launched already wait while a collective is under way."""
    waited_us, done_us = 0.0, float("-inf")
    computing = (work for work in trace.launched(window) if not is_communication(work.event))
    for work in sorted(computing, key=lambda work: work.event.start_us):
        could_us = max(done_us, work.launch.end_us)
        waited_us += trace.communication.within(could_us, work.event.start_us)
        done_us = max(done_us, work.event.end_us)
    return waited_us


def _work_s(works: Sequence[DeviceWork]) -> float:
    return sum(work.work_us for work in works) * _S


def _parts(marks: Marks, **known: float) -> StepParts:
    return StepParts(**known, other=marks.length_us * _S - sum(known.values()))
