"""A link: what every cost over the wire begins with."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Link"]


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of one hop: seconds per message and bytes per second."""

    latency_s: float
    bandwidth_bytes_per_s: float

    def widened(self, factor: float) -> Link:
        """With `factor` times the bandwidth, which may be less than 1."""
        return Link(self.latency_s, self.bandwidth_bytes_per_s * factor)

    def at_most(self, bytes_per_s: float) -> Link:
        """With no more bandwidth than that."""
        if self.bandwidth_bytes_per_s <= bytes_per_s:
            return self
        return Link(self.latency_s, bytes_per_s)
