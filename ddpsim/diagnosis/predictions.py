"""What a changed job predicts of each measurement, and what its uncertain inputs do to that.

Times are compared by their logarithm. A wait, which may be 0, is compared after a small part of the
step is added to it, so that shorter waits do not count.

How likely predictions make what was measured tells how large a graded cause is. All logarithms of
times are normal: each uncertain input moves those of all measurements together, and each
measurement has noise of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import exp, inf, log, pi, sqrt

import numpy as np

from ddpsim.cluster.transfers import duration_ns
from ddpsim.cluster.wires import inside
from ddpsim.diagnosis.case import Case, Change
from ddpsim.engine.request import Request
from ddpsim.errors import DdpsimError, ScenarioError
from ddpsim.prediction.job import Job, Stretching, stretching
from ddpsim.prediction.parts import Parts
from ddpsim.prediction.uncertainty import uncertainties
from ddpsim.result.diagnosis import Measurement, Quantity
from ddpsim.units import NS_PER_S

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
_MOVED = ("compute", "host", "network", "data")
_UNCOUNTED = 0.1  # of a step, in a wait
# how much longer published jobs of several GPUs take than one GPU and the communication say: half
# 1 to 6 %, nine in ten at most 12 % (docs/validation.md, section 1)
_RANKS, _RANKS_SIGMA = 0.04, 0.06
# assumed: half of the variance of a network's model is the same on all numbers of ranks
_OF_NETWORK = sqrt(0.5)
# assumed, of GPUs that meet in their host: slower boxes, which the prediction interval knows, are
# causes of their own
_OF_HOST = 0.35
_SMALL = 0.03  # an uncertainty within the noise of a measured step
_NO_TIME = 1e-6

CalmStep = tuple[Job, Mapping[str, float]]  # a job, and factors as `Job.step_s` takes them

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


@dataclass(frozen=True)
class Changed:
    """A changed job, all its terms stretched by `factors`.

    `equal`: with ranks that are all as fast as a usual one. `longer`: with one micro-batch more
    under no_sync, in which batch norms are synchronised too; None where they are not.
    """

    job: Job
    factors: Mapping[str, float]
    parts: Parts
    equal: Job
    longer: Job | None = None

    @classmethod
    def of(cls, case: Case, change: Change) -> Changed:
        """A case with a change; raises ScenarioError where that does not fit it."""
        job, equal, longer = case.changed(change), _with_equal_ranks(case, change), None
        if job.scenario.workload.sync_batch_norm:
            steps = f"ddp.accumulation_steps={job.scenario.ddp.accumulation_steps + 1}"
            longer = case.changed(Change((*change.settings, steps)))
        factors = {k: case.factors.get(k, 1.0) * v for k, v in change.factors.items()}
        return cls(job, {**case.factors, **factors}, case.parts, equal, longer)

    def stretched(self, term: str, factor: float) -> Changed:
        """Gives this change with one term longer still."""
        return replace(self, factors={**self.factors, term: self._factor(term) * factor})

    def seconds(self, measurement: Measurement, pace: float) -> float:
        """What it predicts of a measurement; `pace`: a noisy step over a calm one."""
        quantity = measurement.quantity
        if quantity == "step":
            return pace * self._step_s()
        if quantity == "without_sync":
            return self._alone_s()
        if quantity == "exposed":
            return self._exposed_s()
        if quantity == "data_wait":
            return self._data_wait_s()
        cost = self.job.network.cost.stretched(self._factor("network"))
        return duration_ns(cost.transfer("all_reduce", measurement.size_bytes or 0)) / NS_PER_S

    def steps(self, quantity: Quantity) -> list[CalmStep]:
        """Lists the steps that `seconds` needs simulated."""
        usual: CalmStep = self.job, self.factors
        without_sync = [usual, (self.longer, self.factors)] if self.longer else []
        has_loader = self.job.program.loader is not None
        promptly: CalmStep = self.job, self._promptly
        each = promptly if has_loader else usual
        needed: dict[Quantity, list[CalmStep]] = {
            "step": [usual],
            "without_sync": without_sync,
            "exposed": [each, (self.equal, each[1])],
            "data_wait": [usual, promptly] if has_loader else [],
        }
        return needed.get(quantity, [])

    def _factor(self, term: str) -> float:
        return self.factors.get(term, 1.0)

    def _step_s(self) -> float:
        return self.job.step_s(**self.factors)

    def _exposed_s(self) -> float:
        """What a usual rank waits: all of a step in which it is not as busy as with equal ranks.

        Beside a loader too: while a step waits for its batch no communication is under way.
        """
        factors = self.factors if self.job.program.loader is None else self._promptly
        busy_s = self.equal.step_s(**factors) - self.equal.exposed_s(**factors)
        return max(0.0, self.job.step_s(**factors) - busy_s)

    @property
    def _promptly(self) -> dict[str, float]:
        """The factors with batches that are always there."""
        return {**self.factors, "data": _NO_TIME}

    def _own_s(self, job: Job | None = None) -> float:
        """A usual rank's own work, in this job or in another."""
        factors = {"compute": self._factor("compute"), "host": self._factor("host")}
        return (job or self.job).compute_only_s(**factors)

    def _data_wait_s(self) -> float:
        if self.job.program.loader is None:
            return 0.0
        return max(0.0, self._step_s() - self.job.step_s(**self._promptly))

    def _alone_s(self) -> float:
        """A usual rank's step without communication.

        Its loader works ahead: the longer of its own work and the loader's sets the pace. Batch
        norms are synchronised under no_sync too.
        """
        own_s = self._own_s() + self._of_norms_s()
        return max(own_s, self.job.batches_s * self._factor("data"))

    def _of_norms_s(self) -> float:
        """What a micro-batch under no_sync takes beside its own work."""
        if self.longer is None:
            return 0.0
        with_one_more_s = self.longer.step_s(**self.factors) - self._own_s(self.longer)
        return max(0.0, with_one_more_s - (self._step_s() - self._own_s()))


