"""What carries NCCL's bytes between nodes, and what it takes of the line's rate and time.

Sources: published all_reduce_perf sweeps of several nodes (docs/validation.md); aws-ofi-nccl
src/platform-aws.cpp for the latency that its plugin declares. Of sockets: how many NCCL opens and
which thread serves them are in nccl v2.4 to v2.30 src/transport/net_socket.cc; the rates are those
of docs/explanation/nccl.md, "TCP".
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ddpsim.cluster.nccl.environment import Environment
    from ddpsim.scenario.links import InterNode

BY_TABLE = ("rdma", "slingshot")  # whose hops NCCL's tables have, or multiples of them
_CHANNELS_A_NIC = 2  # at least, each with its own connections (nccl src/graph/connect.cc)
# without helper threads one thread of NCCL's copies what all connections of a NIC send and receive:
# the median of 1.55 (Polaris), 1.9 (nccl issue 209), 2.0 (aws-do-eks, T4) and 2.6 (V100 over
# 100 Gbit/s) GB/s each way
PROXY_BYTES_PER_S = 1.95e9
_HELPER_BYTES_PER_S = 1.25e9  # a helper thread (nccl issue 209, 2 nodes of 32 Gbit/s)
# what NCCL's own issues advise on fast lines
SOCKET_VARIABLES = {"NCCL_SOCKET_NTHREADS": 4, "NCCL_NSOCKS_PERTHREAD": 4}
MORE_SOCKETS = " and ".join(f"{name}={number}" for name, number in SOCKET_VARIABLES.items())
_MOST_SOCKETS_BYTES_PER_S = 5e9  # 100 Gbit/s with any number of threads (nccl issues 398, 450)

# rings of 10 x 1 and 10 x 2 H100 over NDR (NCCL 2.29), 64 MiB to 1 GiB; EDR and HDR: the others
_NDR_BYTES_PER_S, _NDR_PART = 50e9, 0.96


class Carrier(NamedTuple):
    """One kind of network under NCCL.

    `rate_part`: of the line's rate that bytes get. `message_s`: how long a NIC is busy with a
    message beside its bytes. `declared_us`: the latency that the plugin tells NCCL's tuner.
    """

    rate_part: float
    message_s: float
    declared_us: float = 0.0


TRANSPORTS = {
    "rdma": Carrier(0.92, 1.5e-6),
    "slingshot": Carrier(0.92, 1.5e-6),
    "efa": Carrier(0.92, 3e-6, 75.0),
    "tcpx": Carrier(0.94, 6e-6),
    "tcp": Carrier(0.94, 6e-6),
}


def nic_bytes_per_s(inter: InterNode, environment: Environment) -> float:
    """What one NIC carries of NCCL's bytes: of the line, and over TCP no more than its sockets."""
    rate = inter.bandwidth_bytes_per_s or 0.0
    part = TRANSPORTS[inter.transport].rate_part
    if inter.transport == "rdma" and rate >= _NDR_BYTES_PER_S:
        part = _NDR_PART
    return min(rate * part, sockets_bytes_per_s(inter, environment))


def opened_by_nccl(inter: InterNode, environment: Environment) -> int:
    """How many TCP connections share the bytes that one NIC sends to another node."""
    return (inter.connections or _CHANNELS_A_NIC) * (environment.sockets or 1)


def sockets_bytes_per_s(inter: InterNode, environment: Environment) -> float:
    """What the sockets of one NIC carry, whatever its line: infinite where NCCL opens none.

    The limit of each connection, if a cloud sets one, and what NCCL's threads copy.
    """
    if inter.transport != "tcp":
        return inf
    limit = inter.flow_bandwidth_bytes_per_s or inf
    threads = environment.threads or 0
    copied = _CHANNELS_A_NIC * threads * _HELPER_BYTES_PER_S if threads else PROXY_BYTES_PER_S
    return min(limit * opened_by_nccl(inter, environment), copied, _MOST_SOCKETS_BYTES_PER_S)


def message_s(inter: InterNode | None) -> float:
    """How long a NIC is busy with a message beside its bytes."""
    if inter is None:
        return 0.0
    stated = inter.message_overhead_s
    return TRANSPORTS[inter.transport].message_s if stated is None else stated


def hop_s(inter: InterNode | None, *, is_stated: bool) -> float | None:
    """What a small message takes to another node; None: as NCCL's tables say."""
    if inter is None or (inter.transport in BY_TABLE and not is_stated):
        return None
    return inter.latency_s


def declared_us(inter: InterNode | None) -> float:
    """The latency that the network's plugin tells NCCL's tuner."""
    if inter is None:
        return 0.0
    if inter.tuner_latency_s is not None:
        return inter.tuner_latency_s * 1e6
    return TRANSPORTS[inter.transport].declared_us
