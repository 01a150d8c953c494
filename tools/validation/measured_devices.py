"""Presets of GPUs beside what `calibrate device` measured on such a GPU, which did not set them."""

from __future__ import annotations

import gzip
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import median

from calibrate.fit.device.steps import MeasuredStep, measured_steps
from calibrate.records.device_record import DeviceRecord, load_device_record
from ddpsim.prediction.collective_times import load_cluster
from ddpsim.scenario.catalog import model_table
from ddpsim.workload.zoo_table import is_convolutional
from validation.folders import DATA
from validation.markdown import markdown

__all__ = ["DEVICES", "device_table", "errors_of", "record_of"]

DEVICES = ("h100-sxm-80gb", "h200-sxm-141gb")


@cache
def record_of(device: str) -> DeviceRecord:
    """What was measured on a GPU of this name."""
    packed = DATA / "devices" / f"{device}.json.gz"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / packed.stem
        path.write_bytes(gzip.decompress(packed.read_bytes()))
        return load_device_record(path)


@cache
def errors_of(device: str) -> dict[str, list[float]]:
    """(predicted - measured) / measured of each step, by precision and kind of model."""
    alone = {"nodes": 1, "gpus_per_node": 1, "device": device}
    preset, found = (
        load_cluster({"cluster": alone}).cluster.device,
        defaultdict[str, list[float]](list),
    )
    for step in measured_steps(record_of(device)):
        error = sum(step.predicted_s(preset)) / sum(step.parts_s) - 1
        found[_kind(step)].append(error)
    return dict(found)


def _kind(step: MeasuredStep) -> str:
    case = step.measurement.case
    what = "convolutions" if is_convolutional(model_table(case.model)) else "attention"
    return f"{what}, {case.precision}"


def device_table() -> str:
    """Levels by device, kind of model and precision, as Markdown."""
    return markdown(
        ("GPU", "steps", "number", "median error", "bias", "worst"),
        [row for device in DEVICES for row in _rows(device)],
    )


def _rows(device: str) -> Iterator[tuple[str, ...]]:
    each = errors_of(device)
    for kind, errors in sorted(each.items()):
        yield device, kind, *_levels(errors)
    yield device, "all", *_levels([error for errors in each.values() for error in errors])


def _levels(errors: list[float]) -> tuple[str, ...]:
    worst = max(errors, key=abs)
    middle = median(abs(error) for error in errors)
    return f"{len(errors)}", f"{middle:.0%}", f"{median(errors):+.0%}", f"{worst:+.0%}"
