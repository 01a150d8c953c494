"""A published value beside its prediction: what all comparisons have in common."""

from __future__ import annotations

from dataclasses import dataclass

from ddpsim.result.model import Result

__all__ = ["Predicted", "predicted_s"]


@dataclass(frozen=True)
class Predicted:
    """A value as published, and as predicted with its 80 % interval; all four in one unit."""

    published: float
    predicted: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """Predicted over published, minus 1."""
        return self.predicted / self.published - 1

    @property
    def is_covered(self) -> bool:
        """Whether the interval holds the published value."""
        return self.low <= self.published <= self.high


def predicted_s(result: Result) -> tuple[float, float, float]:
    """A step as predicted, and the edges of its 80 % interval; raises ValueError without one."""
    if result.edges_s is None:
        raise ValueError("a step without its interval")
    return result.iteration_time_s.mean, *result.edges_s
