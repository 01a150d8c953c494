"""The model's own work in a step: forward, backward and optimizer, in ticks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

from ddpsim.strategies.ddp.costs import DdpCosts, Prices
from ddpsim.strategies.instructions import (
    Exchange,
    Instruction,
    LoadBatch,
    Mark,
    Piece,
    compute,
    compute_all,
)
from ddpsim.strategies.synced_norms import SyncedNorms
from ddpsim.strategies.ticks import Launch
from ddpsim.strategies.training_loop.around_optimizer import AroundOptimizer
from ddpsim.workload.model import Model, Work, joined, scale

_Passes = tuple[tuple[Piece, ...], tuple[Piece, ...]]  # forward and backward


@dataclass(frozen=True)
class MicroBatch:
    """Forward and backward of micro-batch `number` of a step, from 0.

    `backward[i]` ends with the gradient of `ready_order[i]`; one more is the tail.
    """

    number: int
    forward: tuple[Piece, ...]
    backward: tuple[Piece, ...]
    is_last: bool


@dataclass(frozen=True)
class ModelWork:
    """One step of the model: `accumulation_steps` micro-batches, then the optimizer.

    `later`: a micro-batch whose gradients are added to those that are there. `around`: what the
    loop does before and after the optimizer.
    """

    ready_order: tuple[int, ...]
    accumulation_steps: int
    first: _Passes
    later: _Passes
    optimizer: Launch
    around: AroundOptimizer

    @classmethod
    def of(
        cls,
        model: Model,
        prices: Prices,
        accumulation_steps: int,
        around: AroundOptimizer,
        norms: SyncedNorms,
    ) -> ModelWork:
        """A model's work; `prices` are of the addition of gradients where nothing was measured."""
        first = norms.forward(model.forward), norms.backward(model.backward)
        later = first
        if accumulation_steps > 1:
            forward, backward = _later(model, prices)
            later = norms.forward(forward), norms.backward(backward)
        optimizer = prices.ticks.launch(model.optimizer)
        return cls(model.ready_order, accumulation_steps, first, later, optimizer, around)

    def reduced_again(
        self,
        again: Sequence[tuple[Instruction, ...]],
        place: Literal["hooks", "after_backward"],
    ) -> ModelWork:
        """Return work whose gradients are reduced `again`, in `ready_order`.

        `place`: where each is made, or before the optimizer.

        A tensor's hook is called in each backward, under no_sync too.
        """
        if place == "after_backward":
            by_parameter = dict(zip(self.ready_order, again, strict=True))
            loop = chain.from_iterable(by_parameter[i] for i in sorted(by_parameter))
            around = self.around._replace(before=(*loop, *self.around.before))
            return replace(self, around=around)
        each = (*again, ())

        def hooked(passes: _Passes) -> _Passes:
            forward, backward = passes
            pieces = zip(backward, each, strict=True)
            made = ((*compute_all("backward", [piece]), *hook) for piece, hook in pieces)
            return forward, tuple(map(Exchange, made))

        return replace(self, first=hooked(self.first), later=hooked(self.later))

    @property
    def micro_batches(self) -> Iterator[MicroBatch]:
        """The micro-batches of a step, in order."""
        for i in range(self.accumulation_steps):
            forward, backward = self.later if i else self.first
            yield MicroBatch(i, forward, backward, i == self.accumulation_steps - 1)

    def micro_batched(
        self, backward: Callable[[MicroBatch], Iterable[Instruction]]
    ) -> Iterator[Instruction]:
        """Load and forward of every micro-batch, each with a backward of the strategy's own."""
        for micro_batch in self.micro_batches:
            yield LoadBatch()
            yield from compute_all("forward", micro_batch.forward)
            if micro_batch.is_last:
                yield Mark("backward_starts")
            yield from backward(micro_batch)

    def without_communication(self) -> Iterator[Instruction]:
        """Load, forward and backward of every micro-batch."""
        return self.micro_batched(lambda each: compute_all("backward", each.backward))

    def end_of_step(self, after: Iterable[Instruction] = ()) -> Iterator[Instruction]:
        """The optimizer, what comes `after` it, and the mark that a step has ended."""
        yield from self.around.before
        yield compute("optimizer", self.optimizer)
        yield from self.around.after
        yield from after
        yield Mark("step_ends")


def _later(model: Model, costs: DdpCosts) -> tuple[Iterable[Work], Iterable[Work]]:
    """Forward and backward of a later micro-batch: as measured, or with the additions priced."""
    if model.later is None:
        return model.forward, with_additions(model, costs)
    forward, backward = model.later
    return scale(model.forward, forward), scale(model.backward, backward)


def with_additions(model: Model, costs: DdpCosts) -> Iterator[Work]:
    """The backward of a micro-batch whose gradients are added to those that are there."""
    *works, tail = model.backward
    for parameter, work in zip(model.ready_order, works, strict=True):
        added = costs.accumulated(model.parameters[parameter])
        yield joined([work, added._replace(host_s=0.0)])
    yield tail
