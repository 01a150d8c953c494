"""What a scenario says of links, or its machine's preset, to a Network: no log, no profile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from math import ceil
from typing import Literal

from ddpsim.cluster.collectives import AllReduceLogCost, CollectiveCost, LinkCost, ScheduledCost
from ddpsim.cluster.nccl_cost import NcclCost
from ddpsim.cluster.network import Network
from ddpsim.cluster.paths import Paths
from ddpsim.cluster.rings import ring
from ddpsim.cluster.topology import Link
from ddpsim.cluster.tuner import Graph
from ddpsim.errors import InputError
from ddpsim.provenance import Provenance, Trust, Uncertainty
from ddpsim.scenario.schema import Cluster, InterNode, IntraNode, Scenario
from ddpsim.units import format_bytes, format_bytes_per_s, format_duration

__all__ = [
    "Wires",
    "algorithm_choices",
    "broadcast_way",
    "links_are_stated",
    "network_from_links",
    "network_rate",
    "preset_source",
    "rate_of",
]

STATED_LINKS = Uncertainty(0.10, "assumed: links stated in the scenario, one alpha and beta")
PRESET_LINKS = Uncertainty(0.25, "assumed: the device's usual machine, not yours")
PRESET_PCIE = Uncertainty(0.90, "assumed: published rates through a host go from 1.5 to 26 GB/s")
PRESET_NETWORK = Uncertainty(0.90, "presets of devices against 8 published sweeps of nodes")
TCP_NETWORK = Uncertainty(0.90, "assumed: published TCP reaches 15 to 100 % of its NICs' rate")
_EASY_FOR_TCP = 1.25e9  # bytes per second, assumed: a flow or two fill 10 Gbit/s
CHOSEN_NETWORK = Uncertainty(
    0.37, "known NICs and NCCL's choice against 8 published sweeps of several nodes"
)

_BROADCASTS = {
    "gloo_ring": "whole down a binomial tree, as gloo sends it",
    "parameter_server": "half of an all-reduce",
    "gather": "as long as the gradients take to GPU 0",
}
_Kind = Literal["intra_node", "inter_node"]
_NVLINK_FROM = 30e9  # assumed: no PCIe slot of today lets a ring reach it
_NCCL_ALGORITHMS = ("ring", "tree", "nvls")
_LINK_GB_PER_S = {"volta": 20.0, "ampere": 20.0, "hopper": 20.6, "blackwell": 40.1}
_SLOTS_GB_PER_S = (12.0, 24.0, 48.0)  # PCIe Gen3 to Gen5 x16, as NCCL counts them


def network_from_links(scenario: Scenario) -> Network:
    """The collective costs of a cluster's links; raises InputError where none are known."""
    cluster = scenario.cluster
    wires = Wires.of(cluster, scenario.run.seed)
    cost = _cost(scenario, wires)
    return Network(
        cost=cost,
        uncertainty=_uncertainty(cluster, wires, chosen=isinstance(cost, NcclCost)),
        bottleneck=_bottleneck(cluster, wires, _slowest(wires, cost)),
        provenance=(
            *_link_provenance(cluster, asks_transport=isinstance(cost, NcclCost)),
            *wires.provenance,
        ),
    )


def broadcast_way(cost: CollectiveCost) -> str:
    """How a broadcast goes over links, or what it is of a log's all-reduces, in words."""
    if isinstance(cost, AllReduceLogCost):
        return "half of an all-reduce"
    algorithm = cost.algorithm if isinstance(cost, ScheduledCost) else "ring"
    return _BROADCASTS.get(algorithm, "once round a ring, at the pace of its slowest link")


def _slowest(wires: Wires, cost: CollectiveCost) -> _Kind:
    """The kind of link that sets the pace of large messages."""
    if wires.intra is None or wires.inter is None or not isinstance(cost, NcclCost):
        return wires.slowest
    return "inter_node" if cost.waits_for_network() else "intra_node"


