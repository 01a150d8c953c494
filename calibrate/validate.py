"""Hold simulations against real DDP iterations, as recorded in rounds. Needs no torch.

A case is one variant of one model on one cluster, of one file of rounds or of several, which are
runs of the same. Its compute is the model as measured without DDP in the same rounds; its network
is a cluster profile, fitted elsewhere, or, without one, the all-reduces of the rounds themselves
(`network` says which: the latter is no prediction of them).

    python -m calibrate validate rounds-*.json --profile cluster.json -o validation.json
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, combinations
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from calibrate.ddp_rounds import (
    Rounds,
    Runs,
    Samples,
    Steps,
    VariantSamples,
    load_runs,
    rank_medians,
    slowest,
)
from calibrate.files import name_as_text
from calibrate.fit.estimates import (
    MEDIAN_ERROR,
    SIGNIFICANT,
    averaged,
    median_time,
    trimmed_mean,
)
from calibrate.fit.profile import NOT_STATED
from calibrate.interference_exponent import profile_keys
from calibrate.parts import adding_up
from calibrate.phases import Phases, usual_phases
from calibrate.steady import run_sigma, run_times, steady_time
from calibrate.validation import (
    Case,
    Split,
    Sweep,
    Term,
    Validation,
    figures_of,
)
from ddpsim.engine.program import Program
from ddpsim.errors import DdpsimError, ScenarioError, shown
from ddpsim.importers.profiles.cluster import Fitted, read_cluster_profile
from ddpsim.prediction.api import load_scenario, simulate_and_observe
from ddpsim.prediction.interval import together
from ddpsim.prediction.resolve import resolve
from ddpsim.result.model import Result
from ddpsim.result.timeline import Timeline
from ddpsim.scenario.catalog import device_names
from ddpsim.scenario.catalog import resolve as resolve_preset
from ddpsim.scenario.quantity import SourceFile

__all__ = ["model_profile", "rank_factors", "validate"]

_FEWEST_ROUNDS = 3


def validate(
    files: Sequence[Path],
    profile: Path | None = None,
    mapped: Callable[..., Iterable[Any]] = map,
    *,
    device: str | None = None,
) -> Validation:
    """Predict every variant of every file of rounds; raises DdpsimError for what cannot be read.

    Files of the same model on the same cluster are runs of one sweep. `mapped` is `map`, or an
    executor's, to predict several sweeps at once. `device` is the preset that prices what was not
    measured; default: that of the device's own name.
    """
    if not files:
        raise DdpsimError("no rounds: name at least one file of them")
    for i, path in enumerate(files):
        if path.resolve() in (other.resolve() for other in files[:i]):
            raise DdpsimError(f"{path} is named twice, and would count as two runs; name it once")
    subjects = load_runs(files)
    for runs in subjects:
        _check_apart(runs)
    if profile is not None:
        for path, rounds in chain.from_iterable(runs.by_file.items() for runs in subjects):
            _check_cluster(path, rounds, profile)
    sweeps = tuple(mapped(partial(_sweep, profile=profile, device=device), subjects))
    return Validation(
        profile=None if profile is None else name_as_text(profile),
        figures=figures_of([sweep for sweep in sweeps if not sweep.oversubscribed]),
        oversubscribed=figures_of([sweep for sweep in sweeps if sweep.oversubscribed]),
        sweeps=sweeps,
    )


def _check_apart(runs: Runs) -> None:
    """Runs are measurements of their own."""
    for (one, its), (other, others) in combinations(runs.by_file.items(), 2):
        if its == others:
            raise DdpsimError(
                f"{one} and {other} hold the same rounds, which would count as two runs; name one"
            )


# --- one sweep ---------------------------------------------------------------------------------


def _sweep(runs: Runs, profile: Path | None, device: str | None) -> Sweep:
    rounds = runs.pooled
    count = min(len(variant.whole_s) for variant in rounds.variants)
    if count < _FEWEST_ROUNDS:
        raise DdpsimError(
            f"{runs.first_file}: {count} rounds tell nothing of the noise; wanted {_FEWEST_ROUNDS} "
            "or more"
        )
    alike = _alike(rounds.variants)
    times = {same: run_times(runs.each, same) for same in alike}
    sigma = run_sigma(times.values())
    with tempfile.TemporaryDirectory(prefix="ddpsim-") as folder:
        inputs = _Inputs(runs, Path(folder), profile, device)
        try:
            cases = tuple(
                _case(
                    _Measured(runs, i, same, times[same], steady_time(times[same], sigma)), inputs
                )
                for i, same in enumerate(alike)
            )
        except ScenarioError as error:
            reason = error.reason.replace(f"{folder}/", "")
            raise DdpsimError(f"{runs.first_file} cannot be simulated: {reason}") from None
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
        warnings=inputs.warnings,
    )


def _alike(variants: Sequence[VariantSamples]) -> tuple[tuple[int, ...], ...]:
    """Of each variant, itself and those that differ from it by a cap that does nothing."""

    def key(variant: VariantSamples) -> tuple[object, ...]:
        options = variant.variant
        return variant.bucket_bytes, options.accumulation_steps, options.comm_hook

    keys = [key(variant) for variant in variants]
    return tuple(tuple(i for i, other in enumerate(keys) if other == own) for own in keys)


@dataclass(frozen=True)
class _Inputs:
    """Files and settings that a scenario needs."""

    runs: Runs
    folder: Path
    profile: Path | None
    device: str | None
    _simulated: dict[Program, tuple[Result, Timeline]] = field(default_factory=dict)

    def simulated(self, variant: VariantSamples, ranks: Sequence[int]) -> tuple[Result, Timeline]:
        """A variant's prediction; caps that come to the same buckets are simulated once."""
        scenario = load_scenario(self.scenario(variant))
        program = resolve(scenario).program
        if program not in self._simulated:
            self._simulated[program] = simulate_and_observe(scenario, ranks)
        return self._simulated[program]

    @property
    def warnings(self) -> tuple[str, ...]:
        """What `ddpsim run` would warn of, of any variant that was simulated."""
        results = (result for result, _ in self._simulated.values())
        return tuple(dict.fromkeys(chain.from_iterable(result.warnings for result in results)))

    def scenario(self, variant: VariantSamples) -> dict[str, Any]:
        """The scenario of a variant."""
        options, cap = variant.variant, variant.variant.bucket_cap_mb
        rounds = self.runs.pooled
        return {
            "schema": "ddpsim/1",
            "name": f"{rounds.model} {options.label}",
            "workload": {
                "profile": str(self._model),
                "batch_per_rank": rounds.batch_per_rank,
                "optimizer": {"name": rounds.optimizer, "fused": rounds.fused},
            },
            "ddp": {
                "backend": rounds.environment.backend,
                "bucket_cap_mb": "default" if cap is None else cap,
                "accumulation_steps": options.accumulation_steps,
                "comm_hook": options.comm_hook,
                "find_unused_parameters": rounds.find_unused_parameters,
            },
            "cluster": self._cluster,
            "run": {"iterations": len(rounds.alone.whole_s), "allow_extrapolation": True},
        }

    @cached_property
    def _model(self) -> Path:
        path = self.folder / "model.json"
        path.write_text(json.dumps(model_profile(*self.runs.each)), encoding="utf-8")
        return path

    @cached_property
    def _cluster(self) -> dict[str, Any]:
        rounds = self.runs.pooled
        layout = rounds.layout
        cluster: dict[str, Any] = {
            "nodes": layout.nodes,
            "gpus_per_node": layout.gpus_per_node,
            "device": self.device or _device(rounds.environment.device),
        }
        if self.profile is None:
            path = self.folder / "all-reduce.csv"
            path.write_text(_all_reduce_csv(rounds), encoding="utf-8")
            return cluster | {"all_reduce": str(path)}
        if layout.line_rate_bytes_per_s is not None:
            bandwidth = f"{layout.line_rate_bytes_per_s!r} B/s"
            # a gloo profile takes the line rate from here, and its own latency
            cluster["inter_node"] = {"bandwidth": bandwidth, "latency": "50 us"}
        return cluster | {"profile": str(self.profile.resolve())}


