"""Which algorithm and protocol NCCL takes for a collective: its tuner's own estimate.

Formulas of NCCL 2.30 (src/graph/tuning.cc, enqueue.cc) with the tables of the
version asked for (`ddpsim.cluster.nccl.tables`), in its own units: GB/s and us. It serves to
choose, as in NCCL, and never as the answer: its latencies are half of what is measured (nccl-tests
issue 123). What the choice costs: `ddpsim.cluster.nccl.cost`.

For reduce-scatters and all-gathers NCCL has rings, NVLS on one node (from 2.19 on) and PAT where
each node has one GPU (from 2.23 on); trees for all-reduces alone. The reduce-scatters of
`fully_shard` average, but of float16: these scale (ncclDevPreMulSum), and have rings alone
(updateCollCostTable for PAT, ncclNvlsSupported for NVLS).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from math import floor, log2
from typing import NamedTuple

from ddpsim.cluster.nccl import thresholds
from ddpsim.cluster.nccl.graph import Graph
from ddpsim.cluster.nccl.tables import PROTOCOLS, Algorithm, Protocol
from ddpsim.cluster.transfers import TURNS, Operation
from ddpsim.scenario.device import Architecture

_NOT_TO_BE_HAD = "NCCL has no such algorithm and protocol on these ranks"


class Estimate(NamedTuple):
    """The tuner's row of one algorithm and protocol."""

    algorithm: Algorithm
    protocol: Protocol
    latency_us: float
    bandwidth_gb_per_s: float  # of the message


class Choice(NamedTuple):
    """What the tuner takes, and its own estimate of the time; of thresholds: 0."""

    algorithm: Algorithm
    protocol: Protocol
    time_us: float


@lru_cache(maxsize=64)
def estimates(graph: Graph, operation: Operation = "all_reduce") -> tuple[Estimate, ...]:
    """Every algorithm and protocol that this job may use for an operation."""
    rows = []
    for algorithm in _algorithms(graph, operation):
        for i, protocol in enumerate(PROTOCOLS):
            if algorithm in ("nvls", "pat") and protocol != "Simple":
                continue
            if protocol == "LL128" and not _keeps_128_bytes(graph):
                continue
            bandwidth = _bandwidth(graph, algorithm, i, TURNS[operation])
            if bandwidth > 0:
                latency = _latency(graph, algorithm, i, TURNS[operation])
                rows.append(Estimate(algorithm, protocol, latency, bandwidth))
    return tuple(rows)


def _keeps_128_bytes(graph: Graph) -> bool:
    """Whether they arrive together: over NVLink, and from NICs at most a switch of PCIe away.

    Source: nccl src/graph/tuning.cc, typeIntra and typeInter; NCCL 2.4 has no LL128.
    """
    if graph.minor <= thresholds.LAST_WITHOUT_TUNER:
        return False
    if graph.architecture == "blackwell" and graph.minor <= 24:
        return False  # "other cases are not tested"
    over_pcie = graph.path == "pcie" and graph.gpus_per_node > 1
    return not over_pcie and (graph.nodes == 1 or (graph.gpu_direct and graph.ll128))


def choose(
    graph: Graph,
    size_bytes: int,
    algorithms: Sequence[str] = (),
    protocols: Sequence[str] = (),
    operation: Operation = "all_reduce",
) -> Choice:
    """The fastest by the tuner's estimate, of those named (as by NCCL_ALGO and NCCL_PROTO).

    NCCL 2.4 has thresholds in place of estimates. Raises ValueError where none can be used.
    """
    if graph.minor <= thresholds.LAST_WITHOUT_TUNER:
        return _by_thresholds(graph, size_bytes, algorithms, protocols, operation)
    named = [
        Choice(row.algorithm, row.protocol, time_us(graph, row, size_bytes, operation))
        for row in estimates(graph, operation)
        if (not algorithms or row.algorithm in algorithms)
        and (not protocols or row.protocol in protocols)
    ]
    if not named:
        raise ValueError(_NOT_TO_BE_HAD)
    return min(named, key=lambda choice: choice.time_us)


def known_choices(
    graph: Graph, operation: Operation, algorithms: Sequence[str], protocols: Sequence[str]
) -> dict[int, Choice]:
    """The choices made so far, by size, to be added to.

    Links that differ in their rates alone share them, if the tuner's estimates and channels agree.
    """
    rest = replace(graph, intra_gb_per_s=0.0, nic_gb_per_s=0.0)
    rows = estimates(graph, operation if operation in TURNS else "all_reduce")
    return _known_choices(rows, graph.channels, rest, operation, algorithms, protocols)


@lru_cache(maxsize=64)
def _known_choices(*_: object) -> dict[int, Choice]:
    """A new table for each key."""
    return {}


