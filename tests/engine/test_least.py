"""The least that a mean steady step can take: never more than it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs.random_jobs import models, scenarios

from ddpsim.engine.batch import run_many
from ddpsim.engine.least import least_step_s
from ddpsim.engine.run import run
from ddpsim.prediction.job import Job
from ddpsim.prediction.program import compile_program
from ddpsim.prediction.resolve import resolve
from ddpsim.result.summary import mean_step_s
from ddpsim.scenario.run import Jitter
from ddpsim.scenario.schema import Scenario
from ddpsim.workload.model import Model


def check(job: Job) -> float:
    request = job.request()
    least_s, mean_s = least_step_s(request), mean_step_s(run(request).timeline)
    assert least_s <= mean_s
    return least_s / mean_s


@settings(max_examples=30)
@given(models(), scenarios(gloo=False), st.floats(0.001, 0.3))
def test_random_jobs(model: Model, scenario: Scenario, sigma: float) -> None:
    jittery = scenario.run.model_copy(update={"jitter": Jitter(sigma=sigma)})
    scenario = scenario.model_copy(update={"run": jittery})
    check(replace(resolve(scenario), model=model, program=compile_program(scenario, model)))


@pytest.mark.parametrize(("batch", "at_least"), [(1, 0.95), (256, 0.8)])
def test_a_step_is_nearly_that_of_its_host_or_its_device(batch: int, at_least: float) -> None:
    asked = {
        "schema": "ddpsim/1",
        "workload": {"model": "resnet18", "batch_per_rank": batch},
        "cluster": {"machine": "dgx-h100", "nodes": 2},
        "run": {"jitter": {"sigma": 0.02}},
    }
    assert check(resolve(Scenario.model_validate(asked))) > at_least


def test_equal_jobs_are_simulated_once() -> None:
    """Caps beyond the model's size all give two buckets."""
    asked = {
        "schema": "ddpsim/1",
        "workload": {"model": "resnet18", "batch_per_rank": 8},
        "cluster": {"machine": "dgx-h100", "nodes": 1},
        "run": {"jitter": {"sigma": 0.02}, "iterations": 2},
    }
    caps = (1, 100, 200, 400)
    jobs = [
        resolve(Scenario.model_validate(asked | {"ddp": {"bucket_cap_mb": cap}})) for cap in caps
    ]
    alone = [run_many([job.request()])[0] for job in jobs]
    together = run_many([job.request() for job in jobs])
    assert together == alone
    assert together[1] is together[2] is together[3]
    assert alone[1] != alone[0]
