"""What varies between ranks and iterations, as it is drawn."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from jobs.engine_runs import PLAIN

from ddpsim.cluster.transfers import Interference
from ddpsim.engine.noise import BURST_BYTES, draw_kept_deviations, draw_slowdowns, draw_stalls
from ddpsim.scenario.run import Jitter, Stalls


def test_good_and_bad_steps_of_a_rank_cancel() -> None:
    drawn = draw_kept_deviations(0, 3, 50, BURST_BYTES)
    assert drawn.shape == (3, 50, 2)
    assert drawn.mean(axis=(1, 2)) == pytest.approx([0] * 3, abs=1e-9)
    assert drawn.std(axis=(1, 2)) == pytest.approx([1] * 3, rel=0.03)
    assert (drawn == draw_kept_deviations(0, 3, 50, BURST_BYTES)).all()
    assert draw_kept_deviations(0, 3, 50, BURST_BYTES - 1).shape == (3, 50, 1)
    assert (drawn[0] != drawn[1]).any()


def test_what_a_rank_keeps_varies_as_far_up_as_down() -> None:
    half = Interference(compute=Fraction(2), kept_spread=0.25)
    slowings = [half.compute_on(deviations) for deviations in (0, -1, 1, -9, 9)]
    factors = [2, 4, Fraction(1333, 1000), 20, Fraction(1053, 1000)]  # 5 to 95 % of its speed
    assert slowings == [(factor, factor) for factor in factors]
    two = replace(half, crowded_compute=Fraction(4))
    assert two.compute_on(0) == (2, 4)
    assert two.compute_on(0.4) == (Fraction(1667, 1000), Fraction(2857, 1000))
    assert replace(half, compute=Fraction(5)).compute_on(0) == (5, 5)  # no less beside several
    assert Interference(kept_spread=0.25).compute_on(-1) == (1, 1)  # what nothing slows


OBSERVED = ((1.0, 1.2), (1.1, 1.4), (0.9, 1.0))


def draws(ranks: int, iterations: int, **run_options: Any) -> Any:
    cluster = PLAIN.cluster.model_copy(update={"nodes": 1, "gpus_per_node": ranks})
    options = PLAIN.run.model_copy(update=run_options)
    return draw_slowdowns(cluster, options, iterations, OBSERVED)


def test_the_warm_up_does_not_vary() -> None:
    cluster = PLAIN.cluster.model_copy(update={"gpus_per_node": 2})
    noisy = PLAIN.run.model_copy(
        update={"jitter": Jitter(sigma=0.1), "stalls": Stalls(probability=0.5, duration="1 ms")}
    )
    steady, drawn = (draw_slowdowns(cluster, noisy, 6, warmup=count) for count in (0, 3))
    assert steady is not None
    assert drawn is not None
    assert (drawn[:, :3] == 1).all()
    assert (drawn[:, 3:] == steady).all()
    stalls, later = (draw_stalls(noisy, 2, 50, warmup=count) for count in (0, 3))
    assert stalls is not None
    assert later is not None
    assert not later[:, :3].any()
    assert (later[:, 3:] == stalls).all()
    kept = draw_kept_deviations(0, 2, 6, BURST_BYTES, warmup=3)
    assert not kept[:, :3].any()
    assert (kept[:, 3:] == draw_kept_deviations(0, 2, 6, BURST_BYTES)).all()


def test_iterations_of_all_ranks_are_drawn_together_and_none_twice_before_the_others() -> None:
    first, second = draws(2, 6)
    factors = [(a / 1.1, b / 1.1) for a, b in OBSERVED]  # the mean of the medians 1.0 and 1.2
    drawn = list(zip(first, second, strict=True))
    for three in (drawn[:3], drawn[3:]):
        assert sorted(three) == [pytest.approx(pair) for pair in sorted(factors)]


def test_other_ranks_draw_each_for_itself_relative_to_the_medians() -> None:
    pool = sorted([1.0, 1.1, 0.9, 1.0, 1.4 / 1.2, 1.0 / 1.2])
    for rank in draws(3, 6):
        assert sorted(rank) == pytest.approx(pool)


def test_a_stated_jitter_goes_before_what_was_observed() -> None:
    assert draws(2, 4, jitter=Jitter(sigma=0)) is None
    assert (draws(2, 4, jitter=Jitter(sigma=0.1)) != draws(2, 4)).any()
    assert (draws(2, 4, seed=1) != draws(2, 4, seed=2)).any()
