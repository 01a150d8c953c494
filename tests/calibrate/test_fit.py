"""Fits of all-reduce times, interference, overheads and jitter.

Every time written here is SYNTHETIC, made from known figures. With DDPSIM_REFERENCE_DATA naming a
folder of published sweeps (`nccl/all_reduce.csv`, `nccl/logs/ID.txt`), those are fitted too.
"""

from __future__ import annotations

import csv
import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from calibrate.fit import (
    Fit,
    FitError,
    Sample,
    fit_all_reduce,
    fit_logs,
    fit_profile,
    residual_table,
    samples_of_logs,
    samples_of_records,
    show,
    write_residual_figure,
)
from calibrate.fit.estimates import averaged, line, median_time, pooled, trimmed_mean
from calibrate.fit.gloo import fit_half
from calibrate.fit.profile import NOT_STATED
from calibrate.fit.samples import fitted_sigma, measured_sigma
from calibrate.fit.show import data_loaders
from calibrate.records.record import (
    HALF,
    IN_A_ROW,
    RESTED,
    Environment,
    Layout,
    Measurement,
    Record,
    load_record,
)
from ddpsim.cluster.fitted.laws import AllReduceModel, FittedCost, all_reduce_s
from ddpsim.cluster.fitted.residuals import CorrectedCost, Correction
from ddpsim.cluster.transfers import WholeTransfer, duration_ns
from ddpsim.errors import ImportFailedError, InputError
from ddpsim.importers.all_reduce import AllReduceLog, read_all_reduce
from ddpsim.importers.profiles.cluster import (
    ClusterProfile,
    Fitted,
    GlooRing,
    MeasuredTime,
    NcclRegime,
    NcclRegimes,
)
from ddpsim.scenario.quantity import SourceFile

SIZES = [2**k for k in range(10, 28)]
NO_SHRINKING = [Phase.explicit, Phase.generate]  # fits take a second
FEW_SIZES = [2**k for k in range(10, 28, 2)]
RATES = (62.5e6, 250e6, 1.25e9)


def _regime(
    shape: str = "ring",
    base: float = 10e-6,
    hop: float = 0.0,
    inter: float | None = None,
    intra: float | None = None,
    hop_bytes: float = 0.0,
    intra_hop: float = 0.0,
) -> NcclRegime:
    def optional(value: float | None) -> Fitted | None:
        return None if value is None else Fitted(value=value)

    return NcclRegime(
        shape=shape,
        base_s=Fitted(value=base),
        intra_hop_s=Fitted(value=intra_hop),
        inter_hop_s=Fitted(value=hop),
        hop_bytes=Fitted(value=hop_bytes),
        intra_bandwidth_bytes_per_s=optional(intra),
        inter_bandwidth_bytes_per_s=optional(inter),
    )


def _gloo(
    queue: float = 2e-4,
    segment: float = 6e-5,
    wire: float = 1.045,
    reduce: float = 2.5e9,
    burst: float = 9e4,
    line_rate: float = 1.25e9,
) -> GlooRing:
    return GlooRing(
        queue_s=Fitted(value=queue),
        segment_s=Fitted(value=segment),
        wire_bytes_per_byte=Fitted(value=wire),
        reduce_bytes_per_s=Fitted(value=reduce),
        burst_bytes=Fitted(value=burst),
        line_rate_bytes_per_s=line_rate,
    )


def _made(
    model: AllReduceModel,
    layouts: Iterable[tuple[int, int]],
    sizes: Iterable[int] = SIZES,
    rates: Iterable[float | None] = (None,),
    noise: float = 0.0,
    seed: int = 0,
) -> list[Sample]:
    random = np.random.default_rng(seed)
    return [
        Sample(
            nodes,
            gpus,
            size,
            all_reduce_s(model, size, nodes, gpus, rate) * math.exp(noise * random.normal()),
            rate,
        )
        for nodes, gpus in layouts
        for rate in rates
        for size in sizes
    ]


def _errors(model: AllReduceModel, samples: Iterable[Sample]) -> list[float]:
    return [
        abs(all_reduce_s(model, s.size_bytes, s.nodes, s.gpus_per_node, s.line_rate) / s.time_s - 1)
        for s in samples
    ]


NODE = NcclRegimes(regimes=(_regime(intra=2e9), _regime(base=60e-6, intra=100e9)))
NODES = NcclRegimes(
    regimes=(
        _regime("tree", base=8e-6, hop=6e-6, inter=1e9),
        _regime("ring", base=30e-6, hop=15e-6, inter=20e9, hop_bytes=16384),
    )
)


# the formulas


def test_a_ring_over_nodes_by_hand() -> None:
    """2 x 4 ranks: 12 hops inside nodes, 2 between; 8 shares of 16 kB are free."""
    model = NcclRegimes(
        regimes=(_regime("ring", 5e-6, 4e-6, inter=10e9, hop_bytes=16_000, intra_hop=1e-6),)
    )
    seconds = 5e-6 + 12 * 1e-6 + 2 * 4e-6 + 2 * 7 / 8 * (1_128_000 - 128_000) / 10e9
    assert seconds == pytest.approx(200e-6)
    assert all_reduce_s(model, 1_128_000, 2, 4) == pytest.approx(seconds)
    assert all_reduce_s(model, 128_000, 2, 4) == pytest.approx(25e-6)  # all within the hops


def test_a_tree_over_nodes_by_hand() -> None:
    """4 x 8 ranks: 14 hops inside a node, 2 log2(4) between; 1 kB is free, once."""
    model = NcclRegimes(
        regimes=(_regime("tree", 5e-6, 4e-6, inter=10e9, hop_bytes=1000, intra_hop=1e-6),)
    )
    seconds = 5e-6 + 14e-6 + 16e-6 + 2 * 31 / 32 * 1_000_000 / 10e9
    assert all_reduce_s(model, 1_001_000, 4, 8) == pytest.approx(seconds)


def test_the_fastest_regime_of_the_layout_wins() -> None:
    assert all_reduce_s(NODE, 1024, 1, 2) == pytest.approx(10e-6 + 1024 / 2e9)
    assert all_reduce_s(NODE, 2**27, 1, 2) == pytest.approx(60e-6 + 2**27 / 100e9)
    with pytest.raises(InputError) as raised:
        all_reduce_s(NODE, 1024, 2, 2)
    assert str(raised.value) == (
        "cluster.profile: was fitted without a measurement on several nodes; "
        "measure there, and fit again, or state cluster.inter_node"
    )
    with pytest.raises(InputError, match="measurement on one node;"):
        all_reduce_s(NODES, 1024, 1, 4)


def broadcast_s(
    model: AllReduceModel, size_bytes: int, nodes: int, gpus: int, rate: float | None = None
) -> float:
    cost = FittedCost(model, nodes, gpus, rate)
    return duration_ns(cost.transfer("broadcast", size_bytes)) * 1e-9


def test_a_broadcast_round_the_ring_has_half_the_hops_and_the_message_once() -> None:
    assert broadcast_s(NODES, 2**24, 4, 1) == pytest.approx(
        30e-6 + 3 * 15e-6 + (2**24 - 4 * 16384) / 20e9, rel=1e-5
    )
    trees = NcclRegimes(regimes=NODES.regimes[:1])
    assert broadcast_s(trees, 2**24, 4, 1) == pytest.approx(8e-6 + 2 * 6e-6 + 2**24 / 1e9, rel=1e-5)


def test_gloo_on_the_wire_by_hand() -> None:
    """4 MiB on 2 ranks at 500 Mbit/s: 4 segments of 1 MiB, two a phase; the link decides."""
    model = _gloo(queue=1e-3, segment=1e-4, wire=1.05, reduce=1e9, burst=0)
    wire_s = 2**20 * 1.05 / 62.5e6
    seconds = 1e-3 + 4 * wire_s + 2 * 1e-4 + 2**20 / 1e9
    assert all_reduce_s(model, 2**22, 2, 1, 62.5e6) == pytest.approx(seconds)


def test_gloo_of_small_segments_waits_for_software() -> None:
    """1 kB on 2 ranks: 4 segments of 256 B, two a phase in flight together."""
    model = _gloo(queue=1e-3, segment=1e-4, wire=1.0, reduce=1e12, burst=0)
    wire_s = 256 / 1.25e9
    assert all_reduce_s(model, 1024, 2, 1) == pytest.approx(
        1e-3 + 4 * (1e-4 + wire_s) / 2 + 2 * 1e-4, rel=1e-5
    )


def test_what_a_shaper_lets_through_takes_no_time_on_the_wire() -> None:
    shaped, free = _gloo(burst=2e6, reduce=1e12), _gloo(burst=0, reduce=1e12)
    size = 2**24
    spared_s = all_reduce_s(free, size, 2, 1, 62.5e6) - all_reduce_s(shaped, size, 2, 1, 62.5e6)
    assert spared_s == pytest.approx(2e6 / 62.5e6, rel=0.02)
    within = all_reduce_s(shaped, 2**20, 2, 1, 62.5e6)
    assert within == pytest.approx(all_reduce_s(shaped, 2**20, 2, 1, 1e12), rel=1e-3)


def test_gloo_broadcasts_down_a_tree() -> None:
    model = _gloo(queue=1e-3, segment=1e-4, wire=1.1, burst=110)
    wire_s = (3 * 10_000 * 1.1 - 110) / 1e6
    assert broadcast_s(model, 10_000, 5, 1, 1e6) == pytest.approx(1e-3 + 3e-4 + wire_s, rel=1e-5)


