"""The networks of groups of ranks: of a 2-D mesh, and those that keep a copy of parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

from ddpsim.cluster.cost import CollectiveCost, LinkCost, ScheduledCost, SingleRankCost
from ddpsim.cluster.link_sources import NOT_USED
from ddpsim.cluster.logs import LOGS
from ddpsim.cluster.nccl.cost import NcclCost
from ddpsim.cluster.network import Network
from ddpsim.cluster.process_groups import GroupedCost, Mesh, cost_of, interfering
from ddpsim.cluster.topology.paths import Paths
from ddpsim.cluster.transfers import TURNS, Operation, ProcessGroup, duration_ns
from ddpsim.cluster.wires import inside
from ddpsim.errors import InputError
from ddpsim.scenario.cluster import OF_UNEQUAL_NODES, OtherNode
from ddpsim.scenario.options.host import Host
from ddpsim.scenario.schema import Scenario

__all__ = ["Sent", "mesh_of", "with_groups", "with_sent_in_groups"]

Sent = tuple[Operation, int]  # a collective and its bytes

_OF_ALL_RANKS = (*LOGS, "profile", "weak_links", "other_nodes", "background")
_LARGE_BYTES = 2**26  # of an all-gather that tells which group is the slowest


class _Layout(NamedTuple):
    """Ranks of a group on each node, and how many groups share the NICs of a node of it at most."""

    ranks: tuple[int, ...]
    sharing: int


def mesh_of(scenario: Scenario) -> Mesh:
    """The groups that a scenario's strategy parts its ranks into."""
    cluster = scenario.cluster
    return Mesh(cluster.world_size, cluster.gpus_per_node, scenario.keeping_ranks)


def with_groups(
    network: Network, scenario: Scenario, of_links: Callable[[Scenario], Network]
) -> Network:
    """The network with costs for each group of the mesh; raises InputError where there are none.

    `of_links`: the network of a cluster's links.
    """
    _refuse_what_groups_lack(scenario)
    mesh = mesh_of(scenario)

    def of(layout: _Layout) -> Network:
        own = of_links(_laid_out(scenario, layout))
        used = tuple(entry for entry in own.provenance if entry.source != NOT_USED)
        return replace(own, cost=_shared(own.cost, layout), provenance=used)

    groups: list[tuple[ProcessGroup, Network]] = []
    if scenario.ddp.shards_in_nodes or scenario.ddp.averages_after_hook:
        nodes, gpus = scenario.cluster.nodes, scenario.cluster.gpus_per_node
        groups.append(("node", of(_Layout((gpus,), 1))))
        groups.append(("across_nodes", of(_Layout((1,) * nodes, gpus))))
    if scenario.keeps_a_part:
        groups.append(("kept", _slowest(of(layout) for layout in _kept_layouts(mesh))))
    parts = tuple((group, part.cost) for group, part in groups)
    return replace(network, cost=GroupedCost(network.cost, parts, mesh), groups=tuple(groups))


