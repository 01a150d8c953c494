"""From a scenario and its model to the training loop that every rank runs."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from ddpsim.engine.program import Loader, Program
from ddpsim.scenario.schema import Scenario
from ddpsim.strategies.select import Asked, select, without_data_parallelism
from ddpsim.units import to_ns
from ddpsim.workload.model import Model

if TYPE_CHECKING:
    from ddpsim.importers.profiles.cluster import Overheads

__all__ = ["compile_program"]


def compile_program(
    scenario: Scenario,
    model: Model,
    overheads: Overheads | None = None,
    *,
    ddp: bool = True,
    ddp_factor: float = 1.0,
    host_factor: float = 1.0,
) -> Program:
    """The loop that a scenario's ranks run; with `ddp` False, the same module on one device.

    `overheads`: DDP's own cost where it was measured; `ddp_factor`: all of it takes so many times
    as long; `host_factor`: so does everything that the host does.
    """
    asked = Asked(scenario, model, overheads, ddp_factor, host_factor)
    strategy = select(asked) if ddp else without_data_parallelism(asked)
    is_gloo = scenario.ddp.backend == "gloo"
    return Program(
        strategy,
        warmup=strategy.warmup,
        iterations=ceil(scenario.run.iterations / strategy.period) * strategy.period,
        loader=_loader(scenario),
        blocking=scenario.cluster.device.kind == "cpu",
        comm_workers=2 if is_gloo else 1,
        comm_spins=not is_gloo,
    )


def _loader(scenario: Scenario) -> Loader | None:
    data = scenario.workload.data
    if data is None:
        return None
    batch_s = scenario.workload.batch_per_rank / data.rate_samples_per_s
    return Loader(to_ns(batch_s), data.workers * data.prefetch)
