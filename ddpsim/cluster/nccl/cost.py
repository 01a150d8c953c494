"""What an NCCL collective costs on a machine that nobody measured: its tuner's choice, priced.

The choice is NCCL's (`ddpsim.cluster.nccl.tuner`). The bytes go over links as the algorithm sends
them (`ddpsim.cluster.algorithms`). Latencies are NCCL's own table plus what published sweeps show
beyond it. All of it is assumed of a machine like the preset's; a log or a profile comes first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import ceil
from typing import NamedTuple

from ddpsim.cluster.algorithms.rings import ring, ring_hops_ns
from ddpsim.cluster.cost import StretchedCost, slowest_of
from ddpsim.cluster.nccl.chunks import (
    Cut,
    blocks,
    cut,
    in_a_tree_s,
    most_bytes_per_s,
    shared_s_per_byte,
    through_hosts_s,
)
from ddpsim.cluster.nccl.figures import USUAL, Figures
from ddpsim.cluster.nccl.graph import Graph
from ddpsim.cluster.nccl.tables import PROTOCOLS, tables
from ddpsim.cluster.nccl.thresholds import LAST_WITHOUT_TUNER
from ddpsim.cluster.nccl.tuner import (
    Choice,
    choose,
    estimates,
    known_choices,
    most_ll_gb_per_s,
    pat_us,
)
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
from ddpsim.scenario.cluster import NEWEST_NCCL as NEWEST
from ddpsim.units import MIB, NS_PER_S, to_ns

US = 1e-6
_LARGE_BYTES = 32 * MIB  # a bucket of torch's, more or less
_FEW_NODES = 4
# a message in between is sent as one of the next size: 1 KiB to 1 GiB, each 9 % more
_OCTAVE = 8
_BANDS_BYTES = [ceil(2 ** (step / _OCTAVE)) for step in range(10 * _OCTAVE, 30 * _OCTAVE + 1)]
_LEAST_PART = 0.45  # of a message that each algorithm sends over one link: half, but for rounding
# flags beside the data: LL sends 4 bytes of them with 4 of data, LL128 8 with 120
_PAYLOAD = {"LL": 0.5, "LL128": 0.92, "Simple": 1.0}
# of rings in one node, before the first step: what the steps' own latency leaves of sweeps
# (A100: SuperBench 1 x 8, 4 KiB to 64 MiB; V100: ABCI 1 x 4; H100: dgxc-benchmarking 1 x 8)
_STARTUP_US: dict[str, tuple[float, float, float]] = {
    "volta": (6.6, 45.0, 40.0),
    "ampere": (6.6, 60.0, 80.0),
    "hopper": (6.6, 14.0, 20.0),
    "blackwell": (6.6, 14.0, 20.0),
}
# of each block of LL's rings in one node, which reads its work from the host's memory before NCCL
# 2.22 passed it as an argument (src/include/device.h): 64 KiB to 1 MiB of ABCI 1 x 4 V100 and
# 1 x 4 A100 (2.8) and of SuperBench 1 x 8 A100, with what each byte takes left aside
_LL_BLOCK_US, _WORK_IN_ARGUMENTS = {"volta": 0.5, "ampere": 0.8}, 22
# of LL inside a node, 256 bytes: ABCI 1 x 4 V100 and 1 x 4, 1 x 8 A100. The 4 us a rank of A100 in
# nccl-tests issue 123 and in SuperBench are launches, one process for all GPUs. B200: 1 x 8, whose
# all-reduces and all-gathers to 64 KiB differ by seven hops
_MEASURED_LL_HOP_US = {"volta": 0.47, "ampere": 0.85, "blackwell": 1.34}
# of reduce-scatters and all-gathers round rings over nodes, as many times a hop inside a node:
# 2 x 8 A100 and 2 x 8 B200, 32 KiB to 1 MiB
_SHARD_HOPS = {"LL": 1.75, "LL128": 1.5, "Simple": 1.15}
_LL_HOP_OVER_NODES = 1.8  # as much longer where there are several nodes (NCCL 2.7 to 2.17)
# latencies are the hardware's: of the newest tables, whichever version chooses
_HOP_US, _BASE_US = tables(NEWEST).hop_us, tables(NEWEST).base_us


@dataclass(frozen=True)
class NcclCost(StretchedCost):
    """Collectives as NCCL would choose and send them, on the cluster's ranks.

    `paths` holds bandwidths of bytes on the wire, of which a protocol's flags take their part, and,
    where the scenario states it (not `table_intra`), the latency of one step inside a node; else it
    is NCCL's own, by protocol. `net_hop_s`: what a small message takes to another node in a tree,
    5 us in NCCL's table, or where the scenario states it (`is_ring_step`) in a ring; None: as the
    table says.
    `message_s`: how long a NIC is busy with a message beside its bytes. `algorithms` and
    `protocols` restrict the choice, as NCCL_ALGO and NCCL_PROTO do; rings are taken where an
    operation has none of these.
    """

    operations = REPLICATED | SHARDED
    graph: Graph
    paths: Paths
    table_intra: bool
    net_hop_s: float | None = None
    is_ring_step: bool = False
    message_s: float = 0.0
    algorithms: tuple[str, ...] = ()
    protocols: tuple[str, ...] = ()
    figures: Figures = USUAL

    def choice(self, size_bytes: int, operation: Operation = "all_reduce") -> Choice:
        """What NCCL takes for a message; for a broadcast it knows no other than a ring."""
        return self._as_sent(operation, size_bytes).choice

    def tuned(self, size_bytes: int, operation: Operation) -> Choice:
        """What NCCL's tuner estimates to be the fastest; it does not know a stated latency."""
        if operation == "all_reduce":
            return choose(self.graph, size_bytes, self.algorithms, self.protocols)
        if operation in ("broadcast", "reduce"):
            return choose(self.graph, size_bytes, ("ring",), self.protocols)
        had = {row.algorithm for row in estimates(self.graph, operation)}
        named = tuple(had.intersection(self.algorithms)) or ("ring",)
        named = named if self.algorithms else tuple(had)
        return choose(self.graph, size_bytes, named, self.protocols, operation)

    def transfer(self, operation: Operation, size_bytes: int) -> Transfer:
        """See CollectiveCost."""
        return self.search(operation).transfer(self._as_sent(operation, size_bytes))

    def _as_sent(self, operation: Operation, size_bytes: int) -> _Sent:
        """How a message is sent: with any time factor alike."""
        return self._unstretched.search(operation).as_sent(size_bytes)

    @cached_property
    def _unstretched(self) -> NcclCost:
        return self if self.time_factor == 1 else replace(self, time_factor=1.0)

    def search(self, operation: Operation) -> _Search:
        """How messages are sent; equal costs share it, but to find it by value takes a while."""
        if operation not in self._searches:
            self._searches[operation] = _search(self, operation)
        return self._searches[operation]

    @cached_property
    def _searches(self) -> dict[Operation, _Search]:
        return {}

    def sent(
        self,
        choice: Choice,
        size_bytes: int,
        operation: Operation = "all_reduce",
        cuts: Cut | None = None,
    ) -> Transfer:
        """What a choice costs, cut as NCCL cuts this message, or as it cuts another."""
        if operation in ("broadcast", "reduce"):  # one backwards is the other (device/reduce.h)
            return self.broadcast(choice, size_bytes)
        if choice.algorithm == "pat" or (choice.algorithm == "nvls" and operation in SHARDED):
            return self._of_shards(choice, size_bytes)
        priced = self._priced(choice, size_bytes, cuts).stretched(self.time_factor)
        if operation in SHARDED and self.graph.nodes > 1 and priced.intra:
            priced = replace(priced, intra=priced.intra.later(_SHARD_HOPS[choice.protocol]))
        start_s = self._startup_s(choice) + self._blocks_s(choice, size_bytes)
        start_ns = self._ns(start_s)
        if choice.algorithm == "ring":
            turns = TURNS[operation]
            hops_ns = ring_hops_ns(priced, size_bytes)
            steps = turns * (priced.ranks - 1)
            return RingTransfer(steps, *hops_ns, start_ns=start_ns, turns=turns)
        return ScheduledTransfer(choice.algorithm, priced, size_bytes, start_ns=start_ns)

    def _of_shards(self, choice: Choice, size_bytes: int) -> WholeTransfer:
        """A reduce-scatter or an all-gather that goes round no ring (nobody measured them).

        NVLS: every shard but one's own, at the rate of the switch's all-reduce, one way of its two.
        PAT: the latency that NCCL's tuner counts, with hops of these links, and the bytes at the
        part of the network's rate that it counts.
        """
        ranks, paths = self.graph.ranks, self.paths.stretched(self.time_factor)
        if choice.algorithm == "nvls" and paths.switch:
            latency_s = self._startup_s(choice) + self._hop_s(choice)
            moved_s = (ranks - 1) / ranks * size_bytes / paths.switch.bandwidth_bytes_per_s
        else:
            hop_us = self._net_s(Choice("tree", "Simple", 0.0)) / US
            latency_s, part = pat_us(self.graph, hop_us) * US, self.graph.pat_part
            moved_s = size_bytes / (part * paths.least_network.bandwidth_bytes_per_s)
        return WholeTransfer(self._ns(latency_s), to_ns(moved_s))

    def broadcast(self, choice: Choice, size_bytes: int) -> WholeTransfer:
        """Half the latency of the ring that reduces, then the message once over its slowest link.

        Source: nccl-tests' PERFORMANCE.md, where a broadcast's bus bandwidth is size over time.
        Assumes: chunks that are small beside the message, and so fill the ring in the hops' time.
        """
        priced = self._priced(choice, size_bytes).stretched(self.time_factor)
        latency_ns = round(duration_ns(self.sent(choice, 0)) / 2)
        copied_s, wires = priced.copied_s, replace(priced, copied_s=0.0)
        byte_s = max(copied_s, 1 / slowest_of(ring(wires)))  # one chunk is sent, the next copied
        return WholeTransfer(latency_ns, to_ns(size_bytes * byte_s))

    def waits_for_network(self) -> bool:
        """Whether faster links between nodes would shorten large messages more than those inside.

        So that it holds of trees and of NVLS, which load the two in other proportions than a ring.
        """
        return _waits_for_network(self)

    def _priced(self, choice: Choice, size_bytes: int, cuts: Cut | None = None) -> Paths:
        """The paths with a protocol's payload, and its latencies where the tables say them.

        A link carries a protocol's flags too.
        """
        intra, inter, switch = self.paths.intra, self.paths.inter, self.paths.switch
        cuts = cuts or cut(self.graph, choice.algorithm, choice.protocol, size_bytes)
        payload = _PAYLOAD[choice.protocol]
        copied_s, most = 0.0, most_bytes_per_s(self.graph, choice.algorithm, choice.protocol)
        if choice.protocol == "LL":
            copied_s = shared_s_per_byte(self.graph, choice.algorithm, "LL", size_bytes)
            most = most_ll_gb_per_s(self.graph) * 1e9
            most *= self.figures.ll_rate if self.graph.nodes > 1 else 1.0
        if intra:
            hop_s = self._hop_s(choice) if self.table_intra else intra.latency_s
            rate = self.figures.intra_rate * intra.bandwidth_bytes_per_s
            intra = Link(hop_s * self.figures.intra_hop(choice), payload * rate)
        if switch:
            rate = self.figures.switch_rate * switch.bandwidth_bytes_per_s
            switch = Link(self._hop_s(choice) * self.figures.intra_hop(choice), rate)
        if inter:
            message_s = self.message_s * self.figures.message
            busy_s = message_s * cuts.messages
            # a hop's latency has one message's time on the NIC in it already
            hop_s = self._net_s(choice) * self.figures.net_hop(choice)
            latency_s = max(0.0, hop_s - min(busy_s, message_s))
            if choice.protocol == "Simple" and not self.graph.gpu_direct:
                latency_s += through_hosts_s(
                    self.graph, choice.algorithm, size_bytes, cuts.chunk_bytes
                )
            if choice.algorithm == "tree":
                latency_s += in_a_tree_s(self.graph, choice.protocol, size_bytes, cuts.chunk_bytes)
            rate = self.figures.net_rate * inter.bandwidth_bytes_per_s
            inter = Link(latency_s, payload * rate, busy_s)
        chunk = None if choice.algorithm == "ring" else cuts.chunk_bytes
        return replace(
            self.paths,
            intra=intra,
            inter=inter,
            switch=switch,
            most=most,
            chunk_bytes=chunk,
            streams=choice.protocol == "LL",  # each word has its own flag
            copied_s=copied_s,
        )

    def _hop_s(self, choice: Choice) -> float:
        place = PROTOCOLS.index(choice.protocol)
        hop_us = _HOP_US[self.graph.path][choice.algorithm][place]
        if choice.protocol == "LL" and self.graph.path == "nvlink":
            if self.graph.nodes > 1:
                hop_us *= _LL_HOP_OVER_NODES
            else:
                hop_us = _MEASURED_LL_HOP_US.get(self.graph.architecture, hop_us)
        return hop_us * US

    def _net_s(self, choice: Choice) -> float:
        """NCCL's table, or its proportions on another hop, and as much more for larger messages."""
        net_us, is_alone = _HOP_US["net"], self.graph.gpus_per_node == 1
        row = "tree" if is_alone else choice.algorithm
        hop_us = net_us[row][PROTOCOLS.index(choice.protocol)]
        if self.net_hop_s is None:
            return hop_us * US
        known_us = net_us["ring" if self.is_ring_step and not is_alone else "tree"][0]
        small_us = net_us["ring" if row == "ring" else "tree"][0]
        return self.net_hop_s * small_us / known_us + (hop_us - small_us) * US

    def _blocks_s(self, choice: Choice, size_bytes: int) -> float:
        """What the blocks of LL take to start in one node."""
        is_seen = choice.protocol == "LL" and choice.algorithm == "ring" and self.graph.nodes == 1
        if not is_seen or self.graph.path != "nvlink" or self.graph.minor >= _WORK_IN_ARGUMENTS:
            return 0.0
        each_us = _LL_BLOCK_US.get(self.graph.architecture, 0.0) * self.figures.start
        return each_us * blocks(self.graph, "ring", "LL", size_bytes) * US

    def _startup_s(self, choice: Choice) -> float:
        return self.figures.start * self._usual_startup_s(choice)

    def _usual_startup_s(self, choice: Choice) -> float:
        alone = self.paths.intra is None
        if not (alone or self.table_intra):
            return 0.0
        place = PROTOCOLS.index(choice.protocol)
        if choice.algorithm == "nvls" and self.graph.nodes == 1:
            return _BASE_US["tree"][place] * US  # its own table has none, and 1 x 8 H100 as much
        if choice.algorithm == "tree" or self.graph.path == "pcie" or self.graph.nodes > 1:
            return _BASE_US[choice.algorithm][place] * US
        return _STARTUP_US[self.graph.architecture][place] * US


