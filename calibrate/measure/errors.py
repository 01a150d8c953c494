"""Why a measurement could not be made."""

from __future__ import annotations

from ddpsim.errors import DdpsimError

__all__ = ["MeasureError"]


class MeasureError(DdpsimError):
    """A measurement failed for a reason outside it: a rank, a peer, a file, a user's function."""
