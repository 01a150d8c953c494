"""A measured step held against the prediction."""

from __future__ import annotations

import pytest
from shipped_scenarios import load, predict, simulated

import ddpsim
from ddpsim.result.diagnosis import Verdict


def judged(name: str, measured_s: float) -> Verdict:
    return ddpsim.judge(load(name), simulated(name), measured_s)


@pytest.mark.parametrize(
    ("measured_s", "words"), [(0.052, "normal"), (0.2, "network"), (0.03, "not in this list")]
)
def test_verdicts(measured_s: float, words: str) -> None:
    verdict = judged("resnet50-2x8-25gbit", measured_s)
    assert words in verdict.text + " ".join(verdict.explanations)
    assert verdict.normal == (measured_s == 0.052)


def test_a_measured_step_is_explained_by_a_slow_rank() -> None:
    verdict = judged("straggler", 0.3)
    (cause,) = [cause for cause in verdict.causes if cause.key == "slow_rank"]
    slower = predict("straggler", *cause.settings)
    assert slower.iteration_time_s.mean == pytest.approx(0.3, rel=0.1)


def test_a_shorter_step_is_no_fault() -> None:
    """What only lengthens a step explains none that is shorter than predicted."""
    verdict = judged("resnet50-2x8-25gbit", 0.025)
    likely = {cause.key for cause in verdict.causes if cause.probability > 0.001}
    assert likely <= {"unknown", "healthy", "other_batch", "other_precision"}
