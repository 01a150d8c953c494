"""Steps of one GPU as rows: published ones, loops that wait after each step, device records."""

from __future__ import annotations

import csv
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from published_steps import (
    PublishedStep,
    estimated_s,
    family,
    half_as_bf16,
    job_of_step,
    published_steps,
)

from calibrate.fit.device.steps import MeasuredStep, measured_steps
from ddpsim.prediction.api import load_scenario
from ddpsim.prediction.collective_times import load_cluster
from ddpsim.prediction.interval import HOST, ROOFLINE, RankVariation
from ddpsim.prediction.job import Job
from ddpsim.prediction.resolve import resolve
from ddpsim.prediction.uncertainty import rank_variation, uncertainties
from ddpsim.provenance import Uncertainty
from ddpsim.scenario.catalog import model_table
from ddpsim.scenario.device import Device
from ddpsim.scenario.schema import Scenario
from ddpsim.scenario.workload import Workload
from ddpsim.workload.arithmetic import Arithmetic, arithmetic_of
from ddpsim.workload.model import Work
from ddpsim.workload.operators import Operator
from ddpsim.workload.zoo.law import written_out
from ddpsim.workload.zoo.step import step_of
from ddpsim.workload.zoo.table import input_size_of, is_convolutional
from held_out.efficiency import Place, chip_of
from held_out.records import RECORDED, record_of

__all__ = [
    "OWN",
    "Loop",
    "LoopRow",
    "OnDevice",
    "RecordRow",
    "Row",
    "StepRow",
    "all_rows",
    "generation",
    "preset",
    "published_loops",
    "publisher",
]

OWN = "measured here"  # the publisher of device records
# before anything is known; which steps wait for their host is told by these
_EFFICIENCY = 0.45
_OPERATOR_S = {"early": 55e-6, "ampere": 50e-6, "later": 25e-6}

FILE = Path(__file__).resolve().parent.parent.parent / "tests" / "data" / "published-loops.csv"

_PUBLISHERS = {
    "lambda-2024": "lambda",
    "nvidia-bert-2019": "nvidia",
    "nvidia-bert-2020": "nvidia",
    "nvidia-bert-2022": "nvidia",
    "nvidia-resnet": "nvidia",
    "dlperf-bert": "dlperf",
    "dlperf-resnet": "dlperf",
    **dict.fromkeys(
        ("openbayes", "openbayes-pcie", "openbayes-t4", "tencent", "modelarts", "titan-v"),
        "aisensiy",
    ),
    **dict.fromkeys(("dgx-a100", "rtx-2080ti", "rtx-3090", "rtx-5090"), "ryujaehun"),
}
_LATER = (
    *("h100", "h20", "h800", "gh200", "b200", "b300", "gb10", "gb200", "gb300", "l4"),
    *("mi300x", "mi325x", "mi355x"),
    *("rtx-40", "rtx-50", "rtx-6000-ada", "rtx-pro"),
)
_EARLY = ("p100", "gtx-10", "v100", "titan", "t4", "rtx-20", "rtx-6000", "rtx-8000")


class Loop(NamedTuple):
    """A row of steps that end with a wait: the job, and seconds."""

    source: str
    model: str
    device: str
    precision: str
    batch: int
    optimizer: str
    gpus: int
    other_s: float
    step_s: float


def published_loops(file: Path = FILE) -> list[Loop]:
    """All rows."""
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    return [
        Loop(
            *(row[key] for key in ("source", "model", "device", "precision")),
            int(row["batch"]),
            row["optimizer"],
            int(row["gpus"]),
            float(row["other_ms"]) / 1e3,
            float(row["step_ms"]) / 1e3,
        )
        for row in csv.DictReader(lines)
    ]


def publisher(source: str) -> str:
    """Who published a source's rows."""
    return _PUBLISHERS.get(source, source)


def generation(device: str) -> str:
    """Of a GPU, and so of the CPUs of its machines."""
    if device.startswith(_LATER):
        return "later"
    return "early" if device.startswith(_EARLY) else "ampere"


class OnDevice(NamedTuple):
    """A row's step on a device, as estimated.

    `step_s`: seconds, with compute, host and other terms stretched by factors; `uncertainties` of
    the terms that may matter; `host_share`: the host's time of the device's, 0 where a step is
    known to wait for its device.
    """

    step_s: Callable[..., float]
    uncertainties: Mapping[str, Uncertainty]
    host_share: float


