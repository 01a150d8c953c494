"""The device of a rank, by name, file or figures; and the machine that it is in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo

from ddpsim.errors import shown
from ddpsim.files import json_of, read_regular
from ddpsim.scenario import catalog
from ddpsim.scenario.base import Fraction, Spec
from ddpsim.scenario.links import InterNode, IntraNode, as_stated
from ddpsim.scenario.quantity import (
    Bandwidth,
    Duration,
    FlopsPerSecond,
    Size,
    source_file,
)
from ddpsim.scenario.suggest import in_own_words

DEVICE_SCHEMA = "ddpsim.device/1"
Rate = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]  # of matrix products, by their inputs
Architecture = Literal["volta", "ampere", "hopper", "blackwell"]
# NCCL v2.30.7 src/graph/topo.h: what an x16 link of PCIe 3, 4 or 5 carries; which of them a GPU has
# is assumed by its architecture
SLOT_BYTES_PER_S = {3: 12e9, 4: 24e9, 5: 48e9}
PCIE_GENERATION: dict[Architecture, int] = {"volta": 3, "ampere": 4, "hopper": 5, "blackwell": 5}
_LONGEST_LAUNCH_S = 0.01
_LARGEST_FILE_BYTES = 2**24
_Seconds = Annotated[float, Field(ge=0, le=_LONGEST_LAUNCH_S)]
_PerSecond = Annotated[float, Field(gt=0)]


class MeasuredDevice(Spec):
    """What a device file rests on."""

    record: str = Field(description="the record: its file, machine, torch and time")
    steps: dict[Rate, Annotated[int, Field(ge=0)]] = Field(
        description="steps of zoo models that were measured, by the type of their products"
    )
    sigma: Annotated[float, Field(gt=0, le=2)] = Field(
        description="of the logarithm of a step, where half of the models predict the others"
    )


class Device(Spec):
    """One accelerator (or CPU core): rates, memory, and how much of them a model achieves."""

    name: str = Field("custom", description="shown in the answer")
    kind: Literal["gpu", "cpu"] = Field("gpu", description="a cpu computes on the host lane")
    architecture: Architecture = Field(
        "ampere", description="row of NCCL's tables: Turing as volta, Ada as ampere"
    )
    peak_flops_per_s: dict[Rate, FlopsPerSecond] = Field(
        alias="peak_flops", min_length=1, description="dense matmul rate by input precision"
    )
    matmul_efficiency: dict[Rate, Fraction] = Field(
        default_factory=dict,
        description="fraction of the peak rate that products achieve in usual shapes, as BERT's; "
        "0.45 where not given",
    )
    convolution_efficiency: dict[Rate, Fraction] = Field(
        default_factory=dict,
        description="the same of convolutions, as ResNet-50's; if it is another",
    )
    published_steps: dict[Rate, int] = Field(
        default_factory=dict,
        description="how many measured steps of this GPU set a rate's fractions; 0: those of "
        "other GPUs alone; omitted: assumed",
    )
    multiprocessors: Annotated[int, Field(ge=1, le=10_000)] | None = Field(
        None, description="SMs, or compute units; omitted: products of any size fill the device"
    )
    cache_bytes: Size | None = Field(
        None,
        alias="cache",
        description="its last cache; omitted: none that holds a layer's tensors",
    )
    memory_bytes: Size = Field(alias="memory", description="memory of the device")
    memory_bandwidth_bytes_per_s: Bandwidth = Field(
        alias="memory_bandwidth", description="peak rate of the device's memory"
    )
    memory_efficiency: Fraction = Field(0.85, description="assumed fraction of the peak bandwidth")
    optimizer_efficiency: Fraction | None = Field(
        None, description="the same of optimizers, where it is another"
    )
    kernel_floor_s: Duration = Field(
        3e-6, alias="kernel_floor", description="shortest time of a kernel with its gap"
    )
    launch_s: Duration = Field(
        5e-6, alias="launch", le=_LONGEST_LAUNCH_S, description="host time of one kernel launch"
    )
    operator_s: Duration = Field(
        25e-6,
        alias="operator",
        le=_LONGEST_LAUNCH_S,
        description="host time of one of a model's operators (Python, dispatch, autograd), its "
        "launches apart; a cpu has none",
    )
    peer_to_peer: bool = Field(
        default=True, description="whether its driver allows peer-to-peer over PCIe"
    )
    bridge_bandwidth_bytes_per_s: Bandwidth | None = Field(
        None,
        alias="bridge_bandwidth",
        description="bus bandwidth of two GPUs with an NVLink bridge; omitted: it takes none",
    )
    intra_node: IntraNode | None = Field(None, description="links of the usual machine")
    inter_node: InterNode | None = Field(None, description="network of the usual machine")
    measured: MeasuredDevice | None = Field(
        None, description="what a device file rests on; None: no such file"
    )
    sources: dict[str, str] = Field(default_factory=dict, description="where each figure is from")

    @property
    def pcie(self) -> int:
        """Generation of its PCIe."""
        return PCIE_GENERATION[self.architecture]

    @property
    def host_link_bytes_per_s(self) -> float:
        """Rate of the link to its host, each way."""
        return SLOT_BYTES_PER_S[self.pcie]

    @property
    def two_byte_hooks(self) -> tuple[str, str]:
        """Hooks that send 16 bits, the better one first: bfloat16 has float32's range."""
        if "bf16" in self.peak_flops_per_s:
            return "bf16_compress", "fp16_compress"
        return "fp16_compress", "bf16_compress"

    @property
    def optimizer_bytes_per_s(self) -> float:
        """The rate at which an optimizer moves its bytes."""
        reached = self.optimizer_efficiency or self.memory_efficiency
        return self.memory_bandwidth_bytes_per_s * reached

    def rates_trust(self) -> Literal["measured", "datasheet", "stated"]:
        """What the peak rates rest on."""
        if self.measured:
            return "measured"
        return "datasheet" if self.sources else "stated"

    def efficiency_trust(self, rate: Rate) -> Literal["measured", "published", "assumed"]:
        """What the fractions of a rate rest on."""
        if self.measured and self.measured.steps.get(rate):
            return "measured"
        return "published" if self.published_steps.get(rate) else "assumed"

    def launching_trust(
        self, *, compiled: bool
    ) -> Literal["measured", "published", "stated", "assumed"]:
        """What the host's times rest on: of eager code an operator's, of compiled a launch's.

        A preset has the median of published hosts for an operator, and an assumption for a launch.
        """
        key = "launch_s" if compiled else "operator_s"
        if key in self.sources:
            return "measured" if self.measured else "assumed" if compiled else "published"
        return "stated" if key in self.model_fields_set else "assumed"

    def efficiency(self, rate: Rate, *, convolution: bool = False) -> float:
        """Fraction of the peak rate that is reached in training."""
        if rate == "fp8" and rate not in self.matmul_efficiency:
            rate = "bf16"  # assumed: products of one byte reach the part that those of two do
        usual = self.matmul_efficiency.get(rate, 0.45)
        return self.convolution_efficiency.get(rate, usual) if convolution else usual