def test_a_cost_for_the_engine() -> None:
    cost = FittedCost(NODE, 1, 2)
    assert cost.transfer("all_reduce", 2_000) == WholeTransfer(10_000, 1_000)
    assert cost.stretched(2.0).transfer("all_reduce", 2_000) == WholeTransfer(20_000, 2_000)
    assert cost.transfer("broadcast", 2_000) == WholeTransfer(10_000, 1_000)
    slow = FittedCost(_gloo(burst=0), 2, 1, 62.5e6).transfer("all_reduce", 2**24)
    assert slow.transfer_ns == round(2**24 * 1.045 / 62.5e6 * 1e9)  # what two in flight share
    total_s = all_reduce_s(_gloo(burst=0), 2**24, 2, 1, 62.5e6)
    assert slow.latency_ns + slow.transfer_ns == pytest.approx(total_s * 1e9, abs=2)


RATE = 62.5e6


def _twice_as_long(sizes: Sequence[int], factor: float, rate: float) -> list[MeasuredTime]:
    model = _gloo()
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
    model = _gloo()
    measured = _twice_as_long([2**20], 2, RATE) + _twice_as_long([2**22], 4, RATE)
    correction = Correction.of(model, measured, 2, 1)
    for size, factor in ((2**18, 2), (2**20, 2), (2**21, 2**1.5), (2**22, 4), (2**25, 4)):
        assert correction.factor(model, size, RATE) == pytest.approx(factor)
    assert Correction.of(model, measured[::-1], 2, 1) == correction
    assert Correction.of(model, measured, 4, 1).factor(model, 2**20, RATE) == 1.0


def test_corrections_are_interpolated_between_line_rates() -> None:
    model = _gloo()
    measured = _twice_as_long([2**20], 1, RATE) + _twice_as_long([2**20], 4, 4 * RATE)
    correction = Correction.of(model, measured, 2, 1)
    for rate, factor in ((RATE / 2, 1), (RATE, 1), (2 * RATE, 2), (4 * RATE, 4), (9 * RATE, 4)):
        assert correction.factor(model, 2**20, rate) == pytest.approx(factor)


def test_one_slow_hour_in_three_corrects_nothing() -> None:
    model, once = _gloo(), _twice_as_long([2**20], 1, RATE)
    slow = _twice_as_long([2**20], 1.2, RATE)
    for measured, factor in ((once + slow + once, 1.0), (once + slow, 1.2**0.5), (slow, 1.2)):
        correction = Correction.of(model, measured, 2, 1)
        assert correction.factor(model, 2**20, RATE) == pytest.approx(factor)


def test_what_all_reduces_are_off_says_nothing_of_broadcasts() -> None:
    law = FittedCost(_gloo(), 2, 1, RATE)
    cost = CorrectedCost(law, Correction.of(law.model, _twice_as_long([2**20], 2, RATE), 2, 1))
    twice = law.stretched(2.0)
    assert cost.transfer("broadcast", 2**20) == law.transfer("broadcast", 2**20)
    assert cost.stretched(2.0).transfer("broadcast", 2**20) == twice.transfer("broadcast", 2**20)


@pytest.mark.parametrize("factor", [0.25, 0.9, 2.0])
def test_what_is_off_alike_at_every_size_is_off_on_the_link_too(factor: float) -> None:
    law = FittedCost(_gloo(), 2, 1, RATE)
    correction = Correction.of(law.model, _twice_as_long([2**20, 2**24], factor, RATE), 2, 1)
    for size in (2**18, 2**20, 2**22, 2**25):
        plain = law.transfer("all_reduce", size)
        found = CorrectedCost(law, correction).transfer("all_reduce", size)
        assert found.transfer_ns == pytest.approx(factor * plain.transfer_ns, abs=1)
        assert found.latency_ns == pytest.approx(factor * plain.latency_ns, abs=2)


def test_what_small_messages_take_longer_than_large_ones_is_latency() -> None:
    """Twice as long at 1 MiB, as the law says at 16: bytes take the same link."""
    law = FittedCost(_gloo(), 2, 1, RATE)
    measured = _twice_as_long([2**20], 2.0, RATE) + _twice_as_long([2**24], 1.0, RATE)
    cost = CorrectedCost(law, Correction.of(law.model, measured, 2, 1))
    for size, factor in ((2**20, 2.0), (2**22, 2**0.5), (2**24, 1.0)):
        plain, found = law.transfer("all_reduce", size), cost.transfer("all_reduce", size)
        assert found.transfer_ns == pytest.approx(plain.transfer_ns, abs=1)
        assert duration_ns(found) == pytest.approx(factor * duration_ns(plain), abs=2)


def test_a_message_that_was_faster_than_larger_ones_has_no_latency_below_zero() -> None:
    """Half as long at 1 MiB, twice at 16: the link is as fast as the whole of 1 MiB says."""
    law = FittedCost(_gloo(), 2, 1, RATE)
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
    model = _gloo()
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
    (found,) = measured_sigma(_gloo(), _measured_at(RATES[0], (1, 1, 1.2, 1, 1)))
    squares = (0, 0.5**2, 1, 0.5**2, 0)
    assert found.left_out == pytest.approx(math.log(1.2) * math.sqrt(sum(squares) / 5))


def test_a_line_rate_between_others_is_told_without_its_own_sizes() -> None:
    """All of the middle one are 1.2 times as long; the others are told by their own."""
    samples = [
        sample
        for rate, factor in zip(RATES, (1.0, 1.2, 1.0), strict=True)
        for sample in _measured_at(rate, [factor] * 5)
    ]
    slow, middle, fast = (found.left_out for found in measured_sigma(_gloo(), samples))
    assert middle == pytest.approx(math.log(1.2))
    assert (slow, fast) == (pytest.approx(0, abs=1e-9), pytest.approx(0, abs=1e-9))


def test_what_was_measured_twice_tells_of_another_day() -> None:
    """At one of the line rates everything takes 4 % longer in a second record."""
    model, rate = _gloo(), RATES[0]
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


# known figures are found again


@settings(max_examples=5, deadline=None, phases=NO_SHRINKING)
@given(
    base=st.floats(5e-6, 3e-5),
    slow=st.floats(1e9, 4e9),
    crossing=st.floats(2**17, 2**21),
    faster=st.floats(8.0, 50.0),
)
def test_regimes_of_one_node_are_recovered(
    base: float, slow: float, crossing: float, faster: float
) -> None:
    """On 8 ranks; the second is the faster one above the size `crossing`."""
    later = base + 1.75 * crossing / slow * (1 - 1 / faster)
    regimes = (_regime(base=base, intra=slow), _regime(base=later, intra=slow * faster))
    samples = _made(NcclRegimes(regimes=regimes), [(1, 8)])
    found = fit_all_reduce(samples, "nccl").model.regimes
    assert len(found) == 2
    for one, true in zip(found, regimes, strict=True):
        assert one.base_s.value == pytest.approx(true.base_s.value, rel=1e-3)
        assert one.intra_bandwidth_bytes_per_s.value == pytest.approx(
            true.intra_bandwidth_bytes_per_s.value, rel=1e-3
        )
        assert one.hop_bytes == Fitted(value=0.0)


def test_the_figures_of_regimes_over_nodes_are_recovered() -> None:
    fit = fit_all_reduce(_made(NODES, [(2, 4), (4, 4), (8, 4)]), "nccl")
    tree, ring = fit.model.regimes
    assert (tree.shape, ring.shape) == ("tree", "ring")
    for found, true in zip((tree, ring), NODES.regimes, strict=True):
        assert found.base_s.value == pytest.approx(true.base_s.value, rel=1e-4)
        assert found.inter_hop_s.value == pytest.approx(true.inter_hop_s.value, rel=1e-4)
        assert found.hop_bytes.value == pytest.approx(true.hop_bytes.value, rel=1e-3)
        assert found.inter_bandwidth_bytes_per_s.value == pytest.approx(
            true.inter_bandwidth_bytes_per_s.value, rel=1e-4
        )
    assert fit.sigma < 1e-5


def test_hops_inside_and_between_nodes_are_told_apart_by_layouts_that_differ_in_both() -> None:
    truth = NcclRegimes(regimes=(_regime("ring", 2e-5, 8e-6, inter=20e9, intra_hop=2e-6),))
    fit = fit_all_reduce(_made(truth, [(2, 2), (2, 4), (2, 8), (4, 4), (4, 2)]), "nccl")
    (found,) = fit.model.regimes
    assert found.shape == "ring"
    assert found.intra_hop_s.value == pytest.approx(2e-6, rel=1e-4)
    assert found.inter_hop_s.value == pytest.approx(8e-6, rel=1e-4)


@settings(max_examples=15, deadline=None, phases=NO_SHRINKING)
@given(
    queue=st.floats(5e-5, 1e-3),
    segment=st.floats(2e-5, 3e-4),
    wire=st.floats(1.01, 1.2),
    burst=st.floats(2e4, 5e5),
)
def test_figures_of_gloo_are_recovered(
    queue: float, segment: float, wire: float, burst: float
) -> None:
    truth = _gloo(queue, segment, wire, 1e9, burst)
    fit = fit_all_reduce(_made(truth, [(2, 1), (4, 1)], rates=RATES), "gloo")
    for found, true in (
        (fit.model.queue_s, queue),
        (fit.model.segment_s, segment),
        (fit.model.wire_bytes_per_byte, wire),
        (fit.model.reduce_bytes_per_s, 1e9),
        (fit.model.burst_bytes, burst),
    ):
        assert found.value == pytest.approx(true, rel=1e-3)


