"""Links in words: their figures, where these come from, and which of them is the bottleneck."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import groupby
from math import inf

from ddpsim.cluster.nccl.cost import NcclCost
from ddpsim.cluster.nccl.environment import Environment
from ddpsim.cluster.topology.host import Way, board_of, slot_bytes_per_s
from ddpsim.cluster.transfers import Operation
from ddpsim.cluster.transports import BY_TABLE, opened_by_nccl, sockets_bytes_per_s
from ddpsim.cluster.wires import Kind, Wires, inside, link_of, rate_of
from ddpsim.provenance import Provenance, Trust
from ddpsim.scenario.cluster import Cluster
from ddpsim.scenario.links import InterNode, IntraNode
from ddpsim.units import format_bytes, format_bytes_per_s, format_duration

WAYS = {
    "NVL": "over an NVLink bridge",
    "PXB": "peer to peer under a PCIe switch",
    "P2P": "peer to peer through the host",
    "SHM": "through host memory (SHM)",
    "NET": "through the node's own network (no SHM)",
}
_HOST_NOT_USED = "not used: NVLink, or intra_node's bandwidth, says how GPUs are joined"
NOT_USED = "not used: all ranks are in one node"


def bottleneck(cluster: Cluster, wires: Wires, kind: Kind) -> str:
    """The link that limits large messages, in words."""
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
    return _usual_limit(cluster, wires, kind)


def _usual_limit(cluster: Cluster, wires: Wires, kind: Kind) -> str:
    """The links of a kind, or what limits GPUs that meet in the host."""
    is_inside = kind == "intra_node"
    link: IntraNode | InterNode | None = wires.intra if is_inside else wires.inter
    latency = ""
    if link and link.latency_s is not None and cluster.states_latency(kind):
        latency = f", {format_duration(link.latency_s)} a hop"
    if isinstance(link, InterNode):
        rate = format_bytes_per_s(wires.network_rate * link.shared_by)
        return f"the inter-node network ({rate} a node{latency})"
    what = wires.way.limit if wires.way else "the intra-node links"
    return f"{what} ({format_bytes_per_s(rate_of(link))} a GPU{latency})"


def _slower_node(wires: Wires, rank: int) -> int | None:
    """The slower node, of a rank's and its left neighbour's, if its links are slower than usual."""
    paths = wires.paths
    here, left = paths.node_of(rank), paths.node_of((rank - 1) % paths.ranks)
    of_kind = 1 if here == left else 2
    slower = {node[0]: node[of_kind] for node in wires.unlike if node[of_kind] < 1}
    return min({here, left} & set(slower), key=lambda node: slower[node], default=None)


def sockets_in_words(inter: InterNode, environment: Environment) -> str:
    """How many TCP connections NCCL opens for a NIC, and what they carry."""
    opened = opened_by_nccl(inter, environment)
    count = f"{opened} TCP connection{'s' * (opened > 1)}"
    if limit := inter.flow_bandwidth_bytes_per_s:
        count += f" of at most {format_bytes_per_s(limit)}"
    served = f"{environment.threads} threads a channel" if environment.threads else "one thread"
    together = format_bytes_per_s(sockets_bytes_per_s(inter, environment))
    return f"{count}, served by {served}: {together} a NIC at most"


def rate_is_stated(cluster: Cluster, key: Kind) -> bool:
    """Whether the scenario itself says how fast such a link is."""
    stated = getattr(cluster, key)
    return stated is not None and stated.bandwidth_bytes_per_s is not None


def link_provenance(
    cluster: Cluster,
    *,
    asks_transport: bool,
    sockets_rate: float = inf,
    network_first: bool = False,
) -> tuple[Provenance, ...]:
    """The figures of each kind of link, and where they come from.

    `sockets_rate`: what NCCL's sockets carry of one NIC's line, bytes per second. `network_first`:
    that between nodes is told before the links of a node.
    """
    entries = []
    is_inside = "intra_node" in cluster.links_used
    way = inside(cluster)[1] if is_inside else None
    if cluster.host and is_inside and not way and cluster.host.model_fields_set - {"gpus"}:
        entries.append(Provenance("cluster.host", _HOST_NOT_USED, "stated"))
    for key in reversed(cluster.links_used) if network_first else cluster.links_used:
        stated = getattr(cluster, key)
        link = link_of(cluster, key)
        if link is None:
            continue
        if key == "intra_node" and way:
            entries.append(_through_the_host(cluster, way))
            continue
        figures = _figures(link, cluster.states_latency(key), sockets_rate)
        figures += _near_a_part(cluster, link)
        source = preset_source(cluster, key)
        if stated:
            beside = f" beside machine {cluster.machine.name}" if cluster.machine else ""
            is_whole = rate_is_stated(cluster, key)
            source = f"stated in the scenario{beside}" if is_whole else f"{source}, partly stated"
            figures += _without_switch(cluster, link)
            if asks_transport:
                figures += _transport_taken(cluster, stated)
        trust: Trust = "stated" if rate_is_stated(cluster, key) else "assumed"
        entries.append(Provenance(f"cluster.{key}", f"{figures}; {source}", trust))
    if cluster.inter_node and cluster.nodes == 1:
        entries.append(Provenance("cluster.inter_node", NOT_USED, "stated"))
    return tuple(entries)


def _through_the_host(cluster: Cluster, way: Way) -> Provenance:
    """How NCCL joins GPUs without NVLink, and what public boxes get so."""
    rate, factor = way.bytes_per_s, way.uncertainty.factor
    most = inf if way.transport == "NVL" else slot_bytes_per_s(cluster)
    low, high = (format_bytes_per_s(each) for each in (rate / factor, min(most, rate * factor)))
    words = f"{format_bytes_per_s(rate)} a GPU {WAYS[way.transport]}; limit: {way.limit}"
    board = f"{board_of(cluster)} with PCIe {cluster.device.pcie}"
    source = f"{words}; public boxes as a {board}, 80 % of them {low} to {high}"
    return Provenance("cluster.host", source, "published")


def _near_a_part(cluster: Cluster, link: IntraNode | InterNode) -> str:
    """In words, that a part of a machine's GPUs leaves its other NICs out; else empty."""
    machine, stated = cluster.machine, cluster.inter_node
    network = machine.inter_node if machine else None
    if machine is None or network is None or not isinstance(link, InterNode):
        return ""
    is_stated = stated and "nics_per_node" in stated.written_fields
    if is_stated or link.nics_per_node == network.nics_per_node:
        return ""
    gpus = f"{cluster.gpus_per_node} of {machine.gpus_per_node} GPUs"
    return f", the nearest of {network.nics_per_node} NICs to {gpus}"


