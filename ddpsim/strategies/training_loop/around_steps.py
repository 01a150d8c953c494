"""Another strategy whose loop does more in its steps: copies, reads of the loss, an evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import takewhile
from math import lcm

from ddpsim.result.model import MemoryPeak, MemoryWalk
from ddpsim.scenario.device import Device
from ddpsim.scenario.options.training_loop import DebugSettings, InputCopy
from ddpsim.strategies.ddp.costs import Prices
from ddpsim.strategies.instructions import (
    Await,
    Communicate,
    Compute,
    Instruction,
    LoadBatch,
    Mark,
    Synchronize,
    compute,
)
from ddpsim.strategies.strategy import Bucket, ResidentBytes, Strategy
from ddpsim.workload.gradient_passes import one_value_work
from ddpsim.workload.model import Model, Work, joined

_BARRIER = -7  # a number beside those of a step's other collectives
_FLOAT_BYTES = 4
STAGED_BYTES_PER_S = 10e9  # assumed; one core of an EPYC copies 20 GB/s where nothing else runs
# debug settings, measured with torch 2.13 on one core of an EPYC: 75 us in a module alone, 126 in
# five nested ones, 208 in ten, 331 in twenty
_STACK_S = 126e-6
_CHECK_OPERATORS = 3  # isnan, _is_any_true, item
_CHECK_ON_CPU_S = 2.1e-6  # measured beside it, on tensors of 16 values
_FINGERPRINT_OPERATIONS = 3  # over gloo
# measured with torch 2.13: three of them take two ranks of one machine 375 us
_GLOO_OPERATION_S = 100e-6
_GLOO_MESSAGE_S = 25e-6  # assumed; in the barrier there and back, in each all-gather once


def input_rate(options: InputCopy, device: Device) -> float:
    """Bytes per second from the host to the device, stated or of its PCIe generation."""
    return options.bandwidth_bytes_per_s or device.host_link_bytes_per_s


class Around(Strategy):
    """Another strategy, whose loop does more in its steps."""

    def __init__(self, inner: Strategy) -> None:
        self._inner = inner
        self.broadcast, self.reduced = inner.broadcast, inner.reduced
        self.phases = inner.phases

    @property
    def kinds(self) -> int:
        """See Strategy."""
        return self._inner.kinds

    @property
    def steady_from(self) -> int | None:
        """See Strategy."""
        return self._inner.steady_from

    @property
    def rebuilt_from(self) -> int | None:
        """See Strategy."""
        return self._inner.rebuilt_from

    @property
    def period(self) -> int:
        """See Strategy."""
        return self._inner.period

    @property
    def warmup(self) -> int:
        """See Strategy."""
        return self._inner.warmup

    def kind(self, number: int) -> int:
        """See Strategy."""
        return self._inner.kind(number)

    def buckets(self, kind: int) -> tuple[Bucket, ...]:
        """See Strategy."""
        return self._inner.buckets(kind)

    def resident_bytes(self, model: Model, optimizer_bytes: int) -> ResidentBytes:
        """See Strategy."""
        return self._inner.resident_bytes(model, optimizer_bytes)

    def memory_peak(self) -> MemoryPeak | None:
        """See Strategy."""
        return self._inner.memory_peak()

    def memory_walk(self) -> MemoryWalk:
        """See Strategy."""
        return self._inner.memory_walk()


class ForwardAlone(Around):
    """The beginning of another strategy's steady step, up to its backward, again and again."""

    kinds, steady_from, rebuilt_from, period, warmup = 1, None, None, 1, 2

    def kind(self, number: int) -> int:  # noqa: ARG002
        """See Strategy."""
        return 0

    def step(self, kind: int) -> Iterator[Instruction]:  # noqa: ARG002
        """See Strategy; what nobody has awaited by then is awaited at its end."""
        steady = self._inner.kind(self._inner.steady_from or 0)
        pending: list[int] = []
        for instruction in takewhile(_is_before_backward, self._inner.step(steady)):
            yield instruction
            if isinstance(instruction, Communicate):
                pending.append(instruction.number)
            elif isinstance(instruction, Await):
                pending.remove(instruction.number)
        yield from map(Await, pending)
        yield Mark("backward_starts")
        yield Mark("step_ends")

    def buckets(self, kind: int) -> tuple[Bucket, ...]:  # noqa: ARG002
        """See Strategy: nothing is reduced."""
        return ()


