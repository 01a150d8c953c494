"""Causes in the network, each with the sizes that it may have in a case and what they change.

Rates are bytes per second.
"""

from __future__ import annotations

from collections.abc import Sequence

from ddpsim.cluster.transports import MORE_SOCKETS, nic_bytes_per_s, opened_by_nccl
from ddpsim.cluster.wires import Wires, rate_of
from ddpsim.diagnosis.case import PEER_TRANSPORTS, Case, Change
from ddpsim.diagnosis.hypothesis import FactName, Hypothesis, scaled, set_to, switch

PEERS, HOST_MEMORY = "P2P", "host memory"  # what `FactName.INSIDE` shows
_GB_PER_S, _GBIT_PER_S = 1e9, 1.25e8
# what all GPUs of a node together exchange through host memory: published rates of one GPU go from
# 1.5 to 26 GB/s (docs/explanation/links.md), and eight V100 of one machine shared 7 GB/s
_HOST_RATES = (64.0, 25.0, 10.0, 4.0, 2.0, 1.0)
# of one GPU, half of the least that is published: two RTX 4090 exchange 0.95 GB/s
# (whyNLP/tinyllama#1), two A6000 2.1 with P2P and 17 without (stas00/ml-engineering#1)
_LEAST_HOST_RATE = 0.5
_PCIE_RATES = (8.0, 4.0, 2.0, 1.0, _LEAST_HOST_RATE)
_OF_MANAGEMENT = (25.0, 10.0, 1.0)  # Gbit/s, the usual Ethernet ports
_STREAMS = (8.0, 3.0, 1.2, 0.5)  # Gbit/s of one TCP connection; clouds limit it to 5 or 10
_WORTH = 0.8  # of the usual rate: more is no cause
_LEAST_LINK = 0.02


def _gigabytes(rate: float) -> str:
    return f"{rate / _GB_PER_S:.2g} GB/s"


def _gbit(rate: float) -> str:
    return f"{rate / _GBIT_PER_S:.2g} Gbit/s"


def _may_be_peers(case: Case) -> bool:
    return str(case.cluster.nccl_variables.get("NCCL_P2P_DISABLE")) != "1"


def _host_rates(case: Case) -> Sequence[float]:
    """Rates of all GPUs of a node together; none where links are no faster, or not NVLink."""
    if case.intra is None or not case.has_nvlink or not _may_be_peers(case):
        return ()
    gpus = case.cluster.gpus_per_node
    least, most = _LEAST_HOST_RATE * gpus, _WORTH * rate_of(case.intra) * gpus / _GB_PER_S
    rates = {least, *(rate for rate in _HOST_RATES if rate > least)}
    return [rate * _GB_PER_S for rate in sorted(rates, reverse=True) if rate < most]


def _shared_rates(case: Case) -> Sequence[float]:
    """Rates of one GPU without NVLink, whatever its path, from just below the expected one."""
    if case.intra is None or case.has_nvlink:
        return ()
    most = _WORTH * rate_of(case.intra)
    return [most, *(rate * _GB_PER_S for rate in _PCIE_RATES if rate * _GB_PER_S < most)]


def _peer_to_peer_rates(case: Case) -> Sequence[float]:
    """Rates of one GPU, where NCCL goes from GPU to GPU, as far as stated."""
    is_peer = case.way in (None, *PEER_TRANSPORTS)
    return _shared_rates(case) if is_peer and _may_be_peers(case) else ()


def _slower_within(_: Case, rate: float) -> Change:
    return Change((f"cluster.intra_node.bandwidth={rate / _GB_PER_S:.4g} GB/s",))


def _through_host(case: Case, rate: float) -> Change:
    """NCCL without peer-to-peer: host memory, whose rate all GPUs of a node share."""
    slower = _slower_within(case, rate / case.cluster.gpus_per_node)
    return Change(("cluster.nccl_env.NCCL_P2P_DISABLE=1", *slower.settings))


def _weak_link(case: Case, part: float) -> Change:
    """The link to the last node, or in one node to the last GPU."""
    nodes, gpus = case.cluster.nodes, case.cluster.gpus_per_node
    last = (nodes - 1) * gpus if nodes > 1 else gpus - 1
    return Change((f"cluster.weak_links.{last}={max(part, _LEAST_LINK):.3g}",))


def _chooses(case: Case, variable: str) -> bool:
    """Whether NCCL chooses what a variable would set."""
    return case.has_links and variable not in case.cluster.nccl_variables


def _uses_rdma(case: Case) -> bool:
    """Whether nodes exchange by verbs, or by a network's plugin."""
    return case.inter is not None and case.inter.transport != "tcp"


