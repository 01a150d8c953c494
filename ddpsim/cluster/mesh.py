"""The networks of groups of ranks: of a 2-D mesh, and those that keep a copy of parameters."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from ddpsim.cluster.layouts import Layout, joined, laid_out
from ddpsim.cluster.link_sources import NOT_USED
from ddpsim.cluster.logs import LOGS
from ddpsim.cluster.network import Network
from ddpsim.cluster.process_groups import GroupedCost, Mesh, cost_of
from ddpsim.cluster.transfers import TURNS, Operation, ProcessGroup, duration_ns
from ddpsim.errors import InputError
from ddpsim.scenario.cluster import OF_UNEQUAL_NODES
from ddpsim.scenario.schema import Scenario

Sent = tuple[Operation, int]  # a collective and its bytes

_OF_ALL_RANKS = (*LOGS, "profile", "weak_links", "other_nodes", "background")
_LARGE_BYTES = 2**26  # of an all-gather that tells which group is the slowest


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
    mesh, whole = mesh_of(scenario), joined(scenario)

    def of(layout: Layout) -> Network:
        _refuse_unequal(scenario, layout)
        cluster = laid_out(whole, layout)
        part = of_links(scenario.model_copy(update={"cluster": cluster}))
        used = tuple(entry for entry in part.provenance if entry.source != NOT_USED)
        return replace(part, provenance=used)

    kinds: list[ProcessGroup] = []
    if scenario.ddp.shards_in_nodes or scenario.ddp.averages_after_hook:
        kinds += ["node", "across_nodes"]
    if scenario.keeps_a_part:
        kinds.append("kept")
    groups = tuple(
        (kind, _slowest(of(layout) for layout in _layouts(mesh, kind, whole.gpus_per_node)))
        for kind in kinds
    )
    parts = tuple((group, part.cost) for group, part in groups)
    return replace(network, cost=GroupedCost(network.cost, parts, mesh), groups=groups)


def _layouts(mesh: Mesh, kind: ProcessGroup, gpus_per_node: int) -> set[Layout]:
    """On which nodes the ranks of each group of a kind are; a node: so many neighbours."""
    firsts = range(0, mesh.ranks, mesh.size(kind))
    if kind == "across_nodes":
        firsts = range(mesh.gpus_per_node)
    on_nodes = [
        Counter(rank // gpus_per_node for rank in mesh.members(kind, first)) for first in firsts
    ]
    crossing = Counter(node for nodes in on_nodes if len(nodes) > 1 for node in nodes)
    return {
        Layout(tuple(nodes.values()), max(crossing[node] for node in nodes) or 1)
        for nodes in on_nodes
    }


def _slowest(networks: Iterable[Network]) -> Network:
    """All groups of a kind are priced as their slowest, for which the next reduction waits."""
    return max(
        networks, key=lambda each: duration_ns(each.cost.transfer("all_gather", _LARGE_BYTES))
    )


def _refuse_unequal(scenario: Scenario, layout: Layout) -> None:
    """Raise for nodes with fewer ranks than others, which are no option of every algorithm."""
    algorithm = scenario.cluster.algorithm
    if len(set(layout.ranks)) > 1 and algorithm not in OF_UNEQUAL_NODES:
        raise InputError(
            "ddp.fully_shard.reshard_after_forward",
            f"groups of {sum(layout.ranks)} ranks have {' and '.join(map(str, layout.ranks))} of "
            f"them on their nodes, and cluster.algorithm: {algorithm} needs as many each; write "
            "a divisor or a multiple of gpus_per_node",
        )


def with_sent_in_groups(
    network: Network,
    sent: Collection[tuple[ProcessGroup, Operation, int]],
    knowing: Callable[[Network, Collection[Sent]], Network],
) -> Network:
    """The network with the networks of its groups, each adapted to what the group sends.

    It is as uncertain as that of the group which sends longest. `knowing`: adapts one network.
    """
    parts, provenance, spent_ns = {}, list(network.provenance), {}
    of_group = defaultdict[ProcessGroup, list[Sent]](list)
    for group, operation, size in sorted(sent):
        if group != "world" or operation in TURNS:
            of_group[group].append((operation, size))
    plain = dict(network.groups)
    if of_group["world"]:
        plain["world"] = replace(network, cost=cost_of(network.cost, "world"))
    for group, part_network in plain.items():
        part = parts[group] = knowing(part_network, of_group[group])
        provenance += [entry for entry in part.provenance if entry not in provenance]
        spent_ns[group] = sum(duration_ns(part.cost.transfer(*each)) for each in of_group[group])
    return replace(
        network,
        groups=tuple(each for each in parts.items() if each[0] != "world"),
        provenance=tuple(provenance),
        uncertainty=parts[max(spent_ns, key=lambda group: spent_ns[group])].uncertainty,
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
