"""The page of `ddpsim report`: true figures, one file, and in a real browser it moves."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from chromium import Browser, chromium
from hypothesis import given, settings
from hypothesis import strategies as st
from outcome import Outcome
from random_jobs import models, scenarios

import ddpsim
from ddpsim.cluster.build import build_network
from ddpsim.engine.noise import draw_slowdowns
from ddpsim.engine.request import Request
from ddpsim.engine.run import run
from ddpsim.planning.storyboard import storyboard
from ddpsim.prediction.program import compile_program
from ddpsim.report.page import page
from ddpsim.result.metrics import union_ns
from ddpsim.result.storyboard import DrawnRank, Storyboard, drawn_step
from ddpsim.result.timeline import MessageSpan
from ddpsim.scenario.schema import Scenario
from ddpsim.units import format_duration
from ddpsim.workload.model import Model

SCENARIOS = Path(__file__).parent.parent.parent / "scenarios"
SLOW_NETWORK = SCENARIOS / "resnet50-2x8-25gbit.yaml"
EVIL = "</script><img src=x onerror=document.title=1>{{ 7*7 }} & <b>"
SECTIONS = ("timeline", "buckets", "breakdown", "sweep", "scaling", "sensitivity", "trust")
Cli = Callable[..., Outcome]


class Page(HTMLParser):
    """Tags with their attributes, and the content of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.title = ""
        self.scripts: list[str] = []
        self._inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside == "title":
            self.title += data
        elif self._inside != "style":
            self.words += data

    @property
    def data(self) -> Any:
        def refuse(constant: str) -> None:
            raise AssertionError(f"{constant} in JSON")

        return json.loads(self.scripts[0], parse_constant=refuse)

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def board() -> Storyboard:
    return storyboard(SLOW_NETWORK, [f"name={json.dumps(EVIL)}"])


@pytest.fixture(scope="module")
def noisy() -> Storyboard:
    return storyboard(SCENARIOS / "straggler.yaml", ["run.iterations=3", "ddp.bucket_cap_mb=[2,7]"])


@pytest.fixture(scope="module")
def gloo() -> Storyboard:
    return storyboard(SCENARIOS / "gloo-cpu.yaml")


@pytest.fixture(scope="module")
def measured() -> Storyboard:
    return storyboard(SCENARIOS / "resnet50-nccl-log.yaml")


def exposed_ns(rank: DrawnRank) -> int:
    return union_ns(piece for comm in rank.collectives for piece in comm.exposed)


def in_flight_ns(rank: DrawnRank) -> int:
    return union_ns((comm.joined_ns, comm.end_ns) for comm in rank.collectives)


@pytest.mark.parametrize("name", ["board", "gloo", "measured"])
def test_hidden_and_exposed_are_the_results_own(name: str, request: pytest.FixtureRequest) -> None:
    for choice in request.getfixturevalue(name).choices:
        slowest = choice.step.ranks[0]
        assert slowest.is_slowest
        assert slowest.left_out == 0
        assert exposed_ns(slowest) == slowest.exposed_ns
        assert slowest.exposed_ns / 1e9 == pytest.approx(choice.result.exposed_comm_s, rel=1e-15)
        whole_ns = slowest.hidden_ns + slowest.exposed_ns
        assert in_flight_ns(slowest) == whole_ns
        assert whole_ns / 1e9 == pytest.approx(choice.result.comm_time_s, rel=1e-15)


def test_of_steps_that_vary_the_median_one_is_drawn(noisy: Storyboard) -> None:
    for choice in noisy.choices:
        assert choice.step.length_ns / 1e9 == choice.result.iteration_time_s.p50
        for rank in choice.step.ranks:
            assert exposed_ns(rank) == rank.exposed_ns
        ranks = [rank.ranks for rank in choice.step.ranks]
        assert ranks == [(3,), (0,), (7,)]
    waits = [rank.exposed_ns for rank in noisy.choices[0].step.ranks]
    assert waits[1] > 100 * waits[0]  # who waits is not who is slow


