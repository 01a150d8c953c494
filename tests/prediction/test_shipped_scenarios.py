"""Every scenario that ships answers soundly and shows what it says it shows."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from shipped_scenarios import load, mean_ms, predict

import ddpsim
from ddpsim.prediction.one_device import on_one_rank
from ddpsim.prediction.program import compile_program
from ddpsim.prediction.resolve import resolve
from ddpsim.report.text import render
from ddpsim.result.metrics import BreakdownNs, steps_of

ROOT = Path(__file__).resolve().parent.parent.parent
SCENARIOS = sorted((ROOT / "scenarios").glob("*.yaml"))
GOLDEN = Path(__file__).parent.parent / "golden"


def test_there_are_scenarios_that_matter() -> None:
    assert len(SCENARIOS) >= 8


def one_device(scenario: ddpsim.Scenario) -> BreakdownNs:
    """The last step of one device that holds all, without DDP."""
    job = resolve(scenario)
    program = compile_program(scenario, job.model, job.overheads, ddp=False)
    return steps_of(on_one_rank(program).slowest)[-1].breakdown()


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenarios_answer_soundly_on_one_screen(path: Path) -> None:
    scenario = ddpsim.load_scenario(path)
    result = ddpsim.simulate(scenario)
    parts = result.to_dict()["breakdown_s"].values()
    assert math.isclose(sum(parts), result.iteration_time_s.mean, abs_tol=1e-10)
    assert min(parts) >= 0
    interval = result.prediction_interval_s
    assert interval is not None
    assert interval.low < result.iteration_time_s.mean < interval.high
    assert result.scaling_efficiency > 0
    whole_update_s = 0.0
    in_hook = scenario.ddp.optimizer_in_backward or scenario.ddp.overlaps_optimizer
    if scenario.ddp.shards_model or in_hook:
        # one device would update all parameters, a rank its shard: of Llama 3.1 70B 694 ms of
        # 1.97 s, and 5.4 ms of 1.94 s on 128 GPUs. In a hook the update hides under the
        # backward. Without updates scaling stays below 1
        update_s = result.breakdown_s.optimizer
        whole_update_s = one_device(scenario).optimizer / 1e9 - update_s
    least_s = result.baselines_s.compute_only - whole_update_s
    assert least_s <= 1.001 * result.iteration_time_s.mean
    assert result.exposed_comm_s <= result.comm_time_s
    assert result.overlap_fraction is None or 0 <= result.overlap_fraction <= 1
    assert [bucket.index for bucket in result.buckets] == list(range(len(result.buckets)))
    assert all(b.ready_s <= b.start_s <= b.end_s for b in result.buckets)
    assert all(math.isfinite(number) for number in numbers(result.to_dict()))
    lines = render(result, path.name).splitlines()
    assert len(lines) <= 24
    assert max(len(line) for line in lines) <= 100


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenarios_say_what_they_show(path: Path) -> None:
    lines = path.read_text("utf-8").splitlines()
    comment = "\n".join(line for line in lines if line.startswith("#"))
    assert "Shows:" in comment
    assert "Expect:" in comment or "Try:" in comment


@pytest.mark.parametrize("name", ["resnet50-2x8-25gbit", "straggler", "gloo-cpu"])
def test_the_screen_is_as_recorded(name: str, golden: Any) -> None:
    scenario = load(name)
    result = ddpsim.simulate(scenario)
    verdict = ddpsim.judge(scenario, result, 0.5)
    golden(render(result, f"{name}.yaml", verdict) + "\n", GOLDEN / f"{name}.txt")


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [n for item in value.values() for n in numbers(item)]
    if isinstance(value, list):
        return [n for item in value for n in numbers(item)]
    return [value] if isinstance(value, (int, float)) else []


def test_the_same_bytes_whatever_the_hash_seed() -> None:
    outputs = {
        subprocess.run(
            [sys.executable, "-m", "ddpsim", "run", "scenarios/straggler.yaml", "--json"],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(outputs) == 1
    assert json.loads(outputs.pop())["schema"] == "ddpsim.result/1"


def test_expectations_of_the_scenarios() -> None:
    """What the comments promise."""
    assert predict("resnet50-8xa100").bottleneck.kind == "compute"
    assert predict("resnet50-8xa100").scaling_efficiency > 0.9
    slow = predict("resnet50-2x8-25gbit")
    assert slow.bottleneck.kind == "communication"
    assert 0.6 < slow.scaling_efficiency < 0.72
    ring = predict("resnet50-2x8-25gbit", "cluster.algorithm=ring")
    assert ring.exposed_comm_s > 2 * slow.exposed_comm_s
    assert predict("straggler").bottleneck.kind == "stragglers"
    ratio = mean_ms("straggler") / mean_ms("straggler", "cluster.stragglers=null")
    assert 1.15 < ratio < 1.22
    assert mean_ms("accumulation") < 2 * mean_ms("accumulation", "ddp.accumulation_steps=1")
    nothing_hidden = predict("slow-network")
    assert nothing_hidden.overlap_fraction is not None
    assert nothing_hidden.overlap_fraction < 0.1
    assert (
        nothing_hidden.throughput_samples_per_s < 1 / nothing_hidden.baselines_s.compute_only * 32
    )
    caps = [mean_ms("gpt2-bucket-choice", f"ddp.bucket_cap_mb={cap}") for cap in (25, 100, 500)]
    assert caps == sorted(caps)
