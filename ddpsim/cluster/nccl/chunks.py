"""How NCCL cuts a message, and how fast its kernels copy and sum: a thread block a channel.

Messages are cut into channels, chunks of a tree or of NVLS, messages of a ring.

Sources: nccl src/enqueue.cc (calcCollChunking, channels of a task), src/graph/connect.cc (channels
of a communicator), src/init.cc and src/include/device.h (buffers), v2.30; the older rules of trees
in v2.5 to v2.19.
"""

from __future__ import annotations

from math import ceil, floor, inf, log2
from typing import TYPE_CHECKING, NamedTuple

from ddpsim.cluster.nccl import thresholds
from ddpsim.cluster.nccl.thresholds import LAST_WITHOUT_TUNER
from ddpsim.scenario.device import PCIE_GENERATION, SLOT_BYTES_PER_S

if TYPE_CHECKING:
    from ddpsim.cluster.nccl.graph import Graph
    from ddpsim.cluster.nccl.tables import Algorithm, Protocol
    from ddpsim.scenario.device import Architecture

_KIB = 1024
_BUFFER_STEP_BYTES = {"LL": 64 * _KIB, "LL128": 614_400, "Simple": 512 * _KIB}
_EARLY_LL_STEP_BYTES = 16 * _KIB  # data of 2048 lines, to NCCL 2.4 (src/include/devcomm.h)
_PAYLOAD = {"LL": 0.5, "LL128": 15 / 16, "Simple": 1.0}
_RING_STEPS_A_CHUNK = {"LL": 1, "LL128": 1, "Simple": 4}
RING_CHUNK_BYTES = _BUFFER_STEP_BYTES["Simple"] * _RING_STEPS_A_CHUNK["Simple"]  # of Simple
_LL_PART = 1 / 8  # assumed: a message of LL, small as it is, keeps a NIC busy for so much less
# a chunk of Simple is two slices; LL's small messages are taken to cost as little as their part
_RING_MESSAGES_A_CHUNK = {"LL": _LL_PART, "LL128": 1, "Simple": 2}
_NVLS_CHANNELS = {"hopper": 16, "blackwell": 32}
_NVLS_CHUNK_BYTES = 128 * _KIB


class Cut(NamedTuple):
    """How one all-reduce is cut.

    `chunk_bytes`: what a pipeline passes on at a time, all channels of half of the bytes together.
    `messages`: how many a NIC sends in one step of a ring, or of one chunk and one flow of a tree.
    """

    chunk_bytes: int
    messages: float


