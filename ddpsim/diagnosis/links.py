"""Causes in the network: what of a scenario's links they change, and by how much.

Of each cause one function gives the sizes that are simulated, none where it cannot apply, and one
the change of a size. Rates are bytes per second.
"""

from __future__ import annotations

from collections.abc import Sequence

from ddpsim.cluster.transports import nic_bytes_per_s, opened_by_nccl
from ddpsim.cluster.wires import Wires, rate_of
from ddpsim.diagnosis.case import Case, Change

__all__ = [
    "PEERS",
    "congested",
    "congestion",
    "few_channels",
    "few_nics",
    "fewer_channels",
    "fewer_nics",
    "host_rates",
    "lame_links",
    "left_over_protocol",
    "low_latency",
    "management_networks",
    "over_management",
    "over_sockets",
    "peer_to_peer_rates",
    "shared_rates",
    "slow_collectives",
    "slower_collectives",
    "slower_within",
    "sockets",
    "stream_limits",
    "tcp_limited",
    "through_host",
    "weak_link",
    "without_gpudirect",
]

_GB_PER_S, _GBIT_PER_S = 1e9, 1.25e8
# what all GPUs of a node together exchange through host memory: published rates of one GPU go from
# 1.5 to 26 GB/s (docs/explanation/links.md), and eight V100 of one machine shared 7 GB/s
_HOST_RATES = (64.0, 25.0, 10.0, 4.0, 2.0, 1.0)
# of one GPU, half of the least that is published: two RTX 4090 exchange 0.95 GB/s
# (whyNLP/tinyllama#1), two A6000 2.1 with P2P and 17 without (stas00/ml-engineering#1)
_LEAST_HOST_RATE = 0.5
PEERS = ("P2P", "PXB")  # transports from GPU to GPU
_PCIE_RATES = (8.0, 4.0, 2.0, 1.0, _LEAST_HOST_RATE)
_OF_MANAGEMENT = (25.0, 10.0, 1.0)  # Gbit/s, the usual Ethernet ports
_STREAMS = (8.0, 3.0, 1.2, 0.5)  # Gbit/s of one TCP connection; clouds limit it to 5 or 10
_CHANNELS = (4.0, 2.0, 1.0)
_WORTH = 0.8  # of the usual rate: more is no cause
_LEAST_LINK = 0.02


def host_rates(case: Case) -> Sequence[float]:
    """Rates of all GPUs of a node together; none where links are no faster, or not NVLink."""
    if case.intra is None or not case.has_nvlink or not _may_be_peers(case):
        return ()
    gpus = case.cluster.gpus_per_node
    least, most = _LEAST_HOST_RATE * gpus, _WORTH * rate_of(case.intra) * gpus / _GB_PER_S
    rates = {least, *(rate for rate in _HOST_RATES if rate > least)}
    return [rate * _GB_PER_S for rate in sorted(rates, reverse=True) if rate < most]


def _may_be_peers(case: Case) -> bool:
    return str(case.cluster.nccl_variables.get("NCCL_P2P_DISABLE")) != "1"


def shared_rates(case: Case) -> Sequence[float]:
    """Rates of one GPU without NVLink, whatever its path, from just below the expected one."""
    if case.intra is None or case.has_nvlink:
        return ()
    most = _WORTH * rate_of(case.intra)
    return [most, *(rate * _GB_PER_S for rate in _PCIE_RATES if rate * _GB_PER_S < most)]


def peer_to_peer_rates(case: Case) -> Sequence[float]:
    """The same, where NCCL goes from GPU to GPU, as far as stated."""
    return shared_rates(case) if case.way in (None, *PEERS) and _may_be_peers(case) else ()


def slower_within(case: Case, rate: float) -> Change:  # noqa: ARG001 -- of all changes
    """Every GPU of a node exchanges so much."""
    return Change((f"cluster.intra_node.bandwidth={rate / _GB_PER_S:.4g} GB/s",))


def through_host(case: Case, rate: float) -> Change:
    """NCCL without peer-to-peer: host memory, whose rate all GPUs of a node share."""
    each = rate / case.cluster.gpus_per_node
    return Change(
        (
            "cluster.nccl_env.NCCL_P2P_DISABLE=1",
            f"cluster.intra_node.bandwidth={each / _GB_PER_S:.4g} GB/s",
        )
    )


def lame_links(case: Case) -> Sequence[float]:
    """Parts of a link's bandwidth that are left."""
    return (0.5, 0.2, 0.08, _LEAST_LINK) if case.whole and case.is_priced_by_links else ()


def weak_link(case: Case, part: float) -> Change:
    """The link to the last node, or in one node to the last GPU."""
    cluster = case.cluster
    rank = (cluster.nodes - 1) * cluster.gpus_per_node if cluster.nodes > 1 else cluster.world_size
    last = rank if cluster.nodes > 1 else rank - 1
    return Change((f"cluster.weak_links.{last}={max(part, _LEAST_LINK):.3g}",))


