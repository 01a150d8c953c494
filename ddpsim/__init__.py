"""Predict the time of a PyTorch DDP training step before you book the GPUs.

>>> import ddpsim
>>> ddpsim.run("scenario.yaml", bucket_cap_mb=50)  # doctest: +SKIP
<Result of ResNet-50 on 2 x 8 A100, 25 Gbit/s: step 59.1 ms, bottleneck communication>
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpsim.diagnosis.diagnose import judge
    from ddpsim.errors import DdpsimError, ScenarioError, SimulationError
    from ddpsim.planning.capacity_plan.plan import plan_capacity
    from ddpsim.planning.many import simulate_many
    from ddpsim.planning.sweeps.grid import Grid
    from ddpsim.prediction.api import load_scenario, observe, simulate
    from ddpsim.questions import (
        compare,
        diagnose,
        explain_step,
        plan,
        run,
        sweep,
        tune,
        write_report,
        write_trace,
    )
    from ddpsim.result.capacity import CapacityPlan
    from ddpsim.result.changes import Comparison, Explanation, Tuning
    from ddpsim.result.diagnosis import Diagnosis
    from ddpsim.result.model import Brief, Result
    from ddpsim.result.sweep import Sweep
    from ddpsim.scenario.schema import Scenario
    from ddpsim.version import __version__

__all__ = [
    "Brief",
    "CapacityPlan",
    "Comparison",
    "DdpsimError",
    "Diagnosis",
    "Explanation",
    "Grid",
    "Result",
    "Scenario",
    "ScenarioError",
    "SimulationError",
    "Sweep",
    "Tuning",
    "__version__",
    "compare",
    "diagnose",
    "explain_step",
    "judge",
    "load_scenario",
    "observe",
    "plan",
    "plan_capacity",
    "run",
    "simulate",
    "simulate_many",
    "sweep",
    "tune",
    "write_report",
    "write_trace",
]

# imported when first used: `ddpsim --help` needs none of them
_HOMES = {
    "Brief": "ddpsim.result.model",
    "CapacityPlan": "ddpsim.result.capacity",
    "Comparison": "ddpsim.result.changes",
    "DdpsimError": "ddpsim.errors",
    "Diagnosis": "ddpsim.result.diagnosis",
    "Explanation": "ddpsim.result.changes",
    "Grid": "ddpsim.planning.sweeps.grid",
    "Result": "ddpsim.result.model",
    "Scenario": "ddpsim.scenario.schema",
    "ScenarioError": "ddpsim.errors",
    "SimulationError": "ddpsim.errors",
    "Sweep": "ddpsim.result.sweep",
    "Tuning": "ddpsim.result.changes",
    "__version__": "ddpsim.version",
    "compare": "ddpsim.questions",
    "diagnose": "ddpsim.questions",
    "explain_step": "ddpsim.questions",
    "judge": "ddpsim.diagnosis.diagnose",
    "load_scenario": "ddpsim.prediction.api",
    "observe": "ddpsim.prediction.api",
    "plan": "ddpsim.questions",
    "plan_capacity": "ddpsim.planning.capacity_plan.plan",
    "run": "ddpsim.questions",
    "simulate": "ddpsim.prediction.api",
    "simulate_many": "ddpsim.planning.many",
    "sweep": "ddpsim.questions",
    "tune": "ddpsim.questions",
    "write_report": "ddpsim.questions",
    "write_trace": "ddpsim.questions",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ddpsim' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
