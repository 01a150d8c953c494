"""The model alone on one device: no gradients are shared, and nothing is sent."""

from __future__ import annotations

from collections.abc import Iterator

from ddpsim.strategies.instructions import Instruction
from ddpsim.strategies.model_work import ModelWork
from ddpsim.strategies.strategy import Strategy


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
        yield from self._work.without_communication()
        yield from self._work.end_of_step()
