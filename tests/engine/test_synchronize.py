"""A host that waits for its device: shortcuts equal the plain model, and what it must cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs.engine_runs import MODES, all_steps, slowest_steps
from jobs.random_jobs import models, scenarios
from jobs.simulated_jobs import request_of, simulated_program

from ddpsim.engine.batch import run_many
from ddpsim.engine.program import Program
from ddpsim.engine.run import Simulated, run
from ddpsim.prediction.program import compile_program
from ddpsim.result.metrics import Step
from ddpsim.result.summary import SteadyStep
from ddpsim.scenario.schema import Scenario
from ddpsim.strategies.instructions import Instruction, Synchronize
from ddpsim.strategies.strategy import Strategy
from ddpsim.strategies.training_loop.around_steps import Around
from ddpsim.workload.build import build_model
from ddpsim.workload.model import Model


class Interrupted(Around):
    """Another strategy, whose host waits for its device after some of its instructions."""

    def __init__(self, inner: Strategy, after: tuple[int, ...]) -> None:
        super().__init__(inner)
        self._after = after

    def step(self, kind: int) -> Iterator[Instruction]:
        instructions = self._inner.steps[kind]
        places = {place % len(instructions) for place in self._after}
        for place, instruction in enumerate(instructions):
            yield instruction
            if place in places:
                yield Synchronize()


@st.composite
def interrupted(draw: st.DrawFn, scenario: Scenario, model: Model) -> Program:
    """A job's loop, whose host waits in up to five places."""
    program = compile_program(scenario, model)
    places = tuple(draw(st.lists(st.integers(0, 500), min_size=1, max_size=5)))
    return replace(program, strategy=Interrupted(program.strategy, places))


def seen(done: Simulated, rank: int) -> list[Any]:
    """All that happens on a rank's device, step by step, from each step's start on."""
    steps = [step.moved(-step.start_ns) for step in all_steps(done, rank)]
    return [(step.length_ns, step.compute, step.comm) for step in steps]


@settings(max_examples=40)
@given(st.data(), scenarios(max_nodes=2), models())
def test_folded_ranks_equal_the_plain_model(
    data: st.DataObject, scenario: Scenario, model: Model
) -> None:
    program = data.draw(interrupted(scenario, model))
    fast, plain = (simulated_program(scenario, program, mode) for mode in MODES)
    ours, theirs = slowest_steps(fast), slowest_steps(plain)
    assert [s.length_ns for s in ours] == [s.length_ns for s in theirs]
    assert [s.breakdown() for s in ours] == [s.breakdown() for s in theirs]
    assert [s.comm_ns() for s in ours] == [s.comm_ns() for s in theirs]


@settings(max_examples=15)
@given(st.data(), scenarios(max_nodes=2, noisy=True), models())
def test_noisy_ranks_equal_the_plain_model(
    data: st.DataObject, scenario: Scenario, model: Model
) -> None:
    """Stragglers and jitter: every rank, span by span."""
    program = data.draw(interrupted(scenario, model))
    fast, plain = (simulated_program(scenario, program, mode) for mode in MODES)
    assert fast.timeline.slowest_rank == plain.timeline.slowest_rank
    assert fast.timeline.late_peers_ns == plain.timeline.late_peers_ns
    for rank in plain.timeline.ranks:
        assert seen(fast, rank) == seen(plain, rank)


@settings(max_examples=15)
@given(st.data(), st.lists(scenarios(max_nodes=2, noisy=True), min_size=2, max_size=3), models())
def test_jobs_side_by_side_equal_each_alone(
    data: st.DataObject, jobs: list[Scenario], model: Model
) -> None:
    """Loaders, networks, seeds and stragglers of their own."""
    programs = [compile_program(job, model) for job in jobs]
    places = tuple(data.draw(st.lists(st.integers(0, 500), min_size=1, max_size=5)))
    requests = [
        request_of(job, replace(program, strategy=Interrupted(program.strategy, places)))
        for job, program in zip(jobs, programs, strict=True)
    ]
    together = run_many(requests + requests)
    assert together[: len(jobs)] == together[len(jobs) :]
    assert together[: len(jobs)] == [SteadyStep.of(run(each).timeline) for each in requests]


def job(**workload: Any) -> Scenario:
    """ResNet-18 with AMP on 2 x 2 GPUs, in steps of 40 ms."""
    return Scenario.model_validate(
        {
            "schema": "ddpsim/1",
            "workload": {"model": "resnet18", "batch_per_rank": 8, "step_time": "40 ms"} | workload,
            "cluster": {"nodes": 2, "gpus_per_node": 2, "device": "v100-sxm-16gb"},
            "run": {"iterations": 2},
        }
    )


def steady(scenario: Scenario) -> tuple[Simulated, Step]:
    program = compile_program(scenario, build_model(scenario))
    done = simulated_program(scenario, program)
    return done, slowest_steps(done)[-1]


def test_host_and_device_take_turns() -> None:
    """After the wait the optimizer and the next forward are launched beside an idle device."""
    _, ahead = steady(job())
    done, waiting = steady(job(precision="amp-fp16"))
    waits = [span for span in done.timeline.slowest.host if span.kind == "device_wait"]
    assert len(waits) == len(done.timeline.slowest.step_ends_ns)
    assert ahead.host_bound_ns() < waiting.host_bound_ns()
    assert waiting.length_ns > ahead.length_ns
    items = [span for span in waiting.compute if span.kind == "item"]
    optimizer = next(span for span in waiting.compute if span.kind == "optimizer")
    assert len(items) == 1
    assert optimizer.start_ns > items[0].end_ns


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "amp-fp16", "optimizer": {"fused": True}},
        {"precision": "amp-fp16", "grad_scaler": False},
        {"clip_grad_norm": True},
        {},
    ],
    ids=str,
)
def test_nobody_waits_where_torch_does_not(options: dict[str, Any]) -> None:
    done, _ = steady(job(**options))
    assert not [span for span in done.timeline.slowest.host if span.kind == "device_wait"]


def test_a_cpu_waits_for_itself_anyway() -> None:
    """Its host computes: `.item()` costs it nothing more."""
    cpu = {"cluster": {"nodes": 1, "gpus_per_node": 2, "device": "cpu-core"}}
    plain, read = (
        Scenario.model_validate(
            {
                "schema": "ddpsim/1",
                "workload": {
                    "model": "resnet18",
                    "batch_per_rank": 8,
                    "step_time": "40 ms",
                    "read_loss_every": every,
                },
                "ddp": {"backend": "gloo"},
            }
            | cpu
        )
        for every in (None, 1)
    )
    (_, before), (done, after) = steady(plain), steady(read)
    assert not [span for span in done.timeline.slowest.host if span.kind == "device_wait"]
    items_ns = sum(span.end_ns - span.start_ns for span in after.compute if span.kind == "item")
    assert after.length_ns == before.length_ns + items_ns


@pytest.mark.parametrize("every", [1, 2, 5])
def test_the_loss_is_read_every_so_many_steps(every: int) -> None:
    done, _ = steady(job(read_loss_every=every))
    steps = slowest_steps(done)
    reads = [any(span.kind == "item" for span in step.compute) for step in steps]
    assert sum(reads[-every:]) == 1
    assert sum(reads[-2 * every :]) == 2 or every == 1
