"""A validation as one HTML page that needs no other file: drawings, figures, every case."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from calibrate.validate.report import Case, Sweep, Validation
from calibrate.validate.summary import summary
from ddpsim.report.page.charts import Chart, axis, figure, points
from ddpsim.report.page.looks import OKABE_ITO
from ddpsim.report.page.shell import answer_page

_ERRORS = (
    "Errors over measured times, with two standard errors; of oversubscribed sweeps, whose ranks "
    "share cores, they are open."
)
_WHAT = """
network     a profile fitted elsewhere, or the rounds' own all-reduces, which are no prediction
measured    median over rounds of the slower rank, mean over runs; ± its standard error
skill       the share of cases that are within a third of the best naive answer's error, or two
            standard errors
term off    the one with the largest difference; none: within two standard errors
parts       in ms, on the slowest rank
"""
_COLOURS = tuple(OKABE_ITO.values())


def page(validation: Validation) -> str:
    """The whole page: a drawing of all errors, one a sweep, and the text of the command."""
    text = f"{summary(validation)}\n{_WHAT}"
    return answer_page("ddpsim against real DDP iterations", _charts(validation), text)


def _charts(validation: Validation) -> Iterator[Chart]:
    yield Chart("errors", "Error of every case", _ERRORS, _scatter(validation))
    for number, sweep in enumerate(validation.sweeps, 1):
        caption = [f"{sweep.model}, {sweep.file}."]
        if sweep.run_sigma is not None:
            caption.append(f"{sweep.runs} runs, {sweep.run_sigma:.1%} apart (standard deviation).")
        if sweep.regret is not None:
            caption.append(f"The cap that is picked costs {sweep.regret:.1%} more than the best.")
        yield Chart(f"sweep-{number}", _title(sweep), " ".join(caption), _sweep(sweep))


def _rate(sweep: Sweep) -> str:
    rate = sweep.line_rate_bytes_per_s
    return "an unknown rate" if rate is None else f"{rate * 8 / 1e9:g} Gbit/s"


def _title(sweep: Sweep) -> str:
    shared = ", oversubscribed" if sweep.oversubscribed else ""
    return f"{_model(sweep)} at {_rate(sweep)}, {sweep.nodes} x {sweep.gpus_per_node} ranks{shared}"


def _model(sweep: Sweep) -> str:
    return sweep.model.rpartition(":")[2]


def _scatter(validation: Validation) -> dict[str, Any]:
    """Errors over measured times, one colour a model, with two standard errors."""
    by_model: dict[str, list[tuple[Sweep, Case]]] = {}
    for sweep in validation.sweeps:
        by_model.setdefault(_model(sweep), []).extend((sweep, case) for case in sweep.cases)
    data = [
        points(
            *(model, [case.measured_s * 1e3 for _, case in cases]),
            [case.error * 100 for _, case in cases],
            "%{text}: %{y:+.2~f} %",
            mode="markers",
            text=[f"{model}, {_rate(sweep)}, cap {case.variant}" for sweep, case in cases],
            error_y=_bars([200 * case.noise for _, case in cases]),
            marker={
                "color": _COLOURS[number % len(_COLOURS)],
                "symbol": ["circle-open" if s.oversubscribed else "circle" for s, _ in cases],
            },
        )
        for number, (model, cases) in enumerate(by_model.items())
    ]
    lines = [
        {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": error, "y1": error}
        | {"line": {"color": "--ink", "width": 1, "dash": "dot" if error else "solid"}}
        for error in (-5, 0, 5)
    ]
    x = axis("measured iteration, ms", type="log")
    return figure(data, 480, x, axis("error, %"), shapes=lines)


def _bars(sizes: list[float]) -> dict[str, Any]:
    """Symmetric error bars of these sizes."""
    return {"type": "data", "array": sizes, "thickness": 1, "width": 2}


def _sweep(sweep: Sweep) -> dict[str, Any]:
    """Predicted and measured iterations over the variants, and the naive answers."""
    names = [case.variant for case in sweep.cases]
    intervals = [case.interval_s or (case.predicted_s,) * 2 for case in sweep.cases]
    edges = [[interval[edge] * 1e3 for interval in intervals] for edge in (0, 1)]
    band = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip"}
    fill = {"fill": "tonexty", "fillcolor": "--line"}
    measured_ms = [case.measured_s * 1e3 for case in sweep.cases]
    noise = _bars([2e3 * case.stderr_s for case in sweep.cases])
    data = [
        points("", names, edges[0], "", **band, showlegend=False),
        points("80 % interval", names, edges[1], "", **band, **fill),
        *(
            points(
                *(name, names, [getattr(case, field) * 1e3 for case in sweep.cases]),
                f"{name} %{{y:.4~g}} ms",
                mode="lines",
                line={"dash": dash, "color": colour},
            )
            for field, name, dash, colour in (
                ("predicted_s", "predicted", "solid", "--backward"),
                ("no_overlap_s", "no overlap", "dot", "--hidden"),
                ("perfect_overlap_s", "perfect overlap", "dash", "--copies"),
                ("compute_only_s", "compute only", "dashdot", "--optimizer"),
            )
        ),
        points(
            *("measured", names, measured_ms, "measured %{y:.4~g} ms"),
            mode="markers",
            marker={"color": "--exposed", "size": 8},
            error_y=noise,
        ),
    ]
    x = axis("bucket cap, MiB; other variants", type="category")
    return figure(data, 400, x, axis("iteration, ms", rangemode="tozero"))