@settings(max_examples=60, deadline=None)
@given(scenarios(noisy=True), models(), st.integers(0, 8))
def test_a_drawn_step_loses_nothing(scenario: Scenario, model: Model, rank: int) -> None:
    program = compile_program(scenario, model)
    slowdowns = draw_slowdowns(scenario.cluster, scenario.run, program.warmup + program.iterations)
    size = scenario.cluster.world_size
    request = Request(program, build_network(scenario).cost, size, slowdowns)
    timeline = run(request, "reference").timeline
    drawn = drawn_step(timeline, [rank % size], lambda _: None)
    for lanes in drawn.ranks:
        assert exposed_ns(lanes) == lanes.exposed_ns
        assert in_flight_ns(lanes) == lanes.exposed_ns + lanes.hidden_ns
        spans = lanes.compute
        assert all(a.end_ns <= b.start_ns for a, b in pairwise(spans))
        for lane in {comm.lane for comm in lanes.collectives}:
            own = sorted((c.joined_ns, c.end_ns) for c in lanes.collectives if c.lane == lane)
            assert all(a[1] <= b[0] for a, b in pairwise(own))
    assert {rank % size, timeline.slowest_rank} == {n for r in drawn.ranks for n in r.ranks}


def test_ring_steps_are_the_plain_models(tmp_path: Path) -> None:
    """Ranks that join together over equal links: the equal parts are the messages themselves."""
    source = {
        "schema": "ddpsim/1",
        "workload": {"model": "resnet18", "batch_per_rank": 8, "precision": "amp-bf16"},
        "cluster": {
            "nodes": 1,
            "gpus_per_node": 4,
            "device": "a100-sxm-40gb",
            "algorithm": "ring",
        },
        "run": {"iterations": 1},
    }
    scenario = ddpsim.load_scenario(source)
    messages: list[MessageSpan] = []
    timeline = ddpsim.observe(scenario, [0], messages.append)
    start_ns = timeline.slowest.step_ends_ns[-2]
    ends = [m.end_ns - start_ns for m in messages if m.target == 0 and m.end_ns > start_ns]
    step = storyboard(source).choices[0].step
    drawn = [
        comm.ring_start_ns + (comm.end_ns - comm.ring_start_ns) * (i + 1) / comm.ring_steps
        for comm in step.ranks[0].collectives
        if comm.bucket >= 0
        for i in range(comm.ring_steps)
    ]
    assert drawn
    assert {comm.ring_steps for comm in step.ranks[0].collectives if comm.bucket >= 0} == {6}
    nearest = [min(abs(end - at) for end in ends) for at in drawn]
    assert max(nearest) < 1


def test_every_bucket_is_in_the_page(board: Storyboard) -> None:
    data = Page(page(board)).data["timeline"]
    assert [choice["cap"] for choice in data["choices"]] == [
        "default", "1", "5", "10", "25", "50", "100",
    ]  # fmt: skip
    for drawn, choice in zip(data["choices"], board.choices, strict=True):
        origin_ns = choice.step.backward_start_ns
        found = {c["bucket"]: c for c in drawn["ranks"][0]["collectives"] if c["bucket"] >= 0}
        assert len(found) == len(choice.result.buckets)
        for bucket in choice.result.buckets:
            comm = found[bucket.index]
            assert (comm["size_bytes"], comm["num_params"]) == (
                bucket.size_bytes,
                bucket.num_params,
            )
            times = [(comm[key] - origin_ns) / 1e9 for key in ("ready_ns", "met_ns", "end_ns")]
            assert times == [bucket.ready_s, bucket.start_s, bucket.end_s]