def _uncertainty(cluster: Cluster, wires: Wires, *, chosen: bool) -> Uncertainty:
    """The widest of all links that the ranks use: which one sets the pace is doubtful too."""
    of_links = []
    if wires.intra:
        of_links.append(_inside_a_node(cluster, wires.intra))
    if wires.inter:
        of_links.append(_between_nodes(cluster, wires.inter, chosen=chosen))
    return max(of_links, key=lambda uncertainty: uncertainty.sigma)


def _inside_a_node(cluster: Cluster, intra: IntraNode) -> Uncertainty:
    if cluster.intra_node is not None:
        return STATED_LINKS
    through_any_host = intra.path == "pcie" and cluster.machine is None
    return PRESET_PCIE if through_any_host else PRESET_LINKS


def _between_nodes(cluster: Cluster, inter: InterNode, *, chosen: bool) -> Uncertainty:
    """Of a network; NCCL's choice, if it has one, is as doubtful as the links."""
    stated = cluster.inter_node is not None
    if chosen and cluster.algorithm == "auto":
        known = stated or cluster.machine is not None
        if known and inter.transport == "tcp" and rate_of(inter) > _EASY_FOR_TCP:
            return TCP_NETWORK
        return CHOSEN_NETWORK if known else PRESET_NETWORK
    return STATED_LINKS if stated else PRESET_NETWORK


def links_are_stated(cluster: Cluster) -> bool:
    """Whether the scenario itself gives every kind of link that its ranks use."""
    intra_given = cluster.intra_node is not None or cluster.gpus_per_node == 1
    return intra_given and (cluster.inter_node is not None or cluster.nodes == 1)


def _cost(scenario: Scenario, wires: Wires) -> CollectiveCost:
    cluster, algorithm = scenario.cluster, scenario.cluster.algorithm
    if scenario.ddp.backend == "nccl" and algorithm in ("auto", *_NCCL_ALGORITHMS):
        return _nccl_cost(cluster, wires)
    if algorithm == "ring":
        return LinkCost(wires.ring, cluster.world_size)
    chosen = {"auto": "gloo_ring", "data_parallel": "gather"}.get(algorithm, algorithm)
    return ScheduledCost(chosen, replace(wires.paths, switch=None, servers=cluster.servers or 1))


def _nccl_cost(cluster: Cluster, wires: Wires) -> NcclCost:
    named = () if cluster.algorithm == "auto" else (cluster.algorithm,)
    protocols = () if cluster.protocol == "auto" else (cluster.protocol,)
    inter = wires.inter
    cost = NcclCost(
        wires.graph(cluster),
        wires.paths,
        table_intra=not cluster.states_latency("intra_node"),
        table_inter=not cluster.states_latency("inter_node"),
        net_hop_s=None if inter is None or inter.transport == "rdma" else _latency_s(inter),
        algorithms=named,
        protocols=protocols,
    )
    if not _is_to_be_had(cost):
        raise _refusal(cluster, is_protocol=_is_to_be_had(replace(cost, protocols=())))
    return cost


def _is_to_be_had(cost: NcclCost) -> bool:
    try:
        cost.choice(1)
    except ValueError:
        return False
    return True


def _refusal(cluster: Cluster, *, is_protocol: bool) -> InputError:
    """Of NCCL's algorithm on this machine, or of its protocol alone."""
    if not is_protocol:
        return InputError(
            "cluster.algorithm",
            f"{cluster.algorithm} is not to be had on this machine: nvls needs a switch that sums "
            "(intra_node.switch_bandwidth)",
        )
    if cluster.algorithm == "nvls":
        return InputError("cluster.protocol", "nvls is sent with Simple alone; write that, or auto")
    return InputError(
        "cluster.protocol",
        f"{cluster.protocol} is not to be had on this machine: LL128 needs NVLink between the GPUs "
        "of a node (intra_node.path); write LL, Simple or auto",
    )


