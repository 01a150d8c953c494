"""What does not fit says the fewest changes that would, each with the figures of its scenario."""

from __future__ import annotations

from typing import Any

import pytest
from shipped_scenarios import ROOT

from ddpsim.prediction.api import load_scenario, simulate
from ddpsim.prediction.fitting import split_to_fit, ways_to_fit
from ddpsim.prediction.job import Job
from ddpsim.prediction.resolve import resolve
from ddpsim.report.text import render
from ddpsim.scenario.options.fully_shard import AS_AUTOCAST
from ddpsim.units import format_bytes, format_duration

OWN_MODEL = str(ROOT / "scenarios" / "own-model-parameters.csv")


def job_of(*settings: str, **workload: Any) -> Job:
    usual = {"model": "gpt2-large", "precision": "amp-bf16", "optimizer": {"name": "adamw"}}
    known = {} if "parameters" in workload else usual
    scenario = {
        "schema": "ddpsim/1",
        "workload": {**known, "batch_per_rank": 4, **workload},
        "cluster": {"device": "a10g", "nodes": 1, "gpus_per_node": 4},
    }
    return resolve(load_scenario(scenario, settings))


def test_what_fits_needs_nothing() -> None:
    assert ways_to_fit(job_of("workload.model=gpt2")) == ()


def named(settings: tuple[str, ...]) -> list[str]:
    """Changes; what fully_shard gathers under autocast is a part of its own."""
    return [each for each in settings if each != AS_AUTOCAST]


def test_one_change_is_smaller_than_two_and_the_fastest_comes_first() -> None:
    ways = ways_to_fit(job_of())
    steps_s = []
    for way in ways:
        changed = job_of(*way.settings)
        needs_bytes = changed.memory().total
        assert changed.memory().fits
        steps_s.append(changed.step_s())
        needs, step = format_bytes(needs_bytes), format_duration(steps_s[-1])
        assert way.why.startswith("fits with ")
        assert way.why.endswith(f": {needs}, {step} a step")
    assert len({len(named(way.settings)) for way in ways if "batch" not in way.settings[0]}) == 1
    assert steps_s == sorted(steps_s)


def test_two_changes_where_one_is_not_enough() -> None:
    xl = ("workload.model=gpt2-xl", "cluster.device=v100-sxm2-16gb")
    (first, *_) = ways_to_fit(job_of(*xl, precision="amp-fp16"))
    assert " and " in first.why
    assert job_of(*xl, *first.settings, precision="amp-fp16").memory().fits


def test_the_global_batch_stays() -> None:
    job = job_of("workload.seq_len=512", batch_per_rank=16)
    split = split_to_fit(job.scenario.model_copy(update={"ddp": job.scenario.ddp}))
    for way in ways_to_fit(job):
        assert load_changed(way.settings).global_batch == job.scenario.global_batch
    assert split is None or split.workload.batch_per_rank * split.ddp.accumulation_steps == 16


def load_changed(settings: tuple[str, ...]) -> Any:
    return job_of("workload.seq_len=512", *settings, batch_per_rank=16).scenario


def test_the_least_is_said_where_nothing_is_enough() -> None:
    (least,) = ways_to_fit(job_of("workload.model=gpt2-xl", "cluster.gpus_per_node=1"))
    assert least.why.startswith("does not fit even with gradient_as_bucket_view")
    assert " of 22.2 GiB" in least.why


def test_of_a_measured_step_no_other_compute_is_claimed() -> None:
    """Checkpoints and other batches would take another time than was measured."""
    ways = ways_to_fit(job_of("workload.step_time=900 ms"))
    said = " ".join(setting for way in ways for setting in way.settings)
    assert "checkpointing" not in said
    assert "batch_per_rank" not in said


@pytest.mark.parametrize(
    "settings", [("workload.compile=true",), ("cluster.algorithm=data_parallel",)]
)
def test_what_a_scenario_refuses_is_not_tried(settings: tuple[str, ...]) -> None:
    for way in ways_to_fit(job_of(*settings, batch_per_rank=8)):
        job_of(*settings, *way.settings, batch_per_rank=8)


def test_a_sharded_job_may_leave_its_shards_on_the_host() -> None:
    """But not where the host would have to clip gradients, or to add them."""
    alone = ("workload.model=gpt2-xl", "cluster.gpus_per_node=1", "ddp.strategy=fully_shard")
    (way,) = ways_to_fit(job_of(*alone, AS_AUTOCAST, batch_per_rank=1))
    assert way.settings == ("ddp.fully_shard.offload_policy=CPUOffloadPolicy",)
    assert job_of(*alone, AS_AUTOCAST, *way.settings, batch_per_rank=1).memory().fits
    clips = "workload.clip_grad_norm=true"
    (least,) = ways_to_fit(job_of(*alone, AS_AUTOCAST, clips, batch_per_rank=1))
    assert "offload" not in " ".join(least.settings)


def test_accumulation_fits_where_each_micro_batch_is_reduced() -> None:
    """Under no_sync whole gradients stay; llm-foundry, which reduces each, trains such models."""
    told = ("workload.model=gpt2-xl", "workload.seq_len=512", "ddp.accumulation_steps=4")
    for strategy in ("fsdp1", "fully_shard"):
        sharded = (*told, f"ddp.strategy={strategy}", "cluster.device=t4")
        job = job_of(*sharded, "workload.precision=fp32", batch_per_rank=1)
        assert ("ddp.no_sync=false",) in [way.settings for way in ways_to_fit(job)]


def test_the_same_strategy_stays_where_asked() -> None:
    for way in ways_to_fit(job_of(), same_strategy=True):
        assert not any(setting.startswith("ddp.strategy") for setting in way.settings)


def test_what_does_not_fit_is_said_first() -> None:
    result = simulate(job_of().scenario)
    _, _, first, second, step, *_ = render(result, "job.yaml").splitlines()
    assert first.startswith("memory      does not fit: ")
    assert second.strip() == result.next_steps[0].why
    assert step.startswith("step ")
    assert "WARNING     needs about" not in render(result, "job.yaml")