def test_gloo_without_line_rates_has_the_payloads_rate_in_their_place() -> None:
    truth = _gloo(wire=1.0, burst=0.0, line_rate=3e8)
    fit = fit_all_reduce(_made(truth, [(1, 2), (1, 4)]), "gloo")
    assert fit.model.line_rate_bytes_per_s == pytest.approx(3e8, rel=1e-3)
    assert fit.model.wire_bytes_per_byte == Fitted(value=1.0)
    assert fit.warnings == (
        (
            "the links' line rate is not known: the payload's rate was fitted in its place, and "
            "holds for this machine alone"
        ),
    )


NOISY = {
    "nccl": _made(NODES, [(2, 4), (4, 4)], FEW_SIZES, noise=0.02),
    "gloo": _made(_gloo(), [(2, 1)], FEW_SIZES, RATES, noise=0.02),
}


@cache
def _noisy_fit(backend: str) -> Fit:
    return fit_all_reduce(NOISY[backend], backend)


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@settings(max_examples=2, deadline=None, phases=NO_SHRINKING)
@given(random=st.randoms(use_true_random=False))
def test_the_order_of_the_samples_does_not_matter(backend: str, random: Any) -> None:
    shuffled = list(NOISY[backend])
    random.shuffle(shuffled)
    assert fit_all_reduce(shuffled, backend) == _noisy_fit(backend)


def _rounded_otherwise(samples: Sequence[Sample]) -> list[Sample]:
    """As another processor's library might: other last digits."""
    return [
        replace(sample, time_s=sample.time_s * (1 + (-1) ** i * 1e-13))
        for i, sample in enumerate(samples)
    ]


def _assert_same_times(one: AllReduceModel, other: AllReduceModel, at: Sequence[Sample]) -> None:
    for s in at:
        point = s.size_bytes, s.nodes, s.gpus_per_node
        assert all_reduce_s(one, *point) == pytest.approx(all_reduce_s(other, *point), rel=1e-3)


@pytest.mark.parametrize("seed", range(4))
def test_rounding_does_not_choose_what_measurements_do_not_tell(seed: int) -> None:
    """One sample a regime lies beyond its hop: its bytes and the bandwidth are told together."""
    regimes = (
        _regime(base=1.0e-4, inter=2e8, hop_bytes=2**11),
        _regime(base=2.4e-4, inter=2e9, hop_bytes=2**16),
    )
    every = _made(NcclRegimes(regimes=regimes), [(2, 1)], SIZES, noise=0.01, seed=seed)
    samples = every[::2]
    models = [fit_all_reduce(s, "nccl").model for s in (samples, _rounded_otherwise(samples))]
    _assert_same_times(*models, at=every)


@settings(max_examples=2, deadline=None, phases=NO_SHRINKING)
@given(factor=st.floats(0.1, 10.0))
def test_times_k_times_as_long_make_all_seconds_k_times_as_long(factor: float) -> None:
    longer = [replace(sample, time_s=sample.time_s * factor) for sample in NOISY["nccl"]]
    fit, known = fit_all_reduce(longer, "nccl"), _noisy_fit("nccl")
    assert [regime.shape for regime in fit.model.regimes] == ["tree", "ring"]
    for found, before in zip(fit.model.regimes, known.model.regimes, strict=True):
        assert found.base_s.value == pytest.approx(before.base_s.value * factor, rel=1e-3)
        assert found.inter_hop_s.value == pytest.approx(before.inter_hop_s.value * factor, rel=1e-3)
        assert found.inter_bandwidth_bytes_per_s.value == pytest.approx(
            before.inter_bandwidth_bytes_per_s.value / factor, rel=1e-3
        )


@pytest.mark.parametrize(
    ("backend", "truth", "layouts", "rates"),
    [("nccl", NODES, [(2, 4), (4, 4), (8, 4)], [None]), ("gloo", _gloo(), [(2, 1)], RATES)],
)
def test_one_row_in_ten_may_be_wrong(
    backend: str, truth: AllReduceModel, layouts: Any, rates: Any
) -> None:
    good = _made(truth, layouts, rates=rates, noise=0.01)
    bad = [replace(s, time_s=s.time_s * (3.0 if i % 10 == 4 else 1.0)) for i, s in enumerate(good)]
    fit = fit_all_reduce(bad, backend)
    usual = [s for s in _made(truth, layouts, rates=rates) if s.size_bytes >= 2**20]
    assert median(_errors(fit.model, usual)) < 0.02


def _covered(truths: dict[str, float], fits: Sequence[Callable[[str], Fitted]]) -> float:
    """The part of the true figures that lie within 1.96 standard errors."""
    hits = [
        abs(fitted(name).value - true) < 1.96 * (fitted(name).stderr or 0.0)
        for fitted in fits
        for name, true in truths.items()
    ]
    return float(np.mean(hits))


def test_standard_errors_cover_the_truth_about_as_often_as_they_say() -> None:
    """95 % by their definition; 84 % to 100 % over 40 seeds."""
    truths = {"queue_s": 2e-4, "segment_s": 6e-5, "wire_bytes_per_byte": 1.045}
    fits = []
    for seed in range(40):
        samples = _made(_gloo(), [(2, 1)], FEW_SIZES, RATES, noise=0.02, seed=seed)
        model = fit_all_reduce(samples, "gloo").model
        fits.append(lambda name, model=model: getattr(model, name))
    assert 0.84 <= _covered(truths, fits) <= 1.0


def test_standard_errors_of_nccl_cover_the_truth_too() -> None:
    """Less often: that regimes were chosen from the same data is not in the errors."""
    truths = {"base_s": 20e-6, "intra_bandwidth_bytes_per_s": 50e9}
    truth = NcclRegimes(regimes=(_regime(base=20e-6, intra=50e9),))
    fits = []
    for seed in range(15):
        samples = _made(truth, [(1, 8)], noise=0.02, seed=seed)
        regime = fit_all_reduce(samples, "nccl").model.regimes[0]
        fits.append(lambda name, regime=regime: getattr(regime, name))
    assert 0.75 <= _covered(truths, fits) <= 1.0


# what a fit says of itself


def test_one_layout_is_usable_and_says_what_it_does_not_hold() -> None:
    fit = fit_all_reduce(_made(NODES, [(2, 4)]), "nccl")
    assert fit.warnings == (
        (
            "one layout on several nodes (2 x 4): hops cannot be separated from the base, so its "
            "latency on others is assumed"
        ),
    )
    assert fit.valid.layouts == ((2, 4),)
    assert fit.valid.size_bytes == (1024, 2**27)
    assert {regime.inter_hop_s for regime in fit.model.regimes} == {Fitted(value=0.0)}


def test_two_numbers_of_nodes_of_the_same_size() -> None:
    assert _noisy_fit("nccl").warnings == (
        (
            "not enough data for hops inside a node: the layouts over several nodes "
            "differ in their nodes alone, and hops between nodes stand for both"
        ),
        (
            "only 2 and 4 nodes were measured: which regimes are trees is assumed (the one for the "
            "smallest messages)"
        ),
    )


def test_figures_at_their_bound() -> None:
    truth = NcclRegimes(regimes=(_regime(base=0.0, intra=1e9),))
    fit = fit_all_reduce(_made(truth, [(1, 4)]), "nccl")
    assert fit.model.regimes[0].base_s == Fitted(value=0.0)
    assert fit.warnings[1:] == ("regime 1 on one node: base is at its bound",)


def test_one_line_rate_and_a_reduction_that_never_shows() -> None:
    truth = _gloo(reduce=1e12, burst=0.0)
    fit = fit_all_reduce(_made(truth, [(2, 1)], rates=[62.5e6], noise=0.005), "gloo")
    assert fit.warnings == (
        (
            "one line rate: what the processor adds to a byte cannot be separated from "
            "what the wire does; measure at another rate before another rate is predicted"
        ),
        "not enough data for reduce rate: adding is always hidden behind the wire",
    )


def test_gloo_at_its_bounds() -> None:
    truth = _gloo(queue=0.0, wire=1.0, burst=0.0)
    fit = fit_all_reduce(_made(truth, [(2, 1), (3, 1)], rates=RATES), "gloo")
    assert fit.warnings == ("queue is at its bound", "wire bytes per byte is at its bound")


def test_a_layout_with_few_sizes_does_not_count() -> None:
    enough, few = _made(NODES, [(2, 4)]), _made(NODES, [(4, 4)], [1024, 2048, 4096, 8192])
    fit = fit_all_reduce([*enough, *few], "nccl")
    alone = fit_all_reduce(enough, "nccl")
    assert fit.model == alone.model
    assert fit.warnings[0].startswith("message sizes on 4 x 4 ranks are too few (4): measure 5 ")
    assert fit.warnings[0].endswith("; these do not count")
    assert fit.warnings[1:] == alone.warnings


