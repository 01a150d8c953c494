"""Why a measurement could not be made.

MeasureError         a rank, a file or a user's function: what, and what to do
└── LostContactError another rank is gone; the reason is its own
"""

from __future__ import annotations

from ddpsim.errors import DdpsimError

__all__ = ["LostContactError", "MeasureError"]


class MeasureError(DdpsimError):
    """A measurement failed for a reason outside it: a rank, a peer, a file, a user's function."""


class LostContactError(MeasureError):
    """Another rank died or cannot be heard; it may have said why."""
