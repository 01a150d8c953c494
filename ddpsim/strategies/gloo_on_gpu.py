"""gloo on GPU tensors: every collective is copied to the host and back.

Source: torch's csrc/distributed/c10d/ProcessGroupGlooCuda.cpp. At the call a stream of its own
waits for the current one and copies the tensor to pinned memory. One of gloo's threads waits for
that copy, and sends; then it launches the copy back, again on that stream. Nothing of it is cut
into pieces. `wait` blocks the host until the thread is done, and the current stream waits for the
copy.
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpsim.scenario.device import Device
from ddpsim.strategies.instructions import Await, Communicate, Instruction, Synchronize
from ddpsim.strategies.strategy import Strategy
from ddpsim.strategies.ticks import Ticks
from ddpsim.strategies.training_loop import Around
from ddpsim.workload.model import Work

__all__ = ["ThroughHost"]


class ThroughHost(Around):
    """Another strategy with copies around each collective, and a host that waits for it."""

    def __init__(self, inner: Strategy, ranks: int, device: Device, ticks: Ticks) -> None:
        super().__init__(inner)
        self._ranks = ranks
        self._device = device
        self._ticks = ticks

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
