"""All-reduces that a switch sums (NVLS), and over several nodes two trees of switches.

Source: nccl src/device/all_reduce.h.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from ddpsim.cluster.algorithms.pipeline import (
    AlikePipeline,
    Pipeline,
    duration_ns,
    ends_ns,
    side_by_side,
)
from ddpsim.cluster.algorithms.schedule import Schedule
from ddpsim.cluster.topology.link import Link
from ddpsim.cluster.topology.paths import Ends, Paths, part

if TYPE_CHECKING:
    from ddpsim.cluster.algorithms.max_plus import Ticks

__all__ = ["nvls_ends_ns", "nvls_ns", "nvls_schedule"]


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
