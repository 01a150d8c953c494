"""The constants of NCCL's tuner, by version: GB/s and us.

Read in each version's src/graph/tuning.cc and src/enqueue.cc at its tag (NVIDIA/nccl, v2.5 to
v2.30). The search for channels (`ddpsim.cluster.nccl.tuner.Graph`) is that of 2.30 for all.
"""

from __future__ import annotations

from functools import lru_cache
from math import inf
from typing import Literal, NamedTuple

from ddpsim.scenario.device import Architecture

Protocol = Literal["LL", "LL128", "Simple"]
Algorithm = Literal["ring", "tree", "nvls", "pat"]
PROTOCOLS: tuple[Protocol, ...] = ("LL", "LL128", "Simple")

_ByProtocol = tuple[float, float, float]
_ByNodes = tuple[float, float, float]  # 1, 2 and more
_NO_LIMIT = (inf, inf, inf)


class Limits(NamedTuple):
    """GB/s of one architecture; `ll` is the bus bandwidth of all channels, the others of one."""

    ll: _ByNodes
    ring_ll128: _ByNodes
    tree_ll128: _ByNodes
    tree: _ByNodes
    nvls_tree: _ByNodes
    nvls_efficiency: float
    bus: float  # of all channels


class Tables(NamedTuple):
    """One version's; latencies are for LL, LL128 and Simple.

    `hop_us`: by path and algorithm. `ll_part`: LL's part of the bus; `ll_part_of_shards`: that of
    reduce-scatters and all-gathers in one node. `ll_hop_factor`: of hops inside nodes, where there
    are several. `single_gpu_tree_part`: of a tree between nodes of one GPU, another pattern.
    `crossings_of_all`: a ring pays for 2N hops over the network and not for 2(N-1). `tree_part`:
    what of a tree's bandwidth is left at 64 B, 128 B ...
    """

    base_us: dict[Algorithm, _ByProtocol]
    hop_us: dict[str, dict[Algorithm, _ByProtocol]]
    limits: dict[Architecture, Limits]
    tree_part: tuple[tuple[float, ...], ...]
    tree_bus_gb_per_s: _ByNodes
    ll_part: float
    ll_part_of_shards: float
    ll_hop_factor: float
    single_gpu_ll128_part: float
    single_gpu_tree_part: float
    tree_ll128_part: float
    crossings_of_all: bool
    has_network_overhead: bool
    latency_replaces_hop: bool
    most_channels: int
    nvls_from_gpus: int  # of a node
    nvls_from_nodes: tuple[int, int]  # the numbers of nodes that it may have, from and to


@lru_cache(maxsize=32)
def tables(minor: int) -> Tables:
    """The tables of NCCL 2.`minor`, for each version that a scenario may name."""
    return Tables(
        base_us=_base_us(minor),
        hop_us=_hop_us(minor),
        limits={
            architecture: _limits(minor, architecture)
            for architecture in ("volta", "ampere", "hopper", "blackwell")
        },
        tree_part=_tree_part(minor),
        tree_bus_gb_per_s={5: (90, 70, 70), 6: (110, 110, 80), 7: (110, 110, 80)}.get(
            minor, _NO_LIMIT
        ),
        ll_part=0.5 if minor >= 21 else 0.25,
        ll_part_of_shards=0.5 if minor >= 21 else 1 / 3 if minor >= 7 else 0.25,
        ll_hop_factor=1.8 if 7 <= minor <= 17 else 1.0,
        single_gpu_ll128_part=0.92 if minor >= 23 else 0.7,
        single_gpu_tree_part=0.85 if minor >= 18 else 1.0,
        tree_ll128_part=120 / 128 if minor >= 10 else 0.915,
        crossings_of_all=12 <= minor <= 22,
        has_network_overhead=minor >= 18,
        latency_replaces_hop=12 <= minor <= 17,
        most_channels=64 if minor >= 25 else 32,
        nvls_from_gpus=3 if 18 <= minor <= 27 else 2,
        nvls_from_nodes=(1, 2**31) if minor >= 18 else (1, 1) if minor == 17 else (0, 0),
    )


def _base_us(minor: int) -> dict[Algorithm, _ByProtocol]:
    nvls = 40.0 if minor <= 17 else 23.0 if minor == 18 else 0.0
    ring: _ByProtocol = (6.6, 14.0, 8.4)
    tree: _ByProtocol = (6.8, 14.0, 8.4 if minor >= 23 else 0.0)
    if minor <= 17:
        ring, tree = (3.6, 10.0 if minor >= 7 else 3.6, 8.4), (4.4, 4.4, 0.0)
    return {"ring": ring, "tree": tree, "nvls": (nvls, nvls, nvls), "pat": (8.0, 8.0, 8.0)}


