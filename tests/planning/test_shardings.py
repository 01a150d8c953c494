"""Searches over strategies that shard the model: the best of all that fit, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from outcome import Outcome

from ddpsim.errors import InputError
from ddpsim.planning.capacity_plan.each_strategy import plan_each_strategy
from ddpsim.planning.capacity_plan.plan import plan_capacity
from ddpsim.planning.shardings import shardings
from ddpsim.planning.tune import Limits, TuneError, tune
from ddpsim.prediction.api import predict
from ddpsim.scenario.document import Document, load
from ddpsim.scenario.load import parse

ROOT = Path(__file__).resolve().parent.parent.parent
FEW = ("workload.model=gpt2", "run.iterations=1", "cluster.nodes=2", "cluster.gpus_per_node=2")
AS_DDP = ("ddp.strategy=ddp", "ddp.fully_shard=null")


def document(*settings: str) -> Document:
    return load(ROOT / "scenarios" / "gpt2-xl-hsdp.yaml", [*FEW, *settings])


@pytest.mark.parametrize("base", [(), AS_DDP])
def test_every_way_can_be_simulated_from_any_of_them(base: tuple[str, ...]) -> None:
    own = document(*base)
    ways = shardings(parse(own))
    found = [parse(own.changed(settings)).ddp for settings in ways]
    assert [ddp.strategy for ddp in found] == ["zero1", *["fully_shard"] * 3, *["hsdp"] * 2]
    kept = [ddp.sharding.reshard_after_forward for ddp in found[1:]]
    assert kept == [True, False, 2, True, False]
    assert {ddp.sharding.mixed_precision.param for ddp in found[1:]} == {"bfloat16"}


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


def test_plan_puts_the_cheapest_in_time_first() -> None:
    plans = plan_each_strategy(
        document("cluster.nodes=1"),
        lambda scenario, further: plan_capacity(
            scenario, "1k samples in 1 h", max_gpus=2, looks_further=further
        ),
    )
    assert [each.plan is not None and each.plan.met for each in plans] == [True] * 4
    assert [each.plan is not None and each.plan.next_doubling is not None for each in plans] == [
        True,
        *[False] * 3,
    ]
    hours = [each.plan.answer.gpu_hours for each in plans if each.plan]
    assert hours == sorted(hours)
    naive = document("ddp.strategy=naive", "ddp.fully_shard=null")
    with pytest.raises(InputError, match="naive is another training"):
        plan_each_strategy(naive, lambda *_: pytest.fail("nothing is planned"))


def test_the_command_shows_each_strategy(cli: Callable[..., Outcome]) -> None:
    settings = [part for each in (*FEW, "cluster.nodes=1") for part in ("--set", each)]
    asked = ("--target", "1k samples", "--max-gpus", "2", "--each-strategy")
    file = str(ROOT / "scenarios" / "gpt2-xl-hsdp.yaml")
    text = cli("plan", file, *settings, *asked).out
    head, *rows = text.splitlines()
    assert head.split() == ["GPUs", "time", "GPU-hours", "memory", "strategy"]
    names = {row.split("   ")[-1].split(",")[0] for row in rows[:4]}
    assert names == {"ddp", "zero1", "fully_shard"}
