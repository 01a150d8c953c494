"""What parts of a profile have in common: how they are read, and what lies between two points."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict


class ProfilePart(BaseModel):
    """A part of a profile's file: unknown keys are errors, and so are infinities."""

    # building: a profile's parts are built with it, not each on its own
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


def interpolated(at: float, places: Sequence[float], values: Sequence[float]) -> float:
    """Linear between ascending places; beyond the first and the last their values stay."""
    above = bisect_right(places, at)
    if above in (0, len(places)):
        return values[min(above, len(places) - 1)]
    low, high = places[above - 1], places[above]
    slope = (values[above] - values[above - 1]) / (high - low)
    return values[above - 1] + slope * (at - low)
