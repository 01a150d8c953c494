"""Where DDP does not fit a GPU's memory: what fully_shard needs, and how long its step takes."""

from __future__ import annotations

from ddpsim.errors import ScenarioError
from ddpsim.prediction.job import Job
from ddpsim.prediction.parts import Parts
from ddpsim.prediction.resolve import resolve
from ddpsim.result.model import NextStep
from ddpsim.scenario.ddp import Ddp
from ddpsim.units import format_bytes, format_duration

__all__ = ["sharded_instead"]

_KEPT = ("backend", "torch", "accumulation_steps", "no_sync")


def sharded_instead(job: Job) -> NextStep | None:
    """The same job under fully_shard, simulated without noise; None where DDP fits, or it does not.

    Options of DDP, which fully_shard has not, would have to go: then nothing is said.
    """
    scenario, memory = job.scenario, job.memory()
    ddp = scenario.ddp
    usual = Ddp(**{key: getattr(ddp, key) for key in _KEPT})
    is_alone = scenario.cluster.algorithm == "data_parallel" or scenario.cluster.world_size == 1
    if memory.fits or is_alone or ddp != usual or ddp.torch == "1.4":
        return None
    sharded = ddp.model_copy(update={"strategy": "fully_shard"})
    try:
        other = resolve(scenario.model_copy(update={"ddp": sharded}), parts=Parts())
    except ScenarioError:
        return None
    needed = other.memory()
    if not needed.fits:
        return None
    needs, device = format_bytes(memory.total), format_bytes(memory.device)
    return NextStep(
        f"does not fit under DDP ({needs} of {device}); fully_shard needs "
        f"{format_bytes(needed.total)} and {format_duration(other.step_s())} a step",
        ("ddp.strategy=fully_shard",),
    )