def _device(name: str) -> str:
    """The preset of a device as torch calls it: "NVIDIA H100 80GB HBM3" is an h100-sxm-80gb."""
    try:
        return resolve_preset("device", name)
    except ValueError:
        raise DdpsimError(
            f"no device preset is known for {shown(name)}: name the one most like it with "
            f"--device, it prices what was not measured; known: {', '.join(device_names())}"
        ) from None


def _check_cluster(path: Path, rounds: Rounds, profile: Path) -> None:
    """Rounds are held against the profile of their own cluster alone."""
    here = rounds.environment
    known = read_cluster_profile(SourceFile(str(profile), profile))
    for what, measured, fitted in (
        ("on", here.machine, known.provenance.machine),
        ("with", here.backend, known.backend),
    ):
        if fitted != NOT_STATED and not _are_one(measured, fitted):
            raise DdpsimError(
                f"{path.name} was measured {what} {shown(measured)}, but the profile "
                f"{profile.name} {what} {shown(fitted)}: validate each cluster against its own"
            )
    ours, fitted = here.processor, known.provenance.processor
    if ours and fitted and ours != fitted:
        raise DdpsimError(
            f"{path.name} and the profile {profile.name} were measured on machines that call "
            f"themselves {shown(here.machine)}, but one is {ours} and the other {fitted}: "
            "validate each cluster against its own"
        )
    layout, rates = rounds.layout, known.valid.line_rates_bytes_per_s
    if layout.nodes > 1 and layout.line_rate_bytes_per_s is None and len(rates) > 1:
        raise DdpsimError(
            f"{path.name} does not say the line rate of its nodes' links, and the profile "
            f"{profile.name} was measured on {len(rates)} kinds of them: measure the rounds again "
            "with --line-rate"
        )


