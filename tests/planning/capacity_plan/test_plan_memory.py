"""What does not fit into memory answers no plan."""

from __future__ import annotations

import re

import pytest
from shipped_scenarios import load as scenario

from ddpsim.planning.capacity_plan.plan import plan_capacity
from ddpsim.prediction.api import predict
from ddpsim.report.capacity.plan import render_plan


def test_what_does_not_fit_in_memory_never_answers() -> None:
    asked = scenario("bert-large-4x8-ib")
    plan = plan_capacity(asked, "1B tokens in 24 h", global_batch=2048, max_gpus=32)
    assert [size.accumulation_steps for size in plan.sizes] == [4, 2, 1]
    assert {size.fits for size in plan.sizes} == {True}
    whole = plan_capacity(
        scenario("bert-large-4x8-ib", "workload.batch_per_rank=256"), "1B tokens in 24 h"
    )
    assert {size.fits for size in whole.sizes} == {False}
    assert whole.met is False


def test_where_nothing_fits_a_way_out_is_shown_that_does() -> None:
    asked = scenario("bert-large-4x8-ib", "workload.batch_per_rank=256")
    plan = plan_capacity(asked, "1B tokens in 24 h", max_gpus=8)
    assert {size.fits for size in plan.sizes} == {False}
    assert plan.make_it_fit
    settings_ = plan.make_it_fit.settings
    assert settings_ == ("workload.batch_per_rank=64", "ddp.accumulation_steps=4")
    mended = plan_capacity(
        scenario("bert-large-4x8-ib", *settings_), "1B tokens in 24 h", max_gpus=8
    )
    assert {size.fits for size in mended.sizes} == {True}
    assert mended.answer.global_batch == plan.answer.global_batch
    words = r"WARNING +no size fits in memory \(needs about (\d+) GiB a GPU\)"
    needed = re.search(words, render_plan(plan, "f.yaml"))
    assert needed
    assert int(needed[1]) > 80


def test_unknown_activations_are_said() -> None:
    plan = plan_capacity(scenario("own-model"), "1M samples", max_gpus=16)
    assert {size.fits for size in plan.sizes} == {None}
    assert "a GPU, activations unknown" in render_plan(plan, "f.yaml")


@pytest.mark.slow
def test_micro_batches_of_a_global_batch_are_split_where_memory_needs_it() -> None:
    asked = scenario("gpt2-bucket-choice", "workload.model=gpt2-medium", "cluster.nodes=1")
    plan = plan_capacity(asked, "1B tokens in 24 h", global_batch=64, max_gpus=8)
    assert {size.global_batch for size in plan.sizes} == {64}
    for size in plan.sizes:
        assert size.batch_per_rank * size.accumulation_steps * size.gpus == 64
        by_hand = scenario(
            "gpt2-bucket-choice",
            "workload.model=gpt2-medium",
            f"cluster.nodes={size.nodes}",
            f"cluster.gpus_per_node={size.gpus_per_node}",
            f"workload.batch_per_rank={size.batch_per_rank}",
            f"ddp.accumulation_steps={size.accumulation_steps}",
        )
        assert predict(by_hand).iteration_time_s.mean == pytest.approx(size.step_s)
    assert any(size.accumulation_steps > 1 for size in plan.sizes)
    assert all(size.fits for size in plan.sizes)
    alike = plan_capacity(asked, "1B tokens in 24 h", global_batch=64, max_gpus=1)
    assert len(alike.sizes) == 1  # so that no other size tells that it was split
    assert alike.answer.accumulation_steps > 1
    setting = f"ddp.accumulation_steps={alike.answer.accumulation_steps}"
    assert setting in render_plan(alike, "s.yaml")


def test_what_does_not_fit_is_no_answer() -> None:
    asked = scenario("gpt2-bucket-choice", "workload.model=gpt2-xl", "cluster.nodes=1")
    plan = plan_capacity(asked, "1B tokens in 1000 days", max_gpus=16)
    assert plan.answer.fits is False
    assert plan.met is False
    text = render_plan(plan, "s.yaml")
    assert text.splitlines()[2].startswith("not met")
    assert "no size that was tried fits in memory" in text
