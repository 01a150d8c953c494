"""What holding simulations against real DDP comes to; schema `ddpsim.validation/3`.

Cases, sweeps of them, and the figures that tell how good the predictions are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean, median
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from calibrate.fit.estimates import SIGNIFICANT
from calibrate.records.rounds import Variant
from ddpsim.result.sweep import FLAT
from ddpsim.wording import counted

__all__ = [
    "SCHEMA",
    "Case",
    "Figures",
    "Split",
    "Sweep",
    "Term",
    "Validation",
    "figures_of",
    "headlines",
    "summary",
    "warnings",
]

SCHEMA: Literal["ddpsim.validation/3"] = "ddpsim.validation/3"
EXPOSED = 0.05  # of the iteration: above it the skill rule counts
REGRET = 0.01
_DEFAULT = Variant().label
Term = Literal["none", "forward", "backward", "communication", "overlap", "optimizer"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Split(_Part):
    """Seconds of an iteration's parts on the slowest rank, predicted or measured.

    Means over iterations without the lowest and highest tenth, of the rank that computes longest
    alone, or over all ranks where they differ by chance only.

    `backward` without its waiting; `exposed` the waiting for communication after it, by DDP's own
    log; `all_reduce` the sum of the buckets' all-reduces, each alone.
    """

    forward: float
    backward: float
    exposed: float
    optimizer: float
    all_reduce: float


class Case(_Part):
    """One variant; seconds. `measured_s` is the median over rounds of the slower rank, of several
    runs the mean of their medians.

    Rounds of a slow machine are brought to its usual speed (`calibrate.validate.steady_step`);
    `plain_s` is the same without that. Variants with the same buckets are one and the same thing
    to measure: their rounds count together; `own_s` is the median of the variant's own rounds.
    """

    variant: str
    bucket_choice: bool = Field(description="differs from the sweep's others by its cap alone")
    predicted_s: float
    measured_s: float
    own_s: float
    plain_s: float
    stderr_s: float = Field(
        description="of the measured median; of several runs no less than what they are apart tells"
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
    off: Term = Field(description="the term that is off most; none: within 2 standard errors")
    bucket_bytes: tuple[int, ...] = Field(description="as DDP logged them")
    buckets_agree: bool = Field(description="predicted bucket sizes are those that DDP logged")

    @property
    def error(self) -> float:
        """Predicted over measured, minus 1."""
        return self.predicted_s / self.measured_s - 1

    @property
    def noise(self) -> float:
        """Standard error of the measured median over the median."""
        return self.stderr_s / self.measured_s

    @property
    def baseline_error(self) -> float:
        """Of the best naive answer, relative, without its sign."""
        naive = (self.compute_only_s, self.no_overlap_s, self.perfect_overlap_s)
        return min(abs(seconds / self.measured_s - 1) for seconds in naive)

    @property
    def exposed(self) -> bool:
        """Whether so much communication is exposed that the skill rule counts."""
        return self.measured.exposed > EXPOSED * self.measured_s

    @property
    def skilled(self) -> bool:
        """Error within a third of the best naive one, or two standard errors."""
        return self.is_within_a_third_of(self.baseline_error)

    def is_within_a_third_of(self, naive_error: float) -> bool:
        """Error within a third of this one, which has no sign, or two standard errors."""
        return abs(self.error) <= max(naive_error / 3, SIGNIFICANT * self.noise)

    @property
    def exposed_error(self) -> float:
        """Of the exposed communication, over the measured iteration, without its sign."""
        return abs(self.predicted.exposed - self.measured.exposed) / self.measured_s

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


class Sweep(_Part):
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
        choices = self.choices
        if len(choices) < 2:
            return None
        default = [cases for cases in self.flat if any(c.variant == _DEFAULT for c in cases)]
        picked = (*default, min(choices, key=lambda cases: cases[0].predicted_s))[0]
        return picked[0].measured_s / min(cases[0].measured_s for cases in choices) - 1

    @property
    def flat(self) -> tuple[tuple[Case, ...], ...]:
        """The choices that are predicted to be as good as the fastest."""
        choices = self.choices
        fastest_s = min((cases[0].predicted_s for cases in choices), default=0.0)
        return tuple(c for c in choices if c[0].predicted_s <= (1 + FLAT) * fastest_s)


class Figures(_Part):
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
    median_exposed_error: float = Field(description="exposed communication, of the iteration")
    worst_exposed_error: float
    covered: float | None = Field(description="share of cases whose interval holds the median")
    covered_p_value: float | None = Field(
        description="two-sided binomial test against 0.8, as if cases were independent"
    )
    off: dict[str, int] = Field(description="cases by the term that is off")
    buckets_agree: int


class Validation(_Part):
    """All sweeps, and what they come to."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True
    )

    schema_: Literal["ddpsim.validation/3"] = Field(SCHEMA, alias="schema")
    profile: str | None
    figures: Figures | None = Field(description="of the sweeps that are not oversubscribed")
    oversubscribed: Figures | None = Field(description="of those that are")
    sweeps: tuple[Sweep, ...]


