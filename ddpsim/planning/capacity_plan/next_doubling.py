"""The network that would make doubling the GPUs worthwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil, floor, inf, log10, sqrt
from typing import Literal

from ddpsim.cluster.transports import MORE_SOCKETS
from ddpsim.cluster.wires import Wires, link_of
from ddpsim.planning.many import simulate_many
from ddpsim.prediction.api import simulate
from ddpsim.prediction.resolve import resolve
from ddpsim.result.capacity import KNEE_EFFICIENCY, NextDoubling
from ddpsim.scenario.cluster import Cluster
from ddpsim.scenario.links import InterNode, IntraNode, LinkKind
from ddpsim.scenario.schema import Scenario
from ddpsim.units import format_bytes_per_s

_UNLIMITED_BYTES_PER_S = 1e15  # the scenario format's own limit
_NO_TIME = 1e-6  # of the network's times
_HALVINGS = 8


def next_doubling(today: Scenario, doubled: Scenario, growth: float = 1.0) -> NextDoubling:
    """Compare the doubled scenario with twice the throughput of today's; find the network it needs.

    `growth`: so many times the samples are needed at the doubled global batch.

    The search is over the bandwidth of the links between nodes (inside the node, where there is
    one node), and over all times where a log or a profile says them.
    """
    wanted = 2 * growth * _throughput(today)
    efficiency, free = _throughput(doubled) / wanted, _stretched(doubled, _NO_TIME) / wanted
    cluster = doubled.cluster
    known_times = cluster.is_measured
    key: LinkKind = "inter_node" if cluster.nodes > 1 else "intra_node"
    link: Literal["inter_node", "intra_node", "all_reduce"] = "all_reduce" if known_times else key
    rate = None if known_times else _bandwidth(cluster, key)
    doubling = NextDoubling(
        gpus=cluster.gpus,
        nodes=cluster.nodes,
        gpus_per_node=cluster.gpus_per_node,
        efficiency=efficiency,
        without_network_time=free,
        gain_without_network_time=2 * growth * _stretched(today, _NO_TIME) / wanted - 1,
        samples_growth=growth,
        link=link,
        bandwidth_bytes_per_s=rate,
    )
    if efficiency >= KNEE_EFFICIENCY:
        return doubling
    return _faster(doubling, today, doubled, wanted, key)


def with_bandwidth(scenario: Scenario, key: LinkKind, bytes_per_s: float) -> Scenario:
    """The scenario with another bandwidth for one kind of link."""
    cluster = scenario.cluster
    stated = getattr(cluster, key)
    if cluster.machine:  # what is stated beside it changes that alone
        link = stated or (InterNode() if key == "inter_node" else IntraNode())
    else:
        latency_s = stated.latency_s if stated else None  # a preset's stays NCCL's own
        link = _link(cluster, key).having(latency_s=latency_s)
    return scenario.having("cluster", **{key: link.with_bandwidth(bytes_per_s)})


def _link(cluster: Cluster, key: LinkKind) -> IntraNode | InterNode:
    link = link_of(cluster, key)
    if link is None:
        raise ValueError(f"this cluster has no {key}")
    return link


def _bandwidth(cluster: Cluster, key: LinkKind) -> float:
    return _link(cluster, key).bandwidth_bytes_per_s or 0.0


def _faster(
    doubling: NextDoubling, today: Scenario, doubled: Scenario, wanted: float, key: LinkKind
) -> NextDoubling:
    """Find the least bandwidth, or factor on all network times, that reaches the criterion.

    Tells the limit where an unlimited one does not reach it.
    """
    rate, unlimited = doubling.bandwidth_bytes_per_s, doubled

    def throughput(scenario: Scenario, speedup: float) -> float:
        if rate is None:
            return _stretched(scenario, 1 / speedup)
        return _throughput(with_bandwidth(scenario, key, speedup * rate))

    most, highest = 1 / _NO_TIME, doubling.without_network_time
    if rate is not None:
        most, unlimited = (
            _UNLIMITED_BYTES_PER_S / rate,
            with_bandwidth(doubled, key, _UNLIMITED_BYTES_PER_S),
        )
        highest = throughput(doubled, most) / wanted
        doubling = replace(doubling, unlimited_efficiency=highest)
    if highest < KNEE_EFFICIENCY:
        return replace(doubling, limit=_limit(doubling, unlimited, wanted))
    speedup, needed = _least(lambda each: throughput(doubled, each) / wanted, most), None
    if rate is not None:
        needed = _three_digits(speedup * rate)
        speedup = needed / rate
    gain, cluster = 0.0, today.cluster
    if rate is None or cluster.nodes > 1 or (key == "intra_node" and cluster.gpus_per_node > 1):
        gain = 2 * doubling.samples_growth * throughput(today, speedup) / wanted - 1
    return replace(
        doubling,
        needed_speedup=speedup,
        needed_bandwidth_bytes_per_s=needed,
        needed_efficiency=throughput(doubled, speedup) / wanted,
        gain_without_doubling=gain,
    )


def _limit(doubling: NextDoubling, doubled: Scenario, wanted: float) -> str:
    """What limits the step where the network, or one kind of link, is unlimited."""
    if doubling.samples_growth > 1 / KNEE_EFFICIENCY:
        return "the samples needed, which grow with the global batch"
    bottleneck = simulate(doubled).bottleneck
    limit = f"{bottleneck.kind}: {bottleneck.text}"
    if bottleneck.kind != "communication":
        return limit
    if doubling.without_network_time < KNEE_EFFICIENCY:
        return "compute, launches and DDP's own work, which do not halve"
    for key in doubled.cluster.links_used:
        doubled = with_bandwidth(doubled, key, _UNLIMITED_BYTES_PER_S)
    efficiency = _throughput(doubled) / wanted
    if efficiency >= KNEE_EFFICIENCY:
        return limit
    wires = Wires.of(doubled.cluster)
    if doubled.ddp.backend == "nccl" and wires.sockets_rate < inf:
        rate, is_default = format_bytes_per_s(wires.sockets_rate), wires.environment.threads is None
        helps = f"{MORE_SOCKETS} or RDMA help" if is_default else "RDMA helps"
        return f"NCCL's sockets: {rate} a NIC, whatever its line ({helps})"
    return f"latency: with every bandwidth unlimited it would be {efficiency:.1%}"


def _least(efficiency: Callable[[float], float], most: float) -> float:
    """The least speedup that reaches the criterion, to 1 %, by doubling and bisection."""
    low, high = 1.0, 2.0
    while efficiency(high) < KNEE_EFFICIENCY and high < most:
        low, high = high, min(2 * high, most)
    for _ in range(_HALVINGS):
        middle = sqrt(low * high)
        low, high = (middle, high) if efficiency(middle) < KNEE_EFFICIENCY else (low, middle)
    return high


def _three_digits(value: float) -> float:
    """Rounded up to three significant digits."""
    digit = 10.0 ** (floor(log10(value)) - 2)
    return ceil(value / digit - 1e-9) * digit


def _throughput(scenario: Scenario) -> float:
    """Samples per second of all ranks."""
    (brief,) = simulate_many([scenario])
    return brief.throughput_samples_per_s


def _stretched(scenario: Scenario, factor: float) -> float:
    """Samples per second where the network's times are `factor` times as long.

    What noise adds to a step is taken to stay as it is.
    """
    (brief,) = simulate_many([scenario])
    mean_s, job = brief.iteration_time_s.mean, resolve(scenario)
    saved_s = job.step_s() - job.step_s(network=factor)
    return brief.throughput_samples_per_s * mean_s / (mean_s - saved_s)
