"""What pages draw: plotly's data and layout, whose colours are named as page.css names them.

Pages take them as they are; notebooks put hues in place of the names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import cycle
from math import ceil, floor, log10
from textwrap import wrap
from typing import Any, NamedTuple

from ddpsim.report.page.looks import Look
from ddpsim.report.page.tables import parts
from ddpsim.result.capacity import Capacity, CapacityPlan
from ddpsim.result.changes import Change, Comparison, Sensitivity, Tuning
from ddpsim.result.diagnosis import WORTH_SAYING, Diagnosis
from ddpsim.result.model import Result, interval_name
from ddpsim.result.storyboard import Storyboard
from ddpsim.result.sweep import Point, Sweep

_LEGEND_BELOW = {"orientation": "h", "traceorder": "normal", "yanchor": "top", "y": -0.22}
MARK = {"color": "--ink", "symbol": "diamond", "size": 8}
_DAY_S = 86400.0
_CHANGE = "change of the step, ms"
_SERIES = ("--backward", "--exposed", "--hidden", "--copies", "--optimizer", "--forward")
_VERDICTS = (
    "Green is faster and orange slower, even at the near end of the 80 % interval; of grey ones "
    "nobody can tell."
)


class Chart(NamedTuple):
    """A figure of a page, under a heading, with what it shows in words; `key` is its HTML id."""

    key: str
    heading: str
    words: str
    figure: dict[str, Any]


def axis(title: str, **options: Any) -> dict[str, Any]:
    """An axis under its title, in plotly's words."""
    return {"title": {"text": title}, **options}


def figure(
    data: Iterable[dict[str, Any]],
    height: int,
    x: dict[str, Any],
    y: dict[str, Any],
    **layout: Any,
) -> dict[str, Any]:
    """What plotly draws between two axes, with a legend below where it needs one."""
    usual = {"height": height, "legend": _LEGEND_BELOW, "xaxis": x, "yaxis": y}
    return {"data": list(data), "layout": usual | layout}


def points(
    name: str, x: Sequence[Any], y: Sequence[Any], says: str, **options: Any
) -> dict[str, Any]:
    """Points with lines between them, or as `mode` says; `says`: what hovering over one shows."""
    usual: dict[str, Any] = {"type": "scatter", "mode": "lines+markers", "marker": {"size": 8}}
    usual |= {"hovertemplate": f"{says}<extra></extra>"} if says else {}
    return usual | {"name": name, "x": x, "y": y} | options


def sweep_charts(sweep: Sweep) -> Iterator[Chart]:
    """Steps over the values of the first axis, a line for all else that is the same."""
    keys = ", ".join(sweep.axes[0][0]) if sweep.axes else "no axis"
    hollow = "; hollow ones do not fit in memory" if sweep.some_do_not_fit else ""
    count = sum(1 for point in sweep.points if point.interval_s)
    of = "Bars are 80 % intervals" if count else "No interval can be had"
    some = f" of {count} points" if 0 < count < len(sweep.points) else ""
    yield Chart("sweep", f"Step by {keys}", f"{of}{some}{hollow}.", _sweep_figure(sweep))


def comparison_charts(comparison: Comparison) -> Iterator[Chart]:
    """The changes that are possible, the fastest on top."""
    possible = [change for change in comparison.changes if not change.problem]
    drawn = _changes_figure(sorted(possible, key=lambda change: change.change_s))
    against = f" against {comparison.baseline}" if comparison.baseline else ""
    yield Chart("changes", f"Change of the step{against}", _VERDICTS, drawn)


def tuning_charts(tuning: Tuning, caps: Comparison | None = None) -> Iterator[Chart]:
    """What pick and fastest bring, then `caps`: each with the other options of the pick."""
    chosen = list({each.title: each for each in (tuning.pick, tuning.fastest)}.values())
    yield Chart("pick", "Change of the step by the choice", _VERDICTS, _changes_figure(chosen))
    possible = [change for change in caps.changes if not change.problem] if caps else []
    words = f"Each cap, MiB, with the other options of the choice. {_VERDICTS}"
    if possible:
        yield Chart("caps", "Change of the step by bucket cap", words, _changes_figure(possible))


def plan_charts(plan: CapacityPlan) -> Iterator[Chart]:
    """Time, and cost or GPU-hours, over the number of GPUs; the answer is marked."""
    band = "8 of 10 runs" if plan.answer.long_run else "80 % interval"
    cost = f"cost, {plan.price.currency}" if plan.price else "GPU-hours"
    times = [_in_days(size) for size in plan.sizes]
    costs = [_costs(size, is_priced=plan.price is not None) for size in plan.sizes]
    words = f"The band is the {band}."
    of_time = f"Days of the whole work. {words}"
    yield Chart("time", "Time by number of GPUs", of_time, _plan(plan, times, "time, days", band))
    heading = f"{cost[:1].upper()}{cost[1:]} by number of GPUs"
    yield Chart("cost", heading, words, _plan(plan, costs, cost, band))


