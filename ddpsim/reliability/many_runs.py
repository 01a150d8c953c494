"""Many runs at once, as arrays: each turn of the loop carries every run to its next event.

The tests hold it to a plain model in SimPy: the same times from the same draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ddpsim.reliability.operation import CAUSES, Operation

_Floats = NDArray[np.float64]
_Mask = NDArray[np.bool_]
_DERIVED = ("checkpointed_s", "restart_s", "save_s", "event_per_s", "most_missing")
_OF_ALL_RUNS = ("ended_s", "ended_interruptions", "back_s")
_MOST_EVENTS = 20_000  # of a run; what is left then takes as long as what was done
_BLOCK = 64  # events of each run that are drawn at once


class Draws:
    """Random numbers of so many runs, the same for the same seed.

    Each event of a run has a gap, exponential with mean 1, and a number from 0 to 1 for its kind.
    """

    def __init__(self, seed: int, runs: int) -> None:
        self._random = np.random.Generator(np.random.PCG64(seed))
        self._runs = runs
        self.gaps, self.kinds = np.empty((0, runs)), np.empty((0, runs))

    def reach(self, events: int) -> None:
        """Draw more until each run has so many."""
        while len(self.gaps) < events:
            shape = (max(_BLOCK, len(self.gaps)), self._runs)
            self.gaps = np.concatenate([self.gaps, self._random.standard_exponential(shape)])
            self.kinds = np.concatenate([self.kinds, self._random.random(shape)])


@dataclass(frozen=True)
class Runs:
    """What became of each run: its seconds, by cause too, and how often it was interrupted."""

    time_s: _Floats
    spent_s: dict[str, _Floats]
    interruptions: NDArray[np.int64]


def simulate_runs(operations: Sequence[Operation], draws: Draws) -> Runs:
    """Simulate one run of each operation, with the draws of its place in the sequence."""
    state = _State(operations, draws)
    while len(state.ids):
        state.turn()
    return Runs(state.ended_s, state.sums, state.ended_interruptions)


class _Columns:
    """An array of each figure of the operations, by its name there; any number of spares is -1."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        for name in (*(field.name for field in fields(Operation)), *_DERIVED):
            values = [getattr(each, name) for each in operations]
            if name == "spares":
                values = [-1 if value is None else value for value in values]
            is_float = name.endswith(("_s", "slowdown"))
            setattr(self, name, np.array(values, np.float64 if is_float else None))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> NDArray[Any]: ...