def _by_thresholds(
    graph: Graph,
    size_bytes: int,
    algorithms: Sequence[str],
    protocols: Sequence[str],
    operation: Operation,
) -> Choice:
    algorithm, protocol = thresholds.by_size(graph, size_bytes, operation)
    choices = {row[:2] for row in estimates(graph, operation)}
    if algorithms and algorithm not in algorithms:
        algorithm = next((name for name, _ in choices if name in algorithms), "nvls")
        protocol = thresholds.protocol_of(graph, algorithm, size_bytes)
    if protocols and protocol not in protocols:
        protocol = next((name for _, name in choices if name in protocols), "LL128")
    if (algorithm, protocol) not in choices:
        raise ValueError(_NOT_TO_BE_HAD)
    return Choice(algorithm, protocol, 0.0)


def time_us(
    graph: Graph, row: Estimate, size_bytes: int, operation: Operation = "all_reduce"
) -> float:
    """The tuner's estimate for one message."""
    latency, bandwidth = row.latency_us, row.bandwidth_gb_per_s
    if row.algorithm == "tree":
        bandwidth *= tree_part(graph, row.protocol, size_bytes)
    if row.algorithm == "nvls" and _corrects_nvls(graph):
        bandwidth *= tree_part(graph, row.protocol, size_bytes, last=23)
    is_simple_ring = (row.algorithm, row.protocol) == ("ring", "Simple")
    if is_simple_ring and graph.nodes > 1 and operation == "all_reduce":
        latency *= _ring_factor(graph, size_bytes)
    return latency + size_bytes / (1000 * bandwidth)


def _ring_factor(graph: Graph, size_bytes: int) -> float:
    """What larger messages of Simple add to a ring's latency."""
    late = graph.architecture in ("hopper", "blackwell")
    if graph.minor >= 18:
        channels = min(graph.tables.most_channels, 2 * graph.channels[0])
        is_large = size_bytes / (channels * graph.ranks) >= 64
        factor = 1.9 if graph.architecture == "volta" else 1.4
    else:
        is_large = graph.minor >= 7 and size_bytes >= 4096 * graph.ranks
        factor = 1.5 if graph.minor == 17 and late else 1.9
    return factor if is_large else 1.0


def _corrects_nvls(graph: Graph) -> bool:
    """Whether trees of switches have a tree's factors too: on Blackwell, but not beside Arm.

    Source: nccl v2.29 src/graph/tuning.cc, ncclTopoGetAlgoTime.
    """
    is_x86 = graph.cpu_vendor in ("intel", "amd")
    return graph.minor >= 29 and graph.architecture == "blackwell" and graph.nodes > 1 and is_x86


def tree_part(graph: Graph, protocol: Protocol, size_bytes: int, last: int = 22) -> float:
    """What of its bandwidth a tree reaches with messages of this size; all beyond the last."""
    place = floor(log2(max(1.0, size_bytes / 64)))
    return graph.tables.tree_part[PROTOCOLS.index(protocol)][place] if place <= last else 1.0


def _algorithms(graph: Graph, operation: Operation) -> Iterator[Algorithm]:
    yield "ring"
    if operation != "all_reduce":
        yield from _of_shards(graph, operation)
        return
    yield "tree"
    least, most = graph.tables.nvls_from_nodes
    if _switch_sums(graph) and least <= graph.nodes <= most:
        yield "nvls"


def _of_shards(graph: Graph, operation: Operation) -> Iterator[Algorithm]:
    """What reduce-scatters and all-gathers have beside rings."""
    if graph.averages and operation == "reduce_scatter":
        return
    if graph.nodes == 1 and _switch_sums(graph) and graph.minor >= 19:
        yield "nvls"
    if graph.pats and graph.nodes == graph.ranks > 1 and graph.minor >= 23:
        yield "pat"


def _switch_sums(graph: Graph) -> bool:
    """Whether there is NVLS at all: of two GPUs not from 2.18 to 2.27 (transport/nvls.cc)."""
    return graph.reduces and graph.gpus_per_node >= graph.tables.nvls_from_gpus


def _bandwidth(graph: Graph, algorithm: Algorithm, protocol: int, turns: int) -> float:
    """GB/s of the message."""
    figures = graph.tables
    limits, column = figures.limits[graph.architecture], min(graph.nodes, 3) - 1
    count, speed = graph.channels
    bus, n = min(count * speed, limits.bus), graph.ranks
    around = n / (turns * (n - 1))
    if algorithm == "ring":
        ll128_part = figures.single_gpu_ll128_part if graph.gpus_per_node == 1 else 0.92
        ll128 = min(ll128_part * bus, count * limits.ring_ll128[column])
        ll_part = figures.ll_part_of_shards if turns == 1 and graph.nodes == 1 else figures.ll_part
        return (min(most_ll_gb_per_s(graph), ll_part * bus), ll128, bus)[protocol] * around
    if algorithm == "tree":
        bus = min(0.92 * min(graph.tree_gb_per_s, limits.bus), count * limits.tree[column])
        bus = min(bus, figures.tree_bus_gb_per_s[column])
        part = 7 / 9 if graph.nodes == 1 else figures.tree_ll128_part
        ll128 = min(bus * part, count * limits.tree_ll128[column])
        rate = (min(bus / 3.8, most_ll_gb_per_s(graph)), ll128, bus)[protocol] * 0.5
        return rate * (figures.single_gpu_tree_part if graph.gpus_per_node == 1 else 1.0)
    if algorithm == "pat":
        return graph.tree_gb_per_s * graph.pat_part
    return _nvls_bandwidth(graph, bus, around) if turns == 2 else _nvls_shards_bandwidth(graph)


