"""Hold simulations against real DDP iterations; schema `ddpsim.validation/1`. Needs no torch.

A case is one variant of one file of rounds. Its compute is the model as measured without DDP in
the same rounds; its network is a cluster profile, fitted elsewhere, or, without one, the
all-reduces of the rounds themselves (`network` says which: the latter is no prediction of them).

    python -m calibrate validate rounds-*.json --profile cluster.json -o validation.json
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from calibrate.ddp_rounds import Rounds, Samples, VariantSamples, load_rounds, rank_medians, slowest
from calibrate.fit.effects import median_time, trimmed_mean
from calibrate.fit.profile import NOT_STATED
from ddpsim.api import load_scenario, simulate
from ddpsim.errors import DdpsimError, shown
from ddpsim.importers.cluster_profile import read_cluster_profile
from ddpsim.result.model import Result
from ddpsim.scenario.catalog import resolve
from ddpsim.scenario.quantity import SourceFile

__all__ = [
    "Case",
    "Figures",
    "Split",
    "Sweep",
    "Term",
    "Validation",
    "headlines",
    "model_profile",
    "rank_factors",
    "summary",
    "validate",
]

EXPOSED = 0.05  # of the iteration: above it the skill rule counts
REGRET = 0.01
_SIGNIFICANT = 2.0  # standard errors
_FEWEST_ROUNDS = 3
Term = Literal["none", "forward", "backward", "communication", "overlap", "optimizer"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Split(_Part):
    """Seconds of an iteration's parts on the slowest rank, predicted or measured.

    Means: predicted over iterations; measured over rounds without the lowest and highest tenth,
    of the rank that computes longest alone, or over all ranks where they differ by chance only.

    `backward` without its waiting; `exposed` the waiting for communication after it, by DDP's own
    log; `all_reduce` the sum of the buckets' all-reduces, each alone.
    """

    forward: float
    backward: float
    exposed: float
    optimizer: float
    all_reduce: float


class Case(_Part):
    """One variant; seconds. `measured_s` is the median over rounds of the slower rank.

    Variants with the same buckets are one and the same thing to measure: their rounds count
    together. `own_s` is the median of the variant's own rounds.
    """

    variant: str
    bucket_choice: bool = Field(description="differs from the sweep's others by its cap alone")
    predicted_s: float
    measured_s: float
    own_s: float
    stderr_s: float = Field(description="of the measured median")
    rounds: int
    interval_s: tuple[float, float] | None = Field(description="80 % prediction interval")
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
        return abs(self.error) <= max(self.baseline_error / 3, _SIGNIFICANT * self.noise)

    @property
    def covered(self) -> bool | None:
        """Whether the interval holds the measured median."""
        low_high = self.interval_s
        return None if low_high is None else low_high[0] <= self.measured_s <= low_high[1]


class Sweep(_Part):
    """One file of rounds: a model on a cluster."""

    file: str
    model: str
    nodes: int
    gpus_per_node: int
    line_rate_bytes_per_s: float | None
    network: str = Field(description="where its all-reduce times come from")
    oversubscribed: bool = Field(description="its ranks share cores, fewer than two a rank")
    cases: tuple[Case, ...]

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
        """What the buckets that the simulation picks cost more than the best measured, relative."""
        choices = self.choices
        if len(choices) < 2:
            return None
        picked = min(choices, key=lambda cases: cases[0].predicted_s)
        return picked[0].measured_s / min(cases[0].measured_s for cases in choices) - 1


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
    median_error: float
    worst_error: float
    within_5_percent_or_noise: float = Field(description="share of cases")
    median_bias: float = Field(description="with sign: below 0 predicts too short")
    exposed_cases: int
    skilled: float | None = Field(description="share of the exposed cases")
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

    schema_: Literal["ddpsim.validation/1"] = Field("ddpsim.validation/1", alias="schema")
    profile: str | None
    figures: Figures | None = Field(description="of the sweeps that are not oversubscribed")
    oversubscribed: Figures | None = Field(description="of those that are")
    sweeps: tuple[Sweep, ...]


def validate(files: Sequence[Path], profile: Path | None = None) -> Validation:
    """Predict every variant of every file of rounds; raises DdpsimError for what cannot be read."""
    if not files:
        raise DdpsimError("no rounds: name at least one file of them")
    sweeps = tuple(_sweep(path, profile) for path in files)
    return Validation(
        profile=None if profile is None else profile.name,
        figures=_figures([sweep for sweep in sweeps if not sweep.oversubscribed]),
        oversubscribed=_figures([sweep for sweep in sweeps if sweep.oversubscribed]),
        sweeps=sweeps,
    )


# --- one sweep ---------------------------------------------------------------------------------


def _sweep(path: Path, profile: Path | None) -> Sweep:
    rounds = load_rounds(path)
    count = min(len(variant.whole_s) for variant in rounds.variants)
    if count < _FEWEST_ROUNDS:
        raise DdpsimError(
            f"{path.name}: {count} rounds tell nothing of the noise; "
            f"wanted {_FEWEST_ROUNDS} or more"
        )
    if profile is not None:
        _check_cluster(path, rounds, profile)
    with tempfile.TemporaryDirectory(prefix="ddpsim-") as folder:
        inputs = _Inputs(rounds, Path(folder), profile)
        cases = tuple(_case(_Measured.of(rounds, variant), inputs) for variant in rounds.variants)
    return Sweep(
        file=path.name,
        model=rounds.model,
        nodes=rounds.layout.nodes,
        gpus_per_node=rounds.layout.gpus_per_node,
        line_rate_bytes_per_s=rounds.layout.line_rate_bytes_per_s,
        network="the rounds' own all-reduces" if profile is None else profile.name,
        oversubscribed=rounds.oversubscribed,
        cases=cases,
    )


@dataclass(frozen=True)
class _Inputs:
    """Files and settings that a scenario needs, made of rounds."""

    rounds: Rounds
    folder: Path
    profile: Path | None

    def scenario(self, variant: VariantSamples) -> dict[str, Any]:
        """The scenario of a variant."""
        options, cap = variant.variant, variant.variant.bucket_cap_mb
        return {
            "schema": "ddpsim/1",
            "name": f"{self.rounds.model} {options.label}",
            "workload": {
                "profile": str(self._model),
                "batch_per_rank": self.rounds.batch_per_rank,
            },
            "ddp": {
                "backend": self.rounds.environment.backend,
                "bucket_cap_mb": "default" if cap is None else cap,
                "accumulation_steps": options.accumulation_steps,
                "comm_hook": options.comm_hook,
            },
            "cluster": self._cluster,
            "run": {"iterations": len(self.rounds.alone.whole_s), "allow_extrapolation": True},
        }

    @cached_property
    def _model(self) -> Path:
        path = self.folder / "model.json"
        path.write_text(json.dumps(model_profile(self.rounds)), encoding="utf-8")
        return path

    @cached_property
    def _cluster(self) -> dict[str, Any]:
        layout = self.rounds.layout
        cluster: dict[str, Any] = {
            "nodes": layout.nodes,
            "gpus_per_node": layout.gpus_per_node,
            "device": _device(self.rounds.environment.device),
        }
        if self.profile is None:
            path = self.folder / "all-reduce.csv"
            path.write_text(_all_reduce_csv(self.rounds), encoding="utf-8")
            return cluster | {"all_reduce": str(path)}
        if layout.line_rate_bytes_per_s is not None:
            bandwidth = f"{layout.line_rate_bytes_per_s!r} B/s"
            # a gloo profile takes the line rate from here, and its own latency
            cluster["inter_node"] = {"bandwidth": bandwidth, "latency": "50 us"}
        return cluster | {"profile": str(self.profile.resolve())}


def _device(name: str) -> str:
    """The preset of a device as torch calls it: "NVIDIA H100 80GB HBM3" is an h100."""
    if name == "cpu":
        return "cpu-core"
    for word in name.split():
        with suppress(ValueError):
            return resolve("device", word)
    raise DdpsimError(f"no device preset is known for {shown(name)}")


def _check_cluster(path: Path, rounds: Rounds, profile: Path) -> None:
    """Rounds are held against the profile of their own cluster alone."""
    here = rounds.environment
    known = read_cluster_profile(SourceFile(str(profile), profile))
    for what, measured, fitted in (
        ("on", here.machine, known.provenance.machine),
        ("with", here.backend, known.backend),
    ):
        if fitted not in (measured, NOT_STATED):
            raise DdpsimError(
                f"{path.name} was measured {what} {shown(measured)}, but the profile "
                f"{profile.name} {what} {shown(fitted)}: validate each cluster against its own"
            )


def model_profile(rounds: Rounds) -> dict[str, Any]:
    """The model as measured without DDP, as ddpsim.model-profile/1: means of the ranks' medians.

    Its iterations bring their spread, and how the ranks differ.
    """
    alone = rounds.alone
    return {
        "schema": "ddpsim.model-profile/1",
        "source": f"{rounds.model}, {len(alone.whole_s)} iterations without DDP",
        "batch_per_rank": rounds.batch_per_rank,
        "forward_s": fmean(rank_medians(alone.forward_s)),
        "backward_s": fmean(rank_medians(alone.backward_s)),
        "optimizer_s": fmean(rank_medians(alone.optimizer_s)),
        "iterations_s": alone.whole_s,
        "ready_origin": "backward_start",
        "parameters": [
            {
                "name": p.name,
                "numel": p.numel,
                "dtype": p.dtype,
                "ready_s": None if None in p.ready_s else fmean(s for s in p.ready_s if s),
            }
            for p in rounds.parameters
        ],
        "buffers": [{"dtype": dtype, "numel": numel} for dtype, numel in rounds.buffers],
    }


def rank_factors(rounds: Rounds) -> tuple[float, ...]:
    """Each rank's compute over the ranks' mean; none where they differ by chance."""
    columns = zip(*rounds.alone.whole_s, strict=True)
    times = [median_time(column) for column in columns]
    middle = fmean(time.value for time in times)
    values = [time.value for time in times]
    chance = max(time.stderr or 0.0 for time in times)
    if max(values) - min(values) <= _SIGNIFICANT * chance * 2**0.5:
        return ()
    return tuple(value / middle for value in values)


def _all_reduce_csv(rounds: Rounds) -> str:
    """Medians of the slower rank."""
    layout, lines = rounds.layout, ["size_bytes,time_us,nodes,gpus_per_node"]
    for row in rounds.all_reduce:
        time_us = median(slowest(row.samples_s)) * 1e6
        lines.append(f"{row.size_bytes},{time_us:.3f},{layout.nodes},{layout.gpus_per_node}")
    return "\n".join(lines) + "\n"


# --- one case ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Measured:
    """A variant as measured, with those that have the same buckets: these are one experiment."""

    rounds: Rounds
    variant: VariantSamples
    alike: tuple[VariantSamples, ...]

    @classmethod
    def of(cls, rounds: Rounds, variant: VariantSamples) -> _Measured:
        """With all that differs from it by its cap alone, and not by what the cap does."""
        return cls(rounds, variant, tuple(v for v in rounds.variants if _key(v) == _key(variant)))

    def pooled(self, part: Callable[[VariantSamples], Samples]) -> Samples:
        """A part's seconds, [round][rank], of all that are alike."""
        return tuple(row for variant in self.alike for row in part(variant))