@pytest.mark.parametrize(
    ("backend", "samples", "message"),
    [
        (
            "nccl",
            [],
            "no all-reduce of two ranks or more was measured: there is nothing to fit",
        ),
        (
            "nccl",
            _made(NODES, [(4, 4)], [1024, 2048, 4096, 8192]),
            (
                "message sizes on 4 x 4 ranks are too few (4): measure 5 or more, from a "
                "few kB to the largest bucket"
            ),
        ),
        (
            "gloo",
            _made(_gloo(), [(2, 1)], [1024, 2048, 4096]),
            "message sizes are too few (3): measure 5 or more, from a few kB to the largest bucket",
        ),
        (
            "gloo",
            _made(_gloo(), [(2, 1)], rates=[None, 1e9]),
            (
                "the links' line rate is known for some of the measurements only: state it for all "
                "records, or fit them one by one"
            ),
        ),
    ],
)
def test_what_cannot_be_fitted(backend: Any, samples: list[Sample], message: str) -> None:
    with pytest.raises(FitError) as raised:
        fit_all_reduce(samples, backend)
    assert str(raised.value) == message


# records


def _environment(**changes: Any) -> Environment:
    known: dict[str, Any] = {
        "created": "2026-01-02T03:04:05Z",
        "machine": "SYNTHETIC, 2 cores",
        "device": "cpu",
        "torch": "2.13.0",
        "backend": "gloo",
        "library": "torch 2.13.0",
        "variables": {},
        "details": {},
    }
    return Environment(**known | changes)


def _around(middle: float, spread: float = 0.01, seed: int = 0) -> tuple[float, ...]:
    random = np.random.default_rng(seed)
    return tuple((middle * np.exp(spread * random.normal(size=21))).tolist())


def _record(
    line_rate: float | None = 62.5e6,
    per_byte: float = 1e-9,
    constant: float = 1.0,
    model: AllReduceModel | None = None,
    **changes: Any,
) -> Record:
    """Compute is constant / (1 - per_byte x (bytes sent a second)) times longer, comm 1.2 times."""
    model = model or _gloo()

    def seconds(size: int) -> float:
        return all_reduce_s(model, size, 2, 1, line_rate)

    def measured(kind: Any, variant: str, time_s: float, **more: Any) -> Measurement:
        return Measurement(kind=kind, variant=variant, samples_s=_around(time_s), **more)

    pair = {"group": "world", "nodes": 2, "gpus_per_node": 1}
    found = [
        measured("all_reduce", "alone", seconds(size), size_bytes=size, **pair) for size in SIZES
    ]
    beside, largest_s = 2**22, seconds(2**22)
    sent = beside / (1.2 * largest_s)
    for name in ("gemm", "memory"):
        longer = constant / (1 - per_byte * sent)
        found += [
            measured("all_reduce", f"with {name}", 1.2 * largest_s, size_bytes=beside, **pair),
            measured("compute", f"{name} alone", 0.01, size_bytes=beside, **pair),
            measured(
                "compute", f"{name} with all_reduce", 0.01 * longer, size_bytes=beside, **pair
            ),
        ]
    found += [
        measured("ddp_hook", "without", 0.05, parameters=100),
        measured("ddp_hook", "with ddp", 0.0505, parameters=100),
        measured("ddp_hook", "without", 0.1, size_bytes=64_000_000, parameters=128),
        measured("ddp_hook", "with ddp", 0.14864, size_bytes=64_000_000, parameters=128),
        measured("device_cast", "compress", 0.002, size_bytes=4_000_000),
        measured("device_cast", "decompress", 0.001, size_bytes=4_000_000),
        measured("device_copy", "alone", 0.001, size_bytes=4_000_000),
        measured("device_copy", "alone", 0.0001, size_bytes=4_000),
    ]
    layout = Layout(nodes=2, gpus_per_node=1, line_rate_bytes_per_s=line_rate)
    return Record(environment=_environment(**changes), layout=layout, measurements=tuple(found))


def _jitter(iterations: int, sigma: float, memory: float = 0.0) -> Measurement:
    random = np.random.default_rng(5)
    ranks = []
    for middle in (0.010, 0.011):
        noise = random.normal(size=iterations)
        for i in range(1, iterations):
            noise[i] = memory * noise[i - 1] + math.sqrt(1 - memory**2) * noise[i]
        ranks.append(tuple((middle * np.exp(sigma * noise)).tolist()))
    return Measurement(kind="jitter", samples_s=ranks[0], samples_by_rank_s=tuple(ranks))


def test_measured_broadcasts_are_in_the_profile() -> None:
    record = _record()
    pair = {"group": "world", "nodes": 2, "gpus_per_node": 1}
    broadcasts = [
        Measurement(kind="broadcast", samples_s=(time_s,) * 9, size_bytes=size, **pair)
        for size, time_s in ((2**16, 0.002), (2**20, 0.03))
    ]
    whole = record.model_copy(update={"measurements": (*record.measurements, *broadcasts)})
    found = fit_profile([whole], "cluster").measured_broadcasts
    assert [(each.size_bytes, each.time_s) for each in found] == [(2**16, 0.002), (2**20, 0.03)]
    assert {(each.nodes, each.line_rate_bytes_per_s) for each in found} == {(2, 62.5e6)}
    assert "broadcasts: 65.54 kB to 1.049 MB" in show(fit_profile([whole], "cluster"))
    assert fit_profile([record], "cluster").measured_broadcasts == ()


def test_a_profile_from_a_record() -> None:
    record = _record().with_measurement(_jitter(500, 0.02, memory=0.5))
    profile = fit_profile([record], "testbed", ["a.json"])
    assert profile.backend == "gloo"
    assert profile.valid.line_rates_bytes_per_s == (62.5e6,)
    assert profile.provenance.sources == ("a.json",)
    found = profile.interference
    assert found is not None
    assert found.comm_slowdown == found.compute_slowdown == Fitted(value=1.0)
    alone_bytes_per_s = 2**22 / all_reduce_s(_gloo(), 2**22, 2, 1, 62.5e6)
    more = found.comm_slowdown_s2_per_byte2.value * alone_bytes_per_s**2
    law = FittedCost(_gloo(), 2, 1, 62.5e6).transfer("all_reduce", 2**22)
    # no queue was measured alone: it is taken to leave the link idle at no time
    assert 1 + more == pytest.approx(1.2 * duration_ns(law) / law.transfer_ns, rel=0.01)
    (point,) = found.compute_kept
    assert 1 - point.share.value == pytest.approx(1e-9 * point.sent_bytes_per_s, rel=5e-3)
    assert found.half_compute_kept == ()
    assert profile.overheads.hook_s is not None
    assert profile.overheads.hook_s.value == pytest.approx(5e-6, rel=5e-3)
    assert profile.overheads.copy_bytes_per_s is not None
    assert profile.overheads.copy_bytes_per_s.value == pytest.approx(8e9, rel=0.01)
    # 128 hooks of 5 us and 16 ms of copies back leave 32 ms for copies of 64 MB into buckets
    (copies,) = profile.overheads.copy_in
    assert copies.gradient_bytes == 1_000_000
    assert copies.bytes_per_s.value == pytest.approx(4e9, rel=0.01)
    assert profile.overheads.compress_bytes_per_s is not None
    assert profile.overheads.compress_bytes_per_s.value == pytest.approx(2e9, rel=0.01)
    assert profile.overheads.decompress_bytes_per_s is not None
    assert profile.overheads.decompress_bytes_per_s.value == pytest.approx(4e9, rel=0.01)
    assert profile.jitter is not None
    assert profile.jitter.iteration_sigma == pytest.approx(0.02, rel=0.1)
    assert profile.jitter.autocorrelation == pytest.approx(0.5, abs=0.1)
    assert profile.jitter.rank_sigma == pytest.approx(math.log(1.1) / math.sqrt(2), rel=0.05)
    assert "one line rate: all of gloo's interference" in profile.warnings[-1]
    assert ClusterProfile.model_validate_json(profile.model_dump_json(by_alias=True)) == profile


def _with_large_layers(with_ddp_s: float) -> Record:
    """DDP's backward over large layers takes so long."""
    record = _record()
    known = [
        m.model_copy(update={"samples_s": _around(with_ddp_s)})
        if m.variant == "with ddp" and m.size_bytes
        else m
        for m in record.measurements
    ]
    return record.model_copy(update={"measurements": tuple(known)})


def test_what_copies_to_buckets_take_is_a_mean_of_times() -> None:
    """32 ms in one record and 0.3 in another are 16, and not the mean of 4 and 427 GB/s."""
    records = [_with_large_layers(seconds) for seconds in (0.14864, 0.11694)]
    (found,) = fit_profile(records, "x").overheads.copy_in
    assert found.bytes_per_s.value == pytest.approx(128e6 / 16.15e-3, rel=0.05)
    assert fit_profile([_with_large_layers(0.1)], "x").overheads.copy_in == ()


def test_copies_to_buckets_are_told_by_the_size_of_a_gradient() -> None:
    """64 layers of 1 MB leave 32 ms for copies into buckets, 4 of 16 MB with 8 hooks 48 ms."""
    record = _record()
    larger = [
        m.model_copy(update={"parameters": 8, "samples_s": _around(time_s)})
        for m in record.measurements
        if m.kind == "ddp_hook" and m.size_bytes
        for time_s in [0.16404 if m.variant == "with ddp" else 0.1]
    ]
    both = record.model_copy(update={"measurements": (*record.measurements, *larger)})
    small, large = fit_profile([both], "x").overheads.copy_in
    assert (small.gradient_bytes, large.gradient_bytes) == (1_000_000, 16_000_000)
    assert small.bytes_per_s.value == pytest.approx(4e9, rel=0.01)
    assert large.bytes_per_s.value == pytest.approx(128e6 / 48e-3, rel=0.01)


