"""Published steps of one GPU, as the roofline estimates them: `tests/data/published-steps.csv`.

python tools/published_steps.py: each row's error, and what its device would have to reach.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
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
    "left_out_errors",
    "other_devices_errors",
    "published_steps",
    "rms",
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
    table, workload, device = _job(step)
    model = zoo_model(table, workload, changed(device))
    optimizer_s = 0.0 if step.optimizer == "none" else model.optimizer.device_s
    return total_s(model.forward) + total_s(model.backward) + optimizer_s


@cache
def _job(step: PublishedStep) -> tuple[dict[str, Any], Workload, Device]:
    scenario = load_scenario(_scenario(step))
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


def _scenario(step: PublishedStep) -> dict[str, Any]:
    name, _, fused = step.optimizer.partition("-")
    optimizer: dict[str, Any] = {"name": "sgd" if name == "none" else name, "fused": bool(fused)}
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
    if step.precision != "apex-o2":
        return device
    return device.model_copy(
        update={
            key: {**getattr(device, key), "bf16": getattr(device, key)["fp16"]}
            for key in ("peak_flops_per_s", "matmul_efficiency")
        }
    )


def _without_head(table: dict[str, Any]) -> dict[str, Any]:
    """The table of a model of whose heads of pre-training nothing is run."""
    names = table["parameters"]["name"]
    forward = [not module.startswith(_HEAD) for module in table["forward"]["module"]]
    ready = [not names[index].startswith(_HEAD) for index in table["ready_order"]]
    return table | {
        "ready_order": [i for i, kept in zip(table["ready_order"], ready, strict=True) if kept],
        "forward": _kept(table["forward"], forward),
        "backward": _kept(table["backward"], [*ready, True]),
    }


def _kept(columns: dict[str, Any], kept: Sequence[bool]) -> dict[str, Any]:
    def of(column: Any) -> Any:
        if isinstance(column, dict):
            return {key: of(values) for key, values in column.items()}
        return [value for value, stays in zip(column, kept, strict=True) if stays]

    return {key: of(column) for key, column in columns.items()}


# --- how well others tell ----------------------------------------------------------------------

_Place = tuple[str, str, bool]  # a device's chip, rate and whether of convolutions: one efficiency
_TRIED = tuple(percent / 100 for percent in range(8, 112, 4))
_HALF = ("amp-fp16", "amp-bf16", "bf16", "apex-o2")


def left_out_errors(steps: Sequence[PublishedStep]) -> list[float]:
    """Of each row, where the rows of other sources on its chip say what that reaches."""
    return _errors_told_by(
        steps, lambda own, other: _place(own) == _place(other) and own.source != other.source
    )


def other_devices_errors(steps: Sequence[PublishedStep]) -> list[float]:
    """Of each row, where the rows of other chips alone say what its own reaches."""
    return _errors_told_by(
        steps,
        lambda own, other: _place(own)[1:] == _place(other)[1:] and _place(own) != _place(other),
    )


def _errors_told_by(
    steps: Sequence[PublishedStep], tells: Callable[[PublishedStep, PublishedStep], bool]
) -> list[float]:
    """Of the rows of which any others tell."""
    errors = []
    for own in steps:
        others = [_tried_errors(other) for other in steps if tells(own, other)]
        if others:
            off = [sum(row[i] ** 2 for row in others) for i in range(len(_TRIED))]
            errors.append(math.expm1(_tried_errors(own)[off.index(min(off))]))
    return errors


@cache
def _tried_errors(step: PublishedStep) -> tuple[float, ...]:
    """The logarithmic error with each efficiency of `_TRIED`."""
    return tuple(_log_error(step, reached) for reached in _TRIED)


def _place(step: PublishedStep) -> _Place:
    chip = step.device.removesuffix("-16gb").removesuffix("-32gb")
    chip = "a100-sxm" if chip.startswith("a100-sxm") else chip
    rate = "half" if step.precision in _HALF else step.precision
    return chip, rate, family(step) == "convolutional network"


def _log_error(step: PublishedStep, reached: float) -> float:
    def changed(device: Device) -> Device:
        same = dict.fromkeys(device.peak_flops_per_s, reached)
        update = {"matmul_efficiency": same, "convolution_efficiency": same}
        return device.model_copy(update=update)

    return math.log(estimated_s(step, changed) / step.step_s)


def main() -> None:
    """Print every row's error, by what one efficiency tells of."""
    steps = [step for step in published_steps() if not step.compiled]
    for place in sorted({_place(step) for step in steps}):
        rows = [step for step in steps if _place(step) == place]
        best = min(_TRIED, key=lambda reached: sum(_log_error(s, reached) ** 2 for s in rows))
        print(*place, f"{rms(map(error_of, rows)):.3f}, best at {best:.2f}")
        for step in rows:
            job = (step.source, step.model, step.batch, step.size, step.memory_format)
            print("   ", *job, f"{error_of(step):+.1%}")
    print(f"all {len(steps)}: {rms(map(error_of, steps)):.3f}", end="")
    for errors in (left_out_errors(steps), other_devices_errors(steps)):
        print(f", {len(errors)} by others: {rms(errors):.3f}", end="")
    print()


if __name__ == "__main__":
    main()