@dataclass(frozen=True)
class Row(ABC):
    """A step of one GPU: what it took, and what the estimate says of it."""

    source: str
    model: str
    device: str
    precision: str
    batch: int
    kind: str
    memory_format: str
    step_s: float

    @property
    def publisher(self) -> str:
        """Who published it."""
        return publisher(self.source)

    @property
    def is_convolutional(self) -> bool:
        """Whether most of its work is convolutions."""
        return self.kind == "convolutional network"

    @property
    @abstractmethod
    def usual(self) -> Device:
        """The preset, as the row's arithmetic has it, before anything is known of what it reaches.

        So what steps set does not depend on what they set before.
        """

    @property
    @abstractmethod
    def job(self) -> tuple[dict[str, Any], Workload]:
        """Its model's table and its workload."""

    @property
    def arithmetic(self) -> Arithmetic:
        """Its products' type and width."""
        return arithmetic_of(self.job[1].precision, self.usual)

    @property
    def operators(self) -> tuple[tuple[Operator, int], ...]:
        """Of forward and backward, with their numbers."""
        table, workload = self.job
        size = input_size_of(table, workload)
        step = step_of(table, workload.precision, workload.batch_per_rank, size)
        found = [one for row in step.rows for one in row]
        if workload.attention == "eager":
            width = self.arithmetic.softmax_bytes
            found = [part for one in found for part in written_out(one, width)]
        return tuple(Counter(found).items())

    @abstractmethod
    def device_s(self, device: Device) -> float:
        """What the device needs for forward, backward and optimizer, as estimated."""

    @abstractmethod
    def on(self, device: Device) -> OnDevice:
        """The step on such a device."""

    @property
    def uncertainty(self) -> Uncertainty:
        """Of the device's time."""
        return ROOFLINE["convolutional" if self.is_convolutional else "attention"]

    @property
    def other_s(self) -> float:
        """What is measured with a step and not estimated."""
        return 0.0

    @property
    def variation(self) -> RankVariation | None:
        """How its ranks may differ; None of one GPU."""
        return None

    @property
    def places(self) -> tuple[Place, Place]:
        """What its matrix products reach, and its convolutions."""
        is_half = self.precision not in ("fp32", "tf32")
        rate = "half" if is_half else self.precision
        of_convolutions = rate
        if rate == "fp32" and "tf32" in self.usual.peak_flops_per_s:
            of_convolutions = "tf32"
        chip = chip_of(self.device)
        return Place(chip, rate), Place(chip, of_convolutions, convolution=True)

    @property
    def mostly(self) -> Place:
        """What most of its work reaches."""
        return self.places[self.is_convolutional]


@dataclass(frozen=True)
class StepRow(Row):
    """A published step that its source says to be its device's."""

    step: PublishedStep

    @property
    def usual(self) -> Device:  # noqa: D102 -- as of any row
        return _before(job_of_step(self.step)[2], self.device)

    @property
    def job(self) -> tuple[dict[str, Any], Workload]:  # noqa: D102
        return job_of_step(self.step)[:2]

    def device_s(self, device: Device) -> float:  # noqa: D102
        return estimated_s(self.step, lambda _: device)

    def on(self, device: Device) -> OnDevice:  # noqa: D102
        device_s = self.device_s(device)
        return OnDevice(lambda compute=1.0: compute * device_s, {"compute": self.uncertainty}, 0.0)


@dataclass(frozen=True)
class LoopRow(Row):
    """A published step that ends with a wait for its device."""

    loop: Loop

    @property
    def usual(self) -> Device:  # noqa: D102
        return _before(_scenario(self.loop).cluster.device, self.device)

    @property
    def job(self) -> tuple[dict[str, Any], Workload]:  # noqa: D102
        return model_table(self.model), _scenario(self.loop).workload

    def device_s(self, device: Device) -> float:  # noqa: D102
        model = _job(self.loop, device).model
        works = (*model.forward, *model.backward, model.optimizer)
        return sum(work.device_s for work in works)

    def on(self, device: Device) -> OnDevice:
        """Under DDP, or of a bare model, and what is measured with it."""
        job = _job(self.loop, device)
        of_job = job.compute_only_s if self.loop.optimizer == "none" else job.step_s

        def step_s(**factors: float) -> float:
            return self.other_s + of_job(**factors)

        return OnDevice(step_s, uncertainties(job), job.host_share)

    @property
    def other_s(self) -> float:  # noqa: D102
        return self.loop.other_s

    @property
    def variation(self) -> RankVariation | None:  # noqa: D102
        return rank_variation(resolve(_scenario(self.loop)))


