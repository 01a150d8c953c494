"""A page's figures as plotly draws them: bucket sizes, scaling, sensitivity."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ddpsim.report.page.charts import (
    axis,
    edges,
    figure,
    points,
    sensitivity_figure,
    steps,
)
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
    results = [choice.result for choice in board.choices]
    step = f"step, {interval_name(board.result.prediction_interval_s)}"
    unit = f", {board.dial.unit}" if board.dial.unit else ""
    x = axis(f"{board.dial.short_key}{unit}", type="category")
    data = steps(names, results, step, is_upright=True)
    return figure(data, 420, x, axis("step, ms", rangemode="tozero"), barmode="stack")


def scaling_figure(results: Sequence[Result]) -> dict[str, Any]:
    """Throughput by nodes with its interval, beside that of devices that never wait."""
    names = [f"{result.nodes}" for result in results]
    rates = [result.throughput_samples_per_s for result in results]
    free = [rate / r.scaling_efficiency for rate, r in zip(rates, results, strict=True)]
    spread = edges(rates, [_throughput_edges(result) for result in results], 1)
    interval = interval_name(results[0].prediction_interval_s)
    line = {"color": "--backward", "width": 2}
    dashed = {"color": "--exposed", "dash": "dash", "width": 2}
    says, free_says = "%{x} nodes: %{y:.5~g} samples/s", "%{x} nodes, ideal: %{y:.5~g} samples/s"
    cross, without = {"symbol": "x", "size": 8}, "every device as one without DDP"
    data = [
        points(without, names, free, free_says, line=dashed, marker=cross),
        points(f"predicted, {interval}", names, rates, says, line=line, error_y=spread),
    ]
    y = axis("samples/s", rangemode="tozero")
    return figure(data, 380, axis("nodes", type="category"), y)


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
        points(
            *(name, times_ms, [size_bytes / 2**30 for size_bytes in sizes_bytes]),
            "%{fullData.name}: %{y:.4~g} GiB",
            mode="lines",
            stackgroup="held",
            line={"shape": "hv", "width": 0.75, "color": colour},
            fillcolor=colour,
        )
        for name, (colour, sizes_bytes) in layers.items()
    ]
    x = axis("from the start of the step, ms")
    return figure(areas, 380, x, axis("GiB a rank", rangemode="tozero"))
