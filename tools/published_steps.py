"""Published steps of one GPU, as the roofline estimates them: `tests/data/published-steps.csv`."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable
from functools import cache
from itertools import compress
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from ddpsim.prediction.api import load_scenario
from ddpsim.scenario.catalog import model_table
from ddpsim.scenario.device import Device
from ddpsim.scenario.workload import Workload
from ddpsim.workload.model import total_s
from ddpsim.workload.roofline import zoo_model

__all__ = [
    "PublishedStep",
    "error_of",
    "estimated_s",
    "family",
    "half_as_bf16",
    "job_of_step",
    "published_steps",
    "rms",
    "scenario_of",
]

FILE = Path(__file__).resolve().parent.parent / "tests" / "data" / "published-steps.csv"
_HEAD = "cls."  # BERT's heads of pre-training, which another job has not


class PublishedStep(NamedTuple):
    """A row: seconds of one GPU's step, and the job as its source tells it."""

    source: str
    model: str
    device: str
    precision: str
    memory_format: str
    attention: str
    head: str
    compiled: bool
    batch: int
    size: int
    optimizer: str
    step_s: float


def published_steps(file: Path = FILE) -> list[PublishedStep]:
    """All rows."""
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    return [
        PublishedStep(
            *(row[key] for key in ("source", "model", "device", "precision")),
            *(row[key] for key in ("memory_format", "attention", "head")),
            bool(row["compile"]),
            int(row["batch"]),
            int(row["size"]),
            row["optimizer"],
            float(row["step_ms"]) / 1e3,
        )
        for row in csv.DictReader(lines)
    ]


def family(step: PublishedStep) -> str:
    """Of what it is made."""
    if step.model.startswith("vit"):
        return "vision transformer"
    return "language model" if step.attention else "convolutional network"


def estimated_s(
    step: PublishedStep, changed: Callable[[Device], Device] = lambda device: device
) -> float:
    """What the roofline says of the same job, on the preset or on one that is `changed`."""
    table, workload, device = job_of_step(step)
    model = zoo_model(table, workload, changed(device))
    optimizer_s = 0.0 if step.optimizer == "none" else model.optimizer.device_s
    return total_s(model.forward) + total_s(model.backward) + optimizer_s


@cache
def job_of_step(step: PublishedStep) -> tuple[dict[str, Any], Workload, Device]:
    """A row's table, workload and preset."""
    scenario = load_scenario(scenario_of(step))
    table, workload = model_table(step.model), scenario.workload
    if step.precision == "apex-o2":
        workload = workload.model_copy(update={"precision": "bf16"})
    return (
        _without_head(table) if step.head else table,
        workload,
        _device(step, scenario.cluster.device),
    )


def error_of(step: PublishedStep) -> float:
    """Estimated over published, minus 1."""
    return estimated_s(step) / step.step_s - 1


def rms(errors: Iterable[float]) -> float:
    """Root mean square of the logarithms."""
    return math.sqrt(fmean(math.log1p(error) ** 2 for error in errors))


def scenario_of(step: PublishedStep) -> dict[str, Any]:
    """The scenario of a row's job, on one GPU; SGD has momentum unless it is called sgd0."""
    name, _, fused = step.optimizer.partition("-")
    optimizer: dict[str, Any] = {
        "name": "sgd" if name in ("none", "sgd0") else name,
        "fused": bool(fused),
    }
    if name == "sgd":
        optimizer["momentum"] = 0.9
    workload: dict[str, Any] = {
        "model": step.model,
        "batch_per_rank": step.batch,
        "precision": "amp-fp16" if step.precision == "apex-o2" else step.precision,
        "optimizer": optimizer,
        "seq_len" if step.attention else "image_size": step.size,
        "compile": step.compiled,
    }
    for key in ("memory_format", "attention"):
        if getattr(step, key):
            workload[key] = getattr(step, key)
    cluster = {"nodes": 1, "gpus_per_node": 1, "device": step.device}
    return {"schema": "ddpsim/1", "workload": workload, "cluster": cluster}


def _device(step: PublishedStep, device: Device) -> Device:
    """apex's O2 is a half model, as `precision: bf16` is of another half."""
    return half_as_bf16(device) if step.precision == "apex-o2" else device


def half_as_bf16(device: Device) -> Device:
    """A device whose bfloat16 is its float16, of the arithmetic of a half model."""
    return device.model_copy(
        update={
            key: {**getattr(device, key), "bf16": getattr(device, key)["fp16"]}
            for key in ("peak_flops_per_s", "matmul_efficiency", "convolution_efficiency")
            if "fp16" in getattr(device, key)
        }
    )


def _without_head(table: dict[str, Any]) -> dict[str, Any]:
    """The table of a model of whose heads of pre-training nothing is run."""
    names, modules = table["parameters"]["name"], table["forward_modules"]
    forward = [not module.startswith(_HEAD) for module in modules]
    ready = [not names[index].startswith(_HEAD) for index in table["ready_order"]]
    steps = {
        precision: step
        | {
            "forward": [*compress(step["forward"], forward)],
            "backward": [*compress(step["backward"], [*ready, True])],
        }
        for precision, step in table["steps"].items()
    }
    return table | {
        "ready_order": [*compress(table["ready_order"], ready)],
        "forward_modules": [*compress(modules, forward)],
        "steps": steps,
    }