def test_the_page_is_whole_and_semantic(board: Storyboard) -> None:
    found = Page(page(board))
    assert found.of("html") == [{"lang": "en"}]
    ids = [attributes["id"] for _, attributes in found.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {*SECTIONS, "left-out"} <= set(ids)
    assert len(found.of("h1")) == 1
    assert len(found.of("caption")) == len(found.of("table"))
    assert all(attributes.get("scope") in {"col", "row"} for attributes in found.of("th"))
    labelled = {attributes["for"] for attributes in found.of("label")}
    assert labelled == {"cap", "rank"}
    anchors = {(attributes["href"] or "")[1:] for attributes in found.of("a")}
    assert anchors <= set(ids)
    for name, part in found.tags:
        assert part.get("role") != "img" or part["aria-label"], name


@pytest.mark.parametrize("name", ["board", "noisy", "gloo", "measured"])
def test_figures_are_plotlys(name: str, request: pytest.FixtureRequest) -> None:
    figures = Page(page(request.getfixturevalue(name))).data["figures"]
    assert set(figures) == {"sweep", "scaling", "sensitivity"}
    colours = re.compile(r'"--[a-z-]+"')
    for figure in figures.values():
        go.Figure(json.loads(colours.sub('"#123456"', json.dumps(figure))))


def test_colours_are_the_style_sheets(board: Storyboard) -> None:
    text = page(board)
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)
    assert style
    light, _, dark = style[1].partition("prefers-color-scheme: dark")
    assert dark
    used = set(re.findall(r'"(--[a-z-]+)"', json.dumps(Page(text).data)))
    assert used <= set(re.findall(r"(--[a-z-]+):", light))


def test_the_same_input_gives_the_same_bytes(measured: Storyboard) -> None:
    again = storyboard(SCENARIOS / "resnet50-nccl-log.yaml")
    assert page(again) == page(measured)


def test_the_page_needs_no_network(board: Storyboard) -> None:
    text = page(board)
    found = Page(text)
    for tag, attributes in found.tags:
        assert "src" not in attributes, tag
        assert (attributes.get("href") or "#").startswith("#"), tag
        assert not any(key.startswith("on") for key in attributes), tag
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)
    assert style
    assert "url(" not in style[1]
    assert "@import" not in style[1]
    (policy,) = [a["content"] for a in found.of("meta") if a.get("http-equiv")]
    assert policy
    assert policy.startswith("default-src 'none'; ")
    assert "http" not in policy
    assert len(text) < 6_000_000


def test_names_are_only_text(board: Storyboard) -> None:
    found = Page(page(board))
    assert found.title == EVIL
    assert EVIL in found.words
    assert not found.of("img")
    assert len(found.scripts) == 3


def test_names_of_devices_are_only_text() -> None:
    device = {
        "name": EVIL,
        "peak_flops": {"fp32": "9 TFLOP/s", "bf16": "150 TFLOP/s"},
        "memory": "40 GB",
        "memory_bandwidth": "1 TB/s",
    }
    slower = json.dumps({1: {"device": device}}).replace('"1"', "1")
    found = Page(page(storyboard(SLOW_NETWORK, [f"cluster.other_nodes={slower}"])))
    assert f"Held up by node 1's {EVIL}" in found.words
    assert not found.of("img")
    assert len(found.scripts) == 3


def test_what_cannot_be_simulated_is_named(measured: Storyboard) -> None:
    (one,) = measured.scaling
    assert one == measured.result
    settings_left_out = [entry.what for entry in measured.left_out]
    assert settings_left_out == [
        "--set cluster.nodes=2",
        "--set cluster.nodes=4",
    ]
    words = Page(page(measured)).words
    for entry in measured.left_out:
        assert entry.reason in words
    assert "was measured on 8 ranks (1 node x 8), but the cluster has 16" in words


def test_warnings_of_other_choices_are_told(gloo: Storyboard) -> None:
    assert gloo.scaling[2].nodes == 4
    new = [w for w in gloo.scaling[2].warnings if w not in gloo.result.warnings]
    assert new
    words = Page(page(gloo)).words
    assert all(warning in words for warning in new)


def test_the_scenarios_own_cap_has_a_place(noisy: Storyboard) -> None:
    assert [choice.cap for choice in noisy.choices][:3] == ["default", "[2,7]", "1"]
    assert noisy.own == 1
    assert noisy.choices[1].result == noisy.result


