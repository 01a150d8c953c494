"""What gloo's reduce-scatters and all-gathers take beyond its ring, where nobody measured them.

torch copies (2.13, ProcessGroupGloo.cpp): a reduce-scatter all-reduces a copy of its input and
copies a shard out of it. An all-gather receives into a tensor of its own and copies that out.

Two ranks often send the halves of their shards in turn (`ddpsim.cluster.cost.ScheduledCost`).
"""

from __future__ import annotations

from typing import NamedTuple

from ddpsim.cluster.cost import GLOO_IN_TURN
from ddpsim.cluster.transfers import Operation
from ddpsim.importers.profiles.cluster import ClusterProfile, GlooRing


class UnmeasuredShards(NamedTuple):
    """Reduce-scatters and all-gathers of so many ranks, and the rate of copies, if measured."""

    ranks: int
    copied_bytes_per_s: float | None

    @classmethod
    def of(cls, profile: ClusterProfile, ranks: int) -> UnmeasuredShards | None:
        """Read the rate of copies from a profile; None: it was not measured with gloo."""
        copied = profile.overheads.copy_bytes_per_s
        is_gloo = isinstance(profile.all_reduce, GlooRing)
        return cls(ranks, copied.value if copied else None) if is_gloo else None

    def more_s(
        self, operation: Operation, law: GlooRing, size_bytes: int, line_rate: float | None
    ) -> float:
        """Seconds beyond what the ring takes."""
        passes = 2 * (1 + 1 / self.ranks) if operation == "reduce_scatter" else 2
        copies_s = passes * size_bytes / self.copied_bytes_per_s if self.copied_bytes_per_s else 0.0
        if operation == "reduce_scatter" or self.ranks != 2:
            return copies_s
        half_bytes = size_bytes / 4 * law.wire_bytes_per_byte.value
        rate = line_rate or law.line_rate_bytes_per_s
        held_s = max(0.0, half_bytes - law.burst_bytes.value) / rate - law.segment_s.value
        return copies_s + GLOO_IN_TURN * max(0.0, held_s)
