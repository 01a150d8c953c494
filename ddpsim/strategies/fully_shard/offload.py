"""CPUOffloadPolicy: shards, gradients and the optimizer on the host.

Source: torch 2.13 torch/distributed/fsdp/_fully_shard (_fsdp_param.py, all_gather_inputs: a copy of
each shard before its all-gather, on that stream; _fsdp_collectives.py, foreach_reduce: a copy of
each gradient after its reduction, on that stream).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ddpsim.scenario.device import Device
from ddpsim.scenario.options.fully_shard import CpuOffload
from ddpsim.workload.model import Work


@dataclass(frozen=True)
class Offload:
    """How fast the host copies, and how fast it optimizes."""

    link_bytes_per_s: float
    optimizer_bytes_per_s: float
    floor_s: float

    @classmethod
    def of(cls, spec: CpuOffload, device: Device) -> Offload:
        """Of a policy on a GPU's host."""
        link = spec.host_link_bytes_per_s or device.host_link_bytes_per_s
        return cls(link, spec.host_optimizer_bytes_per_s, device.kernel_floor_s)

    def copies(self, sizes_bytes: Iterable[int]) -> Work:
        """One copy of each shard, one after the other."""
        each_s = [max(self.floor_s, size / self.link_bytes_per_s) for size in sizes_bytes]
        return Work(sum(each_s), len(each_s))
