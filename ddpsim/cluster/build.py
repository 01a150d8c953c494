"""Scenario to Network: a measured log where there is one, otherwise links."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ddpsim.cluster.collectives import (
    AllReduceLogCost,
    CollectiveCost,
    InterferingCost,
    LinkCost,
    Network,
    SingleRankCost,
    duration_ns,
)
from ddpsim.cluster.topology import Link, ring_links
from ddpsim.errors import InputError, blamed_on
from ddpsim.importers.all_reduce import AllReduceLog, read_all_reduce
from ddpsim.importers.cluster_profile import ClusterProfile
from ddpsim.provenance import Provenance, Trust, Uncertainty
from ddpsim.scenario.schema import Cluster, Run, Scenario
from ddpsim.units import format_bytes, format_bytes_per_s, format_duration

__all__ = ["build_network", "judged"]

LOG = Uncertainty(0.05, "assumed: a log interpolated between its sizes, another day's network")
EXTRAPOLATED_LOG = Uncertainty(0.20, "assumed: a log of other ranks or sizes")
STATED_LINKS = Uncertainty(0.10, "assumed: links stated in the scenario, one alpha and beta")
PRESET_LINKS = Uncertainty(0.25, "assumed: the device's usual machine, not yours")
PRESET_NETWORK = Uncertainty(0.79, "presets against 8 published sweeps of several nodes")

PRIOR_SLOWDOWN = 1.189
PRIOR_INTERFERENCE = Uncertainty(0.58, "published average and largest, arXiv 2507.03114")

# 16 A100 in two nodes are at 40 % and still no slower than measured (docs/validation.md, 4)
_MOST_LATENCY = 0.5


def build_network(scenario: Scenario, profile: ClusterProfile | None = None) -> Network:
    """The collective costs of a scenario's cluster; raises InputError.

    A log answers before a profile, a profile before links, for the sizes that each covers.
    """
    if scenario.cluster.world_size == 1:
        if scenario.cluster.all_reduce:
            _read(scenario.cluster)
        return Network(SingleRankCost(), None, "nothing: one rank sends nothing", ())
    fitted = _from_profile(scenario, profile) if profile else None
    if scenario.cluster.all_reduce:
        network = _from_log(scenario.cluster, scenario.run, fitted)
    else:
        network = fitted or _from_links(scenario.cluster)
    known = fitted is not None and fitted.interference is not None
    return network if known or scenario.ddp.backend != "nccl" else _with_prior(network)


def _with_prior(network: Network) -> Network:
    """NCCL's published interference, where none was calibrated."""
    published = f"compute {PRIOR_SLOWDOWN} x as long under a collective, on average; 1.4 at most"
    entry = Provenance("interference", f"{published} (arXiv 2507.03114)", "published")
    return replace(
        network,
        cost=InterferingCost(network.cost, compute=PRIOR_SLOWDOWN),
        provenance=(*network.provenance, entry),
        interference=PRIOR_INTERFERENCE,
    )


def _from_profile(scenario: Scenario, profile: ClusterProfile) -> Network:
    from ddpsim.cluster.profiled import network_from_profile  # noqa: PLC0415 -- it needs numpy

    return network_from_profile(scenario, profile)


def judged(network: Network, backend: str, sizes_bytes: Collection[int]) -> Network:
    """The network with the doubts that arise from the all-reduces that will really be sent."""
    cost = network.cost.cost if isinstance(network.cost, InterferingCost) else network.cost
    if isinstance(cost, LinkCost) and backend == "nccl":
        return _doubt_latency(network, cost, max(sizes_bytes))
    if isinstance(cost, AllReduceLogCost):
        return _doubt_log(network, cost, sizes_bytes)
    return network


def _doubt_latency(network: Network, cost: LinkCost, size_bytes: int) -> Network:
    """A ring's latency grows with the ranks; NCCL, unlike gloo, leaves it before that."""
    sent = cost.transfer("all_reduce", size_bytes)
    bare = cost.without_latency().transfer("all_reduce", size_bytes)
    share = 1 - duration_ns(bare) / max(1, duration_ns(sent))
    if share < _MOST_LATENCY or not network.uncertainty:
        return network
    warning = (
        f"{share:.0%} of the largest all-reduce is the latency of {2 * (len(cost.links) - 1)} ring "
        "steps: NCCL would take a tree or NVLS where those are faster, which are not modelled; "
        "read the network time as an upper bound"
    )
    return replace(
        network,
        uncertainty=replace(network.uncertainty, could_fall_to=1 - share),
        warnings=(*network.warnings, warning),
    )


def _doubt_log(network: Network, cost: AllReduceLogCost, sizes_bytes: Collection[int]) -> Network:
    """All-reduces outside a log's sizes: the links that answer, or an extrapolation."""
    outside = sorted(size for size in sizes_bytes if not cost.covers(size))
    if not outside:
        return network
    if network.beyond:
        times_ns = {size: duration_ns(cost.transfer("all_reduce", size)) for size in sizes_bytes}
        if 2 * sum(times_ns[size] for size in outside) < sum(times_ns.values()):
            return network
        links = network.beyond
        return replace(network, uncertainty=links.uncertainty, bottleneck=links.bottleneck)
    (low, _), (high, _) = cost.log.samples[0], cost.log.samples[-1]
    warning = (
        f"{len(outside)} of {len(sizes_bytes)} all-reduce sizes ({format_bytes(outside[0])} to "
        f"{format_bytes(outside[-1])}) lie outside those measured in {cost.log.source} "
        f"({format_bytes(low)} to {format_bytes(high)}): their times are extrapolated"
    )
    return replace(network, uncertainty=EXTRAPOLATED_LOG, warnings=(*network.warnings, warning))


