"""How many GPUs: the parser, the search, the arithmetic, the knee and the network."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from conftest import Outcome
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

import ddpsim
from ddpsim.errors import InputError, ScenarioError
from ddpsim.planning.capacity import plan_capacity
from ddpsim.planning.next_doubling import next_doubling, with_bandwidth
from ddpsim.planning.options import parse_budget, parse_price, parse_target
from ddpsim.report.capacity import render_plan
from ddpsim.result.capacity import (
    KNEE_EFFICIENCY,
    Capacity,
    CapacityPlan,
    Money,
    Target,
    knee,
    marginal_efficiencies,
)
from ddpsim.scenario.links import IntraNode
from ddpsim.scenario.schema import Scenario

ROOT = Path(__file__).resolve().parent.parent.parent
SCENARIOS = ROOT / "scenarios"
GOLDEN = Path(__file__).parent.parent / "golden"
IMAGENET = "90 epochs of 1.28M samples"
Cli = Callable[..., Outcome]


def scenario(name: str, *overrides: str) -> Scenario:
    return ddpsim.load_scenario(SCENARIOS / f"{name}.yaml", overrides)


def with_nodes(asked: Scenario, nodes: int) -> Scenario:
    return asked.model_copy(update={"cluster": asked.cluster.model_copy(update={"nodes": nodes})})


def time_s(asked: Scenario, nodes: int, target: Target) -> float:
    """By hand, from one simulation."""
    sized = with_nodes(asked, nodes)
    global_batch = (
        sized.workload.batch_per_rank * sized.ddp.accumulation_steps * sized.cluster.world_size
    )
    steps = target.epochs * ceil(target.amount / global_batch)
    return steps * ddpsim.simulate(sized).iteration_time_s.mean


# what is asked for


@given(
    epochs=st.none() | st.integers(1, 10**6),
    amount=st.integers(1, 10**7),
    suffix=st.sampled_from([("", 1), ("k", 10**3), ("M", 10**6), ("B", 10**9), (" M", 10**6)]),
    unit=st.sampled_from(["samples", "tokens"]),
    within=st.none() | st.tuples(st.integers(1, 999), st.sampled_from(["h", "min", "days"])),
)
def test_a_target_is_read_as_it_is_written(
    epochs: int | None,
    amount: int,
    suffix: tuple[str, int],
    unit: str,
    within: tuple[int, str] | None,
) -> None:
    text = f"{amount}{suffix[0]} {unit}"
    text = text if epochs is None else f"{epochs} epochs of {text}"
    seconds = {"h": 3600.0, "min": 60.0, "days": 86400.0}
    expected_s = None
    if within:
        text += f" in {within[0]} {within[1]}"
        expected_s = within[0] * seconds[within[1]]
    assert parse_target(text) == Target(epochs or 1, amount * suffix[1], unit, expected_s)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("90 epochs of 1.28M samples in 24 h", Target(90, 1_280_000, "samples", 86_400.0)),
        ("300B tokens in 30 days", Target(1, 300 * 10**9, "tokens", 30 * 86_400.0)),
        ("1 epoch of 1_281_167 samples", Target(1, 1_281_167, "samples")),
        ("  2  epochs of\n5e4 samples in 1.5 h ", Target(2, 50_000, "samples", 5400.0)),
        ("1 Sample", Target(1, 1, "samples")),
    ],
)
def test_targets(text: str, target: Target) -> None:
    assert parse_target(text) == target


NUMBERS = "write such as 90, 1.28M or 300B"
GRAMMAR = (
    'is not a target; write "[N epochs of] M samples [in DURATION]", such as "90 epochs of 1.28M '
    'samples in 24 h" or "300B tokens in 30 days"'
)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("24 h", f"'24 h' {GRAMMAR}"),
        ("", f"'' {GRAMMAR}"),
        ("90 epochs in 24 h", f"'90 epochs in 24 h' {GRAMMAR}"),
        (
            "1,281,167 samples",
            "'1,281,167' is not a number of samples; write no commas; " + NUMBERS,
        ),
        (
            "many samples in 1 h",
            "'many' is not a number of samples; " + NUMBERS,
        ),
        ("1.5 epochs of 10 samples", "'1.5' epochs is not a whole number"),
        ("0 samples", "'0' samples is out of range: wanted 1 to 10^18"),
        ("9e30 tokens", "'9e30' tokens is out of range: wanted 1 to 10^18"),
        (
            "5 samples in 24",
            "24 has no unit; write a time such as '5 us', '391.2 ms' or '1.5 s'",
        ),
        (
            "5 samples in 2 weeks",
            "'2 weeks' has the unknown unit 'weeks'; write a time in ns, us, ms, s, min, h or days",
        ),
        ("5 samples in 0 h", "the work takes longer than 0 h"),
    ],
)
def test_bad_targets(text: str, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_target(text)
    assert str(caught.value) == says


@settings(max_examples=60)
@given(st.text(max_size=150) | st.text("0123456789.kMB_,$ /epochsofaltn", max_size=40))
def test_no_text_makes_the_parsers_fail_otherwise(text: str) -> None:
    for parse in (parse_target, parse_price, parse_budget):
        with suppress(ValueError):
            parse(text)


@pytest.mark.parametrize(
    ("text", "money"),
    [
        ("2.50 USD", Money(2.5, "USD")),
        ("2.50 EUR/h", Money(2.5, "EUR")),
        ("2.50 USD / GPU-hour", Money(2.5, "USD")),
        ("2.50 USD per hour", None),
        ("$2", Money(2.0, "$")),
        ("3 credits", Money(3.0, "credits")),
        ("5k USD", Money(5000.0, "USD")),
        ("800 GPU-hours", Money(800.0, "GPU-hours")),
        ("800 gpuh", Money(800.0, "GPU-hours")),
        ("2.50", None),
        ("USD 2.50", None),
        ("1,000 USD", None),
        ("0 USD", None),
        ("-5 USD", None),
    ],
)
def test_money(text: str, money: Money | None) -> None:
    if money is not None:
        assert parse_price(text) == money
        return
    with pytest.raises(ValueError, match="write a price per GPU-hour such as"):
        parse_price(text)


# the arithmetic


@pytest.fixture(scope="module")
def imagenet() -> CapacityPlan:
    return plan_capacity(
        scenario("resnet50-2x8-25gbit"), f"{IMAGENET} in 1 h", price="2.50 USD", max_gpus=128
    )


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


# the search


@pytest.mark.parametrize("hours", [0.9, 1.3, 2.0])
def test_the_fewest_nodes_are_those_of_brute_force(hours: float) -> None:
    asked, target = scenario("resnet50-2x8-25gbit"), Target(90, 1_280_000, "samples", hours * 3600)
    plan = plan_capacity(asked, target, max_gpus=256)
    late = [n for n in range(1, plan.answer.nodes) if time_s(asked, n, target) <= hours * 3600]
    assert late == []
    assert plan.met is True
    assert plan.answer.time_s == time_s(asked, plan.answer.nodes, target) <= hours * 3600


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


# the knee


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


# the network of the next doubling


def throughput(asked: Scenario) -> float:
    return ddpsim.simulate(asked).throughput_samples_per_s


@pytest.mark.parametrize(
    ("name", "nodes", "key"),
    [
        ("resnet50-2x8-25gbit", 2, "inter_node"),  # stated beside a device
        ("resnet50-8xa100", 2, "inter_node"),  # the device's preset
        ("resnet50-8xa100", 1, "intra_node"),
        ("machines-64xh100", 8, "inter_node"),  # stated beside a machine
        ("machines-64xh100", 8, "intra_node"),
    ],
)
def test_another_bandwidth_leaves_the_rest_as_it_is(name: str, nodes: int, key: Any) -> None:
    asked = with_nodes(scenario(name, "cluster.background=null"), nodes)
    link = asked.cluster.link(key)
    assert link
    assert link.bandwidth_bytes_per_s
    same = with_bandwidth(asked, key, link.bandwidth_bytes_per_s)
    assert ddpsim.simulate(same).iteration_time_s == ddpsim.simulate(asked).iteration_time_s
    half = with_bandwidth(asked, key, link.bandwidth_bytes_per_s / 50)
    assert throughput(half) < throughput(asked)


def test_what_a_switch_sums_goes_over_the_same_links() -> None:
    whole = scenario("machines-64xh100").cluster.link("intra_node")
    assert isinstance(whole, IntraNode)
    assert whole.bandwidth_bytes_per_s
    for own in (None, "100 GB/s"):
        link: dict[str, Any] = {"bandwidth": f"{whole.bandwidth_bytes_per_s / 4} B/s"}
        asked = scenario("machines-64xh100")
        stated = IntraNode.model_validate(link | ({"switch_bandwidth": own} if own else {}))
        cluster = asked.cluster.model_copy(update={"intra_node": stated})
        quarter = cluster.link("intra_node")
        assert isinstance(quarter, IntraNode)
        usual = whole.switch_bandwidth_bytes_per_s
        assert usual
        assert quarter.switch_bandwidth_bytes_per_s == (100e9 if own else usual / 4)


def test_the_needed_bandwidth_is_the_least_that_does() -> None:
    asked = scenario("resnet50-2x8-25gbit")
    one, two = with_nodes(asked, 1), with_nodes(asked, 2)
    found = next_doubling(one, two)
    assert found.efficiency == throughput(two) / (2 * throughput(one)) < KNEE_EFFICIENCY
    needed = found.needed_bandwidth_bytes_per_s
    assert needed
    enough = throughput(with_bandwidth(two, "inter_node", needed)) / (2 * throughput(one))
    short = throughput(with_bandwidth(two, "inter_node", 0.97 * needed)) / (2 * throughput(one))
    assert found.needed_efficiency == enough >= KNEE_EFFICIENCY > short
    assert found.unlimited_efficiency
    assert found.without_network_time >= found.unlimited_efficiency >= enough
    assert found.gain_without_doubling == 0  # one node has no network


def test_an_unlimited_network_is_the_bound() -> None:
    """The kernels' floor bounds so small a batch: no network makes it worth while."""
    plan = plan_capacity(scenario("resnet50-8xa100"), "1M samples", global_batch=256, max_gpus=64)
    found = plan.next_doubling
    assert found
    assert found.needed_bandwidth_bytes_per_s is None
    assert found.without_network_time < KNEE_EFFICIENCY
    assert found.limit
    text = " ".join(render_plan(plan, "f.yaml").split())
    assert "no network makes it worth while: one that takes no time at all gives" in text


