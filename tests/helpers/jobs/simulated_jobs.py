"""A random job, simulated by one of the engines."""

from __future__ import annotations

from typing import Any

from ddpsim.cluster.build import build_network
from ddpsim.engine.noise import draw_slowdowns
from ddpsim.engine.request import Request
from ddpsim.engine.run import Simulated, run
from ddpsim.prediction.program import compile_program
from ddpsim.scenario.schema import Scenario
from ddpsim.workload.model import Model


def simulated(scenario: Scenario, model: Model, mode: Any = "auto") -> Simulated:
    program = compile_program(scenario, model)
    slowdowns = draw_slowdowns(scenario.cluster, scenario.run, program.warmup + program.iterations)
    cost = build_network(scenario).cost
    ranks = scenario.cluster.world_size
    everyone = range(ranks) if slowdowns is not None else None
    return run(Request(program, cost, ranks, slowdowns), mode, observed=everyone)
