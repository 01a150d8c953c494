"""What NCCL's search finds on a job's links: channels of rings and trees, and their speeds.

Source: NCCL 2.30 src/graph/topo.h and search.cc, in its own unit: GB/s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import floor
from typing import Literal

from ddpsim.cluster.nccl.tables import Tables, tables
from ddpsim.scenario.cluster import NEWEST_NCCL as NEWEST
from ddpsim.scenario.device import Architecture

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
_MOST_CHANNELS = 32  # of the search


@dataclass(frozen=True)
class Graph:
    """What NCCL's search knows of a job: GB/s of one GPU, and of a node's NICs together.

    `path` of GPUs in a node: nvlink or pcie. `fewer`: GPUs that all nodes together have less than
    `gpus_per_node` each. `reduces`: the switch sums (NVLS; assumed: only where nodes are equally
    large). `minor`: of NCCL 2.
    `averages`: reduce-scatters divide too. `pats`: PAT may be taken.
    `gpu_direct`: NICs reach the GPUs' memory by a switch of PCIe, not through the host. `ll128`:
    nothing else keeps NCCL from LL128 between nodes. NICs at the CPU do, as Slingshot's are on
    published machines (nccl src/graph/tuning.cc asks for PATH_PXB).
    `net_latency_us`: what the network's plugin declares; InfiniBand and sockets declare none.
    `min_channels`, `max_channels` and `buffer_bytes`: as NCCL's variables set them; 0: not set.
    `tree_threshold`: that of NCCL 2.4, if it is set.
    """

    architecture: Architecture
    nodes: int
    gpus_per_node: int
    intra_gb_per_s: float
    nics: int = 0
    nic_gb_per_s: float = 0.0
    path: Literal["nvlink", "pcie"] = "nvlink"
    fewer: int = 0
    reduces: bool = False
    cpu_vendor: Literal["intel", "amd", "other"] = "intel"
    minor: int = NEWEST
    gpu_direct: bool = True
    ll128: bool = True
    net_latency_us: float = 0.0
    min_channels: int = 0
    max_channels: int = 0
    buffer_bytes: int = 0
    averages: bool = False
    pats: bool = True
    tree_threshold: int | None = None

    @cached_property
    def tables(self) -> Tables:
        """The constants of its version."""
        return tables(self.minor)

    @cached_property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.nodes * self.gpus_per_node - self.fewer

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

    @property
    def pat_part(self) -> float:
        """What of the bandwidth PAT reaches."""
        return 0.85 if self.minor == 23 else 0.75

    @property
    def nvls_gb_per_s(self) -> float:
        """The rate of a channel between a GPU and its switch."""
        part = self.intra_gb_per_s / self.gpus_per_node
        return next((s for s in _INTRA_SPEEDS[self.architecture] if s <= part), part)

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
