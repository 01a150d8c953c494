"""Simulate every point of a grid once, on workers that may die."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    wait,
)
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from time import monotonic
from typing import Any

from ddpsim.errors import Problem, ScenarioError, shown
from ddpsim.planning.executors import THIS_PROCESS, ExecutorError, Workers
from ddpsim.planning.grid import Axis, Grid
from ddpsim.planning.journal import Journal, Outcome
from ddpsim.planning.many import attempt_many
from ddpsim.prediction.measured_step import as_stated, check_measured
from ddpsim.prediction.resolve import resolve
from ddpsim.result.model import Brief
from ddpsim.result.sweep import GOALS, Point, Sweep
from ddpsim.scenario.document import Document, load
from ddpsim.scenario.load import parse
from ddpsim.scenario.quantity import SourceFile
from ddpsim.scenario.schema import Scenario
from ddpsim.settings import Setting

__all__ = ["Progress", "sweep"]

Progress = Callable[[int, int], None]  # points that have ended, and all

_BATCH_S = 0.5  # what a batch should take: long beside its way to a worker, soon kept
_LARGEST_BATCH = 256
_RESTARTS = 3  # of broken workers, without a point between


def sweep(
    source: str | Path | Mapping[str, Any],
    grid: Grid,
    goals: Sequence[str] = ("throughput",),
    *,
    workers: Workers = THIS_PROCESS,
    journal: Journal | None = None,
    progress: Progress = lambda *_: None,
) -> Sweep:
    """All points of a grid on a scenario (as `load_scenario` takes it), and what is best.

    A point that cannot be simulated says why, and the others go on; points that are equal once
    they are resolved are computed once. `journal` keeps what has ended, and what it holds is not
    computed again. Raises ScenarioError if no point can be simulated, ExecutorError if workers
    keep dying, and ValueError for `goals` other than one or two of `GOALS`.
    """
    _check(goals)
    document = load(source, grid.fixed)
    stated = as_stated(document)
    own = _Requested.of(document, ()).checked_against(stated)
    asked = [
        _Requested.of(document, settings).checked_against(stated).checked_against(own.scenario)
        for settings in grid
    ]
    found: dict[str, Outcome] = {}
    wanted = {each.key: each.scenario for each in (own, *asked) if each.scenario}
    if journal:  # what failed is tried again: it may have been the worker's fault, or mended
        known = journal.known.items()
        found |= {k: brief for k, brief in known if k in wanted and isinstance(brief, Brief)}
    missing = {key: scenario for key, scenario in wanted.items() if key not in found}
    progress(len(found), len(wanted))
    computation = _Computation(missing, workers)
    for outcomes in computation.outcomes():
        if journal:
            journal.add(outcomes)
        found |= outcomes
        progress(len(found), len(wanted))
    found |= computation.lost
    points = tuple(each.point(found) for each in asked)
    if not any(point.brief for point in points):
        if own.scenario:
            resolve(own.scenario, document)  # what is wrong with it already, by its place
        raise _refusal(own, asked, points)
    swept = Sweep(
        _name(own, asked),
        grid.fixed,
        tuple((axis.keys, axis.values) for axis in grid.axes),
        tuple(goals),
        replace(own.point(found), settings=tuple(_own_settings(document, grid.axes, own))),
        points,
    )
    best = swept.best
    chosen = next((e.scenario for e, p in zip(asked, points, strict=True) if p is best), None)
    if not (chosen and best and best.brief):
        return swept
    step_s = best.brief.iteration_time_s.mean
    return replace(swept, warnings=resolve(chosen).warnings(step_s))


def _check(goals: Sequence[str]) -> None:
    is_list = not isinstance(goals, str) and 1 <= len(goals) <= 2 and len(set(goals)) == len(goals)
    if not is_list or not set(goals) <= set(GOALS):
        raise ValueError(
            f"goals is {shown(goals)}; wanted a list of one or two of {', '.join(GOALS)}"
        )


@dataclass(frozen=True)
class _Requested:
    """A point before it is computed: its scenario with the scenario's key, or an error."""

    settings: tuple[Setting, ...]
    scenario: Scenario | None
    key: str = ""
    error: ScenarioError | None = None

    @classmethod
    def of(cls, document: Document, settings: tuple[Setting, ...]) -> _Requested:
        """A document's scenario with settings."""
        try:
            scenario = parse(document.changed(map(str, settings)))
        except ScenarioError as error:
            return cls(settings, None, error=error)
        return cls(settings, scenario, _key(scenario))

    def checked_against(self, own: Scenario | None) -> _Requested:
        """With an error where `own` states a measured step that does not hold for this scenario."""
        if own is None or self.scenario is None:
            return self
        try:
            check_measured(own, self.scenario, "set both, or --axis FILE with both keys")
        except ScenarioError as error:
            return replace(self, scenario=None, error=error)
        return self

    def point(self, found: Mapping[str, Outcome]) -> Point:
        """The point with its outcome, out of all by key."""
        outcome = str(self.error) if self.error else found[self.key]
        if isinstance(outcome, Brief):
            return Point(self.settings, outcome)
        return Point(self.settings, None, outcome)


