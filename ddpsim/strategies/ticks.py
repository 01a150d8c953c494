"""Seconds to the engine's clock: integer nanoseconds, each duration rounded once, here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ddpsim.units import to_ns
from ddpsim.workload.model import Work


class Launch(NamedTuple):
    """Device work, the host's time to launch it, and the `names` of a Work."""

    host_ns: int
    device_ns: int
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ticks:
    """Work in ticks, where the host launches a kernel in `launch_s` seconds.

    `host_factor`: everything that the host does takes so many times as long.
    """

    launch_s: float
    host_factor: float = 1.0

    def host_ns(self, seconds: float, factor: float = 1) -> int:
        """Host time, `factor` times as long."""
        return self._on_host(to_ns(seconds), factor)

    def launch(self, work: Work, factor: float = 1, threads: int = 1) -> Launch:
        """Work that takes host and device `factor` times as long.

        `threads`: so many threads launch the same, one after the other.
        """
        host_ns = threads * to_ns(work.kernels * self.launch_s + work.host_s)
        device_ns = round(factor * to_ns(work.device_s))
        return Launch(self._on_host(host_ns, factor), device_ns, work.names)

    def launches(
        self, works: Iterable[Work], factor: float = 1, threads: int = 1
    ) -> tuple[Launch, ...]:
        """Each of several pieces of work."""
        return tuple(self.launch(work, factor, threads) for work in works)

    def _on_host(self, host_ns: int, factor: float) -> int:
        return round(self.host_factor * round(factor * host_ns))
