"""Who is where, and the ring of links through all ranks."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Link", "ring_links"]


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of one hop: seconds per message and bytes per second."""

    latency_s: float
    bandwidth_bytes_per_s: float


def ring_links(
    nodes: int, gpus_per_node: int, intra: Link | None, inter: Link | None
) -> tuple[Link, ...]:
    """The link that leads to each rank from its left neighbour, ranks numbered node by node.

    A hop between nodes gets min(intra, inter), as the ring enters and leaves a node through all
    its NICs (`inter`) but each GPU sends no faster than it can. `intra` may be None with one GPU
    per node, `inter` with one node.
    """
    hops = [rank % gpus_per_node == 0 and nodes > 1 for rank in range(nodes * gpus_per_node)]
    return tuple(_between_nodes(intra, inter) if crosses else _within(intra) for crosses in hops)


def _within(intra: Link | None) -> Link:
    if intra is None:
        raise ValueError("a node of several GPUs needs intra_node links")
    return intra


def _between_nodes(intra: Link | None, inter: Link | None) -> Link:
    if inter is None:
        raise ValueError("several nodes need inter_node links")
    if intra is None:
        return inter
    rate = min(inter.bandwidth_bytes_per_s, intra.bandwidth_bytes_per_s)
    return Link(inter.latency_s, rate)