def _key(scenario: Scenario) -> str:
    """A hash of all that a point's figures depend on: scenario, files and versions."""
    plain = scenario.model_copy(update={"name": ""})
    named = (plain.workload.profile, plain.workload.trace, plain.workload.parameters)
    files = [*named, plain.cluster.all_reduce, plain.cluster.profile]
    parts = [_versions(), plain.model_dump_json()]
    parts += [_digest(file) for file in files]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@cache
def _versions() -> str:
    return f"ddpsim {version('ddpsim')}, numpy {version('numpy')}"


def _digest(file: SourceFile | None) -> str:
    """A hash of a file's content; a file that cannot be read has a hash of its own."""
    if file is None:
        return ""
    try:
        return hashlib.sha256(file.path.read_bytes()).hexdigest()
    except OSError:
        return "unreadable"


def _own_settings(document: Document, axes: Sequence[Axis], own: _Requested) -> Iterator[Setting]:
    """The scenario's own values of the axes, written as on the axis where they are on it."""
    for axis in axes:
        for values in axis.values:
            together = [Setting(*pair) for pair in zip(axis.keys, values, strict=True)]
            if own.key and _Requested.of(document, tuple(together)).key == own.key:
                yield from together
                break
        else:
            yield from (Setting(key, _text(document, key)) for key in axis.keys)


def _text(document: Document, key: str) -> str:
    """A value of a document as `--set` takes it."""
    value: Any = document.data
    for step in key.split("."):
        value = value.get(step) if isinstance(value, dict) else None
    return "default" if value is None else value if isinstance(value, str) else json.dumps(value)


def _name(own: _Requested, asked: Sequence[_Requested]) -> str:
    return next(each.scenario.name for each in (own, *asked) if each.scenario)


def _refusal(
    own: _Requested, asked: Sequence[_Requested], points: Sequence[Point]
) -> ScenarioError:
    """What is wrong with the scenario itself, otherwise with each point."""
    if own.error:
        return own.error
    problems = [problem for each in asked if each.error for problem in each.error.problems]
    simulated = (point for each, point in zip(asked, points, strict=True) if not each.error)
    said = (str(point.problem).removeprefix("scenario  ") for point in simulated)
    problems += [Problem("scenario", "", problem) for problem in said]
    return ScenarioError(list(dict.fromkeys(problems)))


def _simulated(scenarios: Sequence[Scenario]) -> tuple[list[Outcome], float]:
    """Outcomes, and the seconds they took."""
    begun = monotonic()
    outcomes = [o if isinstance(o, Brief) else str(o) for o in attempt_many(scenarios)]
    return outcomes, monotonic() - begun


