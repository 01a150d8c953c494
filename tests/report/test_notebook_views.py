"""What a notebook shows of a result is what `run` says, and what users wrote is only text."""

from __future__ import annotations

import doctest
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from page_reading import EVIL
from plan_scenarios import plan_of_imagenet
from sweep_of_caps import SCENARIO, swept

import ddpsim
from ddpsim.planning.compare import compare, each_flag
from ddpsim.result.model import Result
from ddpsim.result.sweep import Sweep
from ddpsim.scenario.document import load
from ddpsim.scenario.load import parse
from ddpsim.scenario.starters import preset_text
from ddpsim.units import format_duration, format_number

CAPS = "ddp.bucket_cap_mb=1,25,100"
NODES = "cluster.nodes=2,4"
CROWDED = "workload.batch_per_rank=32,100000"  # the second does not fit in memory


class Table(HTMLParser):
    """The cells of a table, row by row, its caption, and its tags."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.rows: list[list[str]] = []
        self.caption = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if not self.rows:
            self.caption += data.strip()
        elif self.rows[-1] and data.strip():
            self.rows[-1][-1] += data


def table(shown: Any) -> Table:
    read = Table(shown._repr_html_())
    assert read.tags <= {"table", "caption", "tr", "th", "td"}
    assert len({len(row) for row in read.rows}) == 1
    return read


def simulated(*settings: str) -> Result:
    return ddpsim.simulate(ddpsim.load_scenario(SCENARIO, settings))


@pytest.fixture(scope="module")
def result() -> Result:
    return simulated()


@pytest.fixture(scope="module")
def caps() -> Sweep:
    return swept(CAPS, NODES)


def test_a_result_is_a_table_of_its_parts(result: Result) -> None:
    rows = {name: rest for name, *rest in table(result).rows}
    interval = result.prediction_interval_s
    assert interval
    low, high = format_duration(interval.low), format_duration(interval.high)
    step = [format_duration(result.iteration_time_s.mean), f"80% interval {low} to {high}"]
    assert rows["step"] == step
    assert rows["bottleneck"] == [result.bottleneck.kind, result.bottleneck.text]
    assert rows["exposed comm"][0] == format_duration(result.exposed_comm_s)
    assert list(rows)[-6:] == [
        *("forward", "backward", "exposed comm", "optimizer", "data wait", "other")
    ]


def test_a_result_without_an_interval_says_so(result: Result) -> None:
    unknown = replace(result, prediction_interval_s=None)
    assert table(unknown).rows[0][2] == "no interval can be had"
    assert unknown.plot().data[-1].name == "step"


def test_names_are_only_text() -> None:
    name = f"name={json.dumps(EVIL)}"
    evil = simulated(name)
    assert evil.name == EVIL
    assert table(evil).caption.startswith(EVIL)
    assert table(swept(name, CAPS)).caption.startswith(EVIL)
    assert "<" not in evil.plot().layout.title.text
    assert "<" not in swept(name, CAPS).plot().layout.title.text


def test_a_sweep_is_a_row_a_point(caps: Sweep) -> None:
    head, *rows = table(caps).rows
    assert head[:4] == ["bucket_cap_mb", "nodes", "GPUs", "step"]
    assert len(rows) == len(caps.points) == 6
    for row, point in zip(rows, caps.points, strict=True):
        assert point.brief
        assert row[:2] == [setting.value for setting in point.settings]
        assert row[3] == format_duration(point.brief.iteration_time_s.mean)
        assert (row[-1] == "best") == (point is caps.best)


def test_a_point_that_cannot_be_had_says_why() -> None:
    found = swept(CROWDED, "cluster.nodes=2,0")
    assert [row[-1].partition(":")[0] for row in table(found).rows[1:]] == [
        *("best", "cannot be simulated", "does not fit in memory", "cannot be simulated")
    ]
    (line,) = found.plot().data
    assert (line.x, line.marker.symbol) == (("32", "100000"), ("circle", "circle-open"))


def test_a_comparison_is_a_row_a_change() -> None:
    document = load(SCENARIO, ())
    comparison = compare(parse(document), each_flag(document))
    _, *rows = table(comparison).rows
    known = [change for change in comparison.changes if not change.problem]
    fastest = min(known, key=lambda change: change.change_s)
    assert rows[0][0] == fastest.title
    assert rows[0][3] == f"{fastest.change:+.1%}"
    assert len(rows) == len(comparison.changes)


def test_a_plan_is_a_row_a_size() -> None:
    plan = plan_of_imagenet()
    head, *rows = table(plan).rows
    assert head[5] == "USD"
    (answer,) = (row for row in rows if "answer" in row[-1])
    assert answer[0] == f"{plan.answer.gpus:,}"
    assert answer[5] == format_number(plan.answer.cost)
    assert len(rows) == len(plan.sizes)


def test_the_bars_of_a_step_add_up(result: Result) -> None:
    *bars, step = result.plot().data
    mean_ms = result.iteration_time_s.mean * 1e3
    assert sum(bar.x[0] for bar in bars) == pytest.approx(mean_ms)
    assert step.x[0] == mean_ms
    interval = result.prediction_interval_s
    assert interval
    assert step.x[0] + step.error_x.array[0] == pytest.approx(interval.high * 1e3)
    assert step.x[0] - step.error_x.arrayminus[0] == pytest.approx(interval.low * 1e3)
    assert len({bar.marker.color for bar in bars}) == len(bars)


def test_a_line_is_what_differs_in_the_first_axis_alone(caps: Sweep) -> None:
    figure = caps.plot()
    assert figure.layout.xaxis.title.text == "ddp.bucket_cap_mb"
    for line, nodes in zip(figure.data, ("2", "4"), strict=True):
        assert line.name == f"cluster.nodes={nodes}"
        assert line.x == ("1", "25", "100")
        expected_s = simulated("ddp.bucket_cap_mb=25", line.name).iteration_time_s.mean
        assert line.y[1] == pytest.approx(expected_s * 1e3)


def test_a_sweep_without_an_axis_is_one_marker() -> None:
    (line,) = swept("cluster.nodes=4").plot().data
    assert line.y[0] == simulated("cluster.nodes=4").iteration_time_s.mean * 1e3


@pytest.mark.parametrize("library", ["polars", "pandas"])
def test_a_data_frame_has_the_rows(caps: Sweep, library: str) -> None:
    pytest.importorskip(library, reason="needs the extra test")
    frame = getattr(caps, f"to_{library}")()
    rows = caps.rows()
    assert frame.shape == (6, len(rows[0]))
    assert list(frame.columns) == list(rows[0])
    steps_s = [row["iteration_time_s"] for row in rows]
    assert list(frame["iteration_time_s"]) == steps_s
    assert list(frame["best"]) == [row["best"] for row in rows]


@pytest.mark.parametrize(
    ("library", "package"), [("polars", "'ddpsim[parquet]'"), ("pandas", "pandas")]
)
def test_a_missing_library_is_named(
    caps: Sweep, monkeypatch: pytest.MonkeyPatch, library: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match="not installed") as missing:
        getattr(caps, f"to_{library}")()
    assert str(missing.value) == f"{library} is not installed: pip install {package}"


def test_a_table_needs_no_plotly() -> None:
    script = (
        "import ddpsim, sys\n"
        f"ddpsim.simulate(ddpsim.load_scenario({str(SCENARIO)!r}))._repr_html_()\n"
        "print([name for name in ('plotly', 'jinja2', 'polars', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["[]"]


@pytest.mark.parametrize(
    ("method", "library"),
    [
        (Result.plot, "plotly"),
        (Sweep.plot, "plotly"),
        (Sweep.to_polars, "polars"),
        (Sweep.to_pandas, "pandas"),
    ],
    ids=lambda given: getattr(given, "__qualname__", ""),
)
def test_examples_of_docstrings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: Callable[..., Any], library: str
) -> None:
    pytest.importorskip(library, reason="needs the extra test")
    (tmp_path / "scenario.yaml").write_text(preset_text("resnet50-2x8-25gbit"), "utf-8")
    monkeypatch.chdir(tmp_path)
    failures: list[str] = []
    (example,) = doctest.DocTestFinder().find(method, globs={"ddpsim": ddpsim})
    assert example.examples
    doctest.DocTestRunner().run(example, out=failures.append)
    assert not failures, "".join(failures)
