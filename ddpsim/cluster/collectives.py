"""The cost of a collective, behind one small interface: new cost models plug in here.

A cost model answers with a `RingTransfer` (steps over links, so that ranks may leave at
different times), a `ScheduledTransfer` (another algorithm's messages over links) or a
`WholeTransfer` (one measured duration); from the latter two all ranks leave together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from ddpsim.cluster import algorithms
from ddpsim.cluster.paths import Paths
from ddpsim.cluster.rings import ring
from ddpsim.cluster.schedule import Schedule
from ddpsim.cluster.topology import Link
from ddpsim.errors import InputError
from ddpsim.provenance import Provenance, Uncertainty
from ddpsim.units import NS_PER_S, format_bytes, to_ns

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray

    from ddpsim.importers.all_reduce import AllReduceLog

__all__ = [
    "MOST_SLOWED",
    "NO_TRAFFIC",
    "AllReduceLogCost",
    "CollectiveCost",
    "Interference",
    "InterferingCost",
    "Kept",
    "LinkCost",
    "Network",
    "Operation",
    "RingTransfer",
    "ScheduledCost",
    "ScheduledTransfer",
    "SingleRankCost",
    "Slowing",
    "Traffic",
    "Transfer",
    "WholeTransfer",
    "duration_ns",
    "slowest_of",
]

Operation = Literal["all_reduce", "broadcast"]


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
        """Of a rank that keeps so many standard deviations more than ranks on average."""
        crowded = max(self.compute, self.crowded_compute)
        return Slowing(self._varied(self.compute, deviations), self._varied(crowded, deviations))

    def _varied(self, slowdown: Fraction, deviations: float) -> Fraction:
        """Cut off as far up as down, so that the mean holds: between what Linux leaves and all."""
        kept = float(1 / slowdown)
        room = max(0.0, min(kept - _LEAST_KEPT, 1 - kept))
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
_LEAST_KEPT = float(1 / MOST_SLOWED.alone)


@dataclass(frozen=True, slots=True)
class RingTransfer:
    """`steps` rounds around a ring; in each, rank r needs `step_ns[r]` to get its next chunk.

    `step_ns` holds one period of the ring, a node perhaps, which the other ranks repeat. A rank's
    first round begins `start_ns` after it has joined.
    """

    steps: int
    step_ns: tuple[int, ...]
    interference: Interference = NO_INTERFERENCE
    start_ns: int = 0

    @property
    def ranks(self) -> int:
        """Ranks around the ring: an all-reduce has 2(N-1) steps."""
        return self.steps // 2 + 1


@dataclass(frozen=True, slots=True)
class WholeTransfer:
    """A duration from the last arrival: latency, then a transfer that may share its link.

    `link_share`: the part of the link that the transfer takes up while it has it to itself.
    `burst_ns`: the most of the transfer that passes at once, where the link rested as long before.
    """

    latency_ns: int
    transfer_ns: int
    link_share: Fraction = Fraction(1)
    interference: Interference = NO_INTERFERENCE
    burst_ns: int = 0


@dataclass(frozen=True, slots=True)
class ScheduledTransfer:
    """An algorithm's messages over `paths`, the first `start_ns` after its rank has joined.

    All ranks leave together.
    """

    algorithm: str
    paths: Paths
    size_bytes: int
    interference: Interference = NO_INTERFERENCE
    start_ns: int = 0

    def schedule(self) -> Schedule:
        """Its messages."""
        return algorithms.schedule(self.algorithm, self.paths, self.size_bytes)

    def ends_ns(self, arrivals_ns: NDArray[float64]) -> NDArray[float64]:
        """When it ends, given when each rank joins: [..., ranks] to [..., 1].

        Fewer arrivals than ranks are those of the first ranks, which all others repeat.
        """
        import numpy as np  # noqa: PLC0415 -- slow to import, and a lone rank does without

        repeats = self.paths.ranks // arrivals_ns.shape[-1]
        sent = (self.algorithm, self.paths, self.size_bytes)
        begun_ns = np.concatenate([arrivals_ns] * repeats, axis=-1) + self.start_ns
        return algorithms.ends_ns(*sent, begun_ns)[..., np.newaxis]


Transfer = RingTransfer | ScheduledTransfer | WholeTransfer


def duration_ns(transfer: Transfer) -> int:
    """Ticks from the last arrival to the last rank's end, when nothing else is in flight."""
    if isinstance(transfer, RingTransfer):
        return transfer.start_ns + transfer.steps * max(transfer.step_ns)
    if isinstance(transfer, ScheduledTransfer):
        sent = (transfer.algorithm, transfer.paths, transfer.size_bytes)
        return transfer.start_ns + algorithms.duration_ns(*sent)
    return transfer.latency_ns + transfer.transfer_ns