def _key(variant: VariantSamples) -> tuple[object, ...]:
    options = variant.variant
    return variant.bucket_bytes, options.accumulation_steps, options.comm_hook


def _case(measured: _Measured, inputs: _Inputs) -> Case:
    variant = measured.variant
    result = simulate(load_scenario(inputs.scenario(variant)))
    whole = median_time(slowest(measured.pooled(lambda v: v.whole_s)))
    stderr_s = whole.stderr or 0.0
    predicted_split, measured_split = _predicted(result), _measured(measured)
    predicted_s, interval = result.iteration_time_s.p50, result.prediction_interval_s
    naive, options = result.baselines_s, variant.variant
    quiet = abs(predicted_s - whole.value) <= _SIGNIFICANT * stderr_s
    return Case(
        variant=options.label,
        bucket_choice=options.accumulation_steps == 1 and options.comm_hook == "none",
        predicted_s=predicted_s,
        measured_s=whole.value,
        own_s=median(slowest(variant.whole_s)),
        stderr_s=stderr_s,
        rounds=sum(len(v.whole_s) for v in measured.alike),
        interval_s=None if interval is None else (interval.low, interval.high),
        compute_only_s=naive.compute_only,
        no_overlap_s=naive.no_overlap,
        perfect_overlap_s=naive.perfect_overlap,
        predicted=predicted_split,
        measured=measured_split,
        off="none" if quiet else _term(predicted_split, measured_split),
        bucket_bytes=variant.bucket_bytes,
        buckets_agree=sorted(b.size_bytes for b in result.buckets) == sorted(variant.bucket_bytes),
    )


