"""A published step beside its prediction: what all comparisons have in common."""

from __future__ import annotations

from dataclasses import dataclass

from ddpsim.result.model import Result

__all__ = ["Predicted", "predicted_s"]


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


def predicted_s(result: Result) -> tuple[float, float, float]:
    """A step as predicted, and the edges of its 80 % interval; raises ValueError without one."""
    if result.edges_s is None:
        raise ValueError("a step without its interval")
    return result.iteration_time_s.mean, *result.edges_s
