"""What a command leaves behind."""

from __future__ import annotations

from typing import NamedTuple


class Outcome(NamedTuple):
    """An exit status and both streams."""

    code: int
    out: str
    err: str
