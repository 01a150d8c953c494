"""The costs of a cluster's links, as the scenario states them or its machine's preset has them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import inf
from typing import NamedTuple

from ddpsim.cluster.cost import AllReduceLogCost, CollectiveCost, LinkCost, ScheduledCost
from ddpsim.cluster.layouts import joined
from ddpsim.cluster.link_sources import bottleneck, link_provenance, rate_is_stated
from ddpsim.cluster.nccl.cost import NcclCost
from ddpsim.cluster.nccl.figures import PRIORS, USUAL
from ddpsim.cluster.network import Network
from ddpsim.cluster.topology.host import STATED_LINKS
from ddpsim.cluster.transports import hop_s, message_s, nic_bytes_per_s
from ddpsim.cluster.wires import Kind, Wires, rate_of, unlike_nodes
from ddpsim.errors import InputError
from ddpsim.provenance import Provenance, Uncertainty
from ddpsim.scenario.cluster import Cluster
from ddpsim.scenario.links import EASY_FOR_TCP_BYTES_PER_S, InterNode
from ddpsim.scenario.schema import Scenario
from ddpsim.units import MIB
from ddpsim.wording import counted

PRESET_LINKS = Uncertainty(0.25, "assumed: the device's usual machine, not yours")
PRESET_NETWORK = Uncertainty(0.83, "presets of devices against 8 published sweeps of nodes")
# set by hand: 0.7 holds 11 of 13 published rates. The other: where nobody says whose cloud it is,
# and so whether it limits a flow, as AWS does to a third of NCCL's own rate
TCP_NETWORK = Uncertainty(0.70, "published rates over TCP: 0.3 to 2.0 of what is predicted")
UNLIMITED_TCP = Uncertainty(0.95, "published rates over TCP, of clouds that limit a flow too")

BySize = tuple[tuple[int, Uncertainty], ...]


class LinkUncertainty(NamedTuple):
    """That of all times; of all-reduces, and of reduce-scatters and all-gathers, by their size.

    By size: from so many bytes on; empty: alike for all.
    """

    usual: Uncertainty
    by_size: BySize = ()
    of_shards: BySize = ()


def _swept(basis: str, *sigmas: tuple[int, float]) -> BySize:
    return tuple((least, Uncertainty(sigma, basis)) for least, sigma in sigmas)


_SWEEPS = "NIC speed known, algorithm as NCCL chooses; published sweeps over nodes"
_SHARDS = "reduce-scatters and all-gathers of 3 published machines"
_ONE_NODE = "known machine; published sweeps inside one node"
_SLINGSHOT = "published Slingshot of two sites, whose plugin's settings differ"
CHOSEN_NETWORK = LinkUncertainty(
    Uncertainty(0.15, _SWEEPS),
    _swept(_SWEEPS, (0, 0.14), (MIB // 4, 0.19), (2 * MIB, 0.12), (64 * MIB, 0.085)),
    _swept(_SHARDS, (0, 0.15), (MIB // 4, 0.45), (64 * MIB, 0.35), (256 * MIB, 0.20)),
)
EFA_NETWORK = LinkUncertainty(Uncertainty(0.24, f"{_SWEEPS} with EFA"))
SLINGSHOT_NETWORK = LinkUncertainty(
    Uncertainty(0.45, _SLINGSHOT),
    of_shards=_swept(_SLINGSHOT, (0, 0.40), (64 * MIB, 0.20)),
)
_LARGE_BYTES = 64 * MIB
_SWEPT = (CHOSEN_NETWORK, EFA_NETWORK, SLINGSHOT_NETWORK)
CHOSEN_IN_A_NODE = LinkUncertainty(
    Uncertainty(0.13, _ONE_NODE), _swept(_ONE_NODE, (0, 0.12), (MIB // 8, 0.18), (4 * MIB, 0.09))
)
_BROADCASTS = {
    "gloo_ring": "whole down a binomial tree, as gloo sends it",
    "parameter_server": "half of an all-reduce",
    "gather": "as long as the gradients take to GPU 0",
}
_NCCL_ALGORITHMS = ("ring", "tree", "nvls")


def network_from_links(scenario: Scenario) -> Network:
    """The network of a cluster's links; raises InputError where it has none."""
    scenario, in_domains = _joined(scenario)
    cluster = scenario.cluster
    wires = Wires.of(cluster, scenario.run.seed)
    cost = _cost(scenario, wires)
    wires = wires.of_nccl() if isinstance(cost, NcclCost) else wires
    doubt = _link_uncertainty(cluster, wires, chosen=isinstance(cost, NcclCost))
    return Network(
        cost=cost,
        uncertainty=doubt.usual,
        by_size=doubt.by_size,
        of_shards=doubt.of_shards,
        limit=lambda: bottleneck(cluster, wires, _slowest(wires, cost)),
        provenance=(
            *link_provenance(
                cluster,
                asks_transport=isinstance(cost, NcclCost),
                sockets_rate=wires.sockets_rate if isinstance(cost, NcclCost) else inf,
                network_first=wires.way is not None and _slowest(wires, cost) == "inter_node",
            ),
            *wires.provenance,
            *in_domains,
        ),
    )