@dataclass(frozen=True)
class RecordRow(Row):
    """A step of a device record: a host that never waits, so the slower of device and host."""

    measured: MeasuredStep = field(hash=False)  # its record has no hash

    @property
    def usual(self) -> Device:  # noqa: D102
        return preset(self.device)

    @property
    def job(self) -> tuple[dict[str, Any], Workload]:  # noqa: D102
        return model_table(self.model), self.measured.workload

    def device_s(self, device: Device) -> float:  # noqa: D102
        return sum(on_device for on_device, _ in self.measured.device_and_host_s(device))

    def on(self, device: Device) -> OnDevice:  # noqa: D102
        parts_s = self.measured.device_and_host_s(device)
        of_device_s, of_host_s = map(sum, zip(*parts_s, strict=True))

        def step_s(*, compute: float = 1.0, host: float = 1.0) -> float:
            return sum(max(compute * device_s, host * host_s) for device_s, host_s in parts_s)

        terms = {"compute": self.uncertainty, "host": HOST}
        return OnDevice(step_s, terms, of_host_s / of_device_s)


@cache
def all_rows() -> tuple[Row, ...]:
    """Published steps without torch.compile, loops, and the steps of device records."""
    return (
        *(_step_row(step) for step in published_steps() if not step.compiled),
        *(_loop_row(loop) for loop in published_loops()),
        *(row for device in RECORDED for row in _record_rows(device)),
    )


def _step_row(step: PublishedStep) -> StepRow:
    told = (step.source, step.model, step.device, step.precision, step.batch)
    return StepRow(*told, family(step), step.memory_format, step.step_s, step)


def _loop_row(loop: Loop) -> LoopRow:
    told = (loop.source, loop.model, loop.device, loop.precision, loop.batch)
    return LoopRow(*told, *_kind(loop.model), loop.step_s, loop)


def _record_rows(device: str) -> Iterator[RecordRow]:
    for step in measured_steps(record_of(device)):
        case = step.measurement.case
        kind, memory_format = _kind(case.model)
        told = (OWN, case.model, device, case.precision, case.batch)
        if case.channels_last:
            memory_format = "channels_last"
        yield RecordRow(*told, kind, memory_format, sum(step.parts_s), step)


def _kind(model: str) -> tuple[str, str]:
    """Of what a model is made, and its usual memory format."""
    if is_convolutional(model_table(model)):
        return "convolutional network", "contiguous"
    return "vision transformer" if model.startswith("vit") else "language model", ""


@cache
def preset(name: str) -> Device:
    """A preset before anything is known of what it reaches."""
    alone = {"nodes": 1, "gpus_per_node": 1, "device": name}
    return _before(load_cluster({"cluster": alone}).cluster.device, name)


def _before(device: Device, name: str) -> Device:
    rates = device.peak_flops_per_s
    update = {
        "matmul_efficiency": dict.fromkeys(rates, _EFFICIENCY),
        "convolution_efficiency": dict.fromkeys(rates, _EFFICIENCY),
        "operator_s": _OPERATOR_S[generation(name)],
    }
    return device.model_copy(update=update)


@cache
def _scenario(loop: Loop) -> Scenario:
    name = "sgd" if loop.optimizer == "none" else loop.optimizer
    workload: dict[str, Any] = {
        "model": loop.model,
        "batch_per_rank": loop.batch,
        "precision": "amp-fp16" if loop.precision == "half" else loop.precision,
        "optimizer": {"name": name, "momentum": 0.9 if loop.optimizer == "sgd" else 0.0},
        "read_loss_every": 1,
    }
    cluster = {"nodes": 1, "gpus_per_node": loop.gpus, "device": loop.device}
    scenario = load_scenario({"schema": "ddpsim/1", "workload": workload, "cluster": cluster})
    if loop.precision != "half":
        return scenario
    device = half_as_bf16(scenario.cluster.device)
    workload_of = scenario.workload.model_copy(update={"precision": "bf16"})
    return _with_device(scenario.model_copy(update={"workload": workload_of}), device)


def _with_device(scenario: Scenario, device: Device) -> Scenario:
    cluster = scenario.cluster.model_copy(update={"device": device})
    return scenario.model_copy(update={"cluster": cluster})


def _job(loop: Loop, device: Device) -> Job:
    job = resolve(_with_device(_scenario(loop), device))
    if loop.optimizer != "none":
        return job
    return replace(job, model=replace(job.model, optimizer=Work(0.0)))
