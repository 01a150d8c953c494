"""Energy and carbon of a world size: boards by what they do, host and network, the building."""

from __future__ import annotations

from dataclasses import dataclass

from ddpsim.errors import InputError
from ddpsim.result.capacity import Energy, LongRun
from ddpsim.result.model import Result
from ddpsim.scenario.catalog import board_watts
from ddpsim.scenario.device import Device

# of a board's power, assumed: while it waits for the network, or for a restart
_IDLE = 0.3
# of a board's power, for host, NICs, switches and fans: half of what the whole system takes at
# most beside its boards, in NVIDIA's data sheets of DGX A100 (6.5 kW, 8 x 400 W) and DGX H100
# (10.2 kW, 8 x 700 W)
_HOST = 0.46
_BUSY_CAUSES = ("steps", "checkpoints", "lost_work", "slow_steps")
_J_PER_KWH = 3.6e6


@dataclass(frozen=True)
class Site:
    """Where the machines stand: the building's power over theirs, and the grid's carbon."""

    pue: float
    co2_g_per_kwh: float | None = None

    def check(self, device: Device) -> None:
        """Raise InputError for what no building has, or a device of unknown power."""
        if not 1 <= self.pue <= 10:
            raise InputError("pue", f"{self.pue:g} is out of range: wanted 1 to 10")
        if self.co2_g_per_kwh is not None and not 0 <= self.co2_g_per_kwh <= 5000:
            raise InputError("carbon", f"{self.co2_g_per_kwh:g} is out of range: wanted 0 to 5000")
        if board_watts(device.name) is None:
            raise InputError("pue", f"the board power of {device.name} is not known; drop it")


def energy_of(
    site: Site, device: Device, result: Result, gpus: int, run: LongRun | float
) -> Energy:
    """The energy of a run, or of so many seconds of steps.

    A board takes its full power while it computes, and a part of it at all other times.
    """
    watts = board_watts(device.name) or 0.0
    step_s = result.iteration_time_s.mean
    computes = max(0.0, 1 - result.exposed_comm_s / step_s)
    time_s, busy = (
        (run, 1.0)
        if isinstance(run, float)
        else (run.time_s.p50, sum(run.shares[cause] for cause in _BUSY_CAUSES))
    )
    utilisation = computes * busy
    each = watts * (_IDLE + (1 - _IDLE) * utilisation + _HOST)
    kwh = site.pue * gpus * each * time_s / _J_PER_KWH
    grams = site.co2_g_per_kwh
    return Energy(
        kwh=kwh,
        co2_kg=None if grams is None else kwh * grams / 1000,
        watts_per_gpu=each,
        basis=f"boards of {watts:g} W that compute {utilisation:.0%} of the time, assumed "
        f"{_IDLE:.0%} of that power else and {_HOST:.0%} more for host and network; PUE "
        f"{site.pue:g}",
    )
