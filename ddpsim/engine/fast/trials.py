"""Jobs that are simulated together, and their instructions side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ddpsim.cluster.algorithms.max_plus import Ticks
from ddpsim.cluster.process_groups import cost_of
from ddpsim.cluster.transfers import ProcessGroup, Transfer
from ddpsim.engine.compiled import CompiledStep
from ddpsim.engine.fast.host import Batches, Host, Trial
from ddpsim.engine.fast.lane import PER_MILLE
from ddpsim.strategies.instructions import Communicate, Compute, Instruction


@dataclass(frozen=True, slots=True)
class TrialStep:
    """One instruction as each trial has it, or as all do; its offset is a number or [trials, 1]."""

    offset_ns: Ticks | float
    each: tuple[Instruction, ...]

    @property
    def first(self) -> Instruction:
        """Return what the first trial has."""
        return self.each[0]


@dataclass(frozen=True, slots=True)
class TrialWork:
    """Works that follow each other: offsets and device times [works, trials, 1].

    Of `trials` there is one where all have the same. `offset_ns`: the last offset, or the first one
    where hosts block, a number or [trials, 1]; `first`: of the first trial.
    """

    offsets_ns: Ticks
    device_ns: Ticks
    offset_ns: Ticks | float
    first: Compute

    @classmethod
    def of(
        cls, figures: Ticks, first: Compute, most: int | None, *, blocks: bool = False
    ) -> Iterator[TrialWork]:
        """The works of `figures`, offsets and device times [works, trials, 2], `most` at once."""
        many = most or max(1, len(figures))
        for begin in range(0, len(figures), many):
            some = figures[begin : begin + many]
            last_ns = some[0 if blocks else -1, :, 0]
            yield cls(some[..., :1], some[..., 1:], column(last_ns.tolist()), first)


def side_by_side(
    scripts: Sequence[CompiledStep], most: int | None, *, blocks: bool
) -> list[TrialStep | TrialWork]:
    """The parts of all scripts side by side, `most` works at once.

    Of works those remain that take the device's time, or, if it `blocks`, the host's.
    """
    works = [[work for part in script.parts for work in part.works] for script in scripts]
    figures = np.array([[(ns, i.device_ns) for ns, i in each] for each in zip(*works, strict=True)])
    figures = figures.reshape(-1, len(scripts), 2).astype(np.float64)
    takes_time: list[bool] = np.any(figures[..., 1] + blocks, axis=1).tolist()
    steps: list[TrialStep | TrialWork] = []
    place = 0
    for parts in zip(*(script.parts for script in scripts), strict=True):
        first, many = parts[0].first, len(parts[0].works)
        if isinstance(first, Compute):
            some, kept = figures[place : place + many], takes_time[place : place + many]
            steps += TrialWork.of(some if all(kept) else some[kept], first, most, blocks=blocks)
            place += many
        else:
            offset_ns = column([part.offset_ns for part in parts])
            steps.append(TrialStep(offset_ns, tuple(part.first for part in parts)))
    return steps


def of_lanes(figures: Ticks, lanes: slice, ranks: int) -> Ticks:
    """[figures, trials, ranks or 1] to [lanes, figures], or [1, figures] where all have the same.

    Lanes are the ranks of one trial after the other.
    """
    if figures.shape[1:] == (1, 1):
        return figures[:, 0].T
    places = np.arange(lanes.start, lanes.stop)
    each = np.broadcast_to(figures, (*figures.shape[:2], ranks))
    if figures.shape[1] == 1:
        return each[:, 0, places].T
    return each[:, places // ranks, places % ranks].T


def _sent(trials: Sequence[Trial], step: TrialStep) -> list[Transfer]:
    """What each trial sends; those that share a cost and a size ask once."""
    cache: dict[tuple[int, str, str, int], Transfer] = {}
    transfers = []
    each = step.each * (len(trials) // len(step.each))
    for trial, launch in zip(trials, each, strict=True):
        if isinstance(launch, Communicate):
            key = (id(trial.request.cost), launch.group, launch.operation, launch.size_bytes)
            if key not in cache:
                cost = cost_of(trial.request.cost, launch.group)
                cache[key] = cost.transfer(launch.operation, launch.size_bytes)
            transfers.append(cache[key])
    return transfers


def column(values: Sequence[float]) -> Ticks | float:
    """[trials, 1]; a number where all are equal."""
    if len(set(values)) == 1:
        return float(values[0])
    return np.array(values, dtype=np.float64).reshape(-1, 1)


def distinct(hosts: Sequence[Host]) -> Sequence[Host]:
    """One host if it is that of all trials."""
    return hosts[:1] if all(host is hosts[0] for host in hosts) else hosts


def loader_of(hosts: Sequence[Host]) -> Batches:
    """The loaders of all trials as one, of the same capacity; without any, none waits for data."""
    loaders = [loader for host in hosts if (loader := host.program.loader)]
    batch_ns: Any = column([loader.batch_ns for loader in loaders])
    return Batches(replace(loaders[0], batch_ns=batch_ns) if loaders else None, np.maximum)


def drawn(trials: Sequence[Trial], ranks: int, number: int) -> tuple[Ticks | None, Ticks | None]:
    """Slowdowns and stalls of an iteration, [trials, ranks]; None where there are none."""
    draws: list[Ticks | None] = []
    for name, usual in (("slowdowns", 1.0), ("stalls", 0.0)):
        rows = [getattr(trial.request, name) for trial in trials]
        if all(row is None for row in rows):
            draws.append(None)
            continue
        none = np.full(ranks, usual)
        at = [none if row is None else row[:, min(number, row.shape[1] - 1)] for row in rows]
        draws.append(np.stack(at))
    return draws[0], draws[1]


@dataclass(frozen=True, slots=True)
class TrialSent:
    """A collective of all trials: what each sends, or the one that all do.

    `slowing`: thousandths that compute takes under it, of all lanes or of each; None: as long.
    """

    transfers: Sequence[Transfer]
    group: ProcessGroup
    follows: int | None
    waits_for: int | None
    before_ns: Ticks | float
    after_ns: Ticks | float
    slowing: Ticks | float | None

    @classmethod
    def of(cls, step: TrialStep, trials: Sequence[Trial], ranks: int) -> TrialSent:
        """A step of these trials, on so many ranks each."""
        launches = [launch for launch in step.each if isinstance(launch, Communicate)]
        alike: dict[Transfer, Transfer] = {}
        transfers = [alike.setdefault(each, each) for each in _sent(trials, step)]
        slowing = column([float(PER_MILLE * each.interference.compute) for each in transfers])
        first = launches[0]
        return cls(
            transfers[:1] if len(alike) == 1 else transfers,
            first.group,
            first.follows,
            first.waits_for,
            column([launch.before_ns for launch in launches]),
            column([launch.after_ns for launch in launches]),
            (None if slowing == PER_MILLE else slowing)
            if isinstance(slowing, float)
            else np.repeat(slowing, ranks),
        )
