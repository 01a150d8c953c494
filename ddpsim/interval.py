"""How far a prediction may be off: the uncertainty of each input, carried through the model.

Each input's standard deviation is measured where it could be and a stated assumption where not
(docs/model.md, section "Intervals"). Inputs move the step on their own: the scenario is run
again with each one high and low, without noise, and the differences add in quadrature.
Interference of communication with compute is not modelled yet; it can only lengthen a step, so
it widens the interval upwards by what was published about it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import hypot

from ddpsim.result.model import IntervalSource, PredictionInterval

__all__ = ["COMPUTE_SIGMA", "NETWORK_SIGMA", "prediction_interval"]

LEVEL = 0.8
_Z = 1.2815515655446004  # of a normal distribution: 80 % lie within +/- z sigma

COMPUTE_SIGMA = {
    "roofline": (0.20, "the roofline's error over 7 published single-GPU steps"),
    "measured": (0.02, "assumed repeatability of a measured step time"),
}
NETWORK_SIGMA = {
    "log": (0.05, "assumed: a log interpolated between its sizes, another day's network"),
    "extrapolated log": (0.20, "assumed: a log of other ranks or sizes"),
    "stated links": (
        0.10,
        "assumed: links stated in the scenario, one alpha and beta for all sizes",
    ),
    "preset links": (0.25, "assumed: the device's usual machine, not yours"),
}
DATA_SIGMA = (0.10, "assumed: a loader's rate as stated in the scenario")
# compute while a collective is in flight: 18.9 % slower on average with NCCL (arXiv 2507.03114),
# up to 22 % with gloo on a shared-core testbed (docs/validation.md)
_INTERFERENCE = {"nccl": (0.189, "arXiv 2507.03114"), "gloo": (0.22, "our testbed's rounds")}


def prediction_interval(
    mean_s: float,
    step_s: Callable[[float, float, float], float],
    *,
    compute_basis: str,
    network_basis: str,
    has_loader: bool,
    backend: str,
    hidden_comm_s: float,
    spread_s: tuple[float, float],
) -> PredictionInterval:
    """The 80 % interval around a mean step.

    `step_s(compute, network, data)` simulates the step with its times stretched by factors;
    `hidden_comm_s` is communication under compute; `spread_s` is p10 and p90 over iterations.
    """
    base_s = step_s(1, 1, 1)
    sources = [
        _varied("compute time", *COMPUTE_SIGMA[compute_basis], base_s, lambda f: step_s(f, 1, 1))
    ]
    if network_basis in NETWORK_SIGMA:
        sigma, basis = NETWORK_SIGMA[network_basis]
        sources.append(_varied("network time", sigma, basis, base_s, lambda f: step_s(1, f, 1)))
    if has_loader:
        sources.append(_varied("data rate", *DATA_SIGMA, base_s, lambda f: step_s(1, 1, f)))
    low, high = spread_s
    if high > low:
        jitter = IntervalSource(
            "jitter", mean_s - low, high - mean_s, "p10 to p90 of the iterations"
        )
        sources.append(jitter)
    below_s = hypot(*(source.low_s for source in sources))
    above_s = hypot(*(source.high_s for source in sources))
    if hidden_comm_s > 0:
        share, published = _INTERFERENCE[backend]
        slowed_s = share * hidden_comm_s
        basis = f"not modelled: compute up to {share:.1%} slower under communication ({published})"
        sources.append(IntervalSource("interference", 0.0, slowed_s, basis))
        above_s += slowed_s
    return PredictionInterval(LEVEL, max(0.0, mean_s - below_s), mean_s + above_s, tuple(sources))


def _varied(
    name: str, sigma: float, basis: str, base_s: float, step_s: Callable[[float], float]
) -> IntervalSource:
    """The step with one input low and high, each at its edge of the 80 % range."""
    share = _Z * sigma
    low_s = max(0.0, base_s - step_s(1 - share))
    high_s = max(0.0, step_s(1 + share) - base_s)
    return IntervalSource(name, low_s, high_s, f"+/-{share:.0%} ({basis})")
