"""Results as plotly figures: parts of a step, steps of a sweep, changes, causes, plans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpsim.errors import missing
from ddpsim.report.page import charts
from ddpsim.report.page.looks import OKABE_ITO
from ddpsim.result.capacity import CapacityPlan
from ddpsim.result.changes import Comparison, Explanation, Tuning
from ddpsim.result.diagnosis import Diagnosis
from ddpsim.result.model import Drawn, Result, interval_name
from ddpsim.result.sweep import Sweep

try:
    from plotly.graph_objects import Figure
except ModuleNotFoundError as error:
    raise missing("plotly", "ddpsim[report]") from error

__all__ = ["Figure", "figure_of"]

# by the names of the page's style sheet; what has no colour of its own there is grey
_GREYS = {"--ground": "#8a939c", "--idle": "#8a939c", "--line": "#d5dae0", "--edge": "#1b1f24"}
_HATCHES = {"--hatch": "#7a3300", "--on-colour": "#000000"}
_COLOURS = {name: colour for colour, name in OKABE_ITO.items()} | _GREYS | _HATCHES


def figure_of(answer: Drawn) -> Figure:
    """Draw an answer as its page does, with a title, in colours that need no style sheet.

    A result is one stacked bar: the parts of the mean step that take time, and at their end the
    step with its interval. A sweep has a line for all but the first axis' values, on which hollow
    markers do not fit in memory. Changes, inputs and causes are bars; of a plan the days of the
    whole work go over the number of GPUs, with their band, and its answer is marked.
    """
    match answer:
        case Result(name=name):
            drawn = _step_figure(answer)
        case Explanation(result=Result(name=name)):
            drawn = charts.sensitivity_figure(answer.sensitivities)
        case Diagnosis(name=name):
            drawn = charts.diagnosis_figure(answer)
        case Sweep(name=name):
            drawn = next(charts.sweep_charts(answer)).figure
        case Comparison(name=name):
            drawn = next(charts.comparison_charts(answer)).figure
        case Tuning(name=name):
            drawn = next(charts.tuning_charts(answer)).figure
        case CapacityPlan(name=name):
            drawn = next(charts.plan_charts(answer)).figure
        case _:
            raise TypeError(f"{type(answer).__name__} has no figure")
    drawn = _coloured(drawn)
    return Figure(drawn["data"], drawn["layout"] | {"title": {"text": charts.shown(name)}})


def _step_figure(result: Result) -> dict[str, Any]:
    interval = result.prediction_interval_s
    name = f"step, {interval_name(interval)}" if interval else "step"
    data = charts.steps(["step"], [result], name, is_upright=False)
    layout = {"barmode": "stack", "legend": {"traceorder": "normal"}}
    return charts.figure(data, 340, charts.axis("ms"), {}, **layout)


def _coloured(value: Any) -> Any:
    if isinstance(value, str):
        return _COLOURS.get(value, value)
    if isinstance(value, Mapping):
        return {key: _coloured(each) for key, each in value.items()}
    return [_coloured(each) for each in value] if isinstance(value, list) else value
