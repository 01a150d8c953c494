"""Where an input came from, how far it can be trusted, and how wrong it may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Provenance", "Trust", "Uncertainty"]

Trust = Literal["measured", "imported", "published", "datasheet", "stated", "assumed"]


@dataclass(frozen=True, slots=True)
class Provenance:
    """One input of a prediction: what it is, its source, and the trust that the source earns."""

    input: str
    source: str
    trust: Trust


@dataclass(frozen=True, slots=True)
class Uncertainty:
    """How wrong a time may be: standard deviation of its logarithm, and what that rests on."""

    sigma: float
    basis: str
