"""HSDP whose replicas add their gradients up once a step: set_requires_all_reduce."""

from __future__ import annotations

from collections import Counter

import pytest

from ddpsim.errors import ScenarioError
from ddpsim.planning.compare import each_flag, each_strategy
from ddpsim.prediction.api import load_scenario
from ddpsim.prediction.resolve import resolve
from ddpsim.scenario.document import load
from ddpsim.scenario.schema import Scenario
from ddpsim.strategies.instructions import Communicate

HSDP = "scenarios/gpt2-xl-hsdp.yaml"
LAST_ONLY = ["ddp.fully_shard.all_reduce_last_only=true"]
BY_FOUR = ["ddp.strategy=hsdp", "ddp.accumulation_steps=4", "ddp.no_sync=false"]


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        (
            ["ddp.strategy=fully_shard"],
            "is an option of strategy hsdp, and fully_shard has no all-reduce; remove it",
        ),
        (BY_FOUR[:1], "needs micro-batches; write ddp.accumulation_steps, or drop it"),
        (BY_FOUR[:2], "needs gradients that each micro-batch scatters; write ddp.no_sync"),
    ],
)
def test_an_all_reduce_that_cannot_wait_is_refused(settings_: list[str], message: str) -> None:
    with pytest.raises(ScenarioError, match=f"all_reduce_last_only: {message}"):
        load_scenario(HSDP, [*settings_, *LAST_ONLY])


def test_all_reduces_of_the_last_micro_batch_alone() -> None:
    """Fewer all-reduces and a sum of scattered gradients more; other ways are compared as well."""
    few = [*BY_FOUR, "workload.model=gpt2", "run.iterations=1"]
    each, last = (resolve(load_scenario(HSDP, [*few, *more])) for more in ([], LAST_ONLY))
    sent = [
        Counter(i.operation for i in job.program.steady_step if isinstance(i, Communicate))
        for job in (each, last)
    ]
    assert sent[0]["reduce_scatter"] == sent[1]["reduce_scatter"] == sent[0]["all_reduce"]
    assert sent[0]["all_reduce"] == 4 * sent[1]["all_reduce"]
    assert last.step_s() < each.step_s()
    ways = list(each_flag(load(HSDP, [*few, *LAST_ONLY])))
    ways += each_strategy(
        load(HSDP, [*few, "ddp.strategy=ddp", "ddp.fully_shard=null"]),
        {"fully_shard": last.scenario.ddp.sharding.model_dump(mode="json")},
    )
    assert [way for way in ways if not isinstance(way.scenario, Scenario)] == []
    told = [way.settings for way in each_flag(load(HSDP, few))]
    assert (BY_FOUR[2], *LAST_ONLY) in told
