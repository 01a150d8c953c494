"""Jobs that share their parts are the same as jobs that are built alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpsim.prediction.api import checked_job
from ddpsim.prediction.parts import Parts
from ddpsim.scenario.document import load

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"


@pytest.mark.parametrize("name", ["debug-settings", "post-local-sgd", "sync-batch-norm", "top-k"])
def test_other_numbers_of_nodes_share_no_program(name: str) -> None:
    document, parts = load(SCENARIOS / f"{name}.yaml"), Parts()
    checked_job(document, parts)
    for nodes in (1, 2, 8):
        changed = document.changed([f"cluster.nodes={nodes}"])
        shared = checked_job(changed, parts.of_another_question()).step_s()
        assert shared == checked_job(changed).step_s()
