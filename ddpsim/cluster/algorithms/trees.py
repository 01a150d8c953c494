"""All-reduces up and down NCCL's two trees, of GPUs or of switches; the chain to one GPU.

Source: nccl src/device/all_reduce.h (what a tree, and NVLS, send).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

from ddpsim.cluster.algorithms.pipeline import (
    AlikePipeline,
    Pipeline,
)
from ddpsim.cluster.topology.paths import Ends, Link, Paths, part
from ddpsim.scenario.base import ranks_by_node


def gathering(paths: Paths, *, alike: bool = False) -> tuple[Pipeline, ...]:  # noqa: ARG001
    """A reduction to GPU 0 of one node: a chain of all GPUs, each adding its own on the way.

    Backwards it is GPU 0's broadcast, which takes as long: (n-1) a + M b, and the first chunk's
    way.
    """
    return (_gathering(paths.ranks),)


@lru_cache(maxsize=16)
def _gathering(ranks: int) -> Pipeline:
    pipe, summed = Pipeline(Paths.within), list[int]()
    for gpu in range(ranks - 1, 0, -1):
        summed = pipe.add(gpu, gpu - 1, summed)
    return pipe


def both_trees(paths: Paths, *, alike: bool = False) -> tuple[Pipeline, ...]:
    """Sums flow up to the root and the result down, half of the bytes in each of two trees.

    In a node GPUs are a chain that ends at its first. Every node is a leaf in one of the trees.
    About 2 log2(n) a + 2 M b: the longest route, chains included. `alike`: ranks join at once over
    usual links, so that one node's chain stands for all.
    """
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


def both_switched(paths: Paths, *, alike: bool = False) -> tuple[Pipeline, ...]:
    """GPUs send to their node's switch, which sums and sends back.

    Over several nodes the sums go up and down two trees of nodes (NVLS tree). About a + M b on one
    node: to the switch and back. `alike`: GPUs join at once over usual links, so that one stands
    for all of a node.
    """
    gpus = 1 if alike else paths.gpus_per_node
    return tuple(_switched(paths.nodes, gpus, tree, alike=alike) for tree in (0, 1))


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