def slowest_of(links: Iterable[Link]) -> float:
    """The bandwidth of the slowest of these links, in bytes per second."""
    return min(link.bandwidth_bytes_per_s for link in links)


class CollectiveCost(Protocol):
    """What the engine asks of a cost model."""

    def transfer(self, operation: Operation, size_bytes: int) -> Transfer:
        """How a message of `size_bytes` (the whole buffer) moves; raises InputError."""
        ...

    def stretched(self, factor: float) -> CollectiveCost:
        """The same model with every time `factor` times as long."""
        ...


class Kept(NamedTuple):
    """The share of its speed that compute keeps beside so many bytes a second of messages.

    `spread`: the standard deviation of the share, over ranks and steps; `beside_one`: the share
    where one message is in flight and no other, None: the same.
    """

    bytes_per_s: float
    share: float
    spread: float = 0.0
    beside_one: float | None = None

    @property
    def alone(self) -> float:
        """The share beside one message."""
        return self.share if self.beside_one is None else self.beside_one


@dataclass(frozen=True)
class InterferingCost:
    """A cost model whose transfers and compute slow each other down.

    `compute` and `comm` are factors. Compute keeps a share of its speed: `kept` tells which, by the
    bytes of a message that move in a second, growing. `comm_s2_per_byte2` times the square of those
    bytes is added to `comm`, `crowded_s_per_byte` times them to the factor beside another transfer,
    and `comm_delay_s` once to a transfer. Of its latency, in which the link is idle, another
    transfer may use the share `idle_link_use` (`ddpsim.importers.cluster_profile`). `effect`
    stretches the delay, and how far the factors lie above 1. Compute is slowed down by its factor
    to the power `exponent`: not every model suffers as usual layers do. Where messages are of
    float16, `kept_beside_single` tells the shares beside as many bytes of float32, and the power is
    of these: what float16 costs more is the processor's own time, which all models lose alike.
    """

    cost: CollectiveCost
    compute: float = 1.0
    comm: float = 1.0
    kept: tuple[Kept, ...] = ()
    kept_beside_single: tuple[Kept, ...] = ()
    comm_s2_per_byte2: float = 0.0
    crowded_s_per_byte: float = 0.0
    comm_delay_s: float = 0.0
    idle_link_use: float = 1.0
    effect: float = 1.0
    exponent: float = 1.0
    _known: dict[tuple[Operation, int], Transfer] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def transfer(self, operation: Operation, size_bytes: int) -> Transfer:
        """See CollectiveCost."""
        asked = operation, size_bytes
        if asked not in self._known:
            self._known[asked] = self._priced(operation, size_bytes)
        return self._known[asked]

    def _priced(self, operation: Operation, size_bytes: int) -> Transfer:
        transfer = self._split(self.cost.transfer(operation, size_bytes))
        bytes_per_s = size_bytes / max(duration_ns(transfer), 1) * NS_PER_S
        comm = self.comm + self.comm_s2_per_byte2 * bytes_per_s**2
        kept = _kept(self.kept, bytes_per_s / comm)
        single = _kept(self.kept_beside_single or self.kept, bytes_per_s / comm)
        power = self.exponent
        suffered = Interference(
            self._factor((self.compute / single.alone) ** power * single.alone / kept.alone),
            self._factor((self.compute / single.share) ** power * single.share / kept.share),
            self._factor(comm),
            self._factor(1 + self.crowded_s_per_byte * bytes_per_s),
            to_ns(self.comm_delay_s * self.effect),
            kept.spread * power * single.share ** (power - 1),  # of a share to that power
        )
        return replace(transfer, interference=suffered)

    def stretched(self, factor: float) -> InterferingCost:
        """See CollectiveCost."""
        return replace(self, cost=self.cost.stretched(factor))

    def _split(self, transfer: Transfer) -> Transfer:
        if not isinstance(transfer, WholeTransfer):
            return transfer
        latency_ns = round(transfer.latency_ns * self.idle_link_use)
        return replace(
            transfer,
            latency_ns=latency_ns,
            transfer_ns=duration_ns(transfer) - latency_ns,
        )

    def _factor(self, slowdown: float) -> Fraction:
        """In thousandths, so that fractions of time stay small."""
        return Fraction(max(1000, round(1000 + 1000 * (slowdown - 1) * self.effect)), 1000)