def _changes_figure(changes: Sequence[Change]) -> dict[str, Any]:
    """A bar a change: by how many milliseconds the step is longer, with its interval."""
    colours = [
        "--idle" if not each.is_sure else "--hidden" if each.change_s < 0 else "--exposed"
        for each in changes
    ]
    names, values = [each.title for each in changes], [each.change_s for each in changes]
    drawn = _bars(names, [value * 1e3 for value in values], _CHANGE, colours)
    bounds = [(each.low_s, each.high_s) for each in changes]
    drawn["data"][0]["error_x"] = edges(values, bounds, 1e3)
    return drawn


def sensitivity_figure(entries: Sequence[Sensitivity]) -> dict[str, Any]:
    """A bar an input: by how many milliseconds the step is longer when it changes."""
    values = [each.change_s * 1e3 for each in entries]
    return _bars([each.what for each in entries], values, _CHANGE, "--backward")


def diagnosis_figure(diagnosis: Diagnosis) -> dict[str, Any]:
    """A bar a cause that is worth saying: its probability in percent."""
    likely = [each for each in diagnosis.causes if each.probability >= WORTH_SAYING]
    values = [each.probability * 100 for each in likely]
    return _bars([each.text for each in likely], values, "probability, %", "--backward")


def edges(
    values: Sequence[float], bounds: Sequence[tuple[float, float] | None], scale: float
) -> dict[str, Any]:
    """Plotly's error bars from values to their lower and upper bounds, in other units by `scale`.

    A value without bounds has no bar.
    """
    pairs = [(value, both or (value, value)) for value, both in zip(values, bounds, strict=True)]
    return {
        "type": "data",
        "symmetric": False,
        "array": [(high - value) * scale for value, (_, high) in pairs],
        "arrayminus": [(value - low) * scale for value, (low, _) in pairs],
        "color": "--ink",
    }


def _bars(
    names: Sequence[str], values: Sequence[float], unit: str, colour: str | Sequence[str]
) -> dict[str, Any]:
    """Horizontal bars, the first one at the top."""
    rows = [wrap(name, 33) or [""] for name in names]
    bars = {
        "type": "bar",
        "orientation": "h",
        "x": list(values),
        "y": ["<br>".join(escape(line, quote=False) for line in lines) for lines in rows],
        "marker": {"color": colour, "line": {"color": "--edge", "width": 0.75}},
        "hovertemplate": "%{y}: %{x:.4~g}<extra></extra>",
    }
    a_row = 14 + 17 * max(map(len, rows), default=1)  # px
    categories = {"type": "category", "autorange": "reversed"}
    return figure([bars], 90 + a_row * len(rows), axis(unit), categories)


def _sweep_figure(sweep: Sweep) -> dict[str, Any]:
    keys, values = sweep.axes[0] if sweep.axes else ((), ((),))
    series: dict[str, list[Point]] = {}
    for point in sweep.points:
        if point.brief:
            label = shown(", ".join(map(str, point.settings[len(keys) :])))
            series.setdefault(label, []).append(point)
    lines = [
        _line(name, same, len(keys), colour)
        for (name, same), colour in zip(series.items(), cycle(_SERIES), strict=False)
    ]
    order = [shown(" with ".join(value)) for value in values]
    x = axis(shown(", ".join(keys)), type="category", categoryorder="array", categoryarray=order)
    y = axis("step, ms", rangemode="tozero")
    return figure(lines, 420 + 20 * len(series), x, y, showlegend=len(series) > 1)


def _line(name: str, same: Sequence[Point], moving: int, colour: str) -> dict[str, Any]:
    """A line of steps over points whose first `moving` settings differ."""
    steps_s = [point.brief.iteration_time_s.mean for point in same if point.brief]
    bounds = [point.interval_s for point in same]
    bars = {"error_y": edges(steps_s, bounds, 1e3) | {"color": colour}} if any(bounds) else {}
    places = [shown(" with ".join(value for _, value in p.settings[:moving])) for p in same]
    symbols = ["circle" if point.usable else "circle-open" for point in same]
    looks = {"line": {"color": colour}, "marker": {"size": 8, "symbol": symbols}}
    says = "%{x}: %{y:.4~g} ms"
    return points(name, places, [step_s * 1e3 for step_s in steps_s], says, **looks, **bars)


