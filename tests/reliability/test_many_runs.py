"""Runs as arrays are the plain model's, time for time; every second has one cause."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training_of_days import simulate_run

from ddpsim.reliability import many_runs
from ddpsim.reliability.many_runs import Draws, simulate_runs
from ddpsim.reliability.operation import CAUSES, Operation

HOUR = 3600.0
RATES = st.one_of(st.just(0.0), st.floats(1.0, 40.0).map(lambda hours: 1 / (hours * HOUR)))


def seconds(most: float) -> st.SearchStrategy[float]:
    return st.one_of(st.just(0.0), st.floats(0.01 * most, most))


@st.composite
def operations(draw: st.DrawFn) -> Operation:
    segment_s = draw(st.floats(300, 5000))
    return Operation(
        work_s=draw(st.floats(5, 150)) * HOUR,
        segment_s=segment_s,
        checkpoint_s=segment_s * draw(st.floats(0.001, 0.2)),
        write_s=segment_s * draw(st.sampled_from([0.0, 0.1, 0.93])),
        crash_per_s=draw(RATES),
        detect_s=draw(seconds(900)),
        replace_s=draw(seconds(900)),
        init_s=draw(seconds(600)),
        load_s=draw(seconds(300)),
        nodes=draw(st.integers(1, 40)),
        spares=draw(st.sampled_from([None, 0, 1, 3])),
        repair_s=draw(st.floats(1, 60)) * HOUR,
        is_elastic=draw(st.booleans()),
        notice_per_s=draw(RATES),
        saves_on_notice=draw(st.booleans()),
        notice_replace_s=draw(seconds(3000)),
        straggler_per_s=draw(RATES),
        straggler_slowdown=draw(st.floats(1, 2)),
        straggler_found_s=draw(st.floats(0.1, 9)) * HOUR,
        maintenance_every_s=draw(st.sampled_from([inf, 30.1 * HOUR, 77.7 * HOUR])),
        maintenance_s=draw(seconds(5 * HOUR)),
    )


@settings(max_examples=10)
@given(st.lists(operations(), min_size=4, max_size=10), st.integers(0, 2**32))
def test_arrays_equal_the_plain_model(asked: list[Operation], seed: int) -> None:
    draws = Draws(seed, len(asked))
    runs = simulate_runs(asked, draws)
    for run, operation in enumerate(asked):
        told = simulate_run(operation, zip(draws.gaps[:, run], draws.kinds[:, run], strict=True))
        assert runs.time_s[run] == pytest.approx(told.time_s, rel=1e-9)
        assert runs.interruptions[run] == told.interruptions
        for cause in CAUSES:
            spent_s = told.spent_s[cause]
            assert runs.spent_s[cause][run] == pytest.approx(spent_s, abs=1e-6 * told.time_s)
        assert sum(told.spent_s.values()) == pytest.approx(told.time_s)


def test_without_failures_nothing_is_added() -> None:
    run = Operation(work_s=123456.789, segment_s=1000.0, checkpoint_s=3.3)
    runs = simulate_runs([run, replace(run, init_s=60.0)], Draws(0, 2))
    assert runs.time_s.tolist() == [123456.789, 123456.789 + 60.0]
    assert run.stretched(1.0) == run


def test_the_same_seed_is_the_same_run() -> None:
    run = Operation(work_s=9e5, segment_s=3e3, crash_per_s=1e-4, init_s=60, spares=1, repair_s=1e4)
    first, again, other = (simulate_runs([run] * 50, Draws(seed, 50)) for seed in (7, 7, 8))
    assert first.time_s.tobytes() == again.time_s.tobytes()
    assert first.time_s.tobytes() != other.time_s.tobytes()


def test_spares_and_elastic_restarts_spare_the_wait_for_repairs() -> None:
    run = Operation(
        work_s=600 * HOUR, crash_per_s=1 / (8 * HOUR), segment_s=HOUR, nodes=64, spares=0
    )
    run = replace(run, repair_s=24 * HOUR, init_s=300.0)
    kinds = [run, replace(run, is_elastic=True), replace(run, spares=4), replace(run, spares=None)]
    runs = simulate_runs([kind for kind in kinds for _ in range(40)], Draws(1, 160))
    none, elastic, four, always = np.mean(runs.time_s.reshape(4, 40), axis=1)
    assert none > 3 * four > 3 * always
    assert always < elastic < none
    waits = runs.spent_s["waiting_for_nodes"].reshape(4, 40).sum(axis=1)
    assert waits[3] == 0.0
    assert runs.spent_s["slow_steps"].reshape(4, 40).sum(axis=1)[[0, 2, 3]].tolist() == [0.0] * 3


def test_a_run_of_very_many_failures_is_extrapolated(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Operation(work_s=9e4, segment_s=60.0, checkpoint_s=1.0, crash_per_s=1 / 90, init_s=5.0)
    whole = simulate_runs([run] * 9, Draws(3, 9))
    monkeypatch.setattr(many_runs, "_MOST_EVENTS", 500)
    begun = simulate_runs([run] * 9, Draws(3, 9))
    assert np.mean(begun.time_s) == pytest.approx(np.mean(whole.time_s), rel=0.05)
    for runs in (whole, begun):
        assert sum(runs.spent_s.values()) == pytest.approx(runs.time_s, rel=1e-3)
