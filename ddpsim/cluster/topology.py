"""A link: what every cost over the wire begins with."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Link"]


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of one hop: seconds per message and bytes per second."""

    latency_s: float
    bandwidth_bytes_per_s: float
