"""How likely predictions make what was measured, and how large a graded cause then is.

All logarithms of times are normal: each uncertain input moves those of all measurements together,
and each measurement has noise of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, pi

import numpy as np

from ddpsim.diagnosis.predictions import Array
from ddpsim.result.diagnosis import Quantity

# of one measurement, by its quantity: single runs of the published BERT steps differ by 5 to 10 %,
# means over many steps by 1 to 2 % (assumed)
NOISE: dict[Quantity, float] = {
    "step": 0.03,
    "without_sync": 0.03,
    "exposed": 0.1,
    "data_wait": 0.1,
    "all_reduce": 0.1,
}
# waits for gloo, whose threads share the cores of compute: by so much more (assumed)
_OF_GLOO = 3.0
_BROAD = 1.2  # of an unknown cause, which may lengthen each measurement by any factor
_PARTS = 8  # between two simulated sizes


def noise_of(quantity: Quantity, backend: str) -> float:
    """Standard deviation of the logarithm of one measurement."""
    more = _OF_GLOO if quantity == "exposed" and backend == "gloo" else 1.0
    return more * NOISE[quantity]


@dataclass(frozen=True)
class Fit:
    """A hypothesis beside what was measured: its log likelihood, its likeliest size, and `values`:
    what that predicts.
    """

    log_likelihood: float
    size: float
    values: Array


@dataclass(frozen=True)
class Seen:
    """Logarithms of measured times, and the standard deviation of each one's own noise."""

    logs: Array
    noise: Array


def fit(
    seen: Seen,
    sizes: Sequence[float],
    values: Sequence[Array],
    effects: Array,
    *,
    graded: bool,
    falls: float = 0.0,
) -> Fit:
    """Averaged over sizes: those simulated, and of a `graded` hypothesis those between as well.

    `values`: what each size predicts. Between two the logarithm of a time is interpolated by the
    logarithm of the size. `effects`: what the uncertain inputs add. `falls`: a size of so many
    times the first, or a part of it, is by that power less likely.
    """
    points = list(_between(sizes, values)) if graded else list(zip(sizes, values, strict=True))
    weights = [exp(-falls * abs(log(size / sizes[0]))) for size, _ in points]
    likely = [
        log_likelihood(seen, value, effects) + log(weight / sum(weights))
        for (_, value), weight in zip(points, weights, strict=True)
    ]
    best = max(range(len(points)), key=lambda i: likely[i])
    whole = log(sum(exp(each - likely[best]) for each in likely))
    return Fit(likely[best] + whole, *points[best])


def _between(sizes: Sequence[float], values: Sequence[Array]) -> list[tuple[float, Array]]:
    points = [(sizes[0], values[0])]
    for i in range(1, len(sizes)):
        low, high = log(sizes[i - 1]), log(sizes[i])
        for part in range(1, _PARTS + 1):
            share = part / _PARTS
            value = values[i - 1] + share * (values[i] - values[i - 1])
            points.append((exp(low + share * (high - low)), value))
    return points


def log_likelihood(seen: Seen, values: Array, effects: Array) -> float:
    """Of a multivariate normal around `values`."""
    covariance = effects.T @ effects + np.diag(seen.noise**2)
    off = seen.logs - values
    _, log_determinant = np.linalg.slogdet(covariance)
    distance = float(off @ np.linalg.solve(covariance, off))
    return -0.5 * (distance + float(log_determinant) + len(off) * log(2 * pi))


def unknown_log_likelihood(seen: Seen, healthy: Array) -> float:
    """Of a cause that may lengthen or shorten each measurement by itself, by any factor."""
    broad = Seen(seen.logs, np.hypot(seen.noise, _BROAD))
    return log_likelihood(broad, healthy, np.zeros((1, len(healthy))))


def posterior(odds: Mapping[str, float], log_likelihoods: Mapping[str, float]) -> dict[str, float]:
    """Probabilities of the hypotheses, which sum to 1."""
    logs = {key: log(odds[key]) + each for key, each in log_likelihoods.items()}
    most = max(logs.values())
    weights = {key: exp(each - most) for key, each in logs.items()}
    total = sum(weights.values())
    return {key: weight / total for key, weight in weights.items()}
