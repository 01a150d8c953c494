"""What a simulation of measured rounds is given: model profile, all-reduces, rank factors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from math import hypot
from pathlib import Path
from statistics import fmean, median
from typing import Any

from calibrate.fit.estimates import SIGNIFICANT, adding_up, averaged, median_time, profile_keys
from calibrate.fit.profile import NOT_STATED
from calibrate.records.rounds import Rounds, Runs, Steps, VariantSamples, rank_medians, slowest
from calibrate.records.variant import DDP, SHARDED, Variant
from ddpsim.engine.program import Program
from ddpsim.errors import DdpsimError, shown
from ddpsim.importers.profiles.cluster import ClusterProfile
from ddpsim.prediction.api import load_scenario, predict_and_observe
from ddpsim.prediction.resolve import resolve
from ddpsim.result.model import Result
from ddpsim.result.timeline import Timeline
from ddpsim.scenario.catalog import device_names
from ddpsim.scenario.catalog import resolve as resolve_preset
from ddpsim.scenario.options.model_file import MODEL_SCHEMA


@dataclass(frozen=True)
class Inputs:
    """Files and settings that a scenario needs."""

    runs: Runs
    folder: Path
    profile: Path | None
    device: str | None
    _simulated: dict[Program | Variant, tuple[Result, Timeline]] = field(default_factory=dict)
    _repairs: list[str] = field(default_factory=list)

    def simulated(self, variant: VariantSamples, ranks: Sequence[int]) -> tuple[Result, Timeline]:
        """A variant's prediction; caps that come to the same buckets are simulated once."""
        job, options = resolve(load_scenario(self.scenario(variant))), variant.variant
        same = job.program if options.is_bucket_choice else options
        if same not in self._simulated:
            self._simulated[same] = predict_and_observe(job, ranks)
        return self._simulated[same]

    @property
    def warnings(self) -> tuple[str, ...]:
        """What `ddpsim run` would warn of, of any variant that was simulated; and repairs."""
        results = (result for result, _ in self._simulated.values())
        words = chain.from_iterable(result.warnings for result in results)
        return tuple(
            dict.fromkeys(each.replace(f"{self.folder}/", "") for each in (*self._repairs, *words))
        )

    def stderr_s(self, result: Result) -> float:
        """Standard error of a prediction, from the noise of what the rounds themselves tell it.

        The bare model, and without a profile the rounds' own all-reduces.
        """
        compute_s = result.baselines_s.compute_only
        waiting_s = max(0.0, result.iteration_time_s.mean - compute_s)
        network = 0.0 if self.profile else _all_reduce_error(self.runs.pooled)
        return hypot((self._document["measured"]["sigma"] or 0.0) * compute_s, network * waiting_s)

    def scenario(self, variant: VariantSamples) -> dict[str, Any]:
        """The scenario of a variant."""
        rounds = self.runs.pooled
        return {
            "schema": "ddpsim/1",
            "name": f"{rounds.model} {variant.variant.label}",
            "workload": {
                "profile": str(self._model),
                "batch_per_rank": rounds.batch_per_rank,
                "optimizer": {"name": rounds.optimizer, "fused": rounds.fused},
            },
            "ddp": {"backend": rounds.environment.backend} | _ddp(variant, rounds),
            "cluster": self._cluster,
            "run": {"iterations": len(rounds.alone.whole_s), "allow_extrapolation": True},
        }

    @cached_property
    def _model(self) -> Path:
        path = self.folder / "model.json"
        path.write_text(json.dumps(self._document), encoding="utf-8")
        return path

    @cached_property
    def _document(self) -> dict[str, Any]:
        document = model_profile(*self.runs.each)
        measured = document["measured"]
        latest_s = max(filter(None, measured["ready_s"]), default=0.0)
        backward_s = measured["backward_s"]
        if latest_s <= backward_s:
            return document
        self._repairs.append(
            f"the last gradient is ready {latest_s / backward_s - 1:.1%} after the backward has "
            "ended, so all ready times are shortened to it: other programs disturbed some rounds"
        )
        measured["ready_s"] = [s and s * backward_s / latest_s for s in measured["ready_s"]]
        return document

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


