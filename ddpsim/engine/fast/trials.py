"""Jobs that are simulated together, and their instructions side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from ddpsim.cluster.algorithms.max_plus import Ticks
from ddpsim.cluster.cost import CollectiveCost
from ddpsim.cluster.network import NO_TRAFFIC, Traffic
from ddpsim.cluster.process_groups import cost_of
from ddpsim.cluster.transfers import Transfer
from ddpsim.engine.fast.host import Host, Script
from ddpsim.engine.fast.work_sums import WorkSums
from ddpsim.strategies.instructions import Communicate, Compute, Instruction

__all__ = [
    "Trial",
    "TrialStep",
    "TrialWork",
    "column",
    "distinct",
    "drawn",
    "of_lanes",
    "sent",
    "side_by_side",
]


@dataclass(frozen=True)
class Trial:
    """A job among those simulated together; slowdowns and stalls are [rank, iteration].

    `sums`: of its work on its ranks, where their slowdowns last; `traffic`: another job's.
    """

    host: Host
    cost: CollectiveCost
    slowdowns: npt.NDArray[np.float64] | None = None
    stalls_ns: npt.NDArray[np.int64] | None = None
    sums: WorkSums | None = None
    traffic: Traffic = NO_TRAFFIC


@dataclass(frozen=True, slots=True)
class TrialStep:
    """One instruction as each trial has it, or as all do; its offset is a number or [trials, 1]."""

    offset_ns: Ticks | float
    each: tuple[Instruction, ...]


@dataclass(frozen=True, slots=True)
class TrialWork:
    """Instructions to compute, one after the other: offsets and device times [works, trials, 1].

    Of `trials` there is one where all have the same.
    """

    offset_ns: Ticks
    device_ns: Ticks

    @classmethod
    def of(cls, timed: Sequence[Sequence[tuple[int, Instruction]]]) -> TrialWork | None:
        """What takes the device's time; None where nothing does."""
        works = [
            [(offset, i.device_ns) for offset, i in each if isinstance(i, Compute)]
            for each in timed
        ]
        figures = np.array([each for each in works if any(ns for _, ns in each)], dtype=np.float64)
        return cls(figures[..., :1], figures[..., 1:]) if len(figures) else None

    def split(self, most: int | None) -> Iterator[TrialWork]:
        """The same in pieces of so many works at most."""
        many = most or len(self.device_ns)
        for i in range(0, len(self.device_ns), many):
            yield TrialWork(self.offset_ns[i : i + many], self.device_ns[i : i + many])


def side_by_side(scripts: Sequence[Script], most: int | None) -> list[TrialStep | TrialWork]:
    """The instructions of all scripts side by side, those to compute together, `most` at once."""
    steps: list[TrialStep | TrialWork] = []
    timed = zip(*(script.instructions for script in scripts), strict=True)
    for computes, group in groupby(timed, key=lambda each: isinstance(each[0][1], Compute)):
        if not computes:
            steps += [
                TrialStep(column([offset for offset, _ in each]), tuple(i for _, i in each))
                for each in group
            ]
        elif work := TrialWork.of(list(group)):
            steps += work.split(most)
    return steps


def of_lanes(figures: Ticks, trials: npt.NDArray[np.int64]) -> Ticks:
    """[works, trials, 1] to [lanes, works], or [1, works] where all trials have the same."""
    return figures[:, 0].T if figures.shape[1] == 1 else figures[:, trials, 0].T


def sent(trials: Sequence[Trial], step: TrialStep) -> list[Transfer]:
    """What each trial sends; those that share a cost and a size ask once."""
    found: dict[tuple[int, str, str, int], Transfer] = {}
    transfers = []
    each = step.each * (len(trials) // len(step.each))
    for trial, launch in zip(trials, each, strict=True):
        if isinstance(launch, Communicate):
            key = (id(trial.cost), launch.group, launch.operation, launch.size_bytes)
            if key not in found:
                cost = cost_of(trial.cost, launch.group)
                found[key] = cost.transfer(launch.operation, launch.size_bytes)
            transfers.append(found[key])
    return transfers


def column(values: Sequence[float]) -> Ticks | float:
    """[trials, 1]; a number where all are equal."""
    if len(set(values)) == 1:
        return float(values[0])
    return np.array(values, dtype=np.float64).reshape(-1, 1)


def distinct(hosts: Sequence[Host]) -> Sequence[Host]:
    """One host if it is that of all trials."""
    return hosts[:1] if all(host is hosts[0] for host in hosts) else hosts


def drawn(trials: Sequence[Trial], ranks: int, number: int) -> tuple[Ticks | None, Ticks | None]:
    """Slowdowns and stalls of an iteration, [trials, ranks]; None where there are none."""
    found: list[Ticks | None] = []
    for name, usual in (("slowdowns", 1.0), ("stalls_ns", 0.0)):
        rows = [getattr(trial, name) for trial in trials]
        if all(row is None for row in rows):
            found.append(None)
            continue
        none = np.full(ranks, usual)
        at = [none if row is None else row[:, min(number, row.shape[1] - 1)] for row in rows]
        found.append(np.stack(at))
    return found[0], found[1]