def cut(graph: Graph, algorithm: Algorithm, protocol: Protocol, size_bytes: int) -> Cut:
    """Cut `size_bytes` as NCCL does."""
    if algorithm == "nvls":
        return _of_nvls(graph, size_bytes)
    channels = int(blocks(graph, algorithm, protocol, size_bytes))
    if algorithm == "ring":
        largest = _step_bytes(graph, protocol) * _RING_STEPS_A_CHUNK[protocol] * channels
        loops = max(1, ceil(size_bytes / graph.ranks / largest))
        return Cut(
            size_bytes, loops * _RING_MESSAGES_A_CHUNK[protocol] * _in_a_row(graph, channels)
        )
    of_a_tree = max(1, channels // 2)
    chunk = _tree_chunk_bytes(graph, protocol, size_bytes, channels)
    steps = _LL_PART if protocol == "LL" else 1.0
    return Cut(max(1, int(chunk * of_a_tree)), steps * _in_a_row(graph, of_a_tree))


def _in_a_row(graph: Graph, channels: int) -> float:
    """How many messages of one step a NIC sends one after the other, for so many channels.

    Assumed: two at most, as those of more channels come from several GPUs' threads at once (4 NICs,
    16 channels: rings of 5 x 8 H100 in nccl issue 1368 take no longer).
    """
    return min(2.0, max(1.0, channels / max(1, graph.nics)))


def _step_bytes(graph: Graph, protocol: Protocol) -> int:
    """Data of one of the eight steps of a channel's buffer."""
    if protocol == "LL" and graph.minor <= LAST_WITHOUT_TUNER:
        return _EARLY_LL_STEP_BYTES
    if protocol == "Simple" and graph.buffer_bytes:
        return max(1, graph.buffer_bytes // 8)
    return int(_BUFFER_STEP_BYTES[protocol] * _PAYLOAD[protocol])


def communicator_channels(graph: Graph) -> int:
    """Twice those of the search; with fast links over several nodes, once more."""
    if graph.minor <= LAST_WITHOUT_TUNER:
        return thresholds.channels(graph)
    most = graph.tables.most_channels
    count, speed = graph.channels
    channels = min(most, 2 * count)
    is_late = graph.architecture in ("hopper", "blackwell")
    if is_late and graph.minor >= 18 and graph.nodes > 1 and speed > 45 and channels < 16:
        channels *= 2
    if graph.max_channels:
        channels = min(channels, graph.max_channels)
    return max(channels, min(graph.min_channels, most))


def blocks(graph: Graph, algorithm: Algorithm, protocol: Protocol, size_bytes: int) -> float:
    """How many channels, each a thread block, so that each thread has enough to do.

    Not rounded, so that a time grows with the bytes.
    """
    if graph.minor <= LAST_WITHOUT_TUNER:
        all_of_them = communicator_channels(graph)
        return (
            thresholds.ll_blocks(graph, algorithm, size_bytes) if protocol == "LL" else all_of_them
        )
    threads, least_bytes = {
        "Simple": (512, 64),
        "LL": (512, 8 * graph.ranks if algorithm == "ring" else 8),
        "LL128": (640, 8),
    }[protocol]
    return max(1.0, min(communicator_channels(graph), size_bytes / (threads * least_bytes)))


def _tree_chunk_bytes(graph: Graph, protocol: Protocol, size_bytes: int, channels: int) -> float:
    """Halved while too few chunks would fill the pipeline."""
    if protocol == "LL":
        return _step_bytes(graph, protocol)
    chunk = _BUFFER_STEP_BYTES[protocol] if protocol == "LL128" else _step_bytes(graph, protocol)
    nodes, per_node = graph.nodes, graph.gpus_per_node
    levels = floor(log2(nodes))
    if protocol == "LL128":
        steps = 1 + levels + 0.1 * per_node
        wanted = [(64 * steps / per_node, 128 * _KIB), (16 * steps / per_node, 32 * _KIB)]
    elif protocol == "Simple" and graph.minor <= 19:
        depth = per_node - (graph.minor > LAST_WITHOUT_TUNER) + levels
        wanted = [(8 * depth, 128 * _KIB), (4 * depth, 64 * _KIB), (depth, 32 * _KIB)]
    else:
        wanted = []
    for chunks, least in wanted:
        while size_bytes // (channels * chunk) < chunks and chunk > least:
            chunk //= 2
    return chunk * _PAYLOAD[protocol]


def _of_nvls(graph: Graph, size_bytes: int) -> Cut:
    heads, channels = graph.gpus_per_node, _NVLS_CHANNELS.get(graph.architecture, 16)
    at_once = channels * heads
    rules = ((64, 64), (8, 32), (2, 16)) if graph.nodes == 1 else ((4, 64), (1, 32))
    chunk = _NVLS_CHUNK_BYTES
    if graph.nodes >= 4 and graph.minor >= 19:
        chunk = 64 * _KIB
    for chunks, smaller in rules:
        if size_bytes < chunks * at_once * chunk:
            chunk = min(chunk, smaller * _KIB)
    return Cut(max(1, chunk * at_once // 2), _in_a_row(graph, channels // 2))


# --- how fast thread blocks copy and sum ---------------------------------------------------------

# A block of Volta or Ampere moves 3 to 4 GB/s with LL, so that few channels set the pace of small
# messages. In a tree a block reads from all children before it sends, one after the other. Sources:
# NCCL's own limits (nccl v2.30 src/graph/tuning.cc): llMaxBws of one node over the channels of a
# communicator there (12 on Volta, 24 on Ampere), ll128MaxBwPerCh and perChMaxTreeBws of one node.
# LL of Hopper: dgxc-benchmarking's 1 x 8 H100, as long at 512 KiB as at 8 KiB; of Blackwell assumed
# as much. Held against sweeps of several nodes in docs/validation.md.
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
    children = 2 if graph.nodes > 3 else 1  # of node 2: 1 and 3 (src/graph/trees.cc)
    return children + (graph.gpus_per_node > 1)
