"""Results as plotly figures: parts of a step, steps of a sweep, changes, causes, plans."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from ddpsim.errors import missing
from ddpsim.report.page.looks import OKABE_ITO, Look
from ddpsim.report.page.tables import parts
from ddpsim.result.capacity import CapacityPlan
from ddpsim.result.changes import Change, Comparison, Explanation
from ddpsim.result.diagnosis import WORTH_SAYING, Diagnosis
from ddpsim.result.model import Result
from ddpsim.result.sweep import Point, Sweep
from ddpsim.result.tuning import Tuning
from ddpsim.result.words import interval_name
from ddpsim.settings import Setting

try:
    from plotly.graph_objects import Bar, Figure, Scatter
except ModuleNotFoundError as error:
    raise missing("plotly", "ddpsim[report]") from error

__all__ = [
    "Figure",
    "comparison_figure",
    "diagnosis_figure",
    "plan_figure",
    "sensitivity_figure",
    "step_figure",
    "sweep_figure",
    "tuning_figure",
]

# by the names of the page's style sheet; waiting is grey where the page has its background
_COLOURS = {name: colour for colour, name in OKABE_ITO.items()} | {"--ground": "#8a939c"}


def step_figure(result: Result) -> Figure:
    """One stacked bar: the parts of the mean step in ms, and its interval at the end of them."""
    bars = [
        Bar(
            name=part.name,
            x=[part.time_s * 1e3],
            y=["step"],
            orientation="h",
            marker=_marker(part.look),
            hovertemplate="%{fullData.name}: %{x:.4~g} ms<extra></extra>",
        )
        for part in parts(result)
        if part.time_s
    ]
    layout = {
        "barmode": "stack",
        "height": 340,
        "legend": {"traceorder": "normal"},
        "title": {"text": _shown(result.name)},
        "xaxis": {"title": {"text": "ms"}},
    }
    return Figure([*bars, _step(result)], layout)


def _marker(look: Look) -> dict[str, Any]:
    return {"color": _COLOURS[look.colour], "pattern": {"shape": "/" if look.hatched else ""}}


def _step(result: Result) -> Scatter:
    """The mean step, with the edges of its interval where there is one."""
    mean_s, interval = result.iteration_time_s.mean, result.prediction_interval_s
    edges = (
        {}
        if interval is None
        else {
            "type": "data",
            "symmetric": False,
            "array": [(interval.high - mean_s) * 1e3],
            "arrayminus": [(mean_s - interval.low) * 1e3],
        }
    )
    return Scatter(
        name=f"step, {interval_name(interval)}" if interval else "step",
        x=[mean_s * 1e3],
        y=["step"],
        mode="markers",
        marker={"color": _COLOURS["--ink"], "symbol": "diamond", "size": 8},
        error_x=edges,
        hovertemplate="step: %{x:.4~g} ms<extra></extra>",
    )


def sweep_figure(sweep: Sweep) -> Figure:
    """Mean steps in ms over the values of the first axis, a line for all else that is the same.

    Hollow markers: the point does not fit in the memory of its GPUs.
    """
    keys, values = sweep.axes[0] if sweep.axes else ((), ((),))
    series: dict[str, list[Point]] = {}
    for point in sweep.points:
        if point.brief:
            series.setdefault(_labels(point.settings[len(keys) :]), []).append(point)
    lines = [_line(name, points, len(keys)) for name, points in series.items()]
    layout = {
        "showlegend": len(series) > 1,
        "title": {"text": _shown(sweep.name)},
        "xaxis": {
            "title": {"text": _shown(", ".join(keys))},
            "type": "category",
            "categoryorder": "array",
            "categoryarray": [_value(value) for value in values],
        },
        "yaxis": {"title": {"text": "step, ms"}, "rangemode": "tozero"},
    }
    return Figure(lines, layout)


def comparison_figure(comparison: Comparison) -> Figure:
    """A bar a change: by how many milliseconds the step is longer, with its interval."""
    return _changes(comparison.name, [each for each in comparison.changes if not each.problem])


def tuning_figure(tuning: Tuning) -> Figure:
    """The pick, and the fastest where it is another, against the scenario as it is."""
    return _changes(tuning.name, list({c.title: c for c in (tuning.pick, tuning.fastest)}.values()))


def _changes(name: str, changes: Sequence[Change]) -> Figure:
    edges = {
        "type": "data",
        "symmetric": False,
        "array": [(each.high_s - each.change_s) * 1e3 for each in changes],
        "arrayminus": [(each.change_s - each.low_s) * 1e3 for each in changes],
    }
    values = [each.change_s * 1e3 for each in changes]
    return _bars(name, [each.title for each in changes], values, "change of the step, ms", edges)


def sensitivity_figure(explanation: Explanation) -> Figure:
    """A bar an input: by how many milliseconds the step is longer when it changes."""
    found = explanation.sensitivities
    values = [each.change_s * 1e3 for each in found]
    names = [each.what for each in found]
    return _bars(explanation.result.name, names, values, "change of the step, ms")


def diagnosis_figure(diagnosis: Diagnosis) -> Figure:
    """A bar a cause that is worth saying: its probability in percent."""
    found = [each for each in diagnosis.causes if each.probability >= WORTH_SAYING]
    values = [each.probability * 100 for each in found]
    return _bars(diagnosis.name, [each.text for each in found], values, "probability, %")


def _bars(
    name: str,
    names: Sequence[str],
    values: Sequence[float],
    unit: str,
    edges: Mapping[str, Any] | None = None,
) -> Figure:
    """Horizontal bars, the first one at the top."""
    bars = Bar(
        x=values,
        y=[_shown(each) for each in names],
        error_x=edges,
        orientation="h",
        hovertemplate="%{y}: %{x:.4~g}<extra></extra>",
    )
    layout = {
        "title": {"text": _shown(name)},
        "xaxis": {"title": {"text": unit}},
        "yaxis": {"autorange": "reversed", "automargin": True},
    }
    return Figure([bars], layout)


def plan_figure(plan: CapacityPlan) -> Figure:
    """Hours of the whole work over the number of GPUs; the answer is marked."""
    sizes = plan.sizes
    edges = [size.time_interval_s or (size.time_s, size.time_s) for size in sizes]
    hours = [size.time_s / 3600 for size in sizes]
    line = Scatter(
        name="time",
        x=[size.gpus for size in sizes],
        y=hours,
        mode="lines+markers",
        marker={"symbol": ["star" if size == plan.answer else "circle" for size in sizes]},
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [high / 3600 - h for (_, high), h in zip(edges, hours, strict=True)],
            "arrayminus": [h - low / 3600 for (low, _), h in zip(edges, hours, strict=True)],
        },
        hovertemplate="%{x} GPUs: %{y:.4~g} h<extra></extra>",
    )
    layout = {
        "title": {"text": _shown(plan.name)},
        "xaxis": {"title": {"text": "GPUs"}, "type": "log"},
        "yaxis": {"title": {"text": "hours"}, "rangemode": "tozero"},
    }
    return Figure([line], layout)


def _line(name: str, points: Sequence[Point], moving: int) -> Scatter:
    """The steps of points of which the first `moving` settings differ."""
    briefs = [point.brief for point in points if point.brief]
    return Scatter(
        name=name,
        x=[
            _shown(" with ".join(value for _, value in point.settings[:moving])) for point in points
        ],
        y=[brief.iteration_time_s.mean * 1e3 for brief in briefs],
        mode="lines+markers",
        marker={"symbol": ["circle" if point.usable else "circle-open" for point in points]},
        hovertemplate="%{x}: %{y:.4~g} ms<extra></extra>",
    )


def _value(values: Iterable[str]) -> str:
    """What keys that move together are set to."""
    return _shown(" with ".join(values))


def _labels(settings: Sequence[Setting]) -> str:
    return _shown(", ".join(map(str, settings)))


def _shown(text: str) -> str:
    """Text that plotly does not take for tags."""
    return escape(text, quote=False)
