"""The notebook runs, and shows what the program says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import ddpsim

ROOT = Path(__file__).resolve().parent.parent.parent
SCENARIO = ROOT / "scenarios" / "resnet50-2x8-25gbit.yaml"


@pytest.fixture(scope="module")
def found() -> Any:
    """What the notebook's cells define."""
    pytest.importorskip("marimo", reason="needs marimo")
    path = ROOT / "docs" / "explore.py"
    spec = importlib.util.spec_from_file_location("explore", path)
    assert spec
    assert spec.loader
    notebook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(notebook)
    return notebook.app.run()[1]


def test_its_result_is_that_of_run(found: Any) -> None:
    expected = ddpsim.simulate(ddpsim.load_scenario(SCENARIO, ["ddp.bucket_cap_mb=25"]))
    assert found["result"].iteration_time_s == expected.iteration_time_s
    shown_ms = sum(bar.x[0] for bar in found["breakdown"].data)
    assert shown_ms == pytest.approx(expected.iteration_time_s.mean * 1e3)


def test_its_curve_is_the_sweep(found: Any) -> None:
    caps = found["caps"]
    (line,) = found["curve"].data
    assert list(line.x) == ["1", "2", "5", "10", "25", "50", "100", "250"]
    assert line.y[4] == pytest.approx(found["result"].iteration_time_s.mean * 1e3)
    assert min(line.y) == pytest.approx(caps.best.brief.iteration_time_s.mean * 1e3)
