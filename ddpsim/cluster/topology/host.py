"""GPUs of a node without NVLink: how NCCL joins them, and what all of them share on the way.

A ring's rate is the least of what its parts carry: a GPU's slot, a PCIe switch or its uplink, the
link between sockets, and the host's memory, through which each hop that is no peer-to-peer is
written and read. What NCCL takes: nccl v2.30 src/graph/paths.cc (ncclTopoCheckP2p) and its history.
The rates are those of public boxes, tests/data/published-box-rates.csv, from which
tools/held_out/box_rates.py sets them and judges each source by the others.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Literal, NamedTuple

from ddpsim.cluster.nccl.environment import LEVELS, Environment
from ddpsim.cluster.transports import PROXY_BYTES_PER_S
from ddpsim.provenance import Uncertainty
from ddpsim.scenario.device import SLOT_BYTES_PER_S
from ddpsim.scenario.links import IntraNode
from ddpsim.scenario.options.host import Board, Host

if TYPE_CHECKING:
    from ddpsim.scenario.cluster import Cluster

NVLINK_FROM_BYTES_PER_S = 30e9  # assumed: no PCIe slot of today lets a ring reach it
_HOP_S = 8e-6  # assumed, of GPUs that meet in host memory
# of what a slot carries as NCCL counts it: the most that a public box got of it through host
# memory, and the mean of two through PCIe switches
_SHM_PART, _SWITCH_PART = 0.73, 0.8
# NCCL's own rates between sockets in GB/s (src/graph/topo.h), of which rings get 1.6 times as much:
# 35 where it counts 22 (nccl issues 1130 and 1639)
_BETWEEN_SOCKETS_GB_PER_S = {
    "intel": {3: 10.0, 4: 10.0, 5: 22.0},
    "amd": dict.fromkeys((3, 4, 5), 16.0),
    "other": dict.fromkeys((3, 4, 5), 6.0),
}
_OF_COUNTED = 1.6
_PAIR = 2  # GPUs that a bridge joins
# minor versions of NCCL 2: AMD with more than two GPUs goes peer to peer before, Intel in these
_FEW_OF_AMD_FROM, _HOST_BRIDGES_OF_INTEL = 23, (7, 8)
_GEFORCE = ("rtx-20", "rtx-30", "rtx-40", "rtx-50", "gtx-", "titan")
Transport = Literal["NVL", "PXB", "P2P", "SHM", "NET"]


class Prior(NamedTuple):
    """What public boxes get: the median, and the standard deviation of the logarithm."""

    bytes_per_s: float
    sigma: float


# bus rate of a ring times the GPUs that meet in host memory: of a box, whatever their number
HOST_MEMORY = Prior(9.3e9, 1.11)
SERVER_OF_PCIE_5 = Prior(143e9, 1.11)
# bus rate of a ring whose GPUs reach each other through the host's bridges, PCIe 4
PEER_TO_PEER = Prior(10.7e9, 1.6)
STATED_LINKS = Uncertainty(0.10, "assumed: links stated in the scenario, one alpha and beta")
_BRIDGED = Uncertainty(0.25, "assumed: a bridged pair as the published one of its kind")
_SWITCHED = Uncertainty(0.25, "assumed: switches as the published ones")


class Way(NamedTuple):
    """How GPUs of a node reach each other: NCCL's transport, a ring's rate, and what limits it."""

    transport: Transport
    bytes_per_s: float
    limit: str
    uncertainty: Uncertainty

    def as_link(self, usual: IntraNode) -> IntraNode:
        """The node's link in this way; `usual` has the latency."""
        hop_s = usual.latency_s
        if self.transport in ("SHM", "NET") and is_nvlink(usual):
            hop_s = max(hop_s or 0.0, _HOP_S)
        changed = {
            "bandwidth_bytes_per_s": self.bytes_per_s,
            "switch_bandwidth_bytes_per_s": None,
            "latency_s": hop_s,
            "path": "nvlink" if self.transport == "NVL" else "pcie",
        }
        return usual.model_copy(update=changed)


def is_nvlink(link: IntraNode) -> bool:
    """Whether GPUs are joined by NVLink: as stated, or as fast as no slot is."""
    if link.path is not None:
        return link.path == "nvlink"
    return (link.bandwidth_bytes_per_s or 0.0) >= NVLINK_FROM_BYTES_PER_S


def board_of(cluster: Cluster) -> Board:
    """The class of the node's board: as stated, or as such GPUs usually have."""
    if cluster.host and cluster.host.board:
        return cluster.host.board
    if cluster.device.name.startswith(_GEFORCE) and cluster.gpus_per_node <= 4:
        return "desktop" if cluster.gpus_per_node <= _PAIR else "workstation"
    return "server"