def _without_switch(cluster: Cluster, link: IntraNode | InterNode) -> str:
    """Say that stated links leave out the switch that the device's usual machine has."""
    usual = cluster.device.intra_node
    if isinstance(link, InterNode) or link.switch_bandwidth_bytes_per_s or usual is None:
        return ""
    has_switch = usual.switch_bandwidth_bytes_per_s is not None
    return ", no NVLS without switch_bandwidth" if has_switch else ""


def _transport_taken(cluster: Cluster, stated: IntraNode | InterNode) -> str:
    """Say how NCCL is taken to reach a stated network; a named machine has its own way."""
    if isinstance(stated, IntraNode) or "transport" in stated.model_fields_set or cluster.machine:
        return ""
    link = cluster.link("inter_node")
    return f", taken as {link.transport.upper()}" if isinstance(link, InterNode) else ""


def _figures(
    link: IntraNode | InterNode,
    states_latency: bool,  # noqa: FBT001 -- a fact
    sockets_rate: float,
) -> str:
    """Bandwidth, NICs and what takes from them, and the latency where it counts."""
    words = [format_bytes_per_s(rate_of(link))]
    if isinstance(link, InterNode):
        words[0] = f"{link.nics_per_node} x {words[0]}" if link.nics_per_node > 1 else words[0]
        if sockets_rate < rate_of(link):
            words.append(f"{format_bytes_per_s(sockets_rate)} of it by NCCL's sockets")
        if link.oversubscription > 1:
            words.append(f"oversubscribed {link.oversubscription:g} : 1")
        if link.passes_through_hosts:
            words.append("no GPUDirect: through host memory")
    elif link.switch_bandwidth_bytes_per_s:
        words.append(f"{format_bytes_per_s(link.switch_bandwidth_bytes_per_s)} with NVLS")
    if link.latency_s is not None and (states_latency or not _has_table(link)):
        words.append(format_duration(link.latency_s))
    return ", ".join(words)


def _has_table(link: IntraNode | InterNode) -> bool:
    """Whether NCCL's own latencies take the place of the preset's."""
    return not isinstance(link, InterNode) or link.transport in BY_TABLE


def preset_source(cluster: Cluster, key: str) -> str:
    """Name the source of links that a scenario does not state."""
    machine = cluster.machine
    if machine and getattr(machine, key):
        return f"preset {machine.name}: {machine.sources.get(key, 'no source given')}"
    return f"preset {cluster.device.name}: {cluster.device.sources.get(key, 'no source given')}"


def algorithm_choices(
    cost: NcclCost, sizes_bytes: Iterable[int], operation: Operation = "all_reduce"
) -> str:
    """What NCCL takes for these sizes, in words: "ring LL to 256 KiB, tree Simple above"."""
    chosen = [(size, cost.choice(size, operation)) for size in sorted(sizes_bytes)]
    runs = [
        (name, [size for size, _ in group])
        for name, group in groupby(chosen, key=lambda c: f"{c[1].algorithm} {c[1].protocol}")
    ]
    counts = Counter(f"{choice.algorithm} {choice.protocol}" for _, choice in chosen)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{name} to {format_bytes(sizes[-1])}" for name, sizes in runs)
