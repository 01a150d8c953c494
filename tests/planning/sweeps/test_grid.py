"""The points of a grid: axes from settings and from CSV files."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpsim.errors import ScenarioError
from ddpsim.planning.sweeps.grid import Axis, Grid
from ddpsim.planning.sweeps.sweep import sweep

ROOT = Path(__file__).resolve().parents[3]
SCENARIO = ROOT / "scenarios" / "resnet50-2x8-25gbit.yaml"


def test_points_come_in_the_order_of_the_grid() -> None:
    points = list(Grid.of(["b=1,2", "c=x", "a=[1,25],'p, q',{k: 1, l: 2}"]))
    assert points[0] == (("b", "1"), ("a", "[1,25]"))
    assert [str(s) for s in points[4]] == ["b=2", "a='p, q'"]
    assert [s[1].value for s in points[:3]] == ["[1,25]", "'p, q'", "{k: 1, l: 2}"]


VALUES = st.text("abc 1.", min_size=1).map(str.strip).filter(bool)


@given(st.lists(st.one_of(VALUES, st.lists(VALUES).map(lambda v: f"[{','.join(v)}]")), min_size=1))
def test_a_setting_splits_at_its_own_commas_alone(values: list[str]) -> None:
    if len(set(values)) < len(values):
        with pytest.raises(ScenarioError, match="stands there twice"):
            Axis.of_setting("key=" + ",".join(values))
        return
    assert Axis.of_setting("key=" + ", ".join(values)).values == tuple((v,) for v in values)


def test_keys_move_together(tmp_path: Path) -> None:
    file = tmp_path / "axis.csv"
    file.write_text(
        "cluster.nodes, workload.batch_per_rank\n1, 64\n\n2, 32\n", encoding="utf-8-sig"
    )
    found = sweep(SCENARIO, Grid.of(["ddp.static_graph=true,false"], [file]))
    assert [p.brief and p.brief.world_size for p in found.points] == [8, 16, 8, 16]
    assert found.points[3].settings[1:] == (
        ("cluster.nodes", "2"),
        ("workload.batch_per_rank", "32"),
    )
    assert found.own.settings[1:] == (("cluster.nodes", "2"), ("workload.batch_per_rank", "64"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["a"], "--set a: write --set key.path=1,2,3"),
        (["a=1,,2"], "--set a=1,,2: a value is missing between two commas, or at an end"),
        (["a=1,2,1"], "--set a=1,2,1: 1 stands there twice"),
        (["a=1,2", "a=3,4"], "a: two axes move this key; leave one of them out"),
        (["a=1,2", "a=3"], "a: an axis moves this key, and --set fixes it; leave one out"),
    ],
)
def test_wrong_axes(settings: list[str], said: str) -> None:
    with pytest.raises(ScenarioError) as raised:
        Grid.of(settings)
    assert str(raised.value) == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n", ":1: wanted a row of dotted keys, such as"),
        ("a,b\n1,2\n3\n", ":3: wanted 2 cells, one for each key, got 1; a value"),
        ("a,b\n1,2\n1,2\n", ": 1, 2 stands there twice"),
        ("a;b\n1;2\n", ":1: separate the cells by commas, not by semicolons"),
    ],
)
def test_wrong_axis_files(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "axis.csv"
    file.write_text(text)
    with pytest.raises(ScenarioError) as raised:
        Axis.read(file)
    assert str(raised.value).startswith(f"{file}{said}")


def test_an_axis_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError) as raised:
        Axis.read(tmp_path / "no.csv")
    said = f"--axis {tmp_path / 'no.csv'}: cannot be read: No such file or directory"
    assert str(raised.value) == said
