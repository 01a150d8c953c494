"""What was asked: schema `ddpsim/1` as frozen models. Defaults live here and nowhere else.

YAML keys are torch's and the field's own words; attributes add the SI unit of what they hold.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)

from ddpsim.errors import shown
from ddpsim.scenario import catalog
from ddpsim.scenario.base import Sigma, Spec, fail, given
from ddpsim.scenario.cluster import (
    Background,
    Cluster,
    Device,
    InterNode,
    IntraNode,
    Machine,
    Stragglers,
)
from ddpsim.scenario.quantity import (
    Duration,
    SampleRate,
    Size,
    SourceFileField,
)

__all__ = [
    "MEASURED",
    "Background",
    "Cluster",
    "DataLoader",
    "Ddp",
    "Device",
    "InterNode",
    "IntraNode",
    "Jitter",
    "Machine",
    "Optimizer",
    "Precision",
    "Run",
    "Scenario",
    "Stalls",
    "StepTime",
    "Stragglers",
    "Workload",
]

Precision = Literal["fp32", "tf32", "amp-fp16", "amp-bf16", "bf16"]


NO_LONGER_WITH_DDP = (
    "is no longer than the step without DDP, which DDP only adds to; measure both in turns, or "
    "leave it out"
)


class StepTime(Spec):
    """A step of one micro-batch on one device without DDP, whole or in its three parts."""

    total_s: Duration | None = Field(
        None, alias="total", description="forward + backward + optimizer"
    )
    forward_s: Duration | None = Field(None, alias="forward", description="forward and loss")
    backward_s: Duration | None = Field(None, alias="backward", description="backward")
    optimizer_s: Duration | None = Field(None, alias="optimizer", description="optimizer step")
    with_ddp_s: Duration | None = Field(
        None,
        alias="with_ddp",
        description="the same step, whole, under DDP on that one device alone (torchrun "
        "--nproc-per-node 1), with torch's default bucket caps: what DDP itself costs",
    )

    @model_validator(mode="after")
    def _one_way(self) -> StepTime:
        parts = (self.forward_s, self.backward_s)
        if self.total_s is None and None in parts:
            raise fail("needs both forward and backward (optimizer is optional), or one total time")
        if self.total_s is not None and parts != (None, None):
            raise fail("has both a total and its parts; give one of them")
        for key, value_s in zip(
            ("total", "forward", "backward"), (self.total_s, *parts), strict=True
        ):
            if value_s is not None and value_s < 1e-6:
                raise fail("must be at least 1 us", key)
        if self.with_ddp_s is not None and self.with_ddp_s <= self.least_s:
            raise fail(NO_LONGER_WITH_DDP, "with_ddp")
        return self

    @property
    def least_s(self) -> float:
        """Seconds that are stated of the step without DDP, all parts together."""
        stated = (self.total_s, self.forward_s, self.backward_s, self.optimizer_s)
        return self.total_s or sum(seconds or 0.0 for seconds in stated)


class Optimizer(Spec):
    """What runs after the gradients are reduced; sets the optimizer's time and memory."""

    name: Literal["sgd", "adam", "adamw"] = Field("sgd", description="torch.optim class")
    fused: bool = Field(
        default=False, description="fused=True; torch's default is foreach on a GPU"
    )
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="SGD's momentum")
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        0.0, description="weight decay, any optimizer"
    )

    @model_validator(mode="after")
    def _momentum_is_sgds(self) -> Optimizer:
        if self.momentum and self.name != "sgd":
            raise fail(f"belongs to sgd; {self.name} has none, remove it", "momentum")
        return self


class DataLoader(Spec):
    """The input pipeline of one rank."""

    rate_samples_per_s: SampleRate = Field(
        alias="rate", description="samples per second that one rank's loader delivers, all workers"
    )
    workers: Annotated[int, Field(ge=1, le=10_000)] = Field(
        1, description="DataLoader num_workers per rank"
    )
    prefetch: Annotated[int, Field(ge=1, le=10_000)] = Field(
        2, description="DataLoader prefetch_factor"
    )
    sample_bytes: Size | None = Field(
        None,
        alias="sample_size",
        description="of a sample read over the nodes' network; omitted: from a disk of the node",
    )


