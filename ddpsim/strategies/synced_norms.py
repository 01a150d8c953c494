"""SyncBatchNorm: each layer's statistics are those of all ranks.

Source: torch 2.13.0 torch/nn/modules/_functions.py. Forward: statistics (line 39), a count and a
cat (41, 49), an all-gather of 2 C + 1 floats a rank (74), a comparison and three selections by it,
each of which the host waits for (97-100), all ranks' statistics in one (106), a cast of the counts
(117), elements (122). Backward: sums (145), a cat (159), an all-reduce of 2 C floats (160),
elements (171). Collectives take their turn on the communicator, and `async_op=False` (75, 164):
what is launched next waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from ddpsim.cluster.transfers import Operation
from ddpsim.result.timeline import Kind
from ddpsim.strategies.ddp.costs import Prices
from ddpsim.strategies.instructions import (
    Await,
    Communicate,
    Compute,
    Exchange,
    Instruction,
    Piece,
    Synchronize,
    compute,
)
from ddpsim.workload.gradient_passes import one_value_work
from ddpsim.workload.model import BatchNorm, Work

# of a row's passes over memory, with a ReLU behind the norm (assumed). Forward: statistics read;
# elements and ReLU each read and write. Backward: the ReLU reads twice and writes, sums read twice;
# elements read twice and write
_BEFORE_GATHER, _BEFORE_REDUCE = 1 / 5, 5 / 8
_FLOAT_BYTES = 4  # of statistics, those of 16-bit inputs too
_SELECTIONS = 3
_NUMBER = -1  # of the collective that is launched last


@dataclass(frozen=True)
class SyncedNorms:
    """The batch norms of a model whose statistics are those of `ranks` ranks; none: of no rank."""

    batch_norms: tuple[BatchNorm, ...]
    ranks: int
    prices: Prices

    def forward(self, works: Iterable[Work]) -> tuple[Piece, ...]:
        """A forward's work, row by row; a norm's with an all-gather, and waits of the host."""
        norms = {norm.forward: norm for norm in self.batch_norms}
        return tuple(self._pieces(works, norms, self._gathered))

    def backward(self, works: Iterable[Work]) -> tuple[Piece, ...]:
        """A backward's work, row by row; a norm's with an all-reduce."""
        norms = {norm.backward: norm for norm in self.batch_norms}
        return tuple(self._pieces(works, norms, self._reduced))

    def _pieces(
        self,
        works: Iterable[Work],
        norms: Mapping[int, BatchNorm],
        exchanged: Callable[[BatchNorm, Work], Iterable[Instruction]],
    ) -> Iterator[Piece]:
        for row, work in enumerate(works):
            norm = norms.get(row)
            yield Exchange((*exchanged(norm, work),)) if norm else self.prices.ticks.launch(work)

    def _gathered(self, norm: BatchNorm, work: Work) -> Iterator[Instruction]:
        kernels = work.kernels // 2  # the count of batches, and the statistics
        before, after = _split(work, _BEFORE_GATHER, kernels)
        yield self._compute("forward", before, *self._values(2))
        size_bytes = self.ranks * (2 * norm.channels + 1) * _FLOAT_BYTES
        yield from self._exchanged(norm, "all_gather", size_bytes)
        yield self._compute("forward", *self._values(1))
        for _ in range(_SELECTIONS):
            yield from self._selected()
        yield self._compute("forward", *self._values(2), after, self._another_operator)

    def _reduced(self, norm: BatchNorm, work: Work) -> Iterator[Instruction]:
        before, after = _split(work, _BEFORE_REDUCE, work.kernels)
        yield self._compute("backward", before, *self._values(1))
        yield from self._exchanged(norm, "all_reduce", 2 * norm.channels * _FLOAT_BYTES)
        yield self._compute("backward", after, self._another_operator)

    def _exchanged(
        self, norm: BatchNorm, operation: Operation, size_bytes: int
    ) -> Iterator[Instruction]:
        cause = f"sync_batch_norm of {norm.name}"
        yield Communicate(_NUMBER, self.prices.call_ns, operation, size_bytes, cause=cause)
        yield Await(_NUMBER)

    def _selected(self) -> Iterator[Instruction]:
        """`tensor[mask]`: how many, copied to the host; it makes a tensor of so many, and selects.

        Source: ATen/native/cuda/Nonzero.cu (memcpy_and_sync).
        """
        one = one_value_work(self.prices.device)
        yield self._compute("forward", one, one._replace(host_s=0.0))
        yield Synchronize()
        yield self._compute("forward", *2 * [one._replace(host_s=0.0)])

    def _compute(self, kind: Kind, *works: Work) -> Compute:
        return compute(kind, self.prices.launch(works))

    def _values(self, count: int) -> list[Work]:
        return count * [one_value_work(self.prices.device)]

    @property
    def _another_operator(self) -> Work:
        """A plain batch norm has one for statistics and elements; its time is in the row's."""
        return one_value_work(self.prices.device)._replace(device_s=0.0)


def _split(work: Work, share: float, kernels: int) -> tuple[Work, Work]:
    """A share of the device's time with so many of the kernels, and the rest."""
    host_s = work.host_s * (kernels / work.kernels if work.kernels else share)
    before = Work(share * work.device_s, kernels, host_s, work.names)
    rest = work._replace(
        device_s=work.device_s - before.device_s,
        kernels=work.kernels - kernels,
        host_s=work.host_s - host_s,
    )
    return before, rest
