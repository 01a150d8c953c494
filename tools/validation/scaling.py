"""Published throughputs of several GPUs, predicted from one GPU's."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import quantiles

from ddpsim.prediction.api import predict
from ddpsim.scenario.document import Document
from ddpsim.scenario.load import parse
from validation.benchmark import benchmark_rows
from validation.folders import DATA
from validation.markdown import markdown


@dataclass(frozen=True)
class Scaled:
    """A published step of several GPUs beside ours from the one of one GPU; seconds."""

    source: str
    device: str
    precision: str
    gpus: str
    reads_images: bool
    measured_s: float
    predicted_s: float
    interval_s: tuple[float, float]

    @property
    def longer(self) -> float:
        """How much more the measured step takes than the predicted one."""
        return self.measured_s / self.predicted_s - 1

    @property
    def covered(self) -> bool:
        """Whether the 80 % interval holds the measured step."""
        low_s, high_s = self.interval_s
        return low_s <= self.measured_s <= high_s


def scaled_rows(*, reading_images: bool) -> list[Scaled]:
    """Published throughputs of several GPUs that read images, or have synthetic ones."""
    return [row for row in _scaled_rows() if row.reads_images == reading_images]


@cache
def _scaled_rows() -> tuple[Scaled, ...]:
    """Published throughputs of several GPUs, predicted from the one of one GPU."""
    text = (DATA / "published-scaling.csv").read_text("utf-8").splitlines()
    one_gpu_s: dict[tuple[str, ...], float] = {}
    rows = []
    for figure in csv.DictReader(line for line in text if not line.startswith("#")):
        case = tuple(figure[key] for key in ("source", "precision", "batch", "device"))
        gpus = int(figure["nodes"]) * int(figure["gpus_per_node"])
        measured_s = gpus * int(figure["batch"]) / float(figure["samples_per_s"])
        if gpus == 1:
            one_gpu_s[case] = measured_s
        else:
            rows.append(_scaled(figure, one_gpu_s[case], measured_s))
    return tuple(rows)


def _scaled(figure: dict[str, str], one_gpu_s: float, measured_s: float) -> Scaled:
    nodes = int(figure["nodes"])
    network = {"inter_node": {"bandwidth": "100 Gbit/s", "nics_per_node": 1}} if nodes > 1 else {}
    scenario = {
        "workload": {
            "model": "resnet50",
            "batch_per_rank": int(figure["batch"]),
            "precision": figure["precision"],
            "step_time": f"{one_gpu_s} s",
            "optimizer": {"name": "sgd", "momentum": 0.9, "weight_decay": 1e-4},
        },
        "ddp": {"torch": "1.4"} if figure["data"] == "images" else {},
        "cluster": {
            "nodes": nodes,
            "gpus_per_node": int(figure["gpus_per_node"]),
            "device": figure["device"],
            **network,
        },
    }
    result = predict(parse(Document.from_mapping({"schema": "ddpsim/1"} | scenario, Path())))
    interval = result.prediction_interval_s
    return Scaled(
        figure["source"],
        figure["device"],
        figure["precision"],
        f"{nodes} x {figure['gpus_per_node']}",
        figure["data"] == "images",
        measured_s,
        result.iteration_time_s.mean,
        (interval.low, interval.high) if interval else (0.0, math.inf),
    )


def unequal_ranks() -> tuple[float, float]:
    """How much longer published steps of several GPUs take than one GPU's and communication.

    Of half of them at most, and of nine in ten.
    """
    benchmark = [row for row in benchmark_rows(25) if row.case != "1"]
    longer = [row.measured_s / row.equal_gpus_s - 1 for row in benchmark]
    return _half_and_most([*longer, *(row.longer for row in scaled_rows(reading_images=True))])


def synthetic() -> tuple[float, float]:
    """The same of published steps with synthetic images."""
    return _half_and_most([row.longer for row in scaled_rows(reading_images=False)])


def _half_and_most(longer: Sequence[float]) -> tuple[float, float]:
    tenths = quantiles(longer, n=10, method="inclusive")
    return tenths[4], tenths[8]


def scaled_table() -> str:
    """Published steps of several GPUs that read images, with their intervals."""
    head = ["source", "precision", "GPUs", "measured", "predicted", "error", "80 % interval"]
    return markdown(
        head,
        [
            (
                row.source,
                row.precision,
                row.gpus,
                f"{1e3 * row.measured_s:.1f} ms",
                f"{1e3 * row.predicted_s:.1f} ms",
                f"{row.predicted_s / row.measured_s - 1:+.1%}",
                f"{1e3 * row.interval_s[0]:.0f} to {1e3 * row.interval_s[1]:.0f} ms",
            )
            for row in scaled_rows(reading_images=True)
        ],
    )


def covered_text(*, reading_images: bool) -> str:
    """How many of the published steps their 80 % intervals hold."""
    rows = scaled_rows(reading_images=reading_images)
    return f"{sum(row.covered for row in rows)} of {len(rows)}"


def synthetic_table() -> str:
    """A machine a row, the error at each of its numbers of GPUs."""
    counts = ("1 x 2", "1 x 4", "1 x 8")
    found: dict[tuple[str, str, str], dict[str, Scaled]] = {}
    for row in scaled_rows(reading_images=False):
        found.setdefault((row.source, row.device, row.precision), {})[row.gpus] = row
    rows = []
    for machine, by_gpus in found.items():
        errors = (
            f"{row.predicted_s / row.measured_s - 1:+.1%}" if row else ""
            for row in map(by_gpus.get, counts)
        )
        rows.append((*machine, f"{1e3 * by_gpus['1 x 2'].measured_s:.0f} ms", *errors))
    return markdown(["machine", "device", "precision", "step of 2", *counts], rows)
