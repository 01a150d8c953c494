"""The source of an input, how far it can be trusted, and how wrong it may be."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp
from typing import Literal

Z_80 = 1.2815515655446004  # of a normal distribution: 80 % lie within +/- z sigma

Trust = Literal["measured", "imported", "published", "datasheet", "stated", "assumed"]


@dataclass(frozen=True, slots=True)
class Provenance:
    """One input of a prediction: what it is, its source, and the trust that the source earns."""

    input: str
    source: str
    trust: Trust


@dataclass(frozen=True, slots=True)
class Uncertainty:
    """How wrong a time may be: standard deviation of its logarithm, and what that rests on.

    `least`: the part of a time that is left at least, where something else then limits it.
    """

    sigma: float
    basis: str
    least: float = 0.0

    @property
    def factor(self) -> float:
        """How many times longer a time is in 80 % of cases at most."""
        return exp(Z_80 * self.sigma)

    @property
    def edges(self) -> tuple[float, float]:
        """The factors on a time that hold 80 % of what it may be."""
        return max(self.least, 1 / self.factor), self.factor