class DeviceFile(BaseModel):
    """A device as measured: JSON, as `calibrate fit-device` writes it, in SI units."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True
    )

    schema_: Literal["ddpsim.device/1"] = Field("ddpsim.device/1", alias="schema")
    name: str
    kind: Literal["gpu", "cpu"]
    architecture: Architecture = "ampere"
    peak_flops: dict[Rate, _PerSecond] = Field(min_length=1)
    matmul_efficiency: dict[Rate, Fraction]
    convolution_efficiency: dict[Rate, Fraction] = Field(default_factory=dict)
    memory_bytes: int = Field(gt=0)
    memory_bandwidth_bytes_per_s: _PerSecond
    memory_efficiency: Fraction
    optimizer_efficiency: Fraction | None = None
    kernel_floor_s: _Seconds
    launch_s: _Seconds
    operator_s: _Seconds
    multiprocessors: int | None = Field(None, gt=0, description="of the preset of that name")
    cache_bytes: int | None = Field(None, gt=0, description="likewise")
    intra_node: dict[str, Any] | None = Field(None, description="likewise")
    inter_node: dict[str, Any] | None = Field(None, description="likewise")
    peer_to_peer: bool | None = Field(None, description="likewise")
    bridge_bytes_per_s: _PerSecond | None = Field(None, description="likewise")
    measured: MeasuredDevice
    sources: dict[str, str]


class _ChangedPreset(Spec):
    """A preset with some of its figures changed."""

    model_config = ConfigDict(extra="allow")

    preset: str = Field(
        description="a preset's name, or a device file; other keys change figures of it"
    )


AnyDevice = Device | _ChangedPreset | str
# what published steps tell of a preset holds of these figures together alone
_SET_BY_STEPS = frozenset(
    (
        *("peak_flops", "matmul_efficiency", "convolution_efficiency"),
        *("memory_bandwidth", "memory_efficiency", "optimizer_efficiency"),
    )
)


def read_device(value: Any, info: ValidationInfo) -> Any:
    """A device as a scenario gives it, with the figures of the preset or the file that it names."""
    if isinstance(value, dict) and "preset" in value:
        changes = {key: figure for key, figure in value.items() if key != "preset"}
        preset = _named_device(value["preset"], info)
        sources = {
            key: source
            for key, source in preset["sources"].items()
            if key.removesuffix("_s") not in changes
        }
        if not _SET_BY_STEPS.isdisjoint(changes):
            preset.pop("published_steps", None)
            preset.pop("measured", None)
        return preset | {"sources": sources} | changes
    if isinstance(value, (dict, Device)):
        return value
    return _named_device(value, info)


def _named_device(value: Any, info: ValidationInfo) -> dict[str, Any]:
    if not isinstance(value, str) or not value.endswith(".json"):
        return _preset_device(value)
    source = source_file(value, info)
    read = _read_device_file(source.given, source.path)
    return _of_table(read.name, read.model_dump(exclude_none=True))


def _read_device_file(given: str, path: Path) -> DeviceFile:
    """Read a device file, which a scenario calls `given`; raises ValueError with what is wrong."""
    try:
        text = read_regular(path, _LARGEST_FILE_BYTES).decode("utf-8-sig")
        document = json_of(text)
    except OSError as error:
        raise ValueError(f"{shown(given)} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{shown(given)} is no JSON: {error}") from None
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != DEVICE_SCHEMA:
        is_record = isinstance(schema, str) and schema.startswith("ddpsim.device-record/")
        hint = "; `calibrate fit-device` makes one of this record" if is_record else ""
        raise ValueError(
            f"{shown(given)} is no {DEVICE_SCHEMA}: its schema is {shown(schema)}{hint}"
        )
    try:
        return DeviceFile.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(
            f"{shown(given)} is no {DEVICE_SCHEMA}: {place}: {in_own_words(first)}; "
            "make it anew with `calibrate fit-device`"
        ) from None


def _preset_device(value: Any) -> dict[str, Any]:
    if not isinstance(value, str):
        raise ValueError(f"{shown(value)} is not a device: write a preset's name, or its values")
    try:
        name = catalog.resolve("device", value)
    except ValueError as error:
        raise ValueError(
            f"{error}. Or its own values: {{memory: 48 GiB, memory_bandwidth: 1 TB/s, peak_flops: "
            "{fp32: 50 TFLOP/s}}"
        ) from None
    return _of_table(name, catalog.device_table(name))


def _of_table(name: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """A preset's or a file's figures in SI units as a scenario would state them."""
    bridge = {"bridge_bandwidth_bytes_per_s": table.get("bridge_bytes_per_s")}
    return as_stated(Device, {**table, **bridge, "name": name})


class Machine(Spec):
    """A machine one can buy or rent: its device, how many, and its network."""

    name: str = Field("custom", description="shown in the answer")
    device: str = Field(description="a device preset's name")
    gpus_per_node: Annotated[int, Field(ge=1, le=1024)] = Field(description="devices in it")
    intra_node: IntraNode | None = Field(None, description="default: the device's")
    inter_node: InterNode | None = Field(None, description="default: the device's")
    nvlink_domain: Annotated[int, Field(ge=1)] | None = Field(
        None, description="GPUs that NVLink joins, over nodes too; default: a node's"
    )
    cpu_vendor: Literal["intel", "amd", "other"] = Field(
        "intel", description="NCCL's limit of LL between nodes depends on it"
    )
    nccl_env: dict[str, str | int] = Field(
        default_factory=dict, description="NCCL's environment variables that its images set"
    )
    network_sigma: Annotated[float, Field(gt=0, le=3)] | None = Field(
        None,
        description="standard deviation of the logarithm of its times between nodes from 64 MiB "
        "on, from users' and vendors' figures; default: its transport's",
    )
    sources: dict[str, str] = Field(default_factory=dict, description="where each figure is from")


def read_machine(value: Any) -> Any:
    """The values of a machine, or of the preset with that name; raises ValueError."""
    if isinstance(value, (dict, Machine)):
        return value
    if not isinstance(value, str):
        raise ValueError(f"{shown(value)} is not a machine: write a preset's name, or its values")
    name = catalog.resolve("machine", value)
    return as_stated(Machine, {**catalog.machine_table(name), "name": name})
