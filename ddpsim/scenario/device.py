"""The device of a rank, by name, with changes or by its figures; the machine that it is in."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from ddpsim.errors import shown
from ddpsim.scenario import catalog
from ddpsim.scenario.base import Fraction, Spec
from ddpsim.scenario.links import InterNode, IntraNode, link_of_preset
from ddpsim.scenario.quantity import Bandwidth, Duration, FlopsPerSecond, Size

__all__ = ["AnyDevice", "Device", "Machine", "Rate", "read_device", "read_machine"]

_LONGEST_LAUNCH_S = 0.01
Rate = Literal["fp32", "tf32", "fp16", "bf16"]  # of matrix products, by their inputs


class Device(Spec):
    """One accelerator (or CPU core): rates, memory, and how much of them a model achieves."""

    name: str = Field("custom", description="shown in the answer")
    kind: Literal["gpu", "cpu"] = Field("gpu", description="a cpu computes on the host lane")
    architecture: Literal["volta", "ampere", "hopper", "blackwell"] = Field(
        "ampere", description="row of NCCL's tables: Turing as volta, Ada as ampere"
    )
    peak_flops_per_s: dict[Rate, FlopsPerSecond] = Field(
        alias="peak_flops", min_length=1, description="dense matmul rate by input precision"
    )
    matmul_efficiency: dict[Rate, Fraction] = Field(
        default_factory=dict, description="assumed fraction of the peak rate; 0.45 where not given"
    )
    convolution_efficiency: dict[Rate, Fraction] = Field(
        default_factory=dict, description="the same of convolutions, where it is another"
    )
    published_steps: dict[Rate, int] = Field(
        default_factory=dict,
        description="how many published steps of one GPU set a rate's fractions; else assumed",
    )
    memory_bytes: Size = Field(alias="memory", description="memory of the device")
    memory_bandwidth_bytes_per_s: Bandwidth = Field(
        alias="memory_bandwidth", description="peak rate of the device's memory"
    )
    memory_efficiency: Fraction = Field(0.85, description="assumed fraction of the peak bandwidth")
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
    intra_node: IntraNode | None = Field(None, description="links of the usual machine")
    inter_node: InterNode | None = Field(None, description="network of the usual machine")
    sources: dict[str, str] = Field(default_factory=dict, description="where each figure is from")

    def efficiency_trust(self, rate: Rate) -> Literal["published", "assumed"]:
        """What the fractions of a rate rest on."""
        return "published" if rate in self.published_steps else "assumed"

    def launching_trust(self, *, compiled: bool) -> Literal["stated", "assumed"]:
        """What the host's times rest on: of eager code an operator's, of compiled a launch's."""
        key = "launch_s" if compiled else "operator_s"
        stated = key in self.model_fields_set and key not in self.sources
        return "stated" if stated else "assumed"

    def efficiency(self, rate: Rate, *, convolution: bool = False) -> float:
        """Fraction of the peak rate that is reached in training."""
        usual = self.matmul_efficiency.get(rate, 0.45)
        return self.convolution_efficiency.get(rate, usual) if convolution else usual


class _ChangedPreset(Spec):
    """A preset with some of its figures changed."""

    model_config = ConfigDict(extra="allow")

    preset: str = Field(description="a preset's name; other keys change figures of it")


AnyDevice = Device | _ChangedPreset | str
# what published steps tell of a preset holds of these figures together alone
_SET_BY_STEPS = frozenset(
    (
        *("peak_flops", "matmul_efficiency", "convolution_efficiency"),
        *("memory_bandwidth", "memory_efficiency"),
    )
)


def read_device(value: Any) -> Any:
    """A device as a scenario gives it, with the figures of the preset that it names."""
    if isinstance(value, dict) and "preset" in value:
        own = {key: figure for key, figure in value.items() if key != "preset"}
        known = _preset_device(value["preset"])
        sources = {key: text for key, text in known["sources"].items() if _figure(key) not in own}
        if not _SET_BY_STEPS.isdisjoint(own):
            known.pop("published_steps", None)
        return known | {"sources": sources} | own
    if isinstance(value, (dict, Device)):
        return value
    return _preset_device(value)


def _figure(source: str) -> str:
    """The key whose figure a preset's source is of."""
    return source.removesuffix("_s")


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
    table = catalog.device_table(name)
    plain = ("kind", "matmul_efficiency", "memory_efficiency", "sources")
    optional = ("convolution_efficiency", "published_steps", "architecture")
    device = {key: table[key] for key in (*plain, *(key for key in optional if key in table))}
    rates = {rate: f"{flops!r} FLOP/s" for rate, flops in table["peak_flops"].items()}
    return device | {
        "name": name,
        "peak_flops": rates,
        "memory": f"{table['memory_bytes']!r} B",
        "memory_bandwidth": f"{table['memory_bandwidth_bytes_per_s']!r} B/s",
        "kernel_floor": f"{table['kernel_floor_s']!r} s",
        "launch": f"{table['launch_s']!r} s",
        "operator": f"{table['operator_s']!r} s",
        "intra_node": link_of_preset(table["intra_node"]),
        "inter_node": link_of_preset(table["inter_node"]),
    }


class Machine(Spec):
    """A machine one can buy or rent: its device, how many, and its network."""

    name: str = Field("custom", description="shown in the answer")
    device: str = Field(description="a device preset's name")
    gpus_per_node: Annotated[int, Field(ge=1, le=1024)] = Field(description="devices in it")
    intra_node: IntraNode | None = Field(None, description="default: the device's")
    inter_node: InterNode | None = Field(None, description="default: the device's")
    cpu_vendor: Literal["intel", "amd", "other"] = Field(
        "intel", description="NCCL's limit of LL between nodes depends on it"
    )
    nccl_env: dict[str, str | int] = Field(
        default_factory=dict, description="NCCL's environment variables that its images set"
    )
    sources: dict[str, str] = Field(default_factory=dict, description="where each figure is from")


def read_machine(value: Any) -> Any:
    """A machine's values, of a preset's name too; raises ValueError."""
    if isinstance(value, (dict, Machine)):
        return value
    if not isinstance(value, str):
        raise ValueError(f"{shown(value)} is not a machine: write a preset's name, or its values")
    name = catalog.resolve("machine", value)
    table = catalog.machine_table(name)
    keys = ("device", "gpus_per_node", "cpu_vendor", "nccl_env", "sources")
    kept = {key: table[key] for key in keys if key in table}
    return kept | {"name": name, "inter_node": link_of_preset(table["inter_node"])}