def _kept_layouts(mesh: Mesh) -> set[_Layout]:
    """Of the groups of neighbours that keep a copy: on which nodes their ranks are."""
    on_nodes = [
        Counter(rank // mesh.gpus_per_node for rank in mesh.members("kept", first))
        for first in range(0, mesh.ranks, mesh.kept_by)
    ]
    crossing = Counter(node for nodes in on_nodes if len(nodes) > 1 for node in nodes)
    return {
        _Layout(tuple(nodes.values()), max(crossing[node] for node in nodes) or 1)
        for nodes in on_nodes
    }


def _slowest(networks: Iterable[Network]) -> Network:
    """All groups of a kind are priced as their slowest, for which the next reduction waits."""
    return max(networks, key=lambda own: duration_ns(own.cost.transfer("all_gather", _LARGE_BYTES)))


def _laid_out(scenario: Scenario, layout: _Layout) -> Scenario:
    """The scenario on the ranks of one group; raises InputError for unequal nodes of algorithms.

    Checked anew, as nodes with fewer ranks are no option of every algorithm.
    """
    most = max(layout.ranks)
    fewer = {i: OtherNode(gpus_per_node=n) for i, n in enumerate(layout.ranks) if n < most}
    algorithm = scenario.cluster.algorithm
    if fewer and algorithm not in OF_UNEQUAL_NODES:
        raise InputError(
            "ddp.fully_shard.reshard_after_forward",
            f"groups of {sum(layout.ranks)} ranks have {' and '.join(map(str, layout.ranks))} of "
            f"them on their nodes, and cluster.algorithm: {algorithm} needs as many each; write "
            "a divisor or a multiple of gpus_per_node",
        )
    update: dict[str, Any] = {
        "nodes": len(layout.ranks),
        "gpus_per_node": most,
        "other_nodes": fewer or None,
    }
    if inside(scenario.cluster)[1]:  # all groups of a node send through its host at once
        host = scenario.cluster.host or Host()
        sending = max(host.gpus or 0, scenario.cluster.gpus_per_node)
        update["host"] = host.model_copy(update={"gpus": sending})
    return scenario.model_copy(update={"cluster": scenario.cluster.model_copy(update=update)})


def with_sent_in_groups(
    network: Network,
    sent: Collection[tuple[ProcessGroup, Operation, int]],
    knowing: Callable[[Network, Collection[Sent]], Network],
) -> Network:
    """The network, with what its groups' ones tell once it is known what each sends.

    It is as uncertain as that of the group which sends longest. `knowing`: one network's.
    """
    known, provenance, spent_ns = [], list(network.provenance), {}
    for group, plain in network.groups:
        own = sorted((operation, size) for of, operation, size in sent if of == group)
        part = knowing(plain, own)
        known.append((group, part))
        provenance += [entry for entry in part.provenance if entry not in provenance]
        spent_ns[group] = sum(duration_ns(part.cost.transfer(*each)) for each in own)
    among_all = sorted((of, size) for group, of, size in sent if group == "world" and of in TURNS)
    if among_all:
        whole = knowing(replace(network, cost=cost_of(network.cost, "world")), among_all)
        known.append(("world", whole))
        provenance += [entry for entry in whole.provenance if entry not in provenance]
        spent_ns["world"] = sum(duration_ns(whole.cost.transfer(*each)) for each in among_all)
    longest = dict(known)[max(spent_ns, key=lambda group: spent_ns[group])]
    return replace(
        network,
        groups=tuple(each for each in known if each[0] != "world"),
        provenance=tuple(provenance),
        uncertainty=longest.uncertainty,
    )


def _refuse_what_groups_lack(scenario: Scenario) -> None:
    cluster, data = scenario.cluster, scenario.workload.data
    what = "a number for reshard_after_forward"
    if scenario.ddp.strategy == "hsdp":
        what = "strategy: hsdp"
    elif scenario.ddp.shards_in_nodes:
        what = f"sharding_strategy: {scenario.ddp.flat.sharding_strategy}"
    elif scenario.ddp.averages_after_hook:
        what = "comm_hook: post_localSGD"
    for key in (key for key in _OF_ALL_RANKS if getattr(cluster, key)):
        raise InputError(
            f"cluster.{key}",
            f"is of all ranks, and says nothing of the groups of {what}; drop it, and state "
            "intra_node and inter_node",
        )
    if data and data.sample_bytes:
        raise InputError(
            "workload.data.sample_bytes",
            f"reads over the nodes' network are not modelled under {what}; drop it",
        )


def _shared(cost: CollectiveCost, layout: _Layout) -> CollectiveCost:
    """Groups that share a node send at once, each over an equal part of its NICs.

    NCCL searches for the NICs nearest to a GPU: an equal number of them, or one that is shared.
    """
    groups = layout.sharing
    if isinstance(cost, SingleRankCost) or groups == 1:
        return cost
    if isinstance(cost, LinkCost):
        first = {0, *accumulate(layout.ranks)}  # a node's first rank, to which a NIC leads
        links = enumerate(cost.links)
        parted = (link.widened(1 / groups) if i in first else link for i, link in links)
        return replace(cost, links=tuple(parted))
    if isinstance(cost, ScheduledCost):
        return replace(cost, paths=_part(cost.paths, groups))
    if isinstance(cost, NcclCost):
        graph = replace(cost.graph, nics=max(1, cost.graph.nics // groups))
        return replace(cost, graph=graph, paths=_part(cost.paths, groups))
    return interfering(cost, lambda each: replace(each, cost=_shared(each.cost, layout)))


def _part(paths: Paths, groups: int) -> Paths:
    return replace(paths, inter=paths.inter and paths.inter.widened(1 / groups))