def _predicted(result: Result) -> Split:
    parts, naive = result.breakdown_s, result.baselines_s
    return Split(
        forward=parts.forward,
        backward=parts.backward_compute + parts.other,
        exposed=parts.exposed_comm,
        optimizer=parts.optimizer,
        all_reduce=naive.no_overlap - naive.compute_only,
    )


def _measured(measured: _Measured) -> Split:
    ranks, variant = _slowest_ranks(measured.rounds), measured.variant

    def middle(part: Callable[[VariantSamples], Samples]) -> float:
        """The mean over these ranks of what their rounds usually take."""
        columns = tuple(zip(*measured.pooled(part), strict=True))
        return fmean(trimmed_mean(columns[rank]) for rank in ranks)

    exposed_s = max(0.0, middle(lambda v: _difference(v.logged.comm_s, v.logged.overlap_s)))
    # fp16_compress halves what is sent
    share = 0.5 if variant.variant.comm_hook.endswith("compress") else 1.0
    sizes = [share * size for size in variant.bucket_bytes]
    return Split(
        forward=middle(lambda v: v.forward_s),
        backward=middle(lambda v: v.backward_s) - exposed_s,
        exposed=exposed_s,
        optimizer=middle(lambda v: v.optimizer_s),
        all_reduce=float(sum(np.exp(_interpolated(measured.rounds, sizes)))),
    )