def _kept(points: Sequence[Kept], bytes_per_s: float) -> Kept:
    """Linear between points, from all of its speed beside no bytes.

    Beyond the last point what compute lacks grows in proportion to the bytes.
    """
    if not points:
        return Kept(bytes_per_s, 1.0)
    for below, above in pairwise((Kept(0.0, 1.0), *points)):
        if bytes_per_s <= above.bytes_per_s:
            part = (bytes_per_s - below.bytes_per_s) / (above.bytes_per_s - below.bytes_per_s)
            share, spread, one = (
                low + part * (high - low)
                for low, high in zip(_figures(below), _figures(above), strict=True)
            )
            return Kept(bytes_per_s, share, spread, one)
    share, spread, one = _figures(points[-1])
    times = bytes_per_s / points[-1].bytes_per_s
    return Kept(bytes_per_s, _beyond(share, times), spread, _beyond(one, times))


def _figures(point: Kept) -> tuple[float, float, float]:
    return point.share, point.spread, point.alone


def _beyond(share: float, times: float) -> float:
    """What is kept beside so many times the bytes: no less than Linux leaves, or was measured."""
    return max(min(_LEAST_KEPT, share), 1 - (1 - share) * times)


@dataclass(frozen=True)
class SingleRankCost:
    """One rank sends nothing: in place, NCCL launches no kernel (nccl src/enqueue.cc)."""

    def transfer(self, operation: Operation, size_bytes: int) -> Transfer:  # noqa: ARG002
        """See CollectiveCost."""
        return WholeTransfer(0, 0)

    def stretched(self, factor: float) -> SingleRankCost:  # noqa: ARG002
        """See CollectiveCost."""
        return self


