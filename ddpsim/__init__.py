"""Predict the time of a PyTorch DDP training step before you book the GPUs.

>>> import ddpsim
>>> result = ddpsim.simulate(ddpsim.load_scenario("scenario.yaml"))   # doctest: +SKIP
>>> result.iteration_time_s.mean                                      # doctest: +SKIP
"""

from ddpsim.api import load_scenario, simulate
from ddpsim.errors import DdpsimError, ScenarioError, SimulationError
from ddpsim.result.model import Result
from ddpsim.scenario.schema import Scenario

__all__ = [
    "DdpsimError",
    "Result",
    "Scenario",
    "ScenarioError",
    "SimulationError",
    "load_scenario",
    "simulate",
]