def _with(record: Record, *more: tuple[Any, str, float, int, int]) -> Record:
    for kind, variant, time_s, size_bytes, parameters in more:
        record = record.with_measurement(
            Measurement(
                kind=kind,
                variant=variant,
                samples_s=_around(time_s),
                size_bytes=size_bytes,
                parameters=parameters,
            )
        )
    return record


def test_copies_in_a_backward_and_by_all_ranks_at_once_come_before_others() -> None:
    """64 MB at 8 GB/s and not the 4 that are inferred; 2 GB/s together and not the 8 alone."""
    record = _with(
        _record(),
        ("ddp_hook", "copies in", 0.016, 64_000_000, 128),
        ("ddp_hook", "copies in", 0.032, 64_000_000, 8),
        ("device_copy", "together", 0.004, 4_000_000, 0),
        ("device_copy", "together", 0.1, 4_000, 0),
        ("device_cast", "compress together", 0.004, 4_000_000, 0),
    )
    found = fit_profile([record], "x").overheads
    assert [c.gradient_bytes for c in found.copy_in] == [1_000_000, 16_000_000]
    rates = [c.bytes_per_s.value for c in found.copy_in]
    assert rates == pytest.approx([8e9, 4e9], rel=0.01)
    known = found.copy_bytes_per_s, found.compress_bytes_per_s, found.decompress_bytes_per_s
    rates = [rate.value for rate in known if rate]
    assert rates == pytest.approx([2e9, 1e9, 4e9], rel=0.01)
    assert found.sigma is None  # nothing was measured twice


def test_copies_that_vary_from_record_to_record_say_by_how_much() -> None:
    """Half and twice the mean, in one of three things that were measured twice."""
    records = [
        _with(_record(), ("device_copy", "together", time_s, 4_000_000, 0))
        for time_s in (0.001, 0.004)
    ]
    sigma = fit_profile(records, "x").overheads.sigma
    assert sigma == pytest.approx(math.log(2) * math.sqrt(2 / 3), rel=0.01)


def test_casts_that_a_short_budget_left_to_small_buckets_are_named() -> None:
    """Large ones by each rank itself only; with those of all at once there is nothing to say."""
    small = ("device_cast", "compress together", 0.0004, 1_000_000, 0)
    record = _with(_record(), ("device_cast", "compress", 0.01, 64_000_000, 0), small)
    (warning,) = (w for w in fit_profile([record], "x").warnings if "at once" in w)
    said = "device_cast compress of all ranks at once was measured up to 1.000 MB alone, and not "
    assert warning.startswith(said + "up to 64.00 MB: ")
    whole = _with(record, ("device_cast", "compress together", 0.016, 64_000_000, 0))
    assert not any("at once" in warning for warning in fit_profile([whole], "x").warnings)


def test_what_a_hook_takes_after_the_all_reduces_is_told_of_most_parameters() -> None:
    record = _with(
        _record(),
        ("ddp_hook", "copies back", 0.0001, 0, 250),
        ("ddp_hook", "copies back", 0.002, 0, 1000),
    )
    found = fit_profile([record], "x").overheads.copy_back_s
    assert found is not None
    assert found.value == pytest.approx(2e-6, rel=0.01)
    assert fit_profile([_record()], "x").overheads.copy_back_s is None


def test_records_of_several_line_rates_tell_what_compute_keeps_at_each() -> None:
    records = [_record(rate, per_byte=4e-10, constant=1.05) for rate in reversed(RATES)]
    profile = fit_profile(records, "testbed")
    found = profile.interference
    assert found is not None
    assert found.compute_slowdown == Fitted(value=1.0)
    sent = [point.sent_bytes_per_s for point in found.compute_kept]
    assert sent == sorted(sent)
    assert len(sent) == len(RATES)
    for point in found.compute_kept:
        expected = (1 - 4e-10 * point.sent_bytes_per_s) / 1.05
        assert point.share.value == pytest.approx(expected, rel=1e-2)
        assert point.share.stderr is not None
    assert profile.provenance.sources == ("record 1", "record 2", "record 3")
    assert profile.warnings == ()


def test_every_record_of_a_line_rate_counts() -> None:
    """Compute keeps the mean of what two hours say, and how far they are apart counts as error."""
    records = [_record(per_byte=per_byte) for per_byte in (4e-9, 8e-9)]
    first, second, both = (
        fit_profile(given, "x").interference for given in ([records[0]], [records[1]], records)
    )
    assert first
    assert second
    assert both
    (low,), (high,), (mean,) = (found.compute_kept for found in (first, second, both))
    assert mean.share.value == pytest.approx((low.share.value + high.share.value) / 2, rel=1e-3)
    assert mean.share.stderr is not None
    apart = abs(high.share.value - low.share.value)
    assert mean.share.stderr >= apart / 4 * (4 / 3) ** 0.5  # two pieces of compute in each


def test_what_was_measured_in_two_records_is_compared() -> None:
    whole = _record()
    compute, rest = (
        whole.model_copy(
            update={
                "measurements": tuple(
                    m for m in whole.measurements if (m.kind == "compute") == is_compute
                )
            }
        )
        for is_compute in (True, False)
    )
    for records in ([compute, rest], [rest, compute]):
        assert fit_profile(records, "x").interference == fit_profile([whole], "x").interference


def test_ranks_of_one_node_tell_nothing_of_interference_over_links() -> None:
    measured = tuple(
        m.model_copy(update={"nodes": 1, "gpus_per_node": 2}) for m in _record().measurements
    )
    layout = Layout(nodes=1, gpus_per_node=2)
    inside = _record().model_copy(update={"layout": layout, "measurements": measured})
    records = [_record(), inside]
    assert fit_profile(records, "x").interference == fit_profile(records[:1], "x").interference


def _with_half(record: Record) -> Record:
    """All-reduces of float16, and compute beside them, take as long as of float32."""
    half = [
        m.model_copy(update={"variant": f"{m.variant}{HALF}"})
        for m in record.measurements
        if m.kind in ("compute", "all_reduce")
    ]
    return record.model_copy(update={"measurements": (*record.measurements, *half)})


def test_where_float16_was_not_measured_at_every_rate_that_is_said() -> None:
    one, other = _with_half(_record(RATES[0])), _record(RATES[1])
    said = "interference of float16 was not measured at every line rate"
    assert any(said in warning for warning in fit_profile([one, other], "x").warnings)
    assert not any(said in warning for warning in fit_profile([one], "x").warnings)


def _with_layers(record: Record, times: float) -> Record:
    """Layers' compute beside all-reduces takes so many times as long, as nothing else in it."""
    like = next(m for m in record.measurements if m.variant == "with gemm")
    more = [
        like.model_copy(
            update={"kind": "compute", "variant": variant, "samples_s": _around(time_s)}
        )
        for variant, time_s in (("layer alone", 2e-3), ("layer with all_reduce", 2e-3 * times))
    ]
    sent = like.model_copy(update={"variant": "with layer"})
    return record.model_copy(update={"measurements": (*record.measurements, sent, *more)})


def _beside_one(record: Record, times: float) -> Record:
    """Compute of each work takes so many times as long beside one all-reduce in flight."""
    more = [
        m.model_copy(
            update={
                "variant": m.variant.replace("alone", "with one all_reduce"),
                "samples_s": [times * sample_s for sample_s in m.samples_s],
            }
        )
        for m in record.measurements
        if m.kind == "compute" and m.variant.endswith((" alone", f" alone{HALF}"))
    ]
    return record.model_copy(update={"measurements": (*record.measurements, *more)})


def test_what_compute_keeps_beside_one_all_reduce_is_told_where_it_was_measured() -> None:
    slow, fast = (_with_half(_record(rate)) for rate in RATES[:2])
    said = "what compute keeps beside one all-reduce was not measured at every line rate"
    profile = fit_profile([_beside_one(slow, 1.02), fast], "x")
    assert any(said in warning for warning in profile.warnings)
    assert profile.interference
    for points in (profile.interference.compute_kept, profile.interference.half_compute_kept):
        first, second = points
        assert first.beside_one
        assert first.beside_one.value == pytest.approx(1 / 1.02, rel=1e-3)
        assert first.beside_one.value > first.share.value
        assert second.beside_one is None
    assert re.search(r"beside one all-reduce +0\.98", show(profile))
    both = fit_profile([_beside_one(slow, 9), _beside_one(fast, 9)], "x")
    assert not any(said in warning for warning in both.warnings)
    assert both.interference
    for point in both.interference.compute_kept:  # no less than beside two
        assert point.beside_one
        assert point.beside_one.value == point.share.value


def test_what_layers_suffer_stands_for_steps_where_it_was_measured() -> None:
    slow, fast = _record(RATES[0]), _record(RATES[1])
    said = "what layers suffer beside all-reduces was not measured at every line rate"
    profile = fit_profile([_with_layers(slow, 2.5), fast], "x")
    assert any(said in warning for warning in profile.warnings)
    kept = profile.interference and profile.interference.compute_kept
    plain = fit_profile([slow, fast], "x").interference
    assert kept
    assert plain
    assert kept[0].share.value == pytest.approx(0.4, rel=0.01)
    assert kept[1] == plain.compute_kept[1]
    both = fit_profile([_with_layers(slow, 2.5), _with_layers(fast, 2.5)], "x")
    assert not any(said in warning for warning in both.warnings)
    halves = [_with_half(_with_layers(slow, 2.5)), _with_layers(_with_half(fast), 2.5)]
    (warning,) = [w for w in fit_profile(halves, "x").warnings if "what layers suffer" in w]
    assert "beside all-reduces of float16 was not measured at every line rate" in warning