@dataclass(frozen=True)
class LinkCost:
    """Ring collectives over links of latency and bandwidth, `links[r]` leading to rank r.

    `links` are one period of the ring (a node, where all nodes are alike), which goes on for all
    `ranks`; None: they are the whole ring.
    All-reduce: 2(N-1) steps of latency + ceil(M/N) / bandwidth, each rounded once to a tick.
    100 MB on 8 ranks at 10 GB/s and 10 us: 14 (10 us + 1.25 ms) = 17.64 ms.
    Broadcast: N-1 latencies, then the message once (pipelined in chunks small beside it).
    Assumes: one ring, full-duplex links that nobody else uses.
    `time_factor` stretches every time, to ask what another network would do.
    """

    links: tuple[Link, ...]
    ranks: int | None = None
    time_factor: float = 1.0

    def transfer(self, operation: Operation, size_bytes: int) -> Transfer:
        """See CollectiveCost."""
        ranks = self.ranks or len(self.links)
        if operation == "broadcast":
            periods = ranks // len(self.links)
            latency_s = periods * math.fsum(link.latency_s for link in self.links)
            latency_s -= self.links[0].latency_s
            return WholeTransfer(self._ns(latency_s), self._ns(size_bytes / slowest_of(self.links)))
        chunk_bytes = math.ceil(size_bytes / ranks)
        taken_ns = {  # of each kind of link
            link: self._ns(link.latency_s + chunk_bytes / link.bandwidth_bytes_per_s)
            for link in set(self.links)
        }
        return RingTransfer(2 * (ranks - 1), tuple(taken_ns[link] for link in self.links))

    def stretched(self, factor: float) -> LinkCost:
        """See CollectiveCost."""
        return replace(self, time_factor=self.time_factor * factor)

    def without_latency(self) -> LinkCost:
        """The same links if they took no time beside the bytes."""
        return replace(self, links=tuple(replace(link, latency_s=0.0) for link in self.links))

    def _ns(self, seconds: float) -> int:
        return to_ns(seconds * self.time_factor)


@dataclass(frozen=True)
class ScheduledCost:
    """Collectives by an algorithm of `ddpsim.cluster.algorithms` over `paths`.

    A broadcast goes round a ring as LinkCost's does (assumed), of parameter servers out of their
    links alone, which is half of an all-reduce; gloo sends it whole down a binomial tree
    (gloo/broadcast.cc). What torch's DataParallel gathers on GPU 0 is broadcast backwards, and
    takes as long (torch/nn/parallel/comm.py: NCCL's reduce and broadcast).
    """

    algorithm: str
    paths: Paths

    def transfer(self, operation: Operation, size_bytes: int) -> Transfer:
        """See CollectiveCost."""
        transfer = ScheduledTransfer(self.algorithm, self.paths, size_bytes)
        if operation == "all_reduce" or self.algorithm == "gather":
            return transfer
        if self.algorithm == "parameter_server":
            return WholeTransfer(0, round(duration_ns(transfer) / 2))
        if self.algorithm == "gloo_ring":
            return self._down_a_tree(size_bytes)
        return LinkCost(ring(self.paths), self.paths.ranks).transfer(operation, size_bytes)

    def _down_a_tree(self, size_bytes: int) -> WholeTransfer:
        rounds, link = (self.paths.ranks - 1).bit_length(), self.paths.slowest
        sent_s = size_bytes / link.bandwidth_bytes_per_s
        return WholeTransfer(to_ns(rounds * link.latency_s), to_ns(rounds * sent_s))

    def stretched(self, factor: float) -> ScheduledCost:
        """See CollectiveCost."""
        return replace(self, paths=self.paths.stretched(factor))


@dataclass(frozen=True)
class AllReduceLogCost:
    """All-reduce times read from a log, interpolated in the logarithms of size and time.

    Outside the measured sizes `beyond` answers if there is one (links that the scenario states);
    otherwise it is an error, unless `extrapolate`: above, the last two sizes' bandwidth goes on;
    below, the smallest size's time holds. A broadcast is priced as half an all-reduce (assumed:
    a ring's N-1 hops against 2(N-1)), and below the smallest size as half of that one's time.
    A log does not say which part of a time is latency: where transfers share a link (gloo), all
    of it is shared.
    """

    log: AllReduceLog
    beyond: CollectiveCost | None = None
    extrapolate: bool = False
    time_factor: float = 1.0

    def transfer(self, operation: Operation, size_bytes: int) -> Transfer:
        """See CollectiveCost."""
        if self.beyond and not self.covers(size_bytes):
            return self.beyond.transfer(operation, size_bytes)
        if operation == "broadcast":
            known_bytes = max(size_bytes, self.log.samples[0][0])
            return self._whole(self._all_reduce_s(known_bytes) / 2)
        return self._whole(self._all_reduce_s(size_bytes))

    def stretched(self, factor: float) -> AllReduceLogCost:
        """See CollectiveCost."""
        beyond = self.beyond.stretched(factor) if self.beyond else None
        return replace(self, beyond=beyond, time_factor=self.time_factor * factor)

    def covers(self, size_bytes: int) -> bool:
        """Whether a message size lies within the measured ones."""
        return self.log.samples[0][0] <= size_bytes <= self.log.samples[-1][0]

    def _whole(self, time_s: float) -> WholeTransfer:
        return WholeTransfer(0, to_ns(time_s * self.time_factor))

    def _all_reduce_s(self, size_bytes: int) -> float:
        samples = self.log.samples
        if self.covers(size_bytes):
            return _log_interpolated(samples, size_bytes)
        if not self.extrapolate:
            raise InputError("cluster.all_reduce", _outside(self.log, size_bytes))
        if size_bytes < samples[0][0] or len(samples) == 1:
            return samples[0][1] * max(1.0, size_bytes / samples[0][0])
        (below, below_s), (last, last_s) = samples[-2:]
        return last_s + (size_bytes - last) * max(0.0, last_s - below_s) / (last - below)


