"""What one step of FSDP1 and one of FSDP2 have in common: units, their ranks, their collectives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ddpsim.cluster.transfers import ProcessGroup
from ddpsim.strategies.context import StrategyContext
from ddpsim.strategies.fully_shard.held import Held
from ddpsim.strategies.instructions import Await, Communicate, Instruction, Record, compute
from ddpsim.strategies.ticks import Launch
from ddpsim.workload.model import Work


class DeviceMesh(NamedTuple):
    """The ranks among which a model is sharded, and how they launch collectives.

    `ranks` share a copy of the model, as process group `group`. `replicas`: there are so many
    copies, whose gradients are all-reduced. `call_ns`: the host's time to launch a collective from
    Python. `blocking`: the host waits where it launches one, as on a CPU.
    """

    ranks: int
    group: ProcessGroup
    replicas: int
    call_ns: int
    blocking: bool

    @classmethod
    def of(cls, context: StrategyContext, *, is_hybrid: bool) -> DeviceMesh:
        """Make the mesh of a job; `is_hybrid`: each node has a copy of the model."""
        cluster, ranks = context.scenario.cluster, context.scenario.sharding_ranks
        replicas, blocking = cluster.world_size // ranks, cluster.device.kind == "cpu"
        group: ProcessGroup = "node" if is_hybrid else "world"
        return cls(ranks, group, replicas, context.prices.call_ns, blocking)

    @property
    def sends(self) -> bool:
        """Whether parameters are shared by more than one rank."""
        return self.ranks > 1

    @property
    def reduced(self) -> str:
        """What a reduction of gradients is, in words."""
        return "all-reduce" if self.replicas > 1 else "reduce-scatter"


class Offload(NamedTuple):
    """How fast a host copies and optimizes shards, gradients and states that it holds.

    Source: torch 2.13 torch/distributed/fsdp/_fully_shard (_fsdp_param.py, all_gather_inputs: a
    copy of each shard before its all-gather, on that stream; _fsdp_collectives.py, foreach_reduce:
    a copy of each gradient after its reduction, on that stream).
    """

    link_bytes_per_s: float
    optimizer_bytes_per_s: float
    floor_s: float

    @classmethod
    def of(cls, context: StrategyContext) -> Offload | None:
        """Tell what a job's CPUOffloadPolicy does, if there is one."""
        policy, device = context.scenario.ddp.host_copies, context.scenario.cluster.device
        if policy is None:
            return None
        link = policy.host_link_bytes_per_s or device.host_link_bytes_per_s
        return cls(link, policy.host_optimizer_bytes_per_s, device.kernel_floor_s)

    def copies(self, sizes_bytes: Iterable[int]) -> Work:
        """Copy each shard, one after the other."""
        each_s = [max(self.floor_s, size / self.link_bytes_per_s) for size in sizes_bytes]
        return Work(sum(each_s), len(each_s))


class LaunchedPiece(NamedTuple):
    """Work of the innermost of some units, in ticks; see `units.Piece`.

    `gradient_bytes`: of the gradient that it makes, as the parameter is gathered; 0: makes none.
    """

    chain: tuple[int, ...]
    launch: Launch
    gradient_bytes: int = 0


class Pass(NamedTuple):
    """Forward and backward of one micro-batch."""

    forward: Sequence[LaunchedPiece]
    backward: Sequence[LaunchedPiece]


class Ends(NamedTuple):
    """What a micro-batch's backward does at its end.

    `reduces`: not under set_requires_gradient_sync(False). `all_reduces`: not under
    set_requires_all_reduce(False). `accumulates`: there are gradients of earlier micro-batches on
    the shards. `shards`: not under set_reshard_after_backward(False). `is_last`: not under
    set_is_last_backward(False).
    """

    reduces: bool
    all_reduces: bool
    accumulates: bool
    shards: bool
    is_last: bool


@dataclass(frozen=True, kw_only=True)
class ShardedUnit:
    """One unit's parameters, which are gathered, and whose gradients are reduced, together.

    `gathered_bytes`: of the all-gather's output. `scattered_bytes`: of the reduce-scatter's input,
    with what it is padded by; 0: no parameter has a gradient. `sent_shard_bytes`: of one rank's
    part of it; `shard_bytes`: of its reduced gradients. `copied_bytes`: of the shard, on the device
    or in another type, until it is gathered. `gather`: the host's time before a forward, and copies
    of the shard on the all-gather's stream; `regather`: likewise before a backward. `after_ns`:
    work on the reduction's stream after it; `accumulate_ns`: there too, where gradients are added
    to those of an earlier micro-batch.
    """

    name: str
    parameters: tuple[int, ...]
    gathered_bytes: int
    scattered_bytes: int
    sent_shard_bytes: int
    shard_bytes: int
    copied_bytes: int
    gather: Launch
    regather: Launch
    after_ns: int
    accumulate_ns: int

    @property
    def is_empty(self) -> bool:
        """Whether all of its parameters are those of units inside it: torch has no group then."""
        return not self.parameters

    @property
    def label(self) -> str:
        """Its name in messages: the root has none of its own."""
        return self.name or "the root"


