"""A plan in which larger batches need more samples: McCandlish et al. 2018."""

from __future__ import annotations

from math import ceil

import pytest
from shipped_scenarios import load as scenario

from ddpsim.errors import InputError
from ddpsim.planning.capacity_plan.plan import plan_capacity
from ddpsim.planning.capacity_plan.question import Question
from ddpsim.planning.options import parse_target
from ddpsim.report.capacity.plan import render_plan

TARGET = "90 epochs of 1.28M samples"
FAST = ("cluster.inter_node.bandwidth=400 Gbit/s", "workload.learning_rate={base_batch: 256}")
CRITICAL = 2048


def test_more_gpus_stop_paying_where_samples_grow_as_fast() -> None:
    asked = scenario("resnet50-2x8-25gbit", *FAST)
    free = plan_capacity(asked, TARGET, max_gpus=64)
    bound = plan_capacity(asked, TARGET, max_gpus=64, critical_batch=CRITICAL)
    for plain, grown in zip(free.sizes, bound.sizes, strict=True):
        factor = 1 + grown.global_batch / CRITICAL
        assert grown.samples_factor == factor
        assert plain.steps == 90 * ceil(1_280_000 / plain.global_batch)
        assert grown.steps == ceil(plain.steps * factor)
        assert grown.step_s == plain.step_s
    assert free.knee_gpus is None
    assert bound.knee_gpus is not None
    first, second = (size for size in bound.sizes if size.gpus in (8, 16))
    speedup = second.progress / first.progress
    assert second.marginal_efficiency == pytest.approx(speedup / 2)
    said = " ".join(render_plan(bound, "f.yaml").split())
    assert (
        "a global batch B needs 1 + B / 2,048 times the target's (McCandlish et al. 2018)" in said
    )
    assert "in place of 256" in said
    assert "the samples needed, which grow with the global batch" in " ".join(
        render_plan(
            plan_capacity(asked, TARGET, max_gpus=32, critical_batch=128, budget="9k GPU-hours"),
            "f.yaml",
        ).split()
    )


def test_a_global_batch_that_is_held_needs_as_many_samples_on_all_sizes() -> None:
    asked = scenario("resnet50-8xa100")
    plan = plan_capacity(asked, "1M samples", global_batch=1024, max_gpus=8, critical_batch=1024)
    assert {size.samples_factor for size in plan.sizes} == {2}
    assert {size.steps for size in plan.sizes} == {2 * ceil(1_000_000 / 1024)}


def test_a_batch_of_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="0 is out of range"):
        plan_capacity(scenario("resnet50-8xa100"), "1M samples", critical_batch=0)


def test_pauses_come_after_as_many_samples_on_every_size() -> None:
    """Every 600 steps of 1,024 samples is every 300 of 2,048."""
    pauses = ("workload.evaluation={every: 600, samples: 50000}", "workload.dataset=null")
    asked = scenario("resnet50-2x8-25gbit", *pauses)
    question = Question(asked, parse_target("1M samples"), None, None, None, 64)
    every = [question.at(nodes, 8).workload.evaluation for nodes in (1, 2, 4)]
    assert [each.every for each in every if each] == [1200, 600, 300]
    plan = plan_capacity(asked, "1M samples", max_gpus=16)
    assert plan.counts_pauses
    assert "after as many samples" in " ".join(render_plan(plan, "f.yaml").split())
