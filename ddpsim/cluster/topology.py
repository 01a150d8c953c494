"""Who is where, and the ring of links through all ranks."""

from __future__ import annotations

from dataclasses import dataclass

from ddpsim.scenario.schema import InterNode, IntraNode

__all__ = ["Link", "ring_links"]


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of one hop: seconds per message and bytes per second."""

    latency_s: float
    bandwidth_bytes_per_s: float


def ring_links(
    nodes: int, gpus_per_node: int, intra: IntraNode | None, inter: InterNode | None
) -> tuple[Link, ...]:
    """The link that leads to each rank from its left neighbour, ranks numbered node by node.

    A hop between nodes gets min(intra, nics_per_node x inter / oversubscription), as the ring
    enters and leaves a node through all its NICs but each GPU sends no faster than it can.
    `intra` may be None with one GPU per node, `inter` with one node.
    """
    hops = [rank % gpus_per_node == 0 and nodes > 1 for rank in range(nodes * gpus_per_node)]
    return tuple(_between_nodes(intra, inter) if crosses else _within(intra) for crosses in hops)


def _within(intra: IntraNode | None) -> Link:
    if intra is None:
        raise ValueError("a node of several GPUs needs intra_node links")
    return Link(intra.latency_s, intra.bandwidth_bytes_per_s)


def _between_nodes(intra: IntraNode | None, inter: InterNode | None) -> Link:
    if inter is None:
        raise ValueError("several nodes need inter_node links")
    network = inter.nics_per_node * inter.bandwidth_bytes_per_s / inter.oversubscription
    return Link(inter.latency_s, min(network, intra.bandwidth_bytes_per_s) if intra else network)
