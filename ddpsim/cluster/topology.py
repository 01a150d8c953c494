"""A link: what every cost over the wire begins with."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["Link"]


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of one hop: seconds per message and bytes per second."""

    latency_s: float
    bandwidth_bytes_per_s: float

    def widened(self, factor: float) -> Link:
        """With `factor` times the bandwidth, which may be less than 1."""
        return replace(self, bandwidth_bytes_per_s=self.bandwidth_bytes_per_s * factor)
