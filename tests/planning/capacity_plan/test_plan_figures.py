"""The figures of a plan are those of simulate."""

from __future__ import annotations

from math import ceil

import pytest
from plan_scenarios import plan_of_imagenet, with_nodes
from shipped_scenarios import load as scenario

import ddpsim
from ddpsim.planning.capacity_plan.plan import plan_capacity
from ddpsim.report.capacity.plan import render_plan
from ddpsim.result.capacity import CapacityPlan


@pytest.fixture(scope="module")
def imagenet() -> CapacityPlan:
    return plan_of_imagenet()


def test_figures_are_those_of_simulate(imagenet: CapacityPlan) -> None:
    for size in imagenet.sizes:
        result = ddpsim.simulate(with_nodes(scenario("resnet50-2x8-25gbit"), size.nodes))
        interval = result.prediction_interval_s
        assert interval
        assert size.gpus == result.world_size == 8 * size.nodes
        assert size.global_batch == 64 * size.gpus
        assert size.steps == 90 * ceil(1_280_000 / size.global_batch)
        assert size.step_s == result.iteration_time_s.mean
        assert size.time_s == size.steps * size.step_s
        assert size.time_interval_s == (size.steps * interval.low, size.steps * interval.high)
        assert size.gpu_hours == size.gpus * size.time_s / 3600
        assert size.cost == 2.5 * size.gpu_hours
        assert size.throughput_samples_per_s == result.throughput_samples_per_s
        assert size.fits is True


def test_an_epochs_last_step_is_a_whole_one() -> None:
    asked = scenario("resnet50-8xa100")  # 8 x 128 samples a step
    for samples, steps in ((1024, 1), (1025, 2), (2048, 2)):
        plan = plan_capacity(asked, f"3 epochs of {samples} samples", max_gpus=8)
        assert plan.sizes[-1].steps == 3 * steps


def test_tokens_are_samples_of_the_sequence_length() -> None:
    plan = plan_capacity(scenario("gpt2-bucket-choice"), "1_048_577 tokens", max_gpus=8)
    assert (plan.samples_per_epoch, plan.seq_len) == (1025, 1024)
    default = plan_capacity(
        scenario("gpt2-bucket-choice", "workload.seq_len=null"), "1M tokens", max_gpus=4
    )
    assert default.seq_len == 1024


def test_without_a_price_nothing_costs() -> None:
    plan = plan_capacity(scenario("resnet50-8xa100"), "1M samples", max_gpus=8)
    assert {size.cost for size in plan.sizes} == {None}
    assert "USD" not in render_plan(plan, "f.yaml")
