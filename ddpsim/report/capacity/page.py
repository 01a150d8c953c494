"""A plan as one HTML page: time and cost by number of GPUs with their bands, and the text."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, log10
from typing import Any

from ddpsim.errors import printable
from ddpsim.report.page.shell import render
from ddpsim.result.capacity import Capacity, CapacityPlan

__all__ = ["plan_page"]

_DAY_S = 86400.0
_BODY = """\
{% extends "shell.html" %}
{% block body %}
<header><h1>{{ title }}</h1></header>
<main>
{% for key, heading, words in drawings %}
<section aria-labelledby="{{ key }}-title">
<h2 id="{{ key }}-title">{{ heading }}</h2>
<figure><div class="drawing" id="drawing-{{ key }}" role="img" aria-label="{{ words }} The table \
below has the figures."></div></figure>
</section>
{% endfor %}
<section aria-labelledby="plan-title">
<h2 id="plan-title">The plan</h2>
<div class="wide" role="region" aria-label="The plan as text" tabindex="0">\
<pre>{{ text }}</pre></div>
</section>
</main>
{% endblock %}
"""


def plan_page(plan: CapacityPlan, text: str) -> str:
    """The page, with the plan as text below its drawings: the same bytes for the same plan."""
    band = "8 of 10 runs" if plan.answer.long_run else "80 % interval"
    cost = f"cost, {plan.price.currency}" if plan.price else "GPU-hours"
    times = [_in_days(size) for size in plan.sizes]
    costs = [_costs(size, is_priced=plan.price is not None) for size in plan.sizes]
    figures = {
        "time": _figure(plan, times, "time, days", band),
        "cost": _figure(plan, costs, cost, band),
    }
    drawings = [
        ("time", "Time by number of GPUs", f"Days of the whole work with the {band}."),
        ("cost", f"{cost[:1].upper()}{cost[1:]} by number of GPUs", f"With the {band}."),
    ]
    data = {"timeline": None, "figures": figures}
    return render(_BODY, printable(plan.name), data, {}, text=text, drawings=drawings)


def _in_days(size: Capacity) -> tuple[float, float, float]:
    """Median or mean, and the edges of the band."""
    time_s, edges = size.calendar_s
    low_s, high_s = edges or (time_s, time_s)
    return time_s / _DAY_S, low_s / _DAY_S, high_s / _DAY_S


def _costs(size: Capacity, *, is_priced: bool) -> tuple[float, float, float]:
    """Cost or GPU-hours, and what the edges of the time make of it."""
    hours, cost = size.billed
    middle = cost if is_priced and cost is not None else hours
    time, low, high = _in_days(size)
    return middle, middle * low / time, middle * high / time


def _figure(
    plan: CapacityPlan, values: Sequence[tuple[float, float, float]], title: str, band: str
) -> dict[str, Any]:
    """A line over GPUs with a band, both axes by powers; the answer is marked."""
    gpus = [size.gpus for size in plan.sizes]
    middle, low, high = (list(each) for each in zip(*values, strict=True))
    edge = {"type": "scatter", "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip"}
    shown = {"x": gpus, "hovertemplate": "%{x} GPUs: %{y:.3~g}<extra></extra>"}
    chosen = gpus.index(plan.answer.gpus)
    data = [
        edge | {"x": gpus, "y": low, "showlegend": False},
        edge | {"x": gpus, "y": high, "name": band, "fill": "tonexty", "fillcolor": "--line"},
        shown | {"type": "scatter", "mode": "lines+markers", "name": title, "y": middle}
        | {"line": {"color": "--backward"}},
        {"type": "scatter", "mode": "markers", "name": "answer", "x": [gpus[chosen]]}
        | {"y": [middle[chosen]], "marker": {"color": "--ink", "symbol": "diamond", "size": 12}},
    ]  # fmt: skip
    layout = {
        "height": 380,
        "legend": {"orientation": "h", "yanchor": "top", "y": -0.22},
        "xaxis": {"title": {"text": "GPUs"}, "type": "log", "tickvals": gpus},
        "yaxis": {"title": {"text": title}, "type": "log", **_ticks(min(low), max(high))},
    }
    return {"data": data, "layout": layout}


def _ticks(low: float, high: float) -> dict[str, list[float]]:
    """Whole numbers at 1, 2 and 5: over a wide range Plotly writes bare digits between decades."""
    if high < 3 * low:
        return {}
    decades = range(floor(log10(low)), ceil(log10(high)))
    return {"tickvals": [digit * 10.0**decade for decade in decades for digit in (1, 2, 5)]}
