"""Results as tables of HTML: one element, without script, and what users wrote is only text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from ddpsim.errors import printable
from ddpsim.report.changes import interval_of, signed, signed_bytes, verdict
from ddpsim.report.page.tables import parts
from ddpsim.report.sweep import figures_in_words, rate_unit, short_keys, shown_points
from ddpsim.result.capacity import Capacity, CapacityPlan
from ddpsim.result.changes import Change, Comparison
from ddpsim.result.model import Result, Tabled, interval_in_words
from ddpsim.result.sweep import Point, Sweep
from ddpsim.units import (
    format_duration,
    format_long_duration,
    format_number,
    format_percent,
)
from ddpsim.wording import counted, ranks


def table_of(answer: Tabled) -> str:
    """The figures of an answer, which its text shows too."""
    match answer:
        case Result():
            size = ranks(answer.nodes, answer.gpus_per_node, answer.gpus_by_node)
            return _table(f"{answer.name}, {size}", _answer(answer))
        case Sweep():
            return _sweep_table(answer)
        case Comparison():
            return _comparison_table(answer)
        case CapacityPlan():
            return _plan_table(answer)
    raise TypeError(f"{type(answer).__name__} has no table")


def _answer(result: Result) -> Iterator[tuple[str, str, str]]:
    """Step, interval, throughput and bottleneck, then each part of the step with its share."""
    step = format_duration(result.iteration_time_s.mean)
    yield "step", step, interval_in_words(result.prediction_interval_s)
    efficiency = f"{format_percent(result.scaling_efficiency)} of one device without DDP"
    yield "throughput", f"{format_number(result.throughput_samples_per_s)} samples/s", efficiency
    yield "bottleneck", result.bottleneck.kind, result.bottleneck.text
    for part in parts(result):
        yield part.name, format_duration(part.time_s), f"{part.share:.1%} of the step"
    for warning in result.warnings:
        yield "warning", "", warning


def _sweep_table(sweep: Sweep) -> str:
    """A row a point, as `ddpsim sweep` prints them: of many points the best."""
    points = shown_points(sweep)
    less = f", the best {len(points)}" if len(points) < len(sweep.points) else ""
    keys = short_keys([key for keys, _ in sweep.axes for key in keys])
    names = ("GPUs", "step", rate_unit(sweep), "scaling", "exposed", "memory")
    rows = []
    for point in points:
        figures = dict.fromkeys(names, "")
        if point.brief:
            figures = figures_in_words(sweep, point, point.brief)
        values = (setting.value for setting in point.settings)
        rows.append((*values, *(figures[name] for name in names), _mark(sweep, point)))
    title = f"{sweep.name}, {counted(len(sweep.points), 'point')}{less}"
    return _table(title, rows, (*keys, *names, ""))


def _mark(sweep: Sweep, point: Point) -> str:
    if point.brief is None:
        return f"cannot be simulated: {point.problem}"
    if not point.usable:
        return "does not fit in memory"
    if point is sweep.best:
        return "best"
    return "front" if any(point is other for other in sweep.front) else ""


def _comparison_table(comparison: Comparison) -> str:
    """A row for each change, the fastest first, then impossible ones."""
    step = format_duration(comparison.step_s)
    size = counted(comparison.world_size, "rank")
    title = (
        f"{comparison.name}, {size}: {step}, {interval_in_words(comparison.prediction_interval_s)}"
    )
    head = ("option", "step", "change", "", "80% interval", "memory", "")
    ordered = sorted(comparison.changes, key=lambda change: (bool(change.problem), change.change_s))
    return _table(title, map(_change, ordered), head)


def _change(change: Change) -> tuple[str, ...]:
    if change.problem:
        return (change.title, *[""] * 5, f"impossible: {change.problem}")
    return (
        change.title,
        "" if change.step_s is None else format_duration(change.step_s),
        signed(change.change_s),
        f"{change.change:+.1%}",
        interval_of(change),
        signed_bytes(change.memory_bytes) if change.fits else "does not fit",
        verdict(change),
    )


def _plan_table(plan: CapacityPlan) -> str:
    """A row a world size, the answer marked."""
    cost = plan.price.currency if plan.price else ""
    head = ("GPUs", "nodes", "step", "time", "GPU-hours", cost, "scaling", "bottleneck", "")
    return _table(plan.name, [(*_size(size), _role(plan, size)) for size in plan.sizes], head)


def _size(size: Capacity) -> tuple[str, ...]:
    hours, cost = size.billed
    return (
        f"{size.gpus:,}",
        f"{size.nodes} x {size.gpus_per_node}",
        format_duration(size.step_s),
        format_long_duration(size.calendar_s[0]),
        format_number(hours),
        "" if cost is None else format_number(cost),
        format_percent(size.scaling_efficiency),
        size.bottleneck.partition(":")[0],
    )


def _role(plan: CapacityPlan, size: Capacity) -> str:
    roles = {
        "answer": size == plan.answer,
        "knee": size.gpus == plan.knee_gpus,
        "does not fit in memory": size.fits is False,
    }
    return ", ".join(role for role, holds in roles.items() if holds)


def _table(caption: str, rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """A table with its caption; `head` names its columns."""
    lines = [_row("th", head)] if head else []
    lines += [_row("td", row) for row in rows]
    return f"<table>\n<caption>{_text(caption)}</caption>\n{''.join(lines)}</table>"


def _row(tag: str, cells: Sequence[str]) -> str:
    shown = (f'<{tag} style="text-align: left">{_text(cell)}</{tag}>' for cell in cells)
    return f"<tr>{''.join(shown)}</tr>\n"


def _text(text: str) -> str:
    return escape(printable(text))
