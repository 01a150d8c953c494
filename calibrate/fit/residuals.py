"""How far a fitted model is from the samples: as text, and as a figure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import numpy as np

from calibrate.fit.samples import Sample, relative_residuals
from ddpsim.cluster.fitted.laws import AllReduceModel, collective_times_s
from ddpsim.files import write_atomically
from ddpsim.report.page.looks import OKABE_ITO
from ddpsim.units import format_bytes, format_bytes_per_s, format_duration

__all__ = ["residual_table", "write_residual_figure"]

_WHAT = (
    "measured: the mean of the middle four fifths of a size's samples; predicted: the fitted "
    "model, which `ddpsim run` takes for layouts, rates and sizes that were not measured; for the "
    "others it takes the measured times"
)


def residual_table(model: AllReduceModel, samples: Sequence[Sample]) -> str:
    """Measured and predicted time of each sample, by layout and size; the errors at the end.

    An error is (predicted - measured) / measured.
    """
    samples = _in_order(samples)
    errors = np.expm1(relative_residuals(model, samples))
    lines = [f"{'ranks':>9} {'line rate':>11} {'size':>9} {'measured':>9} {'predicted':>9}   error"]
    for sample, error in zip(samples, errors.tolist(), strict=True):
        rate = "" if sample.line_rate is None else format_bytes_per_s(sample.line_rate)
        predicted_s = sample.time_s * (1 + error)
        lines.append(
            f"{_layout(sample):>9} {rate:>11} {format_bytes(sample.size_bytes):>9} "
            f"{format_duration(sample.time_s):>9} {format_duration(predicted_s):>9} "
            f"{100 * error:+6.1f} %"
        )
    middle, tenth = np.quantile(np.abs(errors), (0.5, 0.9))
    lines.append(
        f"{len(samples)} samples: median error {100 * middle:.1f} %, nine in ten within "
        f"{100 * tenth:.1f} %, largest {100 * np.abs(errors).max():.1f} %"
    )
    lines.append(_WHAT)
    return "\n".join(lines)


def write_residual_figure(model: AllReduceModel, samples: Sequence[Sample], path: Path) -> None:
    """Samples, the model and its errors over size, as HTML that needs no network; see OSError.

    What belongs to a layout and a line rate has one colour.
    """
    from plotly.graph_objects import Figure, Scatter  # noqa: PLC0415 -- most of a second
    from plotly.subplots import make_subplots  # noqa: PLC0415

    figure: Figure = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[0.7, 0.3])
    samples = _in_order(samples)
    labels = dict.fromkeys(_label(sample) for sample in samples)
    for label, colour in zip(labels, cycle(OKABE_ITO), strict=False):
        here = [sample for sample in samples if _label(sample) == label]
        sizes = [sample.size_bytes for sample in here]
        points = [sample.point for sample in here]
        predicted_s = collective_times_s("all_reduce", model, points)
        errors = 100 * np.expm1(relative_residuals(model, here))
        measured_s = [sample.time_s for sample in here]
        style: dict[str, object] = {"legendgroup": label, "mode": "markers", "marker_color": colour}
        figure.add_trace(Scatter(x=sizes, y=measured_s, name=f"{label} measured", **style), 1, 1)
        style |= {"mode": "lines", "line_color": colour}
        figure.add_trace(Scatter(x=sizes, y=predicted_s, name=f"{label} fitted", **style), 1, 1)
        style |= {"mode": "lines+markers", "showlegend": False}
        figure.add_trace(Scatter(x=sizes, y=errors.tolist(), name=f"{label} error", **style), 2, 1)
    decades = {"type": "log", "dtick": 1, "exponentformat": "power"}
    figure.update_xaxes(title_text="message (bytes)", row=2, col=1, **decades)
    figure.update_xaxes(row=1, col=1, **decades)
    figure.update_yaxes(title_text="all-reduce (s)", row=1, col=1, **decades)
    figure.update_yaxes(title_text="error of the fitted model (%)", row=2, col=1)
    below = {"orientation": "h", "yanchor": "top", "y": -0.15}
    figure.update_layout(title_text="All-reduces: measured and fitted", height=720, legend=below)
    write_atomically(path, figure.to_html(include_plotlyjs=True))


def _in_order(samples: Sequence[Sample]) -> list[Sample]:
    return sorted(samples, key=lambda s: (s.nodes, s.gpus_per_node, s.line_rate or 0, s.size_bytes))


def _layout(sample: Sample) -> str:
    return f"{sample.nodes} x {sample.gpus_per_node}"


def _label(sample: Sample) -> str:
    rate = "" if sample.line_rate is None else f", {format_bytes_per_s(sample.line_rate)}"
    return f"{_layout(sample)} ranks{rate}"
