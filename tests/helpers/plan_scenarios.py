"""Scenarios and a plan that several tests of the capacity plan share."""

from __future__ import annotations

from functools import cache

from shipped_scenarios import load

from ddpsim.planning.capacity_plan.plan import plan_capacity
from ddpsim.result.capacity import CapacityPlan
from ddpsim.scenario.schema import Scenario

IMAGENET = "90 epochs of 1.28M samples"


def with_nodes(asked: Scenario, nodes: int) -> Scenario:
    return asked.model_copy(update={"cluster": asked.cluster.model_copy(update={"nodes": nodes})})


@cache
def plan_of_imagenet() -> CapacityPlan:
    return plan_capacity(
        load("resnet50-2x8-25gbit"), f"{IMAGENET} in 1 h", price="2.50 USD", max_gpus=128
    )
