"""An answer as one HTML page: its charts with their intervals, and below them its text."""

from __future__ import annotations

from collections.abc import Iterable

from ddpsim.errors import printable
from ddpsim.report.page.charts import Chart
from ddpsim.report.page.shell import render

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
