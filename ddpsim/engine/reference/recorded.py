"""A job as it was recorded: each rank and step has its own work, each collective its own time."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from simpy import Environment

from ddpsim.cluster.cost import CollectiveCost
from ddpsim.cluster.transfers import Operation, ProcessGroup, Transfer, WholeTransfer
from ddpsim.engine.program import Program
from ddpsim.engine.reference.network import Network
from ddpsim.engine.reference.rank import Doing, Rank
from ddpsim.engine.reference.simulation import run_to_the_end
from ddpsim.result.timeline import RankTimeline, Span
from ddpsim.strategies.instructions import Instruction
from ddpsim.strategies.strategy import Strategy


@dataclass(frozen=True)
class RecordedSteps(Strategy):
    """Steps that are all of a kind of their own."""

    recorded: tuple[tuple[Instruction, ...], ...]

    @property
    def kinds(self) -> int:
        """See Strategy."""
        return len(self.recorded)

    def kind(self, number: int) -> int:
        """See Strategy."""
        return number

    def step(self, kind: int) -> Iterator[Instruction]:
        """See Strategy."""
        yield from self.recorded[kind]


@dataclass(frozen=True)
class RecordedRank:
    """One rank: it begins `late_ns` after the first, and waits so long for each batch."""

    program: Program
    late_ns: int
    batch_waits_ns: Sequence[int]


def simulate_recorded(
    ranks: Sequence[RecordedRank],
    cost: CollectiveCost,
    transfers_ns: Mapping[int, int],
) -> list[RankTimeline]:
    """The lanes of every rank.

    All ranks launch the same collectives. `transfers_ns`: what the one of this number, from 0 over
    all steps, takes alone on the links; `cost` prices the others.
    """
    env, program = Environment(), ranks[0].program
    slows = any(each.interference.slows_compute for each in program.transfers(cost))
    network = _RecordedNetwork(
        env, cost, len(ranks), shared=program.comm_workers > 1, slows_compute=slows
    )
    network.transfers_ns = transfers_ns
    simulated = [_Rank(env, i, each, network) for i, each in enumerate(ranks)]
    run_to_the_end(env, simulated, network)
    return [rank.timeline for rank in simulated]


class _RecordedNetwork(Network):
    """Collectives that take their recorded times."""

    transfers_ns: Mapping[int, int]

    def priced(
        self, key: Hashable, operation: Operation, size_bytes: int, group: ProcessGroup
    ) -> Transfer:
        usual = super().priced(key, operation, size_bytes, group)
        known_ns = self.transfers_ns.get(key - 1) if isinstance(key, int) else None
        if known_ns is None:
            return usual
        return WholeTransfer(0, known_ns, interference=usual.interference)


class _Rank(Rank):
    """A rank with waits of its own in place of a loader."""

    def __init__(
        self, env: Environment, rank: int, recorded: RecordedRank, network: Network
    ) -> None:
        super().__init__(env, rank, recorded.program, network, None, RankTimeline())
        self._late_ns, self._batch_waits_ns = recorded.late_ns, iter(recorded.batch_waits_ns)

    def train(self) -> Doing:
        yield self.env.timeout(self._late_ns)
        yield from super().train()

    def _load_batch(self) -> Doing:
        wait_ns = next(self._batch_waits_ns)
        if wait_ns:
            start_ns = int(self.env.now)
            yield self.env.timeout(wait_ns)
            self.timeline.host.append(Span("data_wait", start_ns, start_ns + wait_ns))
