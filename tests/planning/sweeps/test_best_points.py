"""The best point, the flat region around it and the front, by their definitions."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sweep_of_caps import swept

from ddpsim.planning.sweeps.grid import Grid
from ddpsim.planning.sweeps.sweep import sweep
from ddpsim.report.sweep import render_csv, render_sweep
from ddpsim.result.sweep import FLAT, GOALS, Point, Sweep
from ddpsim.settings import Setting

CAPS = "ddp.bucket_cap_mb=default,1,5,25,50"
CUT = swept("ddp.bucket_cap_mb=1,25")


def made(*values: tuple[float, int, bool]) -> Sweep:
    """Points of one axis with a throughput, a world size, and whether they fit."""
    from dataclasses import replace

    brief = CUT.points[0].brief
    assert brief
    memory = brief.memory_bytes_per_gpu
    small = replace(memory, device=1)
    points = tuple(
        Point(
            (Setting("a", str(i)),),
            replace(
                brief,
                throughput_samples_per_s=rate,
                world_size=gpus,
                memory_bytes_per_gpu=memory if fits else small,
            ),
        )
        for i, (rate, gpus, fits) in enumerate(values)
    )
    axes = ((("a",), tuple((str(i),) for i in range(len(values)))),)
    own = Point((Setting("a", "1"),), points[1].brief)
    return Sweep("made", (), axes, ("throughput", "gpus"), own, points)


def test_what_is_flat() -> None:
    (region,) = made(
        (99.9, 1, True), (99.81, 1, True), (100, 1, True), (99.7, 1, True)
    ).flat_regions()
    assert region.values == (("0",), ("1",), ("2",))
    assert region.keep == ("1",)  # the scenario's own
    (region,) = made((100, 1, True), (50, 1, True), (99.9, 1, False)).flat_regions()
    assert region.values == (("0",),)
    assert region.keep == ("0",)


@given(
    st.lists(
        st.tuples(st.integers(1, 6).map(float), st.integers(1, 6), st.booleans()),
        min_size=2,
        max_size=12,
    )
)
def test_best_front_and_flat_by_definition(values: list[tuple[float, int, bool]]) -> None:
    found = made(*values)
    usable = [point for point in found.points if point.usable]
    goals = [GOALS[name] for name in found.goals]

    def figures(point: Point) -> tuple[float, float]:
        assert point.brief
        return goals[0].of(point.brief), -goals[1].of(point.brief)

    def beaten(point: Point) -> bool:
        mine = figures(point)
        return any(
            figures(other) != mine
            and all(o >= m for o, m in zip(figures(other), mine, strict=True))
            for other in usable
        )

    best = found.best
    assert (best is None) == (not usable)
    if best is None:
        assert not found.flat_regions()
        assert "none: no point fits into the memory of its GPUs" in render_sweep(found)
        return
    most = figures(best)[0]
    assert most == max(figures(point)[0] for point in usable)
    assert {figures(p) for p in found.front} == {figures(p) for p in usable if not beaten(p)}
    assert len({figures(p) for p in found.front}) == len(found.front)
    (region,) = found.flat_regions()
    flat = {p.settings[0].value for p in usable if figures(p)[0] >= (1 - FLAT) * most}
    assert {value for (value,) in region.values} == flat


def test_csv_json_and_parquet_say_the_same(tmp_path: Path) -> None:
    found = swept(CAPS, "cluster.nodes=2,zwei")
    (tmp_path / "out.csv").write_text(render_csv(found))
    rows = list(csv.DictReader(io.StringIO(render_csv(found))))
    points = json.loads(json.dumps(found.to_dict()))["points"]
    assert len(rows) == len(points) == 10
    for row, point in zip(rows, points, strict=True):
        assert row == {k: "" if v is None else str(v) for k, v in point.items()}
    polars = pytest.importorskip("polars", reason="needs the extra parquet")
    from ddpsim.report.sweep import render_parquet

    (tmp_path / "out.parquet").write_bytes(render_parquet(found))
    assert polars.read_parquet(tmp_path / "out.parquet").to_dicts() == points


@pytest.mark.parametrize(
    "goals",
    [["speed"], (), "throughput", ["step", "gpus", "memory"], ["step", "step"]],
)
def test_goals_are_checked_before_any_point(goals: Any) -> None:
    with pytest.raises(ValueError, match=r"^goals is .*; wanted a list of one or two of through"):
        sweep("nowhere.yaml", Grid.of([]), goals)
