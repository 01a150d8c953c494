"""Several runs of the same rounds, as one sweep."""

from __future__ import annotations

from pathlib import Path

import pytest
from measured.made_rounds import (
    BACKWARD,
    ONE,
    TWO,
    Measured,
    made_up,
    runs_together,
    write_rounds,
)

from calibrate.records.rounds import save_rounds
from calibrate.validate.page import page
from calibrate.validate.report import figures_of
from calibrate.validate.summary import summary
from calibrate.validate.validate import validate


def test_files_of_the_same_are_runs_of_one_sweep(tmp_path: Path) -> None:
    """Samples of all count; another batch is another sweep."""
    slower = [
        Measured(case.variant, 1.1 * case.backward, case.exposed, case.bucket_bytes)
        for case in (TWO, ONE)
    ]
    files = [write_rounds(tmp_path, TWO, ONE), write_rounds(tmp_path, *slower, name="again.json")]
    other = made_up([TWO, ONE]).model_copy(update={"batch_per_rank": 8})
    save_rounds(other, tmp_path / "other.json")
    sweeps = validate([*files, tmp_path / "other.json"]).sweeps
    assert [(sweep.file, sweep.runs) for sweep in sweeps] == [("rounds.json", 2), ("other.json", 1)]
    both, alone = sweeps
    assert both.run_sigma == pytest.approx(0.1 * BACKWARD / 0.4 / 2**0.5, rel=0.1)
    assert alone.run_sigma is None
    for case, single in zip(both.cases, alone.cases, strict=True):
        assert case.rounds == 2 * single.rounds
        assert case.measured_s == pytest.approx(single.measured_s + 0.05 * TWO.backward, rel=1e-3)
        assert case.predicted_s == pytest.approx(single.predicted_s)
        assert case.stderr_s > 5 * single.stderr_s
        assert case.plain_s == pytest.approx(case.measured_s)
        first_s, second_s = case.runs_s
        assert first_s == pytest.approx(single.measured_s, rel=1e-3)
        assert [(c.predicted_s, c.measured_s) for c in case.by_another_run] == [
            (first_s, second_s),
            (second_s, first_s),
        ]
        assert single.by_another_run == ()
    both_of_them = figures_of([both])
    assert both_of_them
    assert both_of_them.repeated_skilled == both_of_them.skilled
    # of a bucket each they are 5.4 and 5.7 % apart, 4.9 and 5.1 of one; two standard errors: 5.2
    assert both_of_them.another_run_skilled == 0.5
    only = figures_of([alone])
    assert only
    assert only.repeated_skilled is only.another_run_skilled is None
    assert "one run as the prediction of the others: " in summary(validate(files))
    assert "rounds.json  runs 2" in summary(validate(files))
    assert "runs of the same are" in page(validate(files))


def test_runs_together_hold_the_samples_of_all() -> None:
    first, second = made_up([TWO, ONE]), made_up([TWO, ONE], second_rank=1.2)
    both = runs_together(first, second)
    assert both.alone.whole_s == first.alone.whole_s + second.alone.whole_s
    assert both.alone.hook_s == (0.0, 0.0)
    assert both.variants[1].variant == first.variants[1].variant
    assert both.variants[1].logged.comm_s == 2 * first.variants[1].logged.comm_s
    assert both.all_reduce[0].samples_s == 2 * first.all_reduce[0].samples_s
    assert both.elapsed_s == 2.0
    assert runs_together(first) == first