def figures_of(sweeps: Sequence[Sweep]) -> Figures | None:
    """The figures of these sweeps; None if there is no case."""
    cases = [case for sweep in sweeps for case in sweep.cases]
    if not cases:
        return None
    errors = [abs(case.error) for case in cases]
    exposed = [case for case in cases if case.exposed]
    repeated = [case for case in exposed if case.by_another_run]
    regrets = [sweep.regret for sweep in sweeps if sweep.regret is not None]
    covered = [case.covered for case in cases if case.covered is not None]
    waits = [case.exposed_error for case in cases]
    terms = [case.off for case in cases]
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
        median_bias=median(case.error for case in cases),
        exposed_cases=len(exposed),
        skilled=_share([case.skilled for case in exposed]),
        repeated_skilled=_share([case.skilled for case in repeated]),
        another_run_skilled=_share([c.skilled for case in repeated for c in case.by_another_run]),
        choice_sweeps=len(regrets),
        good_choices=_share([regret <= REGRET for regret in regrets]),
        median_exposed_error=median(waits),
        worst_exposed_error=max(waits),
        covered=_share(covered),
        covered_p_value=_p_value(sum(covered), len(covered)),
        off={term: terms.count(term) for term in sorted(set(terms))},
        buckets_agree=sum(case.buckets_agree for case in cases),
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


def summary(validation: Validation) -> str:
    """The figures and every case, as text."""
    lines = list(headlines(validation))
    for sweep in validation.sweeps:
        runs = f"  runs {sweep.runs}" if sweep.runs > 1 else ""
        regret = _percent(sweep.regret)
        lines.append(f"{sweep.file}{runs}  network: {sweep.network}  regret {regret}")
        lines.append(_HEAD)
        lines += [_line(case) for case in sweep.cases]
    lines += [f"WARNING {warning}" for warning in warnings(validation)]
    return "\n".join(lines)


def warnings(validation: Validation) -> tuple[str, ...]:
    """What the simulations warn of, each once; of how many sweeps, where not of all."""
    said = [warning for sweep in validation.sweeps for warning in sweep.warnings]
    count = len(validation.sweeps)
    return tuple(
        warning if times == count else f"{warning} ({times} of {count} sweeps)"
        for warning, times in Counter(said).items()
    )


def headlines(validation: Validation) -> Iterator[str]:
    """The figures, a line each; those of oversubscribed sweeps apart."""
    if validation.figures:
        yield from _lines(validation.figures)
    if validation.oversubscribed:
        yield from (f"OVERSUBSCRIBED: {line}" for line in _lines(validation.oversubscribed))


def _lines(f: Figures) -> Iterator[str]:
    where = f"{counted(f.cases, 'case')} in {counted(f.sweeps, 'sweep')}"
    yield f"{where}; bucket sizes agree in {f.buckets_agree}"
    yield (
        f"{f.distinct_cases} are distinct; noise: standard errors of {f.median_stderr:.1%} "
        f"(median), and {_percent(f.repeat_sigma)} between caps with the same buckets"
    )
    if f.run_sigma is not None:
        yield f"runs of the same are {f.run_sigma:.1%} apart (standard deviation; median of sweeps)"
    yield f"error: median {f.median_error:.1%}, worst {f.worst_error:.1%}"
    yield f"bias {f.median_bias:+.1%}; within 5 % or the noise: {f.within_5_percent_or_noise:.0%}"
    yield f"skill: {_percent(f.skilled)} of {f.exposed_cases} cases with exposed communication"
    if f.another_run_skilled is not None:
        yield (
            f"skill where runs were repeated: {_percent(f.repeated_skilled)}; one run as the "
            f"prediction of the others: {_percent(f.another_run_skilled)}"
        )
    sweeps = counted(f.choice_sweeps, "sweep")
    yield f"bucket choice within 1 %: {_percent(f.good_choices)} of {sweeps}"
    yield (
        f"exposed communication: off by median {f.median_exposed_error:.1%}, "
        f"worst {f.worst_exposed_error:.1%} of the iteration"
    )
    if f.covered_p_value is not None:
        yield f"80 % interval: holds {_percent(f.covered)} (p = {f.covered_p_value:.2g})"
    yield "term off: " + ", ".join(f"{term} {count}" for term, count in f.off.items())


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


_PARTS = ("forward", "backward", "exposed", "optimizer", "all_reduce")
_HEAD = (
    f"  {'variant':24s} {'predicted':>9} {'measured':>9} ms  noise   error  best naive  "
    f"{'term off':13s}  predicted/measured ms: {', '.join(_PARTS)}"
)


def _line(case: Case) -> str:
    p, m = case.predicted, case.measured
    parts = "  ".join(f"{_ms(getattr(p, name))}/{_ms(getattr(m, name))}" for name in _PARTS)
    return (
        f"  {case.variant:24s} {_ms(case.predicted_s):>9} {_ms(case.measured_s):>9}    "
        f"{'± ' + format(case.noise, '.1%'):>6}  {case.error:+6.1%}  {case.baseline_error:10.1%}  "
        f"{case.off:13s}  {parts}"
    )


def _ms(seconds: float) -> str:
    """Milliseconds, of short ones the digits that tell."""
    milliseconds = 1e3 * seconds
    return f"{milliseconds:.1f}" if milliseconds >= 10 else f"{milliseconds:.3g}"
