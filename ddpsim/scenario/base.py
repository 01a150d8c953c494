"""What every section of a scenario shares: strict frozen models, and errors between fields."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

__all__ = ["MOST_RANKS", "Fraction", "Number", "Sigma", "Spec", "fail", "given", "numbered"]

MOST_RANKS = 2_000_000
Fraction = Annotated[float, Field(ge=0.001, le=1)]
Sigma = Annotated[float, Field(ge=0, le=1)]


def numbered(key: Any) -> Any:
    """A key that is a number's digits as that number: JSON and `--set` write no other."""
    is_digits = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 20
    return int(key) if is_digits else key


Number = Annotated[int, BeforeValidator(numbered)]  # of a rank or a node, as a key


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