def test_other_links_or_latency_may_bound() -> None:
    asked = scenario(
        "resnet50-2x8-25gbit", "cluster.inter_node={bandwidth: 25 Gbit/s, latency: 2 ms}"
    )
    found = next_doubling(with_nodes(asked, 1), with_nodes(asked, 2))
    assert found.unlimited_efficiency
    assert found.unlimited_efficiency < KNEE_EFFICIENCY < found.without_network_time
    assert found.needed_bandwidth_bytes_per_s is None
    assert found.limit.startswith("latency: with every bandwidth unlimited it would be ")
    inside = scenario(
        "resnet50-2x8-25gbit",
        "cluster.intra_node={bandwidth: 1 GB/s, latency: 5 us}",
        "cluster.algorithm=ring",
    )
    found = next_doubling(with_nodes(inside, 1), with_nodes(inside, 2))
    assert found.efficiency >= KNEE_EFFICIENCY  # so slow inside that nodes add up
    faster = with_bandwidth(with_nodes(inside, 1), "intra_node", 100e9)
    found = next_doubling(faster, with_nodes(inside, 2))
    assert found.limit.startswith("communication: the intra-node links (1.000 GB/s a GPU,")


def test_times_of_a_log_are_divided() -> None:
    asked = scenario("gloo-cpu")  # it allows extrapolation
    found = next_doubling(with_nodes(asked, 1), with_nodes(asked, 2))
    assert (found.link, found.bandwidth_bytes_per_s) == ("all_reduce", None)
    assert found.needed_speedup
    assert found.needed_speedup > 1
    assert found.needed_efficiency == pytest.approx(KNEE_EFFICIENCY, abs=0.01)


