"""DDP on one device alone: what its own work takes there, as a measured step tells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from ddpsim.cluster.cost import SingleRankCost
from ddpsim.engine.program import Program
from ddpsim.engine.request import Request
from ddpsim.engine.run import run
from ddpsim.errors import InputError
from ddpsim.result.summary import mean_step_s
from ddpsim.result.timeline import Timeline
from ddpsim.scenario.ddp import Ddp
from ddpsim.scenario.workload import NO_LONGER_WITH_DDP

__all__ = ["as_measured", "on_one_rank", "times_as_priced"]

_MOST = 1024.0  # times as long as priced
_CLOSE_S = 1e-9
_TRIES = 100


def on_one_rank(program: Program) -> Timeline:
    """Steady steps of a rank that is alone, and never waits for data."""
    return run(Request(replace(program, loader=None, iterations=2), SingleRankCost(), 1)).timeline


def as_measured(ddp: Ddp) -> Ddp:
    """The options under which a step with DDP on one device is measured: no choices to tune."""
    changes = {
        "strategy": "ddp",
        "zero1": None,
        "bucket_cap_mb": None,
        "gradient_as_bucket_view": False,
        "comm_hook": "none",
        "join": None,
        "accumulation_steps": 1,
    }
    return ddp.model_copy(update=changes)


def times_as_priced(
    program_with: Callable[[float], Program], bare: Program, measured_s: float, key: str
) -> float:
    """How many times as long as priced DDP's own work took in a measured step.

    `program_with(f)`: the loop where that takes f times as long; `bare`: the loop without DDP.
    0 where launching the collectives takes that long already. Raises InputError, at the
    scenario's `key`, for a step that is no longer than without DDP, or that 1024 times as much work
    does not make.
    """

    @cache
    def step_s(times: float) -> float:
        return mean_step_s(on_one_rank(program_with(times).steady()))

    low, high = 0.0, 1.0
    while step_s(high) < measured_s:
        low, high = high, 2 * high
        if high > _MOST:
            raise InputError(
                key,
                f"{measured_s:g} s cannot be DDP's own work, which would take over {_MOST:g} times "
                "as long as it is priced; is it the step of one device alone?",
            )
    if measured_s <= mean_step_s(on_one_rank(bare)):
        raise InputError(key, f"{measured_s:g} s {NO_LONGER_WITH_DDP}")
    if step_s(low) > measured_s:
        return 0.0
    return _crossing(step_s, measured_s, low, high)


def _crossing(step_s: Callable[[float], float], wanted_s: float, low: float, high: float) -> float:
    """Where a step that grows with its argument, mostly linearly, takes as long as wanted."""
    low_s, high_s = step_s(low), step_s(high)
    middle = high
    for attempt in range(_TRIES):
        if high_s - low_s <= _CLOSE_S:
            break
        share = (wanted_s - low_s) / (high_s - low_s) if attempt % 2 == 0 else 0.5
        middle = low + share * (high - low)
        middle_s = step_s(middle)
        if abs(middle_s - wanted_s) <= _CLOSE_S:
            break
        if middle_s < wanted_s:
            low, low_s = middle, middle_s
        else:
            high, high_s = middle, middle_s
    return middle
