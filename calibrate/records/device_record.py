"""A device record: what one GPU or CPU core takes for kernels, steps, and what surrounds them.

JSON, schema `ddpsim.device-record/1`. Saved whole and atomically after every measurement. Cases are
measured in rounds, so that what disturbs a machine for a while meets all of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from calibrate.files import Part, load_json
from calibrate.records.record import Environment
from ddpsim.scenario.device import Rate
from ddpsim.scenario.workload import Precision

SCHEMA = "ddpsim.device-record/1"
Seconds = Annotated[float, Field(ge=0)]

Kind = Literal[
    "product",  # shape: rows, inner, columns; part "kernel"
    # shape: batch, inputs, side, outputs, kernel, stride, groups; parts "forward", "backward"
    "convolution",
    "memory",  # variant names the kernel, shape its elements; part "kernel"
    # variant "kernel": a launch without torch's dispatcher; "operator": the smallest of torch's;
    # "step": ten such, forward and backward; "graph": one kernel of many in a CUDA graph; parts
    # "host" and "kernel"
    "launch",
    "optimizer",  # variant: class and implementation; shape: tensors, elements of each; part "step"
    "step",  # of a zoo model; parts "forward", "backward", "optimizer"
    "ddp",  # the same in turns: "bare" and "wrapped" in DDP of one rank
    "compile",  # parts as of a step, after the compilation
    "sync_batch_norm",  # shape: batch, channels, side; parts "plain", "synced": one, both passes
    "grad_scaler",  # parts "plain" and "scaled" steps of a model
]


class Case(Part):
    """One thing to measure; what tells it from others."""

    kind: Kind
    model: str = Field("", description="of the zoo")
    variant: str = ""
    precision: Precision | Rate = "fp32"
    batch: int = Field(0, ge=0)
    size: int = Field(0, ge=0, description="an image's side, or tokens")
    channels_last: bool = False
    shape: tuple[int, ...] = ()

    def __str__(self) -> str:
        shape = " x ".join(map(str, self.shape))
        of = f"{self.batch} x {self.size}" if self.batch else shape
        parts = (self.kind, self.model, self.variant, of, self.precision)
        return " ".join([*filter(None, parts), *(["channels last"] if self.channels_last else [])])


class DeviceMeasurement(Part):
    """Samples of a case: seconds of each part, round after round."""

    case: Case
    samples_s: dict[str, tuple[Seconds, ...]] = Field(min_length=1)
    rounds: int = Field(1, ge=1, description="times that it was taken up")
    took_s: Seconds = Field(0.0, description="of the last round, with all preparation")
    flops: float = Field(0.0, ge=0, description="of one pass, 2 a multiply-add")
    moved_bytes: float = Field(0.0, ge=0, description="operands read and results written, once")
    peak_bytes: int | None = Field(None, description="tensors on a GPU at most")
    ready: tuple[float | None, ...] = Field(
        (), description="of a step: when gradients are ready, as parts of backward, by parameter"
    )

    def best_s(self, *parts: str) -> float:
        """Seconds of these parts: each one's least, which others' work disturbed least."""
        return sum(min(self.samples_s[part]) for part in parts or self.samples_s)

    def joined(self, later: DeviceMeasurement) -> DeviceMeasurement:
        """With the samples of a later round."""
        samples = {part: (*first, *later.samples_s[part]) for part, first in self.samples_s.items()}
        return later.model_copy(update={"samples_s": samples, "rounds": self.rounds + 1})


class DeviceRecord(Part):
    """Everything measured on one device."""

    schema_: Literal["ddpsim.device-record/1"] = Field("ddpsim.device-record/1", alias="schema")
    environment: Environment
    memory_bytes: int = Field(gt=0, description="of the device; of a CPU what is free")
    capability: tuple[int, int] | None = Field(None, description="CUDA's, of an NVIDIA GPU")
    measurements: tuple[DeviceMeasurement, ...] = ()
    skipped: dict[str, str] = Field(default_factory=dict, description="case: why not measured")

    @property
    def is_gpu(self) -> bool:
        """Whether it is of a GPU."""
        return self.environment.device != "cpu"

    def of(self, *kinds: Kind) -> tuple[DeviceMeasurement, ...]:
        """The measurements of such kinds."""
        return tuple(m for m in self.measurements if m.case.kind in kinds)

    def find(self, case: Case) -> DeviceMeasurement | None:
        """What was measured of a case."""
        return next((m for m in self.measurements if m.case == case), None)

    def with_measurement(self, new: DeviceMeasurement) -> DeviceRecord:
        """The record with one more round of a case."""
        held = self.find(new.case)
        kept = tuple(m for m in self.measurements if m is not held)
        joined = held.joined(new) if held else new
        return self.model_copy(update={"measurements": (*kept, joined)})


def load_device_record(path: Path) -> DeviceRecord:
    """Read a record; raises ImportFailedError with what is wrong and where."""
    return load_json(DeviceRecord, path, f"{SCHEMA} record, as `calibrate device` writes it")
