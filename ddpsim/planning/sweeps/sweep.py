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
    """Predict all points of a grid on a scenario (as `load_scenario` takes it), and find the best.

    A point that cannot be simulated says why, and the others go on; points with equal scenarios are
    computed once. `journal` keeps what has ended, and what it holds is not computed again. Raises
    ScenarioError if no point can be simulated, ExecutorError if workers keep dying, and ValueError
    for `goals` other than one or two of `GOALS`.
    """
    _check(goals)
    document = load(source, grid.fixed)
    stated = as_stated(document)
    base = _Request.of(document, ()).checked_against(stated)
    requests = [
        _Request.of(document, settings).checked_against(stated).checked_against(base.scenario)
        for settings in grid
    ]
    outcomes: dict[str, Outcome] = {}
    wanted = {each.key: each.scenario for each in (base, *requests) if each.scenario}
    if journal:  # what failed is tried again: it may have been the worker's fault, or mended
        journaled = journal.outcomes.items()
        outcomes |= {k: brief for k, brief in journaled if k in wanted and isinstance(brief, Brief)}
    missing = {key: scenario for key, scenario in wanted.items() if key not in outcomes}
    progress(len(outcomes), len(wanted))
    computation = Computation(missing, workers)
    for batch in computation.outcomes():
        if journal:
            journal.add(batch)
        outcomes |= batch
        progress(len(outcomes), len(wanted))
    outcomes |= computation.lost
    points = tuple(each.point(outcomes) for each in requests)
    if not any(point.brief for point in points):
        if base.scenario:
            resolve(base.scenario, document)  # an error of the scenario itself names its line
        raise _refusal(base, requests, points)
    plain = base.point(outcomes)
    noise = 0.0
    if base.scenario and plain.brief:
        noise = plain.brief.iteration_time_s.noise(base.scenario.run.iterations)
    swept = Sweep(
        next(iter(wanted.values())).name,
        grid.fixed,
        tuple((axis.keys, axis.values) for axis in grid.axes),
        tuple(goals),
        replace(plain, settings=tuple(_base_settings(document, grid.axes, base))),
        points,
        noise=noise,
    )
    best = swept.best
    chosen = next((e.scenario for e, p in zip(requests, points, strict=True) if p is best), None)
    if not (chosen and best and best.brief):
        return swept
    step_s = best.brief.iteration_time_s.mean
    return replace(swept, warnings=resolve(chosen).warnings(step_s))


def with_intervals(source: Source, swept: Sweep, most: int = 40) -> Sweep:
    """Return a sweep with the 80 % intervals of its points, which take a prediction each.

    Where there are more than `most` points, only the best and the front have one. Raises
    ScenarioError.
    """
    document, parts = load(source, swept.fixed), Parts()
    chosen = swept.points if len(swept.points) <= most else (swept.best, *swept.front)

    def with_interval(point: Point) -> Point:
        if point.brief is None or not any(point is each for each in chosen):
            return point
        settings = (*map(str, point.settings), *point.set_aside)
        job = checked_job(document.changed(settings), parts.of_another_question())
        return replace(point, interval_s=predicted(job).edges_s)

    return replace(swept, points=tuple(map(with_interval, swept.points)))


def _check(goals: Sequence[str]) -> None:
    is_list = not isinstance(goals, str) and 1 <= len(goals) <= 2 and len(set(goals)) == len(goals)
    if not is_list or not set(goals) <= set(GOALS):
        raise ValueError(
            f"goals is {shown(goals)}; wanted a list of one or two of {', '.join(GOALS)}"
        )


