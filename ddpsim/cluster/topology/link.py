"""A link: what every cost over the wire begins with."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["Link"]


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of one hop, by the LogGP model (Alexandrov et al. 1995).

    A message keeps the link busy for `overhead_s` and for its bytes, and arrives `latency_s` after
    that. `flows`: so many equal flows take turns: a message that finds the link idle has it whole,
    but the link is busy until those of all flows have left.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    overhead_s: float = 0.0
    flows: float = 1.0

    def widened(self, factor: float) -> Link:
        """With `factor` times the bandwidth, which may be less than 1."""
        return replace(self, bandwidth_bytes_per_s=self.bandwidth_bytes_per_s * factor)

    def at_most(self, bytes_per_s: float) -> Link:
        """With no more bandwidth than that."""
        if self.bandwidth_bytes_per_s <= bytes_per_s:
            return self
        return replace(self, bandwidth_bytes_per_s=bytes_per_s)

    def copied(self, s_per_byte: float) -> Link:
        """Where a message is copied first, at so many seconds a byte."""
        if not s_per_byte:
            return self
        bytes_per_s = 1 / (1 / self.bandwidth_bytes_per_s + s_per_byte)
        return replace(self, bandwidth_bytes_per_s=bytes_per_s)

    def later(self, factor: float) -> Link:
        """With `factor` times the latency."""
        return replace(self, latency_s=self.latency_s * factor)

    def slower(self, factor: float) -> Link:
        """The same where everything takes `factor` times as long."""
        return replace(
            self,
            latency_s=self.latency_s * factor,
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s / factor,
            overhead_s=self.overhead_s * factor,
        )

    def busy_s(self, size_bytes: int) -> float:
        """Until one message has left."""
        return self.overhead_s + size_bytes / self.bandwidth_bytes_per_s