def _over_sockets(case: Case, _: float) -> Change:
    """Sends by TCP over the NICs that the scenario states."""
    is_rdma = case.inter is not None and case.inter.transport == "rdma"
    return Change(
        ("cluster.nccl_env.NCCL_IB_DISABLE=1",) if is_rdma else case.inter_node(transport="tcp")
    )


def _management_networks(case: Case) -> Sequence[float]:
    """Rates of Ethernet ports that are much slower than the network of the scenario."""
    half = rate_of(case.inter) * case.inter.nics_per_node / 2 if case.inter else 0.0
    return [rate for gbit in _OF_MANAGEMENT if (rate := gbit * _GBIT_PER_S) < half]


def _over_management(_: Case, rate: float) -> Change:
    """One slow NIC a node, by TCP."""
    gbit = f"{rate / _GBIT_PER_S:.4g} Gbit/s"
    one = "nics_per_node: 1, oversubscription: 1, transport: tcp"
    return Change((f"cluster.inter_node={{bandwidth: {gbit}, {one}, latency: 45 us}}",))


def _stream_limits(case: Case) -> Sequence[float]:
    """Rates of one TCP connection below the usual one, where a NIC carries more."""
    if case.inter is None or case.inter.transport != "tcp":
        return ()
    environment = Wires.of(case.cluster).environment
    opened = opened_by_nccl(case.inter, environment)
    usual = nic_bytes_per_s(case.inter, environment) / opened
    return [rate for gbit in _STREAMS if (rate := gbit * _GBIT_PER_S) < usual]


def _tcp_limited(case: Case, rate: float) -> Change:
    return Change(case.inter_node(flow_bandwidth=f"{rate / _GBIT_PER_S:.4g} Gbit/s"))


