"""The links of a cluster, and what collisions and weak links leave of their bandwidth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, inf
from typing import Literal, TypeVar

from ddpsim.cluster.algorithms.rings import ring
from ddpsim.cluster.nccl.environment import Environment, read_environment
from ddpsim.cluster.nccl.graph import Graph
from ddpsim.cluster.topology.host import Way, between_gpus, is_nvlink, slot_bytes_per_s
from ddpsim.cluster.topology.paths import Link, Paths
from ddpsim.cluster.transports import BY_TABLE, declared_us, nic_bytes_per_s, sockets_bytes_per_s
from ddpsim.errors import InputError
from ddpsim.provenance import Provenance
from ddpsim.scenario.cluster import Cluster
from ddpsim.scenario.device import SLOT_BYTES_PER_S
from ddpsim.scenario.links import USUAL_LATENCY_S, InterNode, IntraNode, LinkKind, near_a_part
from ddpsim.units import format_bytes_per_s, format_duration

Kind = Literal["intra_node", "inter_node"]
_Links = TypeVar("_Links", IntraNode, InterNode)
NicRate = Callable[[InterNode], float]
_LINK_GB_PER_S = {"volta": 20.0, "ampere": 20.0, "hopper": 20.6, "blackwell": 40.1}
_SLOTS_GB_PER_S = [rate / 1e9 for rate in SLOT_BYTES_PER_S.values()]


@dataclass(frozen=True)
class Wires:
    """The links of a cluster, with what is lost of the network between its nodes.

    `network_rate`: bytes per second that a node can send to others, all NICs together.
    `environment`: what NCCL's variables ask of these nodes. `way`: how GPUs of a node without
    NVLink reach each other; None: as the links say.
    """

    nodes: int
    gpus_per_node: int
    intra: IntraNode | None
    inter: InterNode | None
    network_rate: float
    environment: Environment
    way: Way | None = None
    weak: tuple[tuple[int, float, float], ...] = ()
    unlike: tuple[tuple[int, float, float], ...] = ()
    smaller: tuple[tuple[int, int], ...] = ()
    provenance: tuple[Provenance, ...] = ()

    @classmethod
    def of(cls, cluster: Cluster, seed: int = 0) -> Wires:
        """The wires that a cluster uses; raises InputError where one has no figures."""
        environment = environment_of(cluster)
        intra, way = inside(cluster)
        inter = cluster.link("inter_node")
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
        used_inside = intra if cluster.gpus_per_node > 1 else None
        used = inter if cluster.nodes > 1 and isinstance(inter, InterNode) else None
        changes = []
        if used and not environment.uses_ib and used.transport in BY_TABLE:
            used = _over_sockets(used)
            rate = format_bytes_per_s(nic_bytes_per_s(used, environment))
            words = f"NCCL_IB_DISABLE: TCP, {rate} a NIC, {format_duration(latency_s(used))} a hop"
            changes.append(Provenance("cluster.nccl_env", words, "assumed"))
        together, collisions = network_rate(used, cluster.nodes, seed) if used else (0.0, ())
        return cls(
            cluster.nodes,
            cluster.gpus_per_node,
            used_inside,
            used,
            together,
            environment,
            way if used_inside else None,
            _weak(cluster),
            unlike_nodes(cluster, rate_of),
            cluster.smaller_nodes,
            (*changes, *collisions),
        )

    def of_nccl(self) -> Wires:
        """With what NCCL's sockets leave of the lines between nodes; RDMA's are whole."""
        rate = rate_of(self.inter)
        if self.inter is None or self.sockets_rate >= rate:
            return self
        return replace(self, network_rate=self.network_rate * self.sockets_rate / rate)

    @property
    def sockets_rate(self) -> float:
        """What the sockets of one NIC carry, bytes per second; infinite without sockets."""
        return sockets_bytes_per_s(self.inter, self.environment) if self.inter else inf

    @property
    def ring(self) -> tuple[Link, ...]:
        """The link that leads to each rank from its left neighbour."""
        return ring(self.paths)

    @property
    def paths(self) -> Paths:
        """The paths over which algorithms may send."""
        switch = self.intra.switch_bandwidth_bytes_per_s if self.intra else None
        n = self.gpus_per_node
        summed = None if switch is None else Link(0.0, switch * n / (2 * (n - 1)))
        intra, inter = self.intra, self.inter
        within = Link(latency_s(intra, inter), rate_of(intra)) if intra else None
        between = Link(latency_s(inter), self.network_rate) if inter else None
        even = Paths(self.nodes, n, within, between, summed)
        return replace(even, weak=self.weak, unlike=self.unlike, smaller=self.smaller)

    @property
    def slowest(self) -> Kind:
        """The kind of link that sets a ring's pace."""
        if self.intra is None or self.inter is None:
            return "inter_node" if self.inter else "intra_node"
        is_inside = rate_of(self.intra) < self.network_rate
        return "intra_node" if is_inside else "inter_node"

    def graph(self, cluster: Cluster) -> Graph:
        """What NCCL sees: whole links, and slots of PCIe; of unlike nodes the slowest's.

        Source: nccl src/init.cc, which takes the least of all ranks. It does not see weak links.
        """
        architecture, environment = cluster.device.architecture, self.environment
        intra = _slowest(cluster, "intra_node", self.intra)
        inter = _slowest(cluster, "inter_node", self.inter)
        path, rate = "nvlink", 0.0
        if intra:
            rate = rate_of(intra) / 1e9
            path = "nvlink" if is_nvlink(intra) else "pcie"
            link = _LINK_GB_PER_S[architecture]
            if path == "nvlink":
                rate = ceil(rate / link) * link
            elif self.way:
                rate = slot_bytes_per_s(cluster) / 1e9
            else:
                rate = next((slot for slot in _SLOTS_GB_PER_S if slot >= rate), rate)
        return Graph(
            architecture,
            self.nodes,
            self.gpus_per_node,
            rate,
            max(1, int(inter.nics_per_node / inter.shared_by)) if inter else 0,
            rate_of(inter) / 1e9 if inter else 0.0,
            "nvlink" if path == "nvlink" else "pcie",
            fewer=cluster.nodes * cluster.gpus_per_node - cluster.world_size,
            reduces=bool(self.intra and self.intra.switch_bandwidth_bytes_per_s)
            and environment.uses_nvls
            and self._all_gpus_join(cluster),
            cpu_vendor=cluster.machine.cpu_vendor if cluster.machine else "intel",
            minor=cluster.nccl_minor,
            gpu_direct=inter is None or not inter.passes_through_hosts,
            ll128=inter is None or inter.transport != "slingshot",
            net_latency_us=declared_us(inter),
            min_channels=environment.min_channels,
            max_channels=environment.max_channels,
            buffer_bytes=environment.buffer_bytes,
            pats=environment.uses_pat,
            tree_threshold=environment.tree_threshold,
        )

    def _all_gpus_join(self, cluster: Cluster) -> bool:
        """Whether nodes are whole, as NVLS over nodes needs (assumed).

        On 10 x 2 of 10 x 8 H100 all-reduces go as rings do (NCCL 2.29), though NCCL's source
        leaves NVLS to two GPUs.
        """
        machine, host = cluster.machine, cluster.host
        whole = max(machine.gpus_per_node if machine else 0, (host and host.gpus) or 0)
        return not (self.smaller or (cluster.gpus_per_node < whole and self.nodes > 1))


