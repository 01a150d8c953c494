"""Options of loops that share gradients or parameters in another way than DDP alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from ddpsim.errors import shown
from ddpsim.scenario.base import Spec, fail, switched


class LocalSgd(Spec):
    """Local SGD: ranks train alone, and average their parameters now and then."""

    every: Annotated[int, Field(ge=1, le=1000)] = Field(
        description="steps per averaging, the period of torch's PeriodicModelAverager; "
        "run.iterations is rounded up to a multiple"
    )


class PostLocalSgd(Spec):
    """Options of comm_hook: post_localSGD, which goes with torch's PeriodicModelAverager."""

    period: Annotated[int, Field(ge=1, le=1000)] = Field(
        description="steps per averaging of all parameters; run.iterations is rounded up to a "
        "multiple"
    )
    start_localSGD_iter: Annotated[int, Field(ge=2, le=1000)] = Field(  # noqa: N815 -- torch's name
        2, description="steps before, with all-reduces among all ranks; torch's example has 100"
    )
    post_local_gradient_allreduce: bool = Field(
        default=True, description="false: from then on gradients are not reduced at all"
    )


class GradientHooks(Spec):
    """Options of strategy: per_parameter."""

    async_op: bool = Field(
        default=True,
        description="of the hooks' all_reduce; false: the backward waits until each has ended",
    )


class ParameterServers(Spec):
    """Options of strategy: parameter_server."""

    servers: Annotated[int, Field(ge=1, le=100_000)] = Field(
        1, description="ranks that hold the optimizer, each of a part of the parameters"
    )


class DistributedOptimizer(Spec):
    """Options of strategy: distributed_optimizer, Megatron's with the dashes of its names off."""

    overlap_grad_reduce: bool = Field(
        default=False,
        description="buckets are reduced during the last backward; false: one bucket, after it",
    )
    overlap_param_gather: bool = Field(
        default=False,
        description="parameters are gathered during the next forward, bucket by bucket; it needs "
        "overlap_grad_reduce",
    )
    bucket_size: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="ddp_bucket_size: least elements of a bucket; omitted: 40 million, or a "
        "million a rank if more",
    )
    params: Literal["bfloat16", "float16"] | None = Field(
        None,
        description="bf16 or fp16: the type of the model's parameters, of which the optimizer "
        "keeps float32 masters; omitted: as they are",
    )
    grad_reduce_in_bf16: bool = Field(
        default=False,
        description="gradients are added up and reduced in bfloat16, where params is; false: in "
        "float32",
    )

    @model_validator(mode="after")
    def _gathers_by_bucket(self) -> DistributedOptimizer:
        if self.grad_reduce_in_bf16 and self.params != "bfloat16":
            raise fail("is of gradients in bfloat16; write params: bfloat16", "grad_reduce_in_bf16")
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            raise fail("needs overlap_grad_reduce: true, as in Megatron", "overlap_param_gather")
        return self


class Join(Spec):
    """DDP's join(), for ranks with unequal numbers of inputs."""

    divide_by_initial_world_size: bool = Field(
        default=True,
        description="gradients are divided by all ranks; false: by those with inputs, for whose "
        "number the host waits in each backward",
    )


def _join(value: Any) -> Any:
    if value is None or isinstance(value, (bool, Mapping, Join)):
        return switched(value)
    raise ValueError(
        f"{shown(value)} is neither true nor false, nor options; write true, or "
        "{divide_by_initial_world_size: false}"
    )


JoinField = Annotated[
    Join | None, BeforeValidator(_join, json_schema_input_type=Join | bool | None)
]
