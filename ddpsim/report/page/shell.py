"""What our HTML pages share: one file that needs no other and no network; and an answer's page."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from importlib.resources import files
from typing import Any

from ddpsim.errors import missing, printable
from ddpsim.report.page.charts import Chart

try:
    from jinja2 import Environment, PackageLoader, StrictUndefined
except ModuleNotFoundError as error:
    raise missing("jinja2", "ddpsim[report]") from error


def packaged(name: str) -> str:
    """A template, style sheet or script of ours."""
    return (files("ddpsim.report.page") / "templates" / name).read_text("utf-8")


def render(
    body: str,
    title: str,
    data: Mapping[str, Any],
    filters: Mapping[str, Callable[..., Any]],
    *,
    scripts: Sequence[str] = ("drawing.js", "page.js"),
    styles: Sequence[str] = ("page.css",),
    connect: str = "'none'",
    workers: str = "'none'",
    **values: Any,
) -> str:
    """A page from a template that extends shell.html; plotly's basic script is in it (1.1 MiB).

    `scripts` and `styles` are ours, in this order; `connect`: whom the page may call; `workers`:
    whose scripts it may run beside itself.

    `data` is what page.js draws: `figures`, plotly's data and layout by the name of their
    `drawing-...` element, whose colours may be named as the style sheet does, and a `timeline`.
    Only our own scripts run on it and nothing is loaded, whatever a scenario's text says.
    """
    environment = Environment(
        loader=PackageLoader("ddpsim.report.page"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.policies["json.dumps_kwargs"] = {
        "allow_nan": False,
        "separators": (",", ":"),
        "sort_keys": True,
    }
    environment.filters.update(filters)
    plotly = files("ddpsim.data") / "plotly-basic" / "plotly-basic.min.js"
    code = (plotly.read_text("utf-8"), *map(packaged, scripts))
    return environment.from_string(body).render(
        **values,
        title=title,
        data=data,
        hashes=" ".join(map(_hash, code)),
        connect=connect,
        workers=workers,
        scripts=code,
        style="".join(map(packaged, styles)),
    )


def _hash(script: str) -> str:
    """What names a script in a Content-Security-Policy."""
    return f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'"


_BODY = """\
{% extends "shell.html" %}
{% block body %}
<header><h1>{{ title }}</h1></header>
<main>
{% for chart in charts %}
<section aria-labelledby="{{ chart.key }}-title">
<h2 id="{{ chart.key }}-title">{{ chart.heading }}</h2>
<p>{{ chart.words }}</p>
<figure><div class="drawing" id="drawing-{{ chart.key }}" role="img" \
aria-label="{{ chart.heading }}: {{ chart.words }} The text below has the figures."></div></figure>
</section>
{% endfor %}
<section aria-labelledby="text-title">
<h2 id="text-title">In figures</h2>
<div class="wide" role="region" aria-label="The answer as text" tabindex="0">\
<pre>{{ text }}</pre></div>
</section>
</main>
{% endblock %}
"""


def answer_page(name: str, charts: Iterable[Chart], text: str) -> str:
    """The page, with the answer as the command prints it: the same bytes for the same answer."""
    drawn = tuple(charts)
    data = {"timeline": None, "figures": {chart.key: chart.figure for chart in drawn}}
    return render(_BODY, printable(name), data, {}, text=text, charts=drawn)
