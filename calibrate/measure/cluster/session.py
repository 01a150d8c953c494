"""`measure`: run a plan in a job, and keep the record whole after every measurement."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch

from calibrate.measure.cluster.plan import Options, Task, default_plan, teams
from calibrate.measure.cluster.record_file import first_record, write_record
from calibrate.measure.cluster.timing import WARMUPS, RoundTime, TaskTimer
from calibrate.measure.host.environment import check_same, one_host_as_several, rank_facts
from calibrate.measure.host.machine import free_memory_bytes
from calibrate.measure.model.user_code import find_function
from calibrate.measure.ranks.job import Job, on_the_cpu, taking_part
from calibrate.measure.ranks.launch import Reporter, run_rank
from calibrate.records.record import Measurement, Record
from ddpsim.units import format_bytes, format_duration

_UNSURE = 1.5  # a task may take this many times its share before it is left out
_USUAL_FREE_BYTES = 4 * 2**30  # assumed for a rank where the machine does not tell
_MEMORY_SHARE = 0.25  # of what is free, by default


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
    known: dict[tuple[object, ...], tuple[int, RoundTime]] = field(default_factory=dict)

    def share_s(self) -> float:
        """Seconds that the next task may take; call once a task."""
        left = max(0.0, self.total_s - self.spent_s)
        share = left * self.weights[0] / sum(self.weights)
        del self.weights[0]
        return share

    def least_s(self, task: Task) -> float:
        """Seconds of the fewest repetitions, told from the last size of the series; 0: unknown."""
        size, last = self.known.get(task.series, (0, RoundTime()))
        growth = task.first.size_bytes / size if size else 1.0
        return last.of_larger(growth) * (WARMUPS + task.repetitions[0])


class _Session:
    """One run of `measure` on one rank."""

    def __init__(
        self,
        job: Job,
        options: Options,
        plan: Sequence[Task] | None,
        loader: Callable[[], Iterable[object]] | None,
    ) -> None:
        self._job, self._options = job, options
        self._timer = TaskTimer(job, options, loader)
        self._plan, self._began = plan, time.monotonic()

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
            problem, taken, measured = self._timer.measure(task, share_s, left_s)
        if problem:
            reporter.done()
            return _skip(task, problem, record, reporter)
        budget.known[task.series] = (task.first.size_bytes, taken)
        for measurement in measured:
            record = record.with_measurement(measurement)
            for note in measurement.notes:
                reporter.say(f"warning   {task}: {note}")
        self._save(record)
        samples = measured[0].samples_s
        in_short = f"{format_duration(median(samples))} (median of {len(samples)})"
        reporter.done(f"measured  {task}: {in_short}")
        return record


def _skip(task: Task, problem: str, record: Record, reporter: Reporter) -> Record:
    """The record, whose details tell one more thing that was not measured, and why."""
    line = f"{task}: {problem}"
    reporter.say(f"skipped   {line}")
    details = record.environment.details
    told = "\n".join([*filter(None, [details.get("skipped")]), line])
    here = record.environment.model_copy(update={"details": details | {"skipped": told}})
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
