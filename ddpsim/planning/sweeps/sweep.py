"""Simulate every point of a grid once, on workers that may die."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ddpsim.cluster.logs import LOGS
from ddpsim.errors import Problem, ScenarioError, shown
from ddpsim.files import open_regular
from ddpsim.planning.sweeps.computation import THIS_PROCESS, Computation, Workers
from ddpsim.planning.sweeps.grid import Axis, Grid
from ddpsim.planning.sweeps.journal import Journal, Outcome
from ddpsim.prediction.api import checked_job, predicted
from ddpsim.prediction.measured_step import as_stated, check_measured
from ddpsim.prediction.parts import Parts
from ddpsim.prediction.resolve import resolve
from ddpsim.result.model import Brief
from ddpsim.result.sweep import GOALS, Point, Sweep
from ddpsim.scenario.document import Document, Source, load
from ddpsim.scenario.load import parse
from ddpsim.scenario.quantity import SourceFile
from ddpsim.scenario.schema import Scenario
from ddpsim.scenario.set_aside import set_aside
from ddpsim.settings import Setting
from ddpsim.version import __version__

Progress = Callable[[int, int], None]  # points that have ended, and all


def sweep(
    source: Source,
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
    computation = Computation(missing, workers)
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
    plain = own.point(found)
    noise = 0.0
    if own.scenario and plain.brief:
        noise = plain.brief.iteration_time_s.noise(own.scenario.run.iterations)
    swept = Sweep(
        next(iter(wanted.values())).name,
        grid.fixed,
        tuple((axis.keys, axis.values) for axis in grid.axes),
        tuple(goals),
        replace(plain, settings=tuple(_own_settings(document, grid.axes, own))),
        points,
        noise=noise,
    )
    best = swept.best
    chosen = next((e.scenario for e, p in zip(asked, points, strict=True) if p is best), None)
    if not (chosen and best and best.brief):
        return swept
    step_s = best.brief.iteration_time_s.mean
    return replace(swept, warnings=resolve(chosen).warnings(step_s))


def with_intervals(source: Source, swept: Sweep, most: int = 40) -> Sweep:
    """Return it with the 80 % intervals of its points, which take a prediction each.

    Of more than `most` points only the best and the front have one. Raises ScenarioError.
    """
    document, parts = load(source, swept.fixed), Parts()
    chosen = swept.points if len(swept.points) <= most else (swept.best, *swept.front)

    def told(point: Point) -> Point:
        if point.brief is None or not any(point is each for each in chosen):
            return point
        settings = (*map(str, point.settings), *point.set_aside)
        job = checked_job(document.changed(settings), parts.of_another_question())
        return replace(point, interval_s=predicted(job).edges_s)

    return replace(swept, points=tuple(map(told, swept.points)))


def _check(goals: Sequence[str]) -> None:
    is_list = not isinstance(goals, str) and 1 <= len(goals) <= 2 and len(set(goals)) == len(goals)
    if not is_list or not set(goals) <= set(GOALS):
        raise ValueError(
            f"goals is {shown(goals)}; wanted a list of one or two of {', '.join(GOALS)}"
        )


@dataclass(frozen=True)
class _Requested:
    """A point before it is computed: its scenario with the scenario's key, or an error.

    `set_aside`: settings that take back the options which its strategy has not.
    """

    settings: tuple[Setting, ...]
    scenario: Scenario | None
    key: str = ""
    error: ScenarioError | None = None
    set_aside: tuple[str, ...] = ()

    @classmethod
    def of(cls, document: Document, settings: tuple[Setting, ...]) -> _Requested:
        """A document's scenario with settings; options of other strategies give way to an axis."""
        aside: tuple[str, ...] = ()
        try:
            changed = document.changed(map(str, settings))
            if any(setting.key == "ddp.strategy" for setting in settings):
                aside = _set_aside(changed.data)
            scenario = parse(changed.changed(aside))
        except ScenarioError as error:
            return cls(settings, None, error=error)
        return cls(settings, scenario, _key(scenario), set_aside=aside)

    def checked_against(self, own: Scenario | None) -> _Requested:
        """Adds an error where `own` states a measured step that does not hold for this scenario."""
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
            return Point(self.settings, outcome, set_aside=self.set_aside)
        return Point(self.settings, None, outcome)


def _set_aside(data: Mapping[str, Any]) -> tuple[str, ...]:
    """What a point's strategy has not, though the scenario or another axis states it."""
    ddp, workload = data["ddp"], data.get("workload")
    clips = isinstance(workload, Mapping) and bool(workload.get("clip_grad_norm"))
    found = set_aside(ddp, str(ddp["strategy"]), clips=clips)
    if ddp["strategy"] == "naive_flat":  # the cap is its own option, too
        return tuple(each for each in found if not each.startswith("ddp.bucket_cap_mb="))
    return found


def _key(scenario: Scenario) -> str:
    """A hash of all that a point's figures depend on: scenario, files and versions."""
    plain = scenario.having(name="")
    named = (plain.workload.profile, plain.workload.trace, plain.workload.parameters)
    files = [*named, *(getattr(plain.cluster, log) for log in LOGS), plain.cluster.profile]
    parts = [_versions(), plain.model_dump_json()]
    parts += [_digest(file) for file in files]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@cache
def _versions() -> str:
    return f"ddpsim {__version__}, numpy {version('numpy')}"


def _digest(file: SourceFile | None) -> str:
    """A hash of a file's content, or a folder's; what cannot be read has a hash of its own."""
    if file is None:
        return ""
    try:
        files = sorted(file.path.iterdir()) if file.path.is_dir() else [file.path]
        found = hashlib.sha256()
        for each in filter(Path.is_file, files):
            with open_regular(each) as content:
                for part in iter(partial(content.read, 2**20), b""):
                    found.update(part)
        return found.hexdigest()
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
