"""What an NCCL collective costs on a machine that nobody measured: its tuner's choice, priced.

The choice is NCCL's (`ddpsim.cluster.nccl.tuner`). The bytes go over links as the algorithm sends
them (`ddpsim.cluster.algorithms`). Latencies are NCCL's own table plus what published sweeps show
beyond it. All of it is assumed of a machine like the preset's; a log or a profile comes first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf

from ddpsim.cluster.algorithms.rings import ring, ring_hops_ns
from ddpsim.cluster.cost import slowest_of
from ddpsim.cluster.nccl.chunks import cut
from ddpsim.cluster.nccl.tables import NEWEST, PROTOCOLS, tables
from ddpsim.cluster.nccl.tuner import Choice, Graph, choose, most_ll_gb_per_s
from ddpsim.cluster.topology.link import Link
from ddpsim.cluster.topology.paths import Paths
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
from ddpsim.units import MIB, to_ns

__all__ = ["NcclCost"]

US = 1e-6
_LARGE_BYTES = 32 * MIB  # a bucket of torch's, more or less
_FEW_NODES = 4
# flags beside the data: LL sends 4 bytes of them with 4 of data, LL128 8 with 120
_PAYLOAD = {"LL": 0.5, "LL128": 0.92, "Simple": 1.0}
# of rings in one node, before the first step: what the steps' own latency leaves of sweeps
# (A100: SuperBench 1 x 8, 4 KiB to 64 MiB; V100: ABCI 1 x 4; H100: dgxc-benchmarking 1 x 8)
_STARTUP_US: dict[str, tuple[float, float, float]] = {
    "volta": (6.6, 30.0, 40.0),
    "ampere": (6.6, 60.0, 80.0),
    "hopper": (6.6, 14.0, 20.0),
    "blackwell": (6.6, 14.0, 20.0),
}
# of LL: 8 ranks take 33.7 us, each rank 4 more (A100, nccl-tests issue 123)
_MEASURED_LL_HOP_US = {"ampere": 2.0}
# latencies are the hardware's: of the newest tables, whichever version chooses
_HOP_US, _BASE_US = tables(NEWEST).hop_us, tables(NEWEST).base_us


@dataclass(frozen=True)
class NcclCost:
    """Collectives as NCCL would choose and send them, on the cluster's ranks.

    `paths` holds bandwidths of bytes on the wire, of which a protocol's flags take their part, and,
    where the scenario states it (not `table_intra`), the latency of one step inside a node; else it
    is NCCL's own, by protocol. `net_hop_s`: what a small message takes to another node in a tree,
    5 us in NCCL's table, or where the scenario states it (`is_ring_step`) in a ring; None: as the
    table says.
    `message_s`: how long a NIC is busy with a message beside its bytes. `algorithms` and
    `protocols` restrict the choice, as NCCL_ALGO and NCCL_PROTO do; `algorithms` that of
    all-reduces alone, as of the others rings are priced.
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
    time_factor: float = 1.0

    def choice(self, size_bytes: int, operation: Operation = "all_reduce") -> Choice:
        """What NCCL takes for a message; for a broadcast it knows no other than a ring."""
        if operation == "all_reduce":
            return choose(self.graph, size_bytes, self.algorithms, self.protocols)
        like: Operation = "all_reduce" if operation in ("broadcast", "reduce") else operation
        return choose(self.graph, size_bytes, ("ring",), self.protocols, like)

    def transfer(self, operation: Operation, size_bytes: int) -> Transfer:
        """See CollectiveCost."""
        return _transfer(self, operation, size_bytes)

    def stretched(self, factor: float) -> NcclCost:
        """See CollectiveCost."""
        return replace(self, time_factor=self.time_factor * factor)

    def sent(
        self, choice: Choice, size_bytes: int, operation: Operation = "all_reduce"
    ) -> Transfer:
        """What a choice costs."""
        priced = self._priced(choice, size_bytes).stretched(self.time_factor)
        start_ns = to_ns(self._startup_s(choice) * self.time_factor)
        if choice.algorithm == "ring":
            turns = TURNS[operation]
            hops_ns = ring_hops_ns(priced, size_bytes)
            steps = turns * (priced.ranks - 1)
            return RingTransfer(steps, *hops_ns, start_ns=start_ns, turns=turns)
        return ScheduledTransfer(choice.algorithm, priced, size_bytes, start_ns=start_ns)

    def broadcast(self, choice: Choice, size_bytes: int) -> WholeTransfer:
        """Half the latency of the ring that reduces, then the message once over its slowest link.

        Source: nccl-tests' PERFORMANCE.md, where a broadcast's bus bandwidth is size over time.
        Assumes: chunks that are small beside the message, and so fill the ring in the hops' time.
        """
        priced = self._priced(choice, size_bytes).stretched(self.time_factor)
        latency_ns = round(duration_ns(self.sent(choice, 0)) / 2)
        return WholeTransfer(latency_ns, to_ns(size_bytes / slowest_of(ring(priced))))

    def waits_for_network(self) -> bool:
        """Whether faster links between nodes would shorten large messages more than those inside.

        So that it holds of trees and of NVLS, which load the two in other proportions than a ring.
        """
        return _waits_for_network(self)

    def _priced(self, choice: Choice, size_bytes: int) -> Paths:
        """The paths with a protocol's payload, and its latencies where the tables say them.

        A link carries a protocol's flags too.
        """
        intra, inter, switch = self.paths.intra, self.paths.inter, self.paths.switch
        cuts = cut(self.graph, choice.algorithm, choice.protocol, size_bytes)
        payload = _PAYLOAD[choice.protocol]
        if intra:
            latency_s = self._hop_s(choice) if self.table_intra else intra.latency_s
            intra = Link(latency_s, payload * intra.bandwidth_bytes_per_s)
        if switch:
            switch = replace(switch, latency_s=self._hop_s(choice))
        if inter:
            busy_s = self.message_s * cuts.messages
            # a hop's latency has one message's time on the NIC in it already
            latency_s = max(0.0, self._net_s(choice) - min(busy_s, self.message_s))
            inter = Link(latency_s, payload * inter.bandwidth_bytes_per_s, busy_s)
        most = most_ll_gb_per_s(self.graph) * 1e9 if choice.protocol == "LL" else inf
        chunk = None if choice.algorithm == "ring" else cuts.chunk_bytes
        return replace(
            self.paths, intra=intra, inter=inter, switch=switch, most=most, chunk_bytes=chunk
        )

    def _hop_s(self, choice: Choice) -> float:
        place = PROTOCOLS.index(choice.protocol)
        hop_us = _HOP_US[self.graph.path][choice.algorithm][place]
        if (choice.algorithm, choice.protocol) == ("ring", "LL"):
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

    def _startup_s(self, choice: Choice) -> float:
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
    intra, inter, switch = (
        link and link.widened(2) for link in (paths.intra, paths.inter, paths.switch)
    )
    inside, outside = replace(few, intra=intra, switch=switch), replace(few, inter=inter)
    with_inside, with_outside = (
        duration_ns(replace(cost, paths=faster).sent(choice, _LARGE_BYTES))
        for faster in (inside, outside)
    )
    return with_outside <= with_inside


@lru_cache(maxsize=4096)
def _transfer(cost: NcclCost, operation: Operation, size_bytes: int) -> Transfer:
    """A step asks for the same sizes again and again."""
    choice = cost.choice(size_bytes, operation)
    if operation in ("broadcast", "reduce"):  # one backwards is the other (src/device/reduce.h)
        return cost.broadcast(choice, size_bytes)
    return cost.sent(choice, size_bytes, operation)