# what cannot be


def test_a_target_out_of_reach_shows_the_best_and_its_bound() -> None:
    plan = plan_capacity(scenario("slow-network"), f"{IMAGENET} in 10 h", max_gpus=64)
    assert (plan.met, plan.answer.gpus) == (False, 64)
    assert plan.answer.bottleneck.startswith("communication: the inter-node network")
    text = " ".join(render_plan(plan, "f.yaml").split())
    assert "not met 64 GPUs (64 x 1): 5.78 days" in text
    assert "no size up to 64 GPUs that was tried meets the target; this one is the fastest" in text


def test_a_budget_too_small_shows_the_cheapest() -> None:
    plan = plan_capacity(
        scenario("resnet50-2x8-25gbit"), IMAGENET, price="2 USD", budget="1 USD", max_gpus=64
    )
    assert (plan.met, plan.answer.gpus) == (False, 8)
    assert "no size costs at most 1.00 USD; this one costs least" in render_plan(plan, "f.yaml")


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
    assert "in time, but it costs more than 60.00 USD; the fastest for it: 8 GPUs" in text


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
    assert "WARNING     no size fits in memory (needs about 181.2 GB a GPU)" in render_plan(
        plan, "f.yaml"
    )


def test_unknown_activations_are_said() -> None:
    plan = plan_capacity(scenario("own-model"), "1M samples", max_gpus=16)
    assert {size.fits for size in plan.sizes} == {None}
    assert "a GPU, activations unknown" in render_plan(plan, "f.yaml")