@dataclass(frozen=True)
class Wires:
    """The links of a cluster, with what is lost of the network between its nodes.

    `network_rate`: bytes per second that a node can send to others, all NICs together.
    """

    nodes: int
    gpus_per_node: int
    intra: IntraNode | None
    inter: InterNode | None
    network_rate: float
    weak: tuple[tuple[int, float, float], ...] = ()
    unlike: tuple[tuple[int, float, float], ...] = ()
    provenance: tuple[Provenance, ...] = ()

    @classmethod
    def of(cls, cluster: Cluster, seed: int = 0) -> Wires:
        """Those that a cluster uses; raises InputError where one is not known."""
        intra, inter = cluster.link("intra_node"), cluster.link("inter_node")
        if cluster.gpus_per_node > 1 and intra is None:
            raise InputError(
                "cluster", f"{cluster.device.name} has no preset links; state intra_node"
            )
        if cluster.nodes > 1 and inter is None:
            raise InputError(
                "cluster", f"{cluster.device.name} has no preset network; state inter_node"
            )
        for key, link in (("intra_node", intra), ("inter_node", inter)):
            if link is not None and link.bandwidth_bytes_per_s is None:
                raise InputError(f"cluster.{key}", "no preset says its bandwidth; state it")
        _check_transport(cluster)
        used = inter if cluster.nodes > 1 and isinstance(inter, InterNode) else None
        rate, collisions = network_rate(used, cluster.nodes, seed) if used else (0.0, ())
        return cls(
            cluster.nodes,
            cluster.gpus_per_node,
            intra if cluster.gpus_per_node > 1 and isinstance(intra, IntraNode) else None,
            used,
            rate,
            _weak(cluster),
            _unlike(cluster),
            collisions,
        )

    @property
    def ring(self) -> tuple[Link, ...]:
        """The link that leads to each rank from its left neighbour."""
        return ring(self.paths)

    @property
    def paths(self) -> Paths:
        """Where algorithms may send."""
        switch = self.intra.switch_bandwidth_bytes_per_s if self.intra else None
        n = self.gpus_per_node
        summed = None if switch is None else Link(0.0, switch * n / (2 * (n - 1)))
        links = (self._within, self._between, summed)
        return Paths(self.nodes, n, *links, weak=self.weak, unlike=self.unlike)

    @property
    def slowest(self) -> _Kind:
        """The kind of link that sets a ring's pace."""
        if self.intra is None or self.inter is None:
            return "inter_node" if self.inter else "intra_node"
        is_inside = rate_of(self.intra) < self.network_rate
        return "intra_node" if is_inside else "inter_node"

    def graph(self, cluster: Cluster) -> Graph:
        """What NCCL sees: whole links, and slots of PCIe; of unlike nodes the slowest's.

        Source: nccl src/init.cc, which takes the least of all ranks. It does not see weak links.
        """
        architecture = cluster.device.architecture
        intra, inter = _slowest_inside(cluster, self.intra), _slowest_outside(cluster, self.inter)
        path, rate = "nvlink", 0.0
        if intra:
            rate = rate_of(intra) / 1e9
            path = intra.path or ("nvlink" if rate * 1e9 >= _NVLINK_FROM else "pcie")
            link = _LINK_GB_PER_S[architecture]
            if path == "nvlink":
                rate = ceil(rate / link) * link
            else:
                rate = next((slot for slot in _SLOTS_GB_PER_S if slot >= rate), rate)
        return Graph(
            architecture,
            self.nodes,
            self.gpus_per_node,
            rate,
            inter.nics_per_node if inter else 0,
            rate_of(inter) / 1e9 if inter else 0.0,
            "nvlink" if path == "nvlink" else "pcie",
            reduces=bool(self.intra and self.intra.switch_bandwidth_bytes_per_s),
            cpu_vendor=cluster.machine.cpu_vendor if cluster.machine else "intel",
        )

    @property
    def _within(self) -> Link | None:
        intra = self.intra
        return Link(_latency_s(intra, self.inter), rate_of(intra)) if intra else None

    @property
    def _between(self) -> Link | None:
        return Link(_latency_s(self.inter), self.network_rate) if self.inter else None


