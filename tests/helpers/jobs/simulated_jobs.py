"""A random job, simulated by one of the engines."""

from __future__ import annotations

from typing import Any

from ddpsim.cluster.build import build_network
from ddpsim.engine.noise import draw_slowdowns
from ddpsim.engine.program import Program
from ddpsim.engine.request import Request
from ddpsim.engine.run import Simulated, run
from ddpsim.prediction.program import compile_program
from ddpsim.scenario.schema import Scenario
from ddpsim.workload.model import Model


def simulated(scenario: Scenario, model: Model, mode: Any = "auto") -> Simulated:
    return simulated_program(scenario, compile_program(scenario, model), mode)


def simulated_program(scenario: Scenario, program: Program, mode: Any = "auto") -> Simulated:
    request = request_of(scenario, program)
    everyone = range(request.world_size) if request.slowdowns is not None else None
    return run(request, mode, observed=everyone)


def request_of(scenario: Scenario, program: Program) -> Request:
    """A loop on a scenario's cluster, with its stragglers and jitter."""
    slowdowns = draw_slowdowns(scenario.cluster, scenario.run, program.warmup + program.iterations)
    cost = build_network(scenario).cost
    return Request(program, cost, scenario.cluster.world_size, slowdowns)
