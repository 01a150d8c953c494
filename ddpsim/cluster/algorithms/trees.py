"""All-reduces up and down NCCL's two trees, of GPUs or of switches; the chain to one GPU.

Source: nccl src/device/all_reduce.h (what a tree, and NVLS, send).
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, pairwise

from ddpsim.cluster.algorithms.pipeline import Pipeline
from ddpsim.cluster.topology.paths import Ends, Link, Paths, part
from ddpsim.scenario.base import ranks_by_node


def gathering(paths: Paths) -> tuple[Pipeline, ...]:
    """A reduction to GPU 0 of one node: a chain of all GPUs, each adding its own on the way.

    Backwards it is GPU 0's broadcast, which takes as long: (n-1) a + M b, and the first chunk's
    way.
    """
    return (_gathering(paths.ranks),)


@lru_cache(maxsize=16)
def _gathering(ranks: int) -> Pipeline:
    return Pipeline(Paths.within, [[range(ranks)]], returns=False)


def both_trees(paths: Paths) -> tuple[Pipeline, ...]:
    """Sums flow up to the root and the result down, half of the bytes in each of two trees.

    In a node GPUs are a chain that ends at its first. Every node is a leaf in one of the trees.
    About 2 log2(n) a + 2 M b: the longest route, chains included.
    """
    return _trees(paths.nodes, paths.gpus_per_node, paths.smaller)


@lru_cache(maxsize=16)
def _trees(nodes: int, gpus: int, smaller: tuple[tuple[int, int], ...]) -> tuple[Pipeline, ...]:
    firsts = accumulate(ranks_by_node(nodes, gpus, smaller), initial=0)
    chains = [[range(*ends)] for ends in pairwise(firsts)]
    return tuple(Pipeline(_chain, chains, tree) for tree in (0, 1))


def _chain(paths: Paths, ends: Ends | None = None) -> Link:
    """A GPU's link serves both trees at once, and their ways up and down in turn.

    Where words are passed on as they come, a chunk's bytes take their time once a chain.
    """
    hops = max(1, paths.gpus_per_node - 1) if paths.streams else 1
    return part(paths.within(ends), 2 / hops)._replace(flows=2 * hops)


def both_switched(paths: Paths) -> tuple[Pipeline, ...]:
    """GPUs send to their node's switch, which sums and sends back.

    Over several nodes the sums go up and down two trees of nodes (NVLS tree). About a + M b on one
    node: to the switch and back.
    """
    return _switched(paths.nodes, paths.gpus_per_node)


@lru_cache(maxsize=16)
def _switched(nodes: int, g: int) -> tuple[Pipeline, ...]:
    switches = range(nodes * g, nodes * (g + 1))
    chains = [[(switch, n * g + gpu) for gpu in range(g)] for n, switch in enumerate(switches)]
    return tuple(Pipeline(_to_switch, chains, tree) for tree in (0, 1))


def _to_switch(paths: Paths, ends: Ends | None = None) -> Link:
    """Both halves of the bytes share it; its latency is that of there and back."""
    link = paths.to_switch(ends)
    return part(link._replace(latency_s=link.latency_s / 2), 2)
