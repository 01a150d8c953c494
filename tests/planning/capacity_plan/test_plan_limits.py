"""What a plan says where target, budget or scenario cannot be kept to."""

from __future__ import annotations

from typing import Any

import pytest
from plan_scenarios import IMAGENET
from shipped_scenarios import load as scenario

from ddpsim.errors import InputError
from ddpsim.planning.capacity_plan.plan import plan_capacity
from ddpsim.report.capacity.plan import render_plan


def test_a_target_out_of_reach_shows_the_best_and_its_bound() -> None:
    plan = plan_capacity(scenario("slow-network"), f"{IMAGENET} in 10 h", max_gpus=64)
    assert (plan.met, plan.answer.gpus) == (False, 64)
    assert plan.answer.bottleneck.startswith("communication: the inter-node network")
    text = " ".join(render_plan(plan, "f.yaml").split())
    assert "not met 64 GPUs (64 x 1): 6.16 days" in text
    assert "no size up to 64 GPUs that was tried meets the target; this one is the fastest" in text


def test_a_budget_too_small_shows_the_cheapest() -> None:
    plan = plan_capacity(
        scenario("resnet50-2x8-25gbit"), IMAGENET, price="2 USD", budget="1 USD", max_gpus=64
    )
    assert (plan.met, plan.answer.gpus) == (False, 8)
    assert "no size costs at most 1 USD; this one costs least" in render_plan(plan, "f.yaml")


def test_in_time_but_over_the_budget() -> None:
    asked = scenario("resnet50-2x8-25gbit")
    plan = plan_capacity(
        asked, f"{IMAGENET} in 1 h", price="2.5 USD", budget="60 USD", max_gpus=128
    )
    assert (plan.met, plan.answer.gpus) == (False, 48)
    assert plan.within_budget
    assert plan.within_budget.cost
    assert plan.within_budget.cost <= 60
    text = " ".join(render_plan(plan, "f.yaml").split())
    assert "in time, but it costs more than 60 USD; the fastest for it: 8 GPUs" in text


def test_sizes_without_a_named_rank_are_left_out() -> None:
    plan = plan_capacity(scenario("straggler", "run.iterations=2"), "1M samples", max_gpus=16)
    assert [size.gpus for size in plan.sizes] == [4, 8, 16]
    (out,) = plan.left_out
    assert out.sizes == ("1 x 1", "1 x 2")
    assert out.reason.startswith("cluster.stragglers.factors: rank 3 does not exist")


def test_sizes_that_a_copys_ranks_do_not_divide_are_left_out() -> None:
    kept = "ddp.fully_shard.reshard_after_forward=16"
    asked = scenario("gpt2-xl-hsdp", "run.iterations=1", "ddp.strategy=fully_shard", kept)
    plan = plan_capacity(asked, "1M samples in 1 h", max_gpus=32)
    assert [size.gpus for size in plan.sizes] == [16, 32]
    (out,) = plan.left_out
    assert out.sizes == ("1 x 8",)
    assert out.reason.endswith("reshard_after_forward: 16 does not divide 8 ranks")


@pytest.mark.parametrize(("kept", "nodes"), [("4", 3), ("8", 4)])
def test_sizes_between_that_a_copys_ranks_divide_are_tried(kept: str, nodes: int) -> None:
    """Nodes of 4 GPUs: 3 of them hold copies on 4 ranks, not on 8."""
    keeps = f"ddp.fully_shard.reshard_after_forward={kept}"
    few = ("run.iterations=1", "workload.model=gpt2", "cluster.gpus_per_node=4")
    asked = scenario("gpt2-xl-hsdp", *few, "ddp.strategy=fully_shard", keeps)
    two = next(s for s in plan_capacity(asked, "1M samples", max_gpus=8).sizes if s.gpus == 8)
    target = f"1M samples in {0.8 * two.time_s} s"
    assert plan_capacity(asked, target, max_gpus=32).answer.nodes == nodes


def test_a_log_answers_for_its_own_ranks_alone() -> None:
    """Extrapolated to other ranks it would give the same time to any number of them."""
    for allowed in ("false", "true"):
        asked = scenario("resnet50-nccl-log", f"run.allow_extrapolation={allowed}")
        plan = plan_capacity(asked, "1M samples in 1 h", price="2 USD")
        assert [size.gpus for size in plan.sizes] == [8]
        assert (plan.met, plan.knee_gpus, plan.next_doubling) == (True, None, None)
        (out,) = plan.left_out
        assert out.sizes == ("all others",)
        assert out.reason.startswith("a log is of one world size; to plan others leave it out")
    text = render_plan(plan, "a.yaml")
    assert "held        128 samples a rank, a global batch of 1,024" in text


@pytest.mark.parametrize(
    ("name", "target", "options", "key", "says"),
    [
        (
            "own-model",
            "1M samples",
            {"global_batch": 4096},
            "global_batch",
            (
                "workload.step_time was measured with 256 samples a rank, and says nothing of "
                "other batches; drop --global-batch (batch_per_rank then stays), or plan with a "
                "zoo model's estimate, without it"
            ),
        ),
        (
            "own-model",
            "1M tokens",
            {},
            "target",
            (
                "this workload has no seq_len, so its tokens cannot be counted; write a number of "
                "samples"
            ),
        ),
        (
            "resnet50-8xa100",
            "1M samples",
            {"budget": "5 USD"},
            "budget",
            "needs --price, of a GPU-hour (no price is assumed here); or write GPU-hours",
        ),
        (
            "resnet50-8xa100",
            "1M samples",
            {"budget": "5 USD", "price": "2 EUR"},
            "budget",
            "is in USD, the price in EUR; write both in one currency",
        ),
        (
            "resnet50-2x8-25gbit",
            "1M samples",
            {"max_gpus": 4},
            "max_gpus",
            "4 is out of range: wanted 8 (one node's GPUs) to 2000000",
        ),
        (
            "resnet50-2x8-25gbit",
            "1M samples",
            {"global_batch": 7},
            "global_batch",
            "no world size can be had: 7 samples do not divide by the GPUs",
        ),
    ],
)
def test_what_does_not_fit_together(
    name: str, target: str, options: dict[str, Any], key: str, says: str
) -> None:
    with pytest.raises(InputError) as caught:
        plan_capacity(scenario(name), target, **options)
    assert (caught.value.key, caught.value.message) == (key, says)
