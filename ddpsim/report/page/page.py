"""A storyboard as one HTML page that needs no other file and no network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddpsim.errors import printable
from ddpsim.report.capacity.long_run import month_rows
from ddpsim.report.page import words
from ddpsim.report.page.charts import figures
from ddpsim.report.page.shell import packaged, render
from ddpsim.report.page.tables import bucket_rows, parts, rows_left_out
from ddpsim.report.page.timeline import legend, rank_options, timeline
from ddpsim.result.model import edges_in_words, interval_name
from ddpsim.result.storyboard import Storyboard
from ddpsim.units import format_bytes, format_duration, format_number, format_percent
from ddpsim.version import __version__
from ddpsim.wording import ranks


def _sections(board: Storyboard) -> list[tuple[str, str]]:
    """Keys and titles of sections, for links."""
    has_memory = bool(board.choices[board.current].held)
    return [
        ("timeline", "Timeline"),
        ("buckets", board.dial.sent),
        ("breakdown", "Breakdown"),
        *([("memory", "Memory")] if has_memory else []),
        ("sweep", board.dial.values),
        ("scaling", "Scaling"),
        ("sensitivity", "What matters"),
        *([("month", "A month")] if board.month else []),
        ("trust", "Sources"),
        ("left-out", "Not shown"),
    ]


def page(board: Storyboard) -> str:
    """The whole page: the same bytes for the same storyboard."""
    result = board.result
    return render(
        packaged("page.html"),
        printable(result.name),
        {"timeline": timeline(board), "figures": dict(figures(board))},
        _FILTERS,
        result=result,
        choices=board.choices,
        own=board.current,
        scaling=board.scaling,
        sensitivity=board.sensitivity,
        left_out=board.left_out,
        month=month_rows(board.month) if board.month else [],
        ranks=ranks(result.nodes, result.gpus_per_node, result.gpus_by_node),
        sections=_sections(board),
        dial=board.dial,
        values=board.dial.values,
        memory_words=words.memory_words(board),
        rank_options=rank_options(board),
        legend=legend(board),
        notes=list(words.notes(board)),
        sweep_words=words.sweep_words(board),
        scaling_words=words.scaling_words(board),
        version=__version__,
    )


_FILTERS: dict[str, Callable[..., Any]] = {
    "against": words.against,
    "bucket_rows": bucket_rows,
    "bytes": format_bytes,
    "caption": words.caption,
    "count": format_number,
    "duration": format_duration,
    "interval": lambda result: edges_in_words(result.prediction_interval_s),
    "interval_name": lambda result: interval_name(result.prediction_interval_s),
    "new_warnings": words.new_warnings,
    "parts": parts,
    "percent": format_percent,
    "rows_left_out": rows_left_out,
    "sent_in": words.sent_in,
    "sentence": lambda text: f"{text[:1].upper()}{text[1:]}.",
    "signed": lambda seconds: f"{'+' if seconds > 0 else ''}{format_duration(seconds)}",
    "signed_percent": lambda share: f"{share:+.1%}",
    "slowest_rank": lambda rank: words.listed(rank.ranks),
    "spoken": words.spoken,
    "stop": lambda cap: "def." if cap == "default" else cap if cap[0] != "[" else "list",
}