def _are_one(name: str, other: str) -> bool:
    """Also a device that a log calls "A100-SXM4-40GB" and its driver "NVIDIA A100-SXM4-40GB"."""
    try:
        return name == other or resolve_preset("device", name) == resolve_preset("device", other)
    except ValueError:
        return False


def model_profile(*runs: Rounds) -> dict[str, Any]:
    """The model as measured without DDP, as ddpsim.model-profile/1: means of the ranks' medians.

    Of several runs the mean of theirs, as of what is measured. The iterations bring their spread,
    and how the ranks differ; each run's are brought to the pace of all. How far the times may be
    off is their standard error: those of DDP, which they are to tell, were measured between them.
    """
    parts = [_usual_parts(run.alone) for run in runs]
    forward_s, backward_s, optimizer_s = _averages(parts)
    iteration_s = forward_s + backward_s + optimizer_s
    iterations_s = [
        [iteration_s / sum(own) * seconds for seconds in row]
        for run, own in zip(runs, parts, strict=True)
        for row in run.alone.whole_s
    ]
    first = runs[0]
    return {
        "schema": "ddpsim.model-profile/1",
        "source": f"{first.model}, {len(iterations_s)} iterations without DDP",
        "batch_per_rank": first.batch_per_rank,
        "forward_s": forward_s,
        "backward_s": backward_s,
        **_later(runs, forward_s, backward_s),
        "optimizer_s": optimizer_s,
        "optimizer": first.optimizer,
        "iterations_s": iterations_s,
        "sigma": _relative_error(runs),
        **profile_keys([run.alone.beside for run in runs if run.alone.beside]),
        "ready_origin": "backward_start",
        "parameters": [
            {"name": p.name, "numel": p.numel, "dtype": p.dtype, "ready_s": ready_s}
            | {"ddp_hook_s": hook_s, "sparse": p.sparse}
            for p, ready_s, hook_s in zip(
                first.parameters, _ready(runs, parts), _ddp_hooks(runs), strict=True
            )
        ],
        "buffers": [{"dtype": dtype, "numel": numel} for dtype, numel in first.buffers],
    }


def _relative_error(runs: Sequence[Rounds]) -> float | None:
    """Of the mean over runs of the usual iteration, the mean over ranks."""
    time = averaged([median_time([fmean(row) for row in run.alone.whole_s]) for run in runs])
    return None if time.stderr is None else time.stderr / time.value


def _later(runs: Sequence[Rounds], forward_s: float, backward_s: float) -> dict[str, float]:
    """A later micro-batch: what two take, less the first."""
    two = [run.alone.accumulating for run in runs]
    if None in two:
        return {}
    both_forward_s, both_backward_s, _ = _averages([_usual_parts(steps) for steps in two if steps])
    later = {
        "later_forward_s": both_forward_s - forward_s,
        "later_backward_s": both_backward_s - backward_s,
    }
    return later if min(later.values()) > 0 else {}  # of a tiny model noise may be more


def _usual_parts(steps: Steps) -> list[float]:
    """Forward, backward and optimizer: means of the ranks' medians, which are an iteration."""
    parts = (steps.forward_s, steps.backward_s, steps.optimizer_s)
    each_s = (fmean(rank_medians(part)) for part in parts)
    return adding_up(each_s, fmean(rank_medians(steps.whole_s)))


def _averages(rows: Sequence[Sequence[float]]) -> list[float]:
    return [fmean(column) for column in zip(*rows, strict=True)]


