"""Post-local SGD: DDP inside each node, and parameters of all ranks averaged now and then.

Source: torch 2.13 torch/distributed/algorithms: ddp_comm_hooks/post_localSGD_hook.py, whose
subgroups are the ranks of a machine (new_subgroups), and model_averaging/averagers.py
(PeriodicModelAverager with warmup_steps as start_localSGD_iter).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ddpsim.cluster.transfers import ProcessGroup
from ddpsim.scenario.options.loops import PostLocalSgd as Options
from ddpsim.strategies.context import StrategyContext
from ddpsim.strategies.ddp.strategy import DistributedDataParallel
from ddpsim.strategies.instructions import Instruction, Mark
from ddpsim.strategies.strategy import Bucket, ResidentBytes, Strategy
from ddpsim.strategies.training_loop.around_steps import Around
from ddpsim.workload.model import Model

_ALONE, _AVERAGES = 0, 1


class PostLocalSgd(Around):
    """DDP's kinds of step before it starts, then one kind without and one with an average."""

    warmup = Strategy.warmup

    def __init__(
        self,
        ddp: DistributedDataParallel,
        options: Options,
        context: StrategyContext,
    ) -> None:
        super().__init__(ddp)
        group: ProcessGroup = "node" if context.scenario.sends_in_groups else "world"
        self._reduces = options.post_local_gradient_allreduce
        reducer = replace(ddp.reducer, group=group, reduces=self._reduces)
        self._local = replace(ddp, reducer=reducer)
        self._average = context.all_reduces.averaged()
        self._every = options.period
        self._start = max(options.start_localSGD_iter, ddp.steady_from or 0)

    @property
    def kinds(self) -> int:
        """See Strategy."""
        return self._inner.kinds + 2

    @property
    def steady_from(self) -> int | None:
        """See Strategy."""
        return self._start

    @property
    def period(self) -> int:
        """See Strategy."""
        return self._every

    def kind(self, number: int) -> int:
        """See Strategy."""
        since = number - self._start
        if since < 0:
            return self._inner.kind(number)
        return self._inner.kinds + (_ALONE if since % self._every else _AVERAGES)

    def step(self, kind: int) -> Iterator[Instruction]:
        """See Strategy."""
        if kind < self._inner.kinds:
            yield from self._inner.step(kind)
            return
        for instruction in self._local.step(self._inner.kind(self._start)):
            if kind == self._inner.kinds + _AVERAGES and instruction == Mark("step_ends"):
                yield from self._average.averaged(len(self._sent))
            yield instruction

    def buckets(self, kind: int) -> tuple[Bucket, ...]:
        """See Strategy."""
        if kind < self._inner.kinds:
            return self._inner.buckets(kind)
        averages = kind == self._inner.kinds + _AVERAGES
        return (*self._sent, self._average.bucket) if averages else self._sent

    @property
    def _sent(self) -> tuple[Bucket, ...]:
        """The buckets that DDP sends once parameters are averaged; none where gradients stay."""
        return self._inner.buckets(self._inner.kind(self._start)) if self._reduces else ()

    def resident_bytes(self, model: Model, optimizer_bytes: int) -> ResidentBytes:
        """See Strategy; while parameters are averaged there are two of each."""
        held = self._inner.resident_bytes(model, optimizer_bytes)
        return held._replace(buckets=held.buckets + self._average.bucket.wire_bytes)