def _with_rests(rate: float, burst: float, delay: float) -> Record:
    """1 and 4 MiB right after a pause and in a row: the first saves `burst` less `delay`."""
    record = _record(rate)
    like = next(m for m in record.measurements if m.variant == "alone")
    found = list(record.measurements)
    for size in (2**20, 2**22):
        after_s = all_reduce_s(_gloo(), size, 2, 1, rate)
        for variant, time_s in ((IN_A_ROW, after_s), (RESTED, after_s - burst / rate + delay)):
            changes = {"variant": variant, "size_bytes": size, "samples_s": _around(time_s)}
            found.append(like.model_copy(update=changes))
    return record.model_copy(update={"measurements": tuple(found)})


def test_what_passes_after_a_pause_is_found() -> None:
    records = [_with_rests(rate, 1.2e5, 2e-4) for rate in (12.5e6, 62.5e6, 625e6)]
    profile = fit_profile(records, "x")
    law = profile.all_reduce
    assert isinstance(law, GlooRing)
    assert law.rested_burst_bytes.value == pytest.approx(1.2e5, rel=5e-3)
    assert law.rested_delay_s.value == pytest.approx(2e-4, rel=0.05)
    assert "burst after a rest" in show(profile)
    slow = FittedCost(law, 2, 1, 12.5e6).transfer("all_reduce", 2**22)
    assert slow.burst_ns == pytest.approx(1.2e5 / 12.5e-3 - 2e5, rel=5e-3)
    # 0.12 ms less of the wire at 1 GB/s, which getting going takes and more
    assert FittedCost(law, 2, 1, 1e9).transfer("all_reduce", 2**22).burst_ns == 0
    alone = fit_profile(records[:1], "x").all_reduce  # one rate: all is bytes
    assert isinstance(alone, GlooRing)
    assert alone.rested_burst_bytes.value == pytest.approx(1.2e5 - 2e-4 * 12.5e6, rel=5e-3)
    assert alone.rested_delay_s.value == 0


def test_where_a_pause_saves_nothing_nothing_is_saved() -> None:
    law = fit_profile([_with_rests(rate, 0.0, 3e-4) for rate in RATES], "x").all_reduce
    assert isinstance(law, GlooRing)
    assert law.rested_burst_bytes.value == 0
    cost = FittedCost(law, 2, 1, RATES[0])
    assert cost.transfer("all_reduce", 2**20).burst_ns == 0
    found = fit_profile([_record()], "x").all_reduce
    assert isinstance(found, GlooRing)
    assert found.rested_burst_bytes == found.rested_delay_s == Fitted(value=0.0)


def test_what_compute_keeps_is_a_mean_of_speeds_over_the_ranks() -> None:
    """Half of the time at half speed, half at a quarter: 0.375 kept; the mean time says 0.333."""
    base = _record()
    kept = [m for m in base.measurements if m.kind != "compute"]
    like = next(m for m in base.measurements if m.variant == "with gemm")
    for variant, ranks in (
        ("gemm alone", ((0.01,) * 8, (0.02,) * 8)),
        ("gemm with all_reduce", ((0.02, 0.04) * 4, (0.08, 0.04) * 4)),
    ):
        slowest = tuple(map(max, *ranks))
        changes = {"kind": "compute", "variant": variant, "samples_s": slowest}
        kept.append(like.model_copy(update=changes | {"samples_by_rank_s": ranks}))
    profile = fit_profile([base.model_copy(update={"measurements": tuple(kept)})], "x")
    found = profile.interference
    assert found is not None
    (point,) = found.compute_kept
    assert point.share.value == pytest.approx(0.375)
    assert ", 0.098 more or less by rank and burst" in show(profile)
    assert point.spread == pytest.approx(0.25 / 2.563)  # from tenth to ninetieth percentile


def test_where_ranks_were_not_measured_apart_the_slower_one_tells_of_no_spread() -> None:
    found = fit_profile([_record()], "x").interference
    assert found is not None
    assert [point.spread for point in found.compute_kept] == [0.0]


def _with_queues(rate: float, use: float, crowded: float, delay: float, squared: float) -> Record:
    """A gloo record whose queues of 1 MiB and 16 MiB take known times."""
    base = _record(rate)
    plain = [m for m in base.measurements if m.variant == "alone"]

    def measured(kind: Any, variant: str, time_s: float, size: int) -> Measurement:
        return Measurement(
            kind=kind,
            variant=variant,
            group="world",
            nodes=2,
            gpus_per_node=1,
            size_bytes=size,
            samples_s=_around(time_s, spread=1e-4),
        )

    for size in (2**20, 2**24):
        alone_s = float(np.median(next(m.samples_s for m in plain if m.size_bytes == size)))
        sent = size / alone_s
        on_link = FittedCost(_gloo(), 2, 1, rate).transfer("all_reduce", size).transfer_ns * 1e-9
        queued_s = alone_s * (1 + crowded * sent) - use * (alone_s - on_link)
        longer_s = delay + squared * sent**2 * queued_s
        plain += [
            measured("all_reduce", "beside gemm", queued_s, size),
            measured("all_reduce", "with gemm", queued_s + longer_s, size),
            measured("compute", "gemm alone", 1e-3, size),
            measured("compute", "gemm with all_reduce", 1.5e-3, size),
        ]
    return base.model_copy(update={"measurements": tuple(plain)})


def test_what_compute_and_crowding_add_to_transfers_is_found_again() -> None:
    records = [
        _with_queues(rate, use=0.5, crowded=1e-10, delay=2e-3, squared=1e-18) for rate in RATES
    ]
    found = fit_profile(records, "testbed").interference
    assert found is not None
    assert found.idle_link_use.value == pytest.approx(0.5, rel=0.1)
    assert found.comm_delay_s.value == pytest.approx(2e-3, rel=0.1)
    assert found.comm_slowdown_s2_per_byte2.value == pytest.approx(1e-18, rel=0.1)
    assert found.crowded_slowdown_s_per_byte.value == pytest.approx(1e-10, rel=0.1)


def test_slower_addition_of_float16_is_found_again() -> None:
    model = _gloo()
    slow = model.model_copy(update={"reduce_bytes_per_s": Fitted(value=2e8)})
    samples = [
        Sample(2, 1, 2**k, all_reduce_s(slow, 2**k, 2, 1, 1.25e9), 1.25e9) for k in (20, 22, 24, 26)
    ]
    found = fit_half(model, samples)
    assert found is not None
    assert found.value == pytest.approx(2e8, rel=1e-3)
    same = [
        Sample(2, 1, s.size_bytes, all_reduce_s(model, s.size_bytes, 2, 1, 1.25e9), 1.25e9)
        for s in samples
    ]
    assert fit_half(model, same) is None
    unseen = model.model_copy(update={"reduce_bytes_per_s": Fitted(value=1e18)})
    hidden = fit_half(unseen, samples)
    assert hidden is not None
    assert hidden.value == pytest.approx(2e8, rel=1e-2)
    assert fit_half(model, []) is None


def test_the_middle_of_samples_minds_no_outlier() -> None:
    assert trimmed_mean([1.0]) == 1.0
    assert trimmed_mean([1.0, 2.0]) == 1.5
    assert trimmed_mean([1.0, 2.0, 90.0]) == 2.0
    assert trimmed_mean([*range(1, 20), 1000]) == pytest.approx(np.mean(range(3, 19)))


def test_with_nccl_the_slowdown_of_compute_is_a_constant() -> None:
    record = _record(None, per_byte=0.0, constant=1.15, model=NODES, backend="nccl")
    found = fit_profile([record], "cluster").interference
    assert found is not None
    assert found.compute_slowdown.value == pytest.approx(1.15)
    assert found.compute_kept == ()


def test_what_runs_beside_other_work_is_never_faster_for_it() -> None:
    record = _record(None, per_byte=0.0, constant=0.97, model=NODES, backend="nccl")
    found = fit_profile([record], "cluster").interference
    assert found is not None
    assert found.compute_slowdown.value == 1.0


@pytest.mark.parametrize("unit", [1.0, 1e-9])
def test_a_line_is_known_as_well_as_its_points(unit: float) -> None:
    """The textbook's errors of a weighted line, whatever the unit of what goes with it."""
    x, errors = (0.0, 1.0, 2.0, 4.0), (0.1, 0.2, 0.4, 0.1)
    points = [Fitted(value=3 + 2 * at, stderr=own) for at, own in zip(x, errors, strict=True)]
    weights = [1 / own**2 for own in errors]
    whole, first, second = (
        sum(weight * at**power for weight, at in zip(weights, x, strict=True)) for power in range(3)
    )
    determinant = whole * second - first**2
    intercept, slope = line([unit * at for at in x], points)
    assert (intercept.value, slope.value) == (pytest.approx(3), pytest.approx(2 / unit))
    assert intercept.stderr == pytest.approx(math.sqrt(second / determinant))
    assert slope.stderr == pytest.approx(math.sqrt(whole / determinant) / unit)


def test_a_point_far_off_pulls_a_line_as_if_it_were_two_errors_off() -> None:
    """100 errors of 0.1, in the middle of 11 points: 0.2 / 10 and not 10 / 11 of them all."""
    points = [Fitted(value=1 + 2 * at, stderr=0.1) for at in range(11)]
    points[5] = Fitted(value=points[5].value + 10, stderr=0.1)
    intercept, slope = line(range(11), points)
    assert slope.value == pytest.approx(2)
    assert intercept.value == pytest.approx(1.02, abs=1e-3)
    assert intercept.stderr is not None
    assert intercept.stderr > 0.2  # and not 0.06, as the own errors of all 11 say