def _is_before_backward(instruction: Instruction) -> bool:
    if isinstance(instruction, Compute):
        return instruction.kind != "backward"
    return not (isinstance(instruction, Mark) and instruction.place == "backward_starts")


class InputCopies(Around):
    """Another strategy whose loop copies the inputs of each micro-batch to the device.

    The host copies what is not pinned into a staging buffer first (CUDA's runtime API, `API
    synchronization behavior`), and after a copy that blocks it waits for the stream (torch's
    aten/src/ATen/native/cuda/Copy.cu: memcpy_and_sync).
    """

    def __init__(
        self, inner: Strategy, options: InputCopy, size_bytes: int, prices: Prices
    ) -> None:
        super().__init__(inner)
        device = prices.device
        rate = input_rate(options, device)
        staged_s = 0.0 if options.pinned else size_bytes / STAGED_BYTES_PER_S
        copied_s = max(device.kernel_floor_s, size_bytes / rate)
        copied = prices.ticks.launch(Work(copied_s, 1, device.operator_s + staged_s))
        waits = () if options.non_blocking else (Synchronize(),)
        self._copied: tuple[Instruction, ...] = (compute("input_copy", copied), *waits)

    def step(self, kind: int) -> Iterator[Instruction]:
        """See Strategy."""
        for instruction in self._inner.step(kind):
            yield instruction
            if isinstance(instruction, LoadBatch):
                yield from self._copied