def between_gpus(cluster: Cluster, link: IntraNode, environment: Environment) -> Way | None:
    """How NCCL joins the GPUs of a node; None: over the link as it is.

    A rate that is stated for PCIe holds, but for what a slot carries through host memory.
    """
    host = cluster.host or Host()
    slot = slot_bytes_per_s(cluster)
    if is_nvlink(link):
        return None if environment.uses_p2p else _through_the_host(cluster, host, slot, environment)
    stated = link.bandwidth_bytes_per_s
    if stated is None:
        return _through_the_host(cluster, host, slot, environment)
    if environment.uses_p2p or stated <= _SHM_PART * slot or cluster.device.kind == "cpu":
        return None
    return Way("SHM", _SHM_PART * slot, "a GPU's slot", STATED_LINKS)


def slot_bytes_per_s(cluster: Cluster) -> float:
    """What a GPU's slot carries each way, as NCCL counts it."""
    host, pcie = cluster.host or Host(), cluster.device.pcie
    return SLOT_BYTES_PER_S[min(host.pcie or pcie, pcie)] * host.lanes / 16


def _through_the_host(cluster: Cluster, host: Host, slot: float, environment: Environment) -> Way:
    """The least of what a ring's parts carry, each over what the ring sends through it."""
    gpus, level = cluster.gpus_per_node, _level(cluster, host, environment)
    sending = max(gpus, host.gpus or 0)
    bridge = cluster.device.bridge_bandwidth_bytes_per_s
    joined = _PAIR if host.bridge == "nvlink" and level >= LEVELS.index("NVL") else 1
    if bridge and joined >= gpus:
        return Way("NVL", bridge, "the NVLink bridge", _BRIDGED)
    under = host.under_a_switch
    uses_switch = under > 1 and level >= LEVELS.index("PIX")
    meeting = ceil(sending / max(joined, under if uses_switch else 1))
    parts = []
    if uses_switch:
        parts.append(("the PCIe switches", _SWITCH_PART * slot))
        if gpus <= under:
            return Way("PXB", _SWITCH_PART * slot, "the PCIe switches", _SWITCHED)
    elif under > 1:
        parts.append(("a PCIe switch's uplink", _SHM_PART * slot / min(under, sending)))
    if host.sockets > 1:
        parts.append(("the link between sockets", _between_sockets(cluster, host)))
    farthest = "SYS" if host.sockets > 1 else "PHB"
    transport: Transport = "SHM" if environment.uses_shm else "NET"
    if level >= LEVELS.index(farthest):
        part = PEER_TO_PEER.bytes_per_s / SLOT_BYTES_PER_S[4]
        transport, prior = "P2P", PEER_TO_PEER
        parts.append(("peer-to-peer through the host", part * slot))
    else:
        prior = _memory(cluster)
        parts.append(("a GPU's slot", _SHM_PART * slot))
        parts.append((f"host memory, which {sending} GPUs share", prior.bytes_per_s / meeting))
        if transport == "NET":
            parts.append(("the node's own sockets", PROXY_BYTES_PER_S))
    limit, rate = min(parts, key=lambda each: each[1])
    return Way(transport, rate, limit, Uncertainty(prior.sigma, "public boxes, each by the others"))


def _memory(cluster: Cluster) -> Prior:
    """What a box's host memory gives NCCL's copies, in and out of it."""
    newest = min((cluster.host and cluster.host.pcie) or 5, cluster.device.pcie)
    is_large = board_of(cluster) != "desktop"
    return SERVER_OF_PCIE_5 if newest == 5 and is_large else HOST_MEMORY


def _between_sockets(cluster: Cluster, host: Host) -> float:
    counted = _BETWEEN_SOCKETS_GB_PER_S[_cpu(cluster, host)]
    return _OF_COUNTED * 1e9 * counted[host.pcie or cluster.device.pcie]


def _cpu(cluster: Cluster, host: Host) -> Literal["intel", "amd", "other"]:
    return host.cpu or (cluster.machine.cpu_vendor if cluster.machine else "intel")


def _level(cluster: Cluster, host: Host, environment: Environment) -> int:
    """Up to which of LEVELS GPUs reach each other: the driver's word, and NCCL's by version."""
    level, minor = environment.p2p_level, cluster.nccl_minor
    is_allowed = cluster.device.peer_to_peer if host.peer_to_peer == "auto" else host.peer_to_peer
    if not is_allowed:  # NVLink needs no leave of PCIe
        return LEVELS.index("LOC" if level == "LOC" else "NVL")
    if level is not None:
        return LEVELS.index(level)
    if host.peer_to_peer is True:
        return LEVELS.index("SYS")
    cpu = _cpu(cluster, host)
    if cpu == "amd" and (minor < _FEW_OF_AMD_FROM or cluster.gpus_per_node <= _PAIR):
        return LEVELS.index("SYS")
    return LEVELS.index("PHB" if cpu == "intel" and minor in _HOST_BRIDGES_OF_INTEL else "PXB")
