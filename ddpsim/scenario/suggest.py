"""Did-you-mean: the nearest known name to a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean"]


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """`" Did you mean 'latency'?"`, or an empty string when nothing known is near."""
    by_key = {_squash(name): name for name in known}
    key = _squash(wrong)
    if key in by_key:
        return f" Did you mean {by_key[key]!r}?"
    near = difflib.get_close_matches(key, by_key, n=1, cutoff=0.6)
    return f" Did you mean {by_key[near[0]]!r}?" if near else ""


def _squash(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")
