"""How NCCL cuts a message: channels, chunks of a tree or of NVLS, messages of a ring.

Sources: nccl src/enqueue.cc (calcCollChunking, channels of a task), src/graph/connect.cc (channels
of a communicator), src/init.cc and src/include/device.h (buffers), v2.30; the older rules of trees
in v2.5 to v2.19.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, log2
from typing import TYPE_CHECKING

from ddpsim.cluster.nccl import thresholds
from ddpsim.cluster.nccl.thresholds import LAST_WITHOUT_TUNER

if TYPE_CHECKING:
    from ddpsim.cluster.nccl.graph import Graph
    from ddpsim.cluster.nccl.tables import Algorithm, Protocol

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


@dataclass(frozen=True)
class Cut:
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
