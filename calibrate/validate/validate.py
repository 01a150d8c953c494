"""Hold simulations against real iterations, as recorded in rounds. Needs no torch.

A case is one variant of one model on one cluster, of one file of rounds or of several, which are
runs of the same. Its compute is the model as measured without DDP in the same rounds; its network
is a cluster profile, fitted elsewhere, or, without one, the all-reduces of the rounds themselves
(`network` says which: the latter is no prediction of them).

    python -m calibrate validate rounds-*.json --profile cluster.json -o validation.json
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeVar

import numpy as np

from calibrate.files import name_as_text
from calibrate.fit.estimates import MEDIAN_ERROR, trimmed_mean
from calibrate.records.rounds import Rounds, Runs, Samples, VariantSamples, load_rounds, slowest
from calibrate.validate.inputs import Inputs, check_cluster, rank_factors
from calibrate.validate.report import Case, Split, Sweep, Term, Validation, figures_of
from calibrate.validate.steady_step import (
    LAYER_ALONE,
    bare_rounds_s,
    run_sigma,
    run_times,
    steady_time,
    times_the_least,
    usual_phases,
    with_pooled_noise,
)
from ddpsim.errors import DdpsimError, ScenarioError
from ddpsim.importers.profiles.cluster import ClusterProfile, Fitted, read_cluster_profile
from ddpsim.prediction.interval import together
from ddpsim.progress import stage
from ddpsim.result.model import Result
from ddpsim.scenario.quantity import SourceFile

_T = TypeVar("_T")
_FEWEST_ROUNDS = 3


def validate(
    files: Sequence[Path],
    profile: Path | None = None,
    mapped: Callable[..., Iterable[Any]] = map,
    *,
    device: str | None = None,
) -> Validation:
    """Predict every variant of every file of rounds.

    Files of the same model on the same cluster are runs of one sweep. `mapped` is `map`, or an
    executor's, to predict several sweeps at once. `device` is the preset that prices what was not
    measured; default: that of the device's own name. A file that cannot be used is left out, with
    the reason; raises DdpsimError where none can be, or for the profile.
    """
    if not files:
        raise DdpsimError("no rounds: name at least one file of them")
    fitted = None if profile is None else read_cluster_profile(SourceFile(str(profile), profile))
    usable, left_out = _usable(files, fitted, profile)
    speeds = {name_as_text(path): bare_rounds_s(rounds) for path, rounds in usable.items()}
    if profile and fitted and fitted.provenance.layer_s:
        speeds[name_as_text(profile)] = {LAYER_ALONE: fitted.provenance.layer_s}
    subjects, sweeps = Runs.of(usable), list[Sweep]()
    with stage("models on clusters", len(subjects)) as progress:
        for sweep in mapped(partial(_or_why, _sweep, profile=profile, device=device), subjects):
            progress.advance()
            if isinstance(sweep, DdpsimError):
                left_out.append(sweep)
                continue
            sweeps.append(sweep)
            errors = [abs(case.error) for case in sweep.cases]
            progress.findings.append(
                f"{sweep.file}: {sweep.model}, median error {median(errors):.1%}"
            )
    if not sweeps:
        if len(left_out) == 1:
            raise left_out[0]
        raise DdpsimError("\n".join(("no file can be used:", *map(str, left_out))))
    return Validation(
        profile=None if profile is None else name_as_text(profile),
        figures=figures_of([sweep for sweep in sweeps if not sweep.oversubscribed]),
        oversubscribed=figures_of([sweep for sweep in sweeps if sweep.oversubscribed]),
        machine=times_the_least(speeds),
        left_out=tuple(map(str, left_out)),
        sweeps=tuple(sweeps),
    )


def _usable(
    files: Sequence[Path], fitted: ClusterProfile | None, profile: Path | None
) -> tuple[dict[Path, Rounds], list[DdpsimError]]:
    """The rounds of the files that can be used, and why the others cannot."""
    usable, left_out = dict[Path, Rounds](), list[DdpsimError]()
    for path in files:
        rounds = _or_why(_checked, path, usable, fitted, profile)
        if isinstance(rounds, DdpsimError):
            left_out.append(rounds)
        else:
            usable[path] = rounds
    return usable, left_out


def _or_why(work: Callable[..., _T], *given: Any, **options: Any) -> _T | DdpsimError:
    """What work gives, or the error that it raises."""
    try:
        return work(*given, **options)
    except DdpsimError as error:
        return error


def _checked(
    path: Path, others: Mapping[Path, Rounds], fitted: ClusterProfile | None, profile: Path | None
) -> Rounds:
    rounds = load_rounds(path)
    _check_apart(path, rounds, others)
    if fitted and profile:
        check_cluster(path, rounds, fitted, profile.name)
    return rounds


def _check_apart(path: Path, rounds: Rounds, others: Mapping[Path, Rounds]) -> None:
    """Runs are measurements of their own."""
    for other, its in others.items():
        if path.resolve() == other.resolve():
            raise DdpsimError(f"{path} is named twice, and would count as two runs; name it once")
        if its == rounds:
            raise DdpsimError(
                f"{other} and {path} hold the same rounds, which would count as two runs; name one"
            )


def _sweep(runs: Runs, profile: Path | None, device: str | None) -> Sweep:
    rounds = runs.pooled
    count = min(len(variant.whole_s) for variant in rounds.variants)
    if count < _FEWEST_ROUNDS:
        raise DdpsimError(
            f"{runs.first_file}: {count} rounds tell nothing of the noise; wanted {_FEWEST_ROUNDS} "
            "or more"
        )
    alike = _alike(rounds.variants)
    times = with_pooled_noise({same: run_times(runs.each, same) for same in alike}, runs.each)
    sigma = run_sigma(times.values())
    with tempfile.TemporaryDirectory(prefix="ddpsim-") as folder:
        inputs = Inputs(runs, Path(folder), profile, device)
        measured = [
            _Measured(runs, i, same, times[same], steady_time(times[same], sigma))
            for i, same in enumerate(alike)
        ]
        cases, left_out = _predictable(measured, inputs)
    return Sweep(
        file=runs.first_file,
        runs=len(runs.each),
        run_sigma=sigma if len(runs.each) > 1 else None,
        model=rounds.model,
        nodes=rounds.layout.nodes,
        gpus_per_node=rounds.layout.gpus_per_node,
        line_rate_bytes_per_s=rounds.layout.line_rate_bytes_per_s,
        network="the rounds' own all-reduces" if profile is None else name_as_text(profile),
        oversubscribed=rounds.oversubscribed,
        cases=cases,
        warnings=(*inputs.warnings, *left_out),
    )


def _alike(variants: Sequence[VariantSamples]) -> tuple[tuple[int, ...], ...]:
    """For each variant, itself and others that differ from it by a cap that does nothing."""

    def key(variant: VariantSamples) -> tuple[object, ...]:
        return variant.bucket_bytes, variant.variant.model_copy(update={"bucket_cap_mb": None})

    keys = [key(variant) for variant in variants]
    return tuple(tuple(i for i, other in enumerate(keys) if other == one) for one in keys)


@dataclass(frozen=True)
class _Measured:
    """A variant as measured, with those that have the same buckets: these are one experiment.

    `index` and `alike` are variants; `each` (by run) and `time` are of all that are alike.
    """

    runs: Runs
    index: int
    alike: tuple[int, ...]
    each: Sequence[Fitted]
    time: Fitted

    @property
    def variant(self) -> VariantSamples:
        """The variant itself."""
        return self.runs.pooled.variants[self.index]

    def pooled(self, part: Callable[[VariantSamples], Samples]) -> Samples:
        """A part's seconds, [round][rank], of all runs and all that are alike."""
        return self._of(self.runs.pooled, part)

    def plain_s(self) -> float:
        """Seconds of an iteration as they are: the mean of the runs' medians."""
        return fmean(median(slowest(self._of(run, lambda v: v.whole_s))) for run in self.runs.each)

    def own_s(self) -> float:
        """Seconds of an iteration, of the variant's own rounds."""
        return steady_time(run_times(self.runs.each, (self.index,))).value

    def _of(self, rounds: Rounds, part: Callable[[VariantSamples], Samples]) -> Samples:
        return tuple(row for i in self.alike for row in part(rounds.variants[i]))


