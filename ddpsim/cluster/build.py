"""Scenario to Network: a measured log where there is one, otherwise links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

from ddpsim.cluster.cost import (
    GLOO_IN_TURN,
    AllReduceLogCost,
    CollectiveCost,
    LinkCost,
    ScheduledCost,
    SingleRankCost,
)
from ddpsim.cluster.from_links import broadcast_way, links_are_stated, network_from_links
from ddpsim.cluster.interference import InterferingCost
from ddpsim.cluster.layouts import joined, with_replicas
from ddpsim.cluster.link_sources import algorithm_choices
from ddpsim.cluster.logs import (
    EXTRAPOLATED_LOG,
    CheckedLog,
    at_least,
    checked_log,
    not_in_shard_logs,
    with_shard_logs,
    without_shard_logs,
)
from ddpsim.cluster.mesh import Sent, with_groups
from ddpsim.cluster.nccl.cost import NcclCost
from ddpsim.cluster.network import (
    NO_TRAFFIC,
    OF_GLOO,
    OF_NCCL_LOG,
    OF_NCCL_PROFILE,
    Network,
    Traffic,
    of_sent,
    with_derived,
)
from ddpsim.cluster.transfers import SHARDED, Operation, duration_ns
from ddpsim.cluster.wires import Wires
from ddpsim.errors import InputError
from ddpsim.provenance import Provenance, Uncertainty
from ddpsim.scenario.cluster import Cluster
from ddpsim.scenario.links import IntraNode
from ddpsim.scenario.schema import Scenario
from ddpsim.units import format_bytes, to_ns

if TYPE_CHECKING:
    from ddpsim.importers.all_reduce import AllReduceLog
    from ddpsim.importers.profiles.cluster import ClusterProfile

_NEGLIGIBLE = 0.01
_TELLING = 0.05  # of the all-reduces' time, outside what was measured, to count
_OF_LINKS = (LinkCost, NcclCost, ScheduledCost)
_NAMES: dict[Operation, str] = {
    "all_reduce": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "all_gather": "all-gather",
}
_LONGER = "measure with a longer --time-budget-s"
_LOGS = "give logs of them: cluster.reduce_scatter and cluster.all_gather"

PRIOR_SLOWDOWN = 1.189
PRIOR_INTERFERENCE = Uncertainty(0.58, "published average and largest, arXiv 2507.03114")


def build_network(scenario: Scenario, profile: ClusterProfile | None = None) -> Network:
    """The collective costs of a scenario's cluster; raises InputError.

    A log answers before a profile, a profile before links, for the sizes that each covers.
    """
    scenario = with_replicas(scenario)
    if scenario.cluster.world_size == 1:
        checked_log(scenario, "all_reduce")
        alone = Network(SingleRankCost(), None, "nothing: one rank sends nothing", ())
        return with_shard_logs(alone, scenario)
    fitted = _from_profile(scenario, profile) if profile else None
    if checked := checked_log(scenario, "all_reduce"):
        network = _from_log(scenario, checked, fitted)
    else:
        network = fitted or network_from_links(scenario)
    network = with_shard_logs(network, scenario)
    if not isinstance(network.plain_cost, _OF_LINKS):
        of_nccl = OF_NCCL_LOG if checked else OF_NCCL_PROFILE
        network = with_derived(network, OF_GLOO if scenario.ddp.backend == "gloo" else of_nccl)
        _refuse_other_links(scenario.cluster)
    network = replace(network, traffic=_traffic(scenario))
    has_interference = fitted is not None and fitted.interference is not None
    if not has_interference and scenario.ddp.backend == "nccl":
        network = _with_prior(network)
    if not scenario.sends_in_groups:
        return network
    strategy = "fully_shard" if scenario.ddp.is_fully_sharded else "ddp"
    plain = {"strategy": strategy, "comm_hook": "none", "fully_shard": None, "fsdp1": None}
    return with_groups(network, scenario, lambda part: build_network(part.having("ddp", **plain)))


def _refuse_other_links(cluster: Cluster) -> None:
    """Another device may stand beside a log or a profile, but no other link."""
    others = (cluster.other_nodes or {}).values()
    stated = {
        "weak_links": bool(cluster.weak_links),
        "other_nodes": any(other.intra_node or other.inter_node for other in others),
    }
    for key in (key for key, is_stated in stated.items() if is_stated):
        raise InputError(
            f"cluster.{key}",
            "a log or a profile says what the links it was measured on do; drop one of the two",
        )


def _traffic(scenario: Scenario) -> Traffic:
    """What else the nodes' network carries; raises InputError where it has no rate."""
    cluster, data = joined(scenario), scenario.workload.data
    other, reads = cluster.background, data and data.sample_bytes
    if cluster.nodes == 1 or not (other or reads):
        return NO_TRAFFIC
    nodes = cluster.gpus_per_node / scenario.cluster.gpus_per_node  # that NCCL counts as one
    wires = Wires.of(cluster, scenario.run.seed)
    rate = wires.paths.least_network.bandwidth_bytes_per_s
    loaded = cluster.gpus_per_node * data.rate_samples_per_s * reads if data and reads else 0.0
    bursts = other is not None and other.busy_s != other.every_s
    sending = wires.of_nccl() if scenario.ddp.backend == "nccl" else wires
    slowest = min(link.bandwidth_bytes_per_s for link in sending.ring)
    return Traffic(
        needed_share=_share(slowest / rate),
        other_share=_share(nodes * other.rate_bytes_per_s / rate if other else 0.0),
        busy_ns=to_ns(other.busy_s) if other and other.busy_s else 0,
        every_ns=to_ns(other.every_s) if bursts and other and other.every_s else None,
        loader_share=_share(loaded / rate),
        loaders=cluster.gpus_per_node,
    )


