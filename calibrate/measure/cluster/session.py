"""`measure`: run a plan in a job, and keep the record whole after every measurement."""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field

from calibrate.files import FileName, check_outputs
from calibrate.measure.clock import no_collection
from calibrate.measure.cluster.plan import Task, default_plan, teams
from calibrate.measure.cluster.rounds import build_round
from calibrate.measure.cluster.work import Round
from calibrate.measure.errors import MeasureError, first_line
from calibrate.measure.host.environment import (
    check_same,
    check_same_machine,
    environment,
    one_host_as_several,
    rank_facts,
)
from calibrate.measure.host.machine import free_memory_bytes, stolen_s
from calibrate.measure.model.reference import find_function
from calibrate.measure.ranks.job import Job, on_the_cpu, taking_part
from calibrate.measure.ranks.launch import local
from calibrate.measure.ranks.progress import Reporter
from calibrate.measure.ranks.rank import run_rank
from calibrate.records.record import SCHEMA, Kind, Measurement, Record, load_record, save_record
from ddpsim.errors import DdpsimError
from ddpsim.units import format_bytes, format_duration

__all__ = ["Options", "measure", "measure_locally", "relative_mad"]

_T = TypeVar("_T")
WARMUPS = 3
NOISY = 0.10
_CALM = 0.02  # of a measurement may be stolen by a hypervisor; else it is taken again
_TRIES = 3
_TELLING_S = 1.0  # over less, the ticks in which it is told mean little
_LONG_S = 0.02  # rounds longer than this are waited for one by one
_MOST_WAIT = 0.5  # of the time limit, which ranks that take no part spend waiting for the rounds
_UNSURE = 1.5  # a task may take this many times its share before it is left out
_USUAL_FREE_BYTES = 4 * 2**30  # assumed for a rank where the machine does not tell
_MEMORY_SHARE = 0.25  # of what is free, by default
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class Options(BaseModel):
    """What to measure, and how long."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    output: FileName = Field(description="the record, JSON")
    time_budget_s: float = Field(600.0, gt=0, description="for the whole plan")
    memory_budget_bytes: int | None = Field(
        None, gt=0, description="of one rank; default: a quarter of what is free, shared by ranks"
    )
    resume: bool = Field(default=False, description="keep what the record already holds")
    most_repetitions: int | None = Field(None, ge=1, description="of each measurement")
    timeout_s: float = Field(120.0, gt=0, description="wait for the other ranks, each time")
    only: tuple[Kind, ...] = Field((), description="kinds to measure; none: all")
    data_loader: str | None = Field(None, description="MODULE:FUNCTION returning an iterable")
    line_rate_bytes_per_s: float | None = Field(None, gt=0, description="of a node's link")
    comm_first: bool = Field(
        default=False, description="gloo's threads before compute, if permitted"
    )


def measure(options: Options, plan: Sequence[Task] | None = None) -> Record:
    """Measure in the job of torchrun's variables; every rank calls this, rank 0 keeps the record.

    Returns the record on every rank. Raises MeasureError where ranks differ, a peer is lost or not
    reached, the record is there already, cannot be written or resumed; what was measured until
    then is in the file.
    """
    loader = find_function(options.data_loader) if options.data_loader else None
    kept = _kept(options.output)
    with taking_part(options.timeout_s, kept, comm_first=options.comm_first) as job:
        return _Session(job, options, plan, loader).run()


def measure_locally(ranks: int, options: Options, nodes: int = 1) -> Record:
    """The same in a job of ranks that are started here; see `calibrate.measure.ranks.launch`."""
    kept = _kept(options.output)
    job = options.model_dump_json()
    local(ranks, "calibrate.measure.cluster.session", job, kept=kept, nodes=nodes)
    return load_record(options.output)


def relative_mad(samples_s: Sequence[float]) -> float:
    """Median absolute deviation over the median, both of the samples; 0 for a single one."""
    middle = median(samples_s)
    return median(abs(s - middle) for s in samples_s) / middle if middle > 0 else 0.0


def _kept(path: Path) -> str:
    return (
        f"What was measured so far is in {path}, if it is there yet; the same command with "
        "--resume goes on from it."
    )


@dataclass
class _Budget:
    """Time left, shared among the tasks left by their weights; the same on every rank."""

    total_s: float
    weights: list[float]
    spent_s: float = 0.0
    known: dict[tuple[object, ...], tuple[int, float]] = field(default_factory=dict)

    def share_s(self) -> float:
        """Seconds that the next task may take; call once a task."""
        left = max(0.0, self.total_s - self.spent_s)
        share = left * self.weights[0] / sum(self.weights)
        del self.weights[0]
        return share

    def least_s(self, task: Task) -> float:
        """Seconds of the fewest repetitions, told from the last size of the series; 0: unknown."""
        size, seconds = self.known.get(task.series, (0, 0.0))
        growth = max(1.0, task.first.size_bytes / size) if size else 1.0
        return seconds * growth * (WARMUPS + task.repetitions[0])


class _Session:
    """One run of `measure` on one rank."""

    def __init__(
        self,
        job: Job,
        options: Options,
        plan: Sequence[Task] | None,
        loader: Callable[[], Iterable[object]] | None,
    ) -> None:
        self._job, self._options, self._loader = job, options, loader
        self._plan, self._began = plan, time.monotonic()

    def run(self) -> Record:
        """Measure what is not in the record yet."""
        job, options = self._job, self._options
        facts = job.everyone(rank_facts(job))
        check_same(facts)
        record = self._first_record()
        held = {m.key for m in record.measurements}
        tasks = [task for task in self._tasks() if not held.issuperset(task.keys)]
        job.open_groups([team.ranks for team in teams(job.place.layout)])
        memory = self._memory_bytes()
        fitting = [task for task in tasks if task.memory_bytes <= memory]
        budget = _Budget(options.time_budget_s, [task.weight for task in fitting])
        with Reporter(len(fitting), speaks=job.rank == 0) as reporter:
            layout, here = record.layout, record.environment
            ranks = f"{layout.nodes} x {layout.gpus_per_node} ranks"
            reporter.say(f"measuring {here.backend} on {ranks}: {here.machine}")
            if warning := on_the_cpu(job):
                reporter.say(f"warning   {warning}")
            if shared := one_host_as_several(facts):
                reporter.say(f"warning   {shared}")
            if held:
                reporter.say(f"{options.output} holds {len(held)} measurements already")
            elif options.resume:
                reporter.say(f"{options.output} held no measurement: begun anew")
            for task in fitting:
                reporter.begin(str(task))
                record = self._one(task, record, budget, reporter)
            for task in tasks:
                if task not in fitting:
                    record = _skip(task, _too_large(task, memory), record, reporter)
            self._save(record)
            reporter.say(f"{len(record.measurements)} measurements in {options.output}")
        return record

    def _tasks(self) -> list[Task]:
        layout = self._job.place.layout
        gpu = self._job.device.type == "cuda"
        plan = default_plan(layout, gpu=gpu, data_loader=self._options.data_loader)
        wanted = self._options.only
        return [
            task
            for task in (plan if self._plan is None else self._plan)
            if not wanted or task.first.kind in wanted
        ]

    def _first_record(self) -> Record:
        """An empty record, or the one to resume, as rank 0 has it."""
        problem, record = "", None
        if self._job.rank == 0:
            try:
                record = self._load()
                save_record(record, self._options.output)
            except (DdpsimError, OSError) as error:
                problem = self._unwritten(error) if isinstance(error, OSError) else str(error)
        self._job.check(problem)
        record = self._job.from_first(record)
        if record is None:  # pragma: no cover -- rank 0 always has one
            raise MeasureError("rank 0 has no record")
        return record

    def _load(self) -> Record:
        path, job = self._options.output, self._job
        layout = job.place.layout.model_copy(
            update={"line_rate_bytes_per_s": self._options.line_rate_bytes_per_s}
        )
        fresh = Record(environment=environment(job, rank_facts(job)), layout=layout)
        if _is_free(path, resume=self._options.resume):
            return fresh
        old = load_record(path)
        check_same_machine(old, fresh, path)
        details = {k: v for k, v in old.environment.details.items() if k != "skipped"}
        here = old.environment.model_copy(update={"details": details})
        rate = fresh.layout.line_rate_bytes_per_s or old.layout.line_rate_bytes_per_s
        layout = old.layout.model_copy(update={"line_rate_bytes_per_s": rate})
        return old.model_copy(update={"environment": here, "layout": layout})

    def _memory_bytes(self) -> int:
        """What a rank may use: the least over the ranks."""
        given = self._options.memory_budget_bytes
        share = int(_MEMORY_SHARE * _free_bytes(self._job))
        return int(min(row[0] for row in self._job.numbers([given or share])))

    def _one(self, task: Task, record: Record, budget: _Budget, reporter: Reporter) -> Record:
        budget.spent_s = self._job.from_first(time.monotonic() - self._began)
        share_s, least_s = budget.share_s(), budget.least_s(task)
        problem = _too_long(share_s, least_s)
        measured: list[Measurement] = []
        round_s = 0.0
        if not problem:
            left_s = budget.total_s - budget.spent_s
            problem, round_s, measured = self._measure(task, share_s, left_s)
        if problem:
            reporter.done()
            return _skip(task, problem, record, reporter)
        for measurement in measured:
            record = record.with_measurement(measurement)
            budget.known[task.series] = (task.first.size_bytes, round_s)
            for note in measurement.notes:
                reporter.say(f"warning   {task}: {note}")
        self._save(record)
        reporter.done(f"measured  {task}: {_in_short(measured[0])}")
        return record

    def _measure(
        self, task: Task, share_s: float, left_s: float
    ) -> tuple[str, float, list[Measurement]]:
        """A reason why not, or a round's seconds and one measurement for each slot."""
        run, problem = self._everyone_does(lambda: self._built(task))
        if problem:
            return problem, 0.0, []
        first, problem = self._everyone_does(lambda: self._first(task, run))
        if problem or first is None:
            return problem, 0.0, []
        least, most = task.repetitions
        second, second_s = self._warm(task, run)
        least_s = second_s * (1 + least)
        if least_s > left_s:
            return f"would take {format_duration(least_s)}, more than the time left", 0.0, []
        third, third_s = self._warm(task, run)
        round_s = (second_s + third_s) / 2
        warm_by_rank = self._gather(task, [first, second, third])
        wanted = round(share_s / round_s) - WARMUPS if round_s > 0 else most
        within = round(_MOST_WAIT * self._options.timeout_s / round_s) if round_s > 0 else most
        wanted = min(wanted, within)
        count = min(most, max(least, wanted), self._options.most_repetitions or most)
        rounds, stolen = self._calm_rounds(task, run, count, paced=round_s > _LONG_S)
        by_rank = self._gather(task, rounds)
        measured = [
            _measurement(task, slot, warm_by_rank, by_rank, stolen)
            for slot in range(len(task.slots))
        ]
        return "", round_s, measured

    def _calm_rounds(
        self, task: Task, run: Round | None, count: int, *, paced: bool
    ) -> tuple[list[list[float]], float]:
        """Rounds, and the share of them that a hypervisor stole; the calmest of a few tries."""
        tries: list[tuple[float, list[list[float]]]] = []
        while len(tries) < _TRIES and all(stolen > _CALM for stolen, _ in tries):
            began, stolen_before_s = time.monotonic(), stolen_s()
            rounds = self._rounds(task, run, count, paced=paced)
            took_s = max(_TELLING_S, time.monotonic() - began)
            here = 0.0 if run is None else (stolen_s() - stolen_before_s) / took_s
            tries.append((max(row[0] for row in self._job.numbers([here])), rounds))
        stolen, rounds = min(tries, key=lambda one: one[0])
        return rounds, stolen

    def _everyone_does(self, work: Callable[[], _T]) -> tuple[_T | None, str]:
        """What this rank's work gives; or why torch cannot do it, on the first rank that says so.

        Nobody goes on to wait for a rank that cannot. A GPU or a backend that failed does nothing
        any more: that is raised.
        """
        made, problem = None, ""
        try:
            made = work()
        except (torch.AcceleratorError, dist.DistBackendError):
            raise
        except (RuntimeError, NotImplementedError) as error:
            problem = first_line(error)
        problems = [said for said in self._job.everyone(problem) if said]
        return (None, problems[0]) if problems else (made, "")

    def _built(self, task: Task) -> Round | None:
        """Nothing on a rank that has no part."""
        takes_part = self._job.rank in task.team.ranks
        return build_round(task, self._job, self._loader) if takes_part else None

    def _first(self, task: Task, run: Round | None) -> list[float]:
        """Times of the first round, which is none like the others."""
        if run is None:
            return [math.nan] * len(task.slots)
        return [self._job.clock.read(lap) for lap in run()]

    def _warm(self, task: Task, run: Round | None) -> tuple[list[float], float]:
        """A round, and how long it takes by the clock: a lap may be one of many in it."""
        began = time.monotonic()
        (times,) = self._rounds(task, run, 1)
        return times, max(row[0] for row in self._job.numbers([time.monotonic() - began]))

    def _rounds(
        self, task: Task, run: Round | None, count: int, *, paced: bool = False
    ) -> list[list[float]]:
        """Times of rounds by slot, after a barrier; not-a-number on a rank that has no part.

        `paced`: each is waited for, so that NCCL's time limit is for one and not for all of them.
        """
        laps = []
        with no_collection():
            self._job.barrier()
            if run is None:
                return [[math.nan] * len(task.slots)] * count
            for _ in range(count):
                laps.append(run())
                if paced:
                    self._job.clock.reach(laps[-1][-1].end)
        return [[self._job.clock.read(lap) for lap in one] for one in laps]

    def _gather(self, task: Task, rounds: Sequence[Sequence[float]]) -> list[list[list[float]]]:
        """Times by rank that takes part, round and slot."""
        slots = len(task.slots)
        rows = self._job.numbers([seconds for one in rounds for seconds in one])
        return [
            [rows[rank][i : i + slots] for i in range(0, len(rows[rank]), slots)]
            for rank in task.team.ranks
        ]

    def _save(self, record: Record) -> None:
        problem = ""
        if self._job.rank == 0:
            try:
                save_record(record, self._options.output)
            except OSError as error:
                problem = self._unwritten(error)
        self._job.check(problem)

    def _unwritten(self, error: OSError) -> str:
        path = self._options.output
        is_full = error.errno in _NO_ROOM
        reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror
        begin = f"{path} cannot be written: {reason}"
        if not _is_there(path):
            return f"{begin}: {'make room, or ' * is_full}name another file"
        mend = "make room" if is_full else "mend that"
        return f"{begin}. Its last whole version is as it was; {mend} and go on with --resume"


