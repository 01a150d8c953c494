"""Replicas of several GPUs: what tensor, pipeline or context parallelism puts inside one."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ddpsim.scenario.base import Spec, fail

# of all ranks, or of single ones, and so of no group that shares a node's NICs with others
_OF_ALL_RANKS = (
    *("all_reduce", "reduce_scatter", "all_gather", "profile"),
    *("weak_links", "other_nodes", "background"),
)


class Replica(Spec):
    """One copy of the model on several GPUs; data parallelism runs over the copies."""

    gpus: Annotated[int, Field(ge=1, le=100_000)] = Field(description="of each replica")
    placement: Literal["node", "across_nodes"] = Field(
        "node",
        description="node: neighbours, in a node or on whole nodes (tensor parallelism); "
        "across_nodes: one GPU on each of so many nodes (pipeline stages)",
    )

    def layout(self, nodes: int, gpus_per_node: int) -> tuple[int, int, int]:
        """Return nodes, ranks a node and sharing of the ranks that one GPU of each replica is.

        Sharing: how many such groups use a node's NICs at once. Raises a cross-field error where
        the GPUs do not divide.
        """
        gpus = self.gpus
        if self.placement == "across_nodes":
            if nodes % gpus:
                raise fail(
                    f"{gpus} does not divide the {nodes} nodes that replicas lie across; write a "
                    "divisor of cluster.nodes, or placement: node",
                    "replica.gpus",
                )
            return nodes // gpus, gpus_per_node, 1
        if gpus_per_node % gpus == 0:
            return nodes, gpus_per_node // gpus, gpus
        spanned, rest = divmod(gpus, gpus_per_node)
        if rest or nodes % spanned:
            raise fail(
                f"{gpus} GPUs are neither a part of a node's {gpus_per_node} nor whole nodes of "
                f"the {nodes}; write a divisor of gpus_per_node, or so many times gpus_per_node "
                "that it divides the nodes",
                "replica.gpus",
            )
        return nodes // spanned, 1, gpus_per_node


def refuse_what_replicas_lack(cluster: object) -> None:
    """Raise for what a cluster says of all ranks, which says nothing of groups that share NICs."""
    for key in (key for key in _OF_ALL_RANKS if getattr(cluster, key)):
        raise fail(
            "is of all ranks, and says nothing of the groups that replicas make; drop it, and "
            "state intra_node and inter_node",
            key,
        )