def test_a_single_rank_has_a_page() -> None:
    alone = storyboard(SLOW_NETWORK, ["cluster.nodes=1", "cluster.gpus_per_node=1"])
    assert alone.choices[0].step.ranks[0].exposed_ns == 0
    assert "makes no difference" in Page(page(alone)).words


def test_sensitivity_is_the_jobs_own(board: Storyboard) -> None:
    found = {entry.what: entry for entry in board.sensitivity}
    changes = [entry.change_s for entry in board.sensitivity]
    assert changes == sorted(changes)
    assert changes[0] == found["a network that takes no time"].change_s
    words = Page(page(board)).words
    for entry in board.sensitivity:
        assert f"{entry.what}{format_duration(entry.change_s)}{entry.change:+.2%}" in words


def test_the_command_writes_a_page(cli: Cli, tmp_path: Path) -> None:
    scenario, output = SCENARIOS / "resnet50-nccl-log.yaml", tmp_path / "page.html"
    done = cli("report", str(scenario), "-o", str(output), "--set", "ddp.bucket_cap_mb=7.5")
    assert done.code == 0
    assert re.fullmatch(
        rf"{re.escape(str(output))}: 4\.\d+ MB, opens in any browser, without a network\n",
        done.out,
    )
    assert done.err.startswith("not shown: --set cluster.nodes=2: cluster.all_reduce: all-reduce-")
    found = Page(output.read_text("utf-8"))
    assert "7.5" in [choice["cap"] for choice in found.data["timeline"]["choices"]]
    assert [path.name for path in output.parent.iterdir()] == ["page.html"]


