"""Where twice the GPUs no longer give enough of twice the throughput."""

from __future__ import annotations

import pytest
from plan_scenarios import IMAGENET, plan_of_imagenet
from shipped_scenarios import load as scenario

from ddpsim.planning.capacity_plan.plan import plan_capacity
from ddpsim.report.capacity.plan import render_plan
from ddpsim.result.capacity import KNEE_EFFICIENCY, CapacityPlan, knee, marginal_efficiencies


@pytest.fixture(scope="module")
def imagenet() -> CapacityPlan:
    return plan_of_imagenet()


def test_the_knee_by_its_definition() -> None:
    curve = {1: 100.0, 2: 198.0, 3: 290.0, 4: 380.0, 8: 600.0, 16: 1190.0}
    assert marginal_efficiencies(curve) == {
        2: 0.99,
        4: 380 / 396,
        8: 600 / 760,
        16: 1190 / 1200,
    }
    assert knee(curve) == 4
    assert knee({1: 100.0, 2: 160.0, 4: 256.0}) is None  # 80 % is enough
    assert knee({1: 100.0, 2: 159.9}) == 1
    assert knee({8: 1.0}) is None


def test_without_a_limit_the_knee_answers(imagenet: CapacityPlan) -> None:
    plan = plan_capacity(scenario("resnet50-2x8-25gbit"), IMAGENET, max_gpus=64)
    assert (plan.met, plan.knee_gpus, plan.answer.gpus) == (None, 8, 8)
    assert imagenet.knee_gpus == 8
    marginal = {size.gpus: size.marginal_efficiency for size in imagenet.sizes}
    assert marginal[8] is None
    assert marginal[16]
    assert marginal[16] < KNEE_EFFICIENCY


def test_a_knee_needs_a_doubling() -> None:
    asked = scenario("resnet50-2x8-25gbit", "cluster.nodes=1", "cluster.gpus_per_node=1")
    plan = plan_capacity(asked, "1M samples", max_gpus=1)
    text = " ".join(render_plan(plan, "f.yaml").split())
    assert "knee not known: no size and its double were both tried" in text