def _from_links(cluster: Cluster) -> Network:
    links = _links(cluster)
    slowest = "inter_node" if _crosses_slowest(cluster, links) else "intra_node"
    preset = PRESET_NETWORK if slowest == "inter_node" else PRESET_LINKS
    return Network(
        cost=LinkCost(links),
        uncertainty=STATED_LINKS if getattr(cluster, slowest) else preset,
        bottleneck=_named(slowest, links),
        provenance=_link_provenance(cluster),
    )


def _from_log(cluster: Cluster, run: Run, fitted: Network | None) -> Network:
    log = _read(cluster)
    warnings = _check_ranks(log, cluster, run)
    beyond = fitted or (_from_links(cluster) if _links_are_stated(cluster) else None)
    low, high = log.samples[0][0], log.samples[-1][0]
    covered = f"{log.source} ({log.kind}), {format_bytes(low)} to {format_bytes(high)}"
    halved = Provenance("broadcast time", "half of the all-reduce of the same size", "assumed")
    return Network(
        cost=_log_cost(log, beyond, run),
        uncertainty=EXTRAPOLATED_LOG if warnings else LOG,
        bottleneck=f"the network as measured in {log.source}",
        provenance=(
            Provenance("all-reduce time", covered, "imported"),
            *(beyond.provenance if beyond else ()),
            halved,
        ),
        warnings=warnings,
        interference=beyond.interference if beyond else None,
        beyond=beyond,
    )


def _log_cost(log: AllReduceLog, beyond: Network | None, run: Run) -> CollectiveCost:
    """A log's times, with the interference of the profile beside it."""
    if beyond and isinstance(beyond.cost, InterferingCost):
        plain = AllReduceLogCost(log, beyond.cost.cost, run.allow_extrapolation)
        return replace(beyond.cost, cost=plain)
    return AllReduceLogCost(log, beyond.cost if beyond else None, run.allow_extrapolation)


def _read(cluster: Cluster) -> AllReduceLog:
    if cluster.all_reduce is None:
        raise ValueError("this cluster names no log")
    with blamed_on("cluster.all_reduce"):
        return read_all_reduce(cluster.all_reduce)


def _check_ranks(log: AllReduceLog, cluster: Cluster, run: Run) -> tuple[str, ...]:
    """The log must be of these very ranks; another layout is an error or a warning."""
    if (log.nodes, log.gpus_per_node) == (cluster.nodes, cluster.gpus_per_node):
        return ()
    differs = (
        f"{log.source} was measured on {log.world_size} ranks ({log.nodes} nodes x "
        f"{log.gpus_per_node}), but the cluster has {cluster.world_size} ({cluster.nodes} nodes x "
        f"{cluster.gpus_per_node})"
    )
    if run.allow_extrapolation:
        return (f"{differs}: its times are used as they are",)
    raise InputError(
        "cluster.all_reduce",
        f"{differs}; measure these ranks, drop the log, or set run.allow_extrapolation: true",
    )


def _links(cluster: Cluster) -> tuple[Link, ...]:
    intra = cluster.intra_node or cluster.device.intra_node
    inter = cluster.inter_node or cluster.device.inter_node
    if cluster.gpus_per_node > 1 and intra is None:
        raise InputError("cluster", f"{cluster.device.name} has no preset links; state intra_node")
    if cluster.nodes > 1 and inter is None:
        raise InputError(
            "cluster", f"{cluster.device.name} has no preset network; state inter_node"
        )
    single_gpu = cluster.gpus_per_node == 1
    return ring_links(cluster.nodes, cluster.gpus_per_node, None if single_gpu else intra, inter)


def _links_are_stated(cluster: Cluster) -> bool:
    """Whether the scenario itself gives every kind of link that its ring uses."""
    intra_given = cluster.intra_node is not None or cluster.gpus_per_node == 1
    return intra_given and (cluster.inter_node is not None or cluster.nodes == 1)


def _crosses_slowest(cluster: Cluster, links: tuple[Link, ...]) -> bool:
    """Whether the hop between nodes (which leads to rank 0) is the slowest of the ring."""
    least = min(link.bandwidth_bytes_per_s for link in links)
    return cluster.nodes > 1 and links[0].bandwidth_bytes_per_s == least


def _named(key: str, links: tuple[Link, ...]) -> str:
    slowest = min(links, key=lambda link: link.bandwidth_bytes_per_s)
    where = "inter-node network" if key == "inter_node" else "intra-node links"
    rate = format_bytes_per_s(slowest.bandwidth_bytes_per_s)
    return f"the {where} ({rate} a ring, {format_duration(slowest.latency_s)} a step)"


def _link_provenance(cluster: Cluster) -> tuple[Provenance, ...]:
    used = {"intra_node": cluster.gpus_per_node > 1, "inter_node": cluster.nodes > 1}
    entries = []
    for key in (key for key, is_used in used.items() if is_used):
        stated = getattr(cluster, key)
        link = stated or getattr(cluster.device, key)
        figures = (
            f"{format_bytes_per_s(link.bandwidth_bytes_per_s)}, {format_duration(link.latency_s)}"
        )
        preset = cluster.device.sources.get(key, "")
        source = "stated in the scenario" if stated else f"preset {cluster.device.name}: {preset}"
        trust: Trust = "stated" if stated else "assumed"
        entries.append(Provenance(f"cluster.{key}", f"{figures}; {source}", trust))
    return tuple(entries)
