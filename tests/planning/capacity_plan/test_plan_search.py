"""The sizes that a plan tries hold the one that brute force finds."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outcome import Outcome
from plan_scenarios import IMAGENET, with_nodes
from shipped_scenarios import load as scenario

import ddpsim
from ddpsim.planning.capacity_plan.plan import plan_capacity
from ddpsim.planning.options import parse_target
from ddpsim.prediction.api import predict
from ddpsim.report.capacity.plan import render_plan
from ddpsim.result.capacity import Capacity, Money, Target
from ddpsim.scenario.schema import Scenario

ROOT = Path(__file__).resolve().parents[3]
SCENARIOS = ROOT / "scenarios"
_STEPS_S: dict[str, float] = {}


def time_s(asked: Scenario, nodes: int, target: Target) -> float:
    """By hand, from one simulation."""
    sized = with_nodes(asked, nodes)
    key = sized.model_dump_json()
    if key not in _STEPS_S:
        _STEPS_S[key] = ddpsim.simulate(sized).iteration_time_s.mean
    global_batch = (
        sized.workload.batch_per_rank * sized.ddp.accumulation_steps * sized.cluster.world_size
    )
    steps = target.epochs * ceil(target.amount / global_batch)
    return steps * _STEPS_S[key]


@pytest.mark.parametrize("hours", [0.9, 1.3, 2.0])
def test_the_fewest_nodes_are_those_of_brute_force(hours: float) -> None:
    asked, target = scenario("resnet50-2x8-25gbit"), Target(90, 1_280_000, "samples", hours * 3600)
    plan = plan_capacity(asked, target, max_gpus=256)
    late = [n for n in range(1, plan.answer.nodes) if time_s(asked, n, target) <= hours * 3600]
    assert late == []
    assert plan.met is True
    assert plan.answer.time_s == time_s(asked, plan.answer.nodes, target) <= hours * 3600


@pytest.mark.parametrize("hours", [1.3, 2.0])
def test_the_fewest_nodes_that_are_in_time_at_the_slow_edge(hours: float) -> None:
    """By every number of nodes from the answer on, though the ladder goes by powers of two."""
    asked, target = scenario("resnet50-2x8-25gbit"), Target(90, 1_280_000, "samples", hours * 3600)
    plan = plan_capacity(asked, target, max_gpus=128)
    assert plan.sure
    assert plan.sure.nodes > plan.answer.nodes
    for nodes in range(plan.answer.nodes, plan.sure.nodes + 1):
        result = predict(with_nodes(asked, nodes))
        edge_s = time_s(asked, nodes, target) * result.edges_s[1] / result.iteration_time_s.mean
        assert (edge_s <= hours * 3600) is (nodes == plan.sure.nodes)


def test_a_size_between_two_late_ones_is_found_under_one_leaf() -> None:
    leafed = scenario(
        "resnet50-2x8-25gbit",
        "cluster.inter_node={bandwidth: 200 Gbit/s, latency: 5 us, nodes_per_leaf: 3, "
        "oversubscription: 16}",
    )
    two_s, three_s, four_s = (time_s(leafed, n, parse_target(IMAGENET)) for n in (2, 3, 4))
    assert three_s < min(two_s, four_s)  # the fourth node is behind the uplinks
    hours = (three_s + min(two_s, four_s)) / 2 / 3600
    plan = plan_capacity(leafed, f"{IMAGENET} in {hours} h", max_gpus=64)
    assert (plan.met, plan.answer.nodes) == (True, 3)


@pytest.mark.parametrize("budget", [60.0, 108.0])
def test_the_fastest_within_a_budget_is_that_of_brute_force(budget: float) -> None:
    asked, target = scenario("resnet50-2x8-25gbit"), parse_target(IMAGENET)
    price = Money(2.5, "USD")
    plan = plan_capacity(asked, target, price=price, budget=Money(budget, "USD"), max_gpus=128)
    times = {n: time_s(asked, n, target) for n in range(1, 13)}
    kept = [n for n, s in times.items() if 2.5 * 8 * n * s / 3600 <= budget]
    assert plan.met is True
    assert plan.answer.nodes == min(kept, key=lambda n: times[n])


def test_the_scenarios_own_faults_are_not_blamed_on_an_option(cli: Callable[..., Outcome]) -> None:
    file = str(SCENARIOS / "resnet50-2x8-25gbit.yaml")
    slow = ("--set", "cluster.stragglers={factors: {12: 1.5}}")
    done = cli("plan", file, *slow, "--target", IMAGENET, "--max-gpus", "8")
    assert done.code == 2
    said = " ".join(done.err.split())
    assert "resnet50-2x8-25gbit.yaml cluster: no world size can be had:" in said
    assert "--cluster" not in said


def test_a_budget_of_gpu_hours_needs_no_price() -> None:
    asked = scenario("resnet50-2x8-25gbit")
    plan = plan_capacity(asked, IMAGENET, budget="30 GPU-hours", max_gpus=128)
    assert plan.met is True
    assert plan.answer.gpu_hours <= 30
    assert plan.answer.nodes > 1


def test_halving_leaves_few_enough_to_try_all() -> None:
    asked, target = scenario("slow-network"), Target(90, 1_280_000, "samples", 86_400.0)
    plan = plan_capacity(asked, target)
    nodes = plan.answer.nodes
    assert time_s(asked, nodes, target) <= 86_400 < time_s(asked, nodes - 1, target)
    assert "by halves from 256 to 512, then every number from" in plan.searched


def test_parts_of_a_node_are_tried_where_there_is_one() -> None:
    plan = plan_capacity(scenario("resnet50-8xa100"), f"{IMAGENET} in 6 h", max_gpus=16)
    layouts = [(size.nodes, size.gpus_per_node) for size in plan.sizes]
    assert layouts == [(1, 1), (1, 2), (1, 4), (1, 8), (2, 8)]
    assert plan.answer.gpus == 4
    whole = plan_capacity(scenario("resnet50-2x8-25gbit"), IMAGENET, max_gpus=24)
    assert [(size.nodes, size.gpus_per_node) for size in whole.sizes] == [(1, 8), (2, 8), (3, 8)]


def test_a_global_batch_is_shared_by_the_ranks() -> None:
    asked = scenario("resnet50-8xa100", "ddp.accumulation_steps=2")
    plan = plan_capacity(asked, f"{IMAGENET} in 1 h", global_batch=480, max_gpus=64)
    assert plan.scaling == "strong"
    assert {size.global_batch for size in plan.sizes} == {480}
    assert [size.gpus for size in plan.sizes] == [1, 2, 4, 8, 16, 24, 40, 48]
    assert [size.batch_per_rank for size in plan.sizes] == [240, 120, 60, 30, 15, 10, 6, 5]
    (out,) = plan.left_out
    assert out.sizes[:2] == ("4 x 8", "8 x 8")
    assert out.reason == "480 samples do not divide by the GPUs x 2 micro-batches"


@settings(max_examples=8)
@given(
    hours=st.floats(0.05, 30),
    budget=st.none() | st.floats(1, 300),
    global_batch=st.none() | st.sampled_from([96, 256, 1000]),
)
def test_an_answer_keeps_what_it_promises(
    hours: float, budget: float | None, global_batch: int | None
) -> None:
    plan = plan_capacity(
        scenario("resnet50-8xa100", "run.iterations=1"),
        Target(90, 1_280_000, "samples", hours * 3600),
        price=Money(2.0, "USD"),
        budget=None if budget is None else Money(budget, "USD"),
        global_batch=global_batch,
        max_gpus=16,
    )
    assert plan.answer in plan.sizes
    in_time = plan.answer.time_s <= hours * 3600
    affordable = budget is None or (plan.answer.cost or 0) <= budget
    assert plan.met is (in_time and affordable)
    if not plan.met:
        assert not any(_keeps(size, hours, budget) for size in plan.sizes)
    for other in plan.sizes:
        if plan.met and other.gpus < plan.answer.gpus and other.fits is not False:
            assert other.time_s > hours * 3600
    assert max(map(len, render_plan(plan, "f.yaml").splitlines())) <= 100


def _keeps(size: Capacity, hours: float, budget: float | None) -> bool:
    fits = size.fits is not False
    return fits and size.time_s <= hours * 3600 and (budget is None or (size.cost or 0) <= budget)
