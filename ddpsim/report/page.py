"""A storyboard as one HTML page that needs no other file and no network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from html import escape
from importlib.metadata import version
from textwrap import wrap
from typing import Any

from ddpsim.errors import printable
from ddpsim.report.shell import packaged, render
from ddpsim.report.text import PARTS, ranks
from ddpsim.result.model import BucketTimes, Result
from ddpsim.result.storyboard import CapChoice, DrawnRank, Storyboard
from ddpsim.units import MIB, NS_PER_S, format_bytes, format_duration

__all__ = ["page"]

_MOST_ROWS = 300  # of a table of buckets
_SECTIONS = (
    ("timeline", "Timeline"),
    ("buckets", "Buckets"),
    ("breakdown", "Breakdown"),
    ("sweep", "Bucket sizes"),
    ("scaling", "Scaling"),
    ("sensitivity", "What matters"),
    ("trust", "Sources"),
    ("left-out", "Not shown"),
)


@dataclass(frozen=True, slots=True)
class _Look:
    """How a kind of work is drawn: colours are the style sheet's; a hatch says it without them."""

    name: str
    colour: str
    short: str = ""
    hatched: bool = False
    over: str = "--on-colour"  # the hatch's
    text: str = "--on-colour"
    edge: str = "--edge"
    low: bool = False  # a thin bar beneath


_COPIES = "copies and buffers"
_WAITING = "compute waits for communication"
_IDLE = "waits for data, or stalls"
_LOOKS = {
    "forward": _Look("forward", "--forward", "forward"),
    "backward": _Look("backward", "--backward", "backward", text="--on-backward"),
    "bucket_copy": _Look(_COPIES, "--copies"),
    "copy_back": _Look(_COPIES, "--copies"),
    "buffers": _Look(_COPIES, "--copies"),
    "optimizer": _Look("optimizer", "--optimizer", "optimizer"),
    "comm_wait": _Look(_WAITING, "--ground", hatched=True, over="--exposed", edge="--exposed"),
    "data_wait": _Look(_IDLE, "--ground", hatched=True, over="--idle", edge="--idle"),
    "stall": _Look(_IDLE, "--ground", hatched=True, over="--idle", edge="--idle"),
    "hidden": _Look("communication, hidden under compute", "--hidden"),
    "exposed": _Look(
        "communication, exposed", "--exposed", hatched=True, over="--hatch", text="--on-exposed"
    ),
    "queued": _Look("bucket ready, queued behind others", "--idle", low=True),
    "late": _Look("waits for late peers", "--ink", low=True),
    "ring_even": _Look("ring steps (zoom in)", "--raised"),
    "ring_odd": _Look("ring steps (zoom in)", "--idle"),
}
_LOOK_OF_PART = {
    "forward": _LOOKS["forward"],
    "backward_compute": _LOOKS["backward"],
    "exposed_comm": _LOOKS["exposed"],
    "optimizer": _LOOKS["optimizer"],
    "data_wait": _LOOKS["data_wait"],
    "other": _LOOKS["bucket_copy"],
}