def _latency_s(link: IntraNode | InterNode, beside: InterNode | None = None) -> float:
    """Raises InputError where none is known; of the link `beside` too, so that both are stated."""
    if link.latency_s is None:
        key = "intra_node" if isinstance(link, IntraNode) else "inter_node"
        both = beside is not None and beside.latency_s is None
        missing = "its latency, nor inter_node's; state both" if both else "its latency; state it"
        raise InputError(f"cluster.{key}", f"no preset says {missing}")
    return link.latency_s


def _check_transport(cluster: Cluster) -> None:
    """Another transport than the preset's has another latency."""
    stated = cluster.inter_node
    if cluster.nodes == 1 or stated is None or stated.latency_s is not None:
        return
    preset = (cluster.machine and cluster.machine.inter_node) or cluster.device.inter_node
    usual = preset.transport if preset else "rdma"
    if "transport" in stated.model_fields_set and stated.transport not in (usual, "rdma"):
        raise InputError(
            "cluster.inter_node.transport",
            f"no preset says the latency of {stated.transport} here; state inter_node.latency "
            "(presets assume 30 to 50 us a hop over tcp)",
        )


def _weak(cluster: Cluster) -> tuple[tuple[int, float, float], ...]:
    """Ranks whose links are weak, with what is left inside their node and from outside."""
    parts = sorted((cluster.weak_links or {}).items())
    return tuple((rank, part, part) for rank, part in parts if part != 1.0)


def _unlike(cluster: Cluster) -> tuple[tuple[int, float, float], ...]:
    """Nodes whose links differ, with their bandwidths over the usual ones, inside and outside."""
    found = []
    for node in sorted(cluster.other_nodes or {}):
        inside, outside = (_ratio(cluster, node, key) for key in ("intra_node", "inter_node"))
        if (inside, outside) != (1.0, 1.0):
            found.append((node, inside, outside))
    return tuple(found)


def _ratio(cluster: Cluster, node: int, key: _Kind) -> float:
    """Bandwidth of a node's own links over the usual ones'."""
    own, usual = _own(cluster, node, key), cluster.link(key)
    if own is None or usual is None:
        return 1.0
    return _node_rate(own, cluster.nodes) / _node_rate(usual, cluster.nodes)


def _own(cluster: Cluster, node: int, key: _Kind) -> IntraNode | InterNode | None:
    """A node's links; what they do not say is as usual."""
    own, usual = getattr((cluster.other_nodes or {})[node], key), cluster.link(key)
    if own is None or usual is None:
        return usual
    return usual.model_copy(update=own.said)


def _slowest_inside(cluster: Cluster, usual: IntraNode | None) -> IntraNode | None:
    """Of all nodes' links inside; None where a node has one GPU."""
    others = [_own(cluster, node, "intra_node") for node in cluster.other_nodes or {}]
    known = [usual, *(own for own in others if isinstance(own, IntraNode))] if usual else []
    return min((link for link in known if link), key=rate_of, default=None)


def _slowest_outside(cluster: Cluster, usual: InterNode | None) -> InterNode | None:
    """Of all nodes' networks, by their NICs together; None where there is one node."""
    others = [_own(cluster, node, "inter_node") for node in cluster.other_nodes or {}]
    known = [usual, *(own for own in others if isinstance(own, InterNode))] if usual else []
    together = (link for link in known if link)
    return min(together, key=lambda link: link.nics_per_node * rate_of(link), default=None)


def _node_rate(link: IntraNode | InterNode, nodes: int) -> float:
    """Bytes per second of a GPU's link, or of all NICs of a node, as far as they leave its leaf."""
    if not isinstance(link, InterNode):
        return rate_of(link)
    leaves_its_leaf = link.nodes_per_leaf is None or nodes > link.nodes_per_leaf
    return link.nics_per_node * rate_of(link) / (link.oversubscription if leaves_its_leaf else 1.0)


