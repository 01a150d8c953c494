"""A validation as one HTML page that needs no other file: figures, drawings, every case."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go
from jinja2 import Environment, select_autoescape
from plotly.offline import get_plotlyjs

from calibrate.validate import Case, Sweep, Validation, headlines

__all__ = ["page"]

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>ddpsim against real DDP</title>
<script>{{ script | safe }}</script>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; }
table { border-collapse: collapse; margin: 0.5em 0 2em; font-size: 13px; }
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
<h2>{{ sweep.model }} at {{ rate(sweep) }}</h2>
<p>{{ sweep.file }}, {{ sweep.nodes }} x {{ sweep.gpus_per_node }} ranks
{{- ", oversubscribed" if sweep.oversubscribed }}.
{% if sweep.regret is not none %}The cap that is picked costs {{ percent(sweep.regret) }} more than
the best measured.{% endif %}</p>
<table>
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
</table>
{% endfor %}
</body>
</html>
"""
_PARTS = ("forward", "backward", "exposed", "optimizer", "all_reduce")


def page(validation: Validation) -> str:
    """The whole page; plotly's script is in it (some 4 MB)."""
    template = Environment(autoescape=select_autoescape(default_for_string=True)).from_string(_PAGE)
    drawings = [_scatter(validation), *(_sweep(sweep) for sweep in validation.sweeps)]
    return template.render(
        script=get_plotlyjs(),
        profile=validation.profile,
        headlines=list(headlines(validation)),
        drawings=[d.to_html(full_html=False, include_plotlyjs=False) for d in drawings],
        sweeps=validation.sweeps,
        parts=_PARTS,
        rate=_rate,
        of=getattr,
        bad=_bad,
        ms=lambda seconds: f"{seconds * 1e3:.0f}",
        percent=lambda share: f"{share:.1%}",
        signed=lambda share: f"{share:+.1%}",
    )


def _rate(sweep: Sweep) -> str:
    rate = sweep.line_rate_bytes_per_s
    return "an unknown rate" if rate is None else f"{rate * 8 / 1e9:g} Gbit/s"


def _bad(case: Case) -> bool:
    """Off by more than 5 % and by more than two standard errors."""
    return abs(case.error) > max(0.05, 2 * case.noise)


def _scatter(validation: Validation) -> Any:
    """Errors over measured times, one colour a sweep, with two standard errors."""
    drawing = go.Figure()
    for sweep in validation.sweeps:
        drawing.add_scatter(
            x=[case.measured_s * 1e3 for case in sweep.cases],
            y=[case.error * 100 for case in sweep.cases],
            error_y={"type": "data", "array": [200 * case.noise for case in sweep.cases]},
            text=[case.variant for case in sweep.cases],
            mode="markers",
            name=f"{_model(sweep)}, {_rate(sweep)}",
        )
    drawing.add_hline(y=0)
    for edge in (-5, 5):
        drawing.add_hline(y=edge, line_dash="dot")
    drawing.update_layout(title="Error of every case, with two standard errors", height=480)
    drawing.update_xaxes(title="measured iteration, ms", type="log")
    drawing.update_yaxes(title="error, %")
    return drawing


def _sweep(sweep: Sweep) -> Any:
    """Predicted and measured iterations over the variants, and the best naive answers."""
    names = [case.variant for case in sweep.cases]
    drawing = go.Figure()
    drawing.add_scatter(
        x=names,
        y=[case.measured_s * 1e3 for case in sweep.cases],
        error_y={"type": "data", "array": [2e3 * case.stderr_s for case in sweep.cases]},
        mode="markers",
        name="measured",
    )
    for field, name, dash in (
        ("predicted_s", "predicted", "solid"),
        ("no_overlap_s", "no overlap", "dot"),
        ("perfect_overlap_s", "perfect overlap", "dot"),
        ("compute_only_s", "compute only", "dot"),
    ):
        drawing.add_scatter(
            x=names,
            y=[getattr(case, field) * 1e3 for case in sweep.cases],
            mode="lines+markers" if dash == "solid" else "lines",
            line_dash=dash,
            name=name,
        )
    drawing.update_layout(title=f"{_model(sweep)} at {_rate(sweep)}", height=360)
    drawing.update_xaxes(title="bucket cap, MiB; other variants", type="category")
    drawing.update_yaxes(title="iteration, ms", rangemode="tozero")
    return drawing


def _model(sweep: Sweep) -> str:
    return sweep.model.rpartition(":")[2]
