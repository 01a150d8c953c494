"""A collective of many ranks and trials, and the waits for it, in arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ddpsim.cluster.algorithms.max_plus import Ticks, ring_ends_ns
from ddpsim.cluster.transfers import RingTransfer, ScheduledTransfer, Transfer, duration_ns
from ddpsim.engine.fast.scalar import Met, closed_form

__all__ = ["Collective", "Waits", "collective_ends_ns"]


@dataclass(frozen=True, slots=True)
class Collective:
    """What it is in each trial (or in all), its last arrival [trials, 1], its ends."""

    transfers: Sequence[Transfer]
    met_ns: Ticks
    ends_ns: Ticks

    def of(self, trial: int, rank: int) -> Met:
        """As one rank saw it."""
        slowdown = self.transfers[trial % len(self.transfers)].interference.compute
        return Met(int(self.met_ns[trial, 0]), int(self.ends_ns[trial, rank]), slowdown)


@dataclass(slots=True)
class Waits:
    """Ticks in which a rank is in collectives, its compute waits for them, or for late peers."""

    comm_ns: Ticks
    exposed_ns: Ticks
    late_ns: Ticks

    @classmethod
    def none(cls, shape: tuple[int, int]) -> Waits:
        """Nothing yet."""
        return cls(*(np.zeros(shape) for _ in range(3)))

    def add(self, more: Waits, times: int = 1) -> None:
        """So many more of the same."""
        self.comm_ns += times * more.comm_ns
        self.exposed_ns += times * more.exposed_ns
        self.late_ns += times * more.late_ns


def collective_ends_ns(transfer: Transfer, joined_ns: Ticks) -> tuple[Ticks, str]:
    """When each rank ends a collective that it joins, [..., ranks], and how that was found."""
    if isinstance(transfer, RingTransfer):
        begun_ns = joined_ns + transfer.start_ns
        ends, way = ring_ends_ns(transfer.busy_ns, transfer.latency_ns, transfer.steps, begun_ns)
        return ends, f"ring:{way}"
    last = joined_ns.max(axis=-1, keepdims=True)
    if isinstance(transfer, ScheduledTransfer) and (joined_ns != last).any():
        ends, way = transfer.ends_ns(joined_ns), f"{transfer.algorithm}:recurrence"
    else:
        ends, way = last + duration_ns(transfer), closed_form(transfer)
    return np.broadcast_to(ends, joined_ns.shape), way
