"""One task of a plan, timed in rounds by all ranks together: from its warm-up to its samples."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from calibrate.measure.clock import Lap
from calibrate.measure.cluster.plan import Options, Task
from calibrate.measure.cluster.rounds import build_round
from calibrate.measure.cluster.work import Round
from calibrate.measure.errors import first_line
from calibrate.measure.host.machine import stolen_s
from calibrate.measure.ranks.job import Job
from calibrate.records.record import Measurement
from ddpsim.files import no_collection
from ddpsim.units import format_duration

_T = TypeVar("_T")
WARMUPS = 3
NOISY = 0.10
_CALM = 0.02  # of a measurement may be stolen by a hypervisor; else it is taken again
_TRIES = 3
_TELLING_S = 1.0  # over less, the ticks in which it is told mean little
_LONG_S = 0.02  # rounds longer than this are waited for one by one
_MOST_WAIT = 0.5  # of the time limit, which ranks that take no part spend waiting for the rounds


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


class TaskTimer:
    """Times the rounds of tasks in a job; every rank calls it alike."""

    def __init__(
        self, job: Job, options: Options, loader: Callable[[], Iterable[object]] | None
    ) -> None:
        self._job, self._options, self._loader = job, options, loader

    def measure(
        self, task: Task, share_s: float, left_s: float
    ) -> tuple[str, RoundTime, list[Measurement]]:
        """A reason why not, or what a round takes and one measurement for each slot."""
        run, problem = self._everyone_does(lambda: self._built(task))
        if problem:
            return problem, RoundTime(), []
        first, problem = self._everyone_does(lambda: self._first(task, run))
        if problem or first is None:
            return problem, RoundTime(), []
        least, most = task.repetitions
        second, second_time = self._warm(task, run)
        least_s = second_time.whole_s * (1 + least)
        if least_s > left_s:
            told = f"would take {format_duration(least_s)}, more than the time left"
            return told, RoundTime(), []
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
        self, task: Task, run: Round | None, count: int, *, paced: bool
    ) -> tuple[list[list[float]], float]:
        """Rounds, and the share of them that a hypervisor stole; the calmest of a few tries."""
        tries: list[tuple[float, list[list[float]]]] = []
        while len(tries) < _TRIES and all(stolen > _CALM for stolen, _ in tries):
            began, stolen_before_s = time.monotonic(), stolen_s()
            laps = self._rounds(task, run, count, paced=paced)
            rounds = [self._read(one) for one in laps]
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
        return self._read(_no_laps(task) if run is None else run())

    def _read(self, laps: Sequence[Lap]) -> list[float]:
        return [self._job.clock.read(lap) for lap in laps]

    def _warm(self, task: Task, run: Round | None) -> tuple[list[float], RoundTime]:
        """A round's times by slot, and how long it takes: a lap may do its work many times."""
        began = time.monotonic()
        (laps,) = self._rounds(task, run, 1)
        times = self._read(laps)
        whole_s = time.monotonic() - began
        timed_s = (
            0.0 if run is None else sum(lap.times * s for lap, s in zip(laps, times, strict=True))
        )
        rows = self._job.numbers([whole_s, timed_s])
        return times, RoundTime(*(max(row[i] for row in rows) for i in range(2)))

    def _rounds(
        self, task: Task, run: Round | None, count: int, *, paced: bool = False
    ) -> list[Sequence[Lap]]:
        """Laps of rounds by slot, after a barrier; not-a-number on a rank that has no part.

        `paced`: each is waited for, so that NCCL's time limit is for one and not for all of them.
        """
        laps: list[Sequence[Lap]] = []
        with no_collection():
            self._job.barrier()
            if run is None:
                return [_no_laps(task)] * count
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


def _no_laps(task: Task) -> list[Lap]:
    return [Lap(math.nan, math.nan)] * len(task.slots)


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
