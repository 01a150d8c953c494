"""A page's figures as plotly draws them: bucket sizes, scaling, sensitivity."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ddpsim.report.page.charts import LEGEND_BELOW, edges, sensitivity_figure
from ddpsim.report.page.looks import Look
from ddpsim.report.page.tables import parts
from ddpsim.result.model import Result, interval_name
from ddpsim.result.storyboard import Storyboard


def figures(board: Storyboard) -> Iterator[tuple[str, dict[str, Any]]]:
    """Plotly's data and layout, by the name of the `drawing-...` element they go into."""
    yield "sweep", _sweep(board)
    yield "scaling", scaling_figure(board.scaling)
    yield "sensitivity", sensitivity_figure(board.sensitivity)
    if board.choices[board.own].held:
        yield "memory", _memory(board)


def _sweep(board: Storyboard) -> dict[str, Any]:
    """The parts of the step by bucket size, and its interval."""
    names = [
        f"{choice.cap}<br>(yours)" if number == board.own else choice.cap
        for number, choice in enumerate(board.choices)
    ]
    breakdowns = [parts(choice.result) for choice in board.choices]
    bars = [
        {
            "type": "bar",
            "name": same[0].name,
            "x": names,
            "y": [part.time_s * 1e3 for part in same],
            "marker": _marker(same[0].look),
            "hovertemplate": "%{fullData.name}: %{y:.4~g} ms<extra></extra>",
        }
        for same in zip(*breakdowns, strict=True)
        if any(part.time_s for part in same)
    ]
    results = [choice.result for choice in board.choices]
    means_s = [result.iteration_time_s.mean for result in results]
    step = {
        "type": "scatter",
        "mode": "markers",
        "name": f"step, {interval_name(board.result.prediction_interval_s)}",
        "x": names,
        "y": [mean_s * 1e3 for mean_s in means_s],
        "error_y": edges(means_s, [result.edges_s for result in results], 1e3),
        "marker": {"color": "--ink", "symbol": "diamond", "size": 8},
        "hovertemplate": "step: %{y:.4~g} ms<extra></extra>",
    }
    unit = f", {board.dial.unit}" if board.dial.unit else ""
    layout = {
        "barmode": "stack",
        "height": 420,
        "legend": LEGEND_BELOW,
        "xaxis": {"title": {"text": f"{board.dial.short_key}{unit}"}, "type": "category"},
        "yaxis": {"title": {"text": "step, ms"}, "rangemode": "tozero"},
    }
    return {"data": [*bars, step], "layout": layout}


def _marker(look: Look) -> dict[str, Any]:
    hatch = {"shape": "/" if look.hatched else "", "size": 7, "solidity": 0.35}
    colours = {"fgcolor": look.over, "bgcolor": look.colour, "fgopacity": 1}
    return {
        "color": look.colour,
        "line": {"color": look.edge, "width": 0.75},
        "pattern": hatch | colours | {"fillmode": "replace"},
    }


def scaling_figure(points: Sequence[Result]) -> dict[str, Any]:
    """Throughput by nodes with its interval, beside that of devices that never wait."""
    names = [f"{point.nodes}" for point in points]
    rates = [point.throughput_samples_per_s for point in points]
    bounds = [_throughput_edges(point) for point in points]
    predicted = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": f"predicted, {interval_name(points[0].prediction_interval_s)}",
        "x": names,
        "y": rates,
        "error_y": edges(rates, bounds, 1),
        "line": {"color": "--backward", "width": 2},
        "marker": {"size": 8},
        "hovertemplate": "%{x} nodes: %{y:.5~g} samples/s<extra></extra>",
    }
    ideal = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": "every device as one without DDP",
        "x": names,
        "y": [point.throughput_samples_per_s / point.scaling_efficiency for point in points],
        "line": {"color": "--exposed", "dash": "dash", "width": 2},
        "marker": {"symbol": "x", "size": 8},
        "hovertemplate": "%{x} nodes, ideal: %{y:.5~g} samples/s<extra></extra>",
    }
    layout = {
        "height": 380,
        "legend": LEGEND_BELOW,
        "xaxis": {"title": {"text": "nodes"}, "type": "category"},
        "yaxis": {"title": {"text": "samples/s"}, "rangemode": "tozero"},
    }
    return {"data": [ideal, predicted], "layout": layout}


def _throughput_edges(result: Result) -> tuple[float, float]:
    """Samples per second at the two edges of the step's interval."""
    rate, interval = result.throughput_samples_per_s, result.prediction_interval_s
    if interval is None or not interval.low:
        return rate, rate
    samples = rate * result.iteration_time_s.mean
    return samples / interval.high, samples / interval.low


def _memory(board: Storyboard) -> dict[str, Any]:
    """What a rank holds over the drawn step, beside activations, stacked."""
    choice, memory = board.choices[board.own], board.result.memory_bytes_per_gpu
    resident = memory.parameters + memory.optimizer + memory.buffers
    times_ms = [ns / 1e6 for ns, _ in choice.held] + [choice.step.length_ns / 1e6]
    held = [held for _, held in choice.held]
    held.append(held[-1])
    layers = {
        "parameters or shards, optimizer, buffers": ("--idle", [resident] * len(held)),
        "gradients": ("--backward", [each.gradients for each in held]),
        "whole parameters": ("--forward", [each.parameters for each in held]),
        "inputs of reductions": ("--hidden", [each.reductions for each in held]),
    }
    areas = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": times_ms,
            "y": [size_bytes / 2**30 for size_bytes in sizes_bytes],
            "stackgroup": "held",
            "line": {"shape": "hv", "width": 0.75, "color": colour},
            "fillcolor": colour,
            "hovertemplate": "%{fullData.name}: %{y:.4~g} GiB<extra></extra>",
        }
        for name, (colour, sizes_bytes) in layers.items()
    ]
    layout = {
        "height": 380,
        "legend": LEGEND_BELOW,
        "xaxis": {"title": {"text": "from the start of the step, ms"}},
        "yaxis": {"title": {"text": "GiB a rank"}, "rangemode": "tozero"},
    }
    return {"data": areas, "layout": layout}
