"""The plan of measurements: groups of ranks, tasks that differ, and progress on the screen."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="measuring needs torch")

from rich.console import Console

from calibrate.measure.cluster.plan import default_plan, teams
from calibrate.measure.ranks.launch import Reporter
from calibrate.records.record import Layout


def test_groups_differ_from_each_other() -> None:
    def named(nodes: int, gpus: int) -> list[tuple[str, tuple[int, ...]]]:
        layout = Layout(nodes=nodes, gpus_per_node=gpus, line_rate_bytes_per_s=None)
        return [(team.group, team.ranks) for team in teams(layout)]

    assert named(1, 1) == []
    assert named(1, 2) == [("world", (0, 1))]
    assert named(2, 1) == [("world", (0, 1))]
    assert named(2, 2) == [
        ("world", (0, 1, 2, 3)), ("intra_node", (0, 1)), ("one_per_node", (0, 2)),
    ]  # fmt: skip
    assert [group for group, _ in named(3, 4)] == [
        "world", "intra_node", "one_per_node", "pair", "pair",
    ]  # fmt: skip


@pytest.mark.parametrize("layout", [(1, 1), (1, 2), (2, 4), (3, 1)])
def test_no_two_tasks_of_a_plan_yield_the_same_measurement(layout: tuple[int, int]) -> None:
    nodes, gpus = layout
    plan = default_plan(
        Layout(nodes=nodes, gpus_per_node=gpus, line_rate_bytes_per_s=None),
        gpu=True,
        data_loader="a:b",
    )
    keys = [key for task in plan for key in task.keys]
    assert len(keys) == len(set(keys))


def test_progress_is_plain_lines_without_a_terminal(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as file:
        with Reporter(1, speaks=True, console=Console(file=file)) as reporter:
            reporter.begin("all_reduce")
            reporter.done("measured [1]")
        with Reporter(1, speaks=False, console=Console(file=file)) as reporter:
            reporter.done("not said")
    assert (tmp_path / "out").read_text() == "measured [1]\n"
