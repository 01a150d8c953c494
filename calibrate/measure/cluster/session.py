"""`measure`: run a plan in a job, and keep the record whole after every measurement."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from calibrate.measure.clock import Lap
from calibrate.measure.cluster.plan import Options, Task, default_plan, teams
from calibrate.measure.cluster.record_file import first_record, write_record
from calibrate.measure.cluster.rounds import Round, build_round
from calibrate.measure.errors import first_line
from calibrate.measure.host.environment import check_same, one_host_as_several, rank_facts
from calibrate.measure.host.machine import free_memory_bytes, stolen_s
from calibrate.measure.model.training import find_function
from calibrate.measure.ranks.job import Job, on_the_cpu, taking_part
from calibrate.measure.ranks.launch import Reporter, run_rank
from calibrate.records.record import Measurement, Record
from ddpsim.files import no_collection
from ddpsim.units import format_bytes, format_duration

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


def relative_mad(samples_s: Sequence[float]) -> float:
    """Median absolute deviation over the median, both of the samples; 0 for a single one."""
    middle = median(samples_s)
    return median(abs(s - middle) for s in samples_s) / middle if middle > 0 else 0.0


class RoundTime(NamedTuple):
    """Seconds of one round by the clock, and of what is timed in it: the part that sizes change."""

    whole_s: float = 0.0
    timed_s: float = 0.0

    def of_larger(self, times: float) -> float:
        """Seconds of a round of a message so many times as large."""
        return self.whole_s + (max(1.0, times) - 1) * min(self.timed_s, self.whole_s)


def _slowest(by_rank: Sequence[Sequence[Sequence[float]]], slot: int) -> tuple[float, ...]:
    """Seconds of the slowest rank in each round."""
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
        **task.described(what),
        warmup_s=_slowest(warm, slot),
        samples_s=samples,
        samples_by_rank_s=tuple(tuple(one[slot] for one in rank) for rank in by_rank)
        if task.by_rank
        else (),
        notes=tuple(notes),
    )


def measure(options: Options, plan: Sequence[Task] | None = None) -> Record:
    """Measure in the job of torchrun's variables; every rank calls this, rank 0 keeps the record.

    Returns the record on every rank. Raises MeasureError where ranks differ, a peer is lost or not
    reached, the record is there already, cannot be written or resumed; what was measured until
    then is in the file.
    """
    loader = find_function(options.data_loader) if options.data_loader else None
    with taking_part(options) as job:
        return _Session(job, options, plan, loader).run()


@dataclass
class Budget:
    """Time left, shared among the tasks left by their weights; the same on every rank."""

    total_s: float
    weights: list[float]
    spent_s: float = 0.0
    rounds: dict[tuple[object, ...], tuple[int, RoundTime]] = field(default_factory=dict)

    def share_s(self) -> float:
        """Seconds that the next task may take; call once a task."""
        left = max(0.0, self.total_s - self.spent_s)
        share = left * self.weights[0] / sum(self.weights)
        del self.weights[0]
        return share

    def least_s(self, task: Task) -> float:
        """Seconds of the fewest repetitions, told from the last size of the series; 0: unknown."""
        size, last = self.rounds.get(task.series, (0, RoundTime()))
        growth = task.first.size_bytes / size if size else 1.0
        return last.of_larger(growth) * (WARMUPS + task.repetitions[0])


class _Session:
    def __init__(
        self,
        job: Job,
        options: Options,
        plan: Sequence[Task] | None,
        loader: Callable[[], Iterable[object]] | None,
    ) -> None:
        self._job, self._options = job, options
        self._loader, self._plan, self._began = loader, plan, time.monotonic()

    def run(self) -> Record:
        """Measure what is not in the record yet."""
        job, options = self._job, self._options
        facts = job.everyone(rank_facts(job))
        check_same(facts)
        record = first_record(job, options)
        held = {m.key for m in record.measurements}
        tasks = [task for task in self._tasks() if not held.issuperset(task.keys)]
        job.open_groups([team.ranks for team in teams(job.place.layout)])
        memory = self._memory_bytes()
        fitting = [task for task in tasks if task.memory_bytes <= memory]
        budget = Budget(options.time_budget_s, [task.weight for task in fitting])
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
                    needed, budgeted = format_bytes(task.memory_bytes), format_bytes(memory)
                    problem = f"needs {needed}, more than the memory budget of {budgeted}"
                    record = _skip(task, problem, record, reporter)
            self._save(record)
            reporter.say(f"{len(record.measurements)} measurements in {options.output}")
        return record

    def _save(self, record: Record) -> None:
        """Write the record; raises MeasureError on every rank where rank 0 cannot."""
        self._job.first_does(lambda: write_record(record, self._options.output))

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

    def _memory_bytes(self) -> int:
        """What a rank may use: a share of its GPU's or its part of the node's, the least of all."""
        job, given = self._job, self._options.memory_budget_bytes
        if job.device.type == "cuda":
            free_bytes = int(torch.cuda.mem_get_info(job.device)[0])
        else:
            of_node = free_memory_bytes()
            ranks = job.place.local_world_size
            free_bytes = _USUAL_FREE_BYTES if of_node is None else of_node // ranks
        share = int(_MEMORY_SHARE * free_bytes)
        return int(min(row[0] for row in job.numbers([given or share])))

    def _one(self, task: Task, record: Record, budget: Budget, reporter: Reporter) -> Record:
        budget.spent_s = self._job.from_first(time.monotonic() - self._began)
        share_s, least_s = budget.share_s(), budget.least_s(task)
        problem = _too_long(share_s, least_s)
        measured: list[Measurement] = []
        if not problem:
            left_s = budget.total_s - budget.spent_s
            problem, taken, measured = self._timed(task, share_s, left_s)
        if problem:
            reporter.done()
            return _skip(task, problem, record, reporter)
        budget.rounds[task.series] = (task.first.size_bytes, taken)
        for measurement in measured:
            record = record.with_measurement(measurement)
            for note in measurement.notes:
                reporter.say(f"warning   {task}: {note}")
        self._save(record)
        samples = measured[0].samples_s
        in_short = f"{format_duration(median(samples))} (median of {len(samples)})"
        reporter.done(f"measured  {task}: {in_short}")
        return record

    def _timed(
        self, task: Task, share_s: float, left_s: float
    ) -> tuple[str, RoundTime, list[Measurement]]:
        """A reason why not, or what a round takes and one measurement for each slot."""
        run, problem = self._everyone_does(lambda: self._built(task))
        if problem or run is None:
            return problem, RoundTime(), []
        first, problem = self._everyone_does(lambda: self._read(run()))
        if problem or first is None:
            return problem, RoundTime(), []
        least, most = task.repetitions
        second, second_time = self._warm(task, run)
        least_s = second_time.whole_s * (1 + least)
        if least_s > left_s:
            problem_of_time = f"would take {format_duration(least_s)}, more than the time left"
            return problem_of_time, RoundTime(), []
        third, third_time = self._warm(task, run)
        taken = RoundTime(*(fmean(each) for each in zip(second_time, third_time, strict=True)))
        round_s = taken.whole_s
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
        return "", taken, measured

    def _calm_rounds(
        self, task: Task, run: Round, count: int, *, paced: bool
    ) -> tuple[list[list[float]], float]:
        """Rounds, and the share of them that a hypervisor stole; the calmest of a few tries."""
        tries: list[tuple[float, list[list[float]]]] = []
        while len(tries) < _TRIES and all(stolen > _CALM for stolen, _ in tries):
            began, stolen_before_s = time.monotonic(), stolen_s()
            laps = self._rounds(run, count, paced=paced)
            rounds = [self._read(one) for one in laps]
            took_s = max(_TELLING_S, time.monotonic() - began)
            here = (stolen_s() - stolen_before_s) / took_s if self._takes_part(task) else 0.0
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
        problems = [each for each in self._job.everyone(problem) if each]
        return (None, problems[0]) if problems else (made, "")

    def _takes_part(self, task: Task) -> bool:
        return self._job.rank in task.team.ranks

    def _built(self, task: Task) -> Round:
        """A round; of a rank that has no part its laps are no numbers."""
        if self._takes_part(task):
            return build_round(task, self._job, self._loader)
        return lambda: [Lap(math.nan, math.nan)] * len(task.slots)

    def _read(self, laps: Sequence[Lap]) -> list[float]:
        return [self._job.clock.read(lap) for lap in laps]

    def _warm(self, task: Task, run: Round) -> tuple[list[float], RoundTime]:
        """A round's times by slot, and how long it takes: a lap may do its work many times."""
        began = time.monotonic()
        (laps,) = self._rounds(run, 1)
        times = self._read(laps)
        whole_s = time.monotonic() - began
        timed_s = sum(lap.times * s for lap, s in zip(laps, times, strict=True))
        rows = self._job.numbers([whole_s, timed_s if self._takes_part(task) else 0.0])
        return times, RoundTime(*(max(row[i] for row in rows) for i in range(2)))

    def _rounds(self, run: Round, count: int, *, paced: bool = False) -> list[Sequence[Lap]]:
        """Laps of rounds by slot, after a barrier.

        `paced`: each is waited for, so that NCCL's time limit is for one and not for all of them.
        """
        laps: list[Sequence[Lap]] = []
        with no_collection():
            self._job.barrier()
            for _ in range(count):
                laps.append(run())
                if paced:
                    self._job.clock.reach(laps[-1][-1].end)
        return laps

    def _gather(self, task: Task, rounds: Sequence[Sequence[float]]) -> list[list[list[float]]]:
        """Times by rank that takes part, round and slot."""
        slots = len(task.slots)
        rows = self._job.numbers([seconds for one in rounds for seconds in one])
        return [
            [rows[rank][i : i + slots] for i in range(0, len(rows[rank]), slots)]
            for rank in task.team.ranks
        ]


def _skip(task: Task, problem: str, record: Record, reporter: Reporter) -> Record:
    """The record, whose details tell one more thing that was not measured, and why."""
    line = f"{task}: {problem}"
    reporter.say(f"skipped   {line}")
    details = record.environment.details
    skipped = "\n".join([*filter(None, [details.get("skipped")]), line])
    here = record.environment.model_copy(update={"details": details | {"skipped": skipped}})
    return record.model_copy(update={"environment": here})


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


if __name__ == "__main__":
    run_rank(measure, Options)
