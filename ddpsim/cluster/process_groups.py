"""Collectives among some of the ranks: those of a node, or one of each node (a 2-D mesh)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ddpsim.cluster.cost import CollectiveCost
from ddpsim.cluster.interference import InterferingCost
from ddpsim.cluster.transfers import Operation, ProcessGroup, Transfer

__all__ = ["GroupedCost", "cost_of", "interfering", "ranks_of"]


@dataclass(frozen=True)
class GroupedCost:
    """A cost model for each group of a mesh of nodes and the GPUs in them.

    `world`: among all ranks. `across_nodes`: among ranks of the same place in each node, all groups
    of which send at once.
    """

    world: CollectiveCost
    node: CollectiveCost
    across_nodes: CollectiveCost
    gpus_per_node: int

    @property
    def operations(self) -> frozenset[Operation]:
        """See CollectiveCost: those that every group knows."""
        return self.world.operations & self.node.operations & self.across_nodes.operations

    def transfer(self, operation: Operation, size_bytes: int) -> Transfer:
        """See CollectiveCost: among all ranks."""
        return self.world.transfer(operation, size_bytes)

    def stretched(self, factor: float) -> GroupedCost:
        """See CollectiveCost."""
        return self.changed(lambda cost: cost.stretched(factor))

    def changed(self, change: Callable[[CollectiveCost], CollectiveCost]) -> GroupedCost:
        """The same with the cost of each group changed."""
        parts = (self.world, self.node, self.across_nodes)
        world, node, across = (change(cost) for cost in parts)
        return replace(self, world=world, node=node, across_nodes=across)


def cost_of(cost: CollectiveCost, group: ProcessGroup) -> CollectiveCost:
    """The cost model of a group; ValueError where there is none but that of all ranks."""
    if group == "world":
        return cost
    if not isinstance(cost, GroupedCost):
        raise ValueError(f"this cost model knows no group of ranks: {group}")
    return cost.node if group == "node" else cost.across_nodes


def interfering(
    cost: CollectiveCost, change: Callable[[InterferingCost], CollectiveCost]
) -> CollectiveCost:
    """The same cost with a change of what transfers and compute do to each other, if they do."""
    if isinstance(cost, GroupedCost):
        return cost.changed(lambda each: interfering(each, change))
    return change(cost) if isinstance(cost, InterferingCost) else cost


def ranks_of(group: ProcessGroup, rank: int, ranks: int, gpus_per_node: int) -> range:
    """The ranks of a rank's group, in order."""
    if group == "world":
        return range(ranks)
    if group == "across_nodes":
        return range(rank % gpus_per_node, ranks, gpus_per_node)
    first = rank - rank % gpus_per_node
    return range(first, first + gpus_per_node)
