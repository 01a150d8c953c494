"""What holding simulations against real DDP comes to; schema `ddpsim.validation/4`.

Cases, sweeps of them, and the figures that tell how good the predictions are.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import hypot
from statistics import fmean, median
from typing import Literal

from pydantic import Field

from calibrate.files import Part
from calibrate.fit.estimates import SIGNIFICANT
from calibrate.records.variant import Variant
from ddpsim.result.sweep import FLAT

SCHEMA: Literal["ddpsim.validation/4"] = "ddpsim.validation/4"
EXPOSED = 0.05  # of the iteration: above it the skill rule counts
REGRET = 0.01
_DEFAULT = Variant().label
Term = Literal["none", "forward", "backward", "communication", "overlap", "optimizer"]


class Split(Part):
    """Seconds of an iteration's parts on the slowest rank, predicted or measured.

    Means over iterations without the lowest and highest tenth, of the rank that computes longest
    alone, or over all ranks where they differ by chance only.

    `backward` without its waiting; `exposed` the waiting for communication after it, by DDP's own
    log. Without DDP nobody tells: `exposed` is None, and `backward` holds it. `all_reduce`: the sum
    of the buckets' all-reduces, each alone; None where there are no buckets.
    """

    forward: float
    backward: float
    exposed: float | None
    optimizer: float
    all_reduce: float | None


class Case(Part):
    """One variant; seconds. `measured_s` is the median over rounds of the slower rank, of several
    runs the mean of their medians.

    Rounds of a slow machine are brought to its usual speed (`calibrate.validate.steady_step`);
    `plain_s` is the same without that. Variants with the same buckets are one and the same thing
    to measure: their rounds count together; `own_s` is the median of the variant's own rounds.
    """

    variant: str
    plain: str | None = Field(
        None, description="the sweep's case of DDP by default, of as many micro-batches"
    )
    bucket_choice: bool = Field(description="differs from the sweep's others by its cap alone")
    predicted_s: float
    measured_s: float
    own_s: float
    plain_s: float
    stderr_s: float = Field(
        description="of the measured median; of several runs no less than what they are apart tells"
    )
    inputs_stderr_s: float = Field(
        0.0,
        description="of the prediction, from what the rounds themselves tell it: the bare model, "
        "and without a profile the all-reduces",
    )
    runs_s: tuple[float, ...] = Field(description="each run's median; `measured_s` is their mean")
    rounds: int
    interval_s: tuple[float, float] | None = Field(
        description="80 % interval of a median over so many rounds"
    )
    compute_only_s: float
    no_overlap_s: float
    perfect_overlap_s: float
    predicted: Split
    measured: Split
    off: Term = Field(description="the term that is off most; none: within the noise")
    bucket_bytes: tuple[int, ...] = Field(description="as DDP logged them, or the loop knows them")
    buckets_agree: bool = Field(description="predicted sizes are those, where there are any")

    @property
    def error(self) -> float:
        """Predicted over measured, minus 1."""
        return self.predicted_s / self.measured_s - 1

    @property
    def noise(self) -> float:
        """Standard error of the measured median over the median."""
        return self.stderr_s / self.measured_s

    @property
    def within_noise(self) -> bool:
        """Whether two standard errors, of what was measured and of the inputs, are the error."""
        off_s = abs(self.predicted_s - self.measured_s)
        return off_s <= SIGNIFICANT * hypot(self.stderr_s, self.inputs_stderr_s)

    @property
    def baseline_error(self) -> float:
        """The relative error of the best naive answer, without its sign."""
        naive = (self.compute_only_s, self.no_overlap_s, self.perfect_overlap_s)
        return min(abs(seconds / self.measured_s - 1) for seconds in naive)

    @property
    def exposed(self) -> bool:
        """Whether so much communication is exposed that the skill rule counts."""
        return (self.measured.exposed or 0.0) > EXPOSED * self.measured_s

    @property
    def skilled(self) -> bool:
        """Error within a third of the best naive one, or two standard errors."""
        return self.is_within_a_third_of(self.baseline_error)

    def is_within_a_third_of(self, naive_error: float) -> bool:
        """Error within a third of this one, which has no sign, or two standard errors."""
        return abs(self.error) <= max(naive_error / 3, SIGNIFICANT * self.noise)

    @property
    def exposed_error(self) -> float | None:
        """Error of the exposed communication over the measured iteration, without its sign.

        None where it was not measured.
        """
        predicted_s, measured_s = self.predicted.exposed, self.measured.exposed
        if predicted_s is None or measured_s is None:
            return None
        return abs(predicted_s - measured_s) / self.measured_s

    @property
    def by_another_run(self) -> tuple[Case, ...]:
        """What a second measurement would be worth: each run as the prediction of the others."""
        return tuple(
            self.model_copy(
                update={
                    "predicted_s": run_s,
                    "measured_s": fmean((*self.runs_s[:i], *self.runs_s[i + 1 :])),
                }
            )
            for i, run_s in enumerate(self.runs_s)
            if len(self.runs_s) > 1
        )

    @property
    def covered(self) -> bool | None:
        """Whether the interval holds the measured median."""
        low_high = self.interval_s
        return None if low_high is None else low_high[0] <= self.measured_s <= low_high[1]


class Sweep(Part):
    """A model on a cluster: a file of rounds, or several, which are runs of the same."""

    file: str = Field(description="the first run's")
    runs: int = Field(1, ge=1, description="each in processes of its own")
    run_sigma: float | None = Field(
        None, description="standard deviation of an iteration from run to run, relative"
    )
    model: str
    nodes: int
    gpus_per_node: int
    line_rate_bytes_per_s: float | None
    network: str = Field(description="where its all-reduce times come from")
    oversubscribed: bool = Field(description="its ranks share cores, fewer than two a rank")
    cases: tuple[Case, ...]
    warnings: tuple[str, ...] = Field((), description="of the simulations, each once")

    @property
    def choices(self) -> tuple[tuple[Case, ...], ...]:
        """The cases of the bucket caps, those with the same buckets together: they are one case."""
        alike: dict[tuple[int, ...], list[Case]] = {}
        for case in self.cases:
            if case.bucket_choice:
                alike.setdefault(case.bucket_bytes, []).append(case)
        return tuple(tuple(cases) for cases in alike.values())

    @property
    def regret(self) -> float | None:
        """What the buckets that `tune` takes cost more than the best measured, relative.

        Those predicted to be the fastest, or torch's default caps where they are as good.
        """
        compared = self._picked_and_best
        return compared and compared[0].measured_s / compared[1].measured_s - 1

    @property
    def regret_noise(self) -> float | None:
        """A regret up to this one is no difference: two standard errors of the two choices."""
        compared = self._picked_and_best
        if not compared or compared[0] is compared[1]:
            return compared and 0.0
        return SIGNIFICANT * hypot(*(case.stderr_s for case in compared)) / compared[1].measured_s

    @property
    def _picked_and_best(self) -> tuple[Case, Case] | None:
        """The choice of `tune`, and the best measured; None of a single choice."""
        choices = self.choices
        if len(choices) < 2:
            return None
        default = [cases for cases in self.flat if any(c.variant == _DEFAULT for c in cases)]
        picked = (*default, min(choices, key=lambda cases: cases[0].predicted_s))[0]
        return picked[0], min((cases[0] for cases in choices), key=lambda case: case.measured_s)

    @property
    def ranked(self) -> tuple[bool, ...]:
        """Whether the sign is right, for cases that differ from DDP by default beyond the noise."""
        signs, by_name = [], {case.variant: case for case in self.cases}
        for case in self.cases:
            plain = by_name.get(case.plain or "")
            if plain is None or plain is case:
                continue
            apart_s = case.measured_s - plain.measured_s
            if abs(apart_s) > SIGNIFICANT * hypot(case.stderr_s, plain.stderr_s):
                signs.append(apart_s * (case.predicted_s - plain.predicted_s) > 0)
        return tuple(signs)

    @property
    def flat(self) -> tuple[tuple[Case, ...], ...]:
        """The choices that are predicted to be as good as the fastest."""
        choices = self.choices
        fastest_s = min((cases[0].predicted_s for cases in choices), default=0.0)
        return tuple(c for c in choices if c[0].predicted_s <= (1 + FLAT) * fastest_s)


class Figures(Part):
    """What DESIGN section 7 asks; relative errors without sign. None: nothing to tell it from."""

    cases: int
    sweeps: int
    distinct_cases: int = Field(description="caps that lead to the same buckets counted once")
    median_stderr: float = Field(description="of the measured medians, relative")
    repeat_sigma: float | None = Field(
        description="standard deviation of measured medians between caps with the same buckets, "
        "relative: noise that the standard errors should tell"
    )
    run_sigma: float | None = Field(
        description="median of the sweeps' standard deviations from run to run, relative"
    )
    median_error: float
    worst_error: float
    within_5_percent_or_noise: float = Field(description="share of cases")
    within_noise: float = Field(
        description="share of cases whose error is within the noise of both, measured and inputs"
    )
    median_bias: float = Field(description="with sign: below 0 predicts too short")
    exposed_cases: int
    skilled: float | None = Field(description="share of the exposed cases")
    repeated_skilled: float | None = Field(
        description="share of the exposed cases that were measured in several runs"
    )
    another_run_skilled: float | None = Field(
        description="of the same, were each run the prediction of the others"
    )
    choice_sweeps: int
    good_choices: float | None = Field(description="share of sweeps with a regret of at most 1 %")
    unsure_choices: float | None = Field(
        None, description="share of sweeps with a larger one that is within the noise"
    )
    median_exposed_error: float | None = Field(
        description="exposed communication, of the iteration"
    )
    worst_exposed_error: float | None
    covered: float | None = Field(description="share of cases whose interval holds the median")
    covered_p_value: float | None = Field(
        description="two-sided binomial test against 0.8, as if cases were independent"
    )
    off: dict[str, int] = Field(description="cases by the term that is off")
    buckets_agree: int
    ranked_cases: int = Field(0, description="that differ from DDP by default beyond the noise")
    ranked: float | None = Field(None, description="share of them with the predicted sign")


class Validation(Part):
    """All sweeps, and what they come to."""

    schema_: Literal["ddpsim.validation/4"] = Field(SCHEMA, alias="schema")
    profile: str | None
    figures: Figures | None = Field(description="of the sweeps that are not oversubscribed")
    oversubscribed: Figures | None = Field(description="of those that are")
    machine: dict[str, float] = Field(
        {}, description="by file, profile and rounds: times that bare compute took the least of all"
    )
    left_out: tuple[str, ...] = Field((), description="files that cannot be used, and why")
    sweeps: tuple[Sweep, ...]


def figures_of(sweeps: Sequence[Sweep]) -> Figures | None:
    """The figures of these sweeps; None if there is no case."""
    cases = [case for sweep in sweeps for case in sweep.cases]
    if not cases:
        return None
    errors = [abs(case.error) for case in cases]
    exposed = [case for case in cases if case.exposed]
    repeated = [case for case in exposed if case.by_another_run]
    regrets = [(s.regret, s.regret_noise or 0.0) for s in sweeps if s.regret is not None]
    covered = [case.covered for case in cases if case.covered is not None]
    waits = [case.exposed_error for case in cases if case.exposed_error is not None]
    terms = [case.off for case in cases]
    ranked = [sign for sweep in sweeps for sign in sweep.ranked]
    apart = [sweep.run_sigma for sweep in sweeps if sweep.run_sigma is not None]
    return Figures(
        cases=len(cases),
        sweeps=len(sweeps),
        distinct_cases=sum(
            len(sweep.choices) + sum(not case.bucket_choice for case in sweep.cases)
            for sweep in sweeps
        ),
        median_stderr=median(case.noise for case in cases),
        repeat_sigma=_repeat_sigma([group for sweep in sweeps for group in sweep.choices]),
        run_sigma=median(apart) if apart else None,
        median_error=median(errors),
        worst_error=max(errors),
        within_5_percent_or_noise=_share(
            [abs(c.error) <= max(0.05, SIGNIFICANT * c.noise) for c in cases]
        )
        or 0.0,
        within_noise=_share([case.within_noise for case in cases]) or 0.0,
        median_bias=median(case.error for case in cases),
        exposed_cases=len(exposed),
        skilled=_share([case.skilled for case in exposed]),
        repeated_skilled=_share([case.skilled for case in repeated]),
        another_run_skilled=_share([c.skilled for case in repeated for c in case.by_another_run]),
        choice_sweeps=len(regrets),
        good_choices=_share([regret <= REGRET for regret, _ in regrets]),
        unsure_choices=_share([REGRET < regret <= noise for regret, noise in regrets]),
        median_exposed_error=median(waits) if waits else None,
        worst_exposed_error=max(waits, default=None),
        covered=_share(covered),
        covered_p_value=_p_value(sum(covered), len(covered)),
        off={term: terms.count(term) for term in sorted(set(terms))},
        buckets_agree=sum(case.buckets_agree for case in cases),
        ranked_cases=len(ranked),
        ranked=_share(ranked),
    )


def _repeat_sigma(groups: Sequence[Sequence[Case]]) -> float | None:
    """Pooled over groups of cases that are alike."""
    squares, freedom = 0.0, 0
    for cases in groups:
        middle = fmean(case.own_s for case in cases)
        squares += sum((case.own_s / middle - 1) ** 2 for case in cases)
        freedom += len(cases) - 1
    return (squares / freedom) ** 0.5 if freedom else None


def _share(flags: Sequence[bool]) -> float | None:
    return sum(flags) / len(flags) if flags else None


def _p_value(held: int, count: int) -> float | None:
    if not count:
        return None
    from scipy.stats import binomtest  # noqa: PLC0415 -- slow to import, and needed here alone

    return float(binomtest(held, count, 0.8).pvalue)
