"""A published step beside its prediction: what all comparisons have in common."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Predicted"]


@dataclass(frozen=True)
class Predicted:
    """A step as published, and as predicted with its 80 % interval; seconds."""

    published_s: float
    predicted_s: float
    low_s: float
    high_s: float

    @property
    def error(self) -> float:
        """Predicted over published, minus 1."""
        return self.predicted_s / self.published_s - 1

    @property
    def is_covered(self) -> bool:
        """Whether the interval holds the step."""
        return self.low_s <= self.published_s <= self.high_s
