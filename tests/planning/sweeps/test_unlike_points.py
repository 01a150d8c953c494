"""Points that do not fit, or whose samples are not alike, are told from the others."""

from __future__ import annotations

import io
from csv import DictReader
from pathlib import Path
from typing import Any

import pytest

from ddpsim.planning.sweeps.grid import Grid
from ddpsim.planning.sweeps.sweep import sweep
from ddpsim.report.sweep import render_csv, render_sweep
from ddpsim.result.sweep import GOALS, Sweep

SMALL: dict[str, Any] = {
    "schema": "ddpsim/1",
    "workload": {"model": "llama-1b", "batch_per_rank": 2, "precision": "bf16"},
    "cluster": {"machine": "dgx-h100", "nodes": 1},
}
LARGE: dict[str, Any] = {
    "schema": "ddpsim/1",
    "workload": {
        "model": "llama-8b",
        "batch_per_rank": 2,
        "seq_len": 8192,
        "precision": "bf16",
        "compile": "blocks",
        "checkpointing": "selective",
        "optimizer": {"name": "adamw", "fused": True},
    },
    "ddp": {"strategy": "fully_shard"},
    "cluster": {"machine": "p5.48xlarge", "nodes": 8},
}
RESNET = Path(__file__).resolve().parents[3] / "scenarios" / "resnet50-2x8-25gbit.yaml"
GRID = ["workload.batch_per_rank=1,4", "workload.checkpointing=none,full"]


def of_large(*goals: str) -> Sweep:
    return sweep(LARGE, Grid.of(GRID), goals)


def rows(found: Sweep) -> list[str]:
    return render_sweep(found).splitlines()[3 : 3 + len(found.points)]


def test_points_that_do_not_fit_are_marked_where_columns_are_many() -> None:
    found = of_large("throughput")
    assert [point.usable is None for point in found.points] == [False, False, True, False]
    assert [row.split()[0] for row in rows(found)] == ["*", "1", "!", "4"]
    text = render_sweep(found)
    assert "memory" in text.splitlines()[2]
    assert "needs more memory" in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("columns", [70, 100])
@pytest.mark.parametrize("goal", GOALS)
def test_the_column_of_the_goal_is_shown(
    goal: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddpsim.report.sweep.screen_width", lambda: columns)
    heads = {"throughput": "samples/s", "per-gpu": "per GPU", "efficiency": "scaling"}
    head = render_sweep(of_large(goal)).splitlines()[2]
    assert heads.get(goal, "GPUs" if goal == "gpus" else goal) in head


def test_samples_of_other_lengths_are_ranked_by_tokens() -> None:
    found = sweep(SMALL, Grid.of(["workload.seq_len=64,2048"]))
    short, usual = found.points
    assert short.brief
    assert usual.brief
    assert short.brief.throughput_samples_per_s > usual.brief.throughput_samples_per_s
    assert found.best is usual
    per_s = [
        int(row["tokens_per_s"].split(".")[0]) for row in DictReader(io.StringIO(render_csv(found)))
    ]
    assert per_s[1] > per_s[0]
    assert per_s[1] == int(2048 * usual.brief.throughput_samples_per_s)
    text = " ".join(render_sweep(found).split())
    assert "best * workload.seq_len=2048 (tokens/s of all GPUs): the scenario as it is" in text
    assert "samples points differ in what a sample is (seq_len 64 to 2,048)" in text
    assert "tokens/s" in render_sweep(found).splitlines()[2]
    assert "samples/s" not in text


def test_samples_of_one_length_are_counted_as_samples() -> None:
    text = render_sweep(sweep(SMALL, Grid.of(["workload.batch_per_rank=1,2"])))
    assert "tokens/s" not in text
    assert "what a sample is" not in text


def test_images_of_other_sizes_do_not_compare() -> None:
    text = " ".join(render_sweep(sweep(RESNET, Grid.of(["workload.image_size=192,224"]))).split())
    assert "differ in what a sample is (image_size 192 to 224), which is another training" in text
    assert "so the best is of unlike work" in text


def test_a_point_that_is_as_good_is_not_the_scenario() -> None:
    """The host sets the time of both, so that the first of them is the best."""
    found = sweep(RESNET, Grid.of(["workload.image_size=192,224"]))
    assert found.best is found.points[0]
    assert found.points[0].brief
    assert found.own.brief
    rate = found.own.brief.throughput_samples_per_s
    assert found.points[0].brief.throughput_samples_per_s == rate
    text = " ".join(render_sweep(found).split())
    assert (
        "workload.image_size=192 (samples/s of all GPUs): as good as the scenario as it is" in text
    )


def test_a_default_that_is_stated_is_the_scenario_as_it_is() -> None:
    found = sweep(SMALL, Grid.of(["workload.seq_len=2048,4096"]))
    assert found.points[0].brief is found.own.brief
    assert dict(found.own.settings) == {"workload.seq_len": "2048"}


def test_models_with_unlike_samples_say_so() -> None:
    grid = Grid.of(["workload.model=resnet50,llama-1b,dlrm-dense"])
    found = sweep(SMALL | {"workload": {"model": "resnet50", "batch_per_rank": 2}}, grid)
    text = " ".join(render_sweep(found).split())
    assert "(image_size 224 or seq_len 2,048 or unknown)" in text