def _with_equal_ranks(case: Case, change: Change) -> Job:
    if not case.changed(change).scenario.cluster.stragglers:
        return case.changed(change)
    kept = [each for each in change.settings if not each.startswith("cluster.stragglers")]
    reset = ["cluster.stragglers=null"] if case.cluster.stragglers else []
    return case.changed(Change((*kept, *reset)))


class Predictor:
    """Predicts the same measurements of one scenario under many changes, as logarithms.

    `pace`: the scenario's noisy step over its calm one.
    """

    def __init__(self, cases: Sequence[Case], measured: Sequence[Measurement], pace: float) -> None:
        self._cases, self._measurements, self._pace = cases, measured, pace
        self._layouts = list(dict.fromkeys((each.nodes, each.gpus_per_node) for each in measured))
        logs = [self._log_of(index, each.seconds) for index, each in enumerate(measured)]
        self.measured: Array = np.array(logs)

    def simulate(
        self,
        many: Sequence[Sequence[Change]],
        advance: Callable[[float], None],
        *,
        stretched: bool = False,
    ) -> None:
        """Simulate together what `values` needs of all these changes.

        `stretched`: also what `effects` needs. Changes that do not fit are left out. `advance` is
        called with the share of the work that has ended.
        """
        steps = (
            step
            for changes in many
            for changed, each in self._changed(changes)
            for varied in ([changed, *_varied(changed).values()] if stretched else [changed])
            for step in varied.steps(each.quantity)
        )
        simulate_calm_steps(steps, advance)

    def _changed(self, changes: Sequence[Change]) -> Iterator[tuple[Changed, Measurement]]:
        with suppress(ScenarioError):
            changed = [Changed.of(*pair) for pair in zip(self._cases, changes, strict=True)]
            yield from zip(changed, self._measurements, strict=True)

    def values(self, changes: Sequence[Change]) -> Array:
        """Predicts under a change of each case; raises ScenarioError where one does not fit."""
        changed = [Changed.of(*pair) for pair in zip(self._cases, changes, strict=True)]
        ranks = [_RANKS if self._is_unequal(i, each) else 0.0 for i, each in enumerate(changed)]
        return np.array([self._logged(i, each) for i, each in enumerate(changed)]) + ranks

    def effects(self, changes: Sequence[Change]) -> Array:
        """What a standard deviation of each input adds to the `values` of the same changes.

        One row for each input: compute, host, the network in a node and that between nodes, loader,
        how ranks differ, and the network on each number of ranks by itself.
        """
        changed = [Changed.of(*pair) for pair in zip(self._cases, changes, strict=True)]
        return np.array([self._column(i, each) for i, each in enumerate(changed)]).T

    def _logged(self, index: int, changed: Changed) -> float:
        return self._log_of(index, changed.seconds(self._measurements[index], self._pace))

    def _log_of(self, index: int, seconds: float) -> float:
        """The logarithm by which the time of a measurement is compared."""
        if self._measurements[index].quantity not in ("exposed", "data_wait"):
            return log(max(seconds, _NO_TIME))
        return log(max(seconds, 0.0) + _UNCOUNTED * self._cases[index].step_s)

    def _is_unequal(self, index: int, changed: Changed) -> bool:
        """Whether a measurement is longer than predicted because ranks were taken as equal."""
        is_step = self._measurements[index].quantity == "step"
        return changed.job.ranks_taken_as_equal and is_step

    def _column(self, index: int, changed: Changed) -> list[float]:
        """How far a standard deviation of each input moves one measurement."""
        value = self._logged(index, changed)
        moved = {k: self._logged(index, each) - value for k, each in _varied(changed).items()}
        network = moved.get("network", 0.0) * _OF_NETWORK
        in_node = changed.job.scenario.cluster.nodes == 1
        measured = self._measurements[index]
        layout = measured.nodes, measured.gpus_per_node
        return [
            *(moved.get("compute", 0.0), moved.get("host", 0.0)),
            *(network if in_node else 0.0, 0.0 if in_node else network),
            *(moved.get("data", 0.0), _RANKS_SIGMA if self._is_unequal(index, changed) else 0.0),
            *(network if each == layout else 0.0 for each in self._layouts),
        ]


