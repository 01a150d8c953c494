"""Figures of NCCL and gloo, found again in samples, and their standard errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from measured.made_measurements import (
    FEW_SIZES,
    NODES,
    RATES,
    SIZES,
    gloo_ring,
    made_samples,
    nccl_regime,
)
from measured.refits import (
    NO_SHRINKING,
    NOISY,
    assert_same_times,
    noisy_fit,
    relative_errors,
    rounded_otherwise,
)

from calibrate.fit import fit_all_reduce
from ddpsim.cluster.fitted.laws import AllReduceModel
from ddpsim.importers.profiles.cluster import Fitted, NcclRegimes


@settings(max_examples=5, phases=NO_SHRINKING)
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
    regimes = (nccl_regime(base=base, intra=slow), nccl_regime(base=later, intra=slow * faster))
    samples = made_samples(NcclRegimes(regimes=regimes), [(1, 8)])
    found = fit_all_reduce(samples, "nccl").model.regimes
    assert len(found) == 2
    for one, true in zip(found, regimes, strict=True):
        assert one.base_s.value == pytest.approx(true.base_s.value, rel=1e-3)
        assert one.intra_bandwidth_bytes_per_s.value == pytest.approx(
            true.intra_bandwidth_bytes_per_s.value, rel=1e-3
        )
        assert one.hop_bytes == Fitted(value=0.0)


def test_the_figures_of_regimes_over_nodes_are_recovered() -> None:
    fit = fit_all_reduce(made_samples(NODES, [(2, 4), (4, 4), (8, 4)]), "nccl")
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
    truth = NcclRegimes(regimes=(nccl_regime("ring", 2e-5, 8e-6, inter=20e9, intra_hop=2e-6),))
    fit = fit_all_reduce(made_samples(truth, [(2, 2), (2, 4), (2, 8), (4, 4), (4, 2)]), "nccl")
    (found,) = fit.model.regimes
    assert found.shape == "ring"
    assert found.intra_hop_s.value == pytest.approx(2e-6, rel=1e-4)
    assert found.inter_hop_s.value == pytest.approx(8e-6, rel=1e-4)


@settings(max_examples=15, phases=NO_SHRINKING)
@given(
    queue=st.floats(5e-5, 1e-3),
    segment=st.floats(2e-5, 3e-4),
    wire=st.floats(1.01, 1.2),
    burst=st.floats(2e4, 5e5),
)
def test_figures_of_gloo_are_recovered(
    queue: float, segment: float, wire: float, burst: float
) -> None:
    truth = gloo_ring(queue, segment, wire, 1e9, burst)
    fit = fit_all_reduce(made_samples(truth, [(2, 1), (4, 1)], rates=RATES), "gloo")
    for found, true in (
        (fit.model.queue_s, queue),
        (fit.model.segment_s, segment),
        (fit.model.wire_bytes_per_byte, wire),
        (fit.model.reduce_bytes_per_s, 1e9),
        (fit.model.burst_bytes, burst),
    ):
        assert found.value == pytest.approx(true, rel=1e-3)


def test_gloo_without_line_rates_has_the_payloads_rate_in_their_place() -> None:
    truth = gloo_ring(wire=1.0, burst=0.0, line_rate=3e8)
    fit = fit_all_reduce(made_samples(truth, [(1, 2), (1, 4)]), "gloo")
    assert fit.model.line_rate_bytes_per_s == pytest.approx(3e8, rel=1e-3)
    assert fit.model.wire_bytes_per_byte == Fitted(value=1.0)
    assert fit.warnings == (
        (
            "the links' line rate is not known: the payload's rate was fitted in its place, and "
            "holds for this machine alone"
        ),
    )


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@settings(max_examples=2, phases=NO_SHRINKING)
@given(random=st.randoms(use_true_random=False))
def test_the_order_of_the_samples_does_not_matter(backend: str, random: Any) -> None:
    shuffled = list(NOISY[backend])
    random.shuffle(shuffled)
    assert fit_all_reduce(shuffled, backend) == noisy_fit(backend)


@pytest.mark.parametrize("seed", range(4))
def test_rounding_does_not_choose_what_measurements_do_not_tell(seed: int) -> None:
    """One sample a regime lies beyond its hop: its bytes and the bandwidth are told together."""
    regimes = (
        nccl_regime(base=1.0e-4, inter=2e8, hop_bytes=2**11),
        nccl_regime(base=2.4e-4, inter=2e9, hop_bytes=2**16),
    )
    every = made_samples(NcclRegimes(regimes=regimes), [(2, 1)], SIZES, noise=0.01, seed=seed)
    samples = every[::2]
    models = [fit_all_reduce(s, "nccl").model for s in (samples, rounded_otherwise(samples))]
    assert_same_times(*models, at=every)


@settings(max_examples=2, phases=NO_SHRINKING)
@given(factor=st.floats(0.1, 10.0))
def test_times_k_times_as_long_make_all_seconds_k_times_as_long(factor: float) -> None:
    longer = [replace(sample, time_s=sample.time_s * factor) for sample in NOISY["nccl"]]
    fit, known = fit_all_reduce(longer, "nccl"), noisy_fit("nccl")
    assert [regime.shape for regime in fit.model.regimes] == ["tree", "ring"]
    for found, before in zip(fit.model.regimes, known.model.regimes, strict=True):
        assert found.base_s.value == pytest.approx(before.base_s.value * factor, rel=1e-3)
        assert found.inter_hop_s.value == pytest.approx(before.inter_hop_s.value * factor, rel=1e-3)
        assert found.inter_bandwidth_bytes_per_s.value == pytest.approx(
            before.inter_bandwidth_bytes_per_s.value / factor, rel=1e-3
        )


@pytest.mark.parametrize(
    ("backend", "truth", "layouts", "rates"),
    [("nccl", NODES, [(2, 4), (4, 4), (8, 4)], [None]), ("gloo", gloo_ring(), [(2, 1)], RATES)],
)
def test_one_row_in_ten_may_be_wrong(
    backend: str, truth: AllReduceModel, layouts: Any, rates: Any
) -> None:
    good = made_samples(truth, layouts, rates=rates, noise=0.01)
    bad = [replace(s, time_s=s.time_s * (3.0 if i % 10 == 4 else 1.0)) for i, s in enumerate(good)]
    fit = fit_all_reduce(bad, backend)
    usual = [s for s in made_samples(truth, layouts, rates=rates) if s.size_bytes >= 2**20]
    assert median(relative_errors(fit.model, usual)) < 0.02


def _covered(truths: dict[str, float], fits: Sequence[Callable[[str], Fitted]]) -> float:
    """The part of the true figures that lie within 1.96 standard errors."""
    hits = [
        abs(fitted(name).value - true) < 1.96 * (fitted(name).stderr or 0.0)
        for fitted in fits
        for name, true in truths.items()
    ]
    return float(np.mean(hits))


@pytest.mark.slow
def test_standard_errors_cover_the_truth_about_as_often_as_they_say() -> None:
    """95 % by their definition; 84 % to 100 % over 40 seeds."""
    truths = {"queue_s": 2e-4, "segment_s": 6e-5, "wire_bytes_per_byte": 1.045}
    fits = []
    for seed in range(40):
        samples = made_samples(gloo_ring(), [(2, 1)], FEW_SIZES, RATES, noise=0.02, seed=seed)
        model = fit_all_reduce(samples, "gloo").model
        fits.append(lambda name, model=model: getattr(model, name))
    assert 0.84 <= _covered(truths, fits) <= 1.0


@pytest.mark.slow
def test_standard_errors_of_nccl_cover_the_truth_too() -> None:
    """Less often: that regimes were chosen from the same data is not in the errors."""
    truths = {"base_s": 20e-6, "intra_bandwidth_bytes_per_s": 50e9}
    truth = NcclRegimes(regimes=(nccl_regime(base=20e-6, intra=50e9),))
    fits = []
    for seed in range(15):
        samples = made_samples(truth, [(1, 8)], noise=0.02, seed=seed)
        regime = fit_all_reduce(samples, "nccl").model.regimes[0]
        fits.append(lambda name, regime=regime: getattr(regime, name))
    assert 0.75 <= _covered(truths, fits) <= 1.0