def _joined(scenario: Scenario) -> tuple[Scenario, tuple[Provenance, ...]]:
    """The nodes that NCCL counts, and a word where an NVLink domain is one of them."""
    cluster = scenario.cluster
    if (whole := joined(scenario)) is cluster:
        return scenario, ()
    each = whole.gpus_per_node // cluster.gpus_per_node
    basis = (
        f"{whole.gpus_per_node} GPUs of {each} nodes, to NCCL one node with the NICs of all: "
        f"{counted(whole.nodes, 'domain')}"
    )
    is_stated = cluster.nvlink_domain is not None
    entry = Provenance("cluster.nvlink_domain", basis, "stated" if is_stated else "published")
    return scenario.model_copy(update={"cluster": whole}), (entry,)


def broadcast_way(cost: CollectiveCost) -> str:
    """How a broadcast goes over links, or what it is of a log's all-reduces, in words."""
    if isinstance(cost, AllReduceLogCost):
        return "half of an all-reduce"
    algorithm = cost.algorithm if isinstance(cost, ScheduledCost) else "ring"
    return _BROADCASTS.get(algorithm, "once round a ring, at the pace of its slowest link")


def _slowest(wires: Wires, cost: CollectiveCost) -> Kind:
    """The kind of link that sets the pace of large messages."""
    if wires.intra is None or wires.inter is None or not isinstance(cost, NcclCost):
        return wires.slowest
    return "inter_node" if cost.waits_for_network() else "intra_node"


def _link_uncertainty(cluster: Cluster, wires: Wires, *, chosen: bool) -> LinkUncertainty:
    """The widest of all links that the ranks use: which one is the slowest is uncertain too.

    `chosen`: NCCL's algorithms are priced as it chooses them. Sweeps of known networks and machines
    were held against both kinds of links at once.
    """
    if wires.inter:
        doubt = _between_nodes(cluster, wires.inter, chosen=chosen)
        is_swept = doubt.usual in [swept.usual for swept in _SWEPT] and wires.way is None
        if wires.intra is None or is_swept or _is_never_slowest(wires, doubt.usual):
            return doubt
        return _widest(wires, _inside_a_node(cluster, wires), doubt)
    if wires.intra is None:  # one GPU
        return LinkUncertainty(STATED_LINKS)
    of_a_machine = cluster.machine is not None and wires.intra.path == "nvlink"
    is_usual = not (wires.way or rate_is_stated(cluster, "intra_node"))
    if chosen and of_a_machine and is_usual:
        return CHOSEN_IN_A_NODE
    return LinkUncertainty(_inside_a_node(cluster, wires))


def _widest(wires: Wires, inside: Uncertainty, between: LinkUncertainty) -> LinkUncertainty:
    """The widest of both kinds of links; however fast that kind is, the other is passed too."""
    if between.usual.sigma > inside.sigma:
        return between
    least = min(1.0, rate_of(wires.intra) / wires.network_rate) / between.usual.factor
    return LinkUncertainty(replace(inside, least=least))


def _inside_a_node(cluster: Cluster, wires: Wires) -> Uncertainty:
    if wires.way:
        return wires.way.uncertainty
    return STATED_LINKS if rate_is_stated(cluster, "intra_node") else PRESET_LINKS


def _is_never_slowest(wires: Wires, network: Uncertainty) -> bool:
    """Whether the host's way inside a node is faster than the network, at the edges of both."""
    if wires.way is None:
        return False
    slowest = wires.way.bytes_per_s / wires.way.uncertainty.factor
    return slowest > network.factor * wires.network_rate


def _between_nodes(cluster: Cluster, inter: InterNode, *, chosen: bool) -> LinkUncertainty:
    """The network's uncertainty; NCCL's choice, if it has one, is as uncertain as the links."""
    stated = rate_is_stated(cluster, "inter_node")
    if not (chosen and cluster.algorithm == "auto"):
        return LinkUncertainty(STATED_LINKS if stated else PRESET_NETWORK)
    if not (stated or cluster.machine is not None):
        return LinkUncertainty(PRESET_NETWORK)
    if inter.transport == "tcp" and _is_hard_for_tcp(inter):
        is_known = cluster.machine or inter.flow_bandwidth_bytes_per_s
        return LinkUncertainty(TCP_NETWORK if is_known else UNLIMITED_TCP)
    by_transport = {"slingshot": SLINGSHOT_NETWORK, "efa": EFA_NETWORK}
    doubt = by_transport.get(inter.transport, CHOSEN_NETWORK)
    return doubt if stated else _with_users(doubt, cluster)


