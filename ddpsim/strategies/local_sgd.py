"""Local SGD: ranks train alone and average their parameters every few steps.

Source: torch/distributed/algorithms/model_averaging/averagers.py (PeriodicModelAverager), 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpsim.strategies.all_reduces import AllReduce
from ddpsim.strategies.instructions import Instruction
from ddpsim.strategies.model_work import ModelWork
from ddpsim.strategies.strategy import Bucket, ResidentBytes, Strategy
from ddpsim.workload.model import Model

_PHASES = {
    "backward": "backward",
    "all_reduce": "the average of the parameters",
    "averaging": "copies of the parameters for their average",
}

_AVERAGES, _ALONE = 0, 1


class LocalSgd(Strategy):
    """No gradient is sent; after the optimizer of steps 0, `every`, 2 `every` ... parameters are.

    The averager flattens all of them into one tensor, which is one all-reduce.
    """

    reduced = "average of the parameters"
    phases = _PHASES

    def __init__(self, work: ModelWork, average: AllReduce, every: int) -> None:
        self._work = work
        self._average = average
        self._every = every

    @property
    def kinds(self) -> int:
        """See Strategy."""
        return 1 if self._every == 1 else 2

    @property
    def period(self) -> int:
        """See Strategy."""
        return self._every

    def kind(self, number: int) -> int:
        """See Strategy."""
        return _ALONE if number % self._every else _AVERAGES

    def step(self, kind: int) -> Iterator[Instruction]:
        """See Strategy."""
        yield from self._work.without_communication()
        after = self._average.averaged() if kind == _AVERAGES else ()
        yield from self._work.end_of_step(after)

    def buckets(self, kind: int) -> tuple[Bucket, ...]:
        """See Strategy: all parameters at once, in a step that averages them."""
        return (self._average.bucket,) if kind == _AVERAGES else ()

    def resident_bytes(self, model: Model, optimizer_bytes: int) -> ResidentBytes:
        """See Strategy; while parameters are averaged there are two of each."""
        held = super().resident_bytes(model, optimizer_bytes)
        return held._replace(buckets=self._average.bucket.wire_bytes)