def rate_of(link: IntraNode | InterNode | None) -> float:
    """Its bandwidth; Wires.of has seen that there is one."""
    return (link and link.bandwidth_bytes_per_s) or 0.0


def network_rate(inter: InterNode, nodes: int, seed: int) -> tuple[float, tuple[Provenance, ...]]:
    """What a node can send to all others at once, and how flows collided on the way."""
    nics = inter.nics_per_node
    rate = nics * rate_of(inter)
    per_leaf = inter.nodes_per_leaf or 1
    leaves = ceil(nodes / per_leaf)
    if inter.nodes_per_leaf is not None and leaves == 1:
        return rate, ()
    rate /= inter.oversubscription
    if inter.uplinks is None:
        return rate, ()
    worst, usual = _collisions(nics, inter.uplinks, leaves, seed)
    room = max(1.0, per_leaf * nics / inter.uplinks)  # NICs that an uplink can carry
    said = (
        f"{nics} flows hashed onto {inter.uplinks} uplinks of each of {leaves} leaves, each of "
        f"{room:g} NICs: the fullest carries {worst} with seed {seed} ({usual[0]} to {usual[1]} "
        "in 80 % of 1,000 seeds)"
    )
    entry = Provenance("cluster.inter_node.uplinks", said, "assumed")
    return rate * min(1.0, room / worst), (entry,)


@lru_cache(maxsize=64)
def _collisions(flows: int, uplinks: int, leaves: int, seed: int) -> tuple[int, tuple[int, int]]:
    """Flows on the fullest uplink of any leaf for this seed, and its 10th and 90th percentile."""
    import numpy as np  # noqa: PLC0415 -- a quarter of the start-up time, and most runs need it not

    def fullest(draw: np.random.Generator) -> int:
        paths = draw.integers(uplinks, size=(leaves, flows))
        return max(int(np.bincount(row).max()) for row in paths)

    drawn = fullest(np.random.default_rng([seed, flows, uplinks]))
    many = sorted(fullest(np.random.default_rng([i, flows, uplinks])) for i in range(1000))
    return drawn, (many[100], many[899])


def _bottleneck(cluster: Cluster, wires: Wires, kind: _Kind) -> str:
    ring = wires.ring
    slowest = min(ring, key=lambda link: link.bandwidth_bytes_per_s)
    rate = format_bytes_per_s(slowest.bandwidth_bytes_per_s)
    if cluster.algorithm == "data_parallel":
        return f"GPU 0's link ({rate}), which all parameters leave and all gradients enter by"
    if cluster.algorithm == "parameter_server":
        servers = cluster.servers or 1
        whose = "the parameter server's link" if servers == 1 else f"the {servers} servers' links"
        return f"{whose} ({rate} each), which {cluster.world_size} ranks share"
    if wires.weak or wires.unlike:
        rank = min(range(len(ring)), key=lambda i: ring[i].bandwidth_bytes_per_s)
        if rank in (cluster.weak_links or {}):
            return f"the weak link to rank {rank} ({rate})"
        if (node := _slower_node(wires, rank)) is not None:
            return f"the links of node {node}, unlike the others' ({rate})"
    inside = kind == "intra_node"
    link: IntraNode | InterNode | None = wires.intra if inside else wires.inter
    latency = ""
    if link and link.latency_s is not None and cluster.states_latency(kind):
        latency = f", {format_duration(link.latency_s)} a hop"
    if inside:
        return f"the intra-node links ({format_bytes_per_s(rate_of(link))} a GPU{latency})"
    return f"the inter-node network ({format_bytes_per_s(wires.network_rate)} a node{latency})"


