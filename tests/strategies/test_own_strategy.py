"""A strategy of one's own, written outside ddpsim: by name in a scenario, and in both engines."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs.random_jobs import models, scenarios
from typer.testing import CliRunner

import ddpsim
from ddpsim.cli.commands import app
from ddpsim.cluster.build import build_network
from ddpsim.cluster.transfers import TURNS
from ddpsim.engine.noise import draw_slowdowns
from ddpsim.engine.program import Program
from ddpsim.engine.request import Request
from ddpsim.engine.run import run
from ddpsim.result.metrics import steps_of
from ddpsim.scenario import other_strategies
from ddpsim.scenario.schema import Scenario
from ddpsim.strategies import (
    Await,
    Bucket,
    Communicate,
    Instruction,
    Operation,
    Strategy,
    StrategyContext,
)
from ddpsim.workload.model import Model


class AllAtOnce(Strategy):
    """Send every gradient on its own, once the whole backward is over, each by its operation."""

    reduced = "gradient"

    def __init__(self, context: StrategyContext, *, operations: str = "all_reduce") -> None:
        self._work = context.work
        self._operations = operations.split()
        self._order = context.model.ready_order
        self._sizes_bytes = [context.model.parameters[i].size_bytes for i in self._order]

    def step(self, kind: int) -> Iterator[Instruction]:
        yield from self._work.without_communication()
        for number, size_bytes in enumerate(self._sizes_bytes):
            operation: Any = self._operations[number % len(self._operations)]
            yield Communicate(number, 15_000, operation, size_bytes, number, size_bytes, 1)
        yield from (Await(number) for number in range(len(self._sizes_bytes)))
        yield from self._work.end_of_step()

    def buckets(self, kind: int) -> tuple[Bucket, ...]:
        sizes = zip(self._order, self._sizes_bytes, strict=True)
        return tuple(Bucket((i,), size_bytes, size_bytes) for i, size_bytes in sizes)


CLUSTER = {"machine": "dgx-a100", "nodes": 1}
JOB: dict[str, Any] = {
    "schema": "ddpsim/1",
    "workload": {"model": "resnet18", "batch_per_rank": 8},
    "cluster": CLUSTER,
}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package that brings the strategy, and one whose module is gone."""
    points = [
        EntryPoint("all_at_once", f"{__name__}:AllAtOnce", other_strategies.GROUP),
        EntryPoint("is_gone", "no_such_module:Strategy", other_strategies.GROUP),
    ]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: points)
    other_strategies._entry_points.cache_clear()
    yield
    other_strategies._entry_points.cache_clear()


def simulated(scenario: Scenario, model: Model, mode: Any, *operations: Operation) -> Any:
    wanted = " ".join(operations or ("all_reduce",))
    strategy = AllAtOnce(StrategyContext(scenario, model), operations=wanted)
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


@settings(max_examples=30)
@given(scenarios(gloo=False), models())
def test_nothing_is_hidden_after_the_backward(scenario: Scenario, model: Model) -> None:
    done = simulated(scenario, model, "auto")
    step = steps_of(done.timeline.slowest)[-1]
    gradients = [each for each in step.comm if each.bucket >= 0]  # synchronized norms send too
    assert len(gradients) == len(model.used)
    parts = step.breakdown()  # a short one may pass while the host launches the next
    assert parts.exposed_comm <= step.comm_ns() <= parts.exposed_comm + parts.other


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("engine", ["auto", "reference"])
def test_a_scenario_names_a_strategy_of_an_installed_package(engine: Any) -> None:
    result = ddpsim.run(JOB, strategy="all_at_once", engine=engine)
    assert result.strategy == "all_at_once"
    assert len(result.buckets) == 62
    assert result.iteration_time_s.mean <= ddpsim.run(JOB, strategy="naive").iteration_time_s.mean
    sent = ddpsim.run(JOB, strategy="all_at_once", ddp__options={"operations": "all_gather"})
    assert {each.operation for each in sent.collectives} == {"all_gather"}


@pytest.mark.usefixtures("installed")
def test_other_commands_know_it() -> None:
    compared = ddpsim.compare(JOB, each_strategy=True)
    rows = {change.title: change for change in compared.changes}
    assert rows["all_at_once"].note == "of another package"
    assert "cannot be imported" in str(rows["is_gone"].problem)
    assert ddpsim.explain_step(JOB, strategy="all_at_once").phases
    answer = CliRunner().invoke(app, ["explain", "all_at_once"]).output
    assert "Send every gradient on its own" in answer


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("ddp", "message"),
    [
        ({"strategy": "all_at_one"}, "'all_at_one' is unknown. Did you mean 'all_at_once'? Wanted"),
        ({"strategy": "is_gone"}, "is_gone of the package ? cannot be imported: No module named"),
        (
            {"strategy": "all_at_once", "options": {"opertions": "x"}},
            "strategy all_at_once: got an unexpected keyword argument 'opertions'",
        ),
        ({"options": {"operations": "x"}}, "is of a strategy of another package, not ddp"),
        ({"strategy": "all_at_once", "options": {"operations": "send"}}, "send has no price here"),
        ({"strategy": "all_at_once", "options": {"operations": [1]}}, "wanted"),
    ],
)
def test_what_cannot_be_used_is_said(ddp: dict[str, Any], message: str) -> None:
    with pytest.raises(ddpsim.ScenarioError) as error:
        ddpsim.run(JOB | {"ddp": ddp})
    assert message in str(error.value)


def test_a_process_registers_its_own() -> None:
    other_strategies.register("not_a_strategy", lambda context: context)
    with pytest.raises(ddpsim.ScenarioError, match="makes StrategyContext, and no Strategy"):
        ddpsim.run(JOB, strategy="not_a_strategy")
    del other_strategies._registered["not_a_strategy"]
