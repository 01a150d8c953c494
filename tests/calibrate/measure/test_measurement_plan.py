"""The plan of measurements: groups of ranks, tasks that differ, and progress on the screen."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="measuring needs torch")

from rich.console import Console

from calibrate.measure.cluster.plan import MIB, Task, default_plan, teams
from calibrate.measure.cluster.session import Budget, RoundTime
from calibrate.measure.ranks.launch import Reporter
from calibrate.records.record import COPIES_IN, TOGETHER, Layout


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


def _round(task: Task) -> RoundTime:
    """What a task's collectives take on two ranks at 1 Gbit/s, and what it waits for."""
    kind, size = task.first.kind, task.first.size_bytes
    wire_s = 8.4e-9 * size + 0.3e-3
    if kind in ("all_reduce", "reduce_scatter", "broadcast", "all_gather", "point_to_point"):
        timed_s = (0.6 if kind == "all_gather" else 1.0) * len(task.slots) * wire_s
        return RoundTime(timed_s, timed_s)
    if kind == "compute":
        return RoundTime(1.3, 1.3)
    waits_s = 0.14 if TOGETHER in task.first.variant or COPIES_IN in task.first.variant else 0.0
    timed_s = 0.01 + 1e-10 * size
    return RoundTime(waits_s + timed_s, timed_s)


def _measured(total_s: float) -> list[Task]:
    """What a budget leaves time for."""
    layout = Layout(nodes=2, gpus_per_node=1, line_rate_bytes_per_s=None)
    plan = default_plan(layout, gpu=False)
    budget, found = Budget(total_s, [task.weight for task in plan]), []
    for task in plan:
        share_s, taken = budget.share_s(), _round(task)
        least_s = budget.least_s(task)
        is_within = taken.whole_s * (1 + task.repetitions[0]) <= total_s - budget.spent_s
        if share_s > 0 and least_s <= 1.5 * share_s and is_within:
            rounds = min(task.repetitions[1], max(task.repetitions[0], share_s / taken.whole_s - 3))
            budget.spent_s += (rounds + 3) * taken.whole_s
            budget.rounds[task.series] = task.first.size_bytes, taken
            found.append(task)
    return found


@pytest.mark.parametrize("budget_s", [60.0, 90.0, 600.0])
def test_a_short_budget_leaves_out_sizes_and_no_kind(budget_s: float) -> None:
    found = _measured(budget_s)
    largest: dict[str, int] = {}
    for task in found:
        largest[task.first.kind] = max(task.first.size_bytes, largest.get(task.first.kind, 0))
    layout = Layout(nodes=2, gpus_per_node=1, line_rate_bytes_per_s=None)
    assert largest.keys() == {task.first.kind for task in default_plan(layout, gpu=False)}
    for kind in ("all_reduce", "reduce_scatter", "all_gather", "broadcast"):
        assert largest[kind] >= 4 * MIB


def test_the_usual_budget_measures_copies_of_all_ranks_at_once() -> None:
    """Their rounds wait for an all-reduce of 16 MiB, which larger copies do not lengthen."""
    together = [task.first for task in _measured(600.0) if TOGETHER in task.first.variant]
    assert {slot.size_bytes for slot in together} == {MIB, 64 * MIB}
    assert len(together) == 6


def test_a_larger_message_lengthens_what_is_timed_of_a_round() -> None:
    assert RoundTime(0.15, 0.01).of_larger(64) == pytest.approx(0.14 + 0.64)
    assert RoundTime(0.15, 0.01).of_larger(0.5) == 0.15
    assert RoundTime(0.01, 0.02).of_larger(2) == pytest.approx(0.02)
