"""Figures of NCCL and gloo, found again in samples, and their standard errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
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
    TWO_HDR,
    all_reduce_s,
    gloo_ring,
    made_samples,
    nccl_model,
)
from measured.refits import (
    NO_SHRINKING,
    NOISY,
    noisy_fit,
    relative_errors,
)

from calibrate.fit.profile import fit_all_reduce
from calibrate.fit.samples import Fit, Sample
from ddpsim.cluster.fitted.ensemble import curve_of
from ddpsim.cluster.fitted.laws import AllReduceModel
from ddpsim.importers.profiles.cluster import Fitted

TRUE = {"start": 1.5, "tree_hop_ll": 1.4, "net_rate": 0.93, "intra_rate": 0.9}
LAYOUTS = [(1, 4), (2, 4), (4, 4), (8, 4)]


@cache
def made_fit(seed: int, layouts: int = len(LAYOUTS)) -> Fit:
    """A fit of times whose figures are known, on the first few layouts."""
    truth = nccl_model(TWO_HDR, **TRUE)
    samples = made_samples(truth, LAYOUTS[:layouts], noise=0.03, seed=seed)
    return fit_all_reduce(samples, "nccl", gpu="a100-sxm-80gb")


def test_figures_and_network_of_known_times_are_found_again() -> None:
    fit = made_fit(0)
    links = fit.model.hypotheses[0].links
    assert (links.nics_per_node, links.nic_bytes_per_s) == (2, 25e9)
    assert fit.sigma < 0.06
    for nodes in (16, 64):
        for size in (2**14, 2**20, 2**26):
            true_s = all_reduce_s(nccl_model(TWO_HDR, **TRUE), size, nodes, 4)
            assert all_reduce_s(fit.model, size, nodes, 4) == pytest.approx(true_s, rel=0.12)


def test_figures_lie_within_their_stated_errors() -> None:
    """80 % by their definition; over four draws of the noise at least as many."""
    hits = [
        abs(math.log(figure.value / TRUE.get(figure.name, 1.0))) <= 1.2816 * figure.sigma
        for seed in range(4)
        for figure in made_fit(seed).model.figures
        if figure.samples >= 6
    ]
    assert len(hits) >= 28
    assert np.mean(hits) >= 0.8


def test_more_layouts_narrow_the_answer() -> None:
    few, more = (made_fit(0, n).model for n in (2, 4))
    spreads = [
        [curve_of(model, "all_reduce", 64, 4).sigma(2**k) for k in range(12, 28)]
        for model in (few, more)
    ]
    assert np.median(spreads[1]) < 0.9 * np.median(spreads[0])
    sure = [{f.name: f.sigma for f in model.figures} for model in (few, more)]
    assert all(sure[1][name] <= sure[0][name] + 0.02 for name in sure[0])


def test_all_gathers_tell_of_rings_that_no_all_reduce_took() -> None:
    """NCCL gathers round rings alone; small all-reduces over nodes go by trees."""
    truth = nccl_model(TWO_HDR, ring_hop_ll=2.5)
    reduced = made_samples(truth, [(2, 4), (4, 4)])
    gathered = [
        Sample(4, 4, size, curve_of(truth, "all_gather", 4, 4).seconds(size))
        for size in (2**12, 2**14, 2**16)
    ]
    alone, both = (
        {f.name: f for f in fit_all_reduce(reduced, "nccl", more, "a100-sxm-80gb").model.figures}
        for more in ({}, {"all_gather": gathered})
    )
    before, after = alone["ring_hop_ll"], both["ring_hop_ll"]
    assert after.samples > before.samples
    assert abs(math.log(after.value / 2.5)) < abs(math.log(before.value / 2.5))


def test_a_gpu_that_no_log_names_is_searched_for() -> None:
    samples = made_samples(nccl_model(TWO_HDR), [(1, 4), (2, 4), (4, 4)])
    found = {h.architecture for h in fit_all_reduce(samples, "nccl").model.hypotheses}
    assert "ampere" in found


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
    assert median(relative_errors(fit.model, usual)) < (0.02 if backend == "gloo" else 0.05)


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
