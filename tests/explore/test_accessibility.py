"""axe-core finds nothing in our pages, where it is at hand: `nox -s browser` fetches it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from chromium import Browser
from page_reading import board_storyboard

from ddpsim.explore.server import Server
from ddpsim.report.page.page import page

AXE = "DDPSIM_AXE"
SETTLED = """
document.getElementById('app').getAttribute('aria-busy') === 'false'
&& !document.querySelector('.late.stale')
"""
FOUND = "axe.run().then(({ violations }) => JSON.stringify(violations.map(({ id }) => id)))"
SCREENS = [(1280, False), (400, True)]  # width, dark


@pytest.fixture(scope="module")
def axe() -> str:
    path = os.environ.get(AXE)
    if not path:
        pytest.skip(f"no axe-core: `nox -s browser` fetches it, and sets {AXE}")
    return Path(path).read_text("utf-8")


@pytest.mark.parametrize(("width", "dark"), SCREENS)
def test_the_live_page(
    axe: str, browser: Browser, server: Server, width: int, *, dark: bool
) -> None:
    browser.call("Page.navigate", url="about:blank")
    browser.open(server.address, width, dark=dark)
    browser.wait_for(SETTLED)
    browser.evaluate(f"{axe};1")
    assert json.loads(browser.evaluate(FOUND)) == []
    browser.evaluate("document.querySelector('#lessons button').click()")
    browser.wait_for(f"!document.getElementById('lesson').hidden && {SETTLED}")
    assert json.loads(browser.evaluate(FOUND)) == []


def test_the_report(axe: str, browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page(board_storyboard()), "utf-8")
    for width, dark in SCREENS:
        browser.open(path, width, dark=dark)
        browser.evaluate(f"{axe};1")
        assert json.loads(browser.evaluate(FOUND)) == []