@dataclass(frozen=True, slots=True)
class _Row:
    """A bucket of the table; seconds."""

    bucket: BucketTimes
    in_flight_s: float
    exposed_s: float


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of the breakdown."""

    name: str
    time_s: float
    share: float
    look: _Look


def page(board: Storyboard) -> str:
    """The whole page: the same bytes for the same storyboard."""
    result = board.result
    return render(
        packaged("page.html"),
        printable(result.name),
        {"timeline": _timeline(board), "figures": dict(_figures(board))},
        _FILTERS,
        result=result,
        choices=board.choices,
        own=board.own,
        scaling=board.scaling,
        sensitivity=board.sensitivity,
        left_out=board.left_out,
        ranks=ranks(result.nodes, result.gpus_per_node),
        sections=_SECTIONS,
        rank_options=_rank_options(board),
        legend=_legend(board),
        notes=list(_notes(board)),
        sweep_words=_sweep_words(board),
        scaling_words=_scaling_words(board),
        version=version("ddpsim"),
    )


def _timeline(board: Storyboard) -> dict[str, Any]:
    """What page.js draws and the slider moves; ticks from the start of the step."""
    return {
        "looks": {kind: asdict(look) for kind, look in _LOOKS.items()},
        "span_ns": _span_ns(board),
        "choices": [
            {
                "cap": choice.cap,
                "words": _cap_words(choice),
                "spoken": _spoken(choice),
                "ranks": [_rank(rank) for rank in choice.step.ranks],
            }
            for choice in board.choices
        ],
    }


def _span_ns(board: Storyboard) -> tuple[int, int]:
    """The time axis of all choices, so that what moves on it has moved in time."""
    ends = [choice.step.length_ns for choice in board.choices]
    starts = [0]
    for choice in board.choices:
        for rank in choice.step.ranks:
            starts += [span.start_ns for span in rank.compute]
            ends += [span.end_ns for span in rank.compute]
            starts += [comm.joined_ns for comm in rank.collectives]
            ends += [comm.end_ns for comm in rank.collectives]
    margin_ns = max(ends) // 100
    return min(starts) - margin_ns, max(ends) + margin_ns


def _rank(rank: DrawnRank) -> dict[str, Any]:
    label = f"rank{'s' * (len(rank.ranks) > 1)} {_listed(rank.ranks)}"
    alone = rank.is_slowest and len(rank.ranks) == 1
    return asdict(rank) | {"label": f"{label}, slowest" if alone else label}


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _rank_options(board: Storyboard) -> list[tuple[str, str]]:
    """What the choice of ranks offers: all that any choice draws, the slowest, or one."""
    drawn = sorted({n for c in board.choices for rank in c.step.ranks for n in rank.ranks})
    single = [(str(number), f"rank {number}") for number in drawn]
    slowest = ("slowest", "the slowest, and those like it")
    return [("all", f"{_listed(drawn)} (of {board.result.world_size})"), slowest, *single]


def _legend(board: Storyboard) -> list[_Look]:
    """The looks that are used."""
    used: set[str] = set()
    for rank in (rank for choice in board.choices for rank in choice.step.ranks):
        used |= {span.kind for span in (*rank.compute, *rank.host)}
        for comm in rank.collectives:
            used |= {"hidden"} | ({"exposed"} if comm.exposed else set())
            used |= {"queued"} if comm.joined_ns > comm.ready_ns else set()
            used |= {"late"} if comm.met_ns > comm.joined_ns else set()
            used |= {"ring_odd"} if comm.ring_steps else set()
    looks = [look for kind, look in _LOOKS.items() if kind in used]
    return list({look.name: look for look in looks}.values())


def _notes(board: Storyboard) -> Iterator[str]:
    """What the drawing simplifies."""
    steps = [choice.step for choice in board.choices]
    drawn = [rank for step in steps for rank in step.ranks]
    times = board.result.iteration_time_s
    if times.p90 > times.p10:
        yield (
            "Steps vary: the one of median length on the slowest rank is drawn, and the figures "
            "are the mean over all."
        )
    if board.result.world_size > len({n for rank in steps[0].ranks for n in rank.ranks}):
        yield (
            f"Of {board.result.world_size} ranks a few are drawn: the slowest, rank 0, the first "
            "of the second node, the last, and those that are slowed down on purpose. Ranks that "
            "are exactly alike share their rows."
        )
    if shortest_ns := max(rank.shortest_ns for rank in drawn):
        yield (
            f"Work below {format_duration(shortest_ns / NS_PER_S)}, such as most copies of one "
            "gradient into its bucket, is drawn as part of what it follows."
        )
    if left_out := max(rank.left_out for rank in drawn):
        yield (f"Up to {left_out} collectives, the shortest, are not drawn; the figures count all.")
    if any(comm.ring_steps for rank in drawn for comm in rank.collectives):
        yield (
            "Ring steps are drawn as equal parts of their transfer, from when the last rank "
            "joined: so they are where all ranks join together and links are equal; with late "
            "peers or unequal links single steps lie a little elsewhere."
        )


def _caption(choice: CapChoice) -> Iterator[str]:
    """The drawing in words."""
    backward_s = choice.step.backward_start_ns / NS_PER_S
    length_s = choice.step.length_ns / NS_PER_S
    yield (
        f"With {_cap_words(choice)} this step takes {format_duration(length_s)}; its backward "
        f"starts at {format_duration(backward_s)}."
    )
    for rank in choice.step.ranks:
        ends = [span.end_ns for span in rank.compute if span.kind == "backward"]
        buckets = [comm for comm in rank.collectives if comm.bucket >= 0]
        late = sum(comm.end_ns > max(ends, default=0) for comm in buckets)
        end = f" The backward ends at {format_duration(max(ends) / NS_PER_S)};" if ends else ""
        yield (
            f"Rank{'s' * (len(rank.ranks) > 1)} {_listed(rank.ranks)}:{end} "
            f"{late} of {len(buckets)} buckets{' that are drawn' if rank.left_out else ''} "
            f"{'ends' if late == 1 else 'end'} after it. "
            f"Communication is hidden for {format_duration(rank.hidden_ns / NS_PER_S)} "
            f"and exposed for {format_duration(rank.exposed_ns / NS_PER_S)}."
        )


def _cap_words(choice: CapChoice) -> str:
    if choice.cap == "default":
        return "the default (1, then 25 MiB)"
    return f"{choice.cap} MiB"


def _spoken(choice: CapChoice) -> str:
    """What a screen reader says of the slider's place."""
    result = choice.result
    step, exposed = (
        format_duration(s) for s in (result.iteration_time_s.mean, result.exposed_comm_s)
    )
    return f"{_cap_words(choice)}: step {step}, {exposed} of communication exposed"