def _with_users(doubt: LinkUncertainty, cluster: Cluster) -> LinkUncertainty:
    """Add the uncertainty that users of a machine measured of its large messages, if any did."""
    machine = cluster.machine
    if machine is None or machine.network_sigma is None:
        return doubt
    source = machine.sources.get("network_sigma", "no source given")
    of_users = Uncertainty(machine.network_sigma, f"{machine.name}: {source}")
    smaller = [each for each in doubt.by_size if each[0] < _LARGE_BYTES] or [(0, doubt.usual)]
    return doubt._replace(by_size=(*smaller, (_LARGE_BYTES, of_users)))


def _is_hard_for_tcp(inter: InterNode) -> bool:
    """Whether a line is too fast for sockets to fill it surely, or its flows are limited."""
    is_fast = rate_of(inter) > EASY_FOR_TCP_BYTES_PER_S
    return is_fast or inter.flow_bandwidth_bytes_per_s is not None


def links_are_stated(cluster: Cluster) -> bool:
    """Whether the scenario itself gives every kind of link that its ranks use."""
    intra_given = rate_is_stated(cluster, "intra_node") or cluster.gpus_per_node == 1
    return intra_given and (rate_is_stated(cluster, "inter_node") or cluster.nodes == 1)


def _cost(scenario: Scenario, wires: Wires) -> CollectiveCost:
    cluster, algorithm = scenario.cluster, scenario.cluster.algorithm
    if scenario.ddp.backend == "nccl" and algorithm in ("auto", *_NCCL_ALGORITHMS):
        averages = scenario.ddp.is_fully_sharded and not scenario.ddp.sharding.divides_apart
        return nccl_cost(cluster, wires, averages=averages)
    for key in ("nccl", "nccl_env"):
        if getattr(cluster, key):
            raise InputError(f"cluster.{key}", "is NCCL's, which sends nothing here; drop it")
    if algorithm == "ring":
        return LinkCost(wires.ring, cluster.world_size)
    chosen = {"auto": "gloo_ring", "data_parallel": "gather"}.get(algorithm, algorithm)
    return ScheduledCost(chosen, replace(wires.paths, switch=None, servers=cluster.servers or 1))


def nccl_cost(cluster: Cluster, wires: Wires, *, averages: bool = False) -> NcclCost:
    """NCCL's collectives over these links; raises InputError where it cannot send as asked."""
    wires, environment = wires.of_nccl(), wires.environment
    named, protocols = environment.algorithms, environment.protocols
    if cluster.algorithm != "auto":
        named = (cluster.algorithm,)
    if cluster.protocol != "auto":
        protocols = (cluster.protocol,)
    inter, paths = wires.inter, wires.paths
    if inter and paths.inter:
        line = min(rate_of(inter), wires.sockets_rate)
        carried = nic_bytes_per_s(inter, environment) / line
        unlike = unlike_nodes(cluster, partial(nic_bytes_per_s, environment=environment))
        paths = replace(paths, inter=paths.inter.widened(carried), unlike=unlike)
    cost = NcclCost(
        replace(wires.graph(cluster), averages=averages),
        paths,
        table_intra=not cluster.states_latency("intra_node"),
        net_hop_s=hop_s(inter, is_stated=cluster.states_latency("inter_node")),
        is_ring_step=cluster.states_latency("inter_node"),
        message_s=message_s(inter),
        algorithms=named,
        protocols=protocols,
        figures=PRIORS[inter.transport].medians if inter else USUAL,
    )
    if not _is_to_be_had(cost):
        raise _refusal(cluster, is_protocol=_is_to_be_had(replace(cost, protocols=())))
    return cost


def _is_to_be_had(cost: NcclCost) -> bool:
    try:
        cost.tuned(1, "all_reduce")
    except ValueError:
        return False
    return True


def _refusal(cluster: Cluster, *, is_protocol: bool) -> InputError:
    """Refuse NCCL's algorithm on this machine, or its protocol alone, by the key that asks."""
    if not is_protocol:
        key, wish = _asked_by(cluster, "algorithm", "NCCL_ALGO")
        return InputError(
            key,
            f"{wish} is not to be had on this machine: nvls needs a switch that sums "
            "(intra_node.switch_bandwidth), and NCCL 2.17",
        )
    key, wish = _asked_by(cluster, "protocol", "NCCL_PROTO")
    if cluster.algorithm == "nvls":
        problem = f"nvls is sent with Simple alone, not {wish}; write that, or drop it"
        return InputError(key, problem)
    return InputError(
        key,
        f"{wish} is not to be had on this machine: LL128 needs NVLink between the GPUs of a node "
        "(intra_node.path), NICs that read GPUs (not inter_node.gpu_direct: false), and NCCL 2.5; "
        "write LL or Simple, or drop it",
    )


def _asked_by(cluster: Cluster, key: str, variable: str) -> tuple[str, str]:
    """The key that restricts NCCL, and what it asks for."""
    value = getattr(cluster, key)
    if value != "auto":
        return f"cluster.{key}", str(value)
    where = "cluster.nccl_env" if variable in (cluster.nccl_env or {}) else "cluster.machine"
    return where, f"{variable}={cluster.nccl_variables.get(variable)}"
