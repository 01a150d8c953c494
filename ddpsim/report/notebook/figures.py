"""Results as plotly figures: parts of a step, steps of a sweep, changes, causes, plans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpsim.errors import missing
from ddpsim.report.page import charts
from ddpsim.report.page.looks import OKABE_ITO
from ddpsim.report.page.tables import parts
from ddpsim.result.capacity import CapacityPlan
from ddpsim.result.changes import Comparison, Explanation
from ddpsim.result.diagnosis import Diagnosis
from ddpsim.result.model import Result
from ddpsim.result.sweep import Sweep
from ddpsim.result.tuning import Tuning
from ddpsim.result.words import interval_name

try:
    from plotly.graph_objects import Figure
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

# by the names of the page's style sheet; what has no colour of its own there is grey
_GREYS = {"--ground": "#8a939c", "--idle": "#8a939c", "--line": "#d5dae0", "--edge": "#1b1f24"}
_COLOURS = {name: colour for colour, name in OKABE_ITO.items()} | _GREYS


def step_figure(result: Result) -> Figure:
    """One stacked bar: the parts of the mean step in ms, and its interval at the end of them."""
    bars = [
        {
            "type": "bar",
            "name": part.name,
            "x": [part.time_s * 1e3],
            "y": ["step"],
            "orientation": "h",
            "marker": {
                "color": part.look.colour,
                "pattern": {"shape": "/" if part.look.hatched else ""},
            },
            "hovertemplate": "%{fullData.name}: %{x:.4~g} ms<extra></extra>",
        }
        for part in parts(result)
        if part.time_s
    ]
    layout = {
        "barmode": "stack",
        "height": 340,
        "legend": {"traceorder": "normal"},
        "xaxis": {"title": {"text": "ms"}},
    }
    return _figure(result.name, {"data": [*bars, _step(result)], "layout": layout})


def _step(result: Result) -> dict[str, Any]:
    """The mean step, with the edges of its interval where there is one."""
    mean_s, interval = result.iteration_time_s.mean, result.prediction_interval_s
    return {
        "type": "scatter",
        "name": f"step, {interval_name(interval)}" if interval else "step",
        "x": [mean_s * 1e3],
        "y": ["step"],
        "mode": "markers",
        "marker": {"color": "--ink", "symbol": "diamond", "size": 8},
        "error_x": charts.edges([mean_s], [result.edges_s], 1e3),
        "hovertemplate": "step: %{x:.4~g} ms<extra></extra>",
    }


def sweep_figure(sweep: Sweep) -> Figure:
    """Mean steps in ms over the values of the first axis, a line for all else that is the same.

    Hollow markers: the point does not fit in the memory of its GPUs.
    """
    (chart,) = charts.sweep_charts(sweep)
    return _figure(sweep.name, chart.figure)


def comparison_figure(comparison: Comparison) -> Figure:
    """A bar a change, the fastest first: how many ms the step is longer, with its interval."""
    (chart,) = charts.comparison_charts(comparison)
    return _figure(comparison.name, chart.figure)


def tuning_figure(tuning: Tuning) -> Figure:
    """The pick, and the fastest where it is another, against the scenario as it is."""
    (chart,) = charts.tuning_charts(tuning)
    return _figure(tuning.name, chart.figure)


def sensitivity_figure(explanation: Explanation) -> Figure:
    """A bar an input: by how many milliseconds the step is longer when it changes."""
    found = charts.sensitivity_figure(explanation.sensitivities)
    return _figure(explanation.result.name, found)


def diagnosis_figure(diagnosis: Diagnosis) -> Figure:
    """A bar a cause that is worth saying: its probability in percent."""
    return _figure(diagnosis.name, charts.diagnosis_figure(diagnosis))


def plan_figure(plan: CapacityPlan) -> Figure:
    """Days of the whole work over the number of GPUs, with its band; the answer is marked."""
    of_time, _ = charts.plan_charts(plan)
    return _figure(plan.name, of_time.figure)


def _figure(name: str, drawn: Mapping[str, Any]) -> Figure:
    """A page's figure with a title, in colours that need no style sheet."""
    found: dict[str, Any] = _coloured(drawn)
    return Figure(found["data"], found["layout"] | {"title": {"text": charts.shown(name)}})


def _coloured(value: Any) -> Any:
    if isinstance(value, str):
        return _COLOURS.get(value, value)
    if isinstance(value, Mapping):
        return {key: _coloured(each) for key, each in value.items()}
    return [_coloured(each) for each in value] if isinstance(value, list) else value