@lru_cache(maxsize=256)
def _waits_for_network(cost: NcclCost) -> bool:
    """On a few nodes: more of them load the links of each alike."""
    choice, paths = cost.choice(_LARGE_BYTES), cost.paths
    few = replace(paths, nodes=min(paths.nodes, _FEW_NODES), weak=(), unlike=())
    outside = replace(few.changed(lambda link: link.widened(2)), intra=few.intra, switch=few.switch)
    inside = replace(few.changed(lambda link: link.widened(2)), inter=few.inter)
    with_inside, with_outside = (
        duration_ns(replace(cost, paths=faster).sent(choice, _LARGE_BYTES))
        for faster in (inside, outside)
    )
    return with_outside <= with_inside


class _Sent(NamedTuple):
    """How a message is sent: NCCL's choice, the bytes, and how they are cut."""

    choice: Choice
    size_bytes: int
    cuts: Cut


class _Search:
    """How messages of each size are sent, and what each costs; none is asked twice.

    Larger ones are searched by the smallest of each band, all but the first, as a band's others
    take more. None is priced whose bytes alone take longer than what is known: a ring has its steps
    over its slowest link, others at least a part of the bytes over the fastest.
    """

    def __init__(self, cost: NcclCost, operation: Operation) -> None:
        self._cost, self._operation = cost, operation
        self._searched: dict[int, _Sent] = {}  # how messages of each size are sent
        self._transfers: dict[_Sent, Transfer] = {}
        self._choices = known_choices(cost.graph, operation, cost.algorithms, cost.protocols)
        self._bands: dict[int, list[_Sent]] = {}  # ways of the smallest message of each band
        is_plain = operation in ("broadcast", "reduce")
        self._is_searched = not is_plain and cost.graph.minor > LAST_WITHOUT_TUNER
        turns = TURNS.get(operation, 1)  # a broadcast is not searched for
        paths, self._steps = cost.paths, turns * (cost.graph.ranks - 1)
        self._ring_ns_per_byte = NS_PER_S * self._steps / cost.graph.ranks / slowest_of(ring(paths))
        wider = max([1.0, *(outside for *_, outside in (*paths.unlike, *paths.weak))])
        links = [link for link in (paths.inter or paths.intra, paths.inter or paths.switch) if link]
        fastest = wider * max(link.bandwidth_bytes_per_s for link in links)
        other = _LEAST_PART * NS_PER_S / fastest
        is_ring = cost.algorithms == ("ring",)
        self._ns_per_byte = (
            self._ring_ns_per_byte if is_ring else min(other, self._ring_ns_per_byte)
        )

    def as_sent(self, size_bytes: int) -> _Sent:
        """NCCL's choice, but no slower than a larger message, or than half of it twice.

        Which message NCCL sends otherwise is not known exactly, nor is its tuner's table that of
        these links. Assumed: where a larger message takes less, a message goes as that one does, in
        its time; and where a message of half the bytes or more is sent in a faster way, it is sent
        in this way. NCCL 2.4 has thresholds, which are known.
        """
        if size_bytes not in self._searched:
            band = bisect_left(_BANDS_BYTES, size_bytes)
            ways = self._ways(band, size_bytes)
            self._searched[size_bytes] = self._fastest(band, ways) if self._is_searched else ways[0]
        return self._searched[size_bytes]

    def _fastest(self, band: int, ways: Sequence[_Sent]) -> _Sent:
        """A message of this band in one of its own ways, or as a larger one that takes less."""
        best = min(ways, key=self._taken_ns)
        best_ns = self._taken_ns(best)
        for later in range(band + 1, len(_BANDS_BYTES)):
            size_bytes, most_ns = _BANDS_BYTES[later - 1] + 1, best_ns + self._steps
            if self._ns_per_byte * size_bytes >= most_ns:
                break
            is_long = self._ring_ns_per_byte * size_bytes >= most_ns  # for a ring
            for way in self._of_band(later, size_bytes):
                if is_long and way.choice.algorithm == "ring":
                    continue
                if (taken_ns := self._taken_ns(way)) < best_ns:
                    best_ns, best = taken_ns, way
        return best

    def _of_band(self, band: int, size_bytes: int) -> list[_Sent]:
        if band not in self._bands:
            self._bands[band] = self._ways(band, size_bytes)
        return self._bands[band]

    def _ways(self, band: int, size_bytes: int) -> list[_Sent]:
        """A message as the tuner sends it, then as it sends those from half of the bytes on."""
        like_bytes = (*_BANDS_BYTES, size_bytes)[band]
        # a shard's LL is priced too low over nodes
        has_others = self._is_searched and self._operation == "all_reduce"
        smaller = _BANDS_BYTES[max(0, band - _OCTAVE) : band] if has_others else ()
        different: dict[tuple[str, str], Choice] = {}
        for choice in map(self._choice, (like_bytes, *smaller)):
            different.setdefault(choice[:2], choice)
        return [
            _Sent(choice, size_bytes, cut(self._cost.graph, *choice[:2], like_bytes))
            for choice in different.values()
        ]

    def transfer(self, sent: _Sent) -> Transfer:
        """What a message costs."""
        if sent not in self._transfers:
            choice, size_bytes, cuts = sent
            self._transfers[sent] = self._cost.sent(choice, size_bytes, self._operation, cuts)
        return self._transfers[sent]

    def _choice(self, size_bytes: int) -> Choice:
        if size_bytes not in self._choices:
            self._choices[size_bytes] = self._cost.tuned(size_bytes, self._operation)
        return self._choices[size_bytes]

    def _taken_ns(self, sent: _Sent) -> int:
        return duration_ns(self.transfer(sent))


@lru_cache(maxsize=256)
def _search(cost: NcclCost, operation: Operation) -> _Search:
    return _Search(cost, operation)