def _slower_node(wires: Wires, rank: int) -> int | None:
    """Of the nodes of a rank and of its left neighbour the one with slower links than usual."""
    g = wires.gpus_per_node
    here, left = rank // g, (rank - 1) % (wires.nodes * g) // g
    of_kind = 1 if here == left else 2
    slower = {node[0]: node[of_kind] for node in wires.unlike if node[of_kind] < 1}
    return min({here, left} & set(slower), key=lambda node: slower[node], default=None)


def _link_provenance(cluster: Cluster, *, asks_transport: bool) -> tuple[Provenance, ...]:
    entries = []
    for key in cluster.links_used:
        stated = getattr(cluster, key)
        link = cluster.link(key)
        if link is None:
            continue
        figures = _figures(link, cluster.states_latency(key))
        source = preset_source(cluster, key)
        if stated:
            beside = f" beside machine {cluster.machine.name}" if cluster.machine else ""
            source = f"stated in the scenario{beside}"
            figures += _without_switch(cluster, link)
            if asks_transport:
                figures += _transport_taken(cluster, stated)
        trust: Trust = "stated" if stated else "assumed"
        entries.append(Provenance(f"cluster.{key}", f"{figures}; {source}", trust))
    return tuple(entries)


def _without_switch(cluster: Cluster, link: IntraNode | InterNode) -> str:
    """Where the links that a scenario states leave out what the device's usual machine has."""
    usual = cluster.device.intra_node
    if isinstance(link, InterNode) or link.switch_bandwidth_bytes_per_s or usual is None:
        return ""
    has_switch = usual.switch_bandwidth_bytes_per_s is not None
    return ", no NVLS without switch_bandwidth" if has_switch else ""


def _transport_taken(cluster: Cluster, stated: IntraNode | InterNode) -> str:
    """Where a network is stated, but not how NCCL reaches it; a named machine has its own way."""
    if isinstance(stated, IntraNode) or "transport" in stated.model_fields_set or cluster.machine:
        return ""
    return f", taken as {stated.transport.upper()}"


def _figures(link: IntraNode | InterNode, states_latency: bool) -> str:  # noqa: FBT001 -- a fact
    """Bandwidth, NICs and what takes from them, and the latency where it counts."""
    said = [format_bytes_per_s(rate_of(link))]
    if isinstance(link, InterNode):
        said[0] = f"{link.nics_per_node} x {said[0]}" if link.nics_per_node > 1 else said[0]
        if link.oversubscription > 1:
            said.append(f"oversubscribed {link.oversubscription:g} : 1")
    elif link.switch_bandwidth_bytes_per_s:
        said.append(f"{format_bytes_per_s(link.switch_bandwidth_bytes_per_s)} with NVLS")
    if link.latency_s is not None and (states_latency or not _has_table(link)):
        said.append(format_duration(link.latency_s))
    return ", ".join(said)


def _has_table(link: IntraNode | InterNode) -> bool:
    """Whether NCCL's own latencies take the place of the preset's."""
    return not isinstance(link, InterNode) or link.transport == "rdma"


def preset_source(cluster: Cluster, key: str) -> str:
    """Where the figures of links come from that a scenario does not state."""
    machine = cluster.machine
    if machine and getattr(machine, key):
        return f"preset {machine.name}: {machine.sources.get(key, 'no source given')}"
    return f"preset {cluster.device.name}: {cluster.device.sources.get(key, 'no source given')}"


def algorithm_choices(cost: NcclCost, sizes_bytes: Iterable[int]) -> str:
    """What NCCL takes for these sizes, in words: "ring LL to 256 KiB, tree Simple above"."""
    chosen = [(size, cost.choice(size)) for size in sorted(sizes_bytes)]
    runs = [
        (name, [size for size, _ in group])
        for name, group in groupby(chosen, key=lambda c: f"{c[1].algorithm} {c[1].protocol}")
    ]
    counts = Counter(f"{choice.algorithm} {choice.protocol}" for _, choice in chosen)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{name} to {format_bytes(sizes[-1])}" for name, sizes in runs)
