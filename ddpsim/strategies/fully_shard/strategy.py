"""The strategy of torch's `fully_shard`: ZeRO-3, or ZeRO-2 where parameters stay in the forward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import ceil

from ddpsim.cluster.transfers import ProcessGroup
from ddpsim.result.model import MemoryPeak, MemoryWalk
from ddpsim.scenario.ddp import Ddp
from ddpsim.strategies.ddp.costs import PYTHON_COLLECTIVE_S
from ddpsim.strategies.fully_shard.casts import handed_on, with_casts
from ddpsim.strategies.fully_shard.groups import Group, Groups
from ddpsim.strategies.fully_shard.step import Ends, LaunchedPiece, Pass, Step
from ddpsim.strategies.fully_shard.units import (
    Unit,
    backward_pieces,
    forward_pieces,
    plan_units,
)
from ddpsim.strategies.instructions import (
    Compute,
    Instruction,
    LoadBatch,
    Mark,
    Synchronize,
    compute,
)
from ddpsim.strategies.strategy import Bucket, ResidentBytes, Strategy
from ddpsim.strategies.ticks import Launch
from ddpsim.strategies.training_loop.around_optimizer import AroundOptimizer
from ddpsim.workload.model import Model, Work, joined

__all__ = ["FullyShard"]


@dataclass(frozen=True)
class FullyShard(Strategy):
    """All-gather parameters ahead of their use, reduce-scatter gradients, optimize shards.

    `first` and `later`: the passes of the first micro-batch and of others. `shard_bytes`: of the
    parameters of one rank, of `ranks` that share a copy. `no_sync`: only the last micro-batch
    reduces. `group`, `replicas`, `all_reduce_ns` and `keeps_a_part`: see `Step`.
    """

    groups: tuple[Group, ...]
    first: Pass
    later: Pass
    optimizer: Launch
    shard_bytes: int
    ranks: int
    reshards: bool
    micro_batches: int
    no_sync: bool
    blocking: bool
    around: AroundOptimizer
    shards_between: bool = True  # micro-batches
    waits_between: bool = True
    reduced: str = "reduce-scatter"
    group: ProcessGroup = "world"
    replicas: int = 1
    all_reduce_ns: int = 0
    keeps_a_part: bool = False
    offloads: bool = False

    @classmethod
    def of(
        cls,
        model: Model,
        ddp: Ddp,
        groups: Groups,
        around: AroundOptimizer,
        moved_bytes: float,
    ) -> FullyShard:
        """A model's step; raises InputError for units that torch refuses.

        `around`: what the loop does around the optimizer, on shards; `moved_bytes`: by the
        optimizer of the whole model.
        """
        replicas, spec = groups.replicas, ddp.sharding
        reduced = "all-reduce" if replicas > 1 else "reduce-scatter"
        units = plan_units(model, spec)
        first, later = _passes(model, units, groups, adds=ddp.no_sync)
        return cls(
            groups=tuple(groups.of(unit) for unit in units),
            first=first,
            later=later,
            optimizer=groups.optimizer(moved_bytes),
            shard_bytes=groups.shard_bytes,
            ranks=groups.ranks,
            reshards=groups.reshards,
            keeps_a_part=groups.kept_by is not None,
            micro_batches=ddp.accumulation_steps,
            no_sync=ddp.no_sync,
            blocking=groups.costs.device.kind == "cpu",
            around=around,
            shards_between=spec.reshard_after_backward,
            waits_between=not spec.set_is_last_backward,
            reduced=reduced,
            group="node" if ddp.strategy == "hsdp" else "world",
            replicas=replicas,
            all_reduce_ns=groups.ticks.host_ns(PYTHON_COLLECTIVE_S),
            offloads=groups.offload is not None,
        )

    def step(self, kind: int) -> Iterator[Instruction]:  # noqa: ARG002
        """See Strategy."""
        yield from self._instructions(self._begun())

    def buckets(self, kind: int) -> tuple[Bucket, ...]:  # noqa: ARG002
        """See Strategy: the gradients of each unit, in the order of the last backward."""
        return tuple(
            Bucket(group.parameters, group.scattered_bytes, group.scattered_bytes)
            for group in self._walked.scattered
        )

    def resident_bytes(self, model: Model, optimizer_bytes: int) -> ResidentBytes:
        """See Strategy; `buckets`: what is whole as the most is held, found by walking the step.

        Parameters that are gathered, gradients that are not yet reduced, and what is sent. What is
        offloaded is on the host.
        """
        if self.offloads:
            return ResidentBytes(0, 0, self._peak_bytes, 0)
        used = sum(parameter.size_bytes for parameter in model.used)
        gradients = self.shard_bytes * used // max(1, model.gradient_bytes)
        optimizer = ceil(optimizer_bytes / self.ranks)
        whole = max(0, self._peak_bytes - gradients)
        return ResidentBytes(self.shard_bytes, gradients, whole, optimizer)

    def memory_peak(self) -> MemoryPeak:
        """See Strategy."""
        held = self._walked.held
        return MemoryPeak(held.peak_place, *held.peak)

    def memory_walk(self) -> MemoryWalk:
        """See Strategy."""
        return tuple(self._walked.held.walked)

    @property
    def _peak_bytes(self) -> int:
        return sum(self._walked.held.peak)

    @cached_property
    def _walked(self) -> Step:
        """At the end of a step."""
        step = self._begun()
        for instruction in self._instructions(step):
            step.held.works += isinstance(instruction, Compute) and instruction.device_ns > 0
        return step

    def _begun(self) -> Step:
        sends = self.ranks > 1
        mesh = self.group, self.replicas, self.all_reduce_ns, self.keeps_a_part
        return Step(self.groups, self.reshards, sends, self.blocking, *mesh)

    def _instructions(self, step: Step) -> Iterator[Instruction]:
        for number in range(self.micro_batches):
            is_last = number == self.micro_batches - 1
            work = self.later if number else self.first
            yield LoadBatch()
            yield from step.forward(work)
            if is_last:
                yield Mark("backward_starts")
            ends = Ends(
                reduces=is_last or not self.no_sync,
                accumulates=number > 0 and not self.no_sync,
                shards=is_last or self.shards_between,
                is_last=is_last or self.waits_between,
            )
            yield from step.backward(work, ends)
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


def _passes(
    model: Model, units: Sequence[Unit], groups: Groups, *, adds: bool
) -> tuple[Pass, Pass]:
    """Of the first micro-batch and of others, whose gradients a later one `adds` in place."""
    named = forward_pieces(model, units)
    forward = [LaunchedPiece(chain, groups.ticks.launch(work)) for chain, work, _ in named]
    casts = {unit: groups.cast_of_outputs(size) for unit, size in handed_on(named).items()}
    cast = partial(
        with_casts, casts=casts, casts_inputs=groups.spec.mixed_precision.param is not None
    )
    made = [*(groups.gradient_bytes(i) for i in model.ready_order), 0]
    pieces = backward_pieces(model, units)

    def backward(works: Iterable[Work]) -> list[LaunchedPiece]:
        each = zip(pieces, works, made, strict=True)
        launched = [
            LaunchedPiece(piece.chain, groups.ticks.launch(work), size_bytes)
            for piece, work, size_bytes in each
        ]
        return cast(launched[::-1])[::-1]

    *works, tail = model.backward
    added = [
        joined([work, groups.accumulated(i)] if adds else [work])
        for i, work in zip(model.ready_order, works, strict=True)
    ]
    cast_forward = cast(forward)
    later = Pass(cast_forward, backward([*added, tail]))
    return Pass(cast_forward, backward(model.backward)), later
