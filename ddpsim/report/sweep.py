"""A sweep as text on one screen, as CSV, and as Parquet."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO, StringIO
from itertools import groupby
from textwrap import wrap

from ddpsim.report.lines import as_text, by_text, labelled, listed, noted_noise, screen_width
from ddpsim.result.model import Brief
from ddpsim.result.sweep import FlatRegion, Point, Sweep
from ddpsim.units import format_bytes, format_duration, format_number, format_percent
from ddpsim.wording import counted

_ROWS = 40  # a larger sweep shows its best ones
_RUNS = 8


@as_text
def render_sweep(sweep: Sweep) -> list[str]:
    """The points as a table with the best one marked, and the points as good as it."""
    return [*_table(sweep), "", *_answer(sweep), *_problems(sweep)]


def _table(sweep: Sweep) -> Iterator[str]:
    shown = shown_points(sweep)
    count = counted(len(sweep.points), "point")
    goal = sweep.title(sweep.goals[0])
    less = f", the best {len(shown)} by {goal}" if len(shown) < len(sweep.points) else ""
    yield f"{sweep.name[:60]}   {count}{less}"
    yield ""
    names = short_keys([key for keys, _ in sweep.axes for key in keys])
    widths = [
        max(len(name), *(len(point.settings[i].value) for point in shown))
        for i, name in enumerate(names)
    ]
    head = "  ".join(f"{name:>{width}}" for name, width in zip(names, widths, strict=True))
    columns = _fitting(sweep, screen_width() - len(head) - 4)
    yield f"    {head}{''.join(f'{name:>{width}}' for name, width in columns.items())}"
    best, front = sweep.best, sweep.front
    for point in shown:
        mark = "" if point.usable or not point.brief else "!"
        if point is best:
            mark = "*"
        elif any(point is other for other in front):
            mark = "+"
        cells = "  ".join(
            f"{setting.value:>{width}}"
            for setting, width in zip(point.settings, widths, strict=True)
        )
        yield f"  {mark:<2}{cells}{_figures(sweep, point, columns)}"


def shown_points(sweep: Sweep) -> Sequence[Point]:
    """All points of a small sweep in the order of the grid, else the front or the best."""
    if len(sweep.points) <= _ROWS:
        return sweep.points
    return (sweep.front or sweep.ranked)[:_ROWS] or sweep.points[:_ROWS]


def short_keys(keys: Sequence[str]) -> list[str]:
    """Keys without their section where the rest says enough."""
    short = [key.rpartition(".")[2] for key in keys]
    return [name if short.count(name) == 1 else key for name, key in zip(short, keys, strict=True)]


_COLUMNS = {
    "GPUs": 9,
    "step": 11,
    "rate": 13,
    "per GPU": 10,
    "scaling": 9,
    "exposed": 11,
    "memory": 12,
}
_LEAST = ("memory", "per GPU", "exposed", "scaling", "GPUs", "rate", "step")  # left out first
_OF_GOALS = {
    "throughput": "rate",
    "per-gpu": "per GPU",
    "efficiency": "scaling",
    "step": "step",
    "exposed": "exposed",
    "gpus": "GPUs",
    "memory": "memory",
}


def _fitting(sweep: Sweep, room: int) -> dict[str, int]:
    """Columns with their widths, as many as there is room for; what decides is never left out."""
    decides = {_OF_GOALS[goal] for goal in sweep.goals}
    if sweep.some_do_not_fit:
        decides.add("memory")
    columns = dict(_COLUMNS)
    for name in _LEAST:
        if sum(columns.values()) > room and name not in decides:
            del columns[name]
    return {rate_unit(sweep) if name == "rate" else name: at for name, at in columns.items()}


def rate_unit(sweep: Sweep) -> str:
    """The unit of throughput, and the head of its column."""
    return "tokens/s" if sweep.counts_tokens else "samples/s"


def _figures(sweep: Sweep, point: Point, columns: Mapping[str, int]) -> str:
    if point.brief is None:
        return "  cannot be simulated"
    cells = figures_in_words(sweep, point, point.brief)
    return "".join(f"{cells[name]:>{width}}" for name, width in columns.items())


def figures_in_words(sweep: Sweep, point: Point, brief: Brief) -> dict[str, str]:
    """The figures of a point, whose `brief` it is, by the heads of their columns."""
    return {
        "GPUs": f"{brief.world_size:,}",
        "step": format_duration(brief.iteration_time_s.mean),
        rate_unit(sweep): format_number(sweep.figure(brief, point, "throughput")),
        "per GPU": format_number(sweep.figure(brief, point, "per-gpu")),
        "scaling": format_percent(brief.scaling_efficiency),
        "exposed": format_duration(brief.exposed_comm_s),
        "memory": format_bytes(brief.memory_bytes_per_gpu.total),
    }


def _answer(sweep: Sweep) -> Iterator[str]:
    best = sweep.best
    if best is None or best.brief is None:
        yield from labelled("best", "none: no point fits into the memory of its GPUs")
        return
    settings = ", ".join(map(str, best.settings)) or "the scenario as it is"
    goals = [sweep.title(goal) for goal in sweep.goals]
    yield from labelled("best *", f"{settings} ({goals[0]}){_gain(sweep, best)}")
    if len(sweep.sample_sizes) > 1:
        yield from labelled("samples", _other_samples(sweep))
    values, regions = dict(sweep.axes), sweep.flat_regions()
    yield from listed("flat", (_flat(one, values[one.keys], sweep.within) for one in regions))
    if sweep.front:
        text = f"{len(sweep.front)} points that no other beats in both {' and '.join(goals)}"
        yield from labelled("front +", text)
    if sweep.keeps_own and sweep.own.brief is not best.brief:
        yield from labelled("keep", f"{_as_is(sweep)}: nothing here is {sweep.within:.1%} better")
    yield from noted_noise(sweep.noise)
    if sweep.some_do_not_fit:
        yield from labelled("!", "needs more memory than its GPUs have, so it is never the best")
    aside = {name: ", ".join(settings) for name, settings in sweep.set_aside.items()}
    yield from listed("set aside", by_text(aside))
    for warning in sweep.warnings:
        yield from labelled("! *", warning)
    if not any(point.interval_s for point in sweep.points):
        yield from labelled(
            "trust", "no interval here; `ddpsim run` gives one for each point, with its sources"
        )


def _other_samples(sweep: Sweep) -> str:
    """What does not compare between points whose samples are not alike."""
    sizes: dict[str, list[int]] = {}
    for key, size in filter(None, sweep.sample_sizes):
        sizes.setdefault(key, []).append(size)
    ranges = [f"{key} {_range(values)}" for key, values in sorted(sizes.items())]
    unknown = ["unknown"] if None in sweep.sample_sizes else []
    samples = " or ".join([*ranges, *unknown])
    which = f"points differ in what a sample is ({samples}), which is another training"
    if sweep.counts_tokens:
        return f"{which}: throughput is in tokens/s; steps do not compare"
    return f"{which}: samples/s and steps do not compare, so the best is of unlike work"


def _range(values: Sequence[int]) -> str:
    least, most = min(values), max(values)
    return f"{least:,} to {most:,}" if most > least else f"{least:,}"


def _gain(sweep: Sweep, best: Point) -> str:
    """How much better the best point is than the scenario as it is."""
    plain, goal = sweep.own, sweep.goals[0]
    if plain.brief is None or best.brief is None:
        return ""
    if best.brief is plain.brief:
        return f": {_as_is(sweep)}"
    if not (before := sweep.figure(plain.brief, plain, goal)):
        return ""
    gain = sweep.figure(best.brief, best, goal) / before - 1
    return f": {f'{gain:+.1%} beside' if gain else 'as good as'} {_as_is(sweep)}"


def _as_is(sweep: Sweep) -> str:
    """The scenario without any setting of an axis."""
    fixed = "".join(f" --set {setting}" for setting in sweep.fixed)
    return f"the scenario{' with' if fixed else ' as it is'}{fixed}"


def _flat(region: FlatRegion, values: Sequence[tuple[str, ...]], within: float) -> str:
    keys, keep = ", ".join(region.keys), " with ".join(region.keep)
    if len(region.values) == 1:
        return f"{keys}: no other value is within {within:.1%} of {keep}"
    runs = [
        [" with ".join(value) for value in run]
        for is_flat, run in groupby(values, key=lambda value: value in region.values)
        if is_flat
    ]
    listed = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(run) for run in runs]
    more = f" and {len(runs) - _RUNS} more ranges" if len(runs) > _RUNS else ""
    return f"{keys}: {', '.join(listed[:_RUNS])}{more} within {within:.1%} of the best: keep {keep}"


def _problems(sweep: Sweep) -> Iterator[str]:
    failed = [point for point in sweep.points if point.problem]
    if not failed:
        return
    yield ""
    yield f"{len(failed):,} of {len(sweep.points):,} points cannot be simulated:"
    reasons: dict[str, list[Point]] = {}
    for point in failed:
        reasons.setdefault(point.problem or "", []).append(point)
    for reason, points in list(reasons.items())[:5]:
        where = ", ".join(map(str, points[0].settings))
        more = f" and {len(points) - 1:,} more" if len(points) > 1 else ""
        yield from (f"  {row}" for row in wrap(f"{where}{more}:", screen_width() - 2))
        yield from (
            f"    {row}" for line in reason.splitlines() for row in wrap(line, screen_width() - 4)
        )


def render_csv(sweep: Sweep) -> str:
    """A row a point, with the settings' keys and the figures' names (SI units) above."""
    rows = sweep.rows()
    text = StringIO()
    table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


def render_parquet(sweep: Sweep) -> bytes:
    """Writes the rows of a sweep as Parquet; raises ImportError without the extra `parquet`."""
    file = BytesIO()
    sweep.to_polars().write_parquet(file)
    return file.getvalue()
