"""Each gradient reduced as soon as the backward has made it, from a hook of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddpsim.strategies.all_reduces import ONE_BY_ONE, AllReduce
from ddpsim.strategies.instructions import (
    Await,
    Instruction,
    LoadBatch,
    Mark,
    Piece,
    compute,
    compute_all,
)
from ddpsim.strategies.model_work import ModelWork
from ddpsim.strategies.strategy import Bucket, Strategy


class PerParameter(Strategy):
    """`register_post_accumulate_grad_hook` launches an all-reduce of its gradient.

    After the backward each is awaited in the order of launch, and divided; `async_op` false: at
    once, before the backward goes on. `no_sync`: hooks do so in the last micro-batch alone.
    """

    reduced = "gradient"
    phases = ONE_BY_ONE

    def __init__(
        self,
        work: ModelWork,
        all_reduces: tuple[AllReduce, ...],
        *,
        no_sync: bool,
        async_op: bool,
    ) -> None:
        self._work = work
        self._all_reduces = all_reduces
        self._no_sync, self._async_op = no_sync, async_op

    def step(self, kind: int) -> Iterator[Instruction]:  # noqa: ARG002
        """See Strategy."""
        launched = 0
        for micro_batch in self._work.micro_batches:
            yield LoadBatch()
            yield from compute_all("forward", micro_batch.forward)
            if micro_batch.is_last:
                yield Mark("backward_starts")
            if micro_batch.is_last or not self._no_sync:
                yield from self._backward(micro_batch.backward, launched)
                launched += len(self._all_reduces)
            else:
                yield from compute_all("backward", micro_batch.backward)
        yield from self._work.end_of_step()

    def buckets(self, kind: int) -> tuple[Bucket, ...]:  # noqa: ARG002
        """See Strategy."""
        return tuple(each.bucket for each in self._all_reduces)

    def _backward(self, backward: Sequence[Piece], launched: int) -> Iterator[Instruction]:
        """After `launched` collectives of the same step."""
        *works, tail = backward
        for index, (work, each) in enumerate(zip(works, self._all_reduces, strict=True)):
            yield from compute_all("backward", [work])
            yield each.launched(launched + index, index)
            if not self._async_op:
                yield from _ended(launched + index, each)
        yield from compute_all("backward", [tail])
        if self._async_op:
            for index, each in enumerate(self._all_reduces):
                yield from _ended(launched + index, each)


def _ended(number: int, reduced: AllReduce) -> Iterator[Instruction]:
    yield Await(number)
    yield compute("copy_back", reduced.bucket.copy_back)