def test_wrong_input_writes_nothing(cli: Cli, tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    done = cli("report", str(SLOW_NETWORK), "-o", str(output), "--set", "cluster.nodes=0")
    assert (done.code, done.out) == (2, "")
    assert "cluster.nodes: 0 is out of range: wanted at least 1" in done.err
    assert not output.exists()


def test_a_scenario_is_not_overwritten(cli: Cli, tmp_path: Path) -> None:
    own = tmp_path / "scenario.yaml"
    own.write_text(SLOW_NETWORK.read_text("utf-8"), "utf-8")
    done = cli("report", str(own), "-o", str(own))
    assert (done.code, done.out) == (2, "")
    assert "is the scenario itself; name another file" in done.err
    assert own.read_text("utf-8") == SLOW_NETWORK.read_text("utf-8")
    done = cli("report", str(own), "-o", str(tmp_path))
    assert (done.code, done.out) == (2, "")
    assert "is a folder; name a file in it" in done.err


# In a browser.


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = chromium()
    if program is None:
        pytest.skip("no Chromium here: the page is not opened")
    opened = Browser(program, tmp_path_factory.mktemp("chromium"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def written(board: Storyboard, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(page(board), "utf-8")
    return path


DRAWN = "[...document.getElementById('drawing-timeline').data]"
BARS = f"JSON.stringify({DRAWN}.map(t => [t.y, t.base, t.x]))"
HOVER = "[...document.querySelectorAll('#drawing-timeline .hovertext')].map(t => t.textContent)"
SHOWN = (
    "[...document.querySelectorAll('[data-choice]')].filter(e => !e.hidden)"
    ".map(e => e.dataset.choice).join('')"
)


def exposed_in_drawing(browser: Browser) -> float:
    """Milliseconds of exposed communication, as drawn."""
    of = "t.marker.pattern.fgcolor === css('--hatch')"
    script = f"""(() => {{
      const css = n => getComputedStyle(document.documentElement).getPropertyValue(n).trim();
      return {DRAWN}.filter(t => {of}).flatMap(t => t.x).reduce((a, b) => a + b, 0);
    }})()"""
    return float(browser.evaluate(script))


def test_it_opens_without_a_complaint(browser: Browser, written: Path) -> None:
    browser.open(written)
    assert browser.complaints == []
    asked = [url for url in browser.requests if not url.startswith("data:")]
    assert asked == [written.as_uri()]
    assert browser.evaluate("document.title") == EVIL
    drawings = "document.querySelectorAll('.drawing .main-svg').length"
    assert browser.evaluate(drawings) >= 4


def test_the_slider_moves_the_timeline(browser: Browser, written: Path, board: Storyboard) -> None:
    browser.open(written)
    axis = "JSON.stringify(document.getElementById('drawing-timeline').layout.xaxis.range)"
    seen, axes = [browser.evaluate(BARS)], {browser.evaluate(axis)}
    browser.evaluate("document.getElementById('cap').focus()")
    for number, choice in enumerate(board.choices):
        if number:
            browser.press("ArrowRight", 39)
            browser.wait_for(f"document.getElementById('cap').value === '{number}'")
            seen.append(browser.evaluate(BARS))
            axes.add(browser.evaluate(axis))
        exposed_ms = choice.step.ranks[0].exposed_ns / 1e6
        assert exposed_in_drawing(browser) == pytest.approx(exposed_ms, rel=1e-9)
        shown = browser.evaluate(SHOWN)
        assert set(shown) == {str(number)}
        assert len(shown) == 3  # the figures, the buckets and the breakdown
        told = browser.evaluate("document.getElementById('cap').getAttribute('aria-valuetext')")
        assert browser.evaluate("document.getElementById('cap-shown').textContent") == told
    assert len(set(seen)) == len(board.choices)
    assert len(axes) == 1
    assert browser.complaints == []


def test_hover_shows_the_bucket(browser: Browser, written: Path, board: Storyboard) -> None:
    browser.open(written)
    browser.evaluate("document.getElementById('timeline').scrollIntoView()")
    place = browser.evaluate(
        """(() => {
          const label = [...document.querySelectorAll('#drawing-timeline .bartext')]
            .find(t => t.textContent === '2');
          const box = label.getBoundingClientRect();
          return [box.x + box.width / 2, box.y + box.height / 2];
        })()"""
    )
    browser.point_at(*place)
    (shown,) = browser.wait_for(f"{HOVER}.length ? {HOVER} : null")
    bucket = board.result.buckets[2]
    size = f"{float(f'{bucket.size_bytes / 2**20:.4g}'):g} MiB"
    assert f"bucket 2: all_reduce of {size}, {bucket.num_params} parameters" in shown
    assert "ready " in shown
    assert "exposed " in shown


def test_the_keyboard_reaches_every_collective(browser: Browser, written: Path) -> None:
    browser.open(written)
    browser.evaluate("document.getElementById('drawing-timeline').focus()")
    spoken = []
    for _ in range(7):
        browser.press("ArrowRight", 39)
        spoken.append(browser.evaluate("document.getElementById('spoken').textContent"))
    assert [text.partition(":")[0] for text in spoken[2:]] == [f"bucket {i}" for i in range(5)]
    assert browser.evaluate(HOVER)
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert browser.evaluate(outline) == "solid"


def test_ring_steps_are_seen_on_zoom(browser: Browser, noisy: Storyboard, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page(noisy), "utf-8")
    browser.open(path)
    browser.evaluate("document.getElementById('rank').value = 'slowest'")
    browser.evaluate("document.getElementById('rank').dispatchEvent(new Event('change'))")
    rows = "document.getElementById('drawing-timeline').layout.yaxis.ticktext"
    assert browser.evaluate(rows) == ["rank 3, slowest<br>compute", "comm", "ring"]
    words = f"{DRAWN}.flatMap(t => t.hovertext).filter(t => t.includes(': ring step '))"
    buckets = [c for c in noisy.choices[noisy.own].step.ranks[0].collectives if c.bucket >= 0]
    assert len(browser.evaluate(words)) == 14 * len(buckets)
    at = buckets[len(buckets) // 2]
    view = json.dumps({"xaxis.range": [at.joined_ns / 1e6, at.end_ns / 1e6]})
    browser.evaluate(f"Plotly.relayout('drawing-timeline', {view}).then(() => 1)")
    browser.wait_for(f"{words}.length === 14")
    first = f"bucket {at.bucket}: ring step 1 of 14, "
    assert browser.evaluate(words)[0].startswith(first)
    labels = "[...document.querySelectorAll('#drawing-timeline .bartext')].map(t => t.textContent)"
    assert {str(step) for step in range(1, 15)} <= set(browser.evaluate(labels))
    browser.evaluate("document.querySelector('[data-zoom=all]').click()")
    assert len(browser.evaluate(words)) == 14 * len(buckets)
    assert browser.complaints == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_phone_scrolls_down_alone(browser: Browser, written: Path, *, dark: bool) -> None:
    browser.open(written, 380, 800, dark=dark)
    assert browser.evaluate("document.documentElement.scrollWidth") <= 380
    assert browser.evaluate("document.getElementById('rank').value") == "slowest"
    ground = "getComputedStyle(document.documentElement).getPropertyValue('--ground').trim()"
    paper = "document.getElementById('drawing-timeline').layout.paper_bgcolor"
    assert browser.evaluate(paper) == browser.evaluate(ground)
    assert browser.evaluate(ground) == ("#14171b" if dark else "#ffffff")
    assert browser.complaints == []


FACTS_CUT = """[...document.querySelectorAll('.facts div')].filter(e => {
  if (!e.offsetParent) return false;
  const text = document.createRange();
  text.selectNodeContents(e.querySelector('dd'));
  return text.getBoundingClientRect().right > e.getBoundingClientRect().right;
}).map(e => e.textContent)"""


@pytest.mark.parametrize("width", [360, 390, 800, 1100, 1440])
def test_headline_figures_have_room(browser: Browser, written: Path, width: int) -> None:
    browser.open(written, width)
    assert browser.evaluate(FACTS_CUT) == []


HEIGHTS = """[...document.querySelectorAll('.drawing')].map(e =>
  [e, e.querySelector('.main-svg')].map(part => Math.round(part.getBoundingClientRect().height)))"""


def test_drawings_keep_their_height_as_the_window_changes(browser: Browser, written: Path) -> None:
    browser.open(written, 1100)
    before = browser.evaluate(HEIGHTS)
    for width in (700, 1100):
        screen = {"width": width, "height": 1400, "deviceScaleFactor": 1, "mobile": False}
        browser.call("Emulation.setDeviceMetricsOverride", **screen)
        drawn = "document.querySelector('#drawing-sweep .main-svg').getBoundingClientRect().width"
        browser.wait_for(f"{drawn} {'<' if width == 700 else '>'} 700")
        assert browser.evaluate(HEIGHTS) == before


WIDTHS = "[...document.querySelectorAll('.drawing .main-svg')].map(e => e.clientWidth)"


def test_paper_cuts_no_drawing(browser: Browser, written: Path) -> None:
    browser.open(written, 1440)
    before = browser.evaluate(WIDTHS)
    browser.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert max(browser.evaluate(WIDTHS)) <= 718 < min(before)
    browser.evaluate("window.dispatchEvent(new Event('afterprint'))")
    browser.wait_for(f"JSON.stringify({WIDTHS}) === '{json.dumps(before, separators=(',', ':'))}'")


@pytest.mark.parametrize("name", ["board", "gloo"])
def test_paper_loses_no_column(
    browser: Browser, name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """A4 at 96 dots an inch, less Chromium's own margins; letter paper is wider."""
    path = tmp_path / "page.html"
    path.write_text(page(request.getfixturevalue(name)), "utf-8")
    browser.open(path, 718, 1000)
    browser.call("Emulation.setEmulatedMedia", media="print")
    cut = "[...document.querySelectorAll('.wide')].filter(e => e.scrollWidth > e.clientWidth)"
    assert browser.evaluate(f"{cut}.map(e => e.getAttribute('aria-label')).join()") == ""
    assert browser.evaluate("document.documentElement.scrollWidth") <= 718
    browser.call("Emulation.setEmulatedMedia", media="")
