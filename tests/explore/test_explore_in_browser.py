"""The live page in a real browser: every control, pin, YAML, events, lessons, phone, keyboard."""

from __future__ import annotations

import json
from collections.abc import Iterator
from threading import Thread

import pytest
from chromium import Browser

from ddpsim.explore.answer import Given
from ddpsim.explore.lessons import LESSONS
from ddpsim.explore.page import explore_page
from ddpsim.explore.server import Server

SETTLED = """
document.getElementById('app').getAttribute('aria-busy') === 'false'
&& !document.querySelector('.late.stale')
"""
IDLE = "document.getElementById('app').getAttribute('aria-busy') === 'false'"
STEP = "document.querySelector('#facts .main').textContent"
PROBLEMS = "document.getElementById('problems').textContent"
EVENT = "document.getElementById('event').textContent"
DRAWN = "JSON.stringify(document.getElementById('drawing-timeline').data.map(t => [t.y, t.x]))"
BY = "document.getElementById('{}')"


@pytest.fixture
def page(browser: Browser, server: Server) -> Iterator[Browser]:
    """The page as it begins, which says nothing on the console."""
    browser.call("Page.navigate", url="about:blank")
    browser.open(server.address)
    yield browser
    assert browser.complaints == []
    urls = [url for url in browser.requests if not url.startswith(("data:", "about:", "blob:"))]
    assert {url.partition("#")[0] for url in urls} <= {server.url, f"{server.url}answer"}


def put(page: Browser, control: str, value: str, event: str = "input") -> None:
    """Put a control to a value, and wait for the step."""
    script = f"""(() => {{ const e = document.getElementById({json.dumps(control)});
      e.value = {json.dumps(value)}; e.dispatchEvent(new Event({json.dumps(event)})); }})()"""
    page.evaluate(script)


def click(page: Browser, name: str) -> None:
    page.evaluate(f"{BY.format(name)}.click()")


def press(page: Browser, key: str, code: int, times: int = 1) -> None:
    for _ in range(times):
        page.press(key, code)


def test_every_control_moves_the_step(page: Browser, server: Server) -> None:
    page.wait_for(SETTLED)
    assert "token" not in page.evaluate("location.hash")
    interval = page.evaluate("document.getElementById('interval').textContent")
    assert interval.startswith("80% interval ")
    step, drawn = page.evaluate(STEP), page.evaluate(DRAWN)
    sliders = (
        "[...document.querySelectorAll('#sliders input')].filter(e => !e.disabled).map(e => e.id)"
    )
    moved = page.evaluate(sliders)
    assert len(moved) == 10
    for control in moved:
        put(page, control, page.evaluate(f"{BY.format(control)}.max"))
        page.wait_for(IDLE)
        assert page.evaluate(PROBLEMS) == "", control
        assert page.evaluate(STEP) != step or page.evaluate(DRAWN) != drawn, control
        click(page, "reset")
        page.wait_for(f"{IDLE} && {STEP} === {json.dumps(step)}")
    for control, option in (("workload.precision", "0"), ("ddp.strategy", "1")):
        put(page, f"control-{control}", option, "change")
        page.wait_for(f"{IDLE} && {STEP} !== {json.dumps(step)}")
    assert page.evaluate("document.getElementById('control-ddp.bucket_cap_mb').disabled")
    assert "ddp.strategy=naive" in page.evaluate("location.hash")


def test_pin_compares_and_the_address_keeps_it(page: Browser, server: Server) -> None:
    rows = "document.getElementById('drawing-timeline').layout.yaxis.ticktext.join(' ')"
    click(page, "pin")
    put(page, "control-cluster.nodes", "3")
    page.wait_for(f"{IDLE} && {BY.format('differs')}.textContent.includes('cluster.nodes')")
    assert page.evaluate("document.getElementById('differs').innerText") == "cluster.nodes 2 → 4"
    assert "pinned,<br>rank" in page.evaluate(rows)
    assert "pinned 56.5 ms, +" in page.evaluate("document.getElementById('facts').textContent")
    address = page.evaluate("location.href")
    step = page.evaluate(STEP)
    page.call("Page.navigate", url="about:blank")
    page.open(address)
    page.wait_for(f"{IDLE} && {STEP} === {json.dumps(step)}")
    assert "pinned,<br>rank" in page.evaluate(rows)
    click(page, "copy")
    told = page.wait_for(BY.format("note") + ".textContent")
    assert told.endswith("ddpsim run scenario.yaml --set cluster.nodes=4")


