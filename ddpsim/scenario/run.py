"""The run section: iterations, seed and noise."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ddpsim.scenario.base import Sigma, Spec
from ddpsim.scenario.quantity import Duration


class Jitter(Spec):
    """A compute time multiplier per rank and iteration."""

    distribution: Literal["lognormal"] = Field("lognormal", description="median 1")
    sigma: Sigma = Field(description="of the logarithm")


class Stalls(Spec):
    """Rare moments in which a rank stands still: page faults, a reset link, the collector."""

    probability: Annotated[float, Field(gt=0, le=1)] = Field(
        description="of a stall in an iteration of a rank"
    )
    duration_s: Duration = Field(alias="duration", description="of each")


class Run(Spec):
    """How the simulation is run."""

    iterations: Annotated[int, Field(ge=1, le=100_000)] = Field(
        20, description="steady iterations simulated"
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(0, description="of stragglers and jitter")
    jitter: Jitter | None = Field(None, description="omitted: every iteration is alike")
    stalls: Stalls | None = Field(None, description="omitted: none")
    allow_extrapolation: bool = Field(
        default=False, description="use a log beyond its sizes or its ranks, with a warning"
    )