def _against(choice: CapChoice, own: Result) -> str:
    """A choice's step beside the scenario's own."""
    mean_s, own_s = choice.result.iteration_time_s.mean, own.iteration_time_s.mean
    if format_duration(mean_s) == format_duration(own_s):
        return "The step is as long as the scenario's own."
    longer = "longer" if mean_s > own_s else "shorter"
    by = f"{format_duration(abs(mean_s - own_s))} ({abs(mean_s / own_s - 1):.1%})"
    return f"The step is {by} {longer} than the scenario's own."


def _bucket_rows(choice: CapChoice) -> list[_Row]:
    slowest = choice.step.ranks[0]
    seen = {comm.bucket: comm for comm in slowest.collectives}
    rows = []
    for bucket in choice.result.buckets[:_MOST_ROWS]:
        comm = seen.get(bucket.index)
        in_flight_ns = comm.end_ns - comm.joined_ns if comm else 0
        exposed_ns = sum(end - start for start, end in comm.exposed) if comm else 0
        rows.append(_Row(bucket, in_flight_ns / NS_PER_S, exposed_ns / NS_PER_S))
    return rows


def _parts(result: Result) -> list[_Part]:
    whole_s = result.iteration_time_s.mean
    parts = ((key, name, getattr(result.breakdown_s, key)) for key, name in PARTS.items())
    return [_Part(name, s, s / whole_s, _LOOK_OF_PART[key]) for key, name, s in parts]


def _interval(result: Result) -> str:
    interval = result.prediction_interval_s
    if interval is None:
        return "none can be had"
    return f"{format_duration(interval.low)} to {format_duration(interval.high)}"


def _interval_name(result: Result) -> str:
    interval = result.prediction_interval_s
    return f"{interval.level:.0%} interval" if interval else "interval"


def _new_warnings(result: Result, own: Result) -> str:
    """What is to be said of a choice that the page's head has not said."""
    return "; ".join(warning for warning in result.warnings if warning not in own.warnings)


def _sweep_words(board: Storyboard) -> str:
    means = {choice: choice.result.iteration_time_s.mean for choice in board.choices}
    best, worst = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
    if means[worst] <= means[best] * 1.001:
        return "The bucket size makes no difference here: all steps are within 0.1 %."
    return (
        f"Of these, {_cap_words(best)} gives the shortest step, {format_duration(means[best])}, "
        f"and {_cap_words(worst)} the longest, {format_duration(means[worst])} "
        f"({means[worst] / means[best] - 1:+.1%})."
    )


def _scaling_words(board: Storyboard) -> str:
    first, last = board.scaling[0], board.scaling[-1]
    if len(board.scaling) == 1:
        return f"Only {ranks(first.nodes, first.gpus_per_node)} can be simulated; see Not shown."
    return (
        f"From {ranks(first.nodes, first.gpus_per_node)} to "
        f"{ranks(last.nodes, last.gpus_per_node)} scaling falls from "
        f"{first.scaling_efficiency:.1%} to {last.scaling_efficiency:.1%} of one device without "
        "DDP."
        if last.scaling_efficiency < first.scaling_efficiency
        else f"Scaling does not fall: {last.scaling_efficiency:.1%} on "
        f"{ranks(last.nodes, last.gpus_per_node)}."
    )


def _figures(board: Storyboard) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "sweep", _sweep(board)
    yield "scaling", _scaling(board)
    yield "sensitivity", _sensitivity(board)


