"""What interrupts a training of days: failures, restarts, spares, maintenance, spot notices."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ddpsim.scenario.base import MOST_RANKS, Spec, fail
from ddpsim.scenario.catalog import failures_of
from ddpsim.scenario.quantity import Duration, LongDuration


class SilentStragglers(Spec):
    """Nodes that become slow without an error, until somebody finds them."""

    mtbf_s: LongDuration = Field(alias="mtbf", description="of one node")
    slowdown: Annotated[float, Field(gt=1, le=100)] = Field(
        description="steps take so many times as long"
    )
    found_after_s: Duration = Field(
        alias="found_after", description="then the node is replaced, and nothing is lost"
    )


class Maintenance(Spec):
    """Windows in which the whole job stands still, known in advance."""

    every_s: LongDuration = Field(alias="every", description="from one beginning to the next")
    lasts_s: Duration = Field(alias="lasts", description="of each")


class Spot(Spec):
    """Nodes that the cloud takes back."""

    failures: str | None = Field(None, description="a preset of interruptions")
    mtbf_s: LongDuration | None = Field(
        None, alias="mtbf", description="of one node; default: the preset's"
    )
    notice_s: Duration = Field(
        120.0, alias="notice", description="AWS: 2 min; Google Cloud and Azure: 30 s"
    )
    replaced_after_s: Duration = Field(
        600.0, alias="replaced_after", description="until there is another; assumed"
    )

    @model_validator(mode="after")
    def _rate(self) -> Spot:
        _one_source(self.failures, self.mtbf_s)
        return self

    @property
    def per_node_s(self) -> float:
        """Interruptions of a node in a second."""
        return 1 / (self.mtbf_s or failures_of(self.failures)["node_mtbf_s"])


class Reliability(Spec):
    """What interrupts a training of days, and how it goes on; `plan` then counts it."""

    failures: str | None = Field(
        None,
        description="a preset: usual (of five clusters), meta-rsc-1, meta-rsc-2, llama-3, "
        "opt-175b, bloom",
    )
    mtbf_s: LongDuration | None = Field(
        None, alias="mtbf", description="mean time between failures; default: the preset's, or none"
    )
    mtbf_of: Literal["gpu", "node"] = Field("gpu", description="whose mtbf it is")
    detection_s: Duration = Field(
        600.0,
        alias="detection",
        description="until a failure is noticed; 10 min is torch's timeout of NCCL's collectives",
    )
    reschedule_s: Duration = Field(
        300.0, alias="reschedule", description="until a spare node is in place; assumed"
    )
    init_s: Duration = Field(
        60.0,
        alias="init",
        description="processes, data loader, compilation and first step; assumed",
    )
    init_per_rank_s: Duration = Field(
        0.02,
        alias="init_per_rank",
        description="process groups, for each rank of the job; assumed: 2 to 500 ms were published "
        "(MegaScale, arXiv 2402.15627)",
    )
    load_s: Duration | None = Field(
        None, alias="load", description="of a checkpoint; omitted: as fast as it is written"
    )
    spares: Annotated[int, Field(ge=0, le=MOST_RANKS)] | Literal["auto"] | None = Field(
        None,
        description="nodes that stand by; auto: `plan` chooses; omitted: the scheduler has others, "
        "and nobody pays for them",
    )
    repair_s: LongDuration = Field(
        86400.0, alias="repair", description="until a broken node is back; assumed"
    )
    elastic: bool = Field(
        default=False, description="go on with fewer nodes where no spare is left, as torchrun can"
    )
    stragglers: SilentStragglers | None = Field(None, description="omitted: none")
    maintenance: Maintenance | None = Field(None, description="omitted: none")
    spot: Spot | None = Field(None, description="omitted: nodes are the job's own")

    @model_validator(mode="after")
    def _fits_together(self) -> Reliability:
        if self.failures is not None or self.mtbf_s is not None:
            _one_source(self.failures, self.mtbf_s)
        if self.elastic and self.spares is None:
            raise fail("needs the number of spares; write spares: 0 or more", "elastic")
        if self.maintenance and self.maintenance.lasts_s >= self.maintenance.every_s:
            raise fail("lasts until the next one; write less", "maintenance.lasts")
        return self

    def crash_per_s(self, gpus: int, nodes: int) -> float:
        """Failures of a job in a second; notices of spot nodes aside."""
        if self.mtbf_s:
            return (gpus if self.mtbf_of == "gpu" else nodes) / self.mtbf_s
        if self.failures is None:
            return 0.0
        preset = failures_of(self.failures)
        if "gpu_mtbf_s" in preset:
            return float(gpus / preset["gpu_mtbf_s"])
        return float(nodes / preset["node_mtbf_s"])


def _one_source(preset: str | None, mtbf_s: float | None) -> None:
    """Raise unless one of the two says how often nodes fail."""
    if preset is None and mtbf_s is None:
        raise fail("needs mtbf or failures; write mtbf: 500 h, or a preset's name")
    if preset is not None and mtbf_s is not None:
        raise fail("says what mtbf says; drop one", "failures")
    if preset is not None:
        try:
            failures_of(preset)
        except ValueError as error:
            raise fail(str(error), "failures") from None
