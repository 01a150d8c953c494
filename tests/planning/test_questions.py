"""Every question from Python: a file, a mapping or a scenario first, then options and settings."""

from __future__ import annotations

import doctest
import json
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

import ddpsim

SCENARIO = Path(__file__).parent.parent.parent / "scenarios" / "resnet50-nccl-log.yaml"
ALIKE = Path(__file__).parent.parent.parent / "scenarios" / "resnet50-2x8-25gbit.yaml"


def test_every_source_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scenario knows its files by where they are, wherever it is asked from."""
    own = ddpsim.run(SCENARIO)
    read = ddpsim.load_scenario(SCENARIO)
    mapping = YAML(typ="safe", pure=True).load(SCENARIO.read_text("utf-8"))
    with monkeypatch.context() as moved:
        moved.chdir(SCENARIO.parent)
        assert ddpsim.run(mapping) == own
    assert ddpsim.run(read) == ddpsim.simulate(SCENARIO) == ddpsim.simulate(read) == own


@pytest.mark.parametrize(
    "settings",
    [{"ddp.bucket_cap_mb": [1, 50]}, {"ddp__bucket_cap_mb": "[1,50]"}, {"bucket_cap_mb": (1, 50)}],
)
def test_settings_are_those_of_set(settings: dict[str, Any]) -> None:
    scenario = ddpsim.load_scenario(ALIKE, ["ddp.bucket_cap_mb=[1,50]"])
    assert ddpsim.run(ALIKE, **settings).to_dict() == ddpsim.simulate(scenario).to_dict()


def test_a_name_of_several_keys_or_none_is_refused() -> None:
    with pytest.raises(
        ddpsim.ScenarioError,
        match=r"bandwidth: unknown key\. Several sections have it, say which: workload",
    ):
        ddpsim.run(ALIKE, bandwidth="25 Gbit/s")
    with pytest.raises(ddpsim.ScenarioError, match="trials: unknown key"):
        ddpsim.compare(ALIKE, each_flag=True, trials=3)


def test_every_answer_is_short_and_drawn(tmp_path: Path) -> None:
    fewer = {"model": "resnet18", "nodes": 1, "gpus_per_node": 2}
    found = [
        ddpsim.run(ALIKE, **fewer),
        ddpsim.tune(ALIKE, **fewer),
        ddpsim.compare(ALIKE, each_flag=True, **fewer),
        ddpsim.explain_step(ALIKE, **fewer),
        ddpsim.plan(ALIKE, "1M samples", max_gpus=2, **fewer),
        ddpsim.diagnose(ALIKE, 0.095, **fewer),
        ddpsim.sweep(
            ALIKE, {"bucket_cap_mb": [1, 25, [1, 50]], "batch_per_rank": [32, 64]}, **fewer
        ),
    ]
    for each in found:
        assert 20 < len(repr(each)) < 200
        assert repr(each).startswith(f"<{type(each).__name__} of ")
        assert json.loads(json.dumps(each.to_dict()))["schema"].startswith("ddpsim.")
        assert each.plot().data
    assert len(found[-1].points) == 6
    page = ddpsim.write_report(ALIKE, tmp_path / "step.html", **fewer)
    assert page.read_text("utf-8").startswith("<!doctype html>")
    merged = ddpsim.write_trace(ALIKE, tmp_path / "trace", ranks=[0], steps=1, **fewer)
    assert json.loads(merged.read_text("utf-8"))["traceEvents"]


@pytest.mark.parametrize("question", [ddpsim.run, ddpsim.sweep])
def test_examples_run(question: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scenario.yaml").write_text(ALIKE.read_text("utf-8"), "utf-8")
    monkeypatch.chdir(tmp_path)
    (example,) = doctest.DocTestFinder().find(question, globs={"ddpsim": ddpsim})
    failures: list[str] = []
    assert doctest.DocTestRunner().run(example, out=failures.append).attempted
    assert not failures, "".join(failures)


def test_all_of_it_is_listed() -> None:
    assert dir(ddpsim) == sorted(ddpsim.__all__)
    assert all(getattr(ddpsim, name).__doc__ for name in ddpsim.__all__ if name != "__version__")
    with pytest.raises(ValueError, match="compare with what"):
        ddpsim.compare(ALIKE)
    scenario = ddpsim.load_scenario(ALIKE)
    assert ddpsim.judge(scenario, ddpsim.simulate(scenario), "57 ms").normal