def steps(
    names: Sequence[str], results: Sequence[Result], step: str, *, is_upright: bool
) -> list[dict[str, Any]]:
    """A bar a result, stacked from the parts that take time, and marks of `step` with intervals."""
    along, length = ("x", "y") if is_upright else ("y", "x")
    bars = [
        {"type": "bar", "name": same[0].name, "marker": _marker(same[0].look)}
        | {along: names, length: [part.time_s * 1e3 for part in same]}
        | {"orientation": "v" if is_upright else "h"}
        | {"hovertemplate": f"%{{fullData.name}}: %{{{length}:.4~g}} ms<extra></extra>"}
        for same in zip(*map(parts, results), strict=True)
        if any(part.time_s for part in same)
    ]
    means_s = [result.iteration_time_s.mean for result in results]
    spread = {f"error_{length}": edges(means_s, [result.edges_s for result in results], 1e3)}
    at = (names, [1e3 * mean_s for mean_s in means_s])
    says = f"step: %{{{length}:.4~g}} ms"
    x, y = at if is_upright else at[::-1]
    return [*bars, points(step, x, y, says, mode="markers", marker=MARK, **spread)]


def _marker(look: Look) -> dict[str, Any]:
    hatch = {"shape": "/" if look.hatched else "", "size": 7, "solidity": 0.35}
    colours = {"fgcolor": look.over, "bgcolor": look.colour, "fgopacity": 1}
    return {
        "color": look.colour,
        "line": {"color": look.edge, "width": 0.75},
        "pattern": hatch | colours | {"fillmode": "replace"},
    }


def _in_days(size: Capacity) -> tuple[float, float, float]:
    """Median or mean, and the edges of the band."""
    time_s, bounds_s = size.calendar_s
    low_s, high_s = bounds_s or (time_s, time_s)
    return time_s / _DAY_S, low_s / _DAY_S, high_s / _DAY_S


def _costs(size: Capacity, *, is_priced: bool) -> tuple[float, float, float]:
    """Cost or GPU-hours, with its edges from those of the time."""
    hours, cost = size.billed
    middle = cost if is_priced and cost is not None else hours
    time, low, high = _in_days(size)
    return middle, middle * low / time, middle * high / time


def _plan(
    plan: CapacityPlan, values: Sequence[tuple[float, float, float]], title: str, band: str
) -> dict[str, Any]:
    """A line over GPUs with a band, both axes by powers; the answer is marked."""
    gpus = [size.gpus for size in plan.sizes]
    middle, low, high = (list(each) for each in zip(*values, strict=True))
    says, chosen = "%{x} GPUs: %{y:.3~g}", gpus.index(plan.answer.gpus)
    edge = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip"}
    mark = {"mode": "markers", "marker": MARK | {"size": 12}}
    data = [
        points("", gpus, low, "", **edge, showlegend=False),
        points(band, gpus, high, "", **edge, fill="tonexty", fillcolor="--line"),
        points(title, gpus, middle, says, line={"color": "--backward"}),
        points("answer", [gpus[chosen]], [middle[chosen]], "", **mark),
    ]
    y = axis(title, type="log", **_ticks(min(low), max(high)))
    return figure(data, 380, axis("GPUs", type="log", tickvals=gpus), y)


def _ticks(low: float, high: float) -> dict[str, list[float]]:
    """Whole numbers at 1, 2 and 5: over a wide range Plotly writes bare digits between decades."""
    if high < 3 * low:
        return {}
    decades = range(floor(log10(low)), ceil(log10(high)))
    return {"tickvals": [digit * 10.0**decade for decade in decades for digit in (1, 2, 5)]}


def shown(text: str) -> str:
    """Text that plotly does not take for tags."""
    return escape(text, quote=False)


# of a scenario's page


def figures(board: Storyboard) -> Iterator[tuple[str, dict[str, Any]]]:
    """Plotly's data and layout, by the name of the `drawing-...` element they go into."""
    yield "sweep", _values(board)
    yield "scaling", scaling_figure(board.scaling)
    yield "sensitivity", sensitivity_figure(board.sensitivity)
    if board.choices[board.current].held:
        yield "memory", _memory(board)


def _values(board: Storyboard) -> dict[str, Any]:
    """The parts of the step by bucket size, and its interval."""
    names = [
        f"{choice.cap}<br>(yours)" if number == board.current else choice.cap
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
    choice, memory = board.choices[board.current], board.result.memory_bytes_per_gpu
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
