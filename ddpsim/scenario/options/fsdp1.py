"""Options of strategy: fsdp1, torch's FullyShardedDataParallel, with its names and meanings."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from ddpsim.scenario.base import Spec, fail, given, switched
from ddpsim.scenario.options.fully_shard import CpuOffload, SentTypes, Units

ShardingStrategy = Literal[
    "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"
]
HYBRID: tuple[ShardingStrategy, ...] = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
_FREEING: tuple[ShardingStrategy, ...] = ("FULL_SHARD", "HYBRID_SHARD")


class FlatMixedPrecision(SentTypes):
    """What is sent, as torch's MixedPrecision has it; omitted: as the parameters are."""

    buffer: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="buffer_dtype: to which buffers are cast once; costs a step nothing"
    )


_AnyOffload = CpuOffload | bool


class Fsdp1(Spec):
    """Options of strategy: fsdp1."""

    units: Units = Field(
        "blocks",
        description="modules that auto_wrap_policy wraps: blocks (numbered modules of "
        "several layers, such as layers.0: transformer_auto_wrap_policy), {min_parameters: N} "
        "(size_based_auto_wrap_policy), or a list of names; all other parameters are the root's",
    )
    sharding_strategy: ShardingStrategy = Field(
        "FULL_SHARD",
        description="FULL_SHARD: ZeRO-3; SHARD_GRAD_OP: parameters stay from the forward to the "
        "backward (ZeRO-2); NO_SHARD: as DDP; HYBRID_SHARD and _HYBRID_SHARD_ZERO2: the same "
        "inside each node, with an all-reduce between nodes",
    )
    backward_prefetch: Literal["BACKWARD_PRE", "BACKWARD_POST"] | None = Field(
        "BACKWARD_PRE",
        description="the next unit is gathered before this one's gradients are computed, or after "
        "it; null: once its own backward begins",
    )
    forward_prefetch: bool = Field(
        default=False, description="the next unit is gathered before this one's forward is launched"
    )
    limit_all_gathers: bool = Field(
        default=True, description="at most two units are gathered and not yet freed"
    )
    use_orig_params: bool = Field(
        default=False,
        description="parameters stay the module's own: each begins at 16 bytes, and hooks take "
        "the host longer. torch.compile wants it",
    )
    mixed_precision: Annotated[
        FlatMixedPrecision, BeforeValidator(given, json_schema_input_type=FlatMixedPrecision | None)
    ] = Field(default_factory=FlatMixedPrecision, description="omitted: none")
    cpu_offload: Annotated[
        CpuOffload | None, BeforeValidator(switched, json_schema_input_type=_AnyOffload | None)
    ] = Field(
        None,
        description="CPUOffload(offload_params=True), or {host_link: 24 GB/s}: shards, gradients "
        "and optimizer are on the host; omitted or false: on the GPU",
    )

    @property
    def is_hybrid(self) -> bool:
        """Whether each node has a copy of the model, and shares it."""
        return self.sharding_strategy in HYBRID

    @property
    def frees_after_forward(self) -> bool:
        """Whether units are gathered again for the backward."""
        return self.sharding_strategy in _FREEING

    @model_validator(mode="after")
    def _offloads_what_is_gathered_anew(self) -> Fsdp1:
        if self.cpu_offload and not self.frees_after_forward:
            reason = f"is not modelled with {self.sharding_strategy}, which copies parameters twice"
            raise fail(f"{reason}; write FULL_SHARD or HYBRID_SHARD, or drop it", "cpu_offload")
        return self
