"""What every part of a profile has in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

__all__ = ["ProfilePart"]


class ProfilePart(BaseModel):
    """A part of a profile's file: unknown keys are errors, and so are infinities."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
