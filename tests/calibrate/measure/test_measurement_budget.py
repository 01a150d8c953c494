"""How many rounds are measured: the time budget, and rounds that a hypervisor disturbed."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="measuring needs torch")

from measured.measuring import small_plan

from calibrate.measure.clock import Lap
from calibrate.measure.cluster.plan import Options, Slot, Task, Team
from calibrate.measure.cluster.session import measure
from calibrate.measure.host.machine import stolen_s


def test_what_takes_longer_than_the_time_left_is_left_out(tmp_path: Path, alone: None) -> None:
    """Twice 20 copies of 512 MiB do not fit into half a second; the smallest does."""
    team, sizes = Team("none", 1, 1, (0,)), (4096, 512 * 2**20)
    slots = [Slot("device_copy", "alone", size) for size in sizes]
    plan = [Task((slot,), team, (20, 40)) for slot in slots]
    record = measure(Options(output=tmp_path / "record.json", time_budget_s=0.5), plan)
    assert [m.size_bytes for m in record.measurements] == [4096]
    assert "512 MiB: would take " in record.environment.details["skipped"]


def test_the_budget_counts_rounds_by_the_clock(
    tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round of 20 ms tells of a thousand pieces: of half a second it has 25 at most, not 40."""

    def slow(_task: Task, job: Any, _loader: Any) -> Any:
        def run() -> list[Lap]:
            start = job.clock.mark()
            time.sleep(0.02)
            return [Lap(start, job.clock.mark(), 1000)]

        return run

    monkeypatch.setattr("calibrate.measure.cluster.session.build_round", slow)
    plan = [replace(small_plan()[0], repetitions=(3, 40))]
    record = measure(Options(output=tmp_path / "r.json", time_budget_s=0.5), plan)
    (measured,) = record.measurements
    assert 3 <= len(measured.samples_s) <= 25


def test_a_measurement_that_a_hypervisor_disturbed_is_taken_again(
    tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after of each try: the second of three steals least, all steal too much."""
    clock = iter([0.0, 30.0, 30.0, 31.0, 31.0, 91.0])
    monkeypatch.setattr("calibrate.measure.cluster.session.stolen_s", lambda: next(clock))
    record = measure(Options(output=tmp_path / "r.json", most_repetitions=2), small_plan()[:1])
    (note,) = [m.notes[-1] for m in record.measurements]
    assert note.startswith("the hypervisor ran others on these cores for ")
    assert next(clock, None) is None

    calm = iter([0.0, 30.0, 30.0, 30.0])
    monkeypatch.setattr("calibrate.measure.cluster.session.stolen_s", lambda: next(calm))
    record = measure(Options(output=tmp_path / "s.json", most_repetitions=2), small_plan()[:1])
    assert not any("hypervisor" in note for m in record.measurements for note in m.notes)


def test_stolen_time_is_that_of_the_cores_that_a_process_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    assert stolen_s(tmp_path) == 0
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2}, raising=False)
    tick = os.sysconf("SC_CLK_TCK")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/stat").write_text(
        f"cpu  1 2 3 4 5 6 7 999 9 10\ncpu0 1 2 3 4 5 6 7 {tick} 9 10\n"
        f"cpu1 1 2 3 4 5 6 7 500 9 10\ncpu2 1 2 3 4 5 6 7 {2 * tick} 9 10\nintr 1 2 3\n"
    )
    assert stolen_s(tmp_path) == 1.5
