"""What `measure` is asked for: the record, the kinds, and how much time and memory."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from calibrate.files import FileName
from calibrate.records.record import Kind

__all__ = ["Options"]


class Options(BaseModel):
    """What to measure, and how long."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    output: FileName = Field(description="the record, JSON")
    time_budget_s: float = Field(600.0, gt=0, description="for the whole plan")
    memory_budget_bytes: int | None = Field(
        None, gt=0, description="of one rank; default: a quarter of what is free, shared by ranks"
    )
    resume: bool = Field(default=False, description="keep what the record already holds")
    most_repetitions: int | None = Field(None, ge=1, description="of each measurement")
    timeout_s: float = Field(120.0, gt=0, description="wait for the other ranks, each time")
    only: tuple[Kind, ...] = Field((), description="kinds to measure; none: all")
    data_loader: str | None = Field(None, description="MODULE:FUNCTION returning an iterable")
    line_rate_bytes_per_s: float | None = Field(None, gt=0, description="of a node's link")
    comm_first: bool = Field(
        default=False, description="gloo's threads before compute, if permitted"
    )