def left_over_protocol(case: Case) -> Sequence[float]:
    """Where NCCL chooses its protocol."""
    is_free = case.cluster.protocol == "auto" and "NCCL_PROTO" not in case.cluster.nccl_variables
    return (1.0,) if case.has_links and is_free else ()


def low_latency(case: Case, _: float) -> Change:  # noqa: ARG001 -- of all changes
    """LL, which carries 4 bytes of flags with 4 of data."""
    return Change(("cluster.nccl_env.NCCL_PROTO=LL",))


def few_channels(case: Case) -> Sequence[float]:
    """Most channels, where NCCL chooses their number."""
    is_free = "NCCL_MAX_NCHANNELS" not in case.cluster.nccl_variables
    return _CHANNELS if case.has_links and is_free else ()


def fewer_channels(case: Case, channels: float) -> Change:  # noqa: ARG001 -- of all changes
    """So many rings at most, each with one thread block a GPU."""
    return Change((f"cluster.nccl_env.NCCL_MAX_NCHANNELS={channels:.0f}",))


def sockets(case: Case) -> Sequence[float]:
    """Where NCCL uses RDMA or a network's plugin."""
    return (1.0,) if case.inter and case.inter.transport != "tcp" else ()


def over_sockets(case: Case, _: float) -> Change:
    """The same NICs by TCP."""
    is_rdma = case.inter is not None and case.inter.transport == "rdma"
    return Change(
        ("cluster.nccl_env.NCCL_IB_DISABLE=1",) if is_rdma else case.inter_node(transport="tcp")
    )


def management_networks(case: Case) -> Sequence[float]:
    """Rates of Ethernet ports that are much slower than the network of the scenario."""
    if case.inter is None:
        return ()
    own = rate_of(case.inter) * case.inter.nics_per_node
    return [rate for gbit in _OF_MANAGEMENT if (rate := gbit * _GBIT_PER_S) < own / 2]


def over_management(case: Case, rate: float) -> Change:  # noqa: ARG001 -- of all changes
    """One slow NIC a node, by TCP."""
    gbit = f"{rate / _GBIT_PER_S:.4g} Gbit/s"
    one = "nics_per_node: 1, oversubscription: 1, transport: tcp"
    return Change((f"cluster.inter_node={{bandwidth: {gbit}, {one}, latency: 45 us}}",))


def stream_limits(case: Case) -> Sequence[float]:
    """Rates of one TCP connection below the usual one, where a NIC carries more."""
    if case.inter is None or case.inter.transport != "tcp":
        return ()
    environment = Wires.of(case.cluster).environment
    opened = opened_by_nccl(case.inter, environment)
    usual = nic_bytes_per_s(case.inter, environment) / opened
    return [rate for gbit in _STREAMS if (rate := gbit * _GBIT_PER_S) < usual]


def tcp_limited(case: Case, rate: float) -> Change:
    """The cloud's limit, or a core's, on one connection."""
    return Change(case.inter_node(flow_bandwidth=f"{rate / _GBIT_PER_S:.4g} Gbit/s"))


def few_nics(case: Case) -> Sequence[float]:
    """One NIC, or half of them."""
    nics = case.inter.nics_per_node if case.inter else 1
    return [float(few) for few in dict.fromkeys((1, nics // 2)) if 0 < few < nics]


def fewer_nics(case: Case, nics: float) -> Change:
    """So many NICs a node."""
    return Change(case.inter_node(nics_per_node=round(nics)))


def without_gpudirect(case: Case, part: float) -> Change:
    """A NIC that reads host memory, to which GPUs copy first."""
    usual = rate_of(case.inter)
    return Change(case.inter_node(bandwidth=f"{part * usual / _GBIT_PER_S:.4g} Gbit/s"))


def congestion(case: Case) -> Sequence[float]:
    """How many times as much as it carries a switch, or a NIC, is asked for."""
    return (1.5, 3.0, 6.0, 12.0) if case.inter else ()


def congested(case: Case, times: float) -> Change:
    """Uplinks that others use as well."""
    usual = case.inter.oversubscription if case.inter else 1.0
    return Change(case.inter_node(oversubscription=f"{times * usual:.4g}"))


def slow_collectives(case: Case) -> Sequence[float]:
    """How many times as long collectives take, whatever the reason."""
    return (1.5, 6.0, 25.0, 100.0) if case.cluster.world_size > 1 else ()


def slower_collectives(case: Case, times: float) -> Change:  # noqa: ARG001 -- of all changes
    """All of them alike."""
    return Change(factors={"network": times})
