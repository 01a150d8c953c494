"""The page whose simulator runs in the browser: the same answers, and no server to ask."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from chromium import Browser

from ddpsim.explore.answer import json_answer
from ddpsim.explore.lessons import SCENARIO
from ddpsim.explore.page import explore_page
from ddpsim.scenario.starters import preset_text

SITE = "DDPSIM_BROWSER_PAGE"
QUESTION = {"part": "step", "text": preset_text(SCENARIO), "settings": []}
SETTLED = "document.getElementById('app').getAttribute('aria-busy') === 'false'"
STEP = "document.querySelector('#facts .main').textContent"


def step_of(*settings: str) -> str:
    answer = json.loads(json_answer(json.dumps(QUESTION | {"settings": settings})))
    return str(answer["facts"][0]["text"])


def test_its_policy_lets_it_ask_nobody() -> None:
    policy = explore_page("worker.js").partition('Content-Security-Policy" content="')[2]
    assert "connect-src 'none'; worker-src 'self'; script-src 'sha256-" in policy.partition('"')[0]
    assert "worker-src 'none'" in explore_page()


def test_it_names_no_file_and_says_what_is_missing() -> None:
    named = QUESTION | {"settings": ["workload.profile=/etc/passwd"]}
    (wrong,) = json.loads(json_answer(json.dumps(named)))["problems"]
    assert wrong["key"] == "workload.profile"
    parts = ("step", "sure", "scaling", "report")
    script = (
        "import json, sys\n"
        "sys.modules['numpy'] = None\n"
        "from ddpsim.explore.answer import json_answer\n"
        f"for question in {[QUESTION | {'part': part} for part in parts]!r}:\n"
        "    print(json_answer(json.dumps(question)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    step, sure, scaling, report = map(json.loads, done.stdout.splitlines())
    assert step["facts"][0]["text"] == step_of()  # as equal ranks need no numpy
    whole = json.loads(json_answer(json.dumps(QUESTION | {"part": "sure"})))
    assert sure["interval"] == whole["interval"]
    assert sure["next"][0]["why"] == "to try other settings needs numpy, which is not here"
    assert len(scaling["figure"]["data"][0]["x"]) == 2
    assert "--set cluster.nodes=4" in report["html"]
    assert scaling["left_out"][0] == "4 nodes: needs numpy, which is not here"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *said: Any) -> None:
        """Nothing."""


@pytest.fixture
def address() -> Iterator[str]:
    folder = os.environ.get(SITE)
    if not folder:
        pytest.skip(f"the page is not built: `nox -s browser` does, and sets {SITE}")
    assert Path(folder, "index.html").is_file()
    serving = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder))
    thread = Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"http://127.0.0.1:{serving.server_address[1]}/"
    serving.shutdown()
    thread.join()
    serving.server_close()


def test_it_simulates_in_the_browser(address: str, browser: Browser) -> None:
    browser.open(address)
    browser.wait_for(f"document.documentElement.dataset.drawn && {SETTLED}")
    assert browser.evaluate(STEP) == step_of()
    place = """(() => { const e = document.getElementById('control-ddp.bucket_cap_mb');
      e.value = 5; e.dispatchEvent(new Event('input')); })()"""
    browser.evaluate(place)
    browser.wait_for(f"{SETTLED} && location.hash.includes('bucket_cap_mb')")
    cap = browser.evaluate("new URLSearchParams(location.hash.slice(1)).get('ddp.bucket_cap_mb')")
    assert browser.evaluate(STEP) == step_of(f"ddp.bucket_cap_mb={cap}") != step_of()
    told = browser.evaluate("document.getElementById('note').textContent")
    has_numpy = any(Path(os.environ[SITE], "wheels").glob("numpy-*.whl"))
    assert told == "" if has_numpy else told.startswith("Without numpy, of which PyPI has no wheel")
    assert browser.complaints == []
    assert all(url.startswith((address, "data:")) for url in browser.requests)