def _ddp(variant: VariantSamples, rounds: Rounds) -> dict[str, Any]:
    """The ddp section of a variant's scenario, without its backend."""
    options = variant.variant
    shared = {
        "strategy": options.strategy,
        "accumulation_steps": options.accumulation_steps,
        "no_sync": options.no_sync,
    }
    units = {"units": list(variant.units)}
    if options.strategy == "fsdp1":
        return shared | {"fsdp1": units | {"sharding_strategy": options.sharding_strategy}}
    if options.strategy in SHARDED:
        reshards = {"reshard_after_forward": options.reshard_after_forward}
        return shared | {"fully_shard": reshards | units}
    if options.strategy not in DDP:
        return shared
    cap, finds = options.bucket_cap_mb, options.find_unused_parameters
    section: dict[str, Any] = {
        "bucket_cap_mb": "default" if cap is None else cap,
        "comm_hook": options.comm_hook,
        "find_unused_parameters": finds or rounds.find_unused_parameters,
        "gradient_as_bucket_view": options.gradient_as_bucket_view,
    }
    if options.comm_hook == "powerSGD":
        section["power_sgd"] = {"matrix_approximation_rank": options.matrix_approximation_rank}
    if options.overlap_with_ddp:
        keys = ("overlap_with_ddp", "hook", "shard_buckets")
        section["zero1"] = {key: getattr(options, key) for key in keys}
    return shared | section


def _device(name: str) -> str:
    """The preset of a device as torch calls it: "NVIDIA H100 80GB HBM3" is an h100-sxm-80gb."""
    try:
        return resolve_preset("device", name)
    except ValueError:
        raise DdpsimError(
            f"no device preset is known for {shown(name)}: name the one most like it with "
            f"--device, it prices what was not measured; known: {', '.join(device_names())}"
        ) from None


def check_cluster(path: Path, rounds: Rounds, fitted_profile: ClusterProfile, profile: str) -> None:
    """Raise DdpsimError unless rounds and a profile, of this name, are of one cluster."""
    here = rounds.environment
    for what, measured, fitted in (
        ("on", here.machine, fitted_profile.provenance.machine),
        ("with", here.backend, fitted_profile.backend),
    ):
        if fitted != NOT_STATED and not _are_one(measured, fitted):
            raise DdpsimError(
                f"{path.name} was measured {what} {shown(measured)}, but the profile "
                f"{profile} {what} {shown(fitted)}: validate each cluster against its own"
            )
    ours, fitted = here.processor, fitted_profile.provenance.processor
    if ours and fitted and ours != fitted:
        raise DdpsimError(
            f"{path.name} and the profile {profile} were measured on machines that call "
            f"themselves {shown(here.machine)}, but one is {ours} and the other {fitted}: "
            "validate each cluster against its own"
        )
    layout, rates = rounds.layout, fitted_profile.valid.line_rates_bytes_per_s
    if layout.nodes > 1 and layout.line_rate_bytes_per_s is None and len(rates) > 1:
        raise DdpsimError(
            f"{path.name} does not say the line rate of its nodes' links, and the profile "
            f"{profile} was measured on {len(rates)} kinds of them: measure the rounds again "
            "with --line-rate"
        )


def _are_one(name: str, other: str) -> bool:
    """Also a device that a log calls "A100-SXM4-40GB" and its driver "NVIDIA A100-SXM4-40GB"."""
    try:
        return name == other or resolve_preset("device", name) == resolve_preset("device", other)
    except ValueError:
        return False