def _is_free(path: Path, *, resume: bool) -> bool:
    """Whether a record begins anew; raises DdpsimError where what is there forbids it."""
    if not path.exists():
        return True
    if not path.is_dir() and not path.is_file():
        raise MeasureError(f"{path} is a device or a pipe, which keeps no record: name a file")
    if not resume or path.is_dir():
        check_outputs([(path, SCHEMA)])
    if not path.stat().st_size:
        return True
    if not resume:
        raise MeasureError(
            f"{path} is there already: go on from it with --resume, or name another file"
        )
    return False


def _is_there(path: Path) -> bool:
    """Whether a file is, as far as can be told."""
    try:
        return path.is_file()
    except OSError:
        return False


def _skip(task: Task, problem: str, record: Record, reporter: Reporter) -> Record:
    """The record, whose details tell one more thing that was not measured, and why."""
    line = f"{task}: {problem}"
    reporter.say(f"skipped   {line}")
    details = record.environment.details
    told = "\n".join([*filter(None, [details.get("skipped")]), line])
    here = record.environment.model_copy(update={"details": details | {"skipped": told}})
    return record.model_copy(update={"environment": here})


def _too_large(task: Task, memory: int) -> str:
    needed, budget = format_bytes(task.memory_bytes), format_bytes(memory)
    return f"needs {needed}, more than the memory budget of {budget}"


