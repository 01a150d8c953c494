"""The page's scenario, and the page served."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Thread
from typing import Any

import pytest

from ddpsim.explore.answer import Given, answer
from ddpsim.explore.lessons import SCENARIO
from ddpsim.explore.page import explore_page
from ddpsim.explore.server import Server
from ddpsim.scenario.starters import preset_text

Ask = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def given() -> Given:
    return Given("scenario.yaml", preset_text(SCENARIO), most_ranks=2048).with_files()


@pytest.fixture(scope="session")
def ask(given: Given) -> Ask:
    def asked(*settings: str, part: str = "step", text: str = given.text) -> dict[str, Any]:
        return answer({"part": part, "text": text, "settings": list(settings)}, given)

    return asked


@pytest.fixture(scope="module")
def server(given: Given) -> Iterator[Server]:
    serving = Server(explore_page(), given)
    thread = Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield serving
    serving.shutdown()
    thread.join()
    serving.server_close()
