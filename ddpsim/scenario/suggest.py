"""Did-you-mean: the nearest known name to a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean", "nearest"]

_LONGEST = 100  # comparing longer text takes seconds


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """`" Did you mean 'latency'?"`, or an empty string when nothing known is near."""
    near = nearest(wrong, known)
    return "" if near is None else f" Did you mean {near!r}?"


def nearest(wrong: str, known: Iterable[str]) -> str | None:
    """The known name that a misspelt one stands for, if one is near."""
    by_key = {_squash(name): name for name in known}
    key = _squash(wrong[:_LONGEST])
    if key in by_key:
        return by_key[key]
    within = [squashed for squashed in by_key if len(key) > 3 and key in squashed]
    near = within if len(within) == 1 else difflib.get_close_matches(key, by_key, n=1, cutoff=0.6)
    return by_key[near[0]] if near else None


def _squash(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")
