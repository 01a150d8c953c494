"""What every section of a scenario shares: strict frozen models, and errors between fields."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

__all__ = ["Fraction", "Sigma", "Spec", "fail", "given"]

Fraction = Annotated[float, Field(ge=0.001, le=1)]
Sigma = Annotated[float, Field(ge=0, le=1)]


class Spec(BaseModel):
    """Frozen, and without unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, strict=True, serialize_by_alias=True
    )


def given(value: Any) -> Any:
    """A key with nothing under it is an empty section: its defaults."""
    return {} if value is None else value


def fail(message: str, at: str = "") -> PydanticCustomError:
    """A cross-field error, shown at the key `at` of the model that raises it."""
    return PydanticCustomError("scenario", "{message}", {"message": message, "at": at})