def _step_time(value: Any) -> Any:
    return {"total": value} if isinstance(value, (str, int, float)) else value


def _model_name(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{shown(value)} is not a model name")
    return catalog.resolve("model", value)


def _know_newer_names(schema: dict[str, Any]) -> None:
    options = schema["properties"]
    options["forward_sync_buffers"] = options["broadcast_buffers"]


MEASURED: tuple[Literal["step_time", "profile", "trace"], ...] = ("step_time", "profile", "trace")


class Workload(Spec):
    """The model, its batch, and what is known of its times."""

    model: Annotated[str, BeforeValidator(_model_name)] | None = Field(
        None, description="a model of the zoo"
    )
    profile: SourceFileField | None = Field(
        None, description="measured gradient-ready times: our JSON (ddpsim.model-profile/1) or CSV"
    )
    trace: SourceFileField | None = Field(
        None,
        description="a trace of PyTorch's profiler (prof.export_chrome_trace); model or parameters "
        "beside it say the parameters where it was recorded without shapes",
    )
    parameters: SourceFileField | None = Field(
        None, description="CSV of a model of one's own: name, shape, dtype in registration order"
    )
    ready_origin: Literal["first_gradient", "backward_start"] | None = Field(
        None, description="what the ready times of a CSV profile count from"
    )
    batch_per_rank: Annotated[int, Field(ge=1, le=10**9)] = Field(
        description="samples in one micro-batch of one rank"
    )
    seq_len: Annotated[int, Field(ge=1, le=10**7)] | None = Field(
        None, description="tokens per sample; default: the model's usual one"
    )
    image_size: Annotated[int, Field(ge=1, le=10**5)] | None = Field(
        None, description="pixels on a side; default: the model's usual one"
    )
    compile: bool = Field(
        default=False,
        description="the model runs under torch.compile, and a step_time is of that; the gradients "
        "of a compiled graph come at once",
    )
    precision: Precision = Field(
        "fp32",
        description="torch's arithmetic; amp keeps fp32 gradients, and fp32 leaves convolutions to "
        "TF32 where a GPU has it, as torch does unless told not to",
    )
    memory_format: Literal["contiguous", "channels_last"] | None = Field(
        None,
        description="of a convolutional zoo model, as torch.memory_format; default: contiguous, as "
        "torch; half precision is faster in channels_last",
    )
    attention: Literal["sdpa", "eager"] | None = Field(
        None,
        description="of a zoo model with tokens: fused (default), or written out, as "
        "transformers' attn_implementation calls them",
    )
    step_time: (
        Annotated[StepTime, BeforeValidator(_step_time, json_schema_input_type=StepTime | str)]
        | None
    ) = Field(
        None,
        description="forward + backward + optimizer of one micro-batch on one device, "
        "no DDP, no data wait; anchors the compute side",
    )
    optimizer: Annotated[
        Optimizer, BeforeValidator(given, json_schema_input_type=Optimizer | None)
    ] = Field(default_factory=Optimizer, description="default: plain SGD")
    data: DataLoader | None = Field(None, description="omitted: the step never waits for data")

    @property
    def measured_by(self) -> Literal["step_time", "profile", "trace"] | None:
        """The key that says how long a step takes; None: it is estimated."""
        return next((key for key in MEASURED if getattr(self, key)), None)

    @model_validator(mode="after")
    def _one_source(self) -> Workload:
        given = [
            key for key in ("model", "profile", "parameters") if getattr(self, key) is not None
        ]
        if not given and not self.trace:
            raise fail(
                "needs one of model (a zoo name), profile (a file), trace (a file) or parameters "
                "(a file)"
            )
        if self.trace and self.profile:
            raise fail("trace and profile are both given; keep one of them", "trace")
        if len(given) > 1:
            raise fail(f"{' and '.join(given)} are both given; keep one of them", given[1])
        if self.parameters and not self.step_time and not self.trace:
            raise fail("a parameter list says nothing of time; give step_time too", "parameters")
        return self

    @model_validator(mode="after")
    def _nothing_without_effect(self) -> Workload:
        for key in ("seq_len", "image_size", "memory_format", "attention"):
            if self.model is None and getattr(self, key) is not None:
                raise fail("has no effect without a zoo model: times are measured; drop it", key)
        if self.ready_origin and not self.profile:
            raise fail("has no effect without a profile; drop it", "ready_origin")
        if self.compile and self.trace:
            raise fail(
                "has no effect beside a trace, which shows the gradients as they came; drop it",
                "compile",
            )
        return self


_KnownTorch = Literal["1.4", "2.11", "2.12", "2.13", "2.14", "2.15"]
_KNOWN_TORCH: tuple[str, ...] = get_args(_KnownTorch)


_LARGEST_CAP = 1_000_000


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


class Ddp(Spec):
    """DistributedDataParallel's own options, with torch's names and meanings."""

    model_config = ConfigDict(json_schema_extra=_know_newer_names)

    backend: Literal["nccl", "gloo"] = Field("nccl", description="process-group backend")
    torch: Annotated[
        _KnownTorch,
        BeforeValidator(_torch_version, json_schema_input_type=_KnownTorch | float),
    ] = Field("2.15", description="the version whose rules are followed")
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


class Jitter(Spec):
    """A compute time multiplier per rank and iteration."""

    distribution: Literal["lognormal"] = Field("lognormal", description="median 1")
    sigma: Sigma = Field(description="of the logarithm")


class Stalls(Spec):
    """Rare moments in which a rank stands still: page faults, a reset link, the collector."""

    probability: Annotated[float, Field(gt=0, le=1)] = Field(
        description="of a stall in an iteration of a rank"
    )
    duration_s: Duration = Field(alias="duration", description="of each")


class Run(Spec):
    """How the simulation is run."""

    iterations: Annotated[int, Field(ge=1, le=100_000)] = Field(
        20, description="steady iterations simulated"
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(0, description="of stragglers and jitter")
    jitter: Jitter | None = Field(None, description="omitted: every iteration is alike")
    stalls: Stalls | None = Field(None, description="omitted: none")
    allow_extrapolation: bool = Field(
        default=False, description="use a log beyond its sizes or its ranks, with a warning"
    )


class Scenario(Spec):
    """One question to ddpsim: a workload, its DDP options, a cluster, and how to run."""

    schema_: Literal["ddpsim/1"] = Field(
        alias="schema", description="ddpsim/1, the version of this format"
    )
    name: str = Field("unnamed", description="shown in the answer")
    workload: Workload = Field(description="the model, its batch, and what is known of its times")
    ddp: Annotated[Ddp, BeforeValidator(given, json_schema_input_type=Ddp | None)] = Field(
        default_factory=Ddp, description="omitted: torch's defaults"
    )
    cluster: Cluster = Field(description="nodes, GPUs and the links between them")
    run: Annotated[Run, BeforeValidator(given, json_schema_input_type=Run | None)] = Field(
        default_factory=Run, description="iterations, seed and noise"
    )

    @property
    def may_leave_unused(self) -> bool:
        """Whether training goes on where some parameters get no gradient."""
        is_ddp = self.cluster.algorithm != "data_parallel"
        return not is_ddp or self.ddp.find_unused_parameters or self.ddp.static_graph

    @model_validator(mode="after")
    def _fits_together(self) -> Scenario:
        kind, backend = self.cluster.device.kind, self.ddp.backend
        if (kind, backend) == ("cpu", "nccl"):
            raise fail(
                "is a CPU, but ddp.backend is nccl (its default), which needs GPUs; "
                "write ddp.backend: gloo",
                "cluster.device",
            )
        algorithm = self.cluster.algorithm
        if backend == "gloo" and algorithm in ("tree", "nvls", "data_parallel"):
            raise fail(f"{algorithm} is NCCL's; gloo has its ring: write auto", "cluster.algorithm")
        if algorithm == "data_parallel" and self.ddp.accumulation_steps > 1:
            raise fail("DataParallel has no no_sync; write 1", "ddp.accumulation_steps")
        if self.workload.compile and self.ddp.torch == "1.4":
            raise fail(
                "torch 1.4 had no torch.compile; choose a newer ddp.torch", "workload.compile"
            )
        if (kind, backend) == ("gpu", "gloo"):
            raise fail(
                "gloo on GPU tensors is not modelled; write ddp.backend: nccl", "ddp.backend"
            )
        return self
