"""Collectives among some of the ranks: of a 2-D mesh, or those that keep a copy of parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from ddpsim.cluster.cost import CollectiveCost
from ddpsim.cluster.interference import InterferingCost
from ddpsim.cluster.transfers import Operation, ProcessGroup, Transfer


class Mesh(NamedTuple):
    """Ranks in groups: `ranks` in all, node by node.

    `kept_by`: so many neighbours keep a copy of the parameters after the forward.
    """

    ranks: int
    gpus_per_node: int
    kept_by: int

    def members(self, group: ProcessGroup, rank: int) -> range:
        """The ranks of a rank's group, in order."""
        if group == "world":
            return range(self.ranks)
        if group == "across_nodes":
            return range(rank % self.gpus_per_node, self.ranks, self.gpus_per_node)
        first = rank - rank % self.size(group)
        return range(first, first + self.size(group))

    def size(self, group: ProcessGroup) -> int:
        """How many ranks a group has."""
        sizes: dict[ProcessGroup, int] = {
            "world": self.ranks,
            "node": self.gpus_per_node,
            "across_nodes": self.ranks // self.gpus_per_node,
            "kept": self.kept_by,
        }
        return sizes[group]


@dataclass(frozen=True)
class GroupedCost:
    """A cost model of all ranks, and one of each kind of group, all of which send at once."""

    world: CollectiveCost
    parts: tuple[tuple[ProcessGroup, CollectiveCost], ...]
    mesh: Mesh

    @property
    def operations(self) -> frozenset[Operation]:
        """See CollectiveCost: those that every group knows."""
        return self.world.operations.intersection(*(cost.operations for _, cost in self.parts))

    def transfer(self, operation: Operation, size_bytes: int) -> Transfer:
        """See CollectiveCost: among all ranks."""
        return self.world.transfer(operation, size_bytes)

    def stretched(self, factor: float) -> GroupedCost:
        """See CollectiveCost."""
        return self.changed(lambda cost: cost.stretched(factor))

    def changed(self, change: Callable[[CollectiveCost], CollectiveCost]) -> GroupedCost:
        """Change the cost of each group."""
        parts = tuple((group, change(cost)) for group, cost in self.parts)
        return replace(self, world=change(self.world), parts=parts)


def cost_of(cost: CollectiveCost, group: ProcessGroup) -> CollectiveCost:
    """The cost model of a group; ValueError where there is none but that of all ranks."""
    if group == "world":
        return cost
    parts = dict(cost.parts) if isinstance(cost, GroupedCost) else {}
    if group not in parts:
        raise ValueError(f"this cost model knows no group of ranks: {group}")
    return parts[group]


def interfering(
    cost: CollectiveCost, change: Callable[[InterferingCost], CollectiveCost]
) -> CollectiveCost:
    """Change what transfers and compute do to each other, if they do anything."""
    if isinstance(cost, GroupedCost):
        return cost.changed(lambda each: interfering(each, change))
    return change(cost) if isinstance(cost, InterferingCost) else cost
