"""Jobs of the engine's tests settle soon, or are taken to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _short_warmups() -> Iterator[None]:
    """Random jobs that never settle are simulated for 15 steps of warm-up in place of 100.

    What both engines do in a step is the same however many come before it.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module in ("run", "batch"):
            patch.setattr(f"ddpsim.engine.{module}.MOST_MORE", 15)
        yield