def _share(part: float) -> Fraction:
    """A part in thousandths of the link, so that fractions of time stay small."""
    return Fraction(max(1, round(1000 * part)), 1000) if part else Fraction(0)


def _with_prior(network: Network) -> Network:
    """Add NCCL's published interference to a network without a calibrated one."""
    published = f"compute {PRIOR_SLOWDOWN} x as long under a collective, on average; 1.4 at most"
    entry = Provenance("interference", f"{published} (arXiv 2507.03114)", "published")
    return replace(
        network,
        cost=InterferingCost(network.cost, compute=PRIOR_SLOWDOWN),
        provenance=(*network.provenance, entry),
        interference=PRIOR_INTERFERENCE,
    )


def _from_profile(scenario: Scenario, profile: ClusterProfile) -> Network:
    from ddpsim.cluster.fitted.network import network_from_profile  # noqa: PLC0415 -- few have one

    if joined(scenario) is not scenario.cluster:
        raise InputError(
            "cluster.profile", "says nothing of NVLink domains larger than a node; drop one of them"
        )
    return network_from_profile(scenario, profile)


def with_sent_sizes(
    network: Network, sent: Collection[Sent], broadcast_bytes: Collection[int]
) -> Network:
    """Add the sources, warnings and uncertainty of the sizes that a step sends.

    Broadcasts have a source where they take more than next to nothing. Logs of reduce-scatters and
    all-gathers set the uncertainty where they hold most of the time.
    """
    if network.shard_logs is None:
        return _with_sent(network, sent, broadcast_bytes)
    rest, is_most = not_in_shard_logs(network.plain_cost, sent)
    sized = _with_sent(network, rest, broadcast_bytes)
    return sized if is_most else replace(sized, uncertainty=network.shard_logs)


def _with_sent(
    network: Network, sent: Collection[Sent], broadcast_bytes: Collection[int]
) -> Network:
    cost = without_shard_logs(network.plain_cost)
    is_assumed = isinstance(cost, (*_OF_LINKS, AllReduceLogCost))
    if is_assumed and _share_of_broadcasts(network.cost, sent, broadcast_bytes) > _NEGLIGIBLE:
        network = _with(network, Provenance("broadcast time", broadcast_way(cost), "assumed"))
    if isinstance(cost, NcclCost):
        version = f"2.{cost.graph.minor}"
        for operation, name in _NAMES.items():
            sizes = [size for each, size in sent if each == operation]
            if chosen := algorithm_choices(cost, sizes, operation):
                source = f"{chosen}; as NCCL's tuner chooses ({version}), priced by the links"
                network = _with(network, Provenance(f"{name} algorithm", source, "published"))
        return replace(network, uncertainty=_of_sent(network, sent))
    network = of_sent(network, sent, _LOGS if isinstance(cost, AllReduceLogCost) else _LONGER)
    if isinstance(cost, AllReduceLogCost):
        return _doubt_log(network, cost, sent)
    if measured_bytes := network.measured_bytes:
        network = replace(network, uncertainty=_of_sent(network, sent))
        return _doubt_profile(network, measured_bytes, sent)
    return network


def _of_sent(network: Network, sent: Collection[Sent]) -> Uncertainty | None:
    """The uncertainty of the sizes on which collectives spend most of their time."""
    if not (network.by_size or network.of_shards):
        return network.uncertainty
    spent_ns: Counter[Uncertainty] = Counter()
    for operation, size in sent:
        uncertainty = network.uncertainty_of(size, operation)
        if uncertainty:
            spent_ns[uncertainty] += duration_ns(network.cost.transfer(operation, size))
    return max(spent_ns, key=lambda uncertainty: spent_ns[uncertainty], default=network.uncertainty)


def _share_of_broadcasts(
    cost: CollectiveCost, sent: Collection[Sent], broadcast_bytes: Collection[int]
) -> float:
    """The share of broadcasts in the time of all collectives, each size taken once."""
    sent_ns = sum(duration_ns(cost.transfer("broadcast", size)) for size in broadcast_bytes)
    reduced_ns = sum(duration_ns(cost.transfer(*each)) for each in sent)
    return sent_ns / max(1, sent_ns + reduced_ns)


def _with(network: Network, entry: Provenance) -> Network:
    return replace(network, provenance=(*network.provenance, entry))