def _predictable(
    measured: Sequence[_Measured], inputs: Inputs
) -> tuple[tuple[Case, ...], tuple[str, ...]]:
    """A case of each variant, and why some have none; raises DdpsimError where all have none."""
    outcomes = [(each.variant.variant.label, _case_or_why(each, inputs)) for each in measured]
    cases = tuple(case for _, case in outcomes if isinstance(case, Case))
    reasons = [(label, why) for label, why in outcomes if isinstance(why, str)]
    if not cases:
        raise DdpsimError(f"{measured[0].runs.first_file} cannot be simulated: {reasons[0][1]}")
    return cases, tuple(f"{label} is not predicted: {why}" for label, why in reasons)


def _case_or_why(measured: _Measured, inputs: Inputs) -> Case | str:
    try:
        return _case(measured, inputs)
    except ScenarioError as error:
        return error.reason.replace(f"{inputs.folder}/", "")


def _case(measured: _Measured, inputs: Inputs) -> Case:
    variant = measured.variant
    ranks = _slowest_ranks(measured.runs.pooled)
    result, timeline = inputs.simulated(variant, ranks)
    naive, options = result.baselines_s, variant.variant
    reduced = {"all_reduce": naive.no_overlap - naive.compute_only}
    predicted_split = usual_phases(timeline, ranks).model_copy(update=reduced)
    measured_split = _measured_split(measured, ranks)
    measured_s, stderr_s = measured.time.value, measured.time.stderr or 0.0
    if measured_split.exposed is None:  # nobody tells what of the backward is waiting
        backward_s = predicted_split.backward + (predicted_split.exposed or 0.0)
        waiting = {"backward": backward_s, "exposed": None}
        predicted_split = predicted_split.model_copy(update=waiting)
    count = len(measured.pooled(lambda v: v.whole_s))
    predicted_s = result.iteration_time_s.p50
    case = Case(
        variant=options.label,
        plain=options.plain.label,
        bucket_choice=options.is_bucket_choice,
        predicted_s=predicted_s,
        measured_s=measured_s,
        own_s=measured.own_s(),
        plain_s=measured.plain_s(),
        stderr_s=stderr_s,
        inputs_stderr_s=inputs.stderr_s(result),
        runs_s=tuple(run.value for run in measured.each),
        rounds=count,
        interval_s=_interval(result, count),
        compute_only_s=naive.compute_only,
        no_overlap_s=naive.no_overlap,
        perfect_overlap_s=naive.perfect_overlap,
        predicted=predicted_split,
        measured=measured_split,
        off="none",
        bucket_bytes=variant.bucket_bytes,
        buckets_agree=not variant.bucket_bytes
        or sorted(b.size_bytes for b in result.buckets) == sorted(variant.bucket_bytes),
    )
    if case.within_noise:
        return case
    return case.model_copy(update={"off": _term(predicted_split, measured_split)})


