"""The posterior of NCCL's figures under one setting, from measured collectives.

Figures are log-normal; times have errors of a t distribution. The mode is found by Gauss and
Newton's steps, and the posterior is taken as normal around it (Laplace).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from calibrate.fit.samples import Sample
from ddpsim.cluster.fitted.ensemble import NcclSetting, setting_cost
from ddpsim.cluster.nccl.cost import NcclCost
from ddpsim.cluster.nccl.figures import PRIORS, Figures, Prior, counting
from ddpsim.cluster.nccl.tuner import Choice
from ddpsim.cluster.transfers import Operation, duration_ns
from ddpsim.units import NS_PER_S

__all__ = ["Fitted", "Row", "fitted", "log_time", "pooled_figures"]

Floats = npt.NDArray[np.float64]

_SIGMA, _TAILS = 0.2, 4.0  # of a time's logarithm, and degrees of freedom of its t distribution
_MOST_STEPS, _DONE, _SHORTEST = 8, 0.05, 0.1  # of a fit; a gain, a part of a step
_NUDGE = 0.05  # of a logarithm, for a derivative


class Row(NamedTuple):
    """One measured collective."""

    operation: Operation
    sample: Sample


@dataclass(frozen=True)
class Fitted:
    """A setting with the posterior of its figures, as logarithms."""

    setting: NcclSetting
    mode: Floats
    covariance: Floats
    evidence: float
    residuals: Floats
    counted: tuple[int, ...]  # rows by figure


def log_time(setting: NcclSetting, row: Row) -> float:
    """Logarithm of the seconds that a setting gives with all figures as usual."""
    cost = setting_cost(setting, row.sample.nodes, row.sample.gpus_per_node)
    return _log_s(cost, cost.tuned(row.sample.size_bytes, row.operation), row)


def _log_s(cost: NcclCost, choice: Choice, row: Row) -> float:
    ns = duration_ns(cost.sent(choice, row.sample.size_bytes, row.operation))
    return float(np.log(max(1, ns) / NS_PER_S))


class _Mode(NamedTuple):
    """The logarithms of the figures, what is left of the rows, and the precision there."""

    figures: Floats
    residuals: Floats
    objective: float
    precision: Floats


class _Posterior:
    """Rows with their costs: what they take with given figures, and how that changes."""

    def __init__(self, prior: Prior, costs: Sequence[NcclCost], rows: Sequence[Row]) -> None:
        self.prior, self.sigmas = np.log(prior.medians), np.array(prior.sigmas)
        self._rows, self._costs = rows, costs
        self._choices = [
            cost.tuned(row.sample.size_bytes, row.operation)
            for cost, row in zip(self._costs, rows, strict=True)
        ]
        self.counting = [
            {
                Figures._fields.index(name)
                for name in counting(choice, row.sample.nodes, row.sample.gpus_per_node)
            }
            for choice, row in zip(self._choices, rows, strict=True)
        ]
        self._measured = np.log([row.sample.time_s for row in rows])
        self._weights = np.array([row.sample.weight for row in rows])

    def residuals(self, mode: Floats) -> Floats:
        """Logarithms of predicted over measured times."""
        predicted = [self._log_s(i, mode) for i in range(len(self._rows))]
        return np.array(predicted) - self._measured

    def objective(self, residuals: Floats, mode: Floats) -> float:
        """The negative logarithm of the posterior, but for a constant."""
        tails = np.log1p((residuals / _SIGMA) ** 2 / _TAILS)
        likelihood = (_TAILS + 1) / 2 * (self._weights * tails).sum()
        return float(likelihood + 0.5 * (((mode - self.prior) / self.sigmas) ** 2).sum())

    def step(self, residuals: Floats, mode: Floats) -> tuple[Floats, Floats]:
        """Gauss and Newton's step, at most a factor of e, and the precision there."""
        slopes = self._slopes(residuals, mode)
        robust = (_TAILS + 1) / (_TAILS + (residuals / _SIGMA) ** 2) / _SIGMA**2
        weights = self._weights * robust
        precision = slopes.T @ (weights[:, None] * slopes) + np.diag(1 / self.sigmas**2)
        slope = slopes.T @ (weights * residuals) + (mode - self.prior) / self.sigmas**2
        return np.clip(-np.linalg.solve(precision, slope), -1.0, 1.0), precision

    def _slopes(self, residuals: Floats, mode: Floats) -> Floats:
        slopes = np.zeros((len(self._rows), len(mode)))
        for figure in sorted(set().union(*self.counting)):
            nudged = mode.copy()
            nudged[figure] += _NUDGE
            for i, counts in enumerate(self.counting):
                if figure in counts:
                    moved = self._log_s(i, nudged) - self._measured[i] - residuals[i]
                    slopes[i, figure] = moved / _NUDGE
        return slopes

    def _log_s(self, i: int, mode: Floats) -> float:
        drawn = replace(self._costs[i], figures=Figures(*np.exp(mode).tolist()))
        return _log_s(drawn, self._choices[i], self._rows[i])

    def mode(self, first: Floats) -> _Mode:
        """The likeliest figures, by steps from the first."""
        mode, residuals = first.copy(), self.residuals(first)
        least, precision = self.objective(residuals, mode), np.diag(1 / self.sigmas**2)
        for _ in range(_MOST_STEPS):
            step, precision = self.step(residuals, mode)
            gained = 0.0
            while np.abs(step).max() > _SHORTEST * _NUDGE:
                tried = mode + step
                errors = self.residuals(tried)
                value = self.objective(errors, tried)
                if value < least:
                    mode, residuals, gained, least = tried, errors, least - value, value
                    break
                step = step / 2
            if gained < _DONE:
                break
        return _Mode(mode, residuals, least, precision)


def fitted(setting: NcclSetting, rows: Sequence[Row], near: Fitted | None = None) -> Fitted:
    """The mode of the posterior; steps begin at that of a setting `near` it, or at the prior's."""
    costs = [setting_cost(setting, row.sample.nodes, row.sample.gpus_per_node) for row in rows]
    posterior = _Posterior(PRIORS[setting.links.transport], costs, rows)
    found = posterior.mode(posterior.prior if near is None else near.mode)
    covariance = np.asarray(np.linalg.inv(found.precision), np.float64)
    volume = 0.5 * np.linalg.slogdet(covariance)[1] - np.log(posterior.sigmas).sum()
    evidence = float(volume - found.objective)
    counted = [0] * len(found.figures)
    for counts in posterior.counting:
        for figure in counts:
            counted[figure] += 1
    return Fitted(setting, found.figures, covariance, evidence, found.residuals, tuple(counted))


def pooled_figures(prior: Prior, costs: Sequence[NcclCost], rows: Sequence[Row]) -> Figures:
    """The likeliest figures that clusters share; each row has its own cluster's cost."""
    posterior = _Posterior(prior, costs, rows)
    return Figures(*np.exp(posterior.mode(posterior.prior).figures).tolist())