def link_of(cluster: Cluster, key: LinkKind) -> IntraNode | InterNode | None:
    """A kind of link, with the rate that GPUs without NVLink get of their host."""
    return inside(cluster)[0] if key == "intra_node" else cluster.link(key)


def inside(cluster: Cluster) -> tuple[IntraNode | None, Way | None]:
    """The links inside a node as NCCL uses them, and its way through the host, if it takes one."""
    link = cluster.link("intra_node")
    if not isinstance(link, IntraNode):
        return None, None
    way = between_gpus(cluster, link, environment_of(cluster))
    return (way.as_link(link) if way else link), way


def _over_sockets(inter: InterNode) -> InterNode:
    """Reach a network without RDMA: its latency is TCP's then, whatever RDMA's was."""
    latency_s = USUAL_LATENCY_S["tcp"]
    changed = {"transport": "tcp", "latency_s": latency_s, "gpu_direct": None}
    return inter.model_copy(update=changed)


def environment_of(cluster: Cluster) -> Environment:
    """NCCL's variables on these nodes; raises InputError where one cannot be read."""
    try:
        return read_environment(cluster.nccl_variables, cluster.nccl_minor)
    except ValueError as error:
        raise InputError("cluster.nccl_env", str(error)) from None


def latency_s(link: IntraNode | InterNode, beside: InterNode | None = None) -> float:
    """A link's latency; raises InputError without one, for `beside` too if that has none."""
    if link.latency_s is None:
        key = "intra_node" if isinstance(link, IntraNode) else "inter_node"
        both = beside is not None and beside.latency_s is None
        missing = "its latency, nor inter_node's; state both" if both else "its latency; state it"
        raise InputError(f"cluster.{key}", f"no preset says {missing}")
    return link.latency_s