def _too_long(share_s: float, least_s: float) -> str:
    """Why a task does not fit into the time left; empty if it does."""
    if share_s <= 0:
        return "the time budget is spent"
    if least_s > _UNSURE * share_s:
        return (
            f"would take {format_duration(least_s)}, "
            f"more than its share of the time budget, {format_duration(share_s)}"
        )
    return ""


def _slowest(by_rank: Sequence[Sequence[Sequence[float]]], slot: int) -> tuple[float, ...]:
    """Of each round, the time of the slowest rank."""
    return tuple(max(one[slot] for one in rounds) for rounds in zip(*by_rank, strict=True))


def _measurement(
    task: Task,
    slot: int,
    warm: Sequence[Sequence[Sequence[float]]],
    by_rank: Sequence[Sequence[Sequence[float]]],
    stolen: float,
) -> Measurement:
    what, samples = task.slots[slot], _slowest(by_rank, slot)
    spread = relative_mad(samples)
    notes = []
    if spread > NOISY:
        notes.append(f"noisy: {what.kind} {what.variant} varies by {spread:.0%} (MAD / median)")
    if stolen > _CALM:
        notes.append(f"the hypervisor ran others on these cores for {stolen:.0%} of the time")
    return Measurement(
        kind=what.kind,
        variant=what.variant,
        group=task.team.group,
        nodes=task.team.nodes,
        gpus_per_node=task.team.gpus_per_node,
        size_bytes=what.size_bytes,
        parameters=what.parameters,
        warmup_s=_slowest(warm, slot),
        samples_s=samples,
        samples_by_rank_s=tuple(tuple(one[slot] for one in rank) for rank in by_rank)
        if task.by_rank
        else (),
        notes=tuple(notes),
    )


def _in_short(measurement: Measurement) -> str:
    samples = measurement.samples_s
    return f"{format_duration(median(samples))} (median of {len(samples)})"


def _free_bytes(job: Job) -> int:
    """Free memory for one rank of this machine: the GPU's, or its part of the node's."""
    if job.device.type == "cuda":
        return int(torch.cuda.mem_get_info(job.device)[0])
    free_bytes = free_memory_bytes()
    return _USUAL_FREE_BYTES if free_bytes is None else free_bytes // job.place.local_world_size


if __name__ == "__main__":
    run_rank(lambda options: measure(Options.model_validate_json(options)))