def test_points_further_off_than_they_say_make_a_line_as_uncertain_as_they_scatter() -> None:
    """Off by +1, -1, -1, +1, ten times what they say: the textbook's errors, of s = sqrt(4 / 2)."""
    off = (1, -1, -1, 1)  # so a line fits none better than the true one
    points = [Fitted(value=10 + 2 * at + off[at], stderr=0.1) for at in range(4)]
    intercept, slope = line(range(4), points)
    assert (intercept.value, slope.value) == (pytest.approx(10), pytest.approx(2))
    assert intercept.stderr == pytest.approx(math.sqrt(2) * math.sqrt(14 / 20))
    assert slope.stderr == pytest.approx(math.sqrt(2) * math.sqrt(4 / 20))


def test_standard_errors_of_a_median_and_of_means() -> None:
    """Of 1, 2, 3, 4 and 100 the median absolute deviation is 1, whatever the last."""
    middle = median_time([4, 1, 3, 100, 2])
    two = [Fitted(value=1, stderr=0.3), Fitted(value=3, stderr=0.4)]
    for found, value, stderr in (
        (middle, 3, 1.2533 * 1.4826 / math.sqrt(5)),
        (averaged(two), 2, 0.5 / 2),
        (pooled(two), 2, math.hypot(0.5 / 2, math.sqrt(2) / math.sqrt(2))),
    ):
        assert (found.value, found.stderr) == (value, pytest.approx(stderr))
    assert median_time([3.0]) == Fitted(value=3.0)
    for mean in (averaged, pooled):
        assert mean([*two, Fitted(value=5)]) == Fitted(value=3)


def test_a_line_that_nothing_rises_along_has_no_slope_and_no_error_of_it() -> None:
    intercept, slope = line([1, 2, 3], [Fitted(value=value, stderr=0.1) for value in (3, 2, 1)])
    assert (intercept.value, slope) == (pytest.approx(2), Fitted(value=0.0))


def test_a_median_that_is_not_known_well_counts_less() -> None:
    measured = {"kind": "all_reduce", "nodes": 2, "size_bytes": 4096}
    steady = Measurement(**measured, samples_s=(1e-3,) * 9)
    torn = Measurement(**measured | {"size_bytes": 8192}, samples_s=(1e-3, 9e-3) * 5)
    record = _record().model_copy(update={"measurements": (steady, torn)})
    known, unknown = samples_of_records([record])
    assert known.weight == 1.0
    assert unknown.weight < 0.05


def test_gloo_inside_a_node_passes_no_link() -> None:
    inside = Measurement(
        kind="all_reduce", group="intra_node", gpus_per_node=2, size_bytes=4096, samples_s=(1e-3,)
    )
    record = _record().with_measurement(inside)
    assert {sample.nodes for sample in samples_of_records([record])} == {2}
    alone = record.model_copy(update={"measurements": (inside,)})
    assert samples_of_records([alone]) == [Sample(1, 2, 4096, 1e-3)]


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "no record was given: there is nothing to fit"),
        (
            [_record(), _record(machine="another")],
            (
                "a.json was measured on 'SYNTHETIC, 2 cores', but b.json on 'another': fit one "
                "profile for each machine"
            ),
        ),
        (
            [_record(details={"processor": "model 2"}), _record(details={"processor": "model 3"})],
            (
                "a.json and b.json were measured on machines that call themselves 'SYNTHETIC, 2 "
                "cores', but one is model 2 and the other model 3: fit one profile for each"
            ),
        ),
        (
            [_record(), _record(backend="nccl")],
            (
                "a.json was measured with gloo on 'SYNTHETIC, 2 cores', but b.json with nccl on "
                "'SYNTHETIC, 2 cores': fit one profile for each backend"
            ),
        ),
    ],
)
def test_records_that_do_not_fit_together(records: list[Record], message: str) -> None:
    with pytest.raises(FitError) as raised:
        fit_profile(records, "mixed", ["a.json", "b.json"][: len(records)])
    assert str(raised.value) == message


def test_a_profile_holds_the_processor_that_a_record_tells() -> None:
    told = _record(125e6, details={"processor": "vendor_id AuthenticAMD, model 2"})
    made = fit_profile([_record(), told], "testbed")
    assert made.provenance.processor == "vendor_id AuthenticAMD, model 2"
    assert "\n  vendor_id AuthenticAMD, model 2\n" in show(made)
    on_gpus = told.environment.model_copy(update={"device": "NVIDIA A100"})
    assert on_gpus.processor == ""


def test_warnings_of_records() -> None:
    newer = _record(250e6, torch="2.14.0").with_measurement(_jitter(10, 0.02))
    assert fit_profile([_record(), newer], "testbed").warnings == (
        "record 1 was measured with torch 2.13.0, but record 2 with 2.14.0",
        "not enough data for jitter: 10 iterations, wanted 30",
    )
    half = [m for m in _record().measurements if m.kind != "compute"]
    record = _record().model_copy(update={"measurements": tuple(half)})
    profile = fit_profile([record], "testbed")
    assert profile.interference is None
    assert profile.warnings[-1] == (
        "not enough data for interference: measure compute and all_reduce, alone and together"
    )


@pytest.mark.parametrize("times", [1.2, 1.34])
def test_records_of_another_pace_are_told(times: float) -> None:
    """What is told of the machine is the same, as of clouds that call two processors one name."""

    def longer(m: Measurement) -> Measurement:
        slower = {"samples_s": tuple(times * s for s in m.samples_s)}
        return m.model_copy(update=slower) if m.kind == "compute" else m

    other = _record(250e6)
    other = other.model_copy(update={"measurements": tuple(map(longer, other.measurements))})
    said = fit_profile([_record(), other], "testbed", ["a.json", "b.json"]).warnings
    told = (
        "b.json: compute with nothing beside it took 1.34 times as long as in the fastest record, "
        "so others used the machine, or it is another of the same name: measure it again, or fit "
        "it apart"
    )
    assert said == ((told,) if times > 1.25 else ())


def test_a_log_is_no_record(tmp_path: Path) -> None:
    log = tmp_path / "all_reduce.log"
    log.write_text("# nThread 1 nGpus 1 minBytes 8\n", encoding="utf-8")
    told = r"is no ddpsim\.record/1 record \(logs of nccl-tests go through `calibrate import nccl-"
    with pytest.raises(ImportFailedError, match=told):
        load_record(log)


def _took(kind: str, seconds: float) -> Record:
    """A record in which all of a kind took so long."""
    record = _record().with_measurement(_jitter(50, 0.02))
    record = _with(record, ("ddp_hook", "copies in", 0.016, 64_000_000, 128))
    changed = [
        m.model_copy(
            update={
                "samples_s": (seconds,) * len(m.samples_s),
                "samples_by_rank_s": tuple(
                    (seconds,) * len(times) for times in m.samples_by_rank_s
                ),
            }
        )
        if m.kind == kind
        else m
        for m in record.measurements
    ]
    return record.model_copy(update={"measurements": tuple(changed)})


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("all_reduce", "all_reduce alone of 1.024 kB on 2 x 1 ranks"),
        ("compute", "compute gemm alone of 4.194 MB on 2 x 1 ranks"),
        ("jitter", "jitter alone on 1 x 1 ranks"),
        ("ddp_hook", "ddp_hook without of 100 parameters on 1 x 1 ranks"),
        ("device_copy", "device_copy alone of 4.000 MB on 1 x 1 ranks"),
        ("device_cast", "device_cast compress of 4.000 MB on 1 x 1 ranks"),
    ],
)
def test_what_took_no_time_is_refused(kind: str, said: str) -> None:
    with pytest.raises(FitError) as raised:
        fit_profile([_took(kind, 0.0)], "x", ["a.json"])
    assert str(raised.value) == (
        f"a.json: {said} took 0 s, which nothing does: remove it from the record, and measure it "
        "again with --resume"
    )


def test_one_moment_of_compute_that_took_no_time_is_refused() -> None:
    """One all-reduce of many may be as wrong: a fit does not mind."""
    for kind, is_refused in (("compute", True), ("all_reduce", False)):
        record = _record()
        first = next(m for m in record.measurements if m.kind == kind)
        damaged = first.model_copy(update={"samples_s": (*first.samples_s[1:], 0.0)})
        record = record.with_measurement(damaged)
        if is_refused:
            with pytest.raises(FitError, match=r"compute gemm alone of .* took 0 s"):
                fit_profile([record], "x")
        else:
            fit_profile([record], "x")


def test_copies_back_may_take_no_time() -> None:
    record = _with(_record(), ("ddp_hook", "copies back", 0.0, 0, 250))
    found = fit_profile([record], "x").overheads.copy_back_s
    assert found is not None
    assert found.value == 0


def _loaded(tmp_path: Path, record: Record, change: Callable[[dict[str, Any]], object]) -> Record:
    """A record as it is read back, once its document was changed."""
    path, document = tmp_path / "record.json", json.loads(record.model_dump_json(by_alias=True))
    change(document)
    path.write_text(json.dumps(document), encoding="utf-8")
    return load_record(path)


