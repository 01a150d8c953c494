"""Why a measurement could not be made.

MeasureError         a rank, a file or a user's function: what, and what to do
├── LostContactError another rank is gone; the reason is its own
├── RefusedError     all ranks say the same: the first is enough
└── StoppedError     the user stopped it, by Ctrl-C
"""

from __future__ import annotations

from ddpsim.errors import DdpsimError

_LAST_ERROR = "Last error:"  # ProcessGroupNCCL.cpp; the line after it says what


class MeasureError(DdpsimError):
    """A measurement failed for a reason outside it: a rank, a peer, a file, a user's function."""


class LostContactError(MeasureError):
    """Another rank died or cannot be heard; it may have said why."""


class RefusedError(MeasureError):
    """Rank 0 found what is wrong, and every rank ends with it."""


class StoppedError(MeasureError):
    """Ctrl-C; says what is kept of the work."""


def first_line(error: BaseException) -> str:
    """What torch said, without the trace that it adds; with what NCCL calls its last error."""
    lines = str(error).strip().splitlines() or ["no reason given"]
    last = [i + 1 for i, line in enumerate(lines) if line.startswith(_LAST_ERROR)]
    reason = "".join(f" {lines[i].strip()}" for i in last if i < len(lines))
    return lines[0] + reason
