"""A validation as one HTML page that needs no other file: figures, drawings, every case."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go
from jinja2 import Environment, select_autoescape
from plotly.offline import get_plotlyjs

from calibrate.validation import Case, Sweep, Validation, headlines

__all__ = ["page"]

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>ddpsim against real DDP</title>
<script>{{ script | safe }}</script>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; }
.wide { overflow-x: auto; margin: 0.5em 0 2em; }
table { border-collapse: collapse; font-size: 13px; white-space: nowrap; }
th, td { padding: 0.15em 0.7em; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
.bad { color: #b00020; font-weight: bold; }
</style>
</head>
<body>
<h1>ddpsim against real DDP iterations</h1>
<p>Network: {{ profile or "the rounds' own all-reduces, so no prediction of the network" }}.
Measured: median over rounds of the slower rank; ± its standard error. Predicted / measured parts
in ms, on the slowest rank.</p>
<ul>{% for line in headlines %}<li>{{ line }}</li>{% endfor %}</ul>
{% for drawing in drawings %}{{ drawing | safe }}{% endfor %}
{% for sweep in sweeps %}
<h2>{{ title(sweep) }}</h2>
<p>{{ sweep.model }}, {{ sweep.file }}.
{% if sweep.regret is not none %}The cap that is picked costs {{ percent(sweep.regret) }} more than
the best measured.{% endif %}</p>
<div class="wide"><table>
<tr><th>variant</th><th>predicted</th><th>measured</th><th>±</th><th>error</th>
<th>best naive</th><th>off</th>{% for part in parts %}<th>{{ part }}</th>{% endfor %}</tr>
{% for case in sweep.cases %}
<tr><td>{{ case.variant }}</td><td>{{ ms(case.predicted_s) }}</td><td>{{ ms(case.measured_s) }}</td>
<td>{{ percent(case.noise) }}</td>
<td{% if bad(case) %} class="bad"{% endif %}>{{ signed(case.error) }}</td>
<td>{{ percent(case.baseline_error) }}</td><td>{{ case.off }}</td>
{% for part in parts %}
<td>{{ ms(of(case.predicted, part)) }} / {{ ms(of(case.measured, part)) }}</td>
{% endfor %}</tr>
{% endfor %}
</table></div>
{% endfor %}
</body>
</html>
"""
_CONFIG = {"displayModeBar": False, "responsive": True}
_LAYOUT = {
    "template": "plotly_white",
    "legend": {"orientation": "h", "yanchor": "top", "y": -0.22},
    "margin": {"l": 60, "r": 15, "t": 50, "b": 60},
}
# Okabe and Ito's, which the colour-blind tell apart
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_PARTS = ("forward", "backward", "exposed", "optimizer", "all_reduce")


def page(validation: Validation) -> str:
    """The whole page; plotly's script is in it (some 4 MB)."""
    template = Environment(autoescape=select_autoescape(default_for_string=True)).from_string(_PAGE)
    drawings = [_scatter(validation), *(_sweep(sweep) for sweep in validation.sweeps)]
    return template.render(
        script=get_plotlyjs(),
        profile=validation.profile,
        headlines=list(headlines(validation)),
        drawings=[
            d.to_html(full_html=False, include_plotlyjs=False, config=_CONFIG) for d in drawings
        ],
        sweeps=validation.sweeps,
        parts=_PARTS,
        title=_title,
        of=getattr,
        bad=_bad,
        ms=lambda seconds: f"{seconds * 1e3:.0f}",
        percent=lambda share: f"{share:.1%}",
        signed=lambda share: f"{share:+.1%}",
    )


def _rate(sweep: Sweep) -> str:
    rate = sweep.line_rate_bytes_per_s
    return "an unknown rate" if rate is None else f"{rate * 8 / 1e9:g} Gbit/s"


def _title(sweep: Sweep) -> str:
    shared = ", oversubscribed" if sweep.oversubscribed else ""
    return f"{_model(sweep)} at {_rate(sweep)}, {sweep.nodes} x {sweep.gpus_per_node} ranks{shared}"


def _bad(case: Case) -> bool:
    """Off by more than 5 % and by more than two standard errors."""
    return abs(case.error) > max(0.05, 2 * case.noise)


def _scatter(validation: Validation) -> Any:
    """Errors over measured times, one colour a model, with two standard errors."""
    drawing = go.Figure()
    by_model: dict[str, list[tuple[Sweep, Case]]] = {}
    for sweep in validation.sweeps:
        by_model.setdefault(_model(sweep), []).extend((sweep, case) for case in sweep.cases)
    for i, (model, found) in enumerate(by_model.items()):
        drawing.add_scatter(
            x=[case.measured_s * 1e3 for _, case in found],
            y=[case.error * 100 for _, case in found],
            error_y={
                "type": "data",
                "array": [200 * case.noise for _, case in found],
                "thickness": 1,
                "width": 2,
            },
            text=[f"{model}, {_rate(sweep)}, cap {case.variant}" for sweep, case in found],
            mode="markers",
            marker={
                "color": _COLOURS[i % len(_COLOURS)],
                "symbol": ["circle-open" if s.oversubscribed else "circle" for s, _ in found],
            },
            name=model,
        )
    drawing.add_hline(y=0)
    for edge in (-5, 5):
        drawing.add_hline(y=edge, line_dash="dot")
    title = "Error of every case, with two standard errors (open: oversubscribed)"
    drawing.update_layout(_LAYOUT, title=title, height=480)
    drawing.update_xaxes(title="measured iteration, ms", type="log")
    drawing.update_yaxes(title="error, %")
    return drawing


def _sweep(sweep: Sweep) -> Any:
    """Predicted and measured iterations over the variants, and the naive answers."""
    names = [case.variant for case in sweep.cases]
    drawing = go.Figure()
    intervals = [case.interval_s or (case.predicted_s,) * 2 for case in sweep.cases]
    for edge, fill in ((0, None), (1, "tonexty")):
        drawing.add_scatter(
            x=names,
            y=[interval[edge] * 1e3 for interval in intervals],
            mode="lines",
            line_width=0,
            fill=fill,
            fillcolor="rgba(0, 114, 178, 0.2)",
            name="80 % interval",
            showlegend=fill is not None,
            hoverinfo="skip",
        )
    for field, name, dash, colour in (
        ("predicted_s", "predicted", "solid", _COLOURS[0]),
        ("no_overlap_s", "no overlap", "dot", _COLOURS[2]),
        ("perfect_overlap_s", "perfect overlap", "dash", _COLOURS[3]),
        ("compute_only_s", "compute only", "dashdot", _COLOURS[4]),
    ):
        drawing.add_scatter(
            x=names,
            y=[getattr(case, field) * 1e3 for case in sweep.cases],
            mode="lines",
            line={"dash": dash, "color": colour},
            name=name,
        )
    drawing.add_scatter(
        x=names,
        y=[case.measured_s * 1e3 for case in sweep.cases],
        error_y={"type": "data", "array": [2e3 * case.stderr_s for case in sweep.cases]},
        mode="markers",
        marker_color=_COLOURS[1],
        name="measured",
    )
    drawing.update_layout(_LAYOUT, title=_title(sweep), height=400)
    drawing.update_xaxes(title="bucket cap, MiB; other variants", type="category")
    drawing.update_yaxes(title="iteration, ms", rangemode="tozero")
    return drawing


def _model(sweep: Sweep) -> str:
    return sweep.model.rpartition(":")[2]
