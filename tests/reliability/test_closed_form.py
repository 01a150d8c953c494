"""The mean and the best interval are those of Young and Daly, and of many simulated runs.

The mean time of a run has a closed form where failures are exponential and costs fixed. Between two
failures a renewal: with failures every M seconds, W seconds that must pass undisturbed take
(M + D) e^(R/M) (e^(W/M) - 1) on average, if each failure costs D undisturbed seconds and then R in
which it may fail again. D = 0 is Daly's equation.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from math import exp, expm1, floor, inf

import numpy as np
import pytest

from ddpsim.errors import InputError
from ddpsim.reliability.many_runs import Draws, simulate_runs
from ddpsim.reliability.operation import (
    Operation,
    best_interval_s,
    daly_interval_s,
    young_interval_s,
)

SETTINGS = 1000


def mean_s(run: Operation) -> float:
    """The exact mean of a run that crashes, and is replaced at once; raises ValueError for others.

    A crash while a checkpoint is still being written goes back to the one before.
    """
    others = run.notice_per_s + run.straggler_per_s
    if others or run.spares is not None or run.maintenance_every_s < inf:
        raise ValueError("only crashes with nodes that stand by have a closed form")
    work_s, segment_s, write_s = run.work_s, run.segment_s, run.write_s
    if not run.crash_per_s:
        return work_s + run.init_s
    mtbf_s = 1 / run.crash_per_s
    down_s = mtbf_s + run.detect_s + run.replace_s
    fresh_s = down_s * exp(run.init_s / mtbf_s)  # nothing to load yet
    first_s = min(segment_s + write_s, work_s)
    spent_s = down_s * expm1(run.init_s / mtbf_s) + fresh_s * expm1(first_s / mtbf_s)
    if first_s == work_s:
        return spent_s
    loaded_s = down_s * exp((run.restart_s + write_s) / mtbf_s)
    whole = floor((work_s - write_s) / segment_s)
    rest_s = work_s - write_s - whole * segment_s
    later = (whole - 1) * expm1(segment_s / mtbf_s) + expm1(rest_s / mtbf_s)
    return spent_s + loaded_s * later


def daly_mean_s(
    steps_s: float, interval_s: float, save_s: float, restart_s: float, mtbf_s: float
) -> float:
    """Daly 2006, equation 13: steps of `steps_s` in all, saved every `interval_s` of them."""
    segments = steps_s / interval_s
    return mtbf_s * exp(restart_s / mtbf_s) * expm1((interval_s + save_s) / mtbf_s) * segments


def drawn() -> Iterator[tuple[Operation, float, float]]:
    """Operations with their interval and MTBF: a checkpoint of up to a third of the MTBF."""
    random_ = random.Random(2006)
    for _ in range(SETTINGS):
        mtbf_s = 10 ** random_.uniform(3, 6)
        save_s = mtbf_s * 10 ** random_.uniform(-4, -0.5)
        restart_s = mtbf_s * random_.uniform(0, 0.3)
        interval_s = daly_interval_s(save_s, mtbf_s) * 10 ** random_.uniform(-0.3, 0.3)
        whole = round(random_.uniform(200, 600) * mtbf_s / interval_s) or 1
        run = Operation(
            work_s=whole * (interval_s + save_s),
            segment_s=interval_s + save_s,
            checkpoint_s=save_s,
            crash_per_s=1 / mtbf_s,
            load_s=restart_s,
        )
        yield run, interval_s, mtbf_s


def test_the_mean_is_dalys() -> None:
    """Ours starts with nothing to load; his equation loads before the first segment too."""
    for run, interval_s, mtbf_s in drawn():
        steps_s = run.work_s - run.checkpointed_s
        daly_s = daly_mean_s(steps_s, interval_s, run.checkpoint_s, run.load_s, mtbf_s)
        assert mean_s(run) == pytest.approx(daly_s, rel=0.01)


def test_simulated_means_are_dalys() -> None:
    """Of every hundredth setting; 150 runs know the mean to 0.4 %."""
    known, each = list(drawn())[::100], 150
    runs = [run for run, *_ in known for _ in range(each)]
    times_s = simulate_runs(runs, Draws(0, len(runs))).time_s
    means_s = times_s.reshape(len(known), each).mean(axis=1)
    assert means_s == pytest.approx([mean_s(run) for run, *_ in known], rel=0.01)


def test_the_best_interval_is_that_of_dalys_figures() -> None:
    """Daly 2006, figures 3 to 5: a dump of 5 min, a failure every 24 h, 6 h and 15 min."""
    for mtbf_h, best_min in ((24, 117), (6, 57), (0.25, 9.1)):
        found_s = best_interval_s(300, 3600 * mtbf_h)
        assert found_s / 60 == pytest.approx(best_min, rel=0.01)


def test_the_best_interval_is_dalys() -> None:
    """Within 2 % for saves of up to a fifth of the MTBF; Young's is the limit of short ones."""
    for ratio in np.geomspace(1e-6, 0.2, 50):
        best_s = best_interval_s(ratio * 5000, 5000)
        assert best_s == pytest.approx(daly_interval_s(ratio * 5000, 5000), rel=0.02)
        run = Operation(work_s=1e9, crash_per_s=1 / 5000, checkpoint_s=ratio * 5000, segment_s=6000)
        means_s = [mean_s(run.with_interval(best_s * factor)) for factor in (0.98, 1, 1.02)]
        assert min(means_s) == means_s[1]
    assert best_interval_s(1e-3, 1e6) == pytest.approx(young_interval_s(1e-3, 1e6), rel=1e-3)
    assert best_interval_s(0.0, 1e6) == 0.0
    assert daly_interval_s(3.0, 1.0) == 1.0
    assert mean_s(Operation(work_s=5.0, init_s=2.0)) == 7.0


def test_the_mean_of_asynchronous_writes_is_that_of_many_runs() -> None:
    run = Operation(work_s=4e6, segment_s=2e3, checkpoint_s=50.0, write_s=1.5e3)
    run = replace(run, crash_per_s=1e-4, detect_s=600.0, init_s=90.0, load_s=60.0)
    for work_s in (1e6, 1e6 + 700, 3e3):
        asked = replace(run, work_s=work_s)
        times_s = simulate_runs([asked] * 1000, Draws(5, 1000)).time_s
        error = np.std(times_s) / np.sqrt(1000)
        assert np.mean(times_s) == pytest.approx(mean_s(asked), abs=3 * error)
    with pytest.raises(ValueError, match="closed form"):
        mean_s(replace(run, spares=1))


@pytest.mark.parametrize(
    ("changes", "key", "says"),
    [
        ({"load_s": 7200.0}, "mtbf", "an MTBF 4 times as long, or a restart of 30.0 min"),
        (
            {"write_s": 2500.0},
            "checkpoint_write.every",
            "write one after 41.7 min or later, or over 1.25 times",
        ),
        ({"checkpoint_s": 2000.0}, "checkpoint_write", "longer than the steps between"),
        ({"segment_s": 20_000.0}, "checkpoint_write.every", "write one after 1.00 h or sooner"),
    ],
)
def test_what_makes_no_progress_is_refused(changes: dict[str, float], key: str, says: str) -> None:
    run = Operation(work_s=1e6, segment_s=2e3, checkpoint_s=10.0, crash_per_s=1 / 3600)
    run.check()
    with pytest.raises(InputError) as told:
        replace(run, **changes).check()
    assert told.value.key == key
    assert says in told.value.message
