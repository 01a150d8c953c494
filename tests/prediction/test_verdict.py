"""A measured step held against the prediction."""

from __future__ import annotations

import pytest
from shipped_scenarios import load, predict

import ddpsim


@pytest.mark.parametrize(
    ("measured_s", "words"), [(0.052, "normal"), (0.2, "network"), (0.03, "network")]
)
def test_verdicts(measured_s: float, words: str) -> None:
    scenario = load("resnet50-2x8-25gbit")
    verdict = ddpsim.judge(scenario, ddpsim.simulate(scenario), measured_s)
    assert words in verdict.text + " ".join(verdict.explanations)
    assert verdict.normal == (measured_s == 0.052)


def test_a_measured_step_is_explained_by_the_slowest_rank() -> None:
    """Of ranks that differ already it is the slowest one that takes longer still."""
    scenario = load("straggler")
    verdict = ddpsim.judge(scenario, ddpsim.simulate(scenario), 0.3)
    (text,) = [text for text in verdict.explanations if text.startswith("a straggler")]
    factor = float(text.split("computing ")[1].split(" x")[0])
    slower = predict("straggler", f"cluster.stragglers.factors.3={1.2 * factor}")
    assert slower.iteration_time_s.mean == pytest.approx(0.3, rel=0.01)
