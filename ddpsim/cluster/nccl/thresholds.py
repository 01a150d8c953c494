"""What NCCL 2.4 takes, which has no tuner: trees up to one size of message, LL up to another.

Source: nccl v2.4.8 src/init.cc (ncclTreeThreshold), src/enqueue.cc (getKernelInfo), and
src/misc/rings.cc and src/transport/net.cc (channels), src/include/enqueue.h (constants).
"""

from __future__ import annotations

from math import ceil, inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpsim.cluster.nccl.graph import Graph
    from ddpsim.cluster.nccl.tables import Algorithm, Protocol
    from ddpsim.cluster.transfers import Operation

LAST_WITHOUT_TUNER = 4  # NCCL 2.4
_MOST_CHANNELS = 16
_LEAST_THREADS, _MOST_THREADS = 64, 256
_A_THREAD_BYTES = 8  # of LL, before there are more threads or channels
_LL_THREAD_BYTES = 64  # up to so many LL is taken; twice over nodes, four times in a tree
_RING_MB_PER_S = 5000.0  # of a channel, as NCCL assumes
_RING_HOP_US, _TREE_HOP_US, _CHAIN_HOP_US = 6.0, 15.0, 4.0


def by_size(graph: Graph, size_bytes: int, operation: Operation) -> tuple[Algorithm, Protocol]:
    """The algorithm and protocol of a message, where nothing restricts them."""
    is_tree = operation == "all_reduce" and size_bytes <= most_of_a_tree(graph)
    algorithm: Algorithm = "tree" if is_tree else "ring"
    return algorithm, protocol_of(graph, algorithm, size_bytes)


def protocol_of(graph: Graph, algorithm: Algorithm, size_bytes: int) -> Protocol:
    """LL, while its threads have little to do."""
    blocks, threads = _ll_kernel(graph, algorithm, size_bytes)
    each = _LL_THREAD_BYTES * (2 if graph.nodes > 1 else 1) * (4 if algorithm == "tree" else 1)
    most = blocks * threads * _chunks_a_loop(graph, algorithm) * each
    return "LL" if size_bytes <= most else "Simple"


def most_of_a_tree(graph: Graph) -> float:
    """Bytes of the largest message that goes by a tree: 0 on one node, no limit on two."""
    if graph.tree_threshold is not None:
        return graph.tree_threshold if graph.nodes > 1 else 0
    ring_us = _RING_HOP_US * (graph.ranks - 1)
    chain = graph.ranks // graph.nodes - 1
    tree_us = _TREE_HOP_US * (graph.nodes.bit_length() - 1) + _CHAIN_HOP_US * chain
    if graph.nodes < 2 or ring_us <= tree_us:
        return 0
    ring, part = _RING_MB_PER_S, 2 / 3
    if graph.path == "nvlink":
        ring, part = ring * channels(graph), 3 / 4 * (2 if graph.nodes == 2 else 1)
    return inf if part > 1 else ring * part / (1 - part) * (ring_us - tree_us)


def channels(graph: Graph) -> int:
    """One for each NIC, and where there is NVLink two."""
    if graph.nodes == 1:
        return min(_MOST_CHANNELS, graph.channels[0])
    return min(_MOST_CHANNELS, graph.nics * (2 if graph.path == "nvlink" else 1))


def ll_blocks(graph: Graph, algorithm: Algorithm, size_bytes: int) -> int:
    """How many channels LL uses; Simple uses all."""
    return _ll_kernel(graph, algorithm, size_bytes)[0]


def _ll_kernel(graph: Graph, algorithm: Algorithm, size_bytes: int) -> tuple[int, int]:
    """Channels, and threads of each: more threads first."""
    chunks, threads = _chunks_a_loop(graph, algorithm), _LEAST_THREADS
    while ceil(size_bytes / (threads * chunks)) > _A_THREAD_BYTES and threads < _MOST_THREADS:
        threads *= 2
    wanted = ceil(size_bytes / (threads * chunks * _A_THREAD_BYTES))
    return max(1, min(channels(graph), wanted)), threads


def _chunks_a_loop(graph: Graph, algorithm: Algorithm) -> int:
    return graph.ranks if algorithm == "ring" else 1
