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

from calibrate.fit.samples import Sample
from calibrate.fit.solve import Floats
from ddpsim.cluster.fitted.ensemble import log_s, setting_cost
from ddpsim.cluster.nccl.cost import NcclCost
from ddpsim.cluster.nccl.figures import PRIORS, USUAL, Figures, Prior, counting
from ddpsim.cluster.nccl.tuner import Choice
from ddpsim.cluster.transfers import Operation
from ddpsim.importers.profiles.nccl import NcclSetting

_SIGMA, _TAILS = 0.2, 4.0  # of a time's logarithm, and degrees of freedom of its t distribution
_MOST_STEPS, _DONE, _SHORTEST = 8, 0.05, 0.1  # of a fit; a gain, a part of a step
_NUDGE = 0.05  # of a logarithm, for a derivative
# variance that a measured logarithm is expected to count with (Fisher's information of t)
NOISE_VARIANCE = _SIGMA**2 * (_TAILS + 3) / (_TAILS + 1)


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
        return cls.by(setting_cost(setting, row.sample.nodes, row.sample.gpus_per_node), row)

    @classmethod
    def by(cls, cost: NcclCost, row: Row) -> _Sent:
        layout = row.sample.nodes, row.sample.gpus_per_node
        choice = cost.tuned(row.sample.size_bytes, row.operation)
        places = (Figures._fields.index(name) for name in counting(choice, *layout))
        return cls(row, cost, choice, frozenset(places))

    def log_s(self, figures: Figures) -> float:
        drawn, (operation, sample) = replace(self.cost, figures=figures), self.row
        return log_s(drawn, self.choice, operation, sample.size_bytes)


class _Mode(NamedTuple):
    """The logarithms of the figures, what is left of the rows, and the precision there."""

    figures: Floats
    residuals: Floats
    objective: float
    precision: Floats


class _Posterior:
    """Rows as they are sent: what they take with given figures, and how that changes."""

    def __init__(self, prior: Prior, sent: Sequence[_Sent]) -> None:
        self.prior, self.sigmas = np.log(prior.medians), np.array(prior.sigmas)
        self.sent = sent
        samples = [each.row.sample for each in sent]
        self._measured = np.log([sample.time_s for sample in samples])
        self._weights = np.array([sample.weight for sample in samples])

    @classmethod
    def of(cls, setting: NcclSetting, rows: Sequence[Row]) -> _Posterior:
        prior = PRIORS[setting.links.transport]
        return cls(prior, [_Sent.of(setting, row) for row in rows])

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
        slopes = self.slopes(residuals, mode)
        robust = (_TAILS + 1) / (_TAILS + (residuals / _SIGMA) ** 2) / _SIGMA**2
        weights = self._weights * robust
        precision = slopes.T @ (weights[:, None] * slopes) + np.diag(1 / self.sigmas**2)
        slope = slopes.T @ (weights * residuals) + (mode - self.prior) / self.sigmas**2
        return np.clip(-np.linalg.solve(precision, slope), -1.0, 1.0), precision

    def slopes(self, residuals: Floats, mode: Floats) -> Floats:
        """How the logarithm of each row's time changes with each figure's."""
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


def _figures(mode: Floats) -> Figures:
    return Figures(*np.exp(mode).tolist())


def fitted(setting: NcclSetting, rows: Sequence[Row], near: Fitted | None = None) -> Fitted:
    """The mode of the posterior; steps begin at that of a setting `near` it, or at the prior's."""
    posterior = _Posterior.of(setting, rows)
    mode = posterior.mode(posterior.prior if near is None else near.mode)
    covariance = np.asarray(np.linalg.inv(mode.precision), np.float64)
    volume = 0.5 * np.linalg.slogdet(covariance)[1] - np.log(posterior.sigmas).sum()
    evidence = float(volume - mode.objective)
    counted = Counter(figure for sent in posterior.sent for figure in sent.counting)
    return Fitted(setting, mode.figures, covariance, evidence, mode.residuals, counted)


def pooled_figures(prior: Prior, costs: Sequence[NcclCost], rows: Sequence[Row]) -> Figures:
    """The likeliest figures that clusters share; each row has its own cluster's cost."""
    sent = [_Sent.by(cost, row) for cost, row in zip(costs, rows, strict=True)]
    posterior = _Posterior(prior, sent)
    return _figures(posterior.mode(posterior.prior).figures)


def precision(setting: NcclSetting, rows: Sequence[Row], mode: Floats) -> Floats:
    """The inverse of the covariance of the figures' logarithms at the mode, given these rows."""
    posterior = _Posterior.of(setting, rows)
    return posterior.step(posterior.residuals(mode), mode)[1]


def linear(setting: NcclSetting, rows: Sequence[Row], mode: Floats) -> tuple[Floats, Floats]:
    """Logarithms of modelled over measured times, and how they change with each figure's."""
    posterior = _Posterior.of(setting, rows)
    residuals = posterior.residuals(mode)
    return residuals, posterior.slopes(residuals, mode)
