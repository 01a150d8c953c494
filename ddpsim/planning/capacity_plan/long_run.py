"""A world size with its failures: many runs of the whole work, and what would shorten them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, exp, inf, sqrt
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpsim.errors import InputError, ScenarioError
from ddpsim.prediction.job import Job
from ddpsim.prediction.program import pauses_of
from ddpsim.prediction.resolve import resolve
from ddpsim.provenance import Provenance
from ddpsim.reliability.many_runs import Draws, Runs, simulate_runs
from ddpsim.reliability.operation import CAUSES, Operation, daly_interval_s
from ddpsim.result.capacity import LongRun, Money, Remedy
from ddpsim.result.model import Distribution, Result
from ddpsim.result.training import Pause, paused_s
from ddpsim.scenario.catalog import failures_of
from ddpsim.scenario.document import Document
from ddpsim.scenario.options.reliability import Reliability
from ddpsim.scenario.options.training_loop import CheckpointWrite
from ddpsim.scenario.schema import Scenario
from ddpsim.settings import setting
from ddpsim.units import format_bytes_per_s, format_long_duration
from ddpsim.wording import counted

_RUNS = 2001  # odd: the median is a run's own time
_FEW_RUNS = 201  # to choose between numbers of spares, and to search for a size; odd too
HALF = 0.5  # of the runs are in time, where nobody says how surely
_WORTH = 0.001  # of the time that a remedy must save to be named
_MANY_EVENTS = 1000  # of a run, whose time then hardly varies
_CHECKPOINTS = CheckpointWrite.model_validate({"every": "auto", "bandwidth": "1 GB/s"})
_GOLDEN = (sqrt(5) - 1) / 2  # its multiples are spread evenly
_S_PER_HOUR = 3600
_MONTH_S = 30 * 24 * 3600


def month_of(document: Document, job: Job, result: Result) -> LongRun | None:
    """30 days of undisturbed steps of a job with its failures; None if none are stated.

    `document`: the job's; `result`: its step and interval. Raises ScenarioError without progress.
    """
    if job.scenario.reliability is None:
        return None
    step_s = result.iteration_time_s.mean
    steps = ceil(_MONTH_S / (step_s + paused_s(pauses_of(job))))
    month = Campaign(job.scenario, steps, step_s, result.edges_s, HALF, None)
    try:
        return month.long_run(helps=True)
    except InputError as error:
        raise ScenarioError([document.blame(InputError("reliability", error.message))]) from None


def operation_of(
    scenario: Scenario, pauses: tuple[Pause, ...], steps: int, step_s: float, spares: int | None
) -> Operation:
    """A scenario's work and its failures in numbers; raises InputError without progress."""
    reliability, cluster = scenario.reliability or Reliability(), scenario.cluster
    saved = next((pause for pause in pauses if pause.what == "checkpoint"), None)
    each_s = step_s + paused_s(pauses)
    spot, slow, window = reliability.spot, reliability.stragglers, reliability.maintenance
    save_s = saved.time_s + saved.write_s if saved else inf
    load_s = reliability.load_s
    if load_s is None:
        load_s = saved.read_s if saved else 0.0
    operation = Operation(
        work_s=steps * each_s,
        segment_s=saved.every * each_s if saved else inf,
        checkpoint_s=saved.time_s if saved else 0.0,
        write_s=saved.write_s if saved else 0.0,
        crash_per_s=reliability.crash_per_s(cluster.world_size, cluster.nodes),
        detect_s=reliability.detection_s,
        replace_s=reliability.reschedule_s,
        init_s=reliability.init_s + reliability.init_per_rank_s * cluster.world_size,
        load_s=load_s,
        nodes=cluster.nodes,
        spares=spares,
        repair_s=reliability.repair_s,
        is_elastic=reliability.elastic,
        notice_per_s=cluster.nodes * spot.per_node_s if spot else 0.0,
        saves_on_notice=bool(spot and spot.notice_s >= save_s),
        notice_replace_s=spot.replaced_after_s if spot else 0.0,
        straggler_per_s=cluster.nodes / slow.mtbf_s if slow else 0.0,
        straggler_slowdown=slow.slowdown if slow else 1.0,
        straggler_found_s=slow.found_after_s if slow else 0.0,
        maintenance_every_s=window.every_s if window else inf,
        maintenance_s=window.lasts_s if window else 0.0,
    )
    operation.check()
    return operation


