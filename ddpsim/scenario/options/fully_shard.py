"""Options of strategy: fully_shard and hsdp, with torch's names and meanings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, PlainValidator, WithJsonSchema

from ddpsim.errors import shown
from ddpsim.scenario.base import Spec, given, word_or_modules
from ddpsim.scenario.quantity import Bandwidth

AS_AUTOCAST = "ddp.fully_shard.mixed_precision={param: bfloat16, reduce: float32}"


class BySize(Spec):
    """Units by size: torch's size_based_auto_wrap_policy, with fully_shard as the wrapper."""

    min_parameters: Annotated[int, Field(ge=1)] = Field(
        description="min_num_params: elements of a module outside the units inside it"
    )


def _units(value: Any) -> Any:
    """`blocks`, a least size, or names of modules, each once."""
    if not isinstance(value, Mapping):
        return word_or_modules(value, ("blocks",), "units")
    least = value.get("min_parameters")
    if list(value) != ["min_parameters"] or type(least) is not int or least < 1:
        given = ", ".join(f"{key}: {shown(each)}" for key, each in value.items())
        raise ValueError(
            f"{{{given}}} is no choice of units by size; write the least elements of one, a whole "
            "number such as {min_parameters: 100000000}"
        )
    return BySize(min_parameters=least)


Units = Annotated[
    Literal["blocks"] | BySize | tuple[str, ...],
    BeforeValidator(_units),
    WithJsonSchema(
        {
            "anyOf": [
                {"const": "blocks"},
                {"type": "array", "items": {"type": "string"}},
                {
                    "type": "object",
                    "properties": {"min_parameters": {"type": "integer", "minimum": 1}},
                    "required": ["min_parameters"],
                    "additionalProperties": False,
                },
            ]
        }
    ),
]


class SentTypes(Spec):
    """The types of what is sent; omitted: as the parameters are."""

    example: ClassVar[str] = "{param: bfloat16, reduce: float32}"

    param: Literal["bfloat16", "float16"] | None = Field(
        None, description="param_dtype: of gathered parameters, and of compute"
    )
    reduce: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="reduce_dtype: of reduced gradients; omitted: as param"
    )


class MixedPrecision(SentTypes):
    """What is sent, as torch's MixedPrecisionPolicy has it; omitted: as the parameters are."""

    output: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="output_dtype: of a unit's outputs, which the next unit casts back"
    )


def _reshards(value: Any) -> Any:
    """True, false, or a number of ranks; None as torch has it."""
    if value is None or value == "default":
        return None
    if isinstance(value, bool) or (isinstance(value, int) and value > 0):
        return value
    raise ValueError(
        f"{shown(value)} is neither true, nor false, nor a number of ranks; write true to free "
        "parameters after the forward, false to keep them, a divisor of the ranks, or default"
    )


_Reshards = Annotated[
    bool | int | None,
    PlainValidator(_reshards),
    PlainSerializer(lambda value: "default" if value is None else value),
    WithJsonSchema(
        {
            "anyOf": [
                {"const": "default"},
                {"type": "null"},
                {"type": "boolean"},
                {"type": "integer", "minimum": 1},
            ]
        }
    ),
]


def _offload_policy(value: Any) -> Any:
    """The policy's name alone, or with what is known of the host."""
    if value is None or isinstance(value, (Mapping, CpuOffload)):
        return value
    if value == "CPUOffloadPolicy":
        return {}
    raise ValueError(
        f"{shown(value)} is no offload policy; write CPUOffloadPolicy, or its keys such as "
        "{host_link: 24 GB/s}"
    )


class CpuOffload(Spec):
    """torch's CPUOffloadPolicy, with pinned memory, and how fast the host is."""

    host_link_bytes_per_s: Bandwidth | None = Field(
        None,
        alias="host_link",
        description="of copies between the host and one GPU, each way; default: PCIe x16 of the "
        "GPU's generation, 12, 24 or 48 GB/s",
    )
    host_optimizer_bytes_per_s: Bandwidth = Field(
        50e9,
        alias="host_optimizer",
        description="at which a rank's optimizer moves its bytes: one thread, as torchrun gives "
        "(measured on an EPYC: 49 GB/s of AdamW, 62 fused, 67 of SGD with momentum)",
    )


_AnyPolicy = CpuOffload | Literal["CPUOffloadPolicy"]


class FullyShard(Spec):
    """Options of strategy: fully_shard, and of hsdp."""

    units: Units = Field(
        "blocks",
        description="modules that are sharded on their own: blocks (numbered modules "
        "of several layers, such as layers.0), {min_parameters: N} (modules with so many elements, "
        "inner ones first), or a "
        "list of names; all other parameters are the root's",
    )
    reshard_after_forward: _Reshards = Field(
        None,
        description="default: parameters are freed after the forward (ZeRO-3), but for the root's; "
        "true: the root's, too, as accelerate has it; false: after the backward (ZeRO-2); a "
        "number, a divisor of the ranks that share a copy: so many ranks keep a copy, parted over "
        "them",
    )
    mixed_precision: Annotated[
        MixedPrecision, BeforeValidator(given, json_schema_input_type=MixedPrecision | None)
    ] = Field(default_factory=MixedPrecision, description="omitted: none")
    reshard_after_backward: bool = Field(
        default=True,
        description="false: the loop calls set_reshard_after_backward(False) for all micro-batches "
        "but the last; what the forward does not free stays whole until the next",
    )
    set_is_last_backward: bool = Field(
        default=False,
        description="true: the loop calls it with False for all micro-batches but the last, whose "
        "backwards then end before their gradients are reduced",
    )
    all_reduce_last_only: bool = Field(
        default=False,
        description="of hsdp, with no_sync: false: the loop calls set_requires_all_reduce(False) "
        "for all micro-batches but the last, whose gradients are scattered and not all-reduced",
    )
    gradient_divide_factor: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None,
        description="of set_gradient_divide_factor; omitted: the ranks. NCCL divides in its "
        "reductions, but for float16",
    )
    offload_policy: (
        Annotated[
            CpuOffload,
            BeforeValidator(_offload_policy, json_schema_input_type=_AnyPolicy),
        ]
        | None
    ) = Field(
        None,
        description="CPUOffloadPolicy: shards, gradients and optimizer are on the host; omitted: "
        "on the GPU",
    )

    @property
    def kept_by(self) -> int | None:
        """The number of ranks that `reshard_after_forward` states; None: it is a choice."""
        ranks = self.reshard_after_forward
        return None if isinstance(ranks, bool) else ranks

    @property
    def divides_apart(self) -> bool:
        """Whether gradients are divided by kernels of their own, and not in their reduction."""
        types = self.mixed_precision
        return (types.reduce or types.param) == "float16"
