"""The cost of a collective, behind one small interface: new cost models plug in here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol, get_args

from ddpsim.cluster.algorithms.rings import ring
from ddpsim.cluster.topology.paths import Link, Paths
from ddpsim.cluster.transfers import (
    REPLICATED,
    SHARDED,
    TURNS,
    Operation,
    RingTransfer,
    ScheduledTransfer,
    Transfer,
    WholeTransfer,
    duration_ns,
)
from ddpsim.errors import InputError
from ddpsim.units import format_bytes, to_ns

if TYPE_CHECKING:
    from typing_extensions import Self

    from ddpsim.importers.all_reduce import AllReduceLog

_LATENCY_BYTES = 1024  # up to here an all-reduce takes its latency (assumed)
# of gloo's all-gathers of two ranks, that go in turn: see `ScheduledCost` (assumed)
GLOO_IN_TURN = 0.5
_ONE_WAY: tuple[Operation, ...] = ("broadcast", "reduce")
_OF_SHARDS: dict[tuple[str, Operation], str] = {
    ("gloo_ring", "all_gather"): "gloo_all_gather",
    ("hierarchical", "reduce_scatter"): "hierarchical_scatter",
    ("hierarchical", "all_gather"): "hierarchical_gather",
}


def slowest_of(links: Iterable[Link]) -> float:
    """The bandwidth of the slowest of these links, in bytes per second."""
    return min(link.bandwidth_bytes_per_s for link in links)


class CollectiveCost(Protocol):
    """What the engine asks of a cost model."""

    @property
    def operations(self) -> frozenset[Operation]:
        """The collectives that have a price; `transfer` takes no others."""
        ...

    def transfer(self, operation: Operation, size_bytes: int) -> Transfer:
        """How a message of `size_bytes` moves; raises InputError.

        Of a reduce-scatter that is its input, of an all-gather its output: the shards of all ranks.
        """
        ...

    def stretched(self, factor: float) -> CollectiveCost:
        """Make every time `factor` times as long."""
        ...


@dataclass(frozen=True, kw_only=True)
class StretchedCost:
    """A cost model whose times are all `time_factor` times as long, as on another network."""

    time_factor: float = 1.0

    def stretched(self, factor: float) -> Self:
        """See CollectiveCost."""
        return replace(self, time_factor=self.time_factor * factor)

    def _ns(self, seconds: float) -> int:
        return to_ns(float(seconds) * self.time_factor)


@dataclass(frozen=True)
class ChangedCost:
    """Another cost model, whose transfers are changed."""

    cost: CollectiveCost

    @property
    def operations(self) -> frozenset[Operation]:
        """See CollectiveCost."""
        return self.cost.operations

    def stretched(self, factor: float) -> Self:
        """See CollectiveCost."""
        return replace(self, cost=self.cost.stretched(factor))


@dataclass(frozen=True)
class SingleRankCost:
    """One rank sends nothing: in place, NCCL launches no kernel (nccl src/enqueue.cc)."""

    operations = frozenset(get_args(Operation))

    def transfer(self, operation: Operation, size_bytes: int) -> Transfer:  # noqa: ARG002
        """See CollectiveCost."""
        return WholeTransfer(0, 0)

    def stretched(self, factor: float) -> SingleRankCost:  # noqa: ARG002
        """See CollectiveCost."""
        return self


@dataclass(frozen=True)
class LinkCost(StretchedCost):
    """Ring collectives over links of latency and bandwidth, `links[r]` leading to rank r.

    `links` are one period of the ring (a node, where all nodes are alike), which goes on for all
    `ranks`; None: they are the whole ring.
    All-reduce: over equal links 2(N-1) steps of latency + ceil(M/N) / bandwidth, each rounded once
    to a tick. 100 MB on 8 ranks at 10 GB/s and 10 us: 14 (10 us + 1.25 ms) = 17.64 ms. Over unequal
    links a chunk's latency passes while the next one leaves, so that the slowest link sets the pace
    by its bandwidth, or all of them by a turn around the ring.
    Reduce-scatter and all-gather: the first and the last N-1 steps of that.
    Broadcast: N-1 latencies, then the message once (pipelined in chunks small beside it). A reduce
    is that backwards.
    Assumes: one ring, full-duplex links that nobody else uses.
    """

    operations = REPLICATED | SHARDED
    links: tuple[Link, ...]
    ranks: int | None = None

    def transfer(self, operation: Operation, size_bytes: int) -> Transfer:
        """See CollectiveCost."""
        ranks = self.ranks or len(self.links)
        if operation in _ONE_WAY:
            periods = ranks // len(self.links)
            latency_s = periods * math.fsum(link.latency_s for link in self.links)
            latency_s -= self.links[0].latency_s
            return WholeTransfer(self._ns(latency_s), self._ns(size_bytes / slowest_of(self.links)))
        chunk_bytes = math.ceil(size_bytes / ranks)
        taken_ns = {link: self._hop_ns(link, chunk_bytes) for link in set(self.links)}
        busy_ns, latency_ns = zip(*(taken_ns[link] for link in self.links), strict=True)
        turns = TURNS[operation]
        return RingTransfer(turns * (ranks - 1), busy_ns, latency_ns, turns=turns)

    def _hop_ns(self, link: Link, size_bytes: int) -> tuple[int, int]:
        """How long a message keeps a link busy, and what it takes to arrive beyond that."""
        busy_ns = self._ns(size_bytes / link.bandwidth_bytes_per_s)
        taken_ns = self._ns(link.latency_s + size_bytes / link.bandwidth_bytes_per_s)
        return busy_ns, taken_ns - busy_ns


@dataclass(frozen=True)
class ScheduledCost:
    """Collectives by an algorithm of `ddpsim.cluster.algorithms.dispatch` over `paths`.

    A broadcast goes round a ring as LinkCost's does (assumed), of parameter servers out of their
    links alone, which is half of an all-reduce; gloo sends it whole down a binomial tree
    (gloo/broadcast.cc). What torch's DataParallel gathers on GPU 0 is broadcast backwards, and
    takes as long (torch/nn/parallel/comm.py: NCCL's reduce and broadcast). So does a reduce. Gloo's
    alone reduces and scatters around its ring, then gathers (gloo/reduce.cc): about an all-reduce.
    Of reduce-scatters and all-gathers gloo's are known, and the halves of hierarchical all-reduces.
    torch 2.13 has gloo all-reduce the whole input of a reduce-scatter, of which each rank keeps its
    shard (the profiler's ranges).
    Two ranks of gloo share one connection for both directions. The rank that comes second begins to
    send at once, and its word that it can receive waits behind those bytes (gloo/allgather.cc,
    transport/tcp). So the halves of the two shards of an all-gather take three times the time of
    one. Ranks that come at once take two. On links of 200 Mbit/s two ranks took 1.45 times half of
    an all-reduce for 4 MiB, and four ranks 1.02 times. Steps have both; each is assumed half of the
    time.
    """

    algorithm: str
    paths: Paths

    @property
    def operations(self) -> frozenset[Operation]:
        """See CollectiveCost."""
        has_shards = self.algorithm in ("gloo_ring", "hierarchical")
        return REPLICATED | SHARDED if has_shards else REPLICATED

    def transfer(self, operation: Operation, size_bytes: int) -> Transfer:
        """See CollectiveCost."""
        if algorithm := _OF_SHARDS.get((self.algorithm, operation)):
            start_ns = self._in_turn_ns(size_bytes) if algorithm == "gloo_all_gather" else 0
            return ScheduledTransfer(algorithm, self.paths, size_bytes, start_ns=start_ns)
        transfer = ScheduledTransfer(self.algorithm, self.paths, size_bytes)
        if operation == "all_reduce" or self.algorithm == "gather":
            return transfer
        if self.algorithm == "gloo_ring" and operation != "broadcast":
            return transfer
        if self.algorithm == "parameter_server":
            return WholeTransfer(0, round(duration_ns(transfer) / 2))
        if self.algorithm == "gloo_ring":
            return self._down_a_tree(size_bytes)
        return LinkCost(ring(self.paths), self.paths.ranks).transfer(operation, size_bytes)

    def _in_turn_ns(self, size_bytes: int) -> int:
        """What two ranks of gloo take longer for an all-gather, half of the time."""
        link = self.paths.slowest
        half_s = size_bytes / 4 / link.bandwidth_bytes_per_s
        more_s = GLOO_IN_TURN * max(0.0, half_s - link.latency_s)
        return to_ns(more_s) if self.paths.ranks == 2 else 0

    def _down_a_tree(self, size_bytes: int) -> WholeTransfer:
        rounds, link = (self.paths.ranks - 1).bit_length(), self.paths.slowest
        sent_s = size_bytes / link.bandwidth_bytes_per_s
        return WholeTransfer(to_ns(rounds * link.latency_s), to_ns(rounds * sent_s))

    def stretched(self, factor: float) -> ScheduledCost:
        """See CollectiveCost."""
        return replace(self, paths=self.paths.stretched(factor))


@dataclass(frozen=True)
class AllReduceLogCost(StretchedCost):
    """All-reduce times read from a log, interpolated in the logarithms of size and time.

    Messages of a few bytes take as long as the smallest of a log that begins with such.
    Outside the measured sizes `beyond` answers if there is one (links that the scenario states);
    otherwise it is an error, unless `extrapolate`: above, the last two sizes' bandwidth goes on;
    below, the smallest size's time holds. A broadcast is priced as half an all-reduce (assumed:
    a ring's N-1 hops against 2(N-1)), and below the smallest size as half of that one's time. So is
    a reduce.
    `parts`: what of an all-reduce's time reduce-scatters and all-gathers of its size take; None:
    what they take of it by `chosen`, NCCL's choice on links. Many ranks reduce by a tree and gather
    by a ring: an all-gather of 256 nodes takes 25 times half of an all-reduce. `beyond` answers for
    what is not among them.
    A log does not say which part of a time is latency: where transfers share a link (gloo), all
    of it is shared.
    """

    log: AllReduceLog
    beyond: CollectiveCost | None = None
    extrapolate: bool = False
    parts: tuple[tuple[Operation, float | None], ...] = ()
    chosen: CollectiveCost | None = None

    @property
    def operations(self) -> frozenset[Operation]:
        """See CollectiveCost."""
        beyond = self.beyond.operations if self.beyond else frozenset()
        return REPLICATED | {operation for operation, _ in self.parts} | beyond

    def transfer(self, operation: Operation, size_bytes: int) -> Transfer:
        """See CollectiveCost."""
        part = self._part(operation, size_bytes)
        if self.beyond and (part is None or not self.log.covers(size_bytes)):
            return self.beyond.transfer(operation, size_bytes)
        if operation in _ONE_WAY:
            size_bytes = max(size_bytes, self.log.samples[0][0])
        time_s = (part or 0.0) * self._all_reduce_s(size_bytes)
        return WholeTransfer(0, self._ns(time_s))

    def _part(self, operation: Operation, size_bytes: int) -> float | None:
        """The part of an all-reduce's time that an operation takes; None where no input says it."""
        if operation == "all_reduce":
            return 1.0
        if operation in _ONE_WAY:
            return 0.5
        parts = dict[Operation, float | None](self.parts)
        if operation not in parts or self.chosen is None:
            return parts.get(operation)
        whole_ns = duration_ns(self.chosen.transfer("all_reduce", size_bytes))
        return duration_ns(self.chosen.transfer(operation, size_bytes)) / max(1, whole_ns)

    def stretched(self, factor: float) -> AllReduceLogCost:
        """See CollectiveCost."""
        beyond = self.beyond.stretched(factor) if self.beyond else None
        return replace(super().stretched(factor), beyond=beyond)

    def _all_reduce_s(self, size_bytes: int) -> float:
        samples = self.log.samples
        if samples[0][0] <= _LATENCY_BYTES:
            size_bytes = max(size_bytes, samples[0][0])
        if self.log.covers(size_bytes):
            return interpolated_s(samples, size_bytes)
        if not self.extrapolate:
            raise InputError("cluster.all_reduce", _outside(self.log, size_bytes))
        if size_bytes < samples[0][0] or len(samples) == 1:
            return samples[0][1] * max(1.0, size_bytes / samples[0][0])
        (below, below_s), (last, last_s) = samples[-2:]
        return last_s + (size_bytes - last) * max(0.0, last_s - below_s) / (last - below)


def interpolated_s(samples: Sequence[tuple[int, float]], size_bytes: int) -> float:
    """Between (bytes, seconds) of a log, in the logarithms of both; the size is within them."""
    for (low, low_s), (high, high_s) in pairwise(samples):
        if low <= size_bytes <= high:
            part = math.log(size_bytes / low) / math.log(high / low)
            return float(low_s * (high_s / low_s) ** part)
    return samples[0][1]


def _outside(log: AllReduceLog, size_bytes: int) -> str:
    return (
        f"a message of {format_bytes(size_bytes)} lies outside the sizes measured in {log.source} "
        f"({log.range_in_words}); measure that size, send other sizes "
        "(ddp.bucket_cap_mb, or ddp.fully_shard's units), state intra_node and inter_node links "
        "for it, or set run.allow_extrapolation: true"
    )