def _few_nics(case: Case) -> Sequence[float]:
    """One NIC, or half of them."""
    nics = case.inter.nics_per_node if case.inter else 1
    return [float(few) for few in dict.fromkeys((1, nics // 2)) if 0 < few < nics]


def _without_gpudirect(case: Case, part: float) -> Change:
    """A NIC that reads host memory, to which GPUs copy first."""
    usual = rate_of(case.inter)
    return Change(case.inter_node(bandwidth=f"{part * usual / _GBIT_PER_S:.4g} Gbit/s"))


def _congested(case: Case, times: float) -> Change:
    """Uplinks that others use as well."""
    usual = case.inter.oversubscription if case.inter else 1.0
    return Change(case.inter_node(oversubscription=f"{times * usual:.4g}"))


IN_NODES = (
    Hypothesis(
        "no_peer_to_peer",
        5.0,
        "peer-to-peer is not used: the GPUs of a node share {size} through host memory",
        "unset NCCL_P2P_DISABLE and NCCL_P2P_LEVEL; look at nvidia-smi topo -m; in a container "
        "pass all GPUs, with --ipc=host; in a virtual machine turn ACS off",
        _host_rates,
        _through_host,
        _gigabytes,
        signs={"nccl_log": "SHM or NET/Socket between GPUs of one node"},
        shows={FactName.INSIDE: HOST_MEMORY},
    ),
    Hypothesis(
        "slow_host_path",
        15.0,
        "the path between the GPUs of a node is slow: each exchanges {size} through the host",
        "look at nvidia-smi topo -m and at PCIe's width (nvidia-smi -q -d PCIE); put both GPUs on "
        "one socket, in slots of full width; unset NCCL_P2P_DISABLE; else accumulate gradients",
        _shared_rates,
        _slower_within,
        _gigabytes,
        shows={FactName.INSIDE: HOST_MEMORY},
    ),
    Hypothesis(
        "slow_peer_to_peer",
        4.0,
        "P2P is the slow path here: each GPU exchanges {size} with its peers",
        "try NCCL_P2P_DISABLE=1 (two A6000: 2.1 GB/s with P2P, 17 without); turn ACS and the IOMMU "
        "off in the BIOS",
        _peer_to_peer_rates,
        _slower_within,
        _gigabytes,
        signs={"peer_to_peer_off": "shorter"},
        shows={FactName.INSIDE: PEERS},
    ),
    Hypothesis(
        "weak_link",
        2.0,
        "one link is weak: {size} of the bandwidth to the last node or GPU is left",
        "compare the nodes pair by pair with nccl-tests; look at ibstat, ethtool, and at PCIe's "
        "width with nvidia-smi --query-gpu=pcie.link.width.current --format=csv",
        lambda case: (
            (0.5, 0.2, 0.08, _LEAST_LINK) if case.whole and case.is_priced_by_links else ()
        ),
        _weak_link,
        "{:.0%}".format,
        signs={"connections": "one node is slower than the others"},
    ),
    switch(
        "low_latency_protocol",
        0.5,
        "NCCL_PROTO=LL is left over, which halves the bandwidth",
        "unset NCCL_PROTO and NCCL_ALGO, and look into /etc/nccl.conf",
        lambda case: case.cluster.protocol == "auto" and _chooses(case, "NCCL_PROTO"),
        "cluster.nccl_env.NCCL_PROTO=LL",
        signs={"nccl_log": "NCCL_PROTO set by environment"},
        shows={FactName.PROTOCOL: "LL"},
    ),
    Hypothesis(
        "few_channels",
        0.5,
        "NCCL_MAX_NCHANNELS={size} is left over: few thread blocks copy",
        "unset NCCL_MAX_NCHANNELS, and look into /etc/nccl.conf",
        lambda case: (4.0, 2.0, 1.0) if _chooses(case, "NCCL_MAX_NCHANNELS") else (),
        set_to("cluster.nccl_env.NCCL_MAX_NCHANNELS={size:.0f}"),
        "{:.0f}".format,
        graded=False,
        signs={"nccl_log": "NCCL_MAX_NCHANNELS set by environment"},
        shows={FactName.CHANNELS: "limited"},
    ),
)
BETWEEN_NODES = (
    Hypothesis(
        "sockets",
        8.0,
        "RDMA is not used between nodes: TCP over the same NICs",
        "unset NCCL_IB_DISABLE; load the NIC's verbs library, or the cloud's plugin, in the "
        "container; pass /dev/infiniband",
        lambda case: (1.0,) if _uses_rdma(case) else (),
        _over_sockets,
        graded=False,
        signs={"nccl_log": "NET/Socket"},
        shows={FactName.BETWEEN: "TCP"},
    ),
    Hypothesis(
        "management_network",
        5.0,
        "traffic between nodes goes over another network: TCP on one port of {size}",
        "set NCCL_SOCKET_IFNAME (NCCL_IB_HCA for RDMA) to the fast interface",
        _management_networks,
        _over_management,
        _gbit,
        graded=False,
        signs={
            "nccl_log": "NET/Socket on a slow interface",
            "connections": "8 carry far less than the NIC",
        },
        shows={FactName.BETWEEN: "TCP"},
    ),
    Hypothesis(
        "tcp_stream_limit",
        8.0,
        "one TCP connection carries only {size}",
        f"set {MORE_SOCKETS}; ask the cloud for its limit of a flow, or for RDMA",
        _stream_limits,
        _tcp_limited,
        _gbit,
        signs={"connections": "8 carry far more than 1"},
    ),
    Hypothesis(
        "fewer_nics",
        3.0,
        "only {size} of a node's NICs is used",
        "unset NCCL_IB_HCA, pass all NICs to the container, look at NCCL's line NET/IB : Using",
        _few_nics,
        lambda case, nics: Change(case.inter_node(nics_per_node=round(nics))),
        "{:.0f}".format,
        graded=False,
        signs={"nccl_log": "fewer NICs in the line NET/IB : Using"},
        shows={FactName.NICS: "fewer"},
    ),
    Hypothesis(
        "no_gpudirect",
        3.0,
        "NICs do not reach GPU memory (no GPUDirect RDMA): {size} of their rate is left",
        "load nvidia-peermem (or use dma-buf), turn ACS off, look at nvidia-smi topo -m",
        lambda case: (0.65, 0.4, 0.25) if _uses_rdma(case) else (),
        _without_gpudirect,
        "{:.0%}".format,
        signs={"nccl_log": "no GDRDMA behind NET/IB"},
        shows={FactName.DIRECT: "no"},
    ),
    Hypothesis(
        "congestion",
        4.0,
        "the network between nodes is shared: its uplinks are asked for {size} what they carry",
        "repeat the run at another hour; ask for nodes of one switch (placement group, topology)",
        lambda case: (1.5, 3.0, 6.0, 12.0) if case.inter else (),
        _congested,
        "{:.3g} times".format,
        falls=0.5,
        signs={"connections": "8 carry far less than the NIC"},
    ),
)
COLLECTIVES = (
    Hypothesis(
        "slow_collectives",
        1.0,
        "collectives take {size} as long as predicted, for a reason that is not in this list",
        "run nccl-tests on the same ranks and set cluster.all_reduce",
        lambda case: (1.5, 6.0, 25.0, 100.0) if case.cluster.world_size > 1 else (),
        scaled("network"),
        "{:.3g} times".format,
    ),
)
