"""The ddp section: DistributedDataParallel's options, with torch's names and meanings."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from ddpsim.errors import shown
from ddpsim.scenario.base import Spec, fail

__all__ = ["Ddp", "StrategyName"]

StrategyName = Literal["ddp", "naive", "naive_flat", "per_parameter", "local_sgd"]


def _know_newer_names(schema: dict[str, Any]) -> None:
    options = schema["properties"]
    options["forward_sync_buffers"] = options["broadcast_buffers"]


_KnownTorch = Literal["1.4", "2.11", "2.12", "2.13", "2.14", "2.15"]
_KNOWN_TORCH: tuple[str, ...] = get_args(_KnownTorch)
_LARGEST_CAP = 1_000_000
_OF_DDP_ALONE = (
    *("bucket_cap_mb", "gradient_as_bucket_view", "find_unused_parameters", "static_graph"),
    *("broadcast_buffers", "comm_hook", "optimize_ddp"),
)


def _torch_version(value: Any) -> Any:
    """`torch: 2.13` without quotes is a number to YAML, and so is 2.10, which is then 2.1."""
    version = str(value) if isinstance(value, float) else value
    if version in _KNOWN_TORCH or not isinstance(version, str):
        return version
    unquoted = " (without quotes 2.10 is the number 2.1 to YAML)" if value == 2.1 else ""
    raise ValueError(
        f"the rules of torch {shown(version)}{unquoted} are not known here; known: "
        f"{', '.join(_KNOWN_TORCH)}. Write the nearest one in quotes, its bucket rules can be "
        "used: '2.11' for 2.0 to 2.10 (a list of caps is new in 2.11; the rest was not compared)"
    )


def _bucket_caps(value: Any) -> float | tuple[float, ...] | None:
    if value is None or value == "default":
        return None
    caps = list(value) if isinstance(value, (list, tuple)) else [value]
    if not caps:
        raise ValueError("the list of caps is empty; write a number of MiB, or 'default'")
    for cap in caps:
        if isinstance(cap, bool) or not isinstance(cap, (int, float)):
            raise ValueError(
                f"torch takes a bare number of MiB (25 = 26 214 400 B), not {shown(cap)}; "
                "write 25, a list such as [1, 25], or 'default'"
            )
        if not 0 < cap <= _LARGEST_CAP:  # nor NaN
            raise ValueError(f"{shown(cap)} is out of range: wanted MiB above 0, to {_LARGEST_CAP}")
    listed = tuple(float(cap) for cap in caps)
    return listed if isinstance(value, (list, tuple)) else listed[0]


BucketCaps = Annotated[
    float | tuple[float, ...] | None,
    PlainValidator(_bucket_caps),
    PlainSerializer(lambda caps: "default" if caps is None else caps),
    WithJsonSchema(
        {
            "anyOf": [
                {"const": "default"},
                {"type": "null"},
                {"type": "number", "exclusiveMinimum": 0},
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {"type": "number", "exclusiveMinimum": 0},
                },
            ]
        }
    ),
]


class LocalSgd(Spec):
    """Local SGD: ranks train alone, and average their parameters now and then."""

    every: Annotated[int, Field(ge=1, le=1000)] = Field(
        description="steps per averaging, the period of torch's PeriodicModelAverager; "
        "run.iterations is rounded up to a multiple"
    )


class Ddp(Spec):
    """How gradients are shared: DistributedDataParallel's options, or another strategy."""

    model_config = ConfigDict(json_schema_extra=_know_newer_names)

    backend: Literal["nccl", "gloo"] = Field("nccl", description="process-group backend")
    torch: Annotated[
        _KnownTorch,
        BeforeValidator(_torch_version, json_schema_input_type=_KnownTorch | float),
    ] = Field("2.15", description="the version whose rules are followed")
    strategy: StrategyName = Field(
        "ddp",
        description="ddp; naive: one all-reduce per gradient, after the backward; naive_flat: one "
        "of all gradients, after the backward; per_parameter: one per gradient, from its hook; "
        "local_sgd: parameters are averaged every few steps",
    )
    local_sgd: LocalSgd | None = Field(None, description="of strategy: local_sgd, which needs it")
    bucket_cap_mb: BucketCaps = Field(
        None,
        description="MiB, as torch: default = 1 MiB first, then 25; a number = that for the first "
        "bucket too; a list = cap by cap, the last repeats (torch's bucket_cap_mb_list)",
    )
    gradient_as_bucket_view: bool = Field(default=False, description="saves the copy back")
    find_unused_parameters: bool = Field(default=False, description="buckets are never rebuilt")
    static_graph: bool = Field(default=False, description="buckets are rebuilt one step later")
    broadcast_buffers: bool = Field(
        default=True, description="every forward; also accepted as forward_sync_buffers (2.13)"
    )
    comm_hook: Literal["none", "allreduce", "fp16_compress", "bf16_compress"] = Field(
        "none", description="torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
    )
    optimize_ddp: bool = Field(
        default=True,
        description="torch._dynamo.config's: under torch.compile the graph is split where buckets "
        "fill (DDPOptimizer); false: all gradients come at the end of the backward",
    )
    accumulation_steps: Annotated[int, Field(ge=1, le=10_000)] = Field(
        1, description="micro-batches per optimizer step, no_sync on all but the last"
    )
    no_sync: bool = Field(
        default=True, description="false: every micro-batch reduces its gradients (no no_sync)"
    )

    @property
    def is_ddp(self) -> bool:
        """Whether the module is wrapped in DistributedDataParallel."""
        return self.strategy == "ddp"

    @property
    def splits_graphs(self) -> bool:
        """Whether torch splits a compiled graph where buckets fill."""
        return self.is_ddp and self.optimize_ddp

    @property
    def finds_unused(self) -> bool:
        """Whether every iteration looks for unused parameters: a static graph does so once."""
        return self.find_unused_parameters and not self.static_graph

    @property
    def sent_dtype(self) -> Literal["float16", "bfloat16"] | None:
        """What a compressing hook sends; None: gradients as they are."""
        if self.comm_hook == "fp16_compress":
            return "float16"
        return "bfloat16" if self.comm_hook == "bf16_compress" else None

    @model_validator(mode="before")
    @classmethod
    def _newer_names(cls, data: Any) -> Any:
        if not isinstance(data, dict) or "forward_sync_buffers" not in data:
            return data
        if "broadcast_buffers" in data:
            raise fail(
                "is the new name of broadcast_buffers; give one of them", "forward_sync_buffers"
            )
        renamed = dict(data)
        renamed["broadcast_buffers"] = renamed.pop("forward_sync_buffers")
        return renamed

    @field_validator(*_OF_DDP_ALONE)
    @classmethod
    def _of_ddp_alone(cls, value: Any, info: ValidationInfo) -> Any:
        strategy = info.data.get("strategy", "ddp")
        usual = cls.model_fields[str(info.field_name)].default
        if strategy != "ddp" and value != usual:
            raise fail(f"is an option of DDP, and strategy: {strategy} has none; leave it out")
        return value

    @field_validator("no_sync")
    @classmethod
    def _reduces_in_the_backward(cls, value: Any, info: ValidationInfo) -> Any:
        strategy = info.data.get("strategy", "ddp")
        if not value and strategy not in ("ddp", "per_parameter"):
            raise fail(
                f"strategy: {strategy} reduces nothing in a backward, so it has no no_sync; "
                "leave it out"
            )
        return value

    @model_validator(mode="after")
    def _strategy_is_whole(self) -> Ddp:
        if self.strategy == "local_sgd" and self.local_sgd is None:
            raise fail("local_sgd needs local_sgd: {every: STEPS}", "strategy")
        if self.strategy != "local_sgd" and self.local_sgd is not None:
            raise fail(f"is of strategy: local_sgd, not {self.strategy}; drop one", "local_sgd")
        if self.torch == "1.4" and self.strategy in ("per_parameter", "local_sgd"):
            raise fail(f"torch 1.4 had no {self.strategy}; choose a newer ddp.torch", "strategy")
        return self

    @model_validator(mode="after")
    def _known_together(self) -> Ddp:
        if self.torch == "1.4":
            newer = {
                "gradient_as_bucket_view": self.gradient_as_bucket_view,
                "static_graph": self.static_graph,
                "comm_hook": self.comm_hook != "none",
                "bucket_cap_mb": isinstance(self.bucket_cap_mb, tuple),
            }
            for key, used in newer.items():
                if used:
                    raise fail("torch 1.4 had no such option; choose a newer ddp.torch", key)
        return self