def _sweep(board: Storyboard) -> dict[str, Any]:
    """The parts of the step by bucket size, and its interval."""
    names = [
        f"{choice.cap}<br>(yours)" if number == board.own else choice.cap
        for number, choice in enumerate(board.choices)
    ]
    breakdowns = [_parts(choice.result) for choice in board.choices]
    bars = [
        {
            "type": "bar",
            "name": parts[0].name,
            "x": names,
            "y": [part.time_s * 1e3 for part in parts],
            "marker": _marker(parts[0].look),
            "hovertemplate": "%{fullData.name}: %{y:.4~g} ms<extra></extra>",
        }
        for parts in zip(*breakdowns, strict=True)
        if any(part.time_s for part in parts)
    ]
    results = [choice.result for choice in board.choices]
    means_ms = [result.iteration_time_s.mean * 1e3 for result in results]
    intervals = [result.prediction_interval_s for result in results]
    step = {
        "type": "scatter",
        "mode": "markers",
        "name": f"step, {_interval_name(board.result)}",
        "x": names,
        "y": means_ms,
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [
                i.high * 1e3 - y if i else 0 for i, y in zip(intervals, means_ms, strict=True)
            ],
            "arrayminus": [
                y - i.low * 1e3 if i else 0 for i, y in zip(intervals, means_ms, strict=True)
            ],
            "color": "--ink",
        },
        "marker": {"color": "--ink", "symbol": "diamond", "size": 8},
        "hovertemplate": "step: %{y:.4~g} ms<extra></extra>",
    }
    layout = {
        "barmode": "stack",
        "height": 420,
        "legend": _LEGEND_BELOW,
        "xaxis": {"title": {"text": "bucket_cap_mb, MiB"}, "type": "category"},
        "yaxis": {"title": {"text": "step, ms"}, "rangemode": "tozero"},
    }
    return {"data": [*bars, step], "layout": layout}


def _marker(look: _Look) -> dict[str, Any]:
    hatch = {"shape": "/" if look.hatched else "", "size": 7, "solidity": 0.35}
    colours = {"fgcolor": look.over, "bgcolor": look.colour, "fgopacity": 1}
    return {
        "color": look.colour,
        "line": {"color": look.edge, "width": 0.75},
        "pattern": hatch | colours | {"fillmode": "replace"},
    }


def _scaling(board: Storyboard) -> dict[str, Any]:
    """Throughput by nodes with its interval, beside that of devices that never wait."""
    names = [f"{point.nodes}" for point in board.scaling]
    rates = [point.throughput_samples_per_s for point in board.scaling]
    edges = [_throughput_edges(point) for point in board.scaling]
    predicted = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": f"predicted, {_interval_name(board.result)}",
        "x": names,
        "y": rates,
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [high - rate for (_, high), rate in zip(edges, rates, strict=True)],
            "arrayminus": [rate - low for (low, _), rate in zip(edges, rates, strict=True)],
        },
        "line": {"color": "--backward", "width": 2},
        "marker": {"size": 8},
        "hovertemplate": "%{x} nodes: %{y:.5~g} samples/s<extra></extra>",
    }
    ideal = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": "every device as one without DDP",
        "x": names,
        "y": [point.throughput_samples_per_s / point.scaling_efficiency for point in board.scaling],
        "line": {"color": "--exposed", "dash": "dash", "width": 2},
        "marker": {"symbol": "x", "size": 8},
        "hovertemplate": "%{x} nodes, ideal: %{y:.5~g} samples/s<extra></extra>",
    }
    layout = {
        "height": 380,
        "legend": _LEGEND_BELOW,
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


def _sensitivity(board: Storyboard) -> dict[str, Any]:
    """The change of the step for each single change, the largest on top."""
    entries = board.sensitivity[::-1]
    bars = {
        "type": "bar",
        "orientation": "h",
        "x": [entry.change_s * 1e3 for entry in entries],
        "y": ["<br>".join(map(escape, wrap(entry.what, 22))) for entry in entries],
        "marker": _marker(_LOOKS["backward"]),
        "hovertemplate": "%{x:.4~g} ms<extra></extra>",
    }
    layout = {
        "height": 90 + 52 * len(entries),
        "xaxis": {"title": {"text": "change of the step, ms"}},
        "yaxis": {"type": "category"},
    }
    return {"data": [bars], "layout": layout}


_LEGEND_BELOW = {"orientation": "h", "traceorder": "normal", "yanchor": "top", "y": -0.22}
_FILTERS: dict[str, Callable[..., Any]] = {
    "against": _against,
    "bucket_rows": _bucket_rows,
    "bytes": format_bytes,
    "cap_words": _cap_words,
    "caption": _caption,
    "count": lambda value: f"{value:,.1f}",
    "duration": format_duration,
    "interval": _interval,
    "interval_name": _interval_name,
    "mib": lambda size_bytes: f"{size_bytes / MIB:.2f} MiB",
    "new_warnings": _new_warnings,
    "parts": _parts,
    "percent": lambda share: f"{share:.1%}",
    "rows_left_out": lambda choice: max(0, len(choice.result.buckets) - _MOST_ROWS),
    "sentence": lambda text: f"{text[:1].upper()}{text[1:]}.",
    "signed": lambda seconds: f"{'+' if seconds > 0 else ''}{format_duration(seconds)}",
    "signed_percent": lambda share: f"{share:+.2%}",
    "slowest_rank": lambda rank: _listed(rank.ranks),
    "spoken": _spoken,
    "stop": lambda cap: "def." if cap == "default" else cap if cap[0] != "[" else "list",
}
