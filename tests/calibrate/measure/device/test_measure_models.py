"""tools/measure_models.py: each step is a line at once, and a second run goes on."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="it measures models")

import measure_models
import torch
from measure_models import Key, Lines, plan, work

CPU = torch.device("cpu")


def ended(path: Path) -> list[dict[str, Any]]:
    found = [json.loads(text) for text in path.read_text("utf-8").splitlines()]
    return [line for line in found if "began" not in line]


def test_a_model_is_measured_in_every_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps of each in place of 26."""
    for count in ("_WARM_UP", "_BLOCKS", "_STEPS"):
        monkeypatch.setattr(measure_models, count, 1)
    path = tmp_path / "models.jsonl"
    work(path, ["mlp"], CPU, time.monotonic() + 100)
    found = ended(path)
    assert {Key(one["model"], one["batch"], one["mode"]) for one in found} == set(plan(["mlp"]))
    failed = {one["mode"]: one["error"] for one in found if "error" in one}
    assert list(failed) == ["fsdp1"]  # it takes no CPU
    assert "needs a non-CPU accelerator" in failed["fsdp1"]
    measured = [one for one in found if "error" not in one]
    assert all(one["step_s"] > 0 and one["parameters"] == 263168 for one in measured)

    text = path.read_text("utf-8")
    work(path, ["mlp"], CPU, time.monotonic() + 100)
    assert path.read_text("utf-8") == text


def test_what_ends_the_process_is_noted_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker is started again, and does the rest."""
    path, first = tmp_path / "models.jsonl", next(iter(plan(["mlp"])))
    codes = iter((-11, 0))

    class Worker:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.returncode = next(codes)
            done = Lines(path)
            if self.returncode:
                done.add(first, began=True)
                return
            for key in set(plan(["mlp"])) - done.ended():
                done.add(key, step_s=1.0)

    monkeypatch.setattr(measure_models.subprocess, "run", Worker)
    assert measure_models.main(["-o", str(path), "--only", "mlp"]) == 0
    failed = [one for one in ended(path) if "error" in one]
    assert failed == [first._asdict() | {"error": "the process ended with code -11"}]
