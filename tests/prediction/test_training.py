"""Arithmetic around a step, against torch's sampler and loader, and figures counted by hand."""

from __future__ import annotations

from math import ceil
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ddpsim
from ddpsim.report.text import render
from ddpsim.result.training import epoch_of


@settings(max_examples=60)
@given(
    samples=st.integers(1, 400),
    ranks=st.integers(1, 9),
    batch=st.integers(1, 12),
    steps=st.integers(1, 4),
    drop_last=st.booleans(),
)
def test_an_epoch_has_the_steps_of_torchs_sampler_and_loader(
    samples: int, ranks: int, batch: int, steps: int, drop_last: bool
) -> None:
    data = pytest.importorskip("torch.utils.data")
    if drop_last and samples < ranks:  # torch's sampler then has a negative length
        assert epoch_of(samples, ranks, batch, steps, drop_last=True).steps == 0
        return
    dealt: list[int] = []
    for rank in range(ranks):
        sampler = data.DistributedSampler(
            range(samples), ranks, rank, shuffle=False, drop_last=drop_last
        )
        loader = data.DataLoader(
            range(samples), batch, sampler=sampler, drop_last=drop_last, collate_fn=list
        )
        dealt += [sample for each in loader for sample in each]
    epoch = epoch_of(samples, ranks, batch, steps, drop_last=drop_last)
    assert epoch.steps == ceil(len(loader) / steps)
    assert len(dealt) == samples + epoch.padded_samples - epoch.dropped_samples
    assert len(set(dealt)) == samples - epoch.dropped_samples


def scenario_of(**workload: Any) -> ddpsim.Scenario:
    usual = {"model": "resnet50", "batch_per_rank": 32, "precision": "amp-bf16"}
    cluster = {"device": "a100-sxm-80gb", "nodes": 2, "gpus_per_node": 4}
    document = {"schema": "ddpsim/1", "workload": usual | workload, "cluster": cluster}
    return ddpsim.load_scenario(document, ["ddp.accumulation_steps=2"])


def test_batch_epoch_and_advice_by_hand() -> None:
    scenario = scenario_of(
        dataset={"samples": 1_281_167}, learning_rate={"base_batch": 256, "value": 0.1}
    )
    result = ddpsim.simulate(scenario)
    training = result.training
    assert training
    assert training.global_batch == 32 * 2 * 8
    assert training.tokens_per_s is None
    epoch, rate = training.epoch, training.learning_rate
    assert epoch
    assert rate
    assert (epoch.steps, epoch.padded_samples) == (ceil(1_281_167 / 512), 1)
    assert epoch.time_s == pytest.approx(epoch.steps * result.iteration_time_s.mean)
    assert (rate.linear, rate.warmup_steps) == (pytest.approx(0.2), 5 * epoch.steps)
    assert rate.square_root == pytest.approx(0.1 * 2**0.5)
    said = " ".join(render(result, "f.yaml").split())
    assert "8 ranks (2 x 4), 512 samples a step, MFU" in said
    assert "0.2 (x 2) by the linear rule (Goyal et al. 2017), 0.141 (x 1.41)" in said


def test_mfu_counts_the_models_flops_once() -> None:
    """GPT-2's matrices and attention, forward and twice that backward; checkpoints add none."""
    shape = {"model": "gpt2", "batch_per_rank": 4}
    plain, twice = (
        ddpsim.simulate(scenario_of(**shape, checkpointing=each)) for each in ("none", "full")
    )
    for result in (plain, twice):
        training = result.training
        assert training
        assert training.mfu
        flops = training.mfu * result.iteration_time_s.mean * 312e12
        tokens = 4 * 1024 * 2
        by_hand = 6 * (12 * 768**2 * 12 + 50257 * 768) * tokens + 12 * 1024 * 768 * 12 * tokens
        assert flops == pytest.approx(by_hand, rel=0.04)  # fused attention computes scores again
        assert training.tokens_per_s == pytest.approx(8 * tokens / result.iteration_time_s.mean)
    assert plain.training
    assert twice.training
    assert twice.training.mfu < plain.training.mfu


def test_an_epoch_without_a_step_says_so() -> None:
    result = ddpsim.simulate(scenario_of(dataset={"samples": 200, "drop_last": True}))
    said = " ".join(render(result, "f.yaml").split())
    assert "no step: 200 samples fill no batch on every rank, and are dropped" in said