@dataclass(frozen=True)
class Campaign:
    """One world size that trains for days: its steps, their interval, and what interrupts them.

    `edges_s`: of the step's 80 % interval, from which each run has a step of its own. `certainty`:
    the share of runs that `certain_s` keeps.
    """

    scenario: Scenario
    steps: int
    step_s: float
    edges_s: tuple[float, float] | None
    certainty: float
    price: Money | None

    @cached_property
    def pauses(self) -> tuple[Pause, ...]:
        """Evaluations and checkpoints."""
        return pauses_of(resolve(self.scenario))

    def long_run(self, *, helps: bool = False) -> LongRun:
        """Simulate the runs; `helps`: also what would shorten them, the most useful first."""
        spares = self.spares()
        operation = self.operation(spares)
        summary = self._summed_up(operation, self.simulated(operation, _RUNS), spares or 0)
        if not helps:
            return summary
        remedies = sorted(self._remedies(summary), key=lambda remedy: -remedy.saved_s)
        return replace(summary, remedies=tuple(remedies))

    def certain_s(self) -> float:
        """The time that the wanted share of runs keeps, from few runs: for a search."""
        return self._certain_s(self.spares())

    def _certain_s(self, spares: int | None) -> float:
        times_s = self.simulated(self.operation(spares), _FEW_RUNS).time_s
        return float(np.quantile(times_s, self.certainty))

    def operation(self, spares: int | None) -> Operation:
        """The run in numbers, with so many spare nodes."""
        return operation_of(self.scenario, self.pauses, self.steps, self.step_s, spares)

    def spares(self) -> int | None:
        """Spare nodes: as many as stated, or with which the work takes the fewest GPU-hours."""
        stated = self.scenario.reliability.spares if self.scenario.reliability else None
        if stated != "auto":
            return stated
        broken = self.operation(0)
        best, least = 0, inf
        tried = int(broken.crash_per_s * broken.repair_s / 2)  # with fewer it mostly waits
        while (paid := self._certain_s(tried) * self._paid_gpus(tried)) < least:
            best, least, tried = tried, paid, max(tried + 1, round(tried * 1.3))
        return best

    def _paid_gpus(self, spares: int) -> int:
        cluster = self.scenario.cluster
        return cluster.world_size + spares * cluster.gpus_per_node

    def simulated(self, operation: Operation, runs: int) -> Runs:
        """So many runs, each with a step of its own."""
        if operation.event_per_s * operation.work_s > _MANY_EVENTS:
            runs = min(runs, _FEW_RUNS)
        operations = [
            replace(operation.stretched(steps), crash_per_s=operation.crash_per_s * failures)
            for steps, failures in zip(
                self._factors(runs), self._failure_factors(runs), strict=True
            )
        ]
        return simulate_runs(operations, Draws(self.scenario.run.seed, runs))

    def _failure_factors(self, runs: int) -> list[float]:
        """Factors on each run's failure rate: evenly over a preset's spread, in mixed order."""
        preset = self.scenario.reliability and self.scenario.reliability.failures
        sigma = failures_of(preset).get("sigma") if preset else None
        if not sigma:
            return [1.0] * runs
        normal = NormalDist(0, sigma)
        return [exp(normal.inv_cdf((run * _GOLDEN + 0.5) % 1 or 0.5)) for run in range(runs)]

    def _factors(self, runs: int) -> list[float]:
        """Factors on each run's step: evenly over the prediction's interval."""
        if self.edges_s is None:
            return [1.0] * runs
        low_s, high_s = self.edges_s
        normal = NormalDist()
        factors, edge = [], normal.inv_cdf(0.9)
        for run in range(runs):
            share = min(max(run / (runs - 1), 0.5 / runs), 1 - 0.5 / runs)
            z = normal.inv_cdf(share) / edge
            reach_s = high_s - self.step_s if z > 0 else self.step_s - low_s
            factors.append(max(0.1, 1 + z * reach_s / self.step_s))
        return factors

    def _summed_up(self, operation: Operation, runs: Runs, spares: int) -> LongRun:
        mean_s = float(runs.time_s.mean())
        saved = next((pause for pause in self.pauses if pause.what == "checkpoint"), None)
        stops_per_s, mtbf_s = operation.crash_per_s + operation.notice_per_s, None
        if stops_per_s:
            mtbf_s = 1 / stops_per_s
        daly_s = None
        if saved and operation.failure_per_s:
            daly_s = daly_interval_s(saved.time_s, 1 / operation.failure_per_s)
        time_s, gpus = _distribution(runs.time_s), self._paid_gpus(spares)
        gpu_hours = _scaled(time_s, gpus / _S_PER_HOUR)
        return LongRun(
            runs=len(runs.time_s),
            time_s=time_s,
            certain_s=float(np.quantile(runs.time_s, self.certainty)),
            shares={cause: float(runs.spent_s[cause].mean()) / mean_s for cause in CAUSES},
            interruptions=float(runs.interruptions.mean()),
            mtbf_s=mtbf_s,
            checkpoint_every=saved.every if saved else None,
            interval_s=operation.segment_s - operation.checkpoint_s if saved else None,
            daly_interval_s=daly_s,
            spares=spares,
            paid_gpus=gpus,
            gpu_hours=gpu_hours,
            cost=_scaled(gpu_hours, self.price.amount) if self.price else None,
            sources=tuple(_sources(self.scenario)),
        )

    def _remedies(self, summary: LongRun) -> Iterator[Remedy]:
        """Each change simulated with the same draws, if it saves time."""
        base = self.scenario
        if base.reliability and base.reliability.spares == "auto":
            base = base.having("reliability", spares=summary.spares)
        for what, changes in _changes(base, summary.spares):
            changed, settings = base, []
            for path, value in changes.items():
                section, _, name = path.rpartition(".")
                changed = changed.having(section, **{name: value})
                settings.append(_setting(self.scenario, path, value))
            other = replace(self, scenario=changed)
            try:
                times_s = other.simulated(other.operation(other.spares()), summary.runs).time_s
            except InputError:  # such as a write that takes longer than its interval
                continue
            time_s = float(np.median(times_s))
            if (saved_s := summary.time_s.p50 - time_s) > _WORTH * summary.time_s.p50:
                yield Remedy(what, tuple(settings), time_s, saved_s)