def _interval(result: Result, rounds: int) -> tuple[float, float] | None:
    """The prediction interval of a median over rounds: jitter, of one iteration, averages out.

    The result's is about the mean, from which slow iterations keep the median apart.
    """
    interval, middle_s = result.prediction_interval_s, result.iteration_time_s.p50
    if interval is None:
        return None
    part = MEDIAN_ERROR / math.sqrt(rounds)
    below_s, above_s = together(
        [
            replace(source, low_s=part * source.low_s, high_s=part * source.high_s)
            if source.input == "jitter"
            else source
            for source in interval.sources
        ]
    )
    return middle_s - below_s, middle_s + above_s


def _measured_split(measured: _Measured, ranks: Sequence[int]) -> Split:
    variant = measured.variant

    def middle(part: Callable[[VariantSamples], Samples]) -> float:
        """The mean over these ranks of what their rounds usually take."""
        columns = tuple(zip(*measured.pooled(part), strict=True))
        return fmean(trimmed_mean(columns[rank]) for rank in ranks)

    exposed_s = max(0.0, middle(_waiting)) if variant.logged else None
    # fp16_compress halves what is sent
    share = 0.5 if variant.variant.comm_hook.endswith("compress") else 1.0
    sizes = [share * size for size in variant.bucket_bytes]
    return Split(
        forward=middle(lambda v: v.forward_s),
        backward=middle(lambda v: v.backward_s) - (exposed_s or 0.0),
        exposed=exposed_s,
        optimizer=middle(lambda v: v.optimizer_s),
        all_reduce=sum(np.exp(_interpolated(measured.runs.pooled, sizes))) if sizes else None,
    )


def _slowest_ranks(rounds: Rounds) -> tuple[int, ...]:
    """The rank with the longest compute; all ranks where they differ by chance."""
    factors = rank_factors(rounds)
    if not factors:
        return tuple(range(rounds.layout.world_size))
    return (factors.index(max(factors)),)


def _interpolated(rounds: Rounds, sizes: Sequence[float]) -> Any:
    """Logarithms of the measured all-reduce times of these sizes."""
    points = sorted((r.size_bytes, median(slowest(r.samples_s))) for r in rounds.all_reduce)
    x, y = np.log(np.array(points)).T
    return np.interp(np.log(sizes), x, y)


def _waiting(variant: VariantSamples) -> Samples:
    """What of DDP's communication is not under compute."""
    log = variant.logged
    rows = zip(log.comm_s, log.overlap_s, strict=True) if log else ()
    return tuple(tuple(c - o for c, o in zip(*row, strict=True)) for row in rows)


def _term(predicted: Split, measured: Split) -> Term:
    """The part with the largest difference; of the exposed part, whether the network explains it.

    It does if the buckets' all-reduces, each alone, differ in the same direction by at least half
    as much.
    """
    gaps: dict[Term, float] = {
        "forward": predicted.forward - measured.forward,
        "backward": predicted.backward - measured.backward,
        "overlap": (predicted.exposed or 0.0) - (measured.exposed or 0.0),
        "optimizer": predicted.optimizer - measured.optimizer,
    }
    largest = max(gaps, key=lambda term: abs(gaps[term]))
    network = (predicted.all_reduce or 0.0) - (measured.all_reduce or 0.0)
    gap = gaps[largest]
    if largest == "overlap" and network * gap > 0 and abs(network) >= abs(gap) / 2:
        return "communication"
    return largest
