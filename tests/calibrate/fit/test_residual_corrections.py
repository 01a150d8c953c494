"""Corrections of a law at the sizes and line rates where it was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from measured.made_measurements import RATES, all_reduce_s, gloo_ring

from calibrate.fit.samples import Sample, fitted_sigma, measured_sigma
from ddpsim.cluster.fitted.laws import FittedCost
from ddpsim.cluster.fitted.residuals import CorrectedCost, Correction
from ddpsim.cluster.transfers import duration_ns
from ddpsim.importers.profiles.cluster import MeasuredTime

RATE = 62.5e6


def _twice_as_long(sizes: Sequence[int], factor: float, rate: float) -> list[MeasuredTime]:
    model = gloo_ring()
    return [
        MeasuredTime(
            nodes=2,
            gpus_per_node=1,
            size_bytes=size,
            time_s=factor * all_reduce_s(model, size, 2, 1, rate),
            line_rate_bytes_per_s=rate,
        )
        for size in sizes
    ]


def test_a_law_is_corrected_where_it_was_measured() -> None:
    """Twice as long at 1 MiB, four times at 4 MiB: 2^1.5 between, and no more beyond."""
    model = gloo_ring()
    measured = _twice_as_long([2**20], 2, RATE) + _twice_as_long([2**22], 4, RATE)
    correction = Correction.of(model, measured, 2, 1)
    for size, factor in ((2**18, 2), (2**20, 2), (2**21, 2**1.5), (2**22, 4), (2**25, 4)):
        assert correction.factor(model, size, RATE) == pytest.approx(factor)
    assert Correction.of(model, measured[::-1], 2, 1) == correction
    assert Correction.of(model, measured, 4, 1).factor(model, 2**20, RATE) == 1.0


def test_corrections_are_interpolated_between_line_rates() -> None:
    model = gloo_ring()
    measured = _twice_as_long([2**20], 1, RATE) + _twice_as_long([2**20], 4, 4 * RATE)
    correction = Correction.of(model, measured, 2, 1)
    for rate, factor in ((RATE / 2, 1), (RATE, 1), (2 * RATE, 2), (4 * RATE, 4), (9 * RATE, 4)):
        assert correction.factor(model, 2**20, rate) == pytest.approx(factor)


def test_one_slow_hour_in_three_corrects_nothing() -> None:
    model, once = gloo_ring(), _twice_as_long([2**20], 1, RATE)
    slow = _twice_as_long([2**20], 1.2, RATE)
    for measured, factor in ((once + slow + once, 1.0), (once + slow, 1.2**0.5), (slow, 1.2)):
        correction = Correction.of(model, measured, 2, 1)
        assert correction.factor(model, 2**20, RATE) == pytest.approx(factor)


def test_what_all_reduces_are_off_says_nothing_of_broadcasts() -> None:
    law = FittedCost(gloo_ring(), 2, 1, RATE)
    cost = CorrectedCost(law, Correction.of(law.model, _twice_as_long([2**20], 2, RATE), 2, 1))
    twice = law.stretched(2.0)
    assert cost.transfer("broadcast", 2**20) == law.transfer("broadcast", 2**20)
    assert cost.stretched(2.0).transfer("broadcast", 2**20) == twice.transfer("broadcast", 2**20)


@pytest.mark.parametrize("factor", [0.25, 0.9, 2.0])
def test_what_is_off_alike_at_every_size_is_off_on_the_link_too(factor: float) -> None:
    law = FittedCost(gloo_ring(), 2, 1, RATE)
    correction = Correction.of(law.model, _twice_as_long([2**20, 2**24], factor, RATE), 2, 1)
    for size in (2**18, 2**20, 2**22, 2**25):
        plain = law.transfer("all_reduce", size)
        found = CorrectedCost(law, correction).transfer("all_reduce", size)
        assert found.transfer_ns == pytest.approx(factor * plain.transfer_ns, abs=1)
        assert found.latency_ns == pytest.approx(factor * plain.latency_ns, abs=2)


def test_what_small_messages_take_longer_than_large_ones_is_latency() -> None:
    """Twice as long at 1 MiB, as the law says at 16: bytes take the same link."""
    law = FittedCost(gloo_ring(), 2, 1, RATE)
    measured = _twice_as_long([2**20], 2.0, RATE) + _twice_as_long([2**24], 1.0, RATE)
    cost = CorrectedCost(law, Correction.of(law.model, measured, 2, 1))
    for size, factor in ((2**20, 2.0), (2**22, 2**0.5), (2**24, 1.0)):
        plain, found = law.transfer("all_reduce", size), cost.transfer("all_reduce", size)
        assert found.transfer_ns == pytest.approx(plain.transfer_ns, abs=1)
        assert duration_ns(found) == pytest.approx(factor * duration_ns(plain), abs=2)


def test_a_message_that_was_faster_than_larger_ones_has_no_latency_below_zero() -> None:
    """Half as long at 1 MiB, twice at 16: the link is as fast as the whole of 1 MiB says."""
    law = FittedCost(gloo_ring(), 2, 1, RATE)
    measured = _twice_as_long([2**20], 0.5, RATE) + _twice_as_long([2**24], 2.0, RATE)
    cost = CorrectedCost(law, Correction.of(law.model, measured, 2, 1))
    small, large = (cost.transfer("all_reduce", size) for size in (2**20, 2**24))
    for size, found, factor in ((2**20, small, 0.5), (2**24, large, 2.0)):
        assert found.transfer_ns == pytest.approx(
            factor * law.transfer("all_reduce", size).transfer_ns, abs=1
        )
        assert found.latency_ns >= 0


def test_what_measurements_say_of_each_other() -> None:
    """A law that is off alike everywhere is corrected in full; too few sizes tell nothing."""
    model = gloo_ring()
    samples = [
        Sample(2, 1, m.size_bytes, m.time_s, m.line_rate_bytes_per_s)
        for rate in RATES
        for m in _twice_as_long([2**i for i in range(18, 25)], 1.3, rate)
    ]
    assert fitted_sigma(model, samples) == pytest.approx(math.log(1.3))
    assert [found.line_rate_bytes_per_s for found in measured_sigma(model, samples)] == list(RATES)
    for found in measured_sigma(model, samples):
        assert found.left_out == pytest.approx(0, abs=1e-9)
        assert found.repeated is None
    assert measured_sigma(model, samples[:3]) == ()


def _measured_at(rate: float, factors: Sequence[float]) -> list[Sample]:
    """From 1 MiB on, each size so many times as long as the law says."""
    return [
        Sample(2, 1, m.size_bytes, m.time_s, m.line_rate_bytes_per_s)
        for power, factor in enumerate(factors, 20)
        for m in _twice_as_long([2**power], factor, rate)
    ]


def test_a_size_is_told_by_its_neighbours() -> None:
    """One of five is 1.2 times as long: its two neighbours are told half of that, the ends none."""
    (found,) = measured_sigma(gloo_ring(), _measured_at(RATES[0], (1, 1, 1.2, 1, 1)))
    squares = (0, 0.5**2, 1, 0.5**2, 0)
    assert found.left_out == pytest.approx(math.log(1.2) * math.sqrt(sum(squares) / 5))


def test_a_line_rate_between_others_is_told_without_its_own_sizes() -> None:
    """All of the middle one are 1.2 times as long; the others are told by their own."""
    samples = [
        sample
        for rate, factor in zip(RATES, (1.0, 1.2, 1.0), strict=True)
        for sample in _measured_at(rate, [factor] * 5)
    ]
    slow, middle, fast = (found.left_out for found in measured_sigma(gloo_ring(), samples))
    assert middle == pytest.approx(math.log(1.2))
    assert (slow, fast) == (pytest.approx(0, abs=1e-9), pytest.approx(0, abs=1e-9))


def test_what_was_measured_twice_tells_of_another_day() -> None:
    """At one of the line rates everything takes 4 % longer in a second record."""
    model, rate = gloo_ring(), RATES[0]
    samples = [
        Sample(2, 1, m.size_bytes, m.time_s, m.line_rate_bytes_per_s)
        for line_rate, factors in ((rate, (1.0, 1.04)), (RATES[1], (1.0,)))
        for factor in factors
        for m in _twice_as_long([2**i for i in range(20, 25)], factor, line_rate)
    ]
    again, once = measured_sigma(model, samples)
    assert again.line_rate_bytes_per_s == rate
    assert again.repeated == pytest.approx(math.log(1.04) / math.sqrt(2))
    assert again.left_out == pytest.approx(math.log(1.04) / 2, rel=0.01)
    assert once.repeated is None
