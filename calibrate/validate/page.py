"""A validation as one HTML page that needs no other file: figures, drawings, every case."""

from __future__ import annotations

import json
from typing import Any

import plotly.graph_objects as go

from calibrate.validate.report import Case, Sweep, Validation
from calibrate.validate.summary import PARTS, headlines, milliseconds, warnings
from ddpsim.report.page.looks import OKABE_ITO
from ddpsim.report.page.shell import render

_PAGE = """{% extends "shell.html" %}
{% block body %}
<h1>{{ title }}</h1>
<p>Network: {{ profile or "the rounds' own all-reduces, so no prediction of the network" }}.
Measured: median over rounds of the slower rank, mean over runs; ± its standard error.
Predicted / measured parts in ms, on the slowest rank.</p>
<p class="faint">Skill: the share of cases that are within a third of the best naive answer's error,
or two standard errors. Off: the term with the largest difference; none: within two standard errors.
Oversubscribed: sweeps whose ranks share cores.</p>
<ul>{% for line in headlines %}<li>{{ line }}</li>{% endfor %}</ul>
{% for line in warnings %}<p><strong>WARNING</strong> {{ line }}</p>
{% endfor %}
<h2>Error of every case, with two standard errors (open: oversubscribed)</h2>
<div class="drawing" id="drawing-errors" role="img" aria-label="Errors over measured times; the
tables below have the figures."></div>
{% for sweep in sweeps %}
<h2>{{ sweep | title_of }}</h2>
<p>{{ sweep.model }}, {{ sweep.file }}{% if sweep.run_sigma is not none %}, {{ sweep.runs }} runs,
{{ sweep.run_sigma | percent }} apart (standard deviation){% endif %}.
{% if sweep.regret is not none %}The cap that is picked costs {{ sweep.regret | percent }} more than
the best measured.{% endif %}</p>
<div class="drawing" id="drawing-sweep-{{ loop.index }}" role="img" aria-label="Predicted and
measured iterations; the table below has the figures."></div>
<div class="wide" role="region" aria-label="{{ sweep | title_of }}" tabindex="0"><table>
<caption><span>Iterations, predicted and measured, and their parts in ms</span></caption>
<thead><tr><th scope="col">variant</th><th scope="col">predicted</th><th scope="col">measured</th>
<th scope="col">±</th><th scope="col">error</th><th scope="col">best naive</th>
<th scope="col">off</th>{% for part in parts %}<th scope="col">{{ part }}</th>{% endfor %}</tr>
</thead><tbody>
{% for case in sweep.cases %}
<tr><th scope="row">{{ case.variant }}</th><td>{{ case.predicted_s | ms }}</td>
<td>{{ case.measured_s | ms }}</td><td>{{ case.noise | percent }}</td>
<td{% if case | bad %} class="bad"{% endif %}>{{ case.error | signed }}</td>
<td>{{ case.baseline_error | percent }}</td><td>{{ case.off }}</td>
{% for part in parts %}
<td>{{ case.predicted[part] | ms }} / {{ case.measured[part] | ms }}</td>
{% endfor %}</tr>
{% endfor %}
</tbody></table></div>
{% endfor %}
{% endblock %}
"""
_LAYOUT = {
    "legend": {"orientation": "h", "yanchor": "bottom", "y": 1.02},  # clear of turned variants
    "margin": {"l": 60, "r": 15, "t": 30, "b": 60},
}
_COLOURS = tuple(OKABE_ITO)


def page(validation: Validation) -> str:
    """The whole page; plotly's script is in it (some 5 MB)."""
    drawings = {"errors": _scatter(validation)}
    drawings |= {f"sweep-{i}": _sweep(sweep) for i, sweep in enumerate(validation.sweeps, 1)}
    return render(
        _PAGE,
        "ddpsim against real DDP iterations",
        {"figures": {name: _figure(drawing) for name, drawing in drawings.items()}},
        {
            "bad": _bad,
            "ms": milliseconds,
            "percent": lambda share: f"{share:.1%}",
            "signed": lambda share: f"{share:+.1%}",
            "title_of": _title,
        },
        profile=validation.profile,
        headlines=list(headlines(validation)),
        warnings=warnings(validation),
        sweeps=validation.sweeps,
        parts=PARTS,
    )


def _figure(drawing: Any) -> Any:
    """Data and layout, colours named as the style sheet does: they suit light and dark."""
    text = drawing.to_json()
    for colour, name in OKABE_ITO.items():
        text = text.replace(f'"{colour}"', f'"{name}"')
    figure = json.loads(text)
    del figure["layout"]["template"]  # the page has its own look
    return figure


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
    for i, (model, points) in enumerate(by_model.items()):
        drawing.add_scatter(
            x=[case.measured_s * 1e3 for _, case in points],
            y=[case.error * 100 for _, case in points],
            error_y={
                "type": "data",
                "array": [200 * case.noise for _, case in points],
                "thickness": 1,
                "width": 2,
            },
            text=[f"{model}, {_rate(sweep)}, cap {case.variant}" for sweep, case in points],
            mode="markers",
            marker={
                "color": _COLOURS[i % len(_COLOURS)],
                "symbol": ["circle-open" if s.oversubscribed else "circle" for s, _ in points],
            },
            name=model,
        )
    drawing.add_hline(y=0, line_color="#000000")
    for edge in (-5, 5):
        drawing.add_hline(y=edge, line_color="#000000", line_dash="dot")
    drawing.update_layout(_LAYOUT, height=480)
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
    drawing.update_layout(_LAYOUT, height=400)
    drawing.update_xaxes(title="bucket cap, MiB; other variants", type="category")
    drawing.update_yaxes(title="iteration, ms", rangemode="tozero")
    return drawing


def _model(sweep: Sweep) -> str:
    return sweep.model.rpartition(":")[2]
