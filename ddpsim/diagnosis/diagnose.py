"""Goes from what was measured of a job to the likely causes, and what to look at next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import isfinite, log
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from ddpsim.diagnosis.case import Case, Change
from ddpsim.diagnosis.checks import Suspect, cheapest, largest_bytes
from ddpsim.diagnosis.facts import check_is_of, facts_of, log_probability, measured_in, rank_facts
from ddpsim.diagnosis.hypotheses import NOTHING, UNKNOWN, UNKNOWN_ODDS, hypotheses_of
from ddpsim.diagnosis.hypothesis import FactName, Hypothesis
from ddpsim.diagnosis.measurements import measurements_in
from ddpsim.diagnosis.own_work import LOADERS, SHARED_LOADER
from ddpsim.diagnosis.predictions import (
    NOISE,
    Array,
    Changed,
    Fit,
    Predictor,
    Seen,
    fit,
    noise_of,
    posterior,
    simulate_calm_steps,
    unknown_log_likelihood,
)
from ddpsim.errors import InputError, ScenarioError
from ddpsim.importers.kineto.ranks import read_rank_traces
from ddpsim.importers.nccl.debug_log import read_debug_log
from ddpsim.prediction.api import scenario_of
from ddpsim.prediction.program import is_bound_by_peak
from ddpsim.prediction.resolve import resolve
from ddpsim.prediction.stretches import stretches
from ddpsim.progress import Stage, stage
from ddpsim.result.diagnosis import (
    WORTH_SAYING,
    Cause,
    CheckToRun,
    Diagnosis,
    Fact,
    Measured,
    Measurement,
    Predicted,
    Quantity,
    Verdict,
    is_normal,
    verdict,
)
from ddpsim.scenario.document import Source
from ddpsim.scenario.quantity import SourceFile
from ddpsim.units import parse_duration

if TYPE_CHECKING:
    from ddpsim.result.model import Result
    from ddpsim.scenario.schema import Scenario

_LIKELY = 0.02  # of a cause that is worth simulating once more for what else it predicts
_FAR = log(1.5)  # of a step from the measured one, by its logarithm
_NO_WAIT = 0.02  # of a step: no loader is to blame
_FARTHER = 1.0  # standard deviations of the noise
_SEEN = 0.01  # of any measurement: what changes them by less is no cause
_OF_HEALTHY = 0.95  # of healthy jobs, in which steps of several settings fit together
_SURE = 0.95  # of one cause: nothing needs to be told apart
_TOLD_BY = {
    FactName.RANKS: "per_rank",
    **dict.fromkeys(
        (
            *(FactName.BUCKETS, FactName.FIRST, FactName.READS),
            *(FactName.REDUCING, FactName.UNUSED, FactName.WORK),
        ),
        "loop",
    ),
}
_NOISE = f"noise of a step {NOISE['step']:.0%}, of a wait or an all-reduce {NOISE['exposed']:.0%}"
_OFF = "nothing is wrong: the prediction is off, by more than in four of five healthy jobs"
_ASSUMPTIONS = (
    "odds of the causes before anything was measured (docs/explanation/diagnosis.md)",
    _NOISE,
    "one cause at a time",
)


def diagnose(
    scenario: Scenario | Case,
    measured: str | None = None,
    *,
    without_sync: str | None = None,
    exposed: str | None = None,
    data_wait: str | None = None,
    all_reduce: str | None = None,
    nccl_log: str | Path | None = None,
    traces: str | Path | None = None,
) -> Diagnosis:
    """Hold every cause that can apply against what was measured of a real job, and rank them.

    What was measured is text or a file, as `ddpsim.diagnose` takes it, and `measured` all the steps
    that are known: on several numbers of GPUs, of micro-batches or of samples a rank. Raises as
    that does. Several diagnoses of one scenario are faster if they share its `Case`.
    """
    texts = {
        "measured": measured,
        "without_sync": without_sync,
        "exposed": exposed,
        "data_wait": data_wait,
        "all_reduce": all_reduce,
    }
    case = scenario if isinstance(scenario, Case) else Case.of(scenario)
    measurements = measurements_in(case.cluster, texts)
    facts: list[Fact] = []
    if traces:
        of_traces = read_rank_traces(SourceFile(str(traces), Path(traces)))
        is_known = any(each.quantity == "step" for each in measurements)
        measurements += measured_in(of_traces, case, with_step=not is_known)
        facts += rank_facts(of_traces, case)
    if nccl_log:
        debug = read_debug_log(SourceFile(str(nccl_log), Path(nccl_log)))
        check_is_of(debug, case.scenario)
        facts += facts_of(debug, case)
    if not measurements:
        raise InputError("measured", 'nothing was measured; give a step such as "916 ms"')
    # the parts: the step, the causes, and how uncertain these are
    with stage("parts of the diagnosis", 3) as progress:
        result = case.prediction
        progress.findings = [f"predicted: {result.iteration_time_s.mean:.4g} s a step"]
        progress.ended = 1
        return _Diagnosing(case, measurements, result, facts).diagnosis(progress)


def judge(scenario: Source, result: Result, measured: float | str) -> Verdict:
    """Hold a measured step, in seconds or as "95 ms", against a scenario's result: is it normal?

    Where it is not, says what could explain it: the causes that `diagnose` finds, and by what
    factor one term alone, compute, host or network, would have to be longer. Raises ValueError for
    a time that no step can take, and for the result of another scenario, as far as its ranks tell.
    """
    scenario = scenario_of(scenario)
    measured_s = parse_duration(measured) if isinstance(measured, str) else measured
    cluster = scenario.cluster
    if not (isfinite(measured_s) and measured_s > 0):
        raise ValueError(f"measured_s is {measured_s}; wanted seconds, above 0")
    if result.world_size != cluster.world_size:
        raise ValueError(
            f"the result is of {result.world_size} ranks, and the scenario has "
            f"{cluster.world_size}; give what simulate returns for this very scenario"
        )
    if is_normal(result, measured_s):
        return verdict(result, measured_s)
    step = Measurement("step", measured_s, cluster.nodes, cluster.gpus_per_node)
    diagnosis = _Diagnosing(Case.of(scenario), [step], result).diagnosis(Stage())
    longer = stretches(resolve(scenario), result, measured_s)
    return verdict(result, measured_s, longer, diagnosis.causes, diagnosis.mfu)


@dataclass(frozen=True)
class _FittedHypothesis:
    """A hypothesis, and how well it fits what was measured."""

    hypothesis: Hypothesis
    fit: Fit


@dataclass(frozen=True)
class _Near:
    """A hypothesis, what its sizes predict, and the size that lies nearest to what was measured."""

    hypothesis: Hypothesis
    values: Mapping[float, Array]
    nearest: float


class _Diagnosing:
    """One job and its measurements."""

    def __init__(
        self,
        case: Case,
        measured: Sequence[Measurement],
        result: Result,
        facts: Sequence[Fact] = (),
    ) -> None:
        self.case, self.measured, self.result = case, measured, result
        self.cases = [case.on(*each.setting) for each in measured]
        self.one_gpu = case.on(1, 1)
        self.facts = tuple(facts)
        self.pace = result.iteration_time_s.mean / case.step_s
        self.predictor = Predictor(self.cases, measured, self.pace)
        backend = case.scenario.ddp.backend
        noise = np.array([noise_of(each.quantity, backend) for each in measured])
        self.seen = Seen(self.predictor.measured, noise)
        self.healthy = self.predictor.values([Change() for _ in measured])
        self.step = self._own_step()
        self.step_s = None if self.step is None else measured[self.step].seconds
        self.is_inside = None if self.step_s is None else is_normal(result, self.step_s)

    def diagnosis(self, progress: Stage) -> Diagnosis:
        """All causes, the likeliest first, and the check."""
        fits = self._fits(progress)
        odds = {key: each.hypothesis.odds for key, each in fits.items()} | {UNKNOWN: UNKNOWN_ODDS}
        logs = {
            key: each.fit.log_likelihood + log_probability(self.facts, each.hypothesis.shows)
            for key, each in fits.items()
        }
        unknown = unknown_log_likelihood(self.seen, self.healthy)
        logs[UNKNOWN] = unknown + log_probability(self.facts, None)
        likely, whole = posterior(odds, logs), sum(odds.values())
        far = {key for key, each in fits.items() if self._is_far(each)}
        if all(likely[key] < WORTH_SAYING for key in likely.keys() - far):
            far = set()  # a cause that a log shows is named, though it makes another step
        order = sorted(likely, key=lambda key: (key in far, -likely[key]))
        self._simulate_further([fits[k] for k in order if k in fits and likely[k] >= _LIKELY])
        causes = [self._cause(fits.get(key), odds[key] / whole, likely[key]) for key in order]
        cluster, measured = self.case.cluster, self._beside_predictions()
        misfit = None if causes[0].key == NOTHING.key else self._misfit()
        return Diagnosis(
            *(self.case.scenario.name, cluster.nodes, cluster.gpus_per_node),
            measured=measured,
            interval=self.result.prediction_interval_s,
            normal=self.is_inside and misfit is None,
            causes=tuple(causes),
            check=self._check(fits, causes),
            all_reduce_bytes=largest_bytes(self.case),
            assumptions=_ASSUMPTIONS,
            facts=self.facts,
            step=None if self.step is None else measured[self.step],
            mfu=self._mfu(),
            misfit=None if misfit is None else measured[misfit],
        )

    def _mfu(self) -> float | None:
        """The MFU of the measured step; None where it is not known, or may be above 1."""
        mfu = self.result.training.mfu if self.result.training else None
        if mfu is None or self.step_s is None or not is_bound_by_peak(self.case.scenario):
            return None
        return mfu * self.result.iteration_time_s.mean / self.step_s

    def _misfit(self) -> int | None:
        """Find the step whose ratio to the scenario's own is least like a healthy job's.

        None where each ratio differs from the predicted one as in 19 of 20 healthy jobs: by the
        noise of both steps, and by what uncertain inputs change in one more than in the other.
        """
        here = self.step
        others = [i for i, m in enumerate(self.measured) if m.quantity == "step" and i != here]
        if here is None or not others:
            return None
        effects = self.predictor.effects([Change() for _ in self.measured])
        off = self.seen.logs - self.healthy
        noise = np.hypot(self.seen.noise, self.seen.noise[here])
        sigma = np.hypot(noise, np.linalg.norm(effects - effects[:, [here]], axis=0))
        by_sigma = np.abs(off - off[here]) / sigma
        worst = max(others, key=lambda i: float(by_sigma[i]))
        most = NormalDist().inv_cdf(1 - (1 - _OF_HEALTHY) / 2 / len(others))
        return worst if by_sigma[worst] > most else None

    def _is_far(self, fitted: _FittedHypothesis) -> bool:
        """Whether a cause makes another step than was measured on all ranks of the scenario."""
        index = self.step
        if index is None or fitted.hypothesis is NOTHING:
            return False
        return bool(abs(fitted.fit.values[index] - self.seen.logs[index]) > _FAR)

    def _candidates(self) -> list[Hypothesis]:
        """The hypotheses that can apply, without loaders where no step waits for data.

        A loader that a node's ranks share is left out too, unless measurements on other numbers of
        ranks in a node tell it from a loader of each rank.
        """
        per_node = {case.cluster.gpus_per_node for case in self.cases}
        left_out = set() if len(per_node) > 1 else {SHARED_LOADER}
        waits_s = [each.seconds for each in self.measured if each.quantity == "data_wait"]
        if waits_s and max(waits_s) < _NO_WAIT * self.case.step_s:
            left_out.update(LOADERS)
        return [each for each in hypotheses_of(self.case) if each.key not in left_out]

    def _fits(self, progress: Stage) -> dict[str, _FittedHypothesis]:
        """The fits of the hypotheses that explain more than a healthy job does, by key."""
        candidates, progress.ended = self._simulated_candidates(progress), 2
        near = {each.key: closest for each in candidates if (closest := self._near(each))}
        if near:
            best = min(near.values(), key=lambda each: self._distance(each.values[each.nearest]))
            progress.findings += [f"fits best so far: {best.hypothesis.in_words(best.nearest)}"]
        changes = [self._changes(each.hypothesis, each.nearest) for each in near.values()]
        self.predictor.simulate(changes, progress.advance, stretched=True)
        progress.ended = 3
        return {key: self._fitted(each) for key, each in near.items()}

    def _simulated_candidates(self, progress: Stage) -> list[Hypothesis]:
        """Simulate all candidates together, each at all of its sizes."""
        candidates = self._candidates()
        pairs = [(each, size) for each in candidates for size in each.sizes(self.case)]
        self.predictor.simulate([self._changes(*pair) for pair in pairs], progress.advance)
        return candidates

    def _near(self, hypothesis: Hypothesis) -> _Near | None:
        """Find the size nearest to the measurements; None where a healthy job fits as well."""
        by_size = {size: self._values(hypothesis, size) for size in hypothesis.sizes(self.case)}
        values = {size: each for size, each in by_size.items() if each is not None}
        nearest = min(values, key=lambda size: self._distance(values[size]), default=None)
        is_told = hypothesis is NOTHING or self._is_shown(hypothesis)
        if nearest is None or not (is_told or self._explains(values[nearest])):
            return None
        return _Near(hypothesis, values, nearest)

    def _fitted(self, near: _Near) -> _FittedHypothesis:
        """Fit a hypothesis, with the effects of uncertain inputs at its nearest size alone."""
        hypothesis = near.hypothesis
        effects = self.predictor.effects(self._changes(hypothesis, near.nearest))
        graded, falls = hypothesis.graded, hypothesis.falls
        sizes, predicted = list(near.values), list(near.values.values())
        best = fit(self.seen, sizes, predicted, effects, graded=graded, falls=falls)
        return _FittedHypothesis(hypothesis, best)

    def _distance(self, values: Array) -> float:
        """Distance of predictions from what was measured, in standard deviations of the noise."""
        return float(np.linalg.norm((values - self.seen.logs) / self.seen.noise))

    def _is_shown(self, hypothesis: Hypothesis) -> bool:
        """Whether a log or a trace shows an unexpected fact that the hypothesis explains."""
        unexpected = [fact for fact in self.facts if fact.seen != fact.expected]
        return any(hypothesis.shows.get(fact.name) == fact.seen for fact in unexpected)

    def _explains(self, values: Array) -> bool:
        """Whether predictions differ from a healthy job's, and fit the measurements no worse.

        A network fault, whose times are uncertain, would else explain a step that is too short.
        """
        is_seen = np.max(np.abs(values - self.healthy)) >= _SEEN
        return bool(is_seen) and self._distance(values) < self._distance(self.healthy) + _FARTHER

    def _values(self, hypothesis: Hypothesis, size: float) -> Array | None:
        try:
            return self.predictor.values(self._changes(hypothesis, size))
        except ScenarioError:
            return None

    def _changes(self, hypothesis: Hypothesis, size: float) -> list[Change]:
        """Gives the change of each measurement's case."""
        return [_change(hypothesis, case, size) for case in self.cases]

    def _own_step(self) -> int | None:
        """Which measurement is the step of the scenario itself."""
        pairs = enumerate(zip(self.cases, self.measured, strict=True))
        indices = (i for i, (c, m) in pairs if c is self.case and m.quantity == "step")
        return next(indices, None)

    def _beside_predictions(self) -> tuple[Measured, ...]:
        pairs = zip(self.cases, self.measured, strict=True)
        healthy = Change()
        return tuple(Measured(m, Changed.of(c, healthy).seconds(m, self.pace)) for c, m in pairs)

    def _cause(self, fitted: _FittedHypothesis | None, prior: float, probability: float) -> Cause:
        if fitted is None:
            text, remedy = "a cause that is not in this list", "measure more, and diagnose again"
            return Cause(UNKNOWN, text, prior, probability, remedy, (), {}, None, None)
        hypothesis, size = fitted.hypothesis, fitted.fit.size
        change = hypothesis.change(self.case, size)
        predicted = self._predicted(hypothesis, size) if probability >= _LIKELY else None
        mended_s, text = None, hypothesis.in_words(size)
        if hypothesis is NOTHING:
            text = _OFF if self.is_inside is False else text
        elif predicted and self.step_s is not None and not self._is_far(fitted):
            mended_s = self.step_s * self.pace * self.case.step_s / predicted.step_s
        return Cause(
            *(hypothesis.key, text, prior, probability, hypothesis.remedy),
            *(change.settings, dict(change.factors), mended_s, predicted),
        )

    def _predicted(self, hypothesis: Hypothesis, size: float) -> Predicted:
        """What a cause predicts at the size that fits best; on ranks without it, a healthy job."""
        whole, alone = self._whole_and_alone(hypothesis, size)
        layout = (self.case.cluster.nodes, self.case.cluster.gpus_per_node)
        largest = largest_bytes(self.case)

        def seconds(quantity: Quantity) -> float:
            return whole.seconds(Measurement(quantity, 0.0, *layout, largest), self.pace)

        return Predicted(
            step_s=seconds("step"),
            one_gpu_s=alone.seconds(Measurement("step", 0.0, 1, 1), self.pace),
            without_sync_s=seconds("without_sync"),
            exposed_s=seconds("exposed"),
            data_wait_s=seconds("data_wait"),
            all_reduce_s=None if largest is None else seconds("all_reduce"),
        )

    def _simulate_further(self, likely: Sequence[_FittedHypothesis]) -> None:
        """Simulate all that `_predicted` needs of these, together."""
        pairs = [self._whole_and_alone(each.hypothesis, each.fit.size) for each in likely]
        steps = [whole.steps(quantity) for whole, _ in pairs for quantity in ("step", "exposed")]
        simulate_calm_steps(chain(*steps, *(alone.steps("step") for _, alone in pairs)))

    def _whole_and_alone(self, hypothesis: Hypothesis, size: float) -> tuple[Changed, Changed]:
        """Changes the job on all ranks, and on one."""
        whole, alone = (
            Changed.of(case, _change(hypothesis, case, size)) for case in (self.case, self.one_gpu)
        )
        return whole, alone

    def _check(
        self, fits: Mapping[str, _FittedHypothesis], causes: Sequence[Cause]
    ) -> CheckToRun | None:
        if causes[0].probability >= _SURE:
            return None
        suspects = [
            Suspect(fits[each.key].hypothesis, each.probability, each.predicts)
            for each in causes
            if each.predicts and each.key in fits
        ]
        measured: set[str] = {each.quantity for each in self.measured}
        measured |= {_TOLD_BY.get(fact.name, "nccl_log") for fact in self.facts}
        return cheapest(self.case, suspects, measured)


def _change(hypothesis: Hypothesis, case: Case, size: float) -> Change:
    """The change that a hypothesis makes to a case; none where it cannot apply to its ranks."""
    return hypothesis.change(case, size) if hypothesis.sizes(case) else Change()
