"""Seconds to the engine's clock: integer nanoseconds, each duration rounded once, here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
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
        return _ticks(0.0, seconds, self.host_factor, factor, 1)[0]

    def launch(self, work: Work, factor: float = 1, threads: int = 1) -> Launch:
        """Work that takes host and device `factor` times as long.

        `threads`: so many threads launch the same, one after the other.
        """
        device_s, kernels, host_s, names = work
        launched_s = kernels * self.launch_s + host_s
        return Launch(*_ticks(device_s, launched_s, self.host_factor, factor, threads), names)

    def launches(
        self, works: Iterable[Work], factor: float = 1, threads: int = 1
    ) -> tuple[Launch, ...]:
        """Each of several pieces of work."""
        return tuple(self.launch(work, factor, threads) for work in works)


@lru_cache(maxsize=2**14)  # blocks of a model, and its variants, have the same works
def _ticks(
    device_s: float, host_s: float, host_factor: float, factor: float, threads: int
) -> tuple[int, int]:
    """Ticks of the host, in which so many threads do the same, and of the device."""
    host_ns = round(host_factor * round(factor * (threads * to_ns(host_s))))
    return host_ns, round(factor * to_ns(device_s))
