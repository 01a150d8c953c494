"""Gradients reduced after the backward, as tutorials write it: one by one, or in one tensor."""

from __future__ import annotations

from collections.abc import Iterator

from ddpsim.strategies.all_reduces import ONE_BY_ONE, AllReduce
from ddpsim.strategies.instructions import Await, Instruction, compute
from ddpsim.strategies.model_work import ModelWork
from ddpsim.strategies.strategy import Bucket, ResidentBytes, Strategy
from ddpsim.workload.model import Model

_FLAT_PHASES = {
    "backward": "backward, with the gradients' copies into one tensor",
    "copy_back": "the division, and copies back to gradients",
    "all_reduce": "the all-reduce of all gradients",
}


class AfterBackward(Strategy):
    """A loop over all gradients after the backward: `dist.all_reduce(p.grad)`, then a division.

    Each call is awaited before the next one: by the host with gloo, by its stream with NCCL.
    """

    reduced = "gradient"
    phases = ONE_BY_ONE

    def __init__(self, work: ModelWork, all_reduces: tuple[AllReduce, ...]) -> None:
        self._work = work
        self._all_reduces = all_reduces

    def step(self, kind: int) -> Iterator[Instruction]:  # noqa: ARG002
        """See Strategy."""
        yield from self._work.without_communication()
        for number, each in enumerate(self._all_reduces):
            yield compute("bucket_copy", each.bucket.before)
            yield each.launched(number, number)
            yield Await(number)
            yield compute("copy_back", each.bucket.copy_back)
        yield from self._work.end_of_step()

    def buckets(self, kind: int) -> tuple[Bucket, ...]:  # noqa: ARG002
        """See Strategy."""
        return tuple(each.bucket for each in self._all_reduces)


class FlatAfterBackward(AfterBackward):
    """All gradients of a dtype are copied into one tensor, which is reduced and copied back."""

    reduced = "flat tensor"
    phases = _FLAT_PHASES

    def resident_bytes(self, model: Model, optimizer_bytes: int) -> ResidentBytes:
        """See Strategy; the flat tensors are there beside the gradients."""
        held = super().resident_bytes(model, optimizer_bytes)
        return held._replace(buckets=held.gradients)
