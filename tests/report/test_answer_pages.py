"""Pages of sweeps, comparisons and searches draw what the answers hold, with their intervals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chromium import Browser
from outcome import Outcome
from page_reading import EVIL
from sweep_of_caps import SCENARIO, swept

from ddpsim.planning.sweeps.sweep import with_intervals
from ddpsim.prediction.api import load_scenario, predict
from ddpsim.report.page.charts import comparison_charts
from ddpsim.report.page.shell import answer_page
from ddpsim.result.changes import Change, Comparison

CAPS = "ddp.bucket_cap_mb=1,25"
CHANGES = Comparison(
    EVIL,
    16,
    1024,
    0.06,
    None,
    (
        Change("slower", ("a=1",), 0.07, 0.01, 0.1, 0.005, 0.015),
        Change("none such", problem="cannot be had"),
        Change("unsure", ("b=1",), 0.059, -0.001, -0.02, -0.002, 0.001),
        Change(EVIL, ("c=1",), 0.05, -0.01, -0.2, -0.02, -0.004),
    ),
)


def figures(page: Path) -> dict[str, Any]:
    text = page.read_text("utf-8")
    found: dict[str, Any] = json.loads(text.split('id="data">')[1].split("</script>")[0])
    return found["figures"]


def test_each_command_writes_its_chart(cli: Callable[..., Outcome], tmp_path: Path) -> None:
    file, page = str(SCENARIO), tmp_path / "page.html"
    assert cli("sweep", file, "--set", CAPS, "-o", str(page)).code == 0
    (line,) = figures(page)["sweep"]["data"]
    interval = predict(load_scenario(file, ["ddp.bucket_cap_mb=25"])).prediction_interval_s
    assert interval
    assert line["x"] == ["1", "25"]
    assert line["y"][1] + line["error_y"]["array"][1] == pytest.approx(interval.high * 1e3)
    assert line["y"][1] - line["error_y"]["arrayminus"][1] == pytest.approx(interval.low * 1e3)
    assert "no interval here" not in page.read_text("utf-8")

    faster = str(SCENARIO.with_name("resnet50-8xa100.yaml"))
    told = json.loads(cli("compare", file, faster, "--json", "-o", str(page)).out)
    (bars,) = figures(page)["changes"]["data"]
    assert bars["x"] == pytest.approx([told["changes"][0]["change_s"] * 1e3])

    tuned = json.loads(
        cli("tune", file, "--set", "run.iterations=2", "--json", "-o", str(page)).out
    )
    drawn = figures(page)
    assert drawn["pick"]["data"][0]["x"][0] == pytest.approx(tuned["pick"]["change_s"] * 1e3)
    assert set(tuned["flat_caps"]) <= set(drawn["caps"]["data"][0]["y"])

    done = cli("compare", file, faster, "-o", file)
    assert "Invalid value for -o: is the scenario itself" in done.err


def test_of_a_large_sweep_the_best_has_an_interval() -> None:
    found = with_intervals(SCENARIO, swept(CAPS), most=1)
    assert [point for point in found.points if point.interval_s] == [found.best]


def test_the_page_opens_and_names_are_only_text(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(answer_page(CHANGES.name, comparison_charts(CHANGES), EVIL), "utf-8")
    (bars,) = figures(page)["changes"]["data"]
    assert bars["marker"]["color"] == ["--hidden", "--idle", "--exposed"]
    browser.open(page)
    assert browser.complaints == []
    assert browser.evaluate("document.title") == EVIL
    assert browser.evaluate("document.querySelectorAll('.drawing .bars .point').length") == 3
    assert browser.evaluate("document.querySelector('pre').textContent") == EVIL
