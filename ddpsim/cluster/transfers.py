"""How one collective moves, and what it suffers and does to compute.

A `RingTransfer` has steps over links, so that ranks may leave at different times; from a
`ScheduledTransfer` (another algorithm's messages over links) and a `WholeTransfer` (one duration)
all ranks leave together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Literal, NamedTuple

from ddpsim.cluster.algorithms import dispatch
from ddpsim.cluster.algorithms.schedule import Schedule, joined_ring_ns
from ddpsim.cluster.topology.paths import Paths

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray

# in torch's words; a cost model says which of them it knows (CollectiveCost.operations)
Operation = Literal["all_reduce", "broadcast", "reduce_scatter", "all_gather", "reduce", "send"]
REPLICATED: frozenset[Operation] = frozenset({"all_reduce", "broadcast", "reduce"})
# whose ranks take part: all, those of one node, those with the same place in each node, or those
# that keep a copy of the parameters after the forward
ProcessGroup = Literal["world", "node", "across_nodes", "kept"]
SHARDED: frozenset[Operation] = frozenset({"reduce_scatter", "all_gather"})
# how often the chunks of a message go around a ring, N-1 steps each time
TURNS: dict[Operation, int] = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}


class Slowing(NamedTuple):
    """How many times longer compute takes beside one transfer, and beside several."""

    alone: Fraction
    crowded: Fraction


@dataclass(frozen=True, slots=True)
class Interference:
    """What a transfer suffers and does to compute.

    `compute`: how many times longer compute takes under it; `crowded_compute`: under it and another
    transfer, no less than that; `comm`: it takes under compute; `crowded`: it takes beside another
    transfer, beyond its part of the link. `delay_ns`: how much longer the link is taken where some
    rank computes as the transfer begins. `kept_spread`: the standard deviation, over ranks and
    steps, of the share of its speed that compute keeps.
    """

    compute: Fraction = Fraction(1)
    crowded_compute: Fraction = Fraction(1)
    comm: Fraction = Fraction(1)
    crowded: Fraction = Fraction(1)
    delay_ns: int = 0
    kept_spread: float = 0.0

    def compute_on(self, deviations: float) -> Slowing:
        """The slowing of a rank that keeps so many standard deviations more speed than the mean."""
        crowded = max(self.compute, self.crowded_compute)
        return Slowing(self._varied(self.compute, deviations), self._varied(crowded, deviations))

    def _varied(self, slowdown: Fraction, deviations: float) -> Fraction:
        """A slowdown off its mean, cut off alike above and below, so that the mean holds."""
        kept = float(1 / slowdown)
        room = max(0.0, min(kept - LEAST_KEPT, 1 - kept))
        more = max(-room, min(room, self.kept_spread * deviations))
        return Fraction(round(1000 / (kept + more)), 1000) if more else slowdown

    @property
    def slows_compute(self) -> bool:
        """Whether the transfer makes compute longer."""
        return max(self.compute, self.crowded_compute) != 1

    @property
    def slows_transfer(self) -> bool:
        """Whether compute makes the transfer longer."""
        return self.comm != 1 or self.delay_ns > 0


NO_INTERFERENCE = Interference()
# compute: Linux leaves it a twentieth beside real-time threads
MOST_SLOWED = Slowing(Fraction(20), Fraction(20))
LEAST_KEPT = float(1 / MOST_SLOWED.alone)


@dataclass(frozen=True, slots=True)
class RingTransfer:
    """`steps` chunks to each rank of a ring, one after the other, each from its left neighbour.

    The link that leads to rank r is busy for `busy_ns[r]` with a chunk, which arrives
    `latency_ns[r]` later. Both hold one period of the ring, a node perhaps, which the other ranks
    repeat. A rank's first chunk is under way `start_ns` after it has joined. `turns`: how often
    chunks go around: twice in an all-reduce, once in its halves (TURNS).
    """

    steps: int
    busy_ns: tuple[int, ...]
    latency_ns: tuple[int, ...]
    interference: Interference = field(default=NO_INTERFERENCE, hash=False)  # slow to hash
    start_ns: int = 0
    turns: int = 2

    @property
    def ranks(self) -> int:
        """Ranks around the ring: each turn has N-1 steps."""
        return self.steps // self.turns + 1


@dataclass(frozen=True, slots=True)
class WholeTransfer:
    """A duration from the last arrival: latency, then a transfer that may share its link.

    `link_share`: the part of the link that the transfer takes up while it has it to itself.
    `burst_ns`: the most that passes at once, where the link rested as long before; `wire_ns`: the
    part of the transfer that can, as its bytes wait for the link; None: all of it.
    """

    latency_ns: int
    transfer_ns: int
    link_share: Fraction = field(default=Fraction(1), hash=False)
    interference: Interference = field(default=NO_INTERFERENCE, hash=False)  # slow to hash
    burst_ns: int = 0
    wire_ns: int | None = None

    @property
    def at_once_ns(self) -> int:
        """Ticks of the transfer that pass at once where the link has rested long enough."""
        wire_ns = self.transfer_ns if self.wire_ns is None else self.wire_ns
        return min(self.burst_ns, wire_ns, self.transfer_ns)


@dataclass(frozen=True, slots=True)
class ScheduledTransfer:
    """An algorithm's messages over `paths`, the first `start_ns` after its rank has joined.

    All ranks leave together.
    """

    algorithm: str
    paths: Paths
    size_bytes: int
    interference: Interference = field(default=NO_INTERFERENCE, hash=False)  # slow to hash
    start_ns: int = 0

    def schedule(self) -> Schedule:
        """Its messages."""
        return dispatch.schedule(self.algorithm, self.paths, self.size_bytes)

    def ends_ns(self, arrivals_ns: NDArray[float64]) -> NDArray[float64]:
        """When it ends, given when each rank joins: [..., ranks] to [..., 1].

        Fewer arrivals than ranks are those of the first ranks, which all others repeat.
        """
        import numpy as np  # noqa: PLC0415 -- slow to import, and a lone rank does without

        repeats = self.paths.ranks // arrivals_ns.shape[-1]
        sent = (self.algorithm, self.paths, self.size_bytes)
        begun_ns = np.concatenate([arrivals_ns] * repeats, axis=-1) + self.start_ns
        return dispatch.ends_ns(*sent, begun_ns)[..., np.newaxis]


Transfer = RingTransfer | ScheduledTransfer | WholeTransfer


def duration_ns(transfer: Transfer) -> int:
    """Ticks from the last arrival to the last rank's end, when nothing else is in flight."""
    if isinstance(transfer, RingTransfer):
        ring = (transfer.busy_ns, transfer.latency_ns, transfer.steps)
        return transfer.start_ns + joined_ring_ns(*ring)
    if isinstance(transfer, ScheduledTransfer):
        sent = (transfer.algorithm, transfer.paths, transfer.size_bytes)
        return transfer.start_ns + dispatch.duration_ns(*sent)
    return transfer.latency_ns + transfer.transfer_ns
