"""Did-you-mean: the nearest known name to a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

__all__ = ["did_you_mean", "nearest", "some_of"]

_LONGEST = 100  # comparing longer text takes seconds
_MOST_LISTED = 20  # names that a message can list and stay short


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """`" Did you mean 'latency'?"`, or an empty string when nothing known is near."""
    near = nearest(wrong, known)
    return "" if near is None else f" Did you mean {near!r}?"


def some_of(known: Sequence[str], wrong: str) -> str:
    """All known names, or of many those most like a misspelt one and how many others there are."""
    if len(known) <= _MOST_LISTED:
        return ", ".join(known)
    like = set(difflib.get_close_matches(wrong[:_LONGEST], known, n=_MOST_LISTED // 2, cutoff=0))
    listed = ", ".join(name for name in known if name in like)
    return f"{listed} and {len(known) - len(like)} more"


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
