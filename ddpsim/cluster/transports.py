"""What carries NCCL's bytes between nodes, and what it takes of the line's rate and time.

Sources: published sweeps of several nodes (docs/validation.md); aws-ofi-nccl src/platform-aws.cpp
(the latency that its plugin declares).
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["TRANSPORTS", "Transport"]


class Transport(NamedTuple):
    """One kind of network under NCCL.

    `rate_part`: of the line's rate that bytes get. `message_s`: how long a NIC is busy with a
    message beside its bytes. `declared_us`: the latency that the plugin tells NCCL's tuner.
    """

    rate_part: float
    message_s: float
    declared_us: float


TRANSPORTS = {
    "rdma": Transport(0.94, 2.0e-6, 0.0),
    "efa": Transport(0.90, 3.0e-6, 75.0),
    "tcp": Transport(0.90, 6.0e-6, 0.0),
}
