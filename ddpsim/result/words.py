"""A prediction interval in words, for screens, pages, notebooks and messages."""

from __future__ import annotations

from ddpsim.result.model import PredictionInterval
from ddpsim.units import format_duration

OUT_OF_MEMORY = "run out of memory"  # a warning of this is said with what would make it fit
_NONE = "no interval can be had"


def edges_in_words(interval: PredictionInterval | None) -> str:
    """Both edges: `70.1 ms to 85.3 ms`."""
    if interval is None:
        return _NONE
    return f"{format_duration(interval.low)} to {format_duration(interval.high)}"


def interval_name(interval: PredictionInterval | None) -> str:
    """The level: `80% interval`."""
    return f"{interval.level:.0%} interval" if interval else "interval"


def interval_in_words(interval: PredictionInterval | None) -> str:
    """Level and edges: `80% interval 70.1 ms to 85.3 ms`."""
    return f"{interval_name(interval)} {edges_in_words(interval)}" if interval else _NONE
