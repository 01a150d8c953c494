"""The posterior of NCCL's figures under one setting, from measured collectives.

Figures are log-normal; times have errors of a t distribution. The mode is found by Gauss and
Newton's steps, and the posterior is taken as normal around it (Laplace).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from calibrate.fit.samples import Sample
from ddpsim.cluster.fitted.ensemble import log_s, setting_cost
from ddpsim.cluster.nccl.cost import NcclCost
from ddpsim.cluster.nccl.figures import PRIORS, USUAL, Figures, counting
from ddpsim.cluster.nccl.tuner import Choice
from ddpsim.cluster.transfers import Operation
from ddpsim.importers.profiles.nccl import NcclSetting

__all__ = ["Fitted", "Row", "fitted", "log_time"]

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
    counted: Counter[int]  # rows by figure


def log_time(setting: NcclSetting, row: Row) -> float:
    """Logarithm of the seconds that a setting gives with all figures as usual."""
    return _Sent.of(setting, row).log_s(USUAL)


class _Sent(NamedTuple):
    """A row as NCCL sends it under a setting. `counting`: figures that its time depends on."""

    row: Row
    cost: NcclCost
    choice: Choice
    counting: frozenset[int]

    @classmethod
    def of(cls, setting: NcclSetting, row: Row) -> _Sent:
        layout = row.sample.nodes, row.sample.gpus_per_node
        cost = setting_cost(setting, *layout)
        choice = cost.tuned(row.sample.size_bytes, row.operation)
        places = (Figures._fields.index(name) for name in counting(choice, *layout))
        return cls(row, cost, choice, frozenset(places))

    def log_s(self, figures: Figures) -> float:
        drawn, (operation, sample) = replace(self.cost, figures=figures), self.row
        return log_s(drawn, self.choice, operation, sample.size_bytes)


class _Posterior:
    """The rows under one setting: what they take with given figures, and how that changes."""

    def __init__(self, setting: NcclSetting, rows: Sequence[Row]) -> None:
        prior = PRIORS[setting.links.transport]
        self.prior, self.sigmas = np.log(prior.medians), np.array(prior.sigmas)
        self.sent = [_Sent.of(setting, row) for row in rows]
        self._measured = np.log([row.sample.time_s for row in rows])
        self._weights = np.array([row.sample.weight for row in rows])

    def residuals(self, mode: Floats) -> Floats:
        """Logarithms of predicted over measured times."""
        figures = _figures(mode)
        return np.array([sent.log_s(figures) for sent in self.sent]) - self._measured

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
        slopes = np.zeros((len(self.sent), len(mode)))
        for figure in frozenset().union(*(sent.counting for sent in self.sent)):
            nudged = mode.copy()
            nudged[figure] += _NUDGE
            figures = _figures(nudged)
            for i, sent in enumerate(self.sent):
                if figure in sent.counting:
                    moved = sent.log_s(figures) - self._measured[i] - residuals[i]
                    slopes[i, figure] = moved / _NUDGE
        return slopes


def _figures(mode: Floats) -> Figures:
    return Figures(*np.exp(mode).tolist())


def fitted(setting: NcclSetting, rows: Sequence[Row], near: Fitted | None = None) -> Fitted:
    """The mode of the posterior; steps begin at that of a setting `near` it, or at the prior's."""
    posterior = _Posterior(setting, rows)
    mode = (posterior.prior if near is None else near.mode).copy()
    residuals = posterior.residuals(mode)
    least = posterior.objective(residuals, mode)
    precision = np.diag(1 / posterior.sigmas**2)
    for _ in range(_MOST_STEPS):
        step, precision = posterior.step(residuals, mode)
        gained = 0.0
        while np.abs(step).max() > _SHORTEST * _NUDGE:
            tried = mode + step
            errors = posterior.residuals(tried)
            value = posterior.objective(errors, tried)
            if value < least:
                mode, residuals, gained, least = tried, errors, least - value, value
                break
            step = step / 2
        if gained < _DONE:
            break
    covariance = np.linalg.inv(precision)
    evidence = -least + 0.5 * np.linalg.slogdet(covariance)[1] - np.log(posterior.sigmas).sum()
    counted = Counter(figure for sent in posterior.sent for figure in sent.counting)
    known = np.asarray(covariance, np.float64)
    return Fitted(setting, mode, known, float(evidence), residuals, counted)