@dataclass(frozen=True)
class _Request:
    """A point before it is computed: its scenario with the scenario's key, or an error.

    `set_aside`: settings that drop the options which its strategy lacks.
    """

    settings: tuple[Setting, ...]
    scenario: Scenario | None
    key: str = ""
    error: ScenarioError | None = None
    set_aside: tuple[str, ...] = ()

    @classmethod
    def of(cls, document: Document, settings: tuple[Setting, ...]) -> _Request:
        """Change a document; an axis of strategies drops the options that a strategy lacks."""
        aside: tuple[str, ...] = ()
        try:
            changed = document.changed(map(str, settings))
            if any(setting.key == "ddp.strategy" for setting in settings):
                aside = _set_aside(changed.data)
            scenario = parse(changed.changed(aside))
        except ScenarioError as error:
            return cls(settings, None, error=error)
        return cls(settings, scenario, _key(scenario), set_aside=aside)

    def checked_against(self, original: Scenario | None) -> _Request:
        """Add an error where `original` states a measured step that is not this scenario's."""
        if original is None or self.scenario is None:
            return self
        try:
            check_measured(original, self.scenario, "set both, or --axis FILE with both keys")
        except ScenarioError as error:
            return replace(self, scenario=None, error=error)
        return self

    def point(self, outcomes: Mapping[str, Outcome]) -> Point:
        """The point with its error, or its outcome among all by key."""
        outcome = str(self.error) if self.error else outcomes[self.key]
        if self.scenario is None or not isinstance(outcome, Brief):
            return Point(self.settings, None, str(outcome))
        sample_size = self.scenario.workload.sample_size
        return Point(self.settings, outcome, set_aside=self.set_aside, sample_size=sample_size)


def _set_aside(data: Mapping[str, Any]) -> tuple[str, ...]:
    """Settings that drop what the scenario or another axis states, but the strategy lacks."""
    ddp, workload = data["ddp"], data.get("workload")
    clips = isinstance(workload, Mapping) and bool(workload.get("clip_grad_norm"))
    settings = set_aside(ddp, str(ddp["strategy"]), clips=clips)
    if ddp["strategy"] == "naive_flat":  # the cap is its own option, too
        return tuple(each for each in settings if not each.startswith("ddp.bucket_cap_mb="))
    return settings


def _key(scenario: Scenario) -> str:
    """A hash of all that a point's figures depend on: scenario, files and versions."""
    plain = scenario.having(name="")
    if plain.workload.sample_size:  # a default that is stated is the same scenario
        key, size = plain.workload.sample_size
        plain = plain.having("workload", **{key: size})
    named = (plain.workload.profile, plain.workload.trace, plain.workload.parameters)
    files = [*named, *(getattr(plain.cluster, log) for log in LOGS), plain.cluster.profile]
    parts = [_versions(), plain.model_dump_json()]
    parts += [_digest(file) for file in files]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@cache
def _versions() -> str:
    return f"ddpsim {__version__}, numpy {version('numpy')}"


def _digest(file: SourceFile | None) -> str:
    """A hash of the content of a file or a folder; "unreadable" where it cannot be read."""
    if file is None:
        return ""
    try:
        files = sorted(file.path.iterdir()) if file.path.is_dir() else [file.path]
        digest = hashlib.sha256()
        for each in filter(Path.is_file, files):
            with open_regular(each) as content:
                for part in iter(partial(content.read, 2**20), b""):
                    digest.update(part)
        return digest.hexdigest()
    except OSError:
        return "unreadable"


def _base_settings(document: Document, axes: Sequence[Axis], base: _Request) -> Iterator[Setting]:
    """The scenario's own values of the axes, written as on an axis that has them."""
    for axis in axes:
        for values in axis.values:
            together = [Setting(*pair) for pair in zip(axis.keys, values, strict=True)]
            if base.key and _Request.of(document, tuple(together)).key == base.key:
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
    base: _Request, requests: Sequence[_Request], points: Sequence[Point]
) -> ScenarioError:
    """What is wrong with the scenario itself, otherwise with each point."""
    if base.error:
        return base.error
    problems = [problem for each in requests if each.error for problem in each.error.problems]
    simulated = (point for each, point in zip(requests, points, strict=True) if not each.error)
    texts = (str(point.problem).removeprefix("scenario  ") for point in simulated)
    problems += [Problem("scenario", "", text) for text in texts]
    return ScenarioError(list(dict.fromkeys(problems)))