def _doubt_profile(
    network: Network, measured_bytes: tuple[int, int], sent: Collection[Sent]
) -> Network:
    """Warn of collectives outside the sizes that a profile was fitted to: its law goes on."""
    sizes, share = _outside(network.cost, sent, measured_bytes)
    if share <= _TELLING:
        return network
    return _extrapolated(network, sizes, sent, "that the profile was fitted to", measured_bytes)


def _outside(
    cost: CollectiveCost, sent: Collection[Sent], measured_bytes: tuple[int, int]
) -> tuple[list[int], float]:
    """The sizes sent outside those measured, rising, and their share of the time."""
    low, high = measured_bytes
    outside = [each for each in sent if not low <= each[1] <= high]
    if not outside:
        return [], 0.0
    times_ns = {each: duration_ns(cost.transfer(*each)) for each in sent}
    share = sum(times_ns[each] for each in outside) / max(1, sum(times_ns.values()))
    return sorted(size for _, size in outside), share


def _extrapolated(
    network: Network,
    sizes: list[int],
    sent: Collection[Sent],
    which: str,
    measured_bytes: tuple[int, int],
) -> Network:
    """The network with a warning of sizes sent that lie outside of those measured."""
    are_reduced = all(operation == "all_reduce" for operation, _ in sent)
    low, high = map(format_bytes, measured_bytes)
    warning = (
        f"{len(sizes)} of {len(sent)} {'all-reduce' if are_reduced else 'collective'} sizes "
        f"({format_bytes(sizes[0])} to {format_bytes(sizes[-1])}) lie outside those {which} "
        f"({low} to {high}): their times are extrapolated"
    )
    return replace(network, warnings=(*network.warnings, warning))


def _doubt_log(network: Network, cost: AllReduceLogCost, sent: Collection[Sent]) -> Network:
    """Price collectives outside a log's sizes by the links, or warn of an extrapolation."""
    sizes, share = _outside(cost, sent, cost.log.range_bytes)
    links = network.beyond
    if not sizes or (links and share < 0.5):
        return network
    if links:
        return replace(network, uncertainty=links.uncertainty, limit=links.limit)
    if share > _TELLING:
        network = replace(network, uncertainty=at_least(EXTRAPOLATED_LOG, cost.log))
    which = f"measured in {cost.log.source}"
    return _extrapolated(network, sizes, sent, which, cost.log.range_bytes)


def _from_log(scenario: Scenario, checked: CheckedLog, fitted: Network | None) -> Network:
    log, stated = checked.log, links_are_stated(scenario.cluster)
    beyond = fitted or (network_from_links(scenario) if stated else None)
    measured: frozenset[Operation] = fitted.measured if fitted else frozenset({"all_reduce"})
    return Network(
        cost=_log_cost(log, beyond, measured, scenario),
        uncertainty=checked.uncertainty,
        limit=f"the network as measured in {log.source}",
        provenance=(
            Provenance("all-reduce time", checked.source, "imported"),
            *(beyond.provenance if beyond else ()),
        ),
        warnings=checked.warnings,
        interference=beyond.interference if beyond else None,
        beyond=beyond,
        measured=measured,
    )


def _log_cost(
    log: AllReduceLog, beyond: Network | None, measured: Collection[Operation], scenario: Scenario
) -> CollectiveCost:
    """A log's times, with the interference of the profile beside it and what that measured."""
    chosen = None if scenario.ddp.backend == "gloo" else _chosen(scenario)
    parts = dict.fromkeys(SHARDED) if chosen else _parts_of_all_reduce(scenario)
    rest = tuple(sorted((each, part) for each, part in parts.items() if each not in measured))
    cost = AllReduceLogCost(log, None, scenario.run.allow_extrapolation, parts=rest, chosen=chosen)
    if beyond and isinstance(beyond.cost, InterferingCost):
        return replace(beyond.cost, cost=replace(cost, beyond=beyond.cost.cost))
    return replace(cost, beyond=beyond.cost) if beyond else cost


def _chosen(scenario: Scenario) -> CollectiveCost | None:
    """NCCL's choice on links that are stated or usual of the device; None where there are none."""
    try:
        cost = network_from_links(scenario).cost
    except InputError:
        return None
    return cost if isinstance(cost, NcclCost) else None


def _parts_of_all_reduce(scenario: Scenario) -> dict[Operation, float | None]:
    """What reduce-scatters and all-gathers take of an all-reduce's time: one turn of a ring's two.

    Assumed. Where a switch may have summed (NVLS) an all-reduce is no ring's, and nothing is told.
    gloo all-reduces what it scatters (ScheduledCost), and two ranks often gather in turn
    (`ddpsim.cluster.cost.ScheduledCost`).
    """
    cluster = scenario.cluster
    if scenario.ddp.backend == "gloo":
        in_turn = GLOO_IN_TURN / 2 if cluster.world_size == 2 else 0.0
        return {"reduce_scatter": 1.0, "all_gather": 0.5 * (1 + in_turn)}
    intra = cluster.link("intra_node") if cluster.gpus_per_node > 1 else None
    sums = isinstance(intra, IntraNode) and intra.switch_bandwidth_bytes_per_s
    return {} if sums else {"reduce_scatter": 0.5, "all_gather": 0.5}
