"""What every strategy of data parallelism is: it orders a step and names its buckets and memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

from ddpsim.cluster.transfers import Operation
from ddpsim.result.model import MemoryPeak, MemoryWalk
from ddpsim.strategies.instructions import Instruction, numbered
from ddpsim.strategies.ticks import Launch
from ddpsim.workload.model import Model

_NOTHING = Launch(0, 0)


class Stage(NamedTuple):
    """One of the collectives of a bucket's hook, and the hook's work around it.

    `is_awaited`: by the compute stream, before anything else is launched. `host_waits`: for the
    device, before the collective is launched. `is_chained`: the work before it is on a stream of
    the hook's own, after the collective before; so is `after`, which follows it.
    """

    before: Launch
    size_bytes: int
    what: str
    operation: Operation = "all_reduce"
    after: Launch = _NOTHING
    is_awaited: bool = True
    host_waits: bool = False
    is_chained: bool = False


class Bucket(NamedTuple):
    """Gradients that are sent together: `wire_bytes` of them, and the work around it.

    `stages`: in place of one all-reduce; where they are awaited, the host does `before_wait` then,
    waits for the device, and does `after_wait`. `kept_bytes`: what else stays of it from step to
    step; `flying_bytes`: what its hook holds while it is under way.
    """

    parameters: tuple[int, ...]
    size_bytes: int
    wire_bytes: int
    before: Launch = _NOTHING
    after_ns: int = 0
    copy_back: Launch = _NOTHING
    stages: tuple[Stage, ...] = ()
    before_wait: Launch = _NOTHING
    after_wait: Launch = _NOTHING
    kept_bytes: int = 0
    flying_bytes: int = 0


class ResidentBytes(NamedTuple):
    """Bytes on one device that stay from step to step."""

    parameters: int
    gradients: int
    buckets: int
    optimizer: int


class Strategy(ABC):
    """The order of one optimizer step, the same on every rank.

    A strategy has one `kind` of step or several: DDP's first step has other buckets than later
    ones. The engines ask for `instructions(kind(number))` and carry them out.
    """

    broadcast: str = "the buffers' broadcast"  # what a broadcast sends, in words
    reduced: str = "bucket"  # what an all-reduce of gradients sends, in words
    phases: Mapping[str, str] = {}  # kinds of work on a critical path, in words

    @property
    def kinds(self) -> int:
        """How many kinds of step there are."""
        return 1

    @property
    def steady_from(self) -> int | None:
        """The first step, from 0, that all later ones are like; None: they are all alike."""
        return None

    @property
    def rebuilt_from(self) -> int | None:
        """The first step, from 0, whose buckets are the rebuilt ones; None: they never are."""
        return None

    @property
    def period(self) -> int:
        """After how many steps the kinds of steady steps come again."""
        return 1

    @abstractmethod
    def step(self, kind: int) -> Iterator[Instruction]:
        """What the host of every rank does in a step of this kind."""

    def kind(self, number: int) -> int:  # noqa: ARG002
        """The kind of step `number`, counted from 0."""
        return 0

    def buckets(self, kind: int) -> tuple[Bucket, ...]:  # noqa: ARG002
        """The buckets of a step of this kind, in the order in which they are sent."""
        return ()

    def resident_bytes(self, model: Model, optimizer_bytes: int) -> ResidentBytes:
        """What one device holds, where the optimizer's whole state takes `optimizer_bytes`."""
        gradients = sum(parameter.size_bytes for parameter in model.used)
        return ResidentBytes(model.gradient_bytes, gradients, 0, optimizer_bytes)

    def memory_peak(self) -> MemoryPeak | None:
        """The moment of a step that holds most beside shards; None: nothing is sharded."""
        return None

    def memory_walk(self) -> MemoryWalk:
        """What a step holds beside shards, at each change; empty: nothing is sharded."""
        return ()

    @property
    def steps(self) -> tuple[tuple[Instruction, ...], ...]:
        """The instructions of each kind of step."""
        return tuple(self.instructions(kind) for kind in range(self.kinds))

    def instructions(self, kind: int) -> tuple[Instruction, ...]:
        """The instructions of a step of this kind, made once."""
        if kind not in self._by_kind:
            self._by_kind[kind] = self.made(kind)
        return self._by_kind[kind]

    def made(self, kind: int) -> tuple[Instruction, ...]:
        """The instructions of a step of this kind, made anew."""
        return tuple(numbered(self.step(kind)))

    @cached_property
    def _by_kind(self) -> dict[int, tuple[Instruction, ...]]:
        return {}

    @property
    def warmup(self) -> int:
        """How many first steps may differ from the steady ones, at least."""
        return 2 if self.steady_from is None else self.steady_from + 1