def _log_interpolated(samples: Sequence[tuple[int, float]], size_bytes: int) -> float:
    for (low, low_s), (high, high_s) in pairwise(samples):
        if low <= size_bytes <= high:
            part = math.log(size_bytes / low) / math.log(high / low)
            return float(low_s * (high_s / low_s) ** part)
    return samples[0][1]


def _outside(log: AllReduceLog, size_bytes: int) -> str:
    low, high = log.samples[0][0], log.samples[-1][0]
    return (
        f"a bucket of {format_bytes(size_bytes)} lies outside the sizes measured in {log.source} "
        f"({format_bytes(low)} to {format_bytes(high)}); measure that size, choose another bucket "
        "cap, state intra_node and inter_node links for it, or set run.allow_extrapolation: true"
    )


@dataclass(frozen=True, slots=True)
class Traffic:
    """What else a node's network carries, as parts of its rate, where least of that is left.

    A collective that is alone takes `needed_share`: less than all where the links inside nodes are
    slower. Another job wants `other_share` for `busy_ns` of every `every_ns` (None: always); the
    loaders of a node's ranks, `loaders` in number, together `loader_share` while they read.
    """

    needed_share: Fraction = Fraction(1)
    other_share: Fraction = Fraction(0)
    busy_ns: int = 0
    every_ns: int | None = None
    loader_share: Fraction = Fraction(0)
    loaders: int = 1

    def with_batches_in(self, batch_ns: int, usual_ns: int) -> Traffic:
        """The same samples to read, by loaders that make a batch in another time."""
        return replace(self, loader_share=self.loader_share * Fraction(usual_ns, batch_ns))

    def on_wider_links(self, factor: float) -> Traffic:
        """The same bytes of others, over links of `factor` times the bandwidth."""
        wider = Fraction(str(factor))
        return replace(
            self,
            other_share=self.other_share / wider,
            loader_share=self.loader_share / wider,
        )


NO_TRAFFIC = Traffic()


@dataclass(frozen=True)
class Network:
    """The cost model of a cluster, how wrong it may be, and its sources.

    `interference`: how wrong its effect may be; None: it is not modelled. `beyond`: what answers
    outside the sizes of a log. `traffic`: what else goes over the nodes' network.
    `measured_bytes`: the least and the largest all-reduce that a profile was fitted to.
    """

    cost: CollectiveCost
    uncertainty: Uncertainty | None
    bottleneck: str
    provenance: tuple[Provenance, ...]
    warnings: tuple[str, ...] = ()
    interference: Uncertainty | None = None
    beyond: Network | None = None
    traffic: Traffic = NO_TRAFFIC
    measured_bytes: tuple[int, int] | None = None

    @property
    def plain_cost(self) -> CollectiveCost:
        """The cost model without interference."""
        return self.cost.cost if isinstance(self.cost, InterferingCost) else self.cost
