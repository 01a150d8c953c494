"""Robust least squares in the logarithm of time, with standard errors.

Parameters are at least zero. A residual r counts as r^2 while it is small beside ROBUST, and as
|r| beyond (SciPy's soft_l1), so that one row in ten may be wrong without moving the fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Residuals = Callable[[Floats], Floats]

ROBUST = 0.05  # relative residuals beyond 5 % count as outliers
FLOOR = 1e-9  # of a parameter's scale: as good as zero, and still a divisor
_IDLE = 1e-4  # a parameter is at its bound if zero costs no more than this part of the cost,
_NEGLIGIBLE = 1e-10  # or no more than this a sample: a relative error of 1e-5
_LEANING = 1e-3  # relative error that an optional parameter of 1.7 times its scale counts as
_LEAST_SINGULAR = 1e-5  # singular values below this part of the largest tell nothing
_SHARE = 0.05  # of a direction that is not told: then neither is the parameter


@dataclass(frozen=True)
class Solution:
    """The end of a fit; every array has one entry a parameter.

    `stderr` and `correlation` are nan where the measurements do not tell the parameter, and
    where `at_bound` says that it is zero. `cost` is the robust sum of squares.
    """

    values: Floats
    stderr: Floats
    correlation: Floats
    at_bound: npt.NDArray[np.bool_]
    cost: float


def robust_cost(residuals: Floats) -> float:
    """The sum of squares that does not mind outliers."""
    return float(np.sum(2 * ROBUST**2 * (np.sqrt(1 + (residuals / ROBUST) ** 2) - 1)))


def nonnegative(design: Floats, target: Floats) -> tuple[Floats, float]:
    """Least squares with coefficients of at least zero, and the norm of what is left."""
    from scipy.optimize import nnls  # noqa: PLC0415 -- most of a second to import

    unit = np.maximum(np.abs(design).max(axis=0), 1e-30)
    values, error = nnls(design / unit, target)
    return np.asarray(values / unit), float(error)


def solve(
    residuals: Residuals, starts: Sequence[Floats], scale: Floats, optional: Sequence[int]
) -> Floats:
    """The best of the minima reached from `starts`, with all parameters at least zero.

    `residuals(values)` are log(predicted / measured), times the root of the weight; `scale` is
    where each parameter starts to matter. Of minima that are as good, the one in which those named
    in `optional` are least: rounding, which differs between processors, must not choose.
    """
    leaning = _leaning(_scaled(residuals, scale), optional)
    ends = [_minimum(leaning, np.maximum(start / scale, 1e-3), 1e-4, "2-point") for start in starts]
    return min(ends, key=lambda unit: robust_cost(leaning(unit))) * scale


def polish(
    residuals: Residuals,
    values: Floats,
    scale: Floats,
    optional: Sequence[int],
) -> Solution:
    """Find the same minimum to the last digit, with its standard errors.

    A parameter that is as good at zero is put there. Those named in `optional` are dropped, while
    the others follow, unless the Bayesian information criterion wants them: what two parameters
    can explain alike goes to the one that is not optional.
    """
    scaled = _scaled(residuals, scale)
    leaning = _leaning(scaled, optional)
    unit = _minimum(leaning, values / scale, 1e-13, "3-point")
    free = np.ones(len(unit), dtype=bool)
    for i in (*optional, *reversed(range(len(unit)))):
        samples, cost = len(scaled(unit)), robust_cost(scaled(unit))
        kept = free & (np.arange(len(unit)) != i)
        trial, factor = np.where(kept, unit, FLOOR), 1 + _IDLE
        if i in optional and free[i]:
            trial, factor = _minimum_of(leaning, trial, kept), samples ** (1 / samples)
        if robust_cost(scaled(trial)) <= cost * factor + _NEGLIGIBLE * samples:
            unit, free = trial, kept
    covariance = _covariance(scaled, unit, free)
    spread = np.sqrt(np.diag(covariance))
    with np.errstate(invalid="ignore", divide="ignore"):
        correlation = covariance / np.outer(spread, spread)
    return Solution(unit * scale, spread * scale, correlation, ~free, robust_cost(scaled(unit)))


def _scaled(residuals: Residuals, scale: Floats) -> Residuals:
    return lambda unit: residuals(np.maximum(unit, FLOOR) * scale)


def _leaning(residuals: Residuals, optional: Sequence[int]) -> Residuals:
    """And a little for each optional parameter: no matter to what measurements tell."""
    which = list(optional)
    return lambda unit: np.append(residuals(unit), _LEANING * np.log1p(unit[which]))


def _minimum_of(residuals: Residuals, unit: Floats, free: npt.NDArray[np.bool_]) -> Floats:
    """The minimum over the parameters that are free."""

    def whole(part: Floats) -> Floats:
        values = unit.copy()
        values[free] = part
        return values

    return whole(_minimum(lambda part: residuals(whole(part)), unit[free], 1e-10, "3-point"))


def _minimum(residuals: Residuals, start: Floats, tolerance: float, jac: str) -> Floats:
    from scipy.optimize import least_squares  # noqa: PLC0415 -- most of a second to import

    minimum = least_squares(
        residuals,
        np.maximum(start, 2 * FLOOR),
        jac=jac,
        bounds=(FLOOR, np.inf),
        loss="soft_l1",
        f_scale=ROBUST,
        x_scale="jac",
        xtol=tolerance,
        ftol=tolerance,
        gtol=tolerance,
        max_nfev=60 if tolerance > 1e-6 else 200,
    )
    return np.asarray(minimum.x)


def _covariance(residuals: Residuals, unit: Floats, free: npt.NDArray[np.bool_]) -> Floats:
    """Covariance of an M-estimate (Huber, Robust Statistics, 1981, section 7.6); nan: not told."""
    covariance = np.full((len(unit), len(unit)), np.nan)
    r = residuals(unit)
    if len(r) <= free.sum() or not free.any():
        return covariance
    z = 1 + (r / ROBUST) ** 2
    variance = np.mean(r**2 / z) / np.mean(z**-1.5) ** 2 * len(r) / (len(r) - free.sum())
    inverse, tells = _inverse(_jacobian(residuals, unit)[:, free])
    places = np.flatnonzero(free)[tells]
    covariance[np.ix_(places, places)] = variance * inverse[np.ix_(tells, tells)]
    return covariance


def _jacobian(residuals: Residuals, unit: Floats) -> Floats:
    steps = np.diag(1e-6 * np.maximum(unit, 1e-3))
    columns = [
        (residuals(unit + step) - residuals(unit - step)) / (2 * step.sum()) for step in steps
    ]
    return np.array(columns).T


def _inverse(jacobian: Floats) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """The inverse of J'J, by singular values, and which parameters it tells."""
    norm = np.linalg.norm(jacobian, axis=0)
    norm = np.where(norm > 0, norm, 1.0)
    _, singular, directions = np.linalg.svd(jacobian / norm, full_matrices=False)
    lost = singular < _LEAST_SINGULAR * singular[0]
    is_telling = ~(np.abs(directions[lost]) > _SHARE).any(axis=0)
    kept = directions[~lost] / singular[~lost, None]
    return kept.T @ kept / np.outer(norm, norm), is_telling
