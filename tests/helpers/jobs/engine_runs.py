"""Programs, costs and runs of the engine, and the steps that come of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from ddpsim.cluster.build import build_network
from ddpsim.cluster.interference import InterferingCost
from ddpsim.cluster.transfers import REPLICATED, WholeTransfer
from ddpsim.engine.program import Program
from ddpsim.engine.request import Request
from ddpsim.engine.run import EngineMode, Simulated, run
from ddpsim.prediction.api import load_scenario
from ddpsim.prediction.program import compile_program
from ddpsim.result.metrics import Step, steps_of
from ddpsim.scenario.schema import Scenario
from ddpsim.strategies.ddp.strategy import DistributedDataParallel
from ddpsim.workload.build import build_model
from ddpsim.workload.model import Model

MODES: tuple[EngineMode, ...] = ("auto", "reference")
FACTORS = st.integers(100, 250).map(lambda percent: percent / 100)
PLAIN = load_scenario(
    {
        "schema": "ddpsim/1",
        "workload": {"model": "resnet18", "batch_per_rank": 8},
        "cluster": {"nodes": 1, "gpus_per_node": 1, "device": "a100-sxm-40gb"},
    }
)


def slowest_steps(done: Simulated) -> list[Step]:
    return all_steps(done, done.timeline.slowest_rank)


def all_steps(done: Simulated, rank: int) -> list[Step]:
    """Of those that repeat exactly, the first one again and again."""
    steps = steps_of(done.timeline.ranks[rank])
    return steps + steps[-1:] * done.timeline.repeats


def interfering(scenario: Scenario, model: Model, mode: Any = "auto", **slowdowns: Any) -> Any:
    program = compile_program(scenario, model)
    cost = InterferingCost(build_network(scenario).cost, **slowdowns)
    return run(Request(program, cost, scenario.cluster.world_size), mode)


@dataclass
class OneTransfer:
    """20 ns of latency and 100 on the link, whatever is sent."""

    latency_ns: int = 20
    transfer_ns: int = 100
    burst_ns: int = 0
    operations = REPLICATED

    def transfer(self, *_: Any) -> WholeTransfer:
        return WholeTransfer(self.latency_ns, self.transfer_ns, burst_ns=self.burst_ns)

    def stretched(self, _: float) -> Any:
        return self


def ddp_of(program: Program) -> DistributedDataParallel:
    assert isinstance(program.strategy, DistributedDataParallel)
    return program.strategy


def one_bucket(**changes: Any) -> tuple[Program, Scenario]:
    """ResNet-18 as one bucket on 4 ranks; only the fields of interest are not zero."""
    scenario = Scenario.model_validate(
        {
            "schema": "ddpsim/1",
            "workload": {"model": "resnet18", "batch_per_rank": 8, "step_time": "40 ms"},
            "ddp": {"bucket_cap_mb": 1000, "broadcast_buffers": False},
            "cluster": {"nodes": 1, "gpus_per_node": 4, "device": "v100-sxm-16gb"},
            "run": {"iterations": 1},
        }
    )
    return replace(compile_program(scenario, build_model(scenario)), **changes), scenario
