"""The model alone on one device: no gradients are shared, and nothing is sent."""

from __future__ import annotations

from collections.abc import Iterator

from ddpsim.strategies.instructions import Instruction, LoadBatch, Mark, compute_all
from ddpsim.strategies.model_work import ModelWork
from ddpsim.strategies.strategy import Strategy

__all__ = ["SingleDevice"]


class SingleDevice(Strategy):
    """The bare module's step: load, forward, backward of each micro-batch, then the optimizer.

    `warm`: so many first steps do not count, as those of the strategy it is compared with.
    """

    def __init__(self, work: ModelWork, warm: int) -> None:
        self._work = work
        self._warm = warm

    @property
    def warmup(self) -> int:
        """See Strategy."""
        return self._warm

    def step(self, kind: int) -> Iterator[Instruction]:  # noqa: ARG002
        """See Strategy."""
        for micro_batch in self._work.micro_batches:
            yield LoadBatch()
            yield from compute_all("forward", micro_batch.forward)
            if micro_batch.is_last:
                yield Mark("backward_starts")
            yield from compute_all("backward", micro_batch.backward)
        yield from self._work.end_of_step()
