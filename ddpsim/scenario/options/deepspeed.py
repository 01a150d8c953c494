"""Options of strategy: deepspeed, with the names of DeepSpeed's JSON (zero_optimization).

Source: deepspeedai/DeepSpeed at edaa7221267c, deepspeed/runtime/zero/config.py, and what
stage_1_and_2.py makes of each key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

from ddpsim.errors import shown
from ddpsim.scenario.base import Spec, fail

NO_EFFECT = {  # keys of stages 1 and 2 that change no step, and why
    "allgather_bucket_size": "torch's all_gather_into_tensor takes all parameters at once",
    "allgather_partitions": "stages 1 and 2 read it nowhere",
    "elastic_checkpoint": "of checkpoints",
    "load_from_fp32_weights": "of checkpoints",
    "ignore_unused_parameters": "an error, or none",
    "sub_group_size": "of stage 3",
    "memory_efficient_linear": "of stage 3",
    "override_module_apply": "of stage 3",
    "log_trace_cache_warnings": "of stage 3",
    "enable_sanity_checks": "of stage 3",
    "zero_hpz_partition_size": "of stage 3 (ZeRO++)",
    "zero_quantized_weights": "of stage 3 (ZeRO++)",
    "zero_quantized_nontrainable_weights": "of stage 3 (ZeRO++)",
    "zero_quantized_gradients": "of stage 3 (ZeRO++)",
    "zeropp_loco_param": "of stage 3 (ZeRO++)",
}
_Versions = Literal["0.18", "0.18.5", "0.18.6", "0.19"]
_KNOWN_VERSIONS: tuple[str, ...] = get_args(_Versions)
_OF_STAGE_3 = "stage3_"
_OFFLOAD = "offloading is not modelled here; ddp.fully_shard.offload_policy is torch's"
_REFUSED = {
    "offload_optimizer": _OFFLOAD,
    "offload_param": _OFFLOAD,
    "cpu_offload": _OFFLOAD,
    "cpu_offload_param": _OFFLOAD,
    "zero_optimization": "write what is inside it here, without this key",
    "bf16": "write params: bfloat16",
    "fp16": "fp16 and its loss scale are not modelled; drop it, or write params: bfloat16",
    "gradient_clipping": "costs nothing more, as the norm is taken anyway; drop it",
    "gradient_accumulation_steps": "write ddp.accumulation_steps",
    "train_micro_batch_size_per_gpu": "write workload.batch_per_rank",
    "train_batch_size": "write workload.batch_per_rank and ddp.accumulation_steps",
}


def _no_device(value: Any) -> bool:
    """Whether a key of offloading says that there is none."""
    device = value.get("device", "none") if isinstance(value, Mapping) else value
    return device in (None, False, "none")


def _stage(value: Any) -> Any:
    if value in (1, 2) and not isinstance(value, bool):
        return value
    more = {
        0: "; without ZeRO write ddp.strategy: ddp and drop ddp.deepspeed",
        3: "; for ZeRO-3, torch's, write ddp.strategy: fully_shard and drop ddp.deepspeed",
    }
    instead = more.get(value, "") if isinstance(value, int) else ""
    raise ValueError(f"{shown(value)} is not modelled: write 1 or 2{instead}")


def _elements(value: Any) -> Any:
    """JSON has 5e8 for a whole number."""
    if value == "auto":
        raise ValueError(
            "'auto' is the square of the model's hidden_size, as Hugging Face's Trainer sets it: "
            "write that number (16777216 for 4096)"
        )
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _contiguous(value: bool) -> bool:  # noqa: FBT001
    if not value:
        raise ValueError("false is not modelled; leave it out, DeepSpeed's default is true")
    return value


def _version(value: Any) -> Any:
    """YAML takes `version: 0.19` without quotes for a number."""
    version = str(value) if isinstance(value, float) else value
    if version in _KNOWN_VERSIONS:
        return version
    raise ValueError(
        f"the rules of DeepSpeed {shown(version)} are not known here; known: "
        f"{', '.join(_KNOWN_VERSIONS)}. Write '0.18' for an older one, and before 0.12.4 "
        "use_multi_rank_bucket_allreduce: false"
    )


def _params(value: Any) -> Any:
    if value in ("float32", "fp32"):
        raise ValueError(f"{shown(value)} is what leaving it out means; drop it, or write bfloat16")
    if value in ("float16", "fp16"):
        raise ValueError(
            f"{shown(value)} is not modelled, nor its loss scale; drop it, or write bfloat16"
        )
    return value


def _know_all_keys(schema: dict[str, Any]) -> None:
    options = schema["properties"]
    for key, reason in NO_EFFECT.items():
        options[key] = {"description": f"of no effect: {reason}"}
    schema["patternProperties"] = {f"^{_OF_STAGE_3}": {"description": "of no effect: of stage 3"}}


class DeepSpeed(Spec):
    """The section zero_optimization of DeepSpeed's JSON. Keys that change no step are dropped."""

    model_config = ConfigDict(json_schema_extra=_know_all_keys)

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
    contiguous_gradients: Annotated[bool, AfterValidator(_contiguous)] = Field(
        default=True, description="gradients are copied into a buffer; false is not modelled"
    )
    round_robin_gradients: bool = Field(
        default=False,
        description="ranks optimize other parameters; of no effect where buckets are all-reduced, "
        "and else not modelled",
    )
    params: Annotated[Literal["bfloat16"] | None, BeforeValidator(_params)] = Field(
        None,
        description="bf16: {enabled: true}, the type of parameters and gradients; omitted: as they "
        "are. fp16 is not modelled",
    )

    version: Annotated[_Versions, BeforeValidator(_version)] = Field(
        "0.19",
        description="of DeepSpeed; 0.18.5, 0.18.6: the hook of each gradient counts all "
        "parameters; before 0.19: overlap_comm may hide nothing, which widens the interval",
    )

    @property
    def counts_in_hooks(self) -> bool:
        """Whether the hook of each gradient counts all parameters, on the host."""
        return self.version in ("0.18.5", "0.18.6")

    @property
    def may_hide_nothing(self) -> bool:
        """Whether overlap_comm is of a version of which profiles show no overlap."""
        return self.overlap_comm and self.version != "0.19"

    @model_validator(mode="before")
    @classmethod
    def _without_idle_keys(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        left: dict[Any, Any] = {}
        for key, value in data.items():
            if key in _REFUSED and not (_REFUSED[key] == _OFFLOAD and _no_device(value)):
                raise fail(_REFUSED[key], key)
            if key not in _REFUSED and key not in NO_EFFECT:
                left[key] = value
        return {key: left[key] for key in left if not str(key).startswith(_OF_STAGE_3)}

    @model_validator(mode="after")
    def _reduces_to_known_ranks(self) -> DeepSpeed:
        in_parts = self.reduce_scatter and not self.use_multi_rank_bucket_allreduce
        if self.round_robin_gradients and in_parts:
            raise fail(
                "is not modelled where each rank's part is reduced on its own; write false, or "
                "leave use_multi_rank_bucket_allreduce out",
                "round_robin_gradients",
            )
        return self
