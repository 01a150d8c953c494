"""NCCL's calibrated model, as a cluster profile holds it: figures, hypotheses and their draws."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from ddpsim.importers.profiles.part import ProfilePart
from ddpsim.scenario.device import Architecture
from ddpsim.scenario.links import Transport


class NcclLinks(ProfilePart):
    """The links of a calibrated cluster, at which every figure of its model is 1."""

    intra_bytes_per_s: float | None = Field(None, gt=0, description="of a GPU in its node")
    intra_path: Literal["nvlink", "pcie"] = "nvlink"
    switch_bytes_per_s: float | None = Field(None, gt=0, description="with NVLS; None: it cannot")
    nics_per_node: int | None = Field(None, ge=1, description="None: one node was measured alone")
    nic_bytes_per_s: float | None = Field(None, gt=0, description="line rate, one direction")
    transport: Transport = "rdma"


class NcclSetting(ProfilePart):
    """What decides NCCL's choice, figures aside. `ll128`: it may take LL128 between nodes."""

    architecture: Architecture
    version: str = Field(description="of NCCL, whose tuner chooses")
    ll128: bool
    links: NcclLinks

    def changed(self, links: dict[str, object], **others: object) -> NcclSetting:
        """A copy with other figures of its links, and other answers."""
        links_then = self.links.model_copy(update=links)
        return self.model_copy(update={"links": links_then, **others})


class NcclHypothesis(NcclSetting):
    """One answer to what logs leave open, how likely it is, and its figures.

    `draws` are of the figures that `NcclModel` names, as logarithms of multiples of their usual
    values (`ddpsim.cluster.nccl.figures`); each counts alike.
    """

    weight: float = Field(gt=0, le=1)
    draws: tuple[tuple[float, ...], ...] = Field(min_length=1)

    @property
    def setting(self) -> NcclSetting:
        """The setting alone."""
        values = {name: getattr(self, name) for name in NcclSetting.model_fields}
        return NcclSetting.model_construct(**values)


class NcclFigure(ProfilePart):
    """What was known of a figure and what is, as multiples of its usual value.

    `sigma` and `prior_sigma` are standard deviations of the logarithm; `samples`: how many measured
    times depend on it.
    """

    name: str
    prior: float = Field(gt=0)
    prior_sigma: float = Field(ge=0)
    value: float = Field(gt=0)
    sigma: float = Field(ge=0)
    samples: int = Field(ge=0)


class NcclModel(ProfilePart):
    """NCCL's collectives as its tuner chooses them and as links price them, calibrated.

    `figures` are those of the likeliest hypothesis; `hypotheses` are an ensemble, of which each
    draw predicts every collective on any ranks (`ddpsim.cluster.fitted.ensemble`).
    """

    kind: Literal["nccl"] = "nccl"
    figures: tuple[NcclFigure, ...] = Field(min_length=1)
    hypotheses: tuple[NcclHypothesis, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _draws_are_whole(self) -> NcclModel:
        draws = (draw for hypothesis in self.hypotheses for draw in hypothesis.draws)
        if any(len(draw) != len(self.figures) for draw in draws):
            raise ValueError(f"a draw has not as many figures as are named: {len(self.figures)}")
        return self
