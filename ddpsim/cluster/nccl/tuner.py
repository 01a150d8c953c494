"""Which algorithm and protocol NCCL takes for an all-reduce: its tuner's own estimate.

Tables and formulas of NCCL 2.30 (src/graph/tuning.cc, topo.h, search.cc, enqueue.cc), in its own
units: GB/s and us. It serves to choose, as in NCCL, and never as the answer: its latencies are
half of what is measured (nccl-tests issue 123). What the choice costs: `ddpsim.cluster.nccl.cost`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import floor, log2
from typing import Literal, NamedTuple

__all__ = [
    "BASE_US",
    "HOP_US",
    "PROTOCOLS",
    "Architecture",
    "Choice",
    "Estimate",
    "Graph",
    "choose",
    "estimates",
    "most_ll_gb_per_s",
    "tree_part",
]

Architecture = Literal["volta", "ampere", "hopper", "blackwell"]
Protocol = Literal["LL", "LL128", "Simple"]
Algorithm = Literal["ring", "tree", "nvls"]
PROTOCOLS: tuple[Protocol, ...] = ("LL", "LL128", "Simple")

BASE_US = {"ring": (6.6, 14.0, 8.4), "tree": (6.8, 14.0, 8.4), "nvls": (0.0, 0.0, 0.0)}
# latency of a hop in us by its path and algorithm, for each protocol
HOP_US: dict[str, dict[str, tuple[float, float, float]]] = {
    "nvlink": {"tree": (0.6, 1.25, 4.0), "ring": (0.6, 1.9, 3.4), "nvls": (25.0, 25.0, 25.0)},
    "pcie": {"tree": (1.0, 1.9, 4.0), "ring": (1.0, 2.5, 5.7), "nvls": (0.0, 0.0, 0.0)},
    "net": {"tree": (5.0, 8.5, 14.0), "ring": (2.7, 4.0, 14.0), "nvls": (20.9, 20.9, 20.9)},
}


class _Limits(NamedTuple):
    """GB/s; three figures are for 1, 2 and more nodes."""

    ll: tuple[float, float, float]
    ring_ll128_channel: float
    tree_ll128_channel: tuple[float, float, float]
    tree_channel: tuple[float, float, float]
    nvls_tree_channel: tuple[float, float, float]
    nvls_efficiency: float


_LIMITS: dict[Architecture, _Limits] = {
    "volta": _Limits((39, 39, 20.4), 20, (20, 20, 20), (26.5, 18.5, 10), (26.5, 18.5, 10), 0),
    "ampere": _Limits((87.7, 22.5, 19), 20, (20, 20, 20), (24, 23.6, 17.8), (24, 23.6, 17.8), 0),
    "hopper": _Limits(
        (141, 45, 35), 36.7, (36.7, 36.7, 29), (38.7, 41.4, 36), (0, 57.7, 45.5), 0.85
    ),
    "blackwell": _Limits((282, 90, 70), 40, (55.6, 31.67, 20), (70, 42.8, 24), (0, 96, 80), 0.74),
}
# what of a tree's bandwidth is left at 64 B, 128 B, 256 B ...
_TREE_PART = (
    [1] * 4 + [0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9] + [1] * 5,
    [1] * 5 + [0.9, 0.8, 0.8, 0.8, 0.7] + [0.6] * 6 + [0.8, 0.9, 0.9, 0.9, 0.9, 1, 1, 1],
    [0.9] * 7
    + [0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9, 0.9],
)
_INTRA_SPEEDS: dict[Architecture, tuple[float, ...]] = {
    "volta": (40, 30, 20, 18, 15, 12, 10, 9, 7, 6, 5, 4, 3),
    "hopper": (60, 50, 40, 30, 24, 20, 15, 12, 11, 6, 3),
    "blackwell": (90, 80, 70, 60, 50, 45, 40, 30, 24, 20, 19, 18),
}
_INTRA_SPEEDS["ampere"] = _INTRA_SPEEDS["volta"]
_NET_SPEEDS: dict[Architecture, tuple[float, ...]] = {
    "volta": (48, 30, 28, 24, 20, 18, 15, 12, 10, 9, 7, 6, 5, 4, 3, 2.4, 1.2, 0.24, 0.12),
    "hopper": (48, 45, 42, 40, 30, 24, 22, 20, 17.5, 15, 12, 6, 3, 2.4, 1.2, 0.24, 0.12),
}
_NET_SPEEDS["ampere"] = _NET_SPEEDS["volta"]
_NET_SPEEDS["blackwell"] = (96, 86, 80, 48, 45.1, *_NET_SPEEDS["hopper"][1:])
_MOST_CHANNELS = 32


@dataclass(frozen=True)
class Graph:
    """What NCCL's search knows of a job: GB/s of one GPU, and of a node's NICs together.

    `path` of GPUs in a node: nvlink or pcie. `reduces`: the switch sums (NVLS).
    """

    architecture: Architecture
    nodes: int
    gpus_per_node: int
    intra_gb_per_s: float
    nics: int = 0
    nic_gb_per_s: float = 0.0
    path: Literal["nvlink", "pcie"] = "nvlink"
    reduces: bool = False
    cpu_vendor: Literal["intel", "amd", "other"] = "intel"

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.nodes * self.gpus_per_node

    @cached_property
    def channels(self) -> tuple[int, float]:
        """How many channels, and GB/s of each, with which the search ends.

        Over nodes it tries speeds down to half of the fastest, and keeps the largest product.
        Source: nccl src/graph/search.cc, ncclTopoCompute.
        """
        if self.nodes == 1:
            return self._doubled(*self._inside())
        several = self.gpus_per_node > 1
        fastest = min(self.nic_gb_per_s, self.intra_gb_per_s) if several else self.nic_gb_per_s
        ladder = _NET_SPEEDS[self.architecture]
        fits = [speed for speed in ladder if speed <= fastest * 1.0001] or [fastest]
        tried = [speed for speed in fits if speed > 0.49 * fits[0]]
        speed = max(tried, key=lambda speed: speed * self._most(speed))
        return self._doubled(self._most(speed), speed)

    def _most(self, speed: float) -> int:
        """Channels of a speed that the NICs and the links inside a node carry.

        A ring leaves a node by another GPU in each channel, which then needs no link inside; but
        over PCIe it leaves by the same slot.
        """
        most = self.nics * max(1, floor(self.nic_gb_per_s / speed))
        if (g := self.gpus_per_node) > 1:
            used = (g - 1) / g if self.path == "nvlink" else 1.0
            most = min(most, max(1, floor(self.intra_gb_per_s / speed / used)))
        return min(most, _MOST_CHANNELS)

    def _doubled(self, count: int, speed: float) -> tuple[int, float]:
        """Fast channels are split in two (ncclTopoDupChannels); past sm80 not many slow ones."""
        is_late = self.architecture in ("hopper", "blackwell")
        if speed < 25 or (is_late and speed < 50 and count > 4):
            return count, speed
        split = min(2 * count, _MOST_CHANNELS)
        return split, speed * count / split

    @property
    def tree_gb_per_s(self) -> float:
        """All channels of trees: of two nodes, which send half as much, up to twice a ring's.

        Source: nccl src/graph/search.cc, "increase bwIntra for trees (2 nodes or collnet)".
        """
        count, speed = self.channels
        if self.nodes != 2:
            return count * speed
        most = self.intra_gb_per_s / count if self.gpus_per_node > 1 else 2 * speed
        faster = [s for s in _NET_SPEEDS[self.architecture] if speed < s <= most]
        enough = [s for s in faster if s >= 2 * speed]
        return count * (min(enough) if enough else max([speed, *faster]))

    def _inside(self) -> tuple[int, float]:
        total = self.intra_gb_per_s
        fits = [s for s in _INTRA_SPEEDS[self.architecture] if s <= total] or [total]
        count, speed = max((floor(total / s), s) for s in fits if _best(total, s, fits))
        return min(count, _MOST_CHANNELS), speed


def _best(total: float, speed: float, speeds: Sequence[float]) -> bool:
    """Whether channels of this speed use most of the total, and no faster ones as much."""
    used = {s: floor(total / s) * s for s in speeds}
    most = max(used.values())
    return speed == max(s for s in speeds if used[s] >= 0.97 * most)


class Estimate(NamedTuple):
    """The tuner's row of one algorithm and protocol."""

    algorithm: Algorithm
    protocol: Protocol
    latency_us: float
    bandwidth_gb_per_s: float  # of the message


