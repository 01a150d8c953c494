"""A training loop as every rank runs it: the steps of a strategy, and what carries them out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from ddpsim.cluster.cost import CollectiveCost
from ddpsim.cluster.process_groups import cost_of
from ddpsim.cluster.transfers import Operation, ProcessGroup, Transfer
from ddpsim.engine.compiled import CompiledStep
from ddpsim.errors import InputError
from ddpsim.strategies.instructions import Instruction
from ddpsim.strategies.strategy import Bucket, Strategy


@dataclass(frozen=True, slots=True)
class Loader:
    """A data loader: one batch every `batch_ns`, at most `capacity` waiting."""

    batch_ns: int
    capacity: int

    def stretched(self, factor: float) -> Loader:
        """Make every batch `factor` times as long in the making, a tick at least."""
        return replace(self, batch_ns=max(1, round(self.batch_ns * factor)))


@dataclass(frozen=True)
class Program:
    """A training loop of `warmup` + `iterations` steps of a strategy.

    `first`: the strategy's step with which the loop begins. `blocking`: the host computes itself (a
    CPU) and blocks in waits; `comm_workers` collectives may be in flight at once (NCCL's stream: 1;
    gloo's threads: 2); `comm_spins`: they occupy the device while they wait for peers.
    """

    strategy: Strategy
    warmup: int
    iterations: int
    loader: Loader | None = None
    blocking: bool = False
    comm_workers: int = 1
    comm_spins: bool = True
    first: int = 0

    def kind(self, number: int) -> int:
        """The kind of an iteration, counted from 0."""
        return self.strategy.kind(self.first + number)

    def step(self, number: int) -> tuple[Instruction, ...]:
        """The instructions of an iteration, counted from 0."""
        return self.strategy.instructions(self.kind(number))

    def compiled(self, number: int) -> CompiledStep:
        """An iteration, counted from 0, as the engine takes it."""
        kind = self.kind(number)
        if kind not in self._compiled:
            step = self.strategy.instructions(kind)
            self._compiled[kind] = CompiledStep.of(step, blocks=self.blocking)
        return self._compiled[kind]

    @cached_property
    def _compiled(self) -> dict[int, CompiledStep]:
        return {}

    @cached_property
    def kinds(self) -> tuple[CompiledStep, ...]:
        """Each kind of step that comes in the loop, compiled."""
        numbers = range(self.warmup + self.iterations + self.strategy.period)
        first = {self.kind(number): number for number in reversed(numbers)}
        return tuple(self.compiled(number) for _, number in sorted(first.items()))

    def steady(self) -> Program:
        """The loop with steady steps from the first iteration on."""
        return replace(self, first=self.first + (self.strategy.steady_from or 0))

    @property
    def steady_step(self) -> tuple[Instruction, ...]:
        """The instructions of a steady step, the first of its period."""
        return self.steady().step(0)

    @cached_property
    def steady_period(self) -> tuple[CompiledStep, ...]:
        """Each steady step until they come again."""
        steady = self.steady()
        return tuple(steady.compiled(number) for number in range(self.strategy.period))

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all steps after the warm-up are of one kind."""
        kinds = {self.kind(self.warmup + number) for number in range(self.iterations)}
        return len(kinds) == 1

    @cached_property
    def synchronizes(self) -> bool:
        """Whether a host that runs ahead of its device waits for it in some step."""
        return not self.blocking and any(step.synchronizes for step in self.kinds)

    @property
    def steady_buckets(self) -> tuple[Bucket, ...]:
        """The buckets of a steady step, the first of its period."""
        return self.strategy.buckets(self.steady().kind(0))

    @property
    def micro_batches(self) -> int:
        """Batches that a step loads."""
        return self.steady().compiled(0).batches

    @cached_property
    def sent(self) -> frozenset[tuple[ProcessGroup, Operation, int]]:
        """Every collective that the loop launches: its ranks, its operation, its size in bytes."""
        numbers = range(self.warmup + self.iterations)
        kinds = {self.kind(number): number for number in numbers}
        sent = (each for number in kinds.values() for each in self.compiled(number).sent)
        return frozenset((each.group, each.operation, each.size_bytes) for each in sent)

    def sent_bytes(self, operation: Operation) -> list[int]:
        """The sizes of steady collectives of one operation, in order of launch, over a period."""
        sent = (each for step in self.steady_period for each in step.sent)
        return [each.size_bytes for each in sent if each.operation == operation]

    def transfers(self, cost: CollectiveCost, within: ProcessGroup | None = None) -> list[Transfer]:
        """Every collective that the loop launches, in one group or all, at a cost.

        Raises InputError.
        """
        sent = [each for each in sorted(self.sent) if within in (None, each[0])]
        costs: dict[ProcessGroup, CollectiveCost] = {}
        for group, operation, _ in sent:
            costs[group] = cost_of(cost, group)
            if operation not in costs[group].operations:
                operations = ", ".join(sorted(costs[group].operations))
                raise InputError(
                    "cluster",
                    f"{operation} has no price here, but {operations}; leave algorithm out, and "
                    "state intra_node and inter_node beside a log",
                )
        return [costs[group].transfer(op, size) for group, op, size in sent]

    @cached_property
    def is_grouped(self) -> bool:
        """Whether some collectives are among a part of the ranks."""
        return any(group != "world" for group, *_ in self.sent)

    @cached_property
    def sends_in_line(self) -> bool:
        """Whether every collective waits for all that the device was given before it."""
        return all(step.sends_in_line for step in self.kinds)

    @cached_property
    def overtakes(self) -> bool:
        """Whether a collective may begin before one of other ranks that is launched before it."""
        return self.is_grouped and any(step.overtakes for step in self.kinds)
