"""How fast NCCL's kernels copy and sum: a thread block for each channel.

A block of Volta or Ampere moves 3 to 4 GB/s with LL, so that few channels set the pace of small
messages. In a tree a block reads from all children before it sends, one after the other.

Sources: NCCL's own limits (nccl v2.30 src/graph/tuning.cc): llMaxBws of one node over the channels
of a communicator there (12 on Volta, 24 on Ampere), ll128MaxBwPerCh and perChMaxTreeBws of one
node. LL of Hopper: dgxc-benchmarking's 1 x 8 H100, as long at 512 KiB as at 8 KiB; of Blackwell
assumed as much. Held against sweeps of several nodes in docs/validation.md.
"""

from __future__ import annotations

from collections import Counter
from math import ceil, inf
from typing import TYPE_CHECKING

from ddpsim.cluster.algorithms.pipeline import two_trees
from ddpsim.cluster.nccl.chunks import RING_CHUNK_BYTES, blocks, communicator_channels
from ddpsim.scenario.device import PCIE_GENERATION, SLOT_BYTES_PER_S

if TYPE_CHECKING:
    from ddpsim.cluster.nccl.graph import Graph
    from ddpsim.cluster.nccl.tables import Algorithm, Protocol
    from ddpsim.scenario.device import Architecture

_READS_LL_AT_ONCE = 10  # readLLBeginAll, src/device/prims_ll.h

_BLOCK_GB_PER_S: dict[Protocol, dict[Architecture, float]] = {
    "LL": {"volta": 3.25, "ampere": 3.65, "hopper": 40, "blackwell": 40},
    "LL128": {"volta": 20, "ampere": 20, "hopper": 36.7, "blackwell": 40},
    "Simple": {"volta": 26.5, "ampere": 24, "hopper": 38.7, "blackwell": 70},
}
_SLICES = {"ring": 2, "tree": 1, "nvls": 1}  # of a chunk, each sent on its own


def shared_s_per_byte(
    graph: Graph, algorithm: Algorithm, protocol: Protocol, size_bytes: int
) -> float:
    """Seconds for a byte of what all blocks of an all-reduce of `size_bytes` move together."""
    rate = 1e9 * _BLOCK_GB_PER_S[protocol][graph.architecture]
    parts = graph.ranks if algorithm == "ring" else 2
    sent_bytes = parts * ceil(size_bytes / parts)  # as algorithms round, so that no byte gains time
    return 1 / (rate * blocks(graph, algorithm, protocol, sent_bytes))


def most_bytes_per_s(graph: Graph, algorithm: Algorithm, protocol: Protocol) -> float:
    """What the blocks of a hop carry, where NCCL_MAX_NCHANNELS leaves few; else links are slower.

    A tree has half of the channels. LL's copies are priced apart, and NVLS has its own channels.
    """
    if not graph.max_channels or algorithm == "nvls" or protocol == "LL":
        return inf
    channels = communicator_channels(graph) / (1 if algorithm == "ring" else 2)
    return channels * 1e9 * _BLOCK_GB_PER_S[protocol][graph.architecture]


def in_a_tree_s(graph: Graph, protocol: Protocol, size_bytes: int, chunk_bytes: int) -> float:
    """Seconds of a chunk in the blocks of a node with the most children; each tree has half."""
    chunk = min(ceil(size_bytes / 2), chunk_bytes)
    each_s = chunk * shared_s_per_byte(graph, "tree", protocol, size_bytes)
    return (2 * _most_sources(graph, protocol) - (protocol == "LL")) * each_s


def through_hosts_s(graph: Graph, algorithm: Algorithm, size_bytes: int, chunk_bytes: int) -> float:
    """Seconds that a slice of Simple takes into the memory of one host and out of another's.

    Without GPUDirect a kernel writes there before the NIC sends, and reads there once all has come;
    one GPU's slot for each NIC. LL's blocks are slower than the slots, so that these hide.
    Source: nccl v2.8 src/transport/net.cc (useGdr); one direction of a hop each.
    """
    chunk = min(size_bytes / 2, chunk_bytes)
    if algorithm == "ring":
        chunk = min(size_bytes / graph.ranks, RING_CHUNK_BYTES * communicator_channels(graph))
    slots = min(graph.nics, graph.gpus_per_node)
    slot = SLOT_BYTES_PER_S[PCIE_GENERATION[graph.architecture]]
    each_s = chunk / _SLICES[algorithm] / (slots * slot)
    return 2 * each_s * (1 if algorithm == "ring" else 2)


def _most_sources(graph: Graph, protocol: Protocol) -> int:
    """Nodes that send to one, and the chain of its own GPUs; LL asks for all at once since 2.10."""
    if protocol == "LL" and graph.minor >= _READS_LL_AT_ONCE:
        return 1
    children = Counter(parent for parent in two_trees(graph.nodes)[0] if parent >= 0)
    return max(children.values()) + (graph.gpus_per_node > 1)