def _hop_us(minor: int) -> dict[str, dict[Algorithm, _ByProtocol]]:
    tree, tree_net = (4.0, 14.0) if minor >= 23 or minor == 18 else (28.0, 28.0)
    ring_net = 14.0 if minor >= 18 else 28.0 if minor in (12, 13) else 9.6
    if minor <= 7:
        tree_net = 50.0
    small = (0.6, 0.6) if minor >= 18 else (0.52, 0.47)
    nvls = 25.0 if minor >= 21 else 23.0 if minor >= 19 else 0.0
    nvls_net = 20.9 if minor >= 28 else 14.0 if minor >= 19 else 19.0
    hops: dict[str, dict[Algorithm, _ByProtocol]] = {
        "nvlink": {"tree": (small[0], 1.25, tree), "ring": (small[1], 1.9, 3.4)},
        "pcie": {"tree": (1.0, 1.9, 6.0 if minor == 18 else tree), "ring": (1.0, 2.5, 5.7)},
        "net": {"tree": (5.0, 8.5, tree_net), "ring": (2.7, 4.0, ring_net)},
    }
    if minor <= 6:
        hops["nvlink"] = {"tree": (0.5, 1.9, 28.0), "ring": (0.4, 2.5, 5.7)}
        hops["net"] = {"tree": (5.0, 7.5, 50.0), "ring": (0.9, 2.5, 6.6)}
    hops["nvlink"]["nvls"] = (nvls, nvls, nvls)
    hops["pcie"]["nvls"] = (0.0, 0.0, 0.0)
    hops["net"]["nvls"] = (nvls_net, nvls_net, nvls_net)
    return hops


def _limits(minor: int, architecture: Architecture) -> Limits:
    if architecture in ("hopper", "blackwell") and minor <= 16:
        return _limits(minor, "ampere")
    if architecture == "blackwell" and minor <= 24:
        return _limits(minor, "hopper")
    return Limits(
        ll=_most_ll(minor, architecture),
        ring_ll128=_ring_ll128(minor, architecture),
        tree_ll128=_tree_ll128(minor, architecture),
        tree=_tree(minor, architecture),
        nvls_tree=_nvls_tree(minor, architecture),
        nvls_efficiency={"hopper": 0.85, "blackwell": 0.74}.get(architecture, 0.0),
        bus=_bus(minor, architecture),
    )


def _most_ll(minor: int, architecture: Architecture) -> _ByNodes:
    if minor <= 7:
        return _NO_LIMIT
    rows: dict[Architecture, _ByNodes] = {
        "volta": (39, 39, 20.4),
        "ampere": (87.7, 22.5, 19),
        "hopper": (141, 45, 35) if minor >= 21 else (87.7, 22.5, 19),
        "blackwell": (282, 90, 70),
    }
    return rows[architecture]


def _ring_ll128(minor: int, architecture: Architecture) -> _ByNodes:
    if architecture == "hopper":
        return (36.7, 36.7, 36.7)
    if architecture == "blackwell":
        return (40, 40, 40) if minor >= 29 else (73.4, 34.6 if minor == 28 else 73.4, 73.4)
    one = 20.0 if minor >= 10 else 16.9 if minor >= 8 else 16.7 if minor == 7 else inf
    return (one, one, one)


def _tree_ll128(minor: int, architecture: Architecture) -> _ByNodes:
    if architecture == "hopper" and minor >= 18:
        return (36.7, 36.7, 29)
    if architecture == "blackwell":
        return (55.6, 31.67, 20) if minor >= 28 else (73.4, 73.4, 58)
    return _ring_ll128(minor, architecture)


def _tree(minor: int, architecture: Architecture) -> _ByNodes:
    if minor <= 7:
        return _NO_LIMIT
    rows: dict[Architecture, _ByNodes] = {
        "volta": (26.5, 18.5, 10),
        "ampere": (24, 23.6, 17.8) if minor >= 10 else (24, 22.5, 16),
        "hopper": (38.7, 41.4, 36 if minor >= 18 else 33),
        "blackwell": (70, 42.8, 24) if minor >= 28 else (77.4, 82.8, 72),
    }
    return rows[architecture]


def _nvls_tree(minor: int, architecture: Architecture) -> _ByNodes:
    if minor < 28:
        return _NO_LIMIT
    rows: dict[Architecture, _ByNodes] = {
        "hopper": (0, 57.7, 45.5),
        "blackwell": (0, 96, 80 if minor >= 30 else 43.8),
    }
    return rows.get(architecture, _tree(minor, architecture))


def _bus(minor: int, architecture: Architecture) -> float:
    if architecture == "ampere" and 7 <= minor <= 17:
        return 235
    return 370 if architecture == "hopper" and minor == 17 else inf


def _tree_part(minor: int) -> tuple[tuple[float, ...], ...]:
    if minor <= 6:
        return ((1.0,) * 24,) * 3
    ll = (*[1] * 4, 0.9, 0.8, *[0.7] * 4, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, *[1] * 5)
    ll128 = (*[1] * 5, 0.9, *[0.8] * 3, 0.7, *[0.6] * 6, 0.8, *[0.9] * 4, *[1] * 3)
    simple = (
        *([0.9] * 7),
        *(0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5),
        *(0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9, 0.9),
    )
    if minor <= 9:
        ll128 = (*ll128[:13], 0.5, 0.6, 0.6, 0.7, 0.7, 0.8, 0.9, 0.9, 0.92, 0.92, 0.92)
    if minor == 7:
        simple = (*simple[:15], 0.5, 0.5, 0.6, 0.6, 0.7, 0.8, 0.9, 0.9, 0.9)
    return tuple(tuple(float(part) for part in parts) for parts in (ll, ll128, simple))