def _changes(scenario: Scenario, spares: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Changes of one thing each, in words, and by the attributes that they set."""
    reliability, write = scenario.reliability, scenario.workload.checkpoint_write
    if reliability is None:
        return
    key = "workload.checkpoint_write"
    if write is None:
        yield "checkpoints over an assumed 1 GB/s", {key: _CHECKPOINTS}
    else:
        yield "the best checkpoint interval", {f"{key}.every": "auto"}
        yield "asynchronous checkpoints", {f"{key}.mode": "async"}
        rates = [name for name in type(write).model_fields if name.endswith("bytes_per_s")]
        stated = {name: getattr(write, name) for name in rates if getattr(write, name)}
        if stated:
            twice = {f"{key}.{name}": 2 * rate for name, rate in stated.items()}
            yield "storage of twice the bandwidth", twice
    halved = {
        "failures noticed in half the time": ("detection_s",),
        "spare nodes in half the time": ("reschedule_s",),
        "a start in half the time": ("init_s", "init_per_rank_s"),
        "a checkpoint loaded in half the time": ("load_s",),
    }
    for what, names in halved.items():
        halves = {f"reliability.{name}": getattr(reliability, name) for name in names}
        if None not in halves.values():
            yield what, {path: seconds / 2 for path, seconds in halves.items()}
    if reliability.spares is not None:
        more = max(1, spares)
        yield counted(more, "more spare node"), {"reliability.spares": spares + more}
        yield "fewer nodes in place of a wait", {"reliability.elastic": True}
    if slow := reliability.stragglers:
        sooner = {"reliability.stragglers.found_after_s": slow.found_after_s / 2}
        yield "stragglers found in half the time", sooner


def _setting(scenario: Scenario, path: str, value: Any) -> str:
    """What `--set` takes for a value at a path of attributes."""
    names, part = [], scenario
    for name in path.split("."):
        names.append(type(part).model_fields[name].alias or name)
        part = getattr(part, name)
    if value is _CHECKPOINTS:
        value = "{every: auto, bandwidth: 1 GB/s}"
    elif path.endswith("bytes_per_s"):
        value = format_bytes_per_s(value)
    elif path.endswith("_s"):
        value = f"{value:g} s"
    return setting(".".join(names), value)


def _sources(scenario: Scenario) -> Iterator[Provenance]:
    """Yields where the inputs of a long run are from; a default's are assumed."""
    reliability = scenario.reliability or Reliability()
    for name, preset in (
        ("reliability", reliability.failures),
        ("spot", reliability.spot and reliability.spot.failures),
    ):
        if preset:
            yield Provenance(f"{name}.failures", failures_of(preset)["source"], "published")
    names = {"detection_s": "detection", "reschedule_s": "reschedule", "init_s": "init"}
    names |= {"init_per_rank_s": "init_per_rank"}
    names |= {"repair_s": "repair"} if reliability.spares is not None else {}
    for name, key in names.items():
        duration = format_long_duration(getattr(reliability, name))
        is_stated = name in reliability.model_fields_set
        yield Provenance(f"reliability.{key}", duration, "stated" if is_stated else "assumed")


def _distribution(values: NDArray[np.float64]) -> Distribution:
    p10, p50, p90 = (float(value) for value in np.quantile(values, (0.1, 0.5, 0.9)))
    return Distribution(float(values.mean()), p10, p50, p90)


def _scaled(values: Distribution, factor: float) -> Distribution:
    return Distribution(
        *(factor * value for value in (values.mean, values.p10, values.p50, values.p90))
    )