@dataclass(kw_only=True)
class UnitStep(ABC):
    """The states of units in one step: which are whole, and what is held and under way.

    `scattered`: units in the order in which the last backward has reduced them.
    """

    units: Sequence[ShardedUnit]
    mesh: DeviceMesh
    held: Held = field(default_factory=Held)
    scattered: list[ShardedUnit] = field(default_factory=list)
    _collectives: int = 0
    _records: int = 0
    _waits_for: int = 0  # all-gathers wait for this record
    _whole: set[int] = field(default_factory=set)  # units that are not sharded
    _forward_order: list[int] = field(default_factory=list)
    _gradients: dict[int, int] = field(default_factory=dict)  # their bytes, by unit
    _accumulated: set[int] = field(default_factory=set)  # units with unreduced gradients
    _reduced: set[int] = field(default_factory=set)  # units with gradients on their shards

    def forward(self, work: Pass) -> Iterator[Instruction]:
        """All-gather unit by unit, each as its module is called."""
        yield from self._record_for_gathers()
        entered: list[int] = []
        for chain, launch, _ in work.forward:
            while tuple(entered) != chain[: len(entered)]:
                yield from self._post_forward(entered.pop())
            for unit in chain[len(entered) :]:
                entered.append(unit)
                yield from self._pre_forward(unit)
            yield compute("forward", launch)
        while entered:
            yield from self._post_forward(entered.pop())
        self._end_forward()

    def backward(self, work: Pass, ends: Ends) -> Iterator[Instruction]:
        """All-gather each unit for its gradients, and reduce them once all are there."""
        self.scattered.clear()
        begun, ended = self._order(work)
        for i, (chain, launch, gradient_bytes) in enumerate(work.backward):
            self._at("backward", chain[-1])
            for unit in begun.get(i, ()):
                yield from self._pre_backward(unit)
            yield compute("backward", launch)
            self._hold_gradient(chain[-1], gradient_bytes)
            for unit in ended.get(i, ()):
                yield from self._post_backward(unit, ends)
        yield from self._end_backward(ends)

    @abstractmethod
    def _pre_forward(self, unit: int) -> Iterator[Instruction]:
        """Make a unit's parameters whole."""

    @abstractmethod
    def _post_forward(self, unit: int) -> Iterator[Instruction]:
        """Shard a unit's parameters again, unless they stay."""

    @abstractmethod
    def _end_forward(self) -> None:
        """Free what outlasts the last unit."""

    @abstractmethod
    def _order(self, work: Pass) -> tuple[Mapping[int, Sequence[int]], Mapping[int, Sequence[int]]]:
        """Units by the piece of a backward before which, and after which, their hooks run."""

    @abstractmethod
    def _pre_backward(self, unit: int) -> Iterator[Instruction]:
        """Make a unit's parameters whole, and those of the next one."""

    @abstractmethod
    def _post_backward(self, unit: int, ends: Ends) -> Iterator[Instruction]:
        """Shard a unit's parameters, and reduce its gradients."""

    @abstractmethod
    def _end_backward(self, ends: Ends) -> Iterator[Instruction]:
        """Do what torch's final callback does."""

    def _at(self, phase: str, unit: int) -> None:
        self.held.place = f"the {phase} of {self.units[unit].label}"

    def _record(self) -> Iterator[Instruction]:
        self._records += 1
        if not self.mesh.blocking:
            yield Record(self._records - 1)

    def _record_for_gathers(self) -> Iterator[Instruction]:
        """Record what all-gathers that are launched from now on wait for."""
        self._waits_for = self._records
        yield from self._record()

    def _hold_gradient(self, unit: int, size_bytes: int) -> None:
        self._gradients[unit] = self._gradients.get(unit, 0) + size_bytes
        self.held.add("gradients", size_bytes)

    def _send(self, launched: Communicate) -> Iterator[Instruction]:
        """Launch a collective; a CPU waits for it at once."""
        self._collectives += 1
        yield launched
        if self.mesh.blocking:
            yield Await(launched.number)

    def _gathered(
        self, unit: ShardedUnit, host_ns: int, copy_ns: int, waits_for: int, phase: str
    ) -> Communicate:
        """Return the next collective: an all-gather of a unit's parameters."""
        return Communicate(
            self._collectives,
            host_ns,
            "all_gather",
            unit.gathered_bytes,
            cause=f"parameters of {unit.label}, {phase}",
            waits_for=None if self.mesh.blocking else waits_for,
            before_ns=copy_ns,
            group=self.mesh.group,
        )

    def _scattered(self, unit: ShardedUnit, after_ns: int = 0) -> Communicate:
        """Return the next collective: gradients of the unit last reduced, within a copy."""
        return Communicate(
            self._collectives,
            0,
            "reduce_scatter",
            unit.scattered_bytes,
            bucket=len(self.scattered) - 1,
            bucket_bytes=unit.scattered_bytes,
            num_params=len(unit.parameters),
            after_ns=after_ns,
            cause=f"gradients of {unit.label}",
            group=self.mesh.group,
        )

    def _between_copies(self, unit: ShardedUnit, after_ns: int, follows: int | None) -> Communicate:
        """Return the next collective: one rank's part of those gradients, among all copies."""
        within = self._scattered(unit, after_ns)
        return within._replace(
            host_ns=self.mesh.call_ns,
            operation="all_reduce",
            size_bytes=unit.sent_shard_bytes,
            cause=f"{within.cause}, between nodes",
            group="across_nodes",
            follows=None if self.mesh.blocking else follows,
        )
