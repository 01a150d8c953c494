"""The run section: iterations, seed and noise; and what disturbs the ranks of a cluster."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ddpsim.scenario.base import Number, Sigma, Spec, fail
from ddpsim.scenario.quantity import Bandwidth, Duration


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


class Stragglers(Spec):
    """A compute TIME multiplier per rank, constant over the run: drawn once, or listed."""

    distribution: Literal["lognormal"] | None = Field(None, description="median 1")
    sigma: Sigma | None = Field(None, description="of the logarithm")
    factors: dict[Number, Annotated[float, Field(gt=0, le=1000)]] | None = Field(
        None, description="rank: multiplier; 1.2 is 20 % slower"
    )

    @model_validator(mode="after")
    def _one_way(self) -> Stragglers:
        drawn = (self.distribution, self.sigma)
        if (self.factors is None) == (drawn == (None, None)):
            raise fail("needs either distribution and sigma, or factors")
        if self.factors is None and None in drawn:
            raise fail("needs both distribution and sigma")
        return self


class Background(Spec):
    """Another job's traffic on each node's network."""

    rate_bytes_per_s: Bandwidth = Field(alias="rate", description="of a node, while it sends")
    busy_s: Duration | None = Field(
        None, alias="busy", description="it sends for so long; omitted: always"
    )
    every_s: Duration | None = Field(None, alias="every", description="and again after so long")

    @model_validator(mode="after")
    def _bursts(self) -> Background:
        if (self.busy_s is None) != (self.every_s is None):
            raise fail("needs both busy and every, or neither")
        if self.busy_s is not None and self.every_s is not None:
            if self.every_s < 1e-4:
                raise fail("must be at least 100 us", "every")
            if not 0 < self.busy_s <= self.every_s:
                raise fail("must be above 0, and no longer than every", "busy")
        return self