class EndsOfSteps(Around):
    """Another strategy whose loop does more at the end of every so many steps.

    Every second kind of step is one of the other strategy's with that.
    """

    def __init__(self, inner: Strategy, every: int, done: Iterable[Instruction]) -> None:
        super().__init__(inner)
        self._every = every
        self._done = tuple(done)

    @property
    def kinds(self) -> int:
        """See Strategy."""
        return 2 * self._inner.kinds

    @property
    def period(self) -> int:
        """See Strategy."""
        return lcm(self._inner.period, self._every)

    def kind(self, number: int) -> int:
        """See Strategy."""
        return 2 * self._inner.kind(number) + (number % self._every == 0)

    def step(self, kind: int) -> Iterator[Instruction]:
        """See Strategy."""
        inner, does_more = divmod(kind, 2)
        *step, end = self._inner.step(inner)
        yield from step
        if does_more:
            yield from self._done
        yield end

    def buckets(self, kind: int) -> tuple[Bucket, ...]:
        """See Strategy."""
        return self._inner.buckets(kind // 2)


def barrier(launch_ns: int) -> tuple[Instruction, ...]:
    """`dist.barrier()`, whose call takes the host `launch_ns`.

    NCCL's is an all-reduce of one float, after which the host waits for its stream (torch's
    ProcessGroupNCCL.cpp: barrier). Gloo's sends as many empty messages as an all-reduce has steps
    at most; it is priced as one of a float.
    """
    sent = Communicate(_BARRIER, launch_ns, "all_reduce", _FLOAT_BYTES, cause="a barrier")
    return sent, Await(_BARRIER), Synchronize()


class ThroughHost(Around):
    """Another strategy on GPUs under gloo: collectives are copied to the host and back.

    Source: torch's csrc/distributed/c10d/ProcessGroupGlooCuda.cpp. At the call a stream of its own
    waits for the current one and copies the tensor to pinned memory. One of gloo's threads waits
    for that copy, and sends; then it launches the copy back, again on that stream. Nothing of it is
    cut into pieces. `wait` blocks the host until the thread is done, and the current stream waits
    for the copy.
    """

    def __init__(self, inner: Strategy, ranks: int, prices: Prices) -> None:
        super().__init__(inner)
        self.phases = {**inner.phases, "comm_hook": "gloo's copies from the host back to the GPU"}
        self._ranks = ranks
        self._device, self._ticks = prices.device, prices.ticks

    def step(self, kind: int) -> Iterator[Instruction]:
        """See Strategy."""
        for instruction in self._inner.step(kind):
            if isinstance(instruction, Communicate):
                yield self._copied(instruction)
                continue
            yield instruction
            if isinstance(instruction, Await):
                yield Synchronize()

    def _copied(self, sent: Communicate) -> Communicate:
        gathers = sent.operation == "all_gather"
        own_bytes = sent.size_bytes // self._ranks if gathers else sent.size_bytes
        down, up = self._copy_ns(own_bytes), self._copy_ns(sent.size_bytes)
        operator = self._ticks.launch(Work(0.0, 1, self._device.operator_s))
        return sent._replace(
            host_ns=sent.host_ns + operator.host_ns,
            before_ns=sent.before_ns + down,
            after_ns=sent.after_ns + up,
        )

    def _copy_ns(self, size_bytes: int) -> int:
        copied_s = max(self._device.kernel_floor_s, size_bytes / self._device.host_link_bytes_per_s)
        return self._ticks.launch(Work(copied_s)).device_ns


class Debugged(Around):
    """Another strategy whose loop runs under debug settings of torch and NCCL.

    Anomaly mode: each operator of the forward stores a formatted stack (torch 2.13's
    csrc/autograd/python_anomaly_mode.cpp: store_stack), and the backward asks of each gradient
    `isnan(output)._is_any_true().item()` (engine.cpp: evaluate_function). Left out: what it reads.

    TORCH_DISTRIBUTED_DEBUG=DETAIL: before each collective a monitored barrier, in which rank 0
    hears each other rank in turn and answers each, and two all-gathers of a fingerprint, all over
    gloo and awaited (csrc/distributed/c10d/ProcessGroupWrapper.cpp: runCollectiveChecks, verify).

    NCCL_DEBUG=INFO logs nothing in a step (NCCL's debug.cc: ncclDebugInit); with
    NCCL_DEBUG_SUBSYS=COLL, or ALL, ncclEnqueueCheck writes a line for each collective.
    """

    def __init__(
        self, inner: Strategy, settings: DebugSettings, ranks: int, prices: Prices
    ) -> None:
        super().__init__(inner)
        self._device, self._ticks = prices.device, prices.ticks
        self._watches = settings.detect_anomaly
        self._before_collective_ns = self._ticks.host_ns(settings.nccl_line_s or 0.0)
        if settings.distributed_detail and ranks > 1:
            self._before_collective_ns += self._ticks.host_ns(_fingerprint_s(ranks))

    def step(self, kind: int) -> Iterator[Instruction]:
        """See Strategy."""
        for instruction in self._inner.step(kind):
            if isinstance(instruction, Communicate):
                host_ns = instruction.host_ns + self._before_collective_ns
                yield instruction._replace(host_ns=host_ns)
            elif self._watches and isinstance(instruction, Compute):
                yield from self._watched(instruction)
            else:
                yield instruction

    def _watched(self, work: Compute) -> Iterator[Instruction]:
        if work.kind == "forward":
            stacks_ns = self._ticks.host_ns(self._operators(work) * _STACK_S)
            yield work._replace(host_ns=work.host_ns + stacks_ns)
            return
        yield work
        if work.kind == "backward":
            yield from self._operators(work) * self._checked()

    def _operators(self, work: Compute) -> int:
        """How many operators the host's time is of; one where nobody knows that time."""
        one_ns = self._ticks.host_ns(self._device.operator_s + self._device.launch_s)
        return max(1, round(work.host_ns / one_ns)) if one_ns else 1

    def _checked(self) -> tuple[Instruction, ...]:
        """One gradient, looked at for NaN."""
        if self._device.kind == "cpu":
            return (Compute("backward", self._ticks.host_ns(_CHECK_ON_CPU_S), 0),)
        looks = joined(_CHECK_OPERATORS * [one_value_work(self._device)])
        return compute("item", self._ticks.launch(looks)), Synchronize()


def _fingerprint_s(ranks: int) -> float:
    """Seconds to compare a collective among all ranks: an all-gather has a round for each other."""
    messages = (_FINGERPRINT_OPERATIONS - 1 + 2) * (ranks - 1)
    return _FINGERPRINT_OPERATIONS * _GLOO_OPERATION_S + messages * _GLOO_MESSAGE_S
