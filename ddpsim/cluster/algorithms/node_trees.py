"""Which node is whose parent in NCCL's two trees.

Sources: Sanders, Speck, Traff 2009 (two trees), nccl src/graph/trees.cc (which trees).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

__all__ = ["edges_by_node", "leaves_first", "two_trees"]


def edges_by_node(parents: Sequence[Sequence[int]]) -> list[int]:
    """How many edges leave each node, up and down, in all trees."""
    leaving = [0] * len(parents[0])
    for parent in parents:
        for node, up in enumerate(parent):
            if up >= 0:
                leaving[node] += 1
                leaving[up] += 1
    return leaving


def leaves_first(parent: Sequence[int]) -> list[int]:
    """Nodes in an order in which each precedes its parent; the root is the last."""

    depth: dict[int, int] = {-1: -1}
    for node in range(len(parent)):
        way = [node]
        while way[-1] not in depth:
            way.append(parent[way[-1]])
        for below, up in zip(reversed(way[:-1]), reversed(way), strict=False):
            depth[below] = depth[up] + 1
    return sorted(range(len(parent)), key=lambda node: (-depth[node], node))


@lru_cache(maxsize=64)
def two_trees(nodes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Parents in each tree, -1 at its root: the second is the first mirrored (even) or shifted."""
    first = [_parent(node, nodes) for node in range(nodes)]
    second = [-1] * nodes
    for node, up in enumerate(first):
        if up < 0:
            continue
        if nodes % 2 == 0:
            second[nodes - 1 - node] = nodes - 1 - up
        else:
            second[(node + 1) % nodes] = (up + 1) % nodes
    return tuple(first), tuple(second)


def _parent(node: int, nodes: int) -> int:
    """In the binary tree whose leaves are the odd nodes (nccl src/graph/trees.cc)."""
    if node == 0:
        return -1
    bit = node & -node
    up = (node ^ bit) | (bit << 1)
    return up if up < nodes else node ^ bit
