"""The strategy that a scenario asks for: new ones plug in here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpsim.scenario.schema import Scenario
from ddpsim.strategies.data_parallel import DataParallel
from ddpsim.strategies.ddp.costs import DdpCosts
from ddpsim.strategies.ddp.strategy import DistributedDataParallel
from ddpsim.strategies.model_work import ModelWork
from ddpsim.strategies.single_device import SingleDevice
from ddpsim.strategies.strategy import Strategy
from ddpsim.strategies.ticks import Ticks
from ddpsim.workload.model import Model

if TYPE_CHECKING:
    from ddpsim.importers.profiles.cluster import Overheads

__all__ = ["STRATEGIES", "Asked", "select", "without_data_parallelism"]


@dataclass(frozen=True)
class Asked:
    """What a strategy is made of.

    `overheads`: DDP's own cost where it was measured; `own_factor`: all of that takes so many times
    as long as priced; `host_factor`: so does everything that the host does.
    """

    scenario: Scenario
    model: Model
    overheads: Overheads | None = None
    own_factor: float = 1.0
    host_factor: float = 1.0

    @property
    def ticks(self) -> Ticks:
        """The clock of the model's launches."""
        return Ticks(self.model.launch_s, self.host_factor)

    @property
    def costs(self) -> DdpCosts:
        """What DDP's work takes on the scenario's device."""
        return DdpCosts(self.scenario.cluster.device, self.scenario.ddp, self.overheads)


def _ddp(asked: Asked) -> DistributedDataParallel:
    spec = asked.scenario.ddp
    return DistributedDataParallel.of(asked.model, spec, asked.costs, asked.ticks, asked.own_factor)


def _data_parallel(asked: Asked) -> DataParallel:
    gpus, batch = asked.scenario.cluster.gpus_per_node, asked.scenario.workload.batch_per_rank
    launch_s = asked.costs.launch_collective_s
    return DataParallel(asked.model, asked.ticks, gpus, batch, launch_s)


STRATEGIES: dict[str, Callable[[Asked], Strategy]] = {
    "ddp": _ddp,
    "data_parallel": _data_parallel,
}


def select(asked: Asked) -> Strategy:
    """The strategy of a scenario."""
    is_alone = asked.scenario.cluster.algorithm == "data_parallel"
    return STRATEGIES["data_parallel" if is_alone else "ddp"](asked)


def without_data_parallelism(asked: Asked) -> SingleDevice:
    """The same steps of the bare module on one device."""
    steps = asked.scenario.ddp.accumulation_steps
    work = ModelWork.of(asked.model, asked.ticks, asked.costs, steps)
    return SingleDevice(work, select(asked).warmup)
