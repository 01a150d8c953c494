"""What a long answer takes is told before it begins."""

from __future__ import annotations

from typing import Any

import pytest

from ddpsim.prediction.effort import long_answer
from ddpsim.prediction.resolve import resolve
from ddpsim.scenario.schema import Scenario

NOISY = {"jitter": {"sigma": 0.02}, "iterations": 3}


def scenario(run: dict[str, Any], **workload: Any) -> Scenario:
    asked = {
        "schema": "ddpsim/1",
        "workload": {"model": "resnet18", "batch_per_rank": 8, **workload},
        "cluster": {"machine": "dgx-a100", "nodes": 2},
        "run": run,
    }
    return Scenario.model_validate(asked)


@pytest.mark.parametrize("run", [{}, NOISY])
def test_a_usual_answer_says_nothing(run: dict[str, Any]) -> None:
    assert long_answer(resolve(scenario(run))) is None


def test_a_long_loop_is_told() -> None:
    """Its period is a thousand steps, all of which differ."""
    told = long_answer(resolve(scenario(NOISY, read_loss_every=1000)))
    assert told is not None
    assert "of memory: steps of" in told
    assert "on 16 ranks" in told