def _nvls_shards_bandwidth(graph: Graph) -> float:
    """The rate of one node's reduce-scatters and all-gathers, not scaled by their ranks."""
    heads = graph.gpus_per_node
    bus, part = heads * graph.nvls_gb_per_s, (heads - 1) / heads
    if graph.minor <= 26:
        return bus * (5 / 6 if graph.minor <= 22 else 1.0)
    if graph.minor == 27:
        return bus * min(part, 0.9)
    return bus * graph.tables.limits[graph.architecture].nvls_efficiency * part * part


def _nvls_bandwidth(graph: Graph, ring_bus: float, around: float) -> float:
    """Bus bandwidth of an all-reduce by the switch or by trees of switches.

    NCCL 2.17 to 2.27 take a part of the links' rate, whatever the ranks: n / (2 (n - 1)), `around`,
    is for rings alone there, and for both from 2.28 on (src/graph/tuning.cc, "ratio").
    """
    limits, column = graph.tables.limits[graph.architecture], min(graph.nodes, 3) - 1
    heads, nodes = graph.gpus_per_node, graph.nodes
    each = graph.nvls_gb_per_s
    over = graph.nics * graph.nic_gb_per_s / heads
    if graph.minor == 17:
        return 0.75 * ring_bus  # for want of a search of its own
    if graph.minor == 18 and nodes > 1:
        inside = each if nodes == 2 else min(each, over)
        return heads * inside * 0.7 * nodes / (2 * (nodes - 1))
    if graph.minor < 28:  # no efficiency of the switch yet
        inside = min(each, over if nodes <= 2 else over / 2) if nodes > 1 else each
        return heads * inside * 5 / 6
    inside = each * limits.nvls_efficiency * (heads - 1) / heads * 2
    if nodes == 1:
        return heads * inside * around
    most = min(inside, over * (2 if nodes == 2 else 1), limits.nvls_tree[column])
    return heads * most * around


def most_ll_gb_per_s(graph: Graph) -> float:
    """Bus bandwidth that LL reaches at most; over several nodes looked up by the CPU's vendor."""
    by_vendor: Architecture = "ampere" if graph.cpu_vendor == "amd" else "volta"
    row = graph.architecture if graph.nodes == 1 else by_vendor
    return graph.tables.limits[row].ll[min(graph.nodes, 3) - 1]


def _latency(graph: Graph, algorithm: Algorithm, protocol: int, turns: int) -> float:
    figures = graph.tables
    base = figures.base_us[algorithm][protocol]
    net, hops = _net_us(graph, algorithm, protocol), floor(log2(graph.nodes))
    if algorithm == "pat":
        return pat_us(graph, net)
    intra = figures.hop_us[graph.path][algorithm][protocol]
    if graph.nodes > 1 and protocol == 0:
        intra *= figures.ll_hop_factor
    if algorithm == "tree":
        return base + 2 * ((graph.ranks // graph.nodes - 1) * intra + hops * net)
    if algorithm == "nvls":
        crossed = graph.nodes - 1 if graph.minor == 18 else hops  # 2.18 counts a chain of nodes
        return base + intra + 2 * crossed * net
    crossing = _ring_crossings(graph, turns)
    overhead = 0.0
    if figures.has_network_overhead and graph.nodes > 1:
        overhead = 2.0 if graph.cpu_vendor == "amd" else 1.0
    step = max(intra, overhead * (3 if protocol == 2 else 1))
    return base + (turns * (graph.ranks - 1) - crossing) * step + crossing * net


def pat_us(graph: Graph, net_us: float) -> float:
    """NCCL's latency of PAT, with hops of `net_us`: some go as a tree's, and a linear part."""
    base_us = graph.tables.base_us["pat"][2]
    return base_us + floor(log2(graph.nodes)) * net_us / 3.5 + 2.8 * graph.ranks


def _ring_crossings(graph: Graph, turns: int) -> int:
    """Steps of a ring for which the tuner counts the network."""
    if graph.nodes == 1:
        return 0
    if graph.minor <= 6:
        return turns * (graph.ranks - 1)  # each step paid for the network
    counts_all = graph.tables.crossings_of_all and turns == 2
    return turns * (graph.nodes if counts_all else graph.nodes - 1)


def _net_us(graph: Graph, algorithm: Algorithm, protocol: int) -> float:
    """A hop over the network, with what the plugin declares; twice that for Simple's flush."""
    figures = graph.tables
    of_a_tree = graph.gpus_per_node == 1 and graph.minor >= 23
    hop = figures.hop_us["net"]["tree" if of_a_tree else algorithm][protocol]
    if figures.latency_replaces_hop:
        return graph.net_latency_us or hop
    if graph.minor < 12:
        return hop
    return hop + graph.net_latency_us * (2 if protocol == 2 else 1)
