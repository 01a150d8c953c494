"""One step of a trace: what its forward, backward and optimizer take, and what was reduced."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, pairwise
from math import inf, prod
from typing import Any

from ddpsim.importers.kineto.events import (
    BROADCAST,
    MOST,
    OF_DDP,
    OPTIMIZER_STEP,
    DeviceWork,
    Event,
    Intervals,
    TraceEvents,
    Window,
    count_of,
    is_communication,
    spans_of,
    within,
)
from ddpsim.importers.kineto.measured import (
    Gradient,
    KinetoStep,
    MeasuredCollective,
    OwnOfDdp,
    Piece,
    StepParts,
)

_GLOO = "gloo:"
DDP_FORWARD = "DistributedDataParallel.forward"
_AT_WORK = ("aten::", "Optimizer.", "enumerate(DataLoader)", *OF_DDP)
_MOST_BETWEEN = 0.1  # of a backward, for what is no part of it
_S = 1e-6
_THREADS = 2  # of gloo
_DTYPES = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "bfloat16": "bfloat16",
    **dict.fromkeys(("long int", "long"), "int64"),
    "int": "int32",
    **dict.fromkeys(("short int", "short"), "int16"),
    **dict.fromkeys(("signed char", "char"), "int8"),
    **dict.fromkeys(("unsigned char", "byte"), "uint8"),
    "bool": "bool",
}
_OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce")
_COPY_BACK = "copy_bucket_to_grad"


def read_step(trace: TraceEvents, window: Window) -> KinetoStep | None:
    """What a step holds, None if no backward; raises ImportFailedError if it holds several."""
    nodes = within(trace.nodes, window)
    ready = within(trace.accumulated, window)
    return _Step(trace, window, nodes, ready).times() if ready and nodes else None


class _Step:
    """One step of a trace, with the marks that part it."""

    def __init__(
        self, trace: TraceEvents, window: Window, nodes: Sequence[Event], ready: Sequence[Event]
    ) -> None:
        self.trace, self.window, self.nodes = trace, window, nodes
        self.ready = sorted(ready, key=lambda op: op.end_us)
        self.ready_us = [op.end_us for op in self.ready]
        self.begins_us = min(node.start_us for node in nodes)
        self.ends_us = max(node.end_us for node in nodes)
        # Optimizer.step(closure), as LBFGS and PyTorch Lightning call it, holds the whole step
        in_closure = self.begins_us in trace.optimizer
        self.reduced_us = self._find_reduced_us()
        after = Intervals([(self.ends_us, window.end_us)])
        self.in_optimizer = after if in_closure else trace.optimizer
        self.forward: list[DeviceWork] = []
        self.backward: list[list[DeviceWork]] = [[] for _ in range(len(self.ready) + 1)]
        self.optimizer: list[DeviceWork] = []
        self.collectives: list[DeviceWork] = []
        self.copies_in: list[DeviceWork] = []
        for work in trace.launched(window):
            self._put(work)

    def _find_reduced_us(self) -> float:
        """When the optimizer follows the backward: DDP has waited for all gradients by then."""
        spans = self.trace.optimizer
        for start_us, end_us in zip(spans.starts, spans.ends, strict=True):
            if self.ends_us < end_us <= self.window.end_us:
                return start_us if start_us >= self.ends_us else end_us
        return self.window.end_us

    def _put(self, work: DeviceWork) -> None:
        """Sort a launch into the step's parts."""
        thread, at_us = work.launch.thread, work.launch.start_us
        is_main = thread == self.trace.main
        if is_communication(work.event):
            self.collectives.append(work)
        elif self.trace.is_left_out(work.launch):
            if self.begins_us <= at_us <= self.ends_us:
                self.copies_in.append(work)
        elif is_main and at_us in self.in_optimizer:
            self.optimizer.append(work)
        elif self.begins_us <= at_us <= self.ends_us:
            self.backward[bisect_right(self.ready_us, at_us)].append(work)
        elif at_us < self.begins_us:
            self.forward.append(work)
        else:
            self.optimizer.append(work)

    def _is_mixed(self) -> bool:
        """Whether much of what is done between autograd's nodes is none of theirs."""
        if not self.trace.kernels:
            whole_us = self.ends_us - self.begins_us
            # old traces do not mark the sums of gradients that two nodes make
            return self.trace.marks_nodes and self._between_nodes_us() > _MOST_BETWEEN * whole_us
        main = self.trace.main
        works = [work for part in self.backward for work in part]
        theirs_us = sum(work.work_us for work in works if work.launch.thread == main)
        return main not in self.trace.backward_threads and theirs_us > _MOST_BETWEEN * sum(
            work.work_us for work in works
        )

    def _between_nodes_us(self) -> float:
        """What the main thread's ops take from the first node to the last, outside of nodes."""
        main = self.trace.main
        nodes = spans_of(op for op in self.nodes if op.thread == main)
        ddp = self.trace.ddp.get(main, Intervals([]))
        between = Window("backward", self.begins_us, self.ends_us)
        return spans_of(
            op
            for op in within(self.trace.ops, between)
            if op.thread == main and op.name.startswith("aten::")
            if op.start_us not in nodes and op.start_us not in ddp
        ).within(self.begins_us, self.ends_us)

    def times(self) -> KinetoStep:
        """The step's times; raises ImportFailedError if it is several."""
        window = self.window
        forwards = [op for op in within(self.trace.ops, window) if op.name == DDP_FORWARD]
        if len(forwards) > 1 or self._is_mixed():  # micro-batches, or two models in turns
            raise self.trace.wrong(
                f"{window.name} runs several forwards and backwards; record steps of one "
                "micro-batch (ddp.accumulation_steps then repeats it)"
            )
        backward, forward = tuple(self._backward()), tuple(self._forward())
        optimizer = self._optimizer()
        launches_us = [work.launch.start_us for work in self.collectives]
        sent_us = [at_us for at_us in launches_us if self._is_of_gradients(at_us)]
        sent_us += [op.start_us for op in self._gloo if self._is_gloo_of_gradients(op)]
        return KinetoStep(
            name=window.name,
            length_s=(window.end_us - window.start_us) * _S,
            forward=forward,
            backward=backward,
            optimizer=optimizer,
            gradients=tuple(self._gradients()),
            collectives=tuple(self._told_collectives()),
            loader_s=self.trace.loader.within(window.start_us, window.end_us) * _S,
            beside_comm_s=self._beside_communication_us() * _S,
            has_optimizer=any(
                op.name.startswith(OPTIMIZER_STEP) for op in within(self.trace.ops, window)
            ),
            start_s=window.start_us * _S,
            done_s=max(
                (work.event.end_us for work in self.trace.launched(window)), default=window.end_us
            )
            * _S,
            lasts_s=(window.end_us - window.start_us) * _S,
            ddp_host_s=sum(
                of_thread.within(window.start_us, window.end_us)
                for of_thread in self.trace.ddp.values()
            )
            * _S,
            own_of_ddp=OwnOfDdp() if self.trace.kernels else self._own_of_ddp(),
            reads=len(within(self.trace.reads, window)),
            sends_early=min(sent_us, default=window.end_us) < self.ready_us[-1],
            parts=self._parts(sum(piece.device_s for piece in forward), optimizer.device_s),
        )

    def _parts(self, forward_s: float, optimizer_s: float) -> StepParts:
        """What the step's time went to.

        Of a CPU, where the main thread computes, what it does not do between marks is a wait. A GPU
        may work beyond the end of the host's step as it did at the beginning.
        """
        trace, window = self.trace, self.window
        if not trace.kernels:
            idle_us = self.reduced_us - self.ends_us
            at_work = self._at_work(self.ends_us, self.reduced_us)
            idle_us -= at_work.within(self.ends_us, self.reduced_us)
            exposed_us = self._waits.within(window.start_us, self.ends_us) + max(0.0, idle_us)
            backward_s = (self.ends_us - self.begins_us) * _S
            data_us = trace.loader.within(window.start_us, window.end_us)
        else:
            device = spans_of(work.event for work in trace.launched(window))
            forward_s, optimizer_s = _work_s(self.forward), _work_s(self.optimizer)
            backward_s = _work_s([*chain.from_iterable(self.backward), *self.copies_in])
            exposed_us = self._awaited_us()
            data_us = sum(
                end - start - device.within(start, end)
                for start, end in trace.loader.beginning_within(window.start_us, window.end_us)
            )
        parts_s = (data_us * _S, forward_s, backward_s, exposed_us * _S, optimizer_s)
        return StepParts(*parts_s, other=(window.end_us - window.start_us) * _S - sum(parts_s))

    def _awaited_us(self) -> float:
        """How long kernels that are launched already wait while a collective is under way."""
        waited_us, done_us = 0.0, -inf
        launched = self.trace.launched(self.window)
        computing = (work for work in launched if not is_communication(work.event))
        for work in sorted(computing, key=lambda work: work.event.start_us):
            could_us = max(done_us, work.launch.end_us)
            waited_us += self.trace.communication.within(could_us, work.event.start_us)
            done_us = max(done_us, work.event.end_us)
        return waited_us

    def _own_of_ddp(self) -> OwnOfDdp:
        """DDP's own work on a CPU, without the waits for gloo in the midst of a broadcast."""
        trace, start_us, begins_us = self.trace, self.window.start_us, self.begins_us
        forward = self.window._replace(end_us=begins_us)
        calls_us = [op.start_us for op in within(trace.ops, forward) if op.name == BROADCAST]
        spans = trace.ddp.get(trace.main, Intervals([]))
        before_us = 0.0
        if calls_us:
            zeroed_us = trace.optimizer.within(start_us, calls_us[0])
            before_us = trace.host_us(trace.main, start_us, calls_us[0]) - zeroed_us
        return OwnOfDdp(
            max(0.0, before_us) * _S,
            tuple(
                _S * max(0.0, spans.within(start, end) - self._waits.within(start, end))
                for start, end in pairwise([start_us, *calls_us, begins_us])
            ),
            tuple(
                (op.end_us - op.start_us) * _S
                for op in within(trace.ops, Window("", self.ends_us, self.reduced_us))
                if op.thread == trace.main and op.name.endswith(_COPY_BACK)
            ),
        )

    @cached_property
    def _waits(self) -> Intervals:
        """When the main thread waits while buffers are broadcast."""
        spans: list[tuple[float, float]] = []
        for start_us, end_us in self.trace.broadcasts:
            if self.window.start_us <= start_us < self.begins_us:
                at_work = self._at_work(start_us, end_us)
                spans += zip([start_us, *at_work.ends], [*at_work.starts, end_us], strict=True)
        return Intervals(spans)

    def _at_work(self, start_us: float, end_us: float) -> Intervals:
        return spans_of(
            op
            for op in within(self.trace.ops, Window("", start_us, end_us))
            if op.thread == self.trace.main and op.name.startswith(("aten::", *OF_DDP))
        )

    def _gradients(self) -> Iterator[Gradient]:
        is_of_ddp = any(True for _ in self._told_collectives())
        for op in self.ready:
            hooks = self.trace.hooks.get(op.thread) if is_of_ddp else None
            yield _gradient_of(op.args)._replace(
                in_checkpoint=op.start_us in self.trace.checkpoints,
                hook_s=self._until_launch_us(op, hooks) * _S if hooks else None,
            )

    def _until_launch_us(self, ready: Event, hooks: Intervals) -> float:
        """How long a hook takes before it asks for the bucket's all-reduce, if it does."""
        ends_us = ready.end_us + hooks.beginning_at(ready.end_us)
        call = self.trace.last_collective_call(ends_us)
        return (call.start_us if call and call.start_us > ready.end_us else ends_us) - ready.end_us

    def _after_launch_us(self, ready: Event) -> float:
        """What a hook does after that, before the backward goes on; of a CPU."""
        hooks = self.trace.hooks.get(ready.thread)
        if self.trace.kernels or hooks is None:
            return 0.0
        return hooks.beginning_at(ready.end_us) - self._until_launch_us(ready, hooks)

    def _piece(self, works: Iterable[DeviceWork], host_us: float) -> Piece:
        """Sums up a part of the step; on a CPU the host is the device."""
        if not self.trace.kernels:
            return Piece(host_us * _S, 0.0)
        return Piece(sum(work.work_us for work in works) * _S, host_us * _S)

    def _forward_host_us(self, start_us: float, end_us: float) -> float:
        optimizer_us = self.in_optimizer.within(start_us, end_us)
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
        hooks_us = [0.0, *map(self._after_launch_us, self.ready)]
        for thread, works, hook_us, (start_us, end_us) in zip(
            [*threads, threads[-1]], self.backward, hooks_us, pairwise(marks_us), strict=True
        ):
            yield self._piece(works, hook_us + self.trace.host_us(thread, start_us, end_us))

    def _optimizer(self) -> Piece:
        """Also zero_grad, and what follows the backward: clipping, metrics."""
        trace, window = self.trace, self.window
        until_optimizer = window._replace(end_us=self.reduced_us)
        waited_us = (
            min(op.end_us, self.reduced_us)  # a thread of gloo may note its end late
            for op in within(trace.ops, until_optimizer)
            if op.name.startswith(OF_DDP) and op.end_us < window.end_us
        )
        from_us = max([self.ends_us, *waited_us])
        host_us = trace.host_us(trace.main, from_us, window.end_us) - self._later_waits_us()
        host_us += self.in_optimizer.within(window.start_us, self.begins_us)
        return self._piece(self.optimizer, max(0.0, host_us))

    def _later_waits_us(self) -> float:
        """How long the main thread does nothing while a collective of the loop's own is at work."""
        main, window = self.trace.main, self.window
        later = within(self.trace.ops, window._replace(start_us=self.reduced_us))
        under_way = Intervals(
            (self._asked_us(op), min(op.end_us, window.end_us))
            for op in later
            if op.name.startswith(_GLOO) and op.thread != main
        )
        at_work = spans_of(op for op in later if op.thread == main and op.name.startswith(_AT_WORK))
        return sum(
            end_us - start_us - at_work.within(start_us, end_us)
            for start_us, end_us in zip(under_way.starts, under_way.ends, strict=True)
        )

    def _asked_us(self, collective: Event) -> float:
        """When the host asked for a collective that another thread carries out."""
        call = self.trace.last_collective_call(collective.start_us)
        if call is None or call.start_us < self.reduced_us:
            return collective.start_us
        return call.start_us

    @property
    def _gloo(self) -> list[Event]:
        return [op for op in within(self.trace.ops, self.window) if op.name.startswith(_GLOO)]

    def _told_collectives(self) -> Iterator[MeasuredCollective]:
        for work in self.collectives:
            event = work.event
            name = str(event.args.get("Collective name", "")) or event.name
            elements, dtype = count_of(event.args.get("In msg nelems")), event.args.get("dtype")
            yield MeasuredCollective(
                operation_of(name),
                elements,
                dtype_of(dtype),
                (event.end_us - event.start_us) * _S,
                self._is_of_gradients(work.launch.start_us)
                and operation_of(name) == "all_reduce"
                and not self._is_map_of_used(elements, dtype),
                event.start_us * _S,
                event.name,
                _first_count(event.args.get("grid")),
                _first_count(event.args.get("block")),
            )
        yield from self._told_of_gloo()

    def _told_of_gloo(self) -> Iterator[MeasuredCollective]:
        ops = self._gloo
        for op, delay_us in zip(ops, _delays_us(self.trace, self.window, ops), strict=True):
            elements, dtype = _gradient_of(op.args).numel, first(op.args.get("Input type"))
            is_of_gradients = self._is_gloo_of_gradients(op)
            # a thread of gloo that gets no core notes its end late: DDP has gone on by then
            end_us = min(op.end_us, self.reduced_us) if is_of_gradients else op.end_us
            yield MeasuredCollective(
                operation_of(op.name),
                elements,
                dtype_of(dtype),
                (end_us - op.start_us) * _S,
                is_of_gradients and not self._is_map_of_used(elements, dtype),
                op.start_us * _S,
                delay_s=delay_us * _S,
            )

    def _is_map_of_used(self, elements: int | None, dtype: Any) -> bool:
        """Whether it is DDP's map of used parameters (find_unused_parameters): int32, one each."""
        return elements == len(self.ready) and name_of(dtype) == "int"

    def _is_gloo_of_gradients(self, op: Event) -> bool:
        """Whether a hook asked for an all-reduce, or may have, where no call of it is told.

        The last call before it begins tells: those of the loop follow when DDP has waited for all.
        """
        is_in_time = self.begins_us <= op.start_us < self.reduced_us
        if op.name != "gloo:all_reduce" or not is_in_time:
            return False
        call = self.trace.last_collective_call(op.start_us)
        if call is None or not self.trace.hooks:
            return True
        hooks = self.trace.hooks.get(call.thread)
        return hooks is not None and call.start_us in hooks

    def _is_of_gradients(self, at_us: float) -> bool:
        """Whether a collective was launched by the hook of a gradient."""
        index = bisect_right(self.ready_us, at_us) - 1
        if index < 0:
            return False
        hooks = self.trace.ddp.get(self.ready[index].thread)
        return hooks is not None and at_us in hooks

    def _beside_communication_us(self) -> float:
        """What is done for forward and backward while a collective is at work."""
        if not self.trace.kernels:
            begins_us, thread = self.begins_us, self.ready[-1].thread
            gloo = spans_of(self._gloo)
            return sum(
                self._forward_host_us(start_us, min(end_us, begins_us))
                + self.trace.host_us(thread, max(start_us, begins_us), min(end_us, self.ends_us))
                for start_us, end_us in zip(gloo.starts, gloo.ends, strict=True)
            )
        works = (*self.forward, *(w for works in self.backward for w in works), *self.optimizer)
        comm = self.trace.communication
        return sum(comm.within(work.event.start_us, work.event.end_us) for work in works)


