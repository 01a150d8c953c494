"""What tests ask of a fitted all-reduce law: its errors, and that rounding does not change it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import Phase

from calibrate.fit.profile import fit_all_reduce
from calibrate.fit.samples import Fit, Sample
from ddpsim.cluster.fitted.laws import AllReduceModel
from measured.made_measurements import (
    FEW_SIZES,
    NODES,
    RATES,
    all_reduce_s,
    gloo_ring,
    made_samples,
)

NO_SHRINKING = [Phase.explicit, Phase.generate]  # fits take a second


def relative_errors(model: AllReduceModel, samples: Iterable[Sample]) -> list[float]:
    return [
        abs(all_reduce_s(model, s.size_bytes, s.nodes, s.gpus_per_node, s.line_rate) / s.time_s - 1)
        for s in samples
    ]


NOISY = {
    "nccl": made_samples(NODES, [(2, 4), (4, 4)], FEW_SIZES, noise=0.02),
    "gloo": made_samples(gloo_ring(), [(2, 1)], FEW_SIZES, RATES, noise=0.02),
}


@cache
def noisy_fit(backend: str) -> Fit:
    return fit_all_reduce(NOISY[backend], backend)


def rounded_otherwise(samples: Sequence[Sample]) -> list[Sample]:
    """As another processor's library might: other last digits."""
    return [
        replace(sample, time_s=sample.time_s * (1 + (-1) ** i * 1e-13))
        for i, sample in enumerate(samples)
    ]


def assert_same_times(one: AllReduceModel, other: AllReduceModel, at: Sequence[Sample]) -> None:
    for s in at:
        point = s.size_bytes, s.nodes, s.gpus_per_node
        assert all_reduce_s(one, *point) == pytest.approx(all_reduce_s(other, *point), rel=1e-3)