class _State:
    """The state of the runs that have not ended; `ids` are their places in the sequence.

    `at_s`: the work that is done, `saved_s`: what a crash would leave of it. `left_s`: of the
    restart. `gap_s`: to the next event, in time that the job is up or restarts.
    """

    def __init__(self, operations: Sequence[Operation], draws: Draws) -> None:
        runs = len(operations)
        self.draws, self.of = draws, _Columns(operations)
        self.ended_s = np.zeros(runs)
        self.ended_interruptions = np.zeros(runs, np.int64)
        self.sums = {cause: np.zeros(runs) for cause in CAUSES}
        self.sums["checkpoints"] += self.of.checkpointed_s
        self.sums["steps"] += self.of.work_s - self.of.checkpointed_s
        self.ids = np.arange(runs)
        self.time_s, self.at_s, self.saved_s = np.zeros((3, runs))
        self.left_s, self.rate = self.of.init_s.copy(), np.ones(runs)
        self.event, self.interruptions = np.zeros((2, runs), np.int64)
        self.found_s = np.full(runs, np.inf)
        self.due_s = self.of.maintenance_every_s.copy()
        # when each node that broke is there again: `broke` in all, `back` are already
        self.back_s = np.full((2, runs), np.inf)
        self.broke, self.back = np.zeros((2, runs), np.int64)
        self.next_back_s = np.full(runs, np.inf)  # while there are too few
        self.gap_s, self.kind = np.empty((2, runs))
        self._draw(np.arange(runs))

    def turn(self) -> None:
        """Carry every run through its restart and its steps to what comes first."""
        self._restart()
        struck, ended = self.gap_s <= 0, np.zeros(len(self.ids), bool)
        running = ~struck & (self.left_s <= 0)
        if running.any():
            causes = [
                (self.of.work_s - self.at_s) / self.rate,
                self.gap_s,
                self.due_s - self.time_s,
                self.found_s - self.time_s,
                self.next_back_s - self.time_s,
            ]
            until_s = np.maximum(np.minimum.reduce(causes), 0.0)
            until_s[~running] = 0.0
            done_s = until_s * self.rate
            self.at_s += done_s
            self.time_s += until_s
            self._add("slow_steps", until_s - done_s)
            ended, hit, due, detected, back = (running & (until_s >= cause) for cause in causes)
            struck |= hit & ~ended
            self.gap_s -= until_s
            self._planned(running & ~ended & ~struck, due, detected, back)
        if (tired := ~ended & (self.event > _MOST_EVENTS)).any():
            self._extrapolate(np.flatnonzero(tired))
            ended, struck = ended | tired, struck & ~tired
        if struck.any():
            self._strike(np.flatnonzero(struck))
        if ended.any():
            self._end(ended)

    def _add(self, cause: str, seconds: _Floats, rows: NDArray[np.int64] | None = None) -> None:
        """Count time that `self.time_s` has, or will have, for a cause."""
        self.sums[cause][self.ids if rows is None else self.ids[rows]] += seconds

    def _restart(self) -> None:
        restarting_s = np.minimum(self.gap_s, self.left_s)
        self.gap_s -= restarting_s
        self.left_s -= restarting_s
        self.time_s += restarting_s
        self._add("restarts", restarting_s)

    def _draw(self, rows: NDArray[np.int64]) -> None:
        """The next event of these runs."""
        events, ids = self.event[rows], self.ids[rows]
        self.draws.reach(int(events.max(initial=0)) + 1)
        per_s = self.of.event_per_s[rows]
        with np.errstate(divide="ignore"):
            self.gap_s[rows] = self.draws.gaps[events, ids] / per_s
        self.kind[rows] = self.draws.kinds[events, ids] * per_s
        self.event[rows] += 1

    def _strike(self, rows: NDArray[np.int64]) -> None:
        """What a crash, a notice or a straggler does."""
        kind, crashes = self.kind[rows], self.of.crash_per_s[rows]
        crash = kind < crashes
        notice = ~crash & (kind < crashes + self.of.notice_per_s[rows])
        is_up = self.left_s[rows] <= 0
        slows = ~crash & ~notice & is_up & np.isinf(self.found_s[rows])
        self._slow(rows[slows])
        saves = notice & self.of.saves_on_notice[rows]
        self._save(rows[saves & is_up])
        stopped = rows[crash | notice]
        self.interruptions[stopped] += 1
        self._lose(rows[(crash | notice) & ~saves])
        self._wait_for(rows[crash])
        noticed = rows[notice]
        wait_s = self.of.notice_replace_s[noticed]
        self.time_s[noticed] += wait_s
        self._add("waiting_for_nodes", wait_s, noticed)
        self._begin(stopped)
        self._draw(rows)

    def _slow(self, rows: NDArray[np.int64]) -> None:
        self.rate[rows] /= self.of.straggler_slowdown[rows]
        self.found_s[rows] = self.time_s[rows] + self.of.straggler_found_s[rows]

    def _save(self, rows: NDArray[np.int64]) -> None:
        """A checkpoint out of turn."""
        saving_s = self.of.save_s[rows]
        self.time_s[rows] += saving_s
        self._add("checkpoints", saving_s, rows)
        self.saved_s[rows] = self.at_s[rows]

    def _lose(self, rows: NDArray[np.int64]) -> None:
        """Back to the last checkpoint that can be loaded."""
        segment_s, at_s = self.of.segment_s[rows], self.at_s[rows]
        segments = np.floor(np.maximum(at_s - self.of.write_s[rows], 0.0) / segment_s)
        with np.errstate(invalid="ignore"):
            written_s = np.where(segments > 0, segments * segment_s, 0.0)
        self.saved_s[rows] = np.maximum(self.saved_s[rows], written_s)
        self._add("lost_work", at_s - self.saved_s[rows], rows)
        self.at_s[rows] = self.saved_s[rows]

    def _wait_for(self, rows: NDArray[np.int64], *, notices: bool = True) -> None:
        """Notice a broken node, if it crashed, and wait for another in its place."""
        if notices:
            detect_s = self.of.detect_s[rows]
            self.time_s[rows] += detect_s
            self._add("detection", detect_s, rows)
        wait_s = self.of.replace_s[rows].copy()
        counted = np.flatnonzero(self.of.spares[rows] >= 0)
        if len(counted):
            wait_s[counted] = self._replaced_s(rows[counted])
        self.time_s[rows] += wait_s
        self._add("waiting_for_nodes", wait_s, rows)

    def _replaced_s(self, rows: NDArray[np.int64]) -> _Floats:
        """The wait for a spare node, or for the first that comes back."""
        if self.broke.max() + 2 > len(self.back_s):
            self.back_s = np.concatenate([self.back_s, np.full_like(self.back_s, np.inf)])
        now_s = self.time_s[rows]
        self.back_s[self.broke[rows], self.ids[rows]] = now_s + self.of.repair_s[rows]
        self.broke[rows] += 1
        broken, first_s = self._broken(rows)
        room = self.of.spares[rows] + self.of.most_missing[rows]
        wait_s: _Floats = self.of.replace_s[rows]
        return wait_s + np.where(broken <= room, 0.0, first_s - now_s)

    def _broken(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], _Floats]:
        """How many nodes of each run are broken now, and when the first of them is back."""
        now_s, back, ids = self.time_s[rows], self.back[rows], self.ids[rows]
        while (is_back := self.back_s[back, ids] <= now_s).any():
            back += is_back
        self.back[rows] = back
        return self.broke[rows] - back, self.back_s[back, ids]

    def _begin(self, rows: NDArray[np.int64]) -> None:
        """Restart these jobs with the nodes that there are."""
        loads = self.saved_s[rows] > 0
        self.left_s[rows] = np.where(loads, self.of.restart_s[rows], self.of.init_s[rows])
        self.found_s[rows], self.rate[rows] = np.inf, 1.0
        counted = rows[self.of.spares[rows] >= 0]
        broken, first_s = self._broken(counted)
        missing = np.maximum(broken - self.of.spares[counted], 0)
        self.next_back_s[counted] = np.where(missing > 0, first_s, np.inf)
        self.rate[counted] -= missing / self.of.nodes[counted]

    def _planned(self, stopped: _Mask, due: _Mask, detected: _Mask, back: _Mask) -> None:
        """Stop for maintenance, a detected straggler or a node that is back: no step is lost."""
        due &= stopped
        detected &= stopped & ~due
        back &= stopped & ~due & ~detected
        rows = np.flatnonzero(due | detected | back)
        if not len(rows):
            return
        self._save(rows)
        for_maintenance = np.flatnonzero(due)
        takes_s = self.of.maintenance_s[for_maintenance]
        self.time_s[for_maintenance] += takes_s
        self._add("maintenance", takes_s, for_maintenance)
        self.due_s[for_maintenance] += self.of.maintenance_every_s[for_maintenance]
        self._wait_for(np.flatnonzero(detected), notices=False)
        self._begin(rows)

    def _extrapolate(self, rows: NDArray[np.int64]) -> None:
        """Extrapolate runs with so many events that their rate is known from the work so far."""
        work_s = self.of.work_s[rows]
        scale = work_s / np.maximum(self.at_s[rows], 1e-6 * work_s)
        self.time_s[rows] *= scale
        self.interruptions[rows] = self.interruptions[rows] * scale
        for cause in CAUSES[2:]:
            self.sums[cause][self.ids[rows]] *= scale

    def _end(self, ended: _Mask) -> None:
        """Note what has ended, and go on with the others."""
        self.ended_s[self.ids[ended]] = self.time_s[ended]
        self.ended_interruptions[self.ids[ended]] = self.interruptions[ended]
        for part in (self, self.of):
            for name, values in vars(part).items():
                if isinstance(values, np.ndarray) and name not in _OF_ALL_RUNS:
                    setattr(part, name, values[~ended])