def _slowest_ranks(rounds: Rounds) -> tuple[int, ...]:
    """The rank with the longest compute; all ranks where they differ by chance."""
    factors = rank_factors(rounds)
    if not factors:
        return tuple(range(rounds.layout.world_size))
    return (factors.index(max(factors)),)


def _interpolated(rounds: Rounds, sizes: Sequence[float]) -> Any:
    """Logarithms of the measured all-reduce times of these sizes."""
    known = [(row.size_bytes, median(slowest(row.samples_s))) for row in rounds.all_reduce]
    x, y = np.log(np.array(known)).T
    return np.interp(np.log(sizes), x, y)


def _difference(a: Samples, b: Samples) -> Samples:
    return tuple(
        tuple(x - y for x, y in zip(one, other, strict=True))
        for one, other in zip(a, b, strict=True)
    )


def _term(predicted: Split, measured: Split) -> Term:
    """The part with the largest difference; of the exposed part, whether the network explains it.

    It does if the buckets' all-reduces, each alone, differ in the same direction by at least half
    as much.
    """
    gaps: dict[Term, float] = {
        "forward": predicted.forward - measured.forward,
        "backward": predicted.backward - measured.backward,
        "overlap": predicted.exposed - measured.exposed,
        "optimizer": predicted.optimizer - measured.optimizer,
    }
    largest = max(gaps, key=lambda term: abs(gaps[term]))
    network = predicted.all_reduce - measured.all_reduce
    gap = gaps[largest]
    if largest == "overlap" and network * gap > 0 and abs(network) >= abs(gap) / 2:
        return "communication"
    return largest


