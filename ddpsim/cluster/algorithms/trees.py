"""All-reduces up and down NCCL's two trees, of GPUs or of switches; the chain to one GPU.

Source: nccl src/device/all_reduce.h (what a tree, and NVLS, send).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

from ddpsim.cluster.algorithms.pipeline import (
    AlikePipeline,
    Pipeline,
    duration_ns,
    ends_ns,
    side_by_side,
)
from ddpsim.cluster.algorithms.schedule import Schedule
from ddpsim.cluster.topology.paths import Ends, Link, Paths, part
from ddpsim.scenario.base import ranks_by_node

if TYPE_CHECKING:
    from ddpsim.cluster.algorithms.max_plus import Ticks
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpsim.cluster.algorithms.max_plus import Ticks


def tree_schedule(paths: Paths, size_bytes: int) -> Schedule:
    """Sums flow up to the root and the result down, half of the bytes in each of two trees.

    In a node GPUs are a chain that ends at its first. Every node is a leaf in one of the trees.
    """
    return side_by_side(_both_trees(paths), paths, size_bytes)


def tree_ends_ns(paths: Paths, size_bytes: int, joined_ns: Ticks) -> Ticks:
    """When it ends, given when each rank joins."""
    return ends_ns(_both_trees(paths), paths, size_bytes, joined_ns)


def tree_ns(paths: Paths, size_bytes: int) -> int:
    """About 2 log2(n) a + 2 M b: the longest route, chains included."""
    return duration_ns(_both_trees(paths, alike=True), paths, size_bytes)


def gather_schedule(paths: Paths, size_bytes: int) -> Schedule:
    """A reduction to GPU 0 of one node: a chain of all GPUs, each adding its own on the way.

    Backwards it is GPU 0's broadcast, which takes as long.
    """
    return _gathering(paths.ranks).schedule(paths, size_bytes)


def gather_ns(paths: Paths, size_bytes: int) -> int:
    """(n-1) a + M b, and the first chunk's way."""
    return _gathering(paths.ranks).duration_ns(paths, size_bytes)


def gather_ends_ns(paths: Paths, size_bytes: int, joined_ns: Ticks) -> Ticks:
    """When it ends, given when each rank joins."""
    return _gathering(paths.ranks).ends_ns(paths, size_bytes, joined_ns)


@lru_cache(maxsize=16)
def _gathering(ranks: int) -> Pipeline:
    pipe, summed = Pipeline(Paths.within), list[int]()
    for gpu in range(ranks - 1, 0, -1):
        summed = pipe.add(gpu, gpu - 1, summed)
    return pipe


def _both_trees(paths: Paths, *, alike: bool = False) -> tuple[Pipeline, ...]:
    nodes = paths.nodes, paths.gpus_per_node, paths.smaller
    return tuple(_tree(*nodes, tree, alike=alike) for tree in (0, 1))


@lru_cache(maxsize=32)
def _tree(
    nodes: int, gpus: int, smaller: tuple[tuple[int, int], ...], tree: int, *, alike: bool
) -> Pipeline:
    """`alike`: one node's chain stands for all, where ranks join at once over usual links."""
    pipe = AlikePipeline(_chain) if alike else Pipeline(_chain)
    sizes = ranks_by_node(nodes, gpus, smaller)
    heads = list(accumulate(sizes[:-1], initial=0))
    shown = list(zip(heads, sizes, strict=True))[: 1 if alike else nodes]
    chains = [_up_a_chain(pipe, head, g) for head, g in shown]
    ready = chains * nodes if alike else chains
    brought = pipe.over_nodes(nodes, tree, heads, ready) if nodes > 1 else ready
    if alike:
        brought = [[place for result in brought for place in result]]
    for (head, g), result in zip(shown, brought, strict=True):
        last = result
        for gpu in range(head, head + g - 1):
            last = pipe.add(gpu, gpu + 1, last)
    return pipe


def _up_a_chain(pipe: Pipeline, head: int, g: int) -> list[int]:
    summed: list[int] = []
    for gpu in range(head + g - 1, head, -1):
        summed = pipe.add(gpu, gpu - 1, summed)
    return summed


def _chain(paths: Paths, ends: Ends | None = None) -> Link:
    """A GPU's link serves both trees at once, and their ways up and down in turn.

    Where words are passed on as they come, a chunk's bytes take their time once a chain.
    """
    hops = max(1, paths.gpus_per_node - 1) if paths.streams else 1
    return replace(part(paths.within(ends), 2 / hops), flows=2 * hops)


def nvls_schedule(paths: Paths, size_bytes: int) -> Schedule:
    """GPUs send to their node's switch, which sums and sends back.

    Over several nodes the sums go up and down two trees of nodes (NVLS tree).
    """
    return side_by_side(_both_switched(paths), paths, size_bytes)


def nvls_ends_ns(paths: Paths, size_bytes: int, joined_ns: Ticks) -> Ticks:
    """When it ends, given when each rank joins."""
    return ends_ns(_both_switched(paths), paths, size_bytes, joined_ns)


def nvls_ns(paths: Paths, size_bytes: int) -> int:
    """About a + M b on one node: to the switch and back, and the trees between."""
    one_gpu = replace(paths, gpus_per_node=1)
    return duration_ns(_both_switched(one_gpu, alike=True), paths, size_bytes)


def _both_switched(paths: Paths, *, alike: bool = False) -> tuple[Pipeline, ...]:
    nodes = paths.nodes, paths.gpus_per_node
    return tuple(_switched(*nodes, tree, alike=alike) for tree in (0, 1))


@lru_cache(maxsize=16)
def _switched(nodes: int, g: int, tree: int, *, alike: bool) -> Pipeline:
    """`alike`: of GPUs that join at once over usual links."""
    pipe, n = AlikePipeline(_to_switch) if alike else Pipeline(_to_switch), nodes * g
    heads = range(n, n + nodes)
    ready = [
        [place for gpu in range(node * g, (node + 1) * g) for place in pipe.add(gpu, head, ())]
        for node, head in enumerate(heads)
    ]
    brought = pipe.over_nodes(nodes, tree, heads, ready) if nodes > 1 else ready
    for node, head in enumerate(heads):
        for gpu in range(node * g, (node + 1) * g):
            pipe.add(head, gpu, brought[node])
    return pipe


def _to_switch(paths: Paths, ends: Ends | None = None) -> Link:
    """Both halves of the bytes share it; its latency is that of there and back."""
    link = paths.to_switch(ends)
    return part(replace(link, latency_s=link.latency_s / 2), 2)
