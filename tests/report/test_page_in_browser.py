"""The page in a real browser: it moves, zooms, prints and fits on a phone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chromium import Browser
from page_reading import EVIL

from ddpsim.planning.storyboard import storyboard
from ddpsim.report.page.page import page
from ddpsim.result.storyboard import Storyboard


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
    end = "document.getElementById('drawing-timeline').layout.xaxis.range[1]"
    own_ms = board.choices[board.current].step.length_ns / 1e6
    seen = [browser.evaluate(BARS)]
    assert browser.evaluate(end) < 1.1 * own_ms  # nothing of the axis is empty
    browser.evaluate("document.getElementById('cap').focus()")
    for number, choice in enumerate(board.choices):
        if number:
            browser.press("ArrowRight", 39)
            browser.wait_for(f"document.getElementById('cap').value === '{number}'")
            seen.append(browser.evaluate(BARS))
            longer_ms = max(own_ms, choice.step.length_ns / 1e6)
            assert longer_ms <= browser.evaluate(end) < 1.1 * longer_ms
        exposed_ms = choice.step.ranks[0].exposed_ns / 1e6
        assert exposed_in_drawing(browser) == pytest.approx(exposed_ms, rel=1e-9)
        shown = browser.evaluate(SHOWN)
        assert set(shown) == {str(number)}
        assert len(shown) == 4  # the headline, the drawing's words, buckets and breakdown
        told = browser.evaluate("document.getElementById('cap').getAttribute('aria-valuetext')")
        assert browser.evaluate("document.getElementById('cap-shown').textContent") == told
    assert len(set(seen)) == len(board.choices)
    assert browser.complaints == []


def test_a_lane_without_spans_is_not_drawn(browser: Browser, tmp_path: Path) -> None:
    """Though another position of the slider has it."""
    few = ("workload.model=gpt2", "cluster.nodes=2", "cluster.gpus_per_node=2", "run.iterations=1")
    board = storyboard("scenarios/gpt2-xl-hsdp.yaml", [*few, "ddp.strategy=fully_shard"])
    path = tmp_path / "shards.html"
    path.write_text(page(board), "utf-8")
    browser.open(path)
    rows = "document.getElementById('drawing-timeline').layout.yaxis.ticktext"
    slider, counts = "document.getElementById('cap')", []
    for number, choice in enumerate(board.choices):
        browser.evaluate(f"{slider}.value = '{number}'")
        browser.evaluate(f"{slider}.dispatchEvent(new Event('input'))")
        used = [len({comm.lane for comm in rank.collectives}) for rank in choice.step.ranks]
        drawn = [row for row in browser.evaluate(rows) if row.startswith("comm")]
        assert len(drawn) == sum(used)
        counts.append(max(used))
    assert set(counts) == {1, 2}
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


def test_bars_of_the_backward_show_their_gradients(browser: Browser, written: Path) -> None:
    browser.open(written)
    trace = f"{DRAWN}.find(t => t.hovertext?.[0].startsWith('<b>backward</b>'))"
    words = browser.evaluate(f"{trace}.hovertext")
    assert any("<br>layer4.2.bn3.weight" in each for each in words)
    assert "layer1.2" in browser.evaluate(f"{trace}.text")


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
    buckets = [
        c for c in noisy.choices[noisy.current].step.ranks[0].collectives if c.span.bucket >= 0
    ]
    assert len(browser.evaluate(words)) == 14 * len(buckets)
    at = buckets[len(buckets) // 2].span
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