def _delays_us(trace: TraceEvents, window: Window, ops: Sequence[Event]) -> Iterator[float]:
    """How long gloo's threads take to begin each op of a step, by their start, since it was asked
    for and one of them was free.

    torch gives gloo two threads, which take collectives in the order in which they are asked for
    (ProcessGroupGloo.cpp). On a machine whose cores are busy a thread that was woken waits for one.
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


def operation_of(name: str) -> str:
    """`allreduce`, `ncclKernel_AllReduce_RING_LL_Sum_float` and `gloo:all_reduce` are one."""
    plain = name.lower().replace("_", "")
    return next((each for each in _OPERATIONS if each.replace("_", "") in plain), name)


def _gradient_of(args: dict[str, Any]) -> Gradient:
    """Shape and type of an operator's first input."""
    shape, dtype = first(args.get("Input Dims")), dtype_of(first(args.get("Input type")))
    if not isinstance(shape, list) or not all(isinstance(extent, int) for extent in shape):
        return Gradient(None, dtype)
    return Gradient(tuple(shape) if 0 < prod(shape) <= MOST else None, dtype)


def first(inputs: Any) -> Any:
    """The first of several inputs; None where there is none."""
    return inputs[0] if isinstance(inputs, list) and inputs else None


def _first_count(extents: Any) -> int | None:
    """The first extent of a grid or a block."""
    return count_of(first(extents))


def dtype_of(name: Any) -> str | None:
    """A type by torch's name for it."""
    return _DTYPES.get(name_of(name))


def name_of(dtype: Any) -> str:
    """`c10::Half` of an op is `Half` of a collective."""
    return str(dtype).removeprefix("c10::").lower()


def _work_s(works: Iterable[DeviceWork]) -> float:
    return sum(work.work_us for work in works) * _S
