"""A cluster in words and lines: what is joined to what, how fast, and who says so."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, isinf
from textwrap import wrap

from ddpsim.cluster.layouts import joined, with_replicas
from ddpsim.cluster.link_sources import WAYS, preset_source, sockets_in_words
from ddpsim.cluster.logs import LOGS
from ddpsim.cluster.nccl.cost import NcclCost
from ddpsim.cluster.nccl.tables import PROTOCOLS
from ddpsim.cluster.nccl.thresholds import LAST_WITHOUT_TUNER, most_of_a_tree
from ddpsim.cluster.nccl.tuner import estimates
from ddpsim.cluster.wires import Wires, rate_of
from ddpsim.scenario.cluster import Cluster
from ddpsim.scenario.links import InterNode
from ddpsim.scenario.run import Background
from ddpsim.scenario.schema import Scenario
from ddpsim.units import format_bytes, format_bytes_per_s, format_duration
from ddpsim.wording import counted

_DRAWN_NODES = 3
_DRAWN_GPUS = 8
_WIDTH = 100


def describe_cluster(scenario: Scenario) -> str:
    """A drawing of the cluster; raises InputError where its links are not known."""
    drawn = _drawn(with_replicas(scenario), scenario.cluster)
    lines = (wrap(line, _WIDTH, subsequent_indent="    ") or [""] for line in drawn)
    return "\n".join(row for rows in lines for row in rows)


def _drawn(scenario: Scenario, stated: Cluster) -> Iterator[str]:
    cluster = joined(scenario)
    unit = "node" if cluster is scenario.cluster else "domain"
    scenario = scenario.model_copy(update={"cluster": cluster})
    wires = Wires.of(cluster, scenario.run.seed)
    wires = wires.of_nccl() if scenario.ddp.backend == "nccl" else wires
    machine = f"{cluster.machine.name}: " if cluster.machine else ""
    each = stated.gpus_by_node
    gpus = "of " + " + ".join(map(str, each)) if each else f"x {stated.gpus_per_node}"
    yield f"{machine}{counted(stated.nodes, 'node')} {gpus} {cluster.device.name}"
    if unit == "domain":
        yield f"  NVLink domains of {cluster.gpus_per_node} ranks, each one node to NCCL"
    if stated.replica:
        copies = counted(stated.world_size, "replica")
        yield f"  {copies} of {stated.replica.gpus} GPUs, of which one each is drawn"
    yield ""
    if cluster.nodes > 1 and wires.inter:
        yield from _network(wires.inter, wires, scenario, unit)
    if wires.intra:
        yield f"  in each {unit}: {_joint(cluster, wires)}"
    for node in range(min(cluster.nodes, _DRAWN_NODES)):
        yield from _node(cluster, wires, node, unit)
    if (more := cluster.nodes - _DRAWN_NODES) > 0:
        yield f"    +-- {more} more {unit}{'s' * (more > 1)} like these"
    yield ""
    yield from _facts(scenario, wires)


def _network(inter: InterNode, wires: Wires, scenario: Scenario, unit: str) -> Iterator[str]:
    cluster = scenario.cluster
    rate = format_bytes_per_s(wires.network_rate)
    leaves = ceil(cluster.nodes / inter.nodes_per_leaf) if inter.nodes_per_leaf else None
    if leaves == 1:
        yield "  [ one leaf switch ]"
    elif inter.oversubscription > 1 or leaves:
        shape = f"{leaves} leaves of {inter.nodes_per_leaf} nodes" if leaves else "a leaf a node"
        uplinks = f", {inter.uplinks} uplinks each" if inter.uplinks else ""
        yield f"  [ spine: {shape}{uplinks}, oversubscribed {inter.oversubscription:g} : 1 ]"
    else:
        yield "  [ network without oversubscription ]"
    nic = format_bytes_per_s(rate_of(inter))
    yield f"    |  {inter.nics_per_node} x {nic} a {unit} ({inter.transport}), {rate} of it usable"
    if inter.transport == "tcp" and scenario.ddp.backend == "nccl":
        yield f"    |  {sockets_in_words(inter, wires.environment)}"


def _node(cluster: Cluster, wires: Wires, node: int, unit: str) -> Iterator[str]:
    ranks = cluster.ranks_of(node)
    shown = ranks[:_DRAWN_GPUS]
    more = f" ... {ranks[-1]}" if len(ranks) > _DRAWN_GPUS else ""
    weak = {rank for rank, _, _ in wires.weak}
    weak |= {rank for other, _, _ in wires.unlike for rank in cluster.ranks_of(other)}
    gpus = " ".join(f"{rank}!" if rank in weak else str(rank) for rank in shown)
    stem = "    +-- " if cluster.nodes > 1 else "  "
    yield f"{stem}{unit} {node}: ranks {gpus}{more}"


def _joint(cluster: Cluster, wires: Wires) -> str:
    intra, graph = wires.intra, wires.graph(cluster)
    if intra is None:
        return ""
    kind = ""
    if intra.switch_bandwidth_bytes_per_s:
        summed = format_bytes_per_s(intra.switch_bandwidth_bytes_per_s)
        kind = f"a switch that sums (NVLS, {summed} of bus bandwidth) and "
    path = {"nvlink": "NVLink", "pcie": "PCIe"}[graph.path]
    if wires.way:
        path = f"PCIe {cluster.device.pcie}, {WAYS[wires.way.transport]}"
    if cluster.device.kind == "cpu":
        path = "memory"
    rate = format_bytes_per_s(rate_of(intra))
    return f"{kind}{path}, {rate} a GPU"


def _facts(scenario: Scenario, wires: Wires) -> Iterator[str]:
    cluster = scenario.cluster
    for operation in LOGS:
        if log := getattr(cluster, operation):
            name = operation.replace("_", "-")
            yield f"{name} times of the sizes it holds come from the log {log.given}"
    if profile := cluster.profile:
        counts = "the network's rate" if cluster.inter_node else "nothing"
        yield f"all-reduce times come from the profile {profile.given}: of this {counts} counts"
    if cluster.world_size > 1:
        slowest = min(link.bandwidth_bytes_per_s for link in wires.ring)
        yield f"a ring of all ranks runs at {format_bytes_per_s(slowest)}"
        if scenario.ddp.backend == "nccl":
            count, speed = wires.graph(cluster).channels
            yield f"NCCL counts {count} channel{'s' * (count > 1)} of {speed:g} GB/s there"
    yield from _unlike(cluster, wires)
    if cluster.background:
        yield f"another job sends {_traffic(cluster.background)}"
    for entry in wires.provenance:
        yield f"{entry.input}: {entry.source}"
    for key in cluster.links_used:
        yield f"{key}: {_source(cluster, key)}"


def _unlike(cluster: Cluster, wires: Wires) -> Iterator[str]:
    """Ranks and nodes that are not like the others."""
    for rank, part, _ in wires.weak:
        yield f"the links to rank {rank} (!) have {part:.0%} of the usual bandwidth"
    for node, inside, outside in wires.unlike:
        parts = f"{inside:.0%}" + (f" inside, {outside:.0%} outside" if inside != outside else "")
        yield f"the links of node {node} (!) have {parts} of the usual bandwidth"
    for node, other in (cluster.other_nodes or {}).items():
        if other.device:
            yield f"node {node} has {other.device.name}"


def _traffic(background: Background) -> str:
    rate = f"{format_bytes_per_s(background.rate_bytes_per_s)} from each node"
    if not (background.busy_s and background.every_s):
        return rate
    busy, every = format_duration(background.busy_s), format_duration(background.every_s)
    return f"{rate} for {busy} of every {every}"


def _source(cluster: Cluster, key: str) -> str:
    if getattr(cluster, key):
        return "stated in the file" + (f" beside {cluster.machine.name}" if cluster.machine else "")
    return preset_source(cluster, key)


def describe_tuning(cost: NcclCost, sizes_bytes: tuple[int, ...]) -> str:
    """NCCL's own table, latency in us over bandwidth in GB/s, and its choice for each size."""
    graph = cost.graph
    if graph.minor <= LAST_WITHOUT_TUNER:
        return _thresholds_of(cost, sizes_bytes)
    rows = estimates(graph)
    names = list(dict.fromkeys(row.algorithm for row in rows))
    cells = {(row.algorithm, row.protocol): row for row in rows}
    lines = [f"{'':<10}" + "".join(f"{protocol:>18}" for protocol in PROTOCOLS)]
    for name in names:
        line = f"{name:<10}"
        for protocol in PROTOCOLS:
            row = cells.get((name, protocol))
            text = f"{row.latency_us:.1f} / {row.bandwidth_gb_per_s:.1f}" if row else "-"
            line += f"{text:>18}"
        lines.append(line)
    lines += [
        "(latency in us / bandwidth of the message in GB/s, by NCCL's tables)",
        "",
        "choice by size, with the tuner's own estimate: it chooses, but is no prediction",
    ]
    for size in sizes_bytes:
        choice = cost.choice(size)
        chosen = f"{choice.algorithm:<5} {choice.protocol:<7}{choice.time_us:>12.1f} us"
        lines.append(f"{format_bytes(size):>10}  {chosen}")
    return "\n".join(lines)


def _thresholds_of(cost: NcclCost, sizes_bytes: tuple[int, ...]) -> str:
    """Describe a version that has no tuner, and its choice for each size."""
    most = most_of_a_tree(cost.graph)
    trees = "trees for all sizes" if isinf(most) else f"trees up to {format_bytes(int(most))}"
    lines = [f"NCCL 2.{cost.graph.minor} has no tuner: {trees if most else 'no trees'}; LL and"]
    lines += ["Simple by the threads that a message needs", "", "choice by size"]
    for size in sizes_bytes:
        choice = cost.choice(size)
        lines.append(f"{format_bytes(size):>10}  {choice.algorithm:<5} {choice.protocol}")
    return "\n".join(lines)