class Choice(NamedTuple):
    """What the tuner takes, and its own estimate of the time."""

    algorithm: Algorithm
    protocol: Protocol
    time_us: float


@lru_cache(maxsize=64)
def estimates(graph: Graph) -> tuple[Estimate, ...]:
    """Every algorithm and protocol that this job may use."""
    found = []
    for algorithm in _algorithms(graph):
        for i, protocol in enumerate(PROTOCOLS):
            if algorithm == "nvls" and protocol != "Simple":
                continue
            if protocol == "LL128" and graph.path == "pcie" and graph.gpus_per_node > 1:
                continue  # 128 bytes are only sure to arrive together over NVLink
            bandwidth = _bandwidth(graph, algorithm, i)
            if bandwidth > 0:
                latency = _latency(graph, algorithm, i)
                found.append(Estimate(algorithm, protocol, latency, bandwidth))
    return tuple(found)


def choose(
    graph: Graph, size_bytes: int, algorithms: Sequence[str] = (), protocols: Sequence[str] = ()
) -> Choice:
    """The fastest by the tuner's estimate, of those named (as by NCCL_ALGO and NCCL_PROTO).

    Raises ValueError where none of them can be used.
    """
    named = [
        Choice(row.algorithm, row.protocol, time_us(graph, row, size_bytes))
        for row in estimates(graph)
        if (not algorithms or row.algorithm in algorithms)
        and (not protocols or row.protocol in protocols)
    ]
    if not named:
        raise ValueError("NCCL has no such algorithm and protocol on these ranks")
    return min(named, key=lambda choice: choice.time_us)