@pytest.mark.parametrize("key", ["samples_s", "warmup_s"])
def test_a_negative_time_is_refused_as_the_record_is_read(tmp_path: Path, key: str) -> None:
    with pytest.raises(ImportFailedError, match=rf"measurements\.0\.{key}\.1: Input should be g"):
        _loaded(tmp_path, _record(), lambda d: d["measurements"][0].update({key: [0.1, -1.0]}))
    by_rank = {"samples_by_rank_s": [[0.1], [-1.0]]}
    with pytest.raises(ImportFailedError, match=r"0\.samples_by_rank_s\.1\.0: Input should be"):
        _loaded(tmp_path, _record(), lambda d: d["measurements"][0].update(by_rank))


def test_a_record_must_name_its_schema(tmp_path: Path) -> None:
    with pytest.raises(ImportFailedError, match=r"is no ddpsim\.record/1 .*: schema: Field req"):
        _loaded(tmp_path, _record(), lambda document: document.pop("schema"))


def test_a_record_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path, record = tmp_path / "record.json", _record()
    path.write_text(record.model_dump_json(by_alias=True), encoding="utf-8-sig")
    assert load_record(path) == record


def test_a_record_that_holds_a_measurement_twice_is_refused() -> None:
    record = _record()
    twice = record.model_copy(update={"measurements": record.measurements * 2})
    said = r"^a\.json holds all_reduce alone of 1\.024 kB on 2 x 1 ranks twice, which would count"
    with pytest.raises(FitError, match=said):
        fit_profile([twice], "x", ["a.json"])


def test_records_with_too_few_measurements_are_named() -> None:
    record = _record()
    first = record.model_copy(update={"measurements": record.measurements[:1]})
    none = record.model_copy(update={"measurements": ()})
    for few, said in (
        (first, r"^a\.json: message sizes are too few \(1\): measure 5 or more"),
        (none, r"^a\.json: no all-reduce of two ranks or more was measured"),
    ):
        with pytest.raises(FitError, match=said):
            fit_profile([few], "x", ["a.json"])
    log = AllReduceLog("a.txt", "nccl-tests log", 1, 4, ((1024, 1e-5),), ())
    with pytest.raises(FitError, match=r"^a\.txt: message sizes on 1 x 4 ranks are too few \(1\)"):
        fit_logs([log], "x")


# words and figures


def test_a_profile_in_words(golden: Callable[[str, Path], None]) -> None:
    records = [_record(rate).with_measurement(_jitter(500, 0.02, memory=0.5)) for rate in RATES]
    folder = Path(__file__).parent.parent / "golden"
    golden(
        show(fit_profile(records, "testbed", ["a", "b", "c"])) + "\n", folder / "profile-gloo.txt"
    )
    samples = [*_made(NODE, [(1, 4)], noise=0.01), *_made(NODES, [(2, 4), (4, 4)], noise=0.01)]
    layouts = sorted({(s.nodes, s.gpus_per_node) for s in samples})
    logs = [
        AllReduceLog(
            f"{nodes}x{gpus}.txt",
            "nccl-tests log",
            nodes,
            gpus,
            tuple((s.size_bytes, s.time_s) for s in samples if s.nodes == nodes),
        )
        for nodes, gpus in layouts
    ]
    golden(show(fit_logs(logs, "cluster")) + "\n", folder / "profile-nccl.txt")
    assert samples_of_logs(logs) == samples


def test_logs_of_two_clusters_or_one_log_twice_are_refused() -> None:
    def log(source: str, times: float, *gpus: str) -> AllReduceLog:
        rows = tuple((2**i, times * (1e-5 + 2**i / 1e10)) for i in range(12, 26))
        return AllReduceLog(source, "nccl-tests log", 1, 4, rows, gpus)

    a, other = log("a.txt", 1.0, "V100"), log("b.txt", 1.1, "A100")
    with pytest.raises(FitError, match=r"a\.txt is of V100, but b\.txt of A100: fit one profile"):
        fit_logs([a, other], "m")
    with pytest.raises(
        FitError, match=r"a\.txt and c\.txt hold the same measurements, which would"
    ):
        fit_logs([a, log("c.txt", 1.0)], "m")
    of_one = fit_logs([a, log("d.txt", 1.1)], "m")  # of GPUs that are not told
    assert of_one.provenance.machine == "V100"
    untold, mixed = log("e.txt", 1.2), log("f.txt", 1.2, "A100", "V100")
    for one in (untold, mixed):
        assert fit_logs([one], "m").provenance.machine == NOT_STATED


def test_residuals_as_text_and_as_a_figure(tmp_path: Path) -> None:
    samples = [replace(s, time_s=s.time_s * 1.25) for s in _made(NODE, [(1, 4)], [1024])]
    samples += _made(_gloo(), [(2, 1)], [2**20], [62.5e6])
    *table, what = residual_table(NODE, samples[:1]).splitlines()
    assert what.startswith("measured: the mean of the middle four fifths")
    assert table == [
        "    ranks   line rate      size  measured predicted   error",
        "    1 x 4              1.024 kB  13.46 us  10.77 us  -20.0 %",
        "1 samples: median error 20.0 %, nine in ten within 20.0 %, largest 20.0 %",
    ]
    assert "62.50 MB/s" in residual_table(_gloo(), samples[1:])
    path = tmp_path / "residuals.html"
    write_residual_figure(_gloo(), samples[1:], path)
    text = path.read_text(encoding="utf-8")
    assert "2 x 1 ranks" in text
    figure = text.rsplit("Plotly.newPlot(", 1)[1]
    assert set(re.findall(r'"marker":\{"color":"(#\w+)"\}', figure)) == {"#0072b2"}
    assert "<script src=" not in text  # it needs no network


def test_correlations_are_told() -> None:
    first, *others = _noisy_fit("nccl").correlated
    assert first.correlation < -0.9
    assert first.figures[0].endswith("base")
    assert all(abs(pair.correlation) <= abs(first.correlation) for pair in others)
    assert replace(_noisy_fit("nccl"), correlations={}).correlated == ()


# measurements by others

REFERENCE = os.environ.get("DDPSIM_REFERENCE_DATA")
needs_reference = pytest.mark.skipif(
    REFERENCE is None, reason="DDPSIM_REFERENCE_DATA names no folder of nccl-tests sweeps"
)


def _sweeps() -> dict[str, list[Sample]]:
    sweeps = defaultdict(list)
    with (Path(REFERENCE or "") / "nccl" / "all_reduce.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            sweeps[row["id"]].append(
                Sample(
                    int(row["nodes"]),
                    int(row["gpus_per_node"]),
                    int(row["size_bytes"]),
                    float(row["time_us_in_place"]) * 1e-6,
                )
            )
    return dict(sweeps)


def _abci_log(layout: str) -> AllReduceLog:
    path = Path(REFERENCE or "") / "nccl" / "logs" / f"abci-V-{layout}.txt"
    return read_all_reduce(SourceFile(path.name, path))


@needs_reference
@pytest.mark.parametrize(
    ("fitted", "held_out", "limit"),
    [(("1x4", "2x4", "4x4"), "8x4", 0.05), (("2x4", "8x4"), "4x4", 0.08)],
)
def test_a_layout_that_was_not_fitted(fitted: tuple[str, ...], held_out: str, limit: float) -> None:
    """Median error over sizes of 64 KiB or more; wanted: 15 %."""
    profile = fit_logs([_abci_log(layout) for layout in fitted], "ABCI V100")
    samples = [s for s in samples_of_logs([_abci_log(held_out)]) if s.size_bytes >= 65536]
    assert median(_errors(profile.all_reduce, samples)) < limit


@needs_reference
@pytest.mark.parametrize("name", ["lambda-2x8", "abci-A-2x8", "abci-V-4x4", "dgxc-1x8-H100"])
def test_rounding_does_not_choose_the_fit_of_half_a_sweep(name: str) -> None:
    """Its rows are about as many as the figures of the regimes that they tell."""
    every = _sweeps()[name]
    samples = every[::2]
    models = [fit_all_reduce(s, "nccl").model for s in (samples, _rounded_otherwise(samples))]
    _assert_same_times(*models, at=every)


@needs_reference
def test_every_sweep_is_reproduced() -> None:
    """Median error of each sweep's own rows; of rows left out: `tests/cluster`."""
    for name, samples in _sweeps().items():
        model = fit_all_reduce(samples, "nccl").model
        assert median(_errors(model, samples)) < 0.05, name


def test_a_record_that_is_given_twice_counts_once() -> None:
    record, more = _record(), _record().with_measurement(_jitter(50, 0.02))
    for other in (record, more):  # a copy, and what --resume made of one
        with pytest.raises(FitError, match=r"a\.json and b\.json hold the same measurements"):
            fit_profile([record, other], "testbed", ["a.json", "b.json"])


def test_records_with_other_settings_are_told_apart() -> None:
    other = _record(per_byte=1.1e-9, variables={"OMP_NUM_THREADS": "2"})
    shaken = tuple(
        m.model_copy(update={"samples_s": tuple(1.001 * s for s in m.samples_s)})
        for m in other.measurements
    )
    other = other.model_copy(update={"measurements": shaken})
    profile = fit_profile([_record(), other], "testbed", ["a.json", "b.json"])
    said = "a.json was measured with OMP_NUM_THREADS none, but b.json with 2"
    assert said in profile.warnings


def test_a_data_loader_is_told_where_it_is_wanted() -> None:
    loader = Measurement(kind="data_loader", variant="mine:batches", samples_s=(0.01, 0.01, 0.02))
    (line,) = data_loaders([_record().with_measurement(loader)])
    assert line == (
        "data loader mine:batches: a batch in 10.00 ms (median); its samples over that are "
        "workload.data.rate"
    )
