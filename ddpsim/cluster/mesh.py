"""The networks of a 2-D mesh: the ranks of a node, and the ranks with one place in each node."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from ddpsim.cluster.cost import CollectiveCost, LinkCost, ScheduledCost, SingleRankCost
from ddpsim.cluster.nccl.cost import NcclCost
from ddpsim.cluster.network import Network
from ddpsim.cluster.process_groups import GroupedCost, cost_of, interfering
from ddpsim.cluster.topology.paths import Paths
from ddpsim.cluster.transfers import TURNS, Operation, ProcessGroup, duration_ns
from ddpsim.errors import InputError
from ddpsim.scenario.cluster import Cluster
from ddpsim.scenario.schema import Scenario

__all__ = ["Sent", "with_groups", "with_sent_in_groups"]

Sent = tuple[Operation, int]  # a collective and its bytes

_OF_ALL_RANKS = ("all_reduce", "profile", "weak_links", "other_nodes", "background")


def with_groups(
    network: Network, scenario: Scenario, of_links: Callable[[Scenario], Network]
) -> Network:
    """The network with costs for each group of the mesh; raises InputError where there are none.

    `of_links`: the network of a cluster's links.
    """
    cluster = scenario.cluster
    _refuse_what_groups_lack(scenario)
    node, across = (
        of_links(scenario.model_copy(update={"cluster": cluster.model_copy(update=part)}))
        for part in ({"nodes": 1}, {"gpus_per_node": 1})
    )
    across = replace(across, cost=_shared(across.cost, cluster))
    cost = GroupedCost(network.cost, node.cost, across.cost, cluster.gpus_per_node)
    return replace(network, cost=cost, groups=(("node", node), ("across_nodes", across)))


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
    for key in (key for key in _OF_ALL_RANKS if getattr(cluster, key)):
        raise InputError(
            f"cluster.{key}",
            "is of all ranks, and says nothing of the groups that strategy: hsdp or comm_hook: "
            "post_localSGD send in; drop it, and state intra_node and inter_node",
        )
    if data and data.sample_bytes:
        raise InputError(
            "workload.data.sample_bytes",
            "reads over the nodes' network are not modelled under strategy: hsdp, nor under "
            "comm_hook: post_localSGD; drop it",
        )


def _shared(cost: CollectiveCost, cluster: Cluster) -> CollectiveCost:
    """Each of a node's ranks sends to its own group at once, over an equal part of the NICs.

    NCCL searches for the NICs nearest to a GPU: an equal number of them, or one that is shared.
    """
    ranks = cluster.gpus_per_node
    if isinstance(cost, SingleRankCost) or ranks == 1:
        return cost
    if isinstance(cost, LinkCost):
        return replace(cost, links=tuple(link.widened(1 / ranks) for link in cost.links))
    if isinstance(cost, ScheduledCost):
        return replace(cost, paths=_part(cost.paths, ranks))
    if isinstance(cost, NcclCost):
        graph = replace(cost.graph, nics=max(1, cost.graph.nics // ranks))
        return replace(cost, graph=graph, paths=_part(cost.paths, ranks))
    return interfering(cost, lambda each: replace(each, cost=_shared(each.cost, cluster)))


def _part(paths: Paths, ranks: int) -> Paths:
    return replace(paths, inter=paths.inter and paths.inter.widened(1 / ranks))
