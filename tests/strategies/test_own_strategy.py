"""A strategy of one's own, written outside ddpsim, runs through both engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs.random_jobs import models, scenarios

from ddpsim.cluster.build import build_network
from ddpsim.cluster.transfers import TURNS, Operation
from ddpsim.engine.noise import draw_slowdowns
from ddpsim.engine.program import Program
from ddpsim.engine.request import Request
from ddpsim.engine.run import run
from ddpsim.errors import InputError
from ddpsim.prediction.api import load_scenario
from ddpsim.prediction.resolve import resolve
from ddpsim.result.metrics import steps_of
from ddpsim.scenario.schema import Scenario
from ddpsim.strategies.instructions import (
    Await,
    Communicate,
    Instruction,
    LoadBatch,
    Mark,
    compute_all,
)
from ddpsim.strategies.strategy import Bucket, Strategy
from ddpsim.strategies.ticks import Ticks
from ddpsim.workload.model import Model


class AfterBackward(Strategy):
    """Send every gradient on its own, once the whole backward is over, each by its operation."""

    def __init__(self, model: Model, operations: Sequence[Operation] = ("all_reduce",)) -> None:
        self._operations = operations
        ticks = Ticks(model.launch_s)
        self._forward, self._backward = map(ticks.launches, (model.forward, model.backward))
        self._optimizer = ticks.launches([model.optimizer])
        self._sizes_bytes = [parameter.size_bytes for parameter in model.used]
        self._order = model.ready_order

    def step(self, kind: int) -> Iterator[Instruction]:
        yield LoadBatch()
        yield from compute_all("forward", self._forward)
        yield Mark("backward_starts")
        yield from compute_all("backward", self._backward)
        for number, size_bytes in enumerate(self._sizes_bytes):
            operation = self._operations[number % len(self._operations)]
            yield Communicate(number, 15_000, operation, size_bytes, number, size_bytes, 1)
        yield from (Await(number) for number in range(len(self._sizes_bytes)))
        yield from compute_all("optimizer", self._optimizer)
        yield Mark("step_ends")

    def buckets(self, kind: int) -> tuple[Bucket, ...]:
        sizes = zip(self._order, self._sizes_bytes, strict=True)
        return tuple(Bucket((i,), size_bytes, size_bytes) for i, size_bytes in sizes)


def simulated(scenario: Scenario, model: Model, mode: Any, *operations: Operation) -> Any:
    strategy = AfterBackward(model, operations or ("all_reduce",))
    program = Program(strategy, warmup=2, iterations=2)
    slowdowns = draw_slowdowns(scenario.cluster, scenario.run, 4)
    ranks = scenario.cluster.world_size
    request = Request(program, build_network(scenario).cost, ranks, slowdowns)
    return run(request, mode, observed=range(ranks) if slowdowns is not None else None)


def lengths_ns(done: Any) -> list[int]:
    steps = steps_of(done.timeline.ranks[done.timeline.slowest_rank])
    steady = [step.length_ns for step in steps[done.timeline.warmup :]]
    return (steady + steady[-1:] * done.timeline.repeats)[:2]


@settings(max_examples=100)
@given(scenarios(noisy=True, gloo=False), models(), st.permutations(sorted(TURNS)))
def test_both_engines_carry_out_a_strategy_of_ones_own(
    scenario: Scenario, model: Model, operations: list[Operation]
) -> None:
    fast, plain = (simulated(scenario, model, mode, *operations) for mode in ("auto", "reference"))
    assert lengths_ns(fast) == lengths_ns(plain)
    assert fast.paths != plain.paths


@settings(max_examples=50)
@given(scenarios(gloo=False), models())
def test_nothing_is_hidden_after_the_backward(scenario: Scenario, model: Model) -> None:
    done = simulated(scenario, model, "auto")
    step = steps_of(done.timeline.slowest)[-1]
    assert len(step.comm) == len(model.used)
    parts = step.breakdown()  # a short one may pass while the host launches the next
    assert parts.exposed_comm <= step.comm_ns() <= parts.exposed_comm + parts.other


def test_an_operation_without_a_price_is_refused() -> None:
    """No cost model of today knows a message from one rank to another."""
    cluster = {"machine": "dgx-a100", "nodes": 1}
    workload = {"model": "resnet18", "batch_per_rank": 8}
    scenario = load_scenario({"schema": "ddpsim/1", "workload": workload, "cluster": cluster})
    strategy = AfterBackward(resolve(scenario).model, ("send",))
    program = Program(strategy, warmup=1, iterations=1)
    with pytest.raises(InputError, match="send has no price here, but all_gather, all_reduce, b"):
        program.transfers(build_network(scenario).cost)