def test_sizes_without_a_named_rank_are_left_out() -> None:
    plan = plan_capacity(scenario("straggler", "run.iterations=2"), "1M samples", max_gpus=16)
    assert [size.gpus for size in plan.sizes] == [4, 8, 16]
    (out,) = plan.left_out
    assert out.sizes == ("1 x 1", "1 x 2")
    assert out.reason.startswith("cluster.stragglers.factors: rank 3 does not exist")


def test_a_log_of_one_layout_ends_the_question() -> None:
    """Extrapolated to other ranks it would give the same time to any number of them."""
    for allowed in ("false", "true"):
        asked = scenario("resnet50-nccl-log", f"run.allow_extrapolation={allowed}")
        with pytest.raises(ScenarioError) as raised:
            plan_capacity(asked, "1M samples")
        (problem,) = raised.value.problems
        assert problem.key == "cluster.all_reduce"
        assert problem.message.startswith("a log is of one world size, and says nothing of others;")


def test_a_knee_needs_a_doubling() -> None:
    asked = scenario("resnet50-2x8-25gbit", "cluster.nodes=1", "cluster.gpus_per_node=1")
    plan = plan_capacity(asked, "1M samples", max_gpus=1)
    text = " ".join(render_plan(plan, "f.yaml").split())
    assert "knee not known: no size and its double were both tried" in text


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


