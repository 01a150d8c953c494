"""The clocks of many hosts, of trials and ranks, as their lanes see them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ddpsim.cluster.algorithms.max_plus import Ticks
from ddpsim.engine.fast.batches import Batches
from ddpsim.engine.fast.host import Host
from ddpsim.engine.fast.trials import column, distinct

__all__ = ["Clocks"]


class Clocks:
    """When each host last went on after a wait.

    `at_ns` is a number where all keep the same time, [trials, 1] where only trials differ, and
    [trials, ranks] where hosts wait for their devices.
    """

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts = distinct(hosts)
        self._loaders = [Batches(host.program.loader, np.maximum) for host in self._hosts]
        self._loads = any(host.program.loader for host in self._hosts)
        self.at_ns: Ticks | float = 0.0

    def begin(self, number: int) -> None:
        """As an iteration begins, of hosts whose clock is their own."""
        self.at_ns = column([host.batches_ns[number][0][0] for host in self._hosts])

    def end(self, number: int) -> None:
        """The iteration's last launches are done."""
        self.at_ns = self.at_ns + column([host.step(number).last_ns for host in self._hosts])

    def load(self, asked_ns: Ticks | float) -> None:
        """Wait for a batch."""
        if not self._loads:
            self.at_ns = asked_ns
        elif len(self._loaders) == 1:
            self.at_ns = self._loaders[0].take(asked_ns)
        else:
            wide = np.shape(asked_ns)[1:] or (1,)
            rows = np.broadcast_to(asked_ns, (len(self._loaders), *wide))
            taken = zip(self._loaders, rows, strict=True)
            self.at_ns = np.stack([loader.take(row) for loader, row in taken])

    def synchronize(self, asked_ns: Ticks | float, done_ns: Ticks) -> None:
        """Wait for the devices, [trials, ranks]."""
        self.at_ns = np.maximum(asked_ns, done_ns)

    def since(self, now_ns: Ticks) -> list[Ticks]:
        """Of each trial all that later launches depend on, [figures, ranks], since `now_ns`."""
        behind_ns = self.at_ns - now_ns
        if len(self._loaders) == 1:
            return list(np.stack([behind_ns, *self._loaders[0].since(now_ns)], axis=1))
        each = zip(self._loaders, behind_ns, now_ns, strict=True)
        return [np.stack([behind, *loader.since(now)]) for loader, behind, now in each]