def test_yaml_wrong_and_right(page: Browser, given: Given) -> None:
    click(page, "tab-text")
    page.evaluate("document.getElementById('yaml').focus()")
    put(page, "yaml", given.text.replace("nodes: 2", "nodes: two"))
    page.wait_for(PROBLEMS)
    assert "line 17 cluster.nodes: wanted a whole number, got 'two'" in page.evaluate(PROBLEMS)
    assert page.evaluate("document.getElementById('answer').classList.contains('stale')")
    page.evaluate("document.querySelector('#problems button').click()")
    marked = "yaml.value.slice(yaml.selectionStart, yaml.selectionEnd)"
    assert page.evaluate(marked) == "  nodes: two"
    put(page, "yaml", given.text.replace("nodes: 2", "nodes: 8"))
    page.wait_for(f"!({PROBLEMS}) && {BY.format('ranks')}.textContent === '64 ranks (8 x 8)'")
    assert page.evaluate("document.querySelector('#control-cluster\\\\.nodes').value") == "5"
    assert page.evaluate("location.hash").startswith("#yaml=")


def test_events_by_keyboard(page: Browser) -> None:
    page.evaluate("document.getElementById('drawing-timeline').focus()")
    press(page, "ArrowRight", 39)
    first = page.evaluate(EVENT)
    assert "The broadcast of buffers" in first
    press(page, "ArrowRight", 39, 7)
    assert page.evaluate(EVENT) != first
    assert page.evaluate("document.getElementById('drawing-timeline').layout.shapes.length") == 1
    click(page, "play")
    page.wait_for(f"{EVENT} !== {json.dumps(page.evaluate(EVENT))}")
    click(page, "play")
    put(page, "control-cluster.nodes", "3")
    page.wait_for(IDLE)
    page.evaluate("document.getElementById('rings').click()")
    ring = "!document.getElementById('ring').hasAttribute('hidden')"
    for _ in range(60):
        press(page, "ArrowRight", 39)
        if page.evaluate(ring):
            break
    assert "Ring step 1 of 62 of bucket 0: each rank adds" in page.evaluate(EVENT)
    assert page.evaluate("document.querySelectorAll('#ring .chunk').length") == 32


def test_a_lesson_asks_and_the_page_answers(page: Browser) -> None:
    page.evaluate("document.querySelector('#lessons button').click()")
    page.wait_for(IDLE)
    page.evaluate("document.querySelectorAll('#lesson input')[2].click()")
    page.evaluate("document.querySelector('#lesson .primary').click()")
    verdict = page.wait_for("document.getElementById('verdict').textContent")
    assert verdict.startswith("Right. It grows by more: step 56.5 ms")
    assert LESSONS[0].after in verdict
    page.wait_for(f"{IDLE} && {BY.format('differs')}.textContent.includes('naive_flat')")
    page.evaluate("document.querySelector('#verdict button').click()")
    page.wait_for("document.querySelector('#lesson h2').textContent.startsWith('Lesson 2 of 5')")


@pytest.mark.parametrize(("width", "dark"), [(400, True), (1280, False)])
def test_it_fits_and_every_part_has_a_name(
    browser: Browser, server: Server, width: int, dark: bool
) -> None:
    browser.call("Page.navigate", url="about:blank")
    browser.open(server.address, width, 900, dark=dark)
    browser.wait_for(SETTLED)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    ground = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(20, 23, 27)" if dark else "rgb(255, 255, 255)")
    nameless = """[...document.querySelectorAll('button, input, select, textarea, section')]
      .filter(e => !(e.labels?.length || e.textContent.trim() || e.getAttribute('aria-label')
        || e.getAttribute('aria-labelledby'))).map(e => e.outerHTML)"""
    assert browser.evaluate(nameless) == []
    # the keyboard alone: Tab comes to every button and control, and each shows where it is
    browser.evaluate("document.body.focus()")
    seen = set()
    for _ in range(34):
        browser.press("Tab", 9)
        seen.add(browser.evaluate("document.activeElement.id || document.activeElement.className"))
        assert browser.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert {"pin", "save", "tab-sliders", "control-cluster.background", "play", "rings"} <= seen
    assert "drawing-timeline" in seen
    assert browser.complaints == []


def test_a_server_that_comes_back_finds_the_page_as_it_was(browser: Browser, given: Given) -> None:
    def serving(port: int) -> tuple[Server, Thread]:
        server = Server(explore_page(), given, port=port)
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        return server, thread

    def end(server: Server, thread: Thread) -> None:
        server.shutdown()
        thread.join()
        server.server_close()

    first, thread = serving(0)
    browser.call("Page.navigate", url="about:blank")
    browser.open(f"{first.address}&cluster.nodes=4")
    step = browser.evaluate(STEP)
    end(first, thread)
    put(browser, "control-ddp.bucket_cap_mb", "20")
    note = BY.format("note") + ".textContent"
    browser.wait_for(f"{note}.startsWith('The server has ended.')")
    second, thread = serving(int(first.server_address[1]))
    try:  # another tab has got its token
        browser.evaluate(f"localStorage.setItem('ddpsim-token', {json.dumps(second.token)})")
        browser.wait_for(f"{IDLE} && {STEP} !== {json.dumps(step)} && !{note}")
        assert "cluster.nodes=4&ddp.bucket_cap_mb=" in browser.evaluate("location.hash")
    finally:
        end(second, thread)