def _varied(changed: Changed) -> dict[str, Changed]:
    """Copies of a change by input, each with that input a standard deviation larger."""
    cluster = changed.job.scenario.cluster
    is_of_host = cluster.nodes == 1 and inside(cluster)[1] is not None
    most = {"network": _OF_HOST} if is_of_host else {}
    inputs = uncertainties(changed.job)
    sigmas = {k: min(inputs[k].sigma, most.get(k, inf)) for k in _MOVED if k in inputs}
    return {k: changed.stretched(k, exp(sigma)) for k, sigma in sigmas.items() if sigma > _SMALL}


def simulate_calm_steps(
    calm_steps: Iterable[CalmStep], advance: Callable[[float], None] = lambda _: None
) -> None:
    """Simulate steps together, and keep each in its job, where `Job.step_s` finds it.

    `advance` is called with the share of the work that has ended. Steps of ranks that always differ
    are left out, as `Job.step_s` has a shortcut for them. If one step cannot be simulated, none is:
    `Job.step_s` of that one says why.
    """
    from ddpsim.engine.batch import run_many  # noqa: PLC0415 -- numpy is slow to import

    try:
        unknown = _unknown(calm_steps)
        requests = [request for _, _, request in unknown]
        steps = run_many(requests, lambda ended: advance(ended / max(1, len(requests))))
    except DdpsimError:
        return
    for (job, factors, _), step in zip(unknown, steps, strict=True):
        job.known_steps_s[factors] = step.mean_s
        job.known_exposed_s[factors] = step.exposed_s


def _unknown(
    calm_steps: Iterable[CalmStep],
) -> list[tuple[Job, Stretching, Request]]:
    """The requests of the steps that their job does not know yet, each once."""
    wanted = {(id(job), stretching(factors)): job for job, factors in calm_steps}
    pending = [
        (job, factors, job.calm_request(**dict(factors)))
        for (_, factors), job in wanted.items()
        if factors not in job.known_steps_s
    ]
    return [each for each in pending if each[2].sums is None]


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
    """Log likelihood of what was seen, by a multivariate normal around `values`."""
    covariance = effects.T @ effects + np.diag(seen.noise**2)
    off = seen.logs - values
    _, log_determinant = np.linalg.slogdet(covariance)
    distance = float(off @ np.linalg.solve(covariance, off))
    return -0.5 * (distance + float(log_determinant) + len(off) * log(2 * pi))


def unknown_log_likelihood(seen: Seen, healthy: Array) -> float:
    """Log likelihood of a cause that may change each measurement by itself, by any factor."""
    broad = Seen(seen.logs, np.hypot(seen.noise, _BROAD))
    return log_likelihood(broad, healthy, np.zeros((1, len(healthy))))


def posterior(odds: Mapping[str, float], log_likelihoods: Mapping[str, float]) -> dict[str, float]:
    """Probabilities of the hypotheses, which sum to 1."""
    logs = {key: log(odds[key]) + each for key, each in log_likelihoods.items()}
    most = max(logs.values())
    weights = {key: exp(each - most) for key, each in logs.items()}
    total = sum(weights.values())
    return {key: weight / total for key, weight in weights.items()}
