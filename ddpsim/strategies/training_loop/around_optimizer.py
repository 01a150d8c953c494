"""What a loop does before and after its optimizer, and where its host waits for a value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ddpsim.cluster.transfers import ProcessGroup
from ddpsim.result.timeline import Kind
from ddpsim.scenario.workload import Workload
from ddpsim.strategies.ddp.costs import Prices
from ddpsim.strategies.instructions import (
    Await,
    Communicate,
    Compute,
    Instruction,
    Synchronize,
    compute,
)
from ddpsim.workload.gradient_passes import (
    clipping_work,
    norm_work,
    one_value_work,
    unscaling_work,
    zeroing_work,
)
from ddpsim.workload.model import Model, Work

_NORM = -1  # the number of its all-reduce, which is awaited before the next one


class NormSum(NamedTuple):
    """How the norm of shards becomes that of all gradients: an all-reduce of one value.

    `host_s`: what clipping shards takes the host besides. `group`: ranks that have different
    shards. `reads`: the host waits for the sum.
    """

    host_s: float = 0.0
    group: ProcessGroup = "world"
    reads: bool = False


class AroundOptimizer(NamedTuple):
    """The instructions before the optimizer, after the last gradient is reduced, and after it."""

    before: tuple[Instruction, ...] = ()
    after: tuple[Instruction, ...] = ()


@dataclass(frozen=True)
class Loop:
    """A loop that scales its loss, clips its gradients, or zeroes them.

    A step_time was measured with all of its work: only the host's waits are added to that.
    `norm_sum`: how the norm is summed where each rank has a part of the gradients. `is_wrapped`:
    GradScaler does not see whether the optimizer is fused.
    """

    workload: Workload
    model: Model
    prices: Prices
    norm_sum: NormSum | None = None
    is_wrapped: bool = False

    def around_optimizer(self) -> AroundOptimizer:
        """What the loop does before and after its optimizer."""
        before = (*self.unscaled(), *self.clipped(), *self.flagged(), *self.read())
        return AroundOptimizer(before, (*self.read(), *self.updated(), *self.zeroed()))

    def unscaled(self) -> Iterator[Instruction]:
        """GradScaler.unscale_."""
        if self.workload.scales_loss:
            yield from self._compute("unscale", unscaling_work(self.model.used, self.prices.device))

    def clipped(self) -> Iterator[Instruction]:
        """clip_grad_norm_, whose host may wait for the norm before anything is scaled."""
        options = self.workload.clip_grad_norm
        if options is None:
            return
        used, checks = self.model.used, options.error_if_nonfinite
        yield from self._compute("clip", norm_work(used, self.prices.device, checks=checks))
        if self.norm_sum:
            yield from self._summed(self.norm_sum)
        if checks or (self.norm_sum and self.norm_sum.reads):
            yield from read_value(self.prices)
        yield from self._compute("clip", clipping_work(used, self.prices.device))

    def _summed(self, norm_sum: NormSum) -> Iterator[Instruction]:
        yield Compute("clip", self.prices.ticks.host_ns(norm_sum.host_s), 0)
        host_ns, cause, group = self.prices.call_ns, "the norm of gradients", norm_sum.group
        yield Communicate(_NORM, host_ns, "all_reduce", 4, cause=cause, group=group)
        yield Await(_NORM)

    def flagged(self) -> Iterator[Instruction]:
        """GradScaler.step asks whether a gradient was infinite.

        A fused optimizer gets the flag as a tensor, a sum of one where gradients were unscaled for
        clipping: nobody waits for it (grad_scaler.py: _step_supports_amp_scaling, which
        ZeroRedundancyOptimizer has not).
        """
        if not self.workload.scales_loss:
            return
        if self.is_wrapped or not self.workload.optimizer.fused:
            yield from read_value(self.prices)
        elif self.workload.clip_grad_norm:
            yield from self._compute("unscale", one_value_work(self.prices.device))

    def read(self) -> Iterator[Instruction]:
        """Adafactor's host waits for norms of each parameter: from the first to the last."""
        if self.workload.optimizer.name == "adafactor" and self.prices.device.kind == "gpu":
            yield Synchronize()

    def updated(self) -> Iterator[Instruction]:
        """GradScaler.update."""
        if self.workload.scales_loss:
            yield from self._compute("unscale", one_value_work(self.prices.device))

    def zeroed(self) -> Iterator[Instruction]:
        """Optimizer.zero_grad, unless it drops the gradients."""
        if not self.workload.set_to_none:
            fused = self.workload.optimizer.fused
            yield from self._compute(
                "zero_grad", zeroing_work(self.model.used, self.prices.device, fused=fused)
            )

    def _compute(self, kind: Kind, work: Work) -> Iterator[Instruction]:
        if self.workload.step_time is None:
            yield compute(kind, self.prices.ticks.launch(work))


def read_value(prices: Prices) -> tuple[Instruction, ...]:
    """`.item()`: a copy to the host, which waits for all that was launched before."""
    return compute("item", prices.ticks.launch(one_value_work(prices.device))), Synchronize()