_Batch = list[tuple[str, Scenario]]
_Future = Future[tuple[list[Outcome], float]]


class _Computation:
    """Points computed by an executor, in batches sized to take half a second each.

    `lost`: why points have no outcome that is worth keeping, as their worker died with them.
    """

    def __init__(self, missing: Mapping[str, Scenario], workers: Workers) -> None:
        # what can be built once for several comes together
        self._waiting = deque(sorted(missing.items(), key=lambda each: _structure(each[1])))
        self._workers = workers
        self._size = 1
        self._broken = 0
        self.lost: dict[str, Outcome] = {}

    def outcomes(self) -> Iterator[dict[str, Outcome]]:
        """The outcomes of each batch as it ends."""
        begun = monotonic()
        while self._waiting and monotonic() - begun < self._workers.after_s:
            batch = self._next()
            yield self._ended(batch, *_simulated([scenario for _, scenario in batch]))
        while self._waiting:
            yield from self._through(self._workers.start())

    def _through(self, executor: Executor) -> Iterator[dict[str, Outcome]]:
        """Outcomes until all is done or the executor breaks; unfinished batches then wait again."""
        under_way: dict[_Future, _Batch] = {}
        try:
            while self._waiting or under_way:
                while self._waiting and len(under_way) < 2 * self._workers.count:
                    batch = self._next()
                    scenarios = [scenario for _, scenario in batch]
                    under_way[executor.submit(_simulated, scenarios)] = batch
                ended = wait(under_way, return_when=FIRST_COMPLETED).done
                for future in sorted(ended, key=_is_broken):
                    yield self._received(under_way, future)
        except (BrokenExecutor, CancelledError):
            self._broken += 1
            if self._broken > _RESTARTS:
                raise ExecutorError(_DYING) from None
        finally:
            for future, batch in under_way.items():
                future.cancel()
                self._waiting.extendleft(reversed(batch))
            executor.shutdown(wait=False)

    def _received(self, under_way: dict[_Future, _Batch], future: _Future) -> dict[str, Outcome]:
        """The outcomes of a batch that ended; raises where the executor is broken."""
        try:
            outcomes, took_s = future.result()
        except (BrokenExecutor, CancelledError):
            raise
        except Exception as error:  # noqa: BLE001 -- whatever the worker died of
            self._failed(under_way.pop(future), error)
            return {}
        return self._ended(under_way.pop(future), outcomes, took_s)

    def _next(self) -> _Batch:
        share = -(-len(self._waiting) // (2 * self._workers.count))
        return [self._waiting.popleft() for _ in range(min(self._size, share))]

    def _ended(
        self, batch: _Batch, outcomes: Sequence[Outcome], took_s: float
    ) -> dict[str, Outcome]:
        self._broken = 0
        if took_s < _BATCH_S / 2:
            self._size = min(2 * self._size, _LARGEST_BATCH)
        elif took_s > 2 * _BATCH_S:
            self._size = max(1, self._size // 2)
        return {key: outcome for (key, _), outcome in zip(batch, outcomes, strict=True)}

    def _failed(self, batch: _Batch, error: BaseException) -> None:
        """Retry the points of a batch one by one after its worker died on it."""
        if len(batch) > 1:
            self._size = 1
            self._waiting.extendleft(reversed(batch))
        else:
            self.lost[batch[0][0]] = f"its worker failed: {type(error).__name__}: {error}"


def _is_broken(future: _Future) -> bool:
    """Whether the executor died, rather than the call."""
    return future.cancelled() or isinstance(future.exception(), BrokenExecutor)


_DYING = (
    "the sweep's worker processes keep dying; is memory short? Try --jobs 1. With -o all points "
    "that have ended are kept: go on with --resume"
)


def _structure(scenario: Scenario) -> tuple[object, ...]:
    cluster = scenario.cluster
    sections = (scenario.workload.model_dump_json(), scenario.ddp.model_dump_json())
    return *sections, cluster.nodes, cluster.gpus_per_node