# the command


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        (
            "resnet50-2x8-25gbit",
            ("--target", f"{IMAGENET} in 1 h", "--price", "2.50 USD"),
        ),
        ("gpt2-bucket-choice", ("--target", "300B tokens in 4 days")),
    ],
)
def test_golden(
    name: str,
    arguments: tuple[str, ...],
    cli: Cli,
    golden: Callable[[str, Path], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    done = cli("plan", f"scenarios/{name}.yaml", *arguments)
    assert (done.code, done.err) == (0, "")
    assert max(map(len, done.out.splitlines())) <= 100
    golden(done.out, GOLDEN / f"plan-{name}.txt")


def test_json_has_its_schema(cli: Cli, imagenet: CapacityPlan) -> None:
    file = str(SCENARIOS / "resnet50-2x8-25gbit.yaml")
    options = ("--target", f"{IMAGENET} in 1 h", "--price", "2.50 USD", "--max-gpus", "128")
    done = cli("plan", file, *options, "--json")
    assert (done.code, done.err) == (0, "")
    document = json.loads(done.out)
    assert document == json.loads(json.dumps(imagenet.to_dict()))
    assert (document["schema"], document["knee_efficiency"]) == ("ddpsim.plan/1", 0.8)
    schema = TypeAdapter(CapacityPlan).json_schema()
    jsonschema.validate(document, schema)
    assert set(document) == {"schema", "knee_efficiency", *schema["properties"]}
    assert document["answer"] in document["sizes"]


def test_settings_and_the_next_command(cli: Cli) -> None:
    file = str(SCENARIOS / "resnet50-8xa100.yaml")
    chosen = ("--set", "ddp.bucket_cap_mb=50", "--set", "cluster.nodes=4")
    done = cli("plan", file, "--target", "10M samples in 1 h", *chosen, "--max-gpus", "64")
    assert done.code == 0
    last = " ".join(done.out.split("next ")[1].replace("\\", " ").split())
    assert "--set ddp.bucket_cap_mb=50 --set cluster.nodes=1" in last
    assert "cluster.nodes=4" not in last


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--target", "24 h"), "Invalid value for --target: '24 h' is not a target"),
        (("--target", "1M samples", "--price", "2"), "Invalid value for --price: '2' is not an am"),
        (("--target", "1M samples", "--budget", "2 USD"), "Invalid value for --budget: needs --pr"),
        (("--target", "1M samples", "--max-gpus", "0"), "Invalid value for --max-gpus: 0 is out"),
        ((), "Missing option '--target'"),
    ],
)
def test_wrong_options(cli: Cli, arguments: tuple[str, ...], says: str) -> None:
    done = cli("plan", str(SCENARIOS / "resnet50-8xa100.yaml"), *arguments)
    assert (done.code, done.out) == (2, "")
    assert says in " ".join(done.err.split())
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    "command",
    re.findall(
        r"^    ddpsim (plan .*)$", (ROOT / "docs" / "planning.md").read_text("utf-8"), re.MULTILINE
    ),
)
def test_commands_of_the_page_run(
    command: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    preset = (SCENARIOS / "gpt2-bucket-choice.yaml").read_text("utf-8")
    Path("scenario.yaml").write_text(preset, encoding="utf-8")
    done = cli(*shlex.split(command), "--max-gpus", "64")
    assert (done.code, done.err) == (0, "")
    assert done.out


@settings(max_examples=8, deadline=None)
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


def test_micro_batches_of_a_global_batch_are_split_where_memory_needs_it() -> None:
    asked = scenario("gpt2-bucket-choice", "workload.model=gpt2-xl", "cluster.nodes=1")
    plan = plan_capacity(asked, "1B tokens in 24 h", global_batch=64, max_gpus=16)
    assert {size.global_batch for size in plan.sizes} == {64}
    for size in plan.sizes:
        assert size.batch_per_rank * size.accumulation_steps * size.gpus == 64
        by_hand = scenario(
            "gpt2-bucket-choice",
            "workload.model=gpt2-xl",
            f"cluster.nodes={size.nodes}",
            f"cluster.gpus_per_node={size.gpus_per_node}",
            f"workload.batch_per_rank={size.batch_per_rank}",
            f"ddp.accumulation_steps={size.accumulation_steps}",
        )
        assert ddpsim.simulate(by_hand).iteration_time_s.mean == pytest.approx(size.step_s)
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