def time_us(graph: Graph, row: Estimate, size_bytes: int) -> float:
    """The tuner's estimate for one message."""
    latency, bandwidth = row.latency_us, row.bandwidth_gb_per_s
    if row.algorithm == "tree":
        bandwidth *= tree_part(row.protocol, size_bytes)
    if (row.algorithm, row.protocol) == ("ring", "Simple") and graph.nodes > 1:
        channels = min(64, 2 * graph.channels[0])
        if size_bytes / (channels * graph.ranks) >= 64:
            latency *= 1.9 if graph.architecture == "volta" else 1.4
    return latency + size_bytes / (1000 * bandwidth)


def tree_part(protocol: Protocol, size_bytes: int) -> float:
    """What of its bandwidth a tree reaches with messages of this size."""
    place = floor(log2(max(1.0, size_bytes / 64)))
    return _TREE_PART[PROTOCOLS.index(protocol)][place] if place <= 22 else 1.0


def _algorithms(graph: Graph) -> Iterator[Algorithm]:
    yield "ring"
    yield "tree"
    if graph.reduces and graph.gpus_per_node > 1:
        yield "nvls"


def _bandwidth(graph: Graph, algorithm: Algorithm, protocol: int) -> float:
    """GB/s of the message."""
    limits, column = _LIMITS[graph.architecture], min(graph.nodes, 3) - 1
    count, speed = graph.channels
    bus, n = count * speed, graph.ranks
    around = n / (2 * (n - 1))
    if algorithm == "ring":
        ll128 = min(0.92 * bus, count * limits.ring_ll128_channel)
        return (min(most_ll_gb_per_s(graph), 0.5 * bus), ll128, bus)[protocol] * around
    if algorithm == "tree":
        bus = min(0.92 * graph.tree_gb_per_s, count * limits.tree_channel[column])
        part = 7 / 9 if graph.nodes == 1 else 120 / 128
        ll128 = min(bus * part, count * limits.tree_ll128_channel[column])
        return (min(bus / 3.8, most_ll_gb_per_s(graph)), ll128, bus)[protocol] * 0.5
    heads = graph.gpus_per_node
    part = graph.intra_gb_per_s / heads
    each = next((s for s in _INTRA_SPEEDS[graph.architecture] if s <= part), part)
    inside = each * limits.nvls_efficiency * (heads - 1) / heads * 2
    if graph.nodes == 1:
        return heads * inside * around
    over = graph.nics * graph.nic_gb_per_s / heads * (2 if graph.nodes == 2 else 1)
    return heads * min(inside, over, limits.nvls_tree_channel[column]) * around


def most_ll_gb_per_s(graph: Graph) -> float:
    """Bus bandwidth that LL reaches at most; over several nodes looked up by the CPU's vendor."""
    row = graph.architecture if graph.nodes == 1 else _of_cpu(graph)
    return _LIMITS[row].ll[min(graph.nodes, 3) - 1]


def _of_cpu(graph: Graph) -> Architecture:
    return "ampere" if graph.cpu_vendor == "amd" else "volta"


def _latency(graph: Graph, algorithm: Algorithm, protocol: int) -> float:
    base = BASE_US[algorithm][protocol]
    intra = HOP_US[graph.path][algorithm][protocol]
    net = HOP_US["net"]["tree" if graph.gpus_per_node == 1 else algorithm][protocol]
    hops = floor(log2(graph.nodes))
    if algorithm == "tree":
        return base + 2 * ((graph.gpus_per_node - 1) * intra + hops * net)
    if algorithm == "nvls":
        return intra + 2 * hops * net
    crossing = 2 * (graph.nodes - 1)
    overhead = (2.0 if graph.cpu_vendor == "amd" else 1.0) if graph.nodes > 1 else 0.0
    step = max(intra, overhead * (3 if protocol == 2 else 1))
    return base + (2 * (graph.ranks - 1) - crossing) * step + crossing * net