def _ready(runs: Sequence[Rounds], parts: Sequence[Sequence[float]]) -> list[float | None]:
    """Of each parameter: the mean over runs and ranks, each run's in its usual backward."""
    longer = [
        usual_s / fmean(rank_medians(run.alone.backward_s))
        for run, (_, usual_s, _) in zip(runs, parts, strict=True)
    ]
    found: list[float | None] = []
    for same in zip(*(run.parameters for run in runs), strict=True):
        times = [
            None if seconds is None else times * seconds
            for times, parameter in zip(longer, same, strict=True)
            for seconds in parameter.ready_s
        ]
        known = [seconds for seconds in times if seconds is not None]
        found.append(fmean(known) if len(known) == len(times) else None)
    return found


def _ddp_hooks(runs: Sequence[Rounds]) -> list[float | None]:
    """Of each parameter: the mean over runs and ranks; None where no run measured it.

    All of them so many times as long that they make the bare backward as long as the one under DDP,
    where that was measured: what a hook costs the work after it is not in its own time.
    """
    found: list[float | None] = []
    for same in zip(*(run.parameters for run in runs), strict=True):
        known = [seconds for p in same for seconds in p.ddp_hook_s if seconds is not None]
        found.append(fmean(known) if known else None)
    alone = [run.alone for run in runs if run.alone.ddp_backward_s]
    timed_s = sum(seconds or 0.0 for seconds in found)
    if not alone or not timed_s:
        return found
    longer_s = fmean(
        fmean(rank_medians(each.ddp_backward_s)) - fmean(rank_medians(each.backward_s))
        for each in alone
    )
    times = max(0.0, longer_s) / timed_s
    return [seconds and times * seconds for seconds in found]


def rank_factors(rounds: Rounds) -> tuple[float, ...]:
    """Each rank's compute over the ranks' mean; none where they differ by chance."""
    columns = zip(*rounds.alone.whole_s, strict=True)
    times = [median_time(column) for column in columns]
    middle = fmean(time.value for time in times)
    values = [time.value for time in times]
    chance = max(time.stderr or 0.0 for time in times)
    if max(values) - min(values) <= SIGNIFICANT * chance * 2**0.5:
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


def _case(measured: _Measured, inputs: _Inputs) -> Case:
    variant = measured.variant
    ranks = _slowest_ranks(measured.runs.pooled)
    result, timeline = inputs.simulated(variant, ranks)
    phases = usual_phases(timeline, ranks)
    measured_s, stderr_s = measured.time.value, measured.time.stderr or 0.0
    predicted_split, measured_split = _predicted(result, phases), _measured(measured, ranks)
    count = len(measured.pooled(lambda v: v.whole_s))
    predicted_s = result.iteration_time_s.p50
    naive, options = result.baselines_s, variant.variant
    quiet = abs(predicted_s - measured_s) <= SIGNIFICANT * stderr_s
    return Case(
        variant=options.label,
        bucket_choice=options.accumulation_steps == 1 and options.comm_hook == "none",
        predicted_s=predicted_s,
        measured_s=measured_s,
        own_s=measured.own_s(),
        plain_s=measured.plain_s(),
        stderr_s=stderr_s,
        runs_s=tuple(run.value for run in measured.each),
        rounds=count,
        interval_s=_interval(result, count),
        compute_only_s=naive.compute_only,
        no_overlap_s=naive.no_overlap,
        perfect_overlap_s=naive.perfect_overlap,
        predicted=predicted_split,
        measured=measured_split,
        off="none" if quiet else _term(predicted_split, measured_split),
        bucket_bytes=variant.bucket_bytes,
        buckets_agree=sorted(b.size_bytes for b in result.buckets) == sorted(variant.bucket_bytes),
    )


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


def _predicted(result: Result, phases: Phases) -> Split:
    naive = result.baselines_s
    return Split(**asdict(phases), all_reduce=naive.no_overlap - naive.compute_only)


def _measured(measured: _Measured, ranks: Sequence[int]) -> Split:
    variant = measured.variant

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
        all_reduce=float(sum(np.exp(_interpolated(measured.runs.pooled, sizes)))),
    )


def _slowest_ranks(rounds: Rounds) -> tuple[int, ...]:
    """The rank with the longest compute; all ranks where they differ by chance."""
    factors = rank_factors(rounds)
    if not factors:
        return tuple(range(rounds.layout.world_size))
    return (factors.index(max(factors)),)


def _interpolated(rounds: Rounds, sizes: Sequence[float]) -> Any:
    """Logarithms of the measured all-reduce times of these sizes."""
    known = sorted((r.size_bytes, median(slowest(r.samples_s))) for r in rounds.all_reduce)
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