def model_profile(*runs: Rounds) -> dict[str, Any]:
    """The model as measured without DDP, as ddpsim.model/3: means of the ranks' medians.

    Of several runs the mean of theirs, as of what is measured. The iterations bring their spread,
    and how the ranks differ; each run's are brought to the pace of all. How far the times may be
    off is their standard error: those of DDP, which they are to tell, were measured between them.
    """
    parts = [_usual_parts(run.alone) for run in runs]
    forward_s, backward_s, optimizer_s = _averages(parts)
    iteration_s = forward_s + backward_s + optimizer_s
    iterations_s = [
        [iteration_s / sum(usual_s) * seconds for seconds in row]
        for run, usual_s in zip(runs, parts, strict=True)
        for row in run.alone.whole_s
    ]
    first = runs[0]
    measured = {
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
        "ready_s": _ready(runs, parts),
        "ddp_hook_s": _ddp_hooks(runs),
    }
    listed, buffers = first.parameters, first.buffers
    return {
        "schema": MODEL_SCHEMA,
        "name": first.model,
        "parameters": {
            "name": [p.name for p in listed],
            "shape": [[p.rows, p.numel // p.rows] if p.rows else p.numel for p in listed],
            "dtype": [p.dtype for p in listed],
            "sparse": [place for place, p in enumerate(listed) if p.sparse],
        },
        "buffers": {
            "name": [f"{place}" for place in range(len(buffers))],
            "shape": [numel for _, numel in buffers],
            "dtype": [dtype for dtype, _ in buffers],
        },
        "measured": measured,
    }


def _relative_error(runs: Sequence[Rounds]) -> float | None:
    """The relative error of the mean over runs of the usual iteration, the mean over ranks."""
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
    """When each gradient is ready, in usual backwards: the mean over runs and ranks."""
    longer = [
        usual_s / fmean(rank_medians(run.alone.backward_s))
        for run, (_, usual_s, _) in zip(runs, parts, strict=True)
    ]
    ready_s: list[float | None] = []
    for same in zip(*(run.parameters for run in runs), strict=True):
        times = [
            None if seconds is None else times * seconds
            for times, parameter in zip(longer, same, strict=True)
            for seconds in parameter.ready_s
        ]
        seconds_known = [seconds for seconds in times if seconds is not None]
        ready_s.append(fmean(seconds_known) if len(seconds_known) == len(times) else None)
    return ready_s


def _ddp_hooks(runs: Sequence[Rounds]) -> list[float | None]:
    """Each parameter's hook: the mean over runs and ranks; None where no run measured it.

    All of them so many times as long that they make the bare backward as long as the one under DDP,
    where that was measured: what a hook costs the work after it is not in its own time.
    """
    hooks_s: list[float | None] = []
    for same in zip(*(run.parameters for run in runs), strict=True):
        measured_s = [seconds for p in same for seconds in p.ddp_hook_s if seconds is not None]
        hooks_s.append(fmean(measured_s) if measured_s else None)
    alone = [run.alone for run in runs if run.alone.ddp_backward_s]
    timed_s = sum(seconds or 0.0 for seconds in hooks_s)
    if not alone or not timed_s:
        return hooks_s
    longer_s = fmean(
        fmean(rank_medians(each.ddp_backward_s)) - fmean(rank_medians(each.backward_s))
        for each in alone
    )
    times = max(0.0, longer_s) / timed_s
    return [seconds and times * seconds for seconds in hooks_s]


def _all_reduce_error(rounds: Rounds) -> float:
    """Relative standard error of the rounds' all-reduces, the mean over their sizes."""
    times = [median_time(slowest(row.samples_s)) for row in rounds.all_reduce]
    return fmean((time.stderr or 0.0) / time.value for time in times)


def rank_factors(rounds: Rounds) -> tuple[float, ...]:
    """Each rank's compute over the ranks' mean; none where they differ by chance."""
    times = [median_time(column) for column in zip(*rounds.alone.whole_s, strict=True)]
    values = [time.value for time in times]
    chance = max(time.stderr or 0.0 for time in times)
    if max(values) - min(values) <= SIGNIFICANT * chance * 2**0.5:
        return ()
    return tuple(value / fmean(values) for value in values)


def _all_reduce_csv(rounds: Rounds) -> str:
    """Medians of the slower rank."""
    layout, lines = rounds.layout, ["size_bytes,time_us,nodes,gpus_per_node"]
    for row in rounds.all_reduce:
        time_us = median(slowest(row.samples_s)) * 1e6
        lines.append(f"{row.size_bytes},{time_us:.3f},{layout.nodes},{layout.gpus_per_node}")
    return "\n".join(lines) + "\n"
