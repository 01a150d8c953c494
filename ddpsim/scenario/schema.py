"""What was asked: schema `ddpsim/1` as frozen models. Defaults live here and nowhere else.

YAML keys are torch's and the field's own words; attributes add the SI unit of what they hold.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ddpsim.errors import shown
from ddpsim.scenario import catalog
from ddpsim.scenario.quantity import (
    Bandwidth,
    Duration,
    FlopsPerSecond,
    SampleRate,
    Size,
    SourceFileField,
)

__all__ = [
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
Fraction = Annotated[float, Field(ge=0.001, le=1)]
Sigma = Annotated[float, Field(ge=0, le=1)]


class _Spec(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, strict=True, serialize_by_alias=True
    )


def _given(value: Any) -> Any:
    """A key with nothing under it is an empty section: its defaults."""
    return {} if value is None else value


def _fail(message: str, at: str = "") -> PydanticCustomError:
    """A cross-field error, shown at the key `at` of the model that raises it."""
    return PydanticCustomError("scenario", "{message}", {"message": message, "at": at})


class StepTime(_Spec):
    """A step of one micro-batch on one device without DDP, whole or in its three parts."""

    total_s: Duration | None = Field(
        None, alias="total", description="forward + backward + optimizer"
    )
    forward_s: Duration | None = Field(None, alias="forward", description="forward and loss")
    backward_s: Duration | None = Field(None, alias="backward", description="backward")
    optimizer_s: Duration | None = Field(None, alias="optimizer", description="optimizer step")

    @model_validator(mode="after")
    def _one_way(self) -> StepTime:
        parts = (self.forward_s, self.backward_s)
        if self.total_s is None and None in parts:
            raise _fail(
                "needs both forward and backward (optimizer is optional), or one total time"
            )
        if self.total_s is not None and parts != (None, None):
            raise _fail("has both a total and its parts; give one of them")
        for key, value_s in zip(
            ("total", "forward", "backward"), (self.total_s, *parts), strict=True
        ):
            if value_s is not None and value_s < 1e-6:
                raise _fail("must be at least 1 us", key)
        return self


class Optimizer(_Spec):
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
            raise _fail(f"belongs to sgd; {self.name} has none, remove it", "momentum")
        return self


class DataLoader(_Spec):
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


class Workload(_Spec):
    """The model, its batch, and what is known of its times."""

    model: Annotated[str, BeforeValidator(_model_name)] | None = Field(
        None, description="a model of the zoo"
    )
    profile: SourceFileField | None = Field(
        None, description="measured gradient-ready times: our JSON (ddpsim.model-profile/1) or CSV"
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
    precision: Precision = Field("fp32", description="torch's arithmetic; amp keeps fp32 gradients")
    step_time: (
        Annotated[StepTime, BeforeValidator(_step_time, json_schema_input_type=StepTime | str)]
        | None
    ) = Field(
        None,
        description="forward + backward + optimizer of one micro-batch on one device, "
        "no DDP, no data wait; anchors the compute side",
    )
    optimizer: Annotated[
        Optimizer, BeforeValidator(_given, json_schema_input_type=Optimizer | None)
    ] = Field(default_factory=Optimizer, description="default: plain SGD")
    data: DataLoader | None = Field(None, description="omitted: the step never waits for data")

    @model_validator(mode="after")
    def _one_source(self) -> Workload:
        given = [
            key for key in ("model", "profile", "parameters") if getattr(self, key) is not None
        ]
        if not given:
            raise _fail("needs one of model (a zoo name), profile (a file) or parameters (a file)")
        if len(given) > 1:
            raise _fail(f"{' and '.join(given)} are both given; keep one of them", given[1])
        if self.parameters and not self.step_time:
            raise _fail("a parameter list says nothing of time; give step_time too", "parameters")
        return self

    @model_validator(mode="after")
    def _nothing_without_effect(self) -> Workload:
        for key in ("seq_len", "image_size"):
            if self.model is None and getattr(self, key) is not None:
                raise _fail("has no effect without a zoo model: times are measured; drop it", key)
        if self.ready_origin and not self.profile:
            raise _fail("has no effect without a profile; drop it", "ready_origin")
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


class Ddp(_Spec):
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
    accumulation_steps: Annotated[int, Field(ge=1, le=10_000)] = Field(
        1, description="micro-batches per optimizer step, no_sync on all but the last"
    )

    @model_validator(mode="before")
    @classmethod
    def _newer_names(cls, data: Any) -> Any:
        if not isinstance(data, dict) or "forward_sync_buffers" not in data:
            return data
        if "broadcast_buffers" in data:
            raise _fail(
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
                    raise _fail("torch 1.4 had no such option; choose a newer ddp.torch", key)
        return self


_MOST_RANKS = 100_000


class IntraNode(_Spec):
    """What one GPU can send in one direction to its ring neighbour in the node."""

    bandwidth_bytes_per_s: Bandwidth = Field(
        alias="bandwidth", description="bus bandwidth, one direction"
    )
    latency_s: Duration | None = Field(
        None,
        alias="latency",
        description="one ring step, software included; default: NCCL's own, or the device's",
    )
    path: Literal["nvlink", "pcie"] | None = Field(
        None, description="what NCCL sees; default: nvlink from 30 GB/s up"
    )
    switch_bandwidth_bytes_per_s: Bandwidth | None = Field(
        None,
        alias="switch_bandwidth",
        description="bus bandwidth of all-reduces that the switch sums (NVLS); omitted: it cannot",
    )


class InterNode(_Spec):
    """The network between nodes: one NIC, one direction."""

    bandwidth_bytes_per_s: Bandwidth = Field(
        alias="bandwidth", description="one NIC, one direction"
    )
    latency_s: Duration | None = Field(
        None,
        alias="latency",
        description="one ring step, software included; default: NCCL's own, or the device's",
    )
    nics_per_node: Annotated[int, Field(ge=1, le=1000)] = Field(
        1, description="NICs that a ring may use"
    )
    oversubscription: Annotated[float, Field(ge=1, le=1000)] = Field(
        1.0, description="ratio of access to uplink capacity of a leaf switch; 1 = none"
    )
    nodes_per_leaf: Annotated[int, Field(ge=1, le=_MOST_RANKS)] | None = Field(
        None, description="so many nodes reach each other without an uplink; omitted: none do"
    )
    uplinks: Annotated[int, Field(ge=1, le=10_000)] | None = Field(
        None, description="equal paths out of a leaf; flows hashed onto one collide (ECMP)"
    )
    transport: Literal["rdma", "efa", "tcp"] = Field(
        "rdma", description="where no latency is stated: NCCL's own for rdma, else the preset's"
    )


class Device(_Spec):
    """One accelerator (or CPU core): rates, memory, and how much of them a model reaches."""

    name: str = Field("custom", description="shown in the answer")
    kind: Literal["gpu", "cpu"] = Field("gpu", description="a cpu computes on the host lane")
    architecture: Literal["volta", "ampere", "hopper", "blackwell"] = Field(
        "ampere", description="row of NCCL's tables: Turing as volta, Ada as ampere"
    )
    peak_flops_per_s: dict[Literal["fp32", "tf32", "fp16", "bf16"], FlopsPerSecond] = Field(
        alias="peak_flops", min_length=1, description="dense matmul rate by input precision"
    )
    matmul_efficiency: dict[Literal["fp32", "tf32", "fp16", "bf16"], Fraction] = Field(
        default_factory=dict, description="assumed fraction of the peak rate; 0.45 where not given"
    )
    memory_bytes: Size = Field(alias="memory", description="memory of the device")
    memory_bandwidth_bytes_per_s: Bandwidth = Field(
        alias="memory_bandwidth", description="peak rate of the device's memory"
    )
    memory_efficiency: Fraction = Field(0.85, description="assumed fraction of the peak bandwidth")
    kernel_floor_s: Duration = Field(
        3e-6, alias="kernel_floor", description="shortest time of a kernel with its gap"
    )
    launch_s: Duration = Field(5e-6, alias="launch", description="host time of one kernel launch")
    intra_node: IntraNode | None = Field(None, description="links of the usual machine")
    inter_node: InterNode | None = Field(None, description="network of the usual machine")
    sources: dict[str, str] = Field(default_factory=dict, description="where each figure is from")

    def efficiency(self, rate: str) -> float:
        """Assumed fraction of the peak rate (`fp32`, `tf32`, `fp16` or `bf16`) in training."""
        return self.matmul_efficiency.get(rate, 0.45)  # type: ignore[call-overload, no-any-return]


def _device(value: Any) -> Any:
    if isinstance(value, (dict, Device)):
        return value
    if not isinstance(value, str):
        raise ValueError(f"{shown(value)} is not a device: write a preset's name, or its values")
    name = catalog.resolve("device", value)
    table = catalog.device_table(name)
    device = {
        key: table[key] for key in ("kind", "matmul_efficiency", "memory_efficiency", "sources")
    }
    rates = {rate: f"{flops!r} FLOP/s" for rate, flops in table["peak_flops"].items()}
    return (
        device
        | {
            "name": name,
            "peak_flops": rates,
            "memory": f"{table['memory_bytes']!r} B",
            "memory_bandwidth": f"{table['memory_bandwidth_bytes_per_s']!r} B/s",
            "kernel_floor": f"{table['kernel_floor_s']!r} s",
            "launch": f"{table['launch_s']!r} s",
            "intra_node": _preset_link(table["intra_node"]),
            "inter_node": _preset_link(table["inter_node"]),
        }
        | ({"architecture": table["architecture"]} if "architecture" in table else {})
    )


def _preset_link(link: dict[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {
        key: link[key] for key in ("nics_per_node", "transport", "path") if key in link
    }
    rates: dict[str, Any] = {
        key: f"{link[f'{key}_bytes_per_s']!r} B/s"
        for key in ("bandwidth", "switch_bandwidth")
        if f"{key}_bytes_per_s" in link
    }
    return {**rates, "latency": f"{link['latency_s']!r} s", **plain}


class Stragglers(_Spec):
    """A compute TIME multiplier per rank, constant over the run: drawn once, or listed."""

    distribution: Literal["lognormal"] | None = Field(None, description="median 1")
    sigma: Sigma | None = Field(None, description="of the logarithm")
    factors: dict[int, Annotated[float, Field(gt=0, le=1000)]] | None = Field(
        None, description="rank: multiplier; 1.2 is 20 % slower"
    )

    @model_validator(mode="after")
    def _one_way(self) -> Stragglers:
        drawn = (self.distribution, self.sigma)
        if (self.factors is None) == (drawn == (None, None)):
            raise _fail("needs either distribution and sigma, or factors")
        if self.factors is None and None in drawn:
            raise _fail("needs both distribution and sigma")
        return self


class Machine(_Spec):
    """A machine one can buy or rent: its device, how many, and its network."""

    name: str = Field("custom", description="shown in the answer")
    device: str = Field(description="a device preset's name")
    gpus_per_node: Annotated[int, Field(ge=1, le=1024)] = Field(description="devices in it")
    intra_node: IntraNode | None = Field(None, description="default: the device's")
    inter_node: InterNode | None = Field(None, description="default: the device's")
    cpu_vendor: Literal["intel", "amd", "other"] = Field(
        "intel", description="NCCL's limit of LL between nodes depends on it"
    )
    sources: dict[str, str] = Field(default_factory=dict, description="where each figure is from")


def _machine(value: Any) -> Any:
    if isinstance(value, (dict, Machine)):
        return value
    if not isinstance(value, str):
        raise ValueError(f"{shown(value)} is not a machine: write a preset's name, or its values")
    name = catalog.resolve("machine", value)
    table = catalog.machine_table(name)
    kept = {key: table[key] for key in ("device", "gpus_per_node", "cpu_vendor", "sources")}
    return kept | {"name": name, "inter_node": _preset_link(table["inter_node"])}


class Background(_Spec):
    """Another job's traffic on each node's network."""

    rate_bytes_per_s: Bandwidth = Field(alias="rate", description="of a node, while it sends")
    busy_s: Duration | None = Field(
        None, alias="busy", description="it sends for so long; omitted: always"
    )
    every_s: Duration | None = Field(None, alias="every", description="and again after so long")

    @model_validator(mode="after")
    def _bursts(self) -> Background:
        if (self.busy_s is None) != (self.every_s is None):
            raise _fail("needs both busy and every, or neither")
        if self.busy_s is not None and self.every_s is not None:
            if self.every_s < 1e-6:
                raise _fail("must be at least 1 us", "every")
            if not 0 < self.busy_s <= self.every_s:
                raise _fail("must be above 0, and no longer than every", "busy")
        return self


Algorithm = Literal[
    "auto",
    "ring",
    "gloo_ring",
    "tree",
    "nvls",
    "halving_doubling",
    "hierarchical",
    "direct",
    "parameter_server",
    "data_parallel",
]


class Cluster(_Spec):
    """Ranks, the devices they run on, and the links between them."""

    nodes: Annotated[int, Field(ge=1, le=_MOST_RANKS)] = Field(description="machines")
    gpus_per_node: Annotated[int, Field(ge=1, le=1024)] = Field(description="ranks per machine")
    machine: (
        Annotated[Machine, BeforeValidator(_machine, json_schema_input_type=Machine | str)] | None
    ) = Field(None, description="a preset's name, or its values: gives device and gpus_per_node")
    device: Annotated[Device, BeforeValidator(_device, json_schema_input_type=Device | str)] = (
        Field(description="a preset's name, or the values themselves")
    )
    all_reduce: SourceFileField | None = Field(
        None, description="an nccl-tests log or our CSV, measured on these very ranks"
    )
    profile: SourceFileField | None = Field(
        None, description="a cluster profile (ddpsim.profile/1), as `calibrate fit` writes it"
    )
    algorithm: Algorithm = Field(
        "auto", description="auto: NCCL's own choice for each size; gloo's is its ring"
    )
    protocol: Literal["auto", "LL", "LL128", "Simple"] = Field(
        "auto", description="of NCCL; auto: its own choice for each size"
    )
    servers: Annotated[int, Field(ge=1, le=_MOST_RANKS)] | None = Field(
        None, description="of algorithm parameter_server; default 1"
    )
    intra_node: IntraNode | None = Field(None, description="default: the machine's")
    inter_node: InterNode | None = Field(None, description="default: the machine's")
    weak_links: dict[int, Fraction] | None = Field(
        None, description="rank: the part of its bandwidth that is left of the link to it"
    )
    background: Background | None = Field(None, description="other traffic; omitted: none")
    stragglers: Stragglers | None = Field(None, description="omitted: none")

    @property
    def world_size(self) -> int:
        """Ranks in the job: nodes x gpus_per_node."""
        return self.nodes * self.gpus_per_node

    def link(self, key: Literal["intra_node", "inter_node"]) -> IntraNode | InterNode | None:
        """Of a kind: as the scenario states it, else the machine's, else the device's."""
        of_machine = getattr(self.machine, key) if self.machine else None
        preset: IntraNode | InterNode | None = of_machine or getattr(self.device, key)
        stated: IntraNode | InterNode | None = getattr(self, key)
        if stated is None:
            return preset
        if stated.latency_s is None and preset is not None:
            return stated.model_copy(update={"latency_s": preset.latency_s})
        return stated

    def states_latency(self, key: Literal["intra_node", "inter_node"]) -> bool:
        """Whether the scenario itself says how long a step over such a link takes."""
        stated = getattr(self, key)
        return stated is not None and stated.latency_s is not None

    @model_validator(mode="before")
    @classmethod
    def _of_a_machine(cls, data: Any) -> Any:
        """A machine brings its device and how many of them it has."""
        machine = data.get("machine") if isinstance(data, dict) else None
        try:
            known = _machine(machine) if isinstance(machine, str) else machine
        except ValueError as error:
            raise _fail(str(error), "machine") from None
        if isinstance(known, dict):
            brought = {k: known[k] for k in ("device", "gpus_per_node") if k in known}
            return brought | data
        return data

    @model_validator(mode="after")
    def _ranks_exist(self) -> Cluster:
        if self.world_size > _MOST_RANKS:
            raise _fail(f"{self._product()}, more than the {_MOST_RANKS} simulated here", "nodes")
        if self.background and self.nodes == 1:
            raise _fail("is traffic between nodes, and there is one; drop it", "background")
        for key, ranks in (
            ("stragglers.factors", (self.stragglers and self.stragglers.factors) or {}),
            ("weak_links", self.weak_links or {}),
        ):
            for rank in ranks:
                if not 0 <= rank < self.world_size:
                    raise _fail(
                        f"rank {shown(rank)} does not exist: {self._product()}, "
                        f"0 to {self.world_size - 1}",
                        key,
                    )
        return self

    @model_validator(mode="after")
    def _algorithm_fits(self) -> Cluster:
        if self.servers is not None and self.algorithm != "parameter_server":
            raise _fail("belongs to algorithm: parameter_server; drop it", "servers")
        if self.algorithm == "data_parallel" and self.nodes > 1:
            raise _fail(
                "data_parallel is one process with the GPUs of one node; set nodes: 1", "algorithm"
            )
        if self.protocol != "auto" and self.algorithm not in ("auto", "ring", "tree", "nvls"):
            raise _fail(f"is NCCL's, and {self.algorithm} is not; drop it", "protocol")
        return self

    def _product(self) -> str:
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes} nodes"
        return f"{nodes} x {self.gpus_per_node} GPUs = {self.world_size} ranks"


class Jitter(_Spec):
    """A compute time multiplier per rank and iteration."""

    distribution: Literal["lognormal"] = Field("lognormal", description="median 1")
    sigma: Sigma = Field(description="of the logarithm")


class Stalls(_Spec):
    """Rare moments in which a rank stands still: page faults, a reset link, the collector."""

    probability: Annotated[float, Field(gt=0, le=1)] = Field(
        description="of a stall in an iteration of a rank"
    )
    duration_s: Duration = Field(alias="duration", description="of each")


class Run(_Spec):
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


class Scenario(_Spec):
    """One question to ddpsim: a workload, its DDP options, a cluster, and how to run."""

    schema_: Literal["ddpsim/1"] = Field(
        alias="schema", description="ddpsim/1, the version of this format"
    )
    name: str = Field("unnamed", description="shown in the answer")
    workload: Workload = Field(description="the model, its batch, and what is known of its times")
    ddp: Annotated[Ddp, BeforeValidator(_given, json_schema_input_type=Ddp | None)] = Field(
        default_factory=Ddp, description="omitted: torch's defaults"
    )
    cluster: Cluster = Field(description="nodes, GPUs and the links between them")
    run: Annotated[Run, BeforeValidator(_given, json_schema_input_type=Run | None)] = Field(
        default_factory=Run, description="iterations, seed and noise"
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Scenario:
        kind, backend = self.cluster.device.kind, self.ddp.backend
        if (kind, backend) == ("cpu", "nccl"):
            raise _fail(
                "is a CPU, but ddp.backend is nccl (its default), which needs GPUs; "
                "write ddp.backend: gloo",
                "cluster.device",
            )
        algorithm = self.cluster.algorithm
        if backend == "gloo" and algorithm in ("tree", "nvls", "data_parallel"):
            raise _fail(
                f"{algorithm} is NCCL's; gloo has its ring: write auto", "cluster.algorithm"
            )
        if algorithm == "data_parallel" and self.ddp.accumulation_steps > 1:
            raise _fail("DataParallel has no no_sync; write 1", "ddp.accumulation_steps")
        if (kind, backend) == ("gpu", "gloo"):
            raise _fail(
                "gloo on GPU tensors is not modelled; write ddp.backend: nccl", "ddp.backend"
            )
        return self
