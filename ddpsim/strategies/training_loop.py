"""What a training loop does around the optimizer, where it waits for the device, and how often."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm
from typing import NamedTuple

from ddpsim.result.timeline import Kind
from ddpsim.scenario.device import Device
from ddpsim.scenario.workload import Workload
from ddpsim.strategies.instructions import Instruction, Synchronize, compute
from ddpsim.strategies.strategy import Bucket, ResidentBytes, Strategy
from ddpsim.strategies.ticks import Ticks
from ddpsim.workload.gradient_passes import (
    clipping_work,
    norm_work,
    one_value_work,
    unscaling_work,
)
from ddpsim.workload.model import Model, Work

__all__ = ["AroundOptimizer", "LossReads"]


class AroundOptimizer(NamedTuple):
    """The instructions before the optimizer, after the last gradient is reduced, and after it."""

    before: tuple[Instruction, ...] = ()
    after: tuple[Instruction, ...] = ()

    @classmethod
    def of(cls, workload: Workload, model: Model, device: Device, ticks: Ticks) -> AroundOptimizer:
        """Of a loop that scales its loss, or clips its gradients."""
        loop = _Loop(workload, model, device, ticks)
        before = (*loop.unscaled(), *loop.clipped(), *loop.flagged())
        return cls(before, tuple(loop.updated()))


@dataclass(frozen=True)
class _Loop:
    """A step_time was measured with all of a loop's work: only the host's waits are added to it."""

    workload: Workload
    model: Model
    device: Device
    ticks: Ticks

    def unscaled(self) -> Iterator[Instruction]:
        """GradScaler.unscale_."""
        if self.workload.scales_loss:
            yield from self._compute("unscale", unscaling_work(self.model.used, self.device))

    def clipped(self) -> Iterator[Instruction]:
        """clip_grad_norm_, whose host may wait for the norm before anything is scaled."""
        options = self.workload.clip_grad_norm
        if options is None:
            return
        used, checks = self.model.used, options.error_if_nonfinite
        yield from self._compute("clip", norm_work(used, self.device, checks=checks))
        if checks:
            yield from _read_value(self.device, self.ticks)
        yield from self._compute("clip", clipping_work(used, self.device))

    def flagged(self) -> Iterator[Instruction]:
        """GradScaler.step asks whether a gradient was infinite.

        A fused optimizer gets the flag as a tensor, a sum of one where gradients were unscaled for
        clipping: nobody waits for it (grad_scaler.py: _step_supports_amp_scaling).
        """
        if not self.workload.scales_loss:
            return
        if not self.workload.optimizer.fused:
            yield from _read_value(self.device, self.ticks)
        elif self.workload.clip_grad_norm:
            yield from self._compute("unscale", one_value_work(self.device))

    def updated(self) -> Iterator[Instruction]:
        """GradScaler.update."""
        if self.workload.scales_loss:
            yield from self._compute("unscale", one_value_work(self.device))

    def _compute(self, kind: Kind, work: Work) -> Iterator[Instruction]:
        if self.workload.step_time is None:
            yield compute(kind, self.ticks.launch(work))


def _read_value(device: Device, ticks: Ticks) -> tuple[Instruction, ...]:
    """`.item()`: a copy to the host, which waits for all that was launched before."""
    return compute("item", ticks.launch(one_value_work(device))), Synchronize()


class LossReads(Strategy):
    """Another strategy whose loop reads the loss on the host at the end of every so many steps.

    Every second kind of step is one of the other strategy's with such a read.
    """

    def __init__(self, inner: Strategy, every: int, device: Device, ticks: Ticks) -> None:
        self._inner = inner
        self._every = every
        self._read = _read_value(device, ticks)
        self.broadcast, self.reduced = inner.broadcast, inner.reduced

    @property
    def kinds(self) -> int:
        """See Strategy."""
        return 2 * self._inner.kinds

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
        return lcm(self._inner.period, self._every)

    @property
    def warmup(self) -> int:
        """See Strategy."""
        return self._inner.warmup

    def kind(self, number: int) -> int:
        """See Strategy."""
        return 2 * self._inner.kind(number) + (number % self._every == 0)

    def step(self, kind: int) -> Iterator[Instruction]:
        """See Strategy."""
        inner, reads = divmod(kind, 2)
        *step, end = self._inner.step(inner)
        yield from step
        if reads:
            yield from self._read
        yield end

    def buckets(self, kind: int) -> tuple[Bucket, ...]:
        """See Strategy."""
        return self._inner.buckets(kind // 2)

    def resident_bytes(self, model: Model, optimizer_bytes: int) -> ResidentBytes:
        """See Strategy."""
        return self._inner.resident_bytes(model, optimizer_bytes)
