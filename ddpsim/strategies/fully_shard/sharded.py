"""What FSDP1 and FSDP2 have in common: a step of micro-batches, and what is held in it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import starmap
from math import ceil

from ddpsim.result.model import MemoryPeak, MemoryWalk
from ddpsim.strategies.fully_shard.unit_step import DeviceMesh, Ends, LaunchedPiece, Pass, UnitStep
from ddpsim.strategies.fully_shard.units import Unit, backward_pieces, forward_pieces
from ddpsim.strategies.instructions import (
    Instruction,
    LoadBatch,
    Mark,
    Synchronize,
    compute,
)
from ddpsim.strategies.strategy import Bucket, ResidentBytes, Strategy
from ddpsim.strategies.ticks import Launch, Ticks
from ddpsim.strategies.training_loop.around_optimizer import AroundOptimizer
from ddpsim.workload.model import Model, Work, joined

_PHASES = {
    "backward": "backward, with the gradients' copies",
    "unshard": "copies of gathered parameters",
    "all_gather": "all-gathers of parameters",
    "reduce_scatter": "reduce-scatters of gradients",
    "all_reduce": "all-reduces of gradients",
}


@dataclass(frozen=True)
class Sharded(Strategy):
    """Gather parameters ahead of their use, reduce and scatter gradients, optimize shards.

    `first` and `later`: the passes of the first micro-batch and of others. `shard_bytes`: of the
    parameters of one rank. `no_sync`: only the last micro-batch reduces.
    """

    first: Pass
    later: Pass
    optimizer: Launch
    shard_bytes: int
    micro_batches: int
    no_sync: bool
    around: AroundOptimizer
    mesh: DeviceMesh
    offloads: bool

    phases = _PHASES

    @abstractmethod
    def begun(self) -> UnitStep:
        """A steady step at its beginning."""

    def step(self, kind: int) -> Iterator[Instruction]:  # noqa: ARG002
        """See Strategy."""
        yield from self._walked[1]

    def buckets(self, kind: int) -> tuple[Bucket, ...]:  # noqa: ARG002
        """See Strategy: the gradients of each unit, in the order of the last backward."""
        return tuple(
            Bucket(unit.parameters, unit.scattered_bytes, unit.scattered_bytes)
            for unit in self._walked[0].scattered
        )

    def resident_bytes(self, model: Model, optimizer_bytes: int) -> ResidentBytes:
        """See Strategy; `buckets`: what is whole as the most is held, found by walking the step.

        Parameters that are gathered, gradients that are not yet reduced, and what is sent. What is
        offloaded is on the host.
        """
        most = self.memory_peak().total
        if self.offloads:
            return ResidentBytes(0, 0, most, 0)
        used = sum(parameter.size_bytes for parameter in model.used)
        gradients = self.shard_bytes * used // max(1, model.gradient_bytes)
        optimizer = ceil(optimizer_bytes / self.mesh.ranks)
        return ResidentBytes(self.shard_bytes, gradients, max(0, most - gradients), optimizer)

    def memory_peak(self) -> MemoryPeak:
        """See Strategy."""
        return self._walked[0].held.peak()

    def memory_walk(self) -> MemoryWalk:
        """See Strategy."""
        return self._walked[0].held.walked()

    @cached_property
    def _walked(self) -> tuple[UnitStep, tuple[Instruction, ...]]:
        """A step at its end, and its instructions."""
        step = self.begun()
        return step, tuple(step.held.walk(self._instructions(step)))

    def ends(self, number: int) -> Ends:
        """What the backward of a micro-batch does at its end."""
        is_last = number == self.micro_batches - 1
        return Ends(
            reduces=is_last or not self.no_sync,
            all_reduces=True,
            accumulates=number > 0 and not self.no_sync,
            shards=True,
            is_last=True,
        )

    def micro_batched(self, step: UnitStep) -> Iterator[Instruction]:
        """The forwards and backwards of a step."""
        for number in range(self.micro_batches):
            work = self.later if number else self.first
            yield LoadBatch()
            yield from step.forward(work)
            if number == self.micro_batches - 1:
                yield Mark("backward_starts")
            yield from step.backward(work, self.ends(number))

    def _instructions(self, step: UnitStep) -> Iterator[Instruction]:
        yield from self.micro_batched(step)
        yield from self.around.before
        yield from self._optimize()
        yield from self.around.after
        yield Mark("step_ends")

    def _optimize(self) -> Iterator[Instruction]:
        """The host waits for copies of gradients (finalize_backward), the device for the host."""
        if self.offloads:
            yield Synchronize()
        yield compute("optimizer", self.optimizer)
        if self.offloads:
            yield Synchronize()


def passes_of(
    model: Model,
    units: Sequence[Unit],
    ticks: Ticks,
    gradient_bytes: Callable[[int], int],
    added: Callable[[int], Work] | None,
) -> tuple[Pass, Pass]:
    """The pass of the first micro-batch, and that of others, whose gradients are `added` in place.

    `gradient_bytes`: of a parameter's gradient, as the backward makes it.
    """
    forward = [
        LaunchedPiece(chain, ticks.launch(work)) for chain, work, _ in forward_pieces(model, units)
    ]
    made = [*(gradient_bytes(i) for i in model.ready_order), 0]
    pieces = backward_pieces(model, units)

    def backward(works: Iterable[Work]) -> list[LaunchedPiece]:
        each = zip((piece.chain for piece in pieces), map(ticks.launch, works), made, strict=True)
        return list(starmap(LaunchedPiece, each))

    first = Pass(forward, backward(model.backward))
    if added is None:
        return first, first
    *works, tail = model.backward
    more = [joined([work, added(i)]) for i, work in zip(model.ready_order, works, strict=True)]
    return first, Pass(forward, backward([*more, tail]))
