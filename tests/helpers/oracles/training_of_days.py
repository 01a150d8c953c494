"""One run of days in SimPy, as it is told: segments of steps, and what stops them.

The plain model that `ddpsim.reliability.many_runs` must equal, time for time, from the same draws.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Any

import simpy

from ddpsim.reliability.operation import CAUSES, Operation

__all__ = ["Training", "simulate_run"]

_Events = Generator[simpy.Event, Any, Any]


def simulate_run(operation: Operation, draws: Iterable[tuple[float, float]]) -> Training:
    """Carry out one run; each draw is a gap of mean 1 and a number from 0 to 1 for its kind."""
    training = Training(simpy.Environment(), operation)
    training.start(draws)
    return training


@dataclass
class Training:
    """A job that trains, is hit, and starts again; `spent_s` is its time by cause."""

    clock: simpy.Environment
    asked: Operation
    spent_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    interruptions: int = 0
    at_s: float = 0.0  # work that is done
    copies: int = 0  # checkpoints that were begun on the way there
    saved_s: float = 0.0
    rate: float = 1.0
    is_slow: bool = False
    is_training: bool = False
    was_up: bool = False  # when it was struck, and not in a restart
    restarts: int = 0
    next_back_s: float = inf
    overdue: int = 0  # windows of maintenance
    broken: list[float] = field(default_factory=list)  # when each node is back
    exposed: simpy.Event | None = None  # to failures, once it happens

    @property
    def time_s(self) -> float:
        """When it ended."""
        return float(self.clock.now)

    def start(self, draws: Iterable[tuple[float, float]]) -> None:
        """Run to the end."""
        self.exposed = self.clock.event()
        self.job = self.clock.process(self._train())
        self.failures = self.clock.process(self._fail(draws))
        if self.asked.maintenance_every_s < inf:
            self.clock.process(self._maintain())
        self.clock.run(until=self.job)
        self.spent_s["steps"] -= self.asked.checkpointed_s
        self.spent_s["checkpoints"] += self.asked.checkpointed_s

    # what happens to the job

    def _fail(self, draws: Iterable[tuple[float, float]]) -> _Events:
        """Events come at random while the job is up or restarts, and wait while it is down."""
        asked, per_s = self.asked, self.asked.event_per_s
        for gap, drawn in draws:
            left_s = gap / per_s if per_s else inf
            if left_s == inf:
                return
            while left_s > 0:
                began_s = inf
                try:
                    if self.exposed is not None:
                        yield self.exposed
                    began_s = self.clock.now
                    yield self.clock.timeout(left_s)
                    left_s = 0.0
                except simpy.Interrupt:
                    left_s -= max(0.0, self.clock.now - began_s)
            kind = drawn * per_s
            is_notice = kind < asked.crash_per_s + asked.notice_per_s
            struck = "crash" if kind < asked.crash_per_s else "notice" if is_notice else "straggler"
            self.job.interrupt(struck)

    def _maintain(self) -> _Events:
        while True:
            yield self.clock.timeout(self.asked.maintenance_every_s)
            self.overdue += 1
            if self.is_training:
                self.job.interrupt("maintenance")

    def _alarm(self, delay_s: float, cause: str, restarts: int) -> _Events:
        """Stop the steps after a delay, unless something else has."""
        yield self.clock.timeout(delay_s)
        if restarts == self.restarts and self.is_training:
            self.job.interrupt(cause)

    # what the job does

    def _train(self) -> _Events:
        yield from self._restart()
        while (cause := (yield from self._steps())) is not None:
            yield from getattr(self, f"_{cause}")()
            yield from self._restart()

    def _restart(self) -> _Events:
        """Processes, checkpoint, first step; a crash in the middle begins it again."""
        asked = self.asked
        while True:
            self.restarts += 1
            self.is_slow = False
            missing = self._missing()
            self.rate = 1 - missing / asked.nodes
            self.next_back_s = min(self._still_broken(), default=inf) if missing else inf
            left_s = asked.restart_s if self.saved_s else asked.init_s
            cause = yield from self._exposed("restarts", left_s)
            if cause is None:
                return
            yield from getattr(self, f"_{cause}")()

    def _exposed(self, spent_on: str, left_s: float) -> _Events:
        """So many seconds in which a failure may strike; a straggler's does no harm yet."""
        self._expose()
        self.was_up = False
        while left_s > 0:
            began_s = self.clock.now
            try:
                yield self.clock.timeout(left_s)
                struck, passed_s = None, left_s
            except simpy.Interrupt as interrupt:
                struck, passed_s = str(interrupt.cause), self.clock.now - began_s
            self.spent_s[spent_on] += passed_s
            left_s -= passed_s
            if struck in ("crash", "notice"):
                self._hide()
                return struck
        return None

    def _steps(self) -> _Events:
        """Segments, each with a checkpoint at its end, until something stops the job."""
        asked, back_s = self.asked, self.next_back_s - self.clock.now
        cause = "maintenance" if self.overdue else "back" if back_s <= 0 else None
        if back_s < inf:
            self.clock.process(self._alarm(max(0.0, back_s), "back", self.restarts))
        self.is_training = cause is None
        while cause is None and self.at_s < asked.work_s:
            end_s = min((self.copies + 1) * asked.segment_s, asked.work_s)
            cause = yield from self._work(end_s)
            self.copies += cause is None
        self.is_training, self.was_up = False, True
        self._hide()
        return cause

    def _work(self, end_s: float) -> _Events:
        """Work up to a place, slower while a straggler is there."""
        while self.at_s < end_s:
            began_s, from_s = self.clock.now, self.at_s
            try:
                yield self.clock.timeout((end_s - from_s) / self.rate)
                cause, self.at_s = None, end_s
            except simpy.Interrupt as interrupt:
                cause = str(interrupt.cause)
                self.at_s = from_s + (self.clock.now - began_s) * self.rate
            self.spent_s["steps"] += self.at_s - from_s
            self.spent_s["slow_steps"] += self.clock.now - began_s - (self.at_s - from_s)
            if cause == "straggler":
                self._straggle()
            elif cause is not None:
                return cause
        return None

    def _straggle(self) -> None:
        if not self.is_slow:
            self.is_slow = True
            self.rate /= self.asked.straggler_slowdown
            found_s = self.asked.straggler_found_s
            self.clock.process(self._alarm(found_s, "found", self.restarts))

    def _crash(self) -> _Events:
        self.interruptions += 1
        self._lose()
        yield from self._down("detection", self.asked.detect_s)
        yield from self._replace()

    def _notice(self) -> _Events:
        self.interruptions += 1
        if not self.asked.saves_on_notice:
            self._lose()
        elif self.was_up:
            yield from self._save()
        yield from self._down("waiting_for_nodes", self.asked.notice_replace_s)

    def _found(self) -> _Events:
        yield from self._save()
        yield from self._replace()

    def _back(self) -> _Events:
        yield from self._save()

    def _maintenance(self) -> _Events:
        self.overdue -= 1
        yield from self._save()
        yield from self._down("maintenance", self.asked.maintenance_s)

    def _save(self) -> _Events:
        yield from self._down("checkpoints", self.asked.save_s)
        self.saved_s = self.at_s

    def _lose(self) -> None:
        """Back to the last checkpoint whose write has ended."""
        asked, written = self.asked, self.copies
        if written and self.at_s - written * asked.segment_s < asked.write_s:
            written -= 1
        reached_s = written * asked.segment_s if written else 0.0
        self.saved_s = max(self.saved_s, reached_s)
        self.spent_s["lost_work"] += self.at_s - self.saved_s
        self.spent_s["steps"] -= self.at_s - self.saved_s
        self.at_s = self.saved_s
        self.copies = min(self.copies, written)

    def _replace(self) -> _Events:
        """Wait for a spare node, for one that comes back, or go on without."""
        asked = self.asked
        if asked.spares is not None:
            still = self._still_broken()
            self.broken = [*still, self.clock.now + asked.repair_s]
            if len(self.broken) > asked.spares + asked.most_missing:
                yield from self._down("waiting_for_nodes", min(self.broken) - self.clock.now)
        yield from self._down("waiting_for_nodes", asked.replace_s)

    def _still_broken(self) -> list[float]:
        return [back_s for back_s in self.broken if back_s > self.clock.now]

    def _missing(self) -> int:
        """Nodes that neither train nor stand by."""
        if self.asked.spares is None:
            return 0
        return max(0, len(self._still_broken()) - self.asked.spares)

    def _down(self, cause: str, seconds: float) -> _Events:
        """Time in which nothing can strike; what strikes the clock waits for the job."""
        self.spent_s[cause] += seconds
        yield self.clock.timeout(seconds)

    def _expose(self) -> None:
        if self.exposed is not None:
            self.exposed.succeed()
            self.exposed = None

    def _hide(self) -> None:
        if self.exposed is None:
            self.exposed = self.clock.event()
            if self.failures.is_alive:
                self.failures.interrupt()
