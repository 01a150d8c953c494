"""Searches over strategies that shard the model: the best of all that fit, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from outcome import Outcome

import ddpsim
from ddpsim.errors import InputError
from ddpsim.planning.capacity_plan.each_strategy import plan_each_strategy
from ddpsim.planning.capacity_plan.plan import plan_capacity
from ddpsim.planning.compare import compare, each_strategy
from ddpsim.planning.shardings import settings_to_fit, shardings
from ddpsim.planning.tune import Limits, TuneError, tune
from ddpsim.prediction.api import predict
from ddpsim.result.capacity import CapacityPlan, Money
from ddpsim.scenario.document import Document, load
from ddpsim.scenario.load import parse
from ddpsim.scenario.schema import Scenario

ROOT = Path(__file__).resolve().parent.parent.parent
FEW = ("workload.model=gpt2", "run.iterations=1", "cluster.nodes=2", "cluster.gpus_per_node=2")
AS_DDP = ("ddp.strategy=ddp", "ddp.fully_shard=null")


def document(*settings: str) -> Document:
    return load(ROOT / "scenarios" / "gpt2-xl-hsdp.yaml", [*FEW, *settings])


@pytest.mark.parametrize("base", [(), AS_DDP, (*AS_DDP, "ddp.bucket_order=reversed")])
def test_every_way_can_be_simulated_from_any_of_them(base: tuple[str, ...]) -> None:
    own = document(*base)
    ways = shardings(parse(own))
    found = [parse(own.changed(settings)).ddp for settings in ways]
    names = ["zero1", *["deepspeed"] * 2, *["fully_shard"] * 3, *["hsdp"] * 2]
    assert [ddp.strategy for ddp in found] == names
    kept = [ddp.sharding.reshard_after_forward for ddp in found[3:]]
    assert kept == [None, False, 2, None, False]
    assert {ddp.sharding.mixed_precision.param for ddp in found[3:]} == {"bfloat16"}


@pytest.mark.parametrize(("rounds", "params"), [(False, [None]), (True, [None, "bfloat16"])])
def test_deepspeed_clips_by_itself_and_rounds_where_asked(rounds: bool, params: list[str]) -> None:
    own = document(*AS_DDP, "workload.clip_grad_norm=true", "ddp.no_sync=false")
    ways = [way for way in shardings(parse(own), rounds=rounds) if "deepspeed" in way[0]]
    found = [parse(own.changed(settings)) for settings in ways]
    assert all(scenario.ddp.zero.overlap_comm for scenario in found)
    told = [(scenario.ddp.zero.stage, scenario.ddp.zero.params) for scenario in found]
    assert told == [(stage, type_) for type_ in params for stage in (1, 2)]
    assert {scenario.workload.clip_grad_norm for scenario in found} == {None}


def test_each_strategy_drops_the_options_of_others() -> None:
    bases = ["ddp.strategy=zero1", "ddp.zero1={parameters_as_bucket_view: true}"]
    bases = [bases, ["ddp.strategy=deepspeed", "ddp.deepspeed={reduce_bucket_size: 1000}"]]
    for base in bases:
        own = document("ddp.fully_shard=null", *base)
        found = [parse(own.changed(ways)).ddp for ways in shardings(parse(own))]
        assert found[0].zero1 == parse(own).ddp.zero1
    assert found[1].zero.reduce_bucket_size == 1000


@pytest.mark.parametrize(
    ("ddp", "row"),
    [
        ("{strategy: deepspeed, deepspeed: {stage: 2}}", "deepspeed, stage=2"),
        ("{strategy: deepspeed}", "deepspeed, stage=1"),
        ("{strategy: hsdp}", "hsdp"),
        ("{strategy: fsdp1}", "fsdp1"),
        (
            "{strategy: fully_shard, fully_shard: {reshard_after_forward: 2}}",
            "fully_shard, reshard_after_forward=2",
        ),
    ],
)
def test_a_scenarios_own_row_is_its_run(ddp: str, row: str) -> None:
    """With the options that it has, and no others."""
    own = document(f"ddp={ddp}")
    (option,) = (each for each in each_strategy(own) if each.title == row)
    (change,) = compare(parse(own), [option]).changes
    assert change.step_s == pytest.approx(predict(parse(own)).iteration_time_s.mean, rel=1e-9)
    assert not [each for each in change.settings if "overlap_comm" in each or "mixed" in each]


def test_tables_tell_the_options_of_their_rows(cli: Callable[..., Outcome]) -> None:
    """Those that a strategy takes by itself, in `compare` and in `plan`."""
    file = str(ROOT / "scenarios" / "gpt2-xl-hsdp.yaml")
    settings = [part for each in (*FEW, *AS_DDP) for part in ("--set", each)]
    for asked in (["compare", file], ["plan", file, "--target", "1k samples", "--max-gpus", "2"]):
        told = cli(*asked, *settings, "--each-strategy").out.partition("\nwith ")[2]
        sharded = "ddp.fully_shard.mixed_precision={param: bfloat16, reduce: float32}"
        assert f"fully_shard; hsdp: {sharded}" in told.replace("\n            ", " ")
        assert "deepspeed: ddp.deepspeed.overlap_comm=true" in told
        assert "ddp.deepspeed.params" not in told


def test_a_name_stands_for_the_same_settings_in_every_command() -> None:
    """A row of a plan is the row of that name in a comparison, and what `run` says of it."""
    own = document(*AS_DDP)
    asked = planned("1k samples", global_batch=None)
    rows = {change.title: change for change in ddpsim.compare(own, each_strategy=True).changes}
    plans = plan_each_strategy(own, partial(asked, max_gpus=4))
    named = [each for each in plans if each.name != "ddp"]
    assert len(named) == 8
    for each in named:
        assert each.plan
        alone = predict(parse(own.changed(each.settings))).iteration_time_s.mean
        (size,) = (size for size in each.plan.sizes if (size.nodes, size.gpus) == (2, 4))
        assert size.step_s == pytest.approx(alone, rel=1e-9)
        assert rows[each.name].step_s == pytest.approx(alone, rel=1e-9)
    rounded = rows["deepspeed, stage=2, params=bfloat16"]
    assert (rounded.step_s or 0) < (rows["deepspeed, stage=2"].step_s or 0)


def test_what_rounds_gradients_is_not_the_best() -> None:
    found = ddpsim.compare(document(*AS_DDP), each_strategy=True)
    rounded = {change.title for change in found.changes if "rounded to 16 bits" in change.note}
    assert rounded == {f"deepspeed, stage={n}, params=bfloat16" for n in (1, 2)}
    assert found.best is None or found.best.title not in rounded


def test_tune_takes_the_fastest_strategy_that_fits() -> None:
    """With less memory than DDP needs, against each way simulated alone."""
    own = document(*AS_DDP)
    memory = {s: predict(parse(own.changed(s))) for s in ((), *shardings(parse(own)))}
    room = memory[()].memory_bytes_per_gpu.total - 1
    fitting = [r for r in memory.values() if r.memory_bytes_per_gpu.total <= room]
    found = tune(own, Limits(room, each_strategy=True))
    least_s = min(result.iteration_time_s.mean for result in fitting)
    assert found.fastest.step_s == pytest.approx(least_s, rel=1e-3)
    assert found.own_regret is None
    with pytest.raises(TuneError, match="shard the model: add --each-strategy"):
        tune(own, Limits(memory[()].memory_bytes_per_gpu.total // 3))
    with pytest.raises(TuneError, match="search all: ddpsim tune FILE --each-strategy"):
        tune(document())


Planned = Callable[..., CapacityPlan]


def planned(target: str, **limits: Any) -> Planned:
    """What the command asks, of at most two GPUs."""
    return partial(plan_capacity, target=target, max_gpus=2, **limits)


def test_plan_puts_the_cheapest_in_time_first() -> None:
    plans = plan_each_strategy(document("cluster.nodes=1"), planned("1k samples in 1 h"))
    answers = [each.plan for each in plans if each.plan]
    assert [plan.met for plan in answers] == [True] * 6
    assert [plan.next_doubling is not None for plan in answers] == [True, *[False] * 5]
    hours = [plan.answer.gpu_hours for plan in answers]
    assert hours == sorted(hours)
    naive = document("ddp.strategy=naive", "ddp.fully_shard=null")
    with pytest.raises(InputError, match=r"strategy is naive"):
        plan_each_strategy(naive, lambda *_, **__: pytest.fail("nothing is planned"))


def stub(rates: dict[str, dict[int, float]], **changed: Any) -> Planned:
    """Plans by strategy, of the throughput at each number of GPUs; DeepSpeed is the slowest."""
    rates = {"deepspeed": {1: 1.0, 2: 1.0, 4: 1.0}} | rates
    whole = plan_capacity(parse(document("cluster.nodes=1")), "1k samples", max_gpus=1)

    def plan(
        scenario: Scenario, *, looks_further: bool, answer_gpus: int | None = None
    ) -> CapacityPlan:
        sizes = tuple(
            replace(
                whole.answer,
                gpus=gpus,
                throughput_samples_per_s=rate,
                time_s=1e3 / rate,
                gpu_hours=gpus / rate,
            )
            for gpus, rate in rates[scenario.ddp.strategy].items()
        )
        answer = next((size for size in sizes if size.gpus == answer_gpus), sizes[-1])
        more = {"answer": answer, "sizes": sizes, "asked_gpus": answer_gpus, **changed}
        return replace(whole, **more)

    return plan


@pytest.mark.parametrize(
    ("rates", "gpus", "first"),
    [
        # ddp's own knee is 1, zero1's 2: the fastest of each size has it at 2
        ({"ddp": {1: 10, 2: 12, 4: 20}, "zero1": {1: 9, 2: 18, 4: 20}}, 2, "zero1"),
        ({"ddp": {1: 10, 2: 19, 4: 36}, "zero1": {1: 9, 2: 18, 4: 20}}, 4, "ddp"),
    ],
)
def test_without_limits_all_stand_on_the_knee_of_the_fastest(
    rates: dict[str, dict[int, float]], gpus: int, first: str
) -> None:
    sharded = {"fully_shard": {1: 8.0, 2: 9.0}}  # not on 4
    found = plan_each_strategy(document("cluster.nodes=1", *AS_DDP), stub(rates | sharded))
    known = [each.plan for each in found if each.plan]
    assert {plan.answer.gpus for plan in known} == {gpus}
    assert found[0].name == first
    times = [plan.answer.time_s for plan in known]
    assert times == sorted(times)
    missing = [each for each in found if not each.plan]
    assert [each.problem.partition(":")[0] for each in missing] == ["not on 4 GPUs"] * (gpus - 2)


def test_a_budget_alone_ranks_by_time() -> None:
    rates = {"ddp": {1: 10.0}, "zero1": {4: 20.0}, "fully_shard": {2: 15.0}}
    own = document("cluster.nodes=1", *AS_DDP)
    found = plan_each_strategy(own, stub(rates, met=True, budget=Money(5, "GPU-hours")))
    assert [each.name for each in found][::3] == ["zero1", "ddp"]


def test_the_command_shows_each_strategy(cli: Callable[..., Outcome]) -> None:
    few = [each for each in FEW if "nodes" not in each]
    settings = [part for each in (*few, "cluster.nodes=1") for part in ("--set", each)]
    asked = ("--target", "1k samples", "--price", "2 EUR", "--max-gpus", "2", "--each-strategy")
    file = str(ROOT / "scenarios" / "gpt2-xl-hsdp.yaml")
    text = cli("plan", file, *settings, *asked).out
    (head,) = (row for row in text.splitlines() if row.startswith("  strategy "))
    assert text.startswith("strategy    ")  # of the plan that comes first
    assert text.index("answer ") < text.index(head)
    assert head.split() == ["strategy", "GPUs", "time", "GPU-hours", "EUR", "memory"]
    rows = text.partition(head)[2].splitlines()[1:5]
    assert {row.split("  ")[1].partition(",")[0] for row in rows} == {"ddp", "zero1", "fully_shard"}
    assert len({row.split()[-5] for row in rows}) == 1
    assert "all on 2 GPUs (1 x 2), the fastest first" in text
    assert "--each-strategy" in text.partition("how sure the differences are")[2]


def test_a_strategy_that_does_not_fit_is_planned_with_what_makes_it_fit() -> None:
    """And compared with it, beside the strategy as it is."""
    own = document("workload.batch_per_rank=96", "cluster.nodes=1", *AS_DDP)
    plans = plan_each_strategy(own, partial(plan_capacity, target="1k samples", max_gpus=1))
    assert all(each.plan and each.plan.answer.fits for each in plans)
    assert all("micro-batches" in each.name for each in plans)
    batch = parse(own).workload.batch_per_rank
    for each in plans:
        split = parse(own.changed(each.settings))
        assert split.workload.batch_per_rank * split.ddp.accumulation_steps == batch
    titles = [each.title for each in each_strategy(own) if "zero1" in each.title]
    assert any(title.startswith("zero1, ") and "micro-batches" in title for title in titles)
    assert settings_to_fit(document(), ()) == ()
