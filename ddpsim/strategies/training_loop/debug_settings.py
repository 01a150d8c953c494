"""What debug settings of torch and NCCL cost in each step."""

from __future__ import annotations

from collections.abc import Iterator

from ddpsim.scenario.device import Device
from ddpsim.scenario.options.training_loop import DebugSettings
from ddpsim.strategies.instructions import (
    Communicate,
    Compute,
    Instruction,
    Synchronize,
    compute,
)
from ddpsim.strategies.strategy import Strategy
from ddpsim.strategies.ticks import Ticks
from ddpsim.strategies.training_loop.around_steps import Around
from ddpsim.workload.gradient_passes import one_value_work
from ddpsim.workload.model import joined

# measured with torch 2.13 on one core of an EPYC: 75 us in a module alone, 126 in five nested ones,
# 208 in ten, 331 in twenty
_STACK_S = 126e-6
_CHECK_OPERATORS = 3  # isnan, _is_any_true, item
_CHECK_ON_CPU_S = 2.1e-6  # measured beside it, on tensors of 16 values
_FINGERPRINT_OPERATIONS = 3  # over gloo
# measured with torch 2.13: three of them take two ranks of one machine 375 us
_GLOO_OPERATION_S = 100e-6
_GLOO_MESSAGE_S = 25e-6  # assumed; in the barrier there and back, in each all-gather once


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
        self, inner: Strategy, settings: DebugSettings, ranks: int, device: Device, ticks: Ticks
    ) -> None:
        super().__init__(inner)
        self._device, self._ticks = device, ticks
        self._watches = settings.detect_anomaly
        self._before_collective_ns = ticks.host_ns(settings.nccl_line_s or 0.0)
        if settings.distributed_detail and ranks > 1:
            self._before_collective_ns += ticks.host_ns(_fingerprint_s(ranks))

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
        """As many as the host's time is of; one where nobody knows that time."""
        one_ns = self._ticks.host_ns(self._device.operator_s + self._device.launch_s)
        return max(1, round(work.host_ns / one_ns)) if one_ns else 1

    def _checked(self) -> tuple[Instruction, ...]:
        """One gradient, looked at for NaN."""
        if self._device.kind == "cpu":
            return (Compute("backward", self._ticks.host_ns(_CHECK_ON_CPU_S), 0),)
        looks = joined(_CHECK_OPERATORS * [one_value_work(self._device)])
        return compute("item", self._ticks.launch(looks)), Synchronize()


def _fingerprint_s(ranks: int) -> float:
    """Of all ranks of a collective; an all-gather has as many rounds as there are other ranks."""
    messages = (_FINGERPRINT_OPERATIONS - 1 + 2) * (ranks - 1)
    return _FINGERPRINT_OPERATIONS * _GLOO_OPERATION_S + messages * _GLOO_MESSAGE_S
