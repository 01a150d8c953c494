"""Options of strategy: deepspeed, with the names of DeepSpeed's JSON (zero_optimization)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from ddpsim.errors import shown
from ddpsim.scenario.base import Spec

__all__ = ["DeepSpeed"]


def _stage(value: Any) -> Any:
    if value in (1, 2) and not isinstance(value, bool):
        return value
    more = {0: "; write ddp.strategy: ddp", 3: "; ddp.strategy: fully_shard is torch's ZeRO-3"}
    instead = more.get(value, "") if isinstance(value, int) else ""
    raise ValueError(f"{shown(value)} is not modelled: write 1 or 2{instead}")


def _elements(value: Any) -> Any:
    """JSON has 5e8 for a whole number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _contiguous(value: bool) -> bool:  # noqa: FBT001
    if not value:
        raise ValueError("false is not modelled; leave it out, DeepSpeed's default is true")
    return value


class DeepSpeed(Spec):
    """The section zero_optimization of DeepSpeed's JSON."""

    stage: Annotated[Literal[1, 2], BeforeValidator(_stage)] = Field(
        1, description="1: the optimizer is sharded; 2: gradients too, reduced in each micro-batch"
    )
    overlap_comm: bool = Field(
        default=False,
        description="buckets are reduced on a stream of their own, in stage 1 too while the "
        "backward runs; false: the GPU waits for each",
    )
    reduce_scatter: bool = Field(
        default=True,
        description="each rank copies its own part of a reduced bucket; false: a bucket is "
        "all-reduced in place",
    )
    use_multi_rank_bucket_allreduce: bool = Field(
        default=True,
        description="with reduce_scatter a bucket is all-reduced; false: a reduce to each rank "
        "that optimizes a part of it",
    )
    reduce_bucket_size: Annotated[int, BeforeValidator(_elements), Field(ge=1)] = Field(
        500_000_000, description="most elements of a bucket; its buffer is always as large"
    )
    allgather_bucket_size: Annotated[int, BeforeValidator(_elements), Field(ge=1)] = Field(
        500_000_000,
        description="of no effect: torch's all_gather_into_tensor takes all parameters at once",
    )
    contiguous_gradients: Annotated[bool, AfterValidator(_contiguous)] = Field(
        default=True, description="gradients are copied into a buffer; false is not modelled"
    )
    params: Literal["bfloat16"] | None = Field(
        None,
        description="bf16: {enabled: true}, the type of parameters and gradients; omitted: as they "
        "are. fp16 is not modelled",
    )
