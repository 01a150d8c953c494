"""What carries NCCL's bytes between nodes, and what it takes of the line's rate and time.

Sources: published all_reduce_perf sweeps of several nodes (docs/validation.md); aws-ofi-nccl
src/platform-aws.cpp for the latency that its plugin declares; for sockets nccl issues 209, 398 and
450, nccl-tests issue 83, and PyTorch DDP on V100 over 10 and 100 Gbit/s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ddpsim.cluster.nccl.environment import Environment
    from ddpsim.scenario.links import InterNode

__all__ = [
    "BY_TABLE",
    "TRANSPORTS",
    "Carrier",
    "declared_us",
    "hop_s",
    "message_s",
    "nic_bytes_per_s",
]

BY_TABLE = ("rdma", "slingshot")  # whose hops NCCL's tables have, or multiples of them
SOCKET_BYTES_PER_S = 1.25e9  # one connection: what a core of a server copies (nccl issue 209)
_SOCKETS_A_NIC = 2  # NCCL opens two channels a NIC at least, with a connection each
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
    """What one NIC carries of NCCL's bytes: of the line, and over TCP of its connections."""
    rate = inter.bandwidth_bytes_per_s or 0.0
    part = TRANSPORTS[inter.transport].rate_part
    if inter.transport == "rdma" and rate >= _NDR_BYTES_PER_S:
        part = _NDR_PART
    line = rate * part
    if inter.transport != "tcp":
        return line
    socket = inter.flow_bandwidth_bytes_per_s or SOCKET_BYTES_PER_S
    sockets = _SOCKETS_A_NIC * (environment.sockets or 1)
    copied = _SOCKETS_A_NIC * max(1, environment.threads or 1) * SOCKET_BYTES_PER_S
    return min(line, sockets * socket, copied, _MOST_SOCKETS_BYTES_PER_S)


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