# --- all together ------------------------------------------------------------------------------


def _figures(sweeps: Sequence[Sweep]) -> Figures | None:
    cases = [case for sweep in sweeps for case in sweep.cases]
    if not cases:
        return None
    errors = [abs(case.error) for case in cases]
    exposed = [case for case in cases if case.exposed]
    regrets = [sweep.regret for sweep in sweeps if sweep.regret is not None]
    covered = [case.covered for case in cases if case.covered is not None]
    waits = [abs(c.predicted.exposed - c.measured.exposed) / c.measured_s for c in cases]
    terms = [case.off for case in cases]
    return Figures(
        cases=len(cases),
        sweeps=len(sweeps),
        distinct_cases=sum(
            len(sweep.choices) + sum(not case.bucket_choice for case in sweep.cases)
            for sweep in sweeps
        ),
        median_stderr=median(case.noise for case in cases),
        repeat_sigma=_repeat_sigma([group for sweep in sweeps for group in sweep.choices]),
        median_error=median(errors),
        worst_error=max(errors),
        within_5_percent_or_noise=_share(
            [abs(c.error) <= max(0.05, _SIGNIFICANT * c.noise) for c in cases]
        )
        or 0.0,
        median_bias=median(case.error for case in cases),
        exposed_cases=len(exposed),
        skilled=_share([case.skilled for case in exposed]),
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
        lines.append(f"{sweep.file}  network: {sweep.network}  regret {_percent(sweep.regret)}")
        lines += [_line(case) for case in sweep.cases]
    return "\n".join(lines)


def headlines(validation: Validation) -> Iterator[str]:
    """The figures, a line each; those of oversubscribed sweeps apart."""
    if validation.figures:
        yield from _lines(validation.figures, "")
    if validation.oversubscribed:
        yield from _lines(validation.oversubscribed, "OVERSUBSCRIBED ")


def _lines(f: Figures, of: str) -> Iterator[str]:
    yield f"{of}{f.cases} cases in {f.sweeps} sweeps; bucket sizes agree in {f.buckets_agree}"
    yield (
        f"{f.distinct_cases} are distinct; noise: standard errors of {f.median_stderr:.1%} "
        f"(median), and {_percent(f.repeat_sigma)} between caps with the same buckets"
    )
    yield f"error: median {f.median_error:.1%}, worst {f.worst_error:.1%}"
    yield f"bias {f.median_bias:+.1%}; within 5 % or the noise: {f.within_5_percent_or_noise:.0%}"
    yield f"skill: {_percent(f.skilled)} of {f.exposed_cases} cases with exposed communication"
    yield f"bucket choice within 1 %: {_percent(f.good_choices)} of {f.choice_sweeps} sweeps"
    yield (
        f"exposed communication: off by median {f.median_exposed_error:.1%}, "
        f"worst {f.worst_exposed_error:.1%} of the iteration"
    )
    if f.covered_p_value is not None:
        yield f"80 % interval: holds {_percent(f.covered)} (p = {f.covered_p_value:.2g})"
    yield "term off: " + ", ".join(f"{term} {count}" for term, count in f.off.items())


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _line(case: Case) -> str:
    p, m = case.predicted, case.measured
    parts = "  ".join(
        f"{name} {1e3 * getattr(p, name):.0f}/{1e3 * getattr(m, name):.0f}"
        for name in ("forward", "backward", "exposed", "optimizer", "all_reduce")
    )
    return (
        f"  {case.variant:24s} {case.predicted_s * 1e3:7.1f} {case.measured_s * 1e3:7.1f} ms "
        f"± {case.noise:.1%}  {case.error:+.1%}  naive {case.baseline_error:.1%}  "
        f"off: {case.off:13s} {parts}"
    )
