"""Real steps of every strategy on the testbed, held against predictions from microbenchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

import pytest
from validation.recorded import STRATEGIES, campaign, predicted

from calibrate.records.variant import SHARDED
from calibrate.validate.report import Case

pytestmark = pytest.mark.skipif(
    not STRATEGIES.exists(), reason="the campaign of strategies is not recorded yet"
)

_OF_SHARDS = (*SHARDED, "zero1")


def _cases(*, shards: bool) -> list[Case]:
    sweeps = campaign(STRATEGIES).sweeps
    cases = [case for sweep in sweeps for case in sweep.cases]
    return [case for case in cases if case.variant.startswith(_OF_SHARDS) == shards]


def _signs(*, shards: bool) -> Iterator[bool]:
    """Of cases that differ from plain DDP beyond the noise: is the predicted sign right?"""
    for sweep in campaign(STRATEGIES).sweeps:
        own = [
            case
            for case in sweep.cases
            if case.variant == case.plain or case.variant.startswith(_OF_SHARDS) == shards
        ]
        yield from sweep.model_copy(update={"cases": tuple(own)}).ranked


def test_three_models_at_two_rates_were_recorded() -> None:
    sweeps = campaign(STRATEGIES).sweeps
    assert len({sweep.model for sweep in sweeps}) == 3
    assert len({sweep.line_rate_bytes_per_s for sweep in sweeps}) == 2
    figures = campaign(STRATEGIES).figures
    assert figures
    assert figures.buckets_agree == figures.cases


def test_plain_strategies_and_options_are_predicted() -> None:
    assert median(abs(case.error) for case in _cases(shards=False)) <= 0.03
    assert all(_signs(shards=False))


def test_sharded_steps_are_predicted() -> None:
    errors = [abs(case.error) for case in _cases(shards=True)]
    assert median(errors) <= 0.04
    assert max(errors) <= 0.10
    signs = list(_signs(shards=True))
    assert sum(signs) >= 0.9 * len(signs)


def test_the_report_is_up_to_date() -> None:
    """One model at one rate, tick by tick."""
    (now,) = predicted(STRATEGIES, "rounds-cnn-5gbit-*.json").sweeps
    recorded = {sweep.file: sweep.cases for sweep in campaign(STRATEGIES).sweeps}
    assert [(c.variant, c.predicted_s) for c in now.cases] == [
        (c.variant, c.predicted_s) for c in recorded[now.file]
    ]
