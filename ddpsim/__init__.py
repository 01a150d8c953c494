"""Predict the time of a PyTorch DDP training step before you book the GPUs.

>>> import ddpsim
>>> scenario = ddpsim.load_scenario("scenario.yaml")  # doctest: +SKIP
>>> ddpsim.simulate(scenario).iteration_time_s.mean  # doctest: +SKIP
0.0779
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpsim.diagnosis.diagnose import diagnose, judge
    from ddpsim.errors import DdpsimError, ScenarioError, SimulationError
    from ddpsim.planning.capacity_plan.plan import plan_capacity
    from ddpsim.planning.many import simulate_many
    from ddpsim.planning.sweeps.grid import Grid
    from ddpsim.planning.sweeps.sweep import sweep
    from ddpsim.prediction.api import load_scenario, observe, simulate
    from ddpsim.result.capacity import CapacityPlan
    from ddpsim.result.diagnosis import Diagnosis
    from ddpsim.result.model import Brief, Result
    from ddpsim.result.sweep import Sweep
    from ddpsim.scenario.schema import Scenario
    from ddpsim.version import __version__

__all__ = [
    "Brief",
    "CapacityPlan",
    "DdpsimError",
    "Diagnosis",
    "Grid",
    "Result",
    "Scenario",
    "ScenarioError",
    "SimulationError",
    "Sweep",
    "__version__",
    "diagnose",
    "judge",
    "load_scenario",
    "observe",
    "plan_capacity",
    "simulate",
    "simulate_many",
    "sweep",
]

# imported when first used: `ddpsim --help` needs none of them
_HOMES = {
    "Brief": "ddpsim.result.model",
    "CapacityPlan": "ddpsim.result.capacity",
    "DdpsimError": "ddpsim.errors",
    "Diagnosis": "ddpsim.result.diagnosis",
    "Grid": "ddpsim.planning.sweeps.grid",
    "Result": "ddpsim.result.model",
    "Scenario": "ddpsim.scenario.schema",
    "ScenarioError": "ddpsim.errors",
    "SimulationError": "ddpsim.errors",
    "Sweep": "ddpsim.result.sweep",
    "__version__": "ddpsim.version",
    "diagnose": "ddpsim.diagnosis.diagnose",
    "judge": "ddpsim.diagnosis.diagnose",
    "load_scenario": "ddpsim.prediction.api",
    "observe": "ddpsim.prediction.api",
    "plan_capacity": "ddpsim.planning.capacity_plan.plan",
    "simulate": "ddpsim.prediction.api",
    "simulate_many": "ddpsim.planning.many",
    "sweep": "ddpsim.planning.sweeps.sweep",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ddpsim' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
