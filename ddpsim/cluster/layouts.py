"""Clusters made of another: NVLink domains as nodes, and the ranks of one of several groups."""

from __future__ import annotations

from math import ceil
from typing import Any, NamedTuple

from ddpsim.cluster.wires import environment_of
from ddpsim.scenario.cluster import Cluster, OtherNode
from ddpsim.scenario.links import InterNode
from ddpsim.scenario.options.host import Host
from ddpsim.scenario.schema import Scenario

_MNNVL_FROM = 20  # minor version of NCCL 2 (src/mnnvl.cc)


class Layout(NamedTuple):
    """Ranks of a group on each node, and how many groups share the NICs of a node of it at most."""

    ranks: tuple[int, ...]
    sharing: int


def joined(scenario: Scenario) -> Cluster:
    """A scenario's nodes as NCCL counts them: an NVLink domain is one, with all its nodes' NICs.

    NCCL fuses the topologies of a domain's nodes (nccl v2.30 src/graph/topo.cc, MNNVL), and counts
    nodes by the first rank of each ring in such a topology (src/init.cc, nNodes).
    """
    cluster = scenario.cluster
    each = min(cluster.nodes_per_domain, cluster.nodes)
    has_mnnvl = scenario.ddp.backend == "nccl" and cluster.nccl_minor >= _MNNVL_FROM
    if each == 1 or not has_mnnvl or not environment_of(cluster).uses_mnnvl:
        return cluster
    gpus, rest = each * cluster.gpus_per_node, cluster.nodes % each
    update = _network_of(cluster, "nics_per_node", each)
    update |= {"nodes": ceil(cluster.nodes / each), "gpus_per_node": gpus}
    update |= {"nvlink_domain": None, "other_nodes": None}
    if cluster.host and cluster.host.gpus:
        update["host"] = cluster.host.model_copy(update={"gpus": each * cluster.host.gpus})
    if machine := update.get("machine", cluster.machine):
        whole = {"gpus_per_node": each * machine.gpus_per_node, "nvlink_domain": None}
        update["machine"] = machine.model_copy(update=whole)
    stated = update.get("inter_node", cluster.inter_node)
    if stated and stated.nodes_per_leaf:
        leaves = {"nodes_per_leaf": stated.nodes_per_leaf // each}
        update["inter_node"] = stated.model_copy(update=leaves)
    fused = cluster.model_copy(update=update)
    link = fused.link("inter_node")
    if rest and isinstance(link, InterNode):
        nics = InterNode(nics_per_node=ceil(link.nics_per_node * rest / each))
        fewer = OtherNode(gpus_per_node=rest * cluster.gpus_per_node, inter_node=nics)
        fused = fused.model_copy(update={"other_nodes": {fused.nodes - 1: fewer}})
    return fused


def laid_out(cluster: Cluster, layout: Layout) -> Cluster:
    """A group's ranks as a cluster of their own, which shares NICs and hosts with other groups.

    NCCL searches for the NICs nearest to a GPU: an equal number of them, or one that is shared.
    """
    most = max(layout.ranks)
    fewer = {i: OtherNode(gpus_per_node=n) for i, n in enumerate(layout.ranks) if n < most}
    return _part(cluster, len(layout.ranks), most, layout.sharing, fewer or None)


def with_replicas(scenario: Scenario) -> Scenario:
    """The job of one GPU of each replica; a scenario without replicas as it is."""
    cluster = scenario.cluster
    if cluster.replica is None:
        return scenario
    if cluster.replica.gpus == 1:
        return scenario.having("cluster", replica=None)
    nodes, gpus, sharing = cluster.replica.layout(cluster.nodes, cluster.gpus_per_node)
    part = _part(cluster, nodes, gpus, sharing, None)
    each = cluster.nodes_per_domain
    update = {"replica": None, "nvlink_domain": min(each, nodes) * gpus if each > 1 else None}
    return scenario.model_copy(update={"cluster": part.model_copy(update=update)})


def _part(
    cluster: Cluster,
    nodes: int,
    gpus: int,
    sharing: int,
    other_nodes: dict[int, OtherNode] | None,
) -> Cluster:
    update: dict[str, Any] = {"nodes": nodes, "gpus_per_node": gpus, "other_nodes": other_nodes}
    host = cluster.host or Host()
    update["host"] = host.model_copy(update={"gpus": max(host.gpus or 0, cluster.gpus_per_node)})
    part = cluster.model_copy(update=update)
    whole, near = cluster.link("inter_node"), part.link("inter_node")
    if sharing == 1 or not (isinstance(whole, InterNode) and isinstance(near, InterNode)):
        return part
    share = sharing * near.nics_per_node / whole.nics_per_node
    return part.model_copy(update=_network_of(part, "shared_by", max(1.0, share)))


def _network_of(cluster: Cluster, field: str, factor: float) -> dict[str, Any]:
    """The parts of a cluster that say its network, with a field of it so many times as large."""

    def changed(link: InterNode) -> InterNode:
        return link.model_copy(update={field: getattr(link, field) * factor})

    device, machine, stated = cluster.device, cluster.machine, cluster.inter_node
    update: dict[str, Any] = {}
    if device.inter_node:
        update["device"] = device.model_copy(update={"inter_node": changed(device.inter_node)})
    if machine and machine.inter_node:
        update["machine"] = machine.model_copy(update={"inter_node": changed(machine.inter_node)})
    is_whole = not machine and stated and stated.bandwidth_bytes_per_s is not None
    if stated and (is_whole or field in stated.written_fields):
        update["inter_node"] = changed(stated)
    return update