def _weak(cluster: Cluster) -> tuple[tuple[int, float, float], ...]:
    """Ranks whose links are weak, with what is left inside their node and from outside."""
    parts = sorted((cluster.weak_links or {}).items())
    return tuple((rank, part, part) for rank, part in parts if part != 1.0)


def unlike_nodes(cluster: Cluster, nic: NicRate) -> tuple[tuple[int, float, float], ...]:
    """Nodes whose links differ, with their bandwidths over the usual ones, inside and outside.

    `nic`: bytes per second of one NIC.
    """
    nodes = []
    for node in sorted(cluster.other_nodes or {}):
        inside, outside = (_ratio(cluster, node, key, nic) for key in ("intra_node", "inter_node"))
        if (inside, outside) != (1.0, 1.0):
            nodes.append((node, inside, outside))
    return tuple(nodes)


def _ratio(cluster: Cluster, node: int, key: Kind, nic: NicRate) -> float:
    """Bandwidth of a node's own links over the usual ones'."""
    link, usual = _node_link(cluster, node, key), link_of(cluster, key)
    if link is None or usual is None:
        return 1.0
    return _node_rate(link, cluster.nodes, nic) / _node_rate(usual, cluster.nodes, nic)


def _node_link(cluster: Cluster, node: int, key: Kind) -> IntraNode | InterNode | None:
    """A node's links, usual where it states none; of a machine's NICs those near its GPUs."""
    other = (cluster.other_nodes or {})[node]
    link, usual = getattr(other, key), link_of(cluster, key)
    stated = cluster.inter_node
    are_stated = stated is not None and "nics_per_node" in stated.written_fields
    if cluster.machine and other.gpus_per_node and not are_stated:
        usual = near_a_part(usual, other.gpus_per_node, cluster.gpus_per_node)
    if link is None or usual is None:
        return usual
    return usual.model_copy(update=link.written_fields)


def _slowest(cluster: Cluster, key: Kind, usual: _Links | None) -> _Links | None:
    """The slowest links of all nodes, a network's by its NICs together; None without `usual`."""
    if usual is None:
        return None
    links = [usual]
    for node in cluster.other_nodes or {}:
        link = _node_link(cluster, node, key)
        links += [link] if isinstance(link, type(usual)) else []
    return min(links, key=lambda link: getattr(link, "nics_per_node", 1) * rate_of(link))


def _node_rate(link: IntraNode | InterNode, nodes: int, nic: NicRate) -> float:
    """Bytes per second of a GPU's link, or of all NICs of a node, as far as they leave its leaf."""
    if not isinstance(link, InterNode):
        return rate_of(link)
    leaves_its_leaf = link.nodes_per_leaf is None or nodes > link.nodes_per_leaf
    return link.nics_per_node * nic(link) / (link.oversubscription if leaves_its_leaf else 1.0)


def rate_of(link: IntraNode | InterNode | None) -> float:
    """A link's bandwidth; Wires.of has checked that it has one."""
    return (link and link.bandwidth_bytes_per_s) or 0.0


def network_rate(inter: InterNode, nodes: int, seed: int) -> tuple[float, tuple[Provenance, ...]]:
    """What a node can send to all others at once, and how flows collided on the way."""
    nics = inter.nics_per_node
    rate = nics * rate_of(inter) / inter.shared_by
    per_leaf = inter.nodes_per_leaf or 1
    leaves = ceil(nodes / per_leaf)
    if inter.nodes_per_leaf is not None and leaves == 1:
        return rate, ()
    rate /= inter.oversubscription
    if inter.uplinks is None:
        return rate, ()
    worst, usual = _collisions(nics, inter.uplinks, leaves, seed)
    room = max(1.0, per_leaf * nics / inter.uplinks)  # NICs that an uplink can carry
    words = (
        f"{nics} flows hashed onto {inter.uplinks} uplinks of each of {leaves} leaves, each of "
        f"{room:g} NICs: the fullest carries {worst} with seed {seed} ({usual[0]} to {usual[1]} "
        "in 80 % of 1,000 seeds)"
    )
    entry = Provenance("cluster.inter_node.uplinks", words, "assumed")
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
