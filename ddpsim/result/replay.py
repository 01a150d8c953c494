"""Traced steps, and the same steps simulated."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from ddpsim.result.model import Breakdown, rounded

REPLAY_SCHEMA = "ddpsim.replay/1"


@dataclass(frozen=True)
class ReplayedStep:
    """One step, in seconds: the mean over the ranks that were recorded."""

    name: str
    traced_s: float
    simulated_s: float

    @property
    def error(self) -> float:
        """Relative error of the simulated step against the traced one."""
        return self.simulated_s / self.traced_s - 1 if self.traced_s else 0.0


@dataclass(frozen=True)
class ReplayedCollective:
    """Collectives of a step of one operation and size: how many, and seconds of the median one.

    `transfer_s`: from when the last rank has joined; `wait_s`: how long the median rank waits for
    that one; `simulated_s`: the transfer as simulated.
    """

    operation: str
    size_bytes: int
    count: int
    transfer_s: float
    wait_s: float
    simulated_s: float | None


@dataclass(frozen=True)
class ReplayedKernel:
    """What NCCL ran for all-reduces of a size, as the kernel tells, and what the model chooses.

    `protocol`, `channels`: None where it is not told.
    """

    size_bytes: int
    algorithms: tuple[str, ...]
    protocol: str | None
    channels: int | None
    model_algorithm: str
    model_protocol: str
    model_channels: int

    @property
    def agrees(self) -> bool:
        """Whether the model's choice may be what ran."""
        is_protocol = self.protocol in (None, self.model_protocol)
        return is_protocol and self.model_algorithm in self.algorithms


@dataclass(frozen=True)
class Replay:
    """A traced job simulated with the work of each rank and step as recorded.

    `traced` and `simulated` are means over steps and ranks. `predicted_s` is the mean step of the
    scenario alone, whose work is that of a usual rank. `straggler`: the rank that computes longer,
    and how many times; `interference`: how many times as long the same work takes while a
    collective is in flight (None: not told, or hidden by noise). `kernels`: NCCL's choices by size.
    `document` is the scenario, `assumed` what no trace tells.
    """

    source: str
    ranks: int
    world_size: int
    steps: tuple[ReplayedStep, ...]
    traced: Breakdown
    simulated: Breakdown
    collectives: tuple[ReplayedCollective, ...]
    predicted_s: float
    straggler: tuple[int, float] | None
    interference: float | None
    kernels: tuple[ReplayedKernel, ...]
    document: dict[str, Any]
    assumed: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def error(self) -> float:
        """Median over steps of how far the simulated step is off, without its sign."""
        return median(abs(step.error) for step in self.steps)

    @property
    def traced_s(self) -> float:
        """The mean step."""
        return sum(step.traced_s for step in self.steps) / len(self.steps)

    @property
    def simulated_s(self) -> float:
        """The mean step."""
        return sum(step.simulated_s for step in self.steps) / len(self.steps)

    def to_dict(self) -> dict[str, Any]:
        """Gives JSON's types (schema `ddpsim.replay/1`), floats to 12 decimals."""
        return {"schema": REPLAY_SCHEMA, "error": round(self.error, 12), **rounded(asdict(self))}
