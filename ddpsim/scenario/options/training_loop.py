"""What a training loop does beside its steps, and copies in them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ddpsim.scenario.base import Spec, fail
from ddpsim.scenario.quantity import Bandwidth, Duration, Size


class InputCopy(Spec):
    """Copies of a micro-batch's inputs to the device, on the stream that computes."""

    pinned: bool = Field(default=False, description="the loader pins its batches (pin_memory=True)")
    non_blocking: bool = Field(
        default=False, description="tensor.to(device, non_blocking=True); else the host waits"
    )
    sample_bytes: Size | None = Field(
        None, alias="sample_size", description="of a sample's inputs; omitted: a zoo model's"
    )
    bandwidth_bytes_per_s: Bandwidth | None = Field(
        None,
        alias="bandwidth",
        description="of the device's link to its host; omitted: PCIe x16 of its generation",
    )


class Evaluation(Spec):
    """A pass over other samples without gradients, every so many steps."""

    every: Annotated[int, Field(ge=1, le=10**9)] = Field(description="steps between two of them")
    samples: Annotated[int, Field(ge=1, le=10**12)] = Field(
        description="of all ranks, dealt out as DistributedSampler does, in batches of "
        "batch_per_rank"
    )


class CheckpointWrite(Spec):
    """Parameters, buffers and the optimizer's state, saved every so many steps."""

    every: Annotated[int, Field(ge=1, le=10**9)] | Literal["auto"] = Field(
        description="steps between two of them; auto: the best number for `reliability`"
    )
    mode: Literal["sync", "async", "neighbour"] = Field(
        "sync",
        description="sync: steps wait for the write, as torch.save does; async: for the copy to "
        "the host alone; neighbour: the same, and another node's memory is written to",
    )
    bandwidth_bytes_per_s: Bandwidth | None = Field(
        None, alias="bandwidth", description="of the storage that one rank writes to"
    )
    node_bandwidth_bytes_per_s: Bandwidth | None = Field(
        None, alias="node_bandwidth", description="of all ranks of a node; omitted: no limit"
    )
    total_bandwidth_bytes_per_s: Bandwidth | None = Field(
        None, alias="total_bandwidth", description="of all ranks of the job; omitted: no limit"
    )
    size_bytes: Size | None = Field(
        None, alias="size", description="of what one rank writes; omitted: computed"
    )

    @model_validator(mode="after")
    def _has_storage(self) -> CheckpointWrite:
        if self.mode != "neighbour" and self.bandwidth_bytes_per_s is None:
            raise fail("is missing; add it: of the storage that one rank writes to", "bandwidth")
        return self


class DebugSettings(Spec):
    """What torch or NCCL checks or logs beside the work, because somebody looks for a fault."""

    detect_anomaly: bool = Field(
        default=False,
        description="torch.autograd.set_detect_anomaly: each operator of the forward records a "
        "stack, and the host waits for each gradient to look for NaN",
    )
    distributed_detail: bool = Field(
        default=False,
        description="TORCH_DISTRIBUTED_DEBUG=DETAIL: before each collective the ranks meet over "
        "gloo, and compare what they are about to send",
    )
    nccl_line_s: Duration | None = Field(
        None,
        alias="nccl_line",
        description="NCCL_DEBUG=INFO with NCCL_DEBUG_SUBSYS=COLL or ALL: what the host takes to "
        "write a line for each collective; omitted: nothing, as NCCL_DEBUG=INFO alone",
    )
