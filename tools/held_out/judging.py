"""Published steps that set nothing, predicted as a user would: tests/data/judging-*.csv."""

from __future__ import annotations

import csv
import gzip
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from published_steps import PublishedStep, estimated_s, published_steps, scenario_of

import ddpsim
from ddpsim.prediction.interval import ROOFLINE
from held_out.own_models import MODELS
from held_out.predicted import Predicted, predicted_s

__all__ = ["Judged", "Scaled", "judged", "own_models", "scaled"]

STEPS, SCALING = MODELS.parent / "judging-steps.csv", MODELS.parent / "judging-scaling.csv"


@dataclass(frozen=True)
class Judged(Predicted):
    """A step of one GPU."""

    step: PublishedStep


@dataclass(frozen=True)
class Scaled(Predicted):
    """A step on several GPUs, predicted from one's."""

    model: str
    precision: str
    gpus: int
    one_s: float


@cache
def judged() -> tuple[Judged, ...]:
    """Predict all steps of one GPU."""
    with _model_files() as files:
        return tuple(_judged(step, files.get(step.model)) for step in published_steps(STEPS))


@cache
def scaled() -> tuple[Scaled, ...]:
    """Predict all steps of several GPUs."""
    lines = [line for line in SCALING.read_text().splitlines() if not line.startswith("#")]
    with _model_files() as files:
        return tuple(_scaled(row, files[row["model"]]) for row in csv.DictReader(lines))


def own_models() -> dict[str, Any]:
    """Tables of the models that are not the zoo's, by name."""
    models: dict[str, Any] = json.loads(gzip.decompress(MODELS.read_bytes()))
    return models


@contextmanager
def _model_files() -> Iterator[dict[str, Path]]:
    """Files of the models that are not the zoo's, by name."""
    models = own_models()
    with tempfile.TemporaryDirectory() as folder:
        files = {f"own-{name}": Path(folder) / f"{name}.json" for name in models}
        for file in files.values():
            file.write_text(json.dumps(models[file.stem]), encoding="utf-8")
        yield files


def _judged(step: PublishedStep, file: Path | None) -> Judged:
    if step.head:  # no scenario has the model without its heads
        step_s = estimated_s(step)
        edges_s = (step_s * edge for edge in ROOFLINE["attention"].edges)
        return Judged(step.step_s, step_s, *edges_s, step)
    scenario = scenario_of(step)
    if file:
        del scenario["workload"]["image_size"]  # the file holds one
        scenario["workload"]["model"] = str(file)
    return Judged(step.step_s, *predicted_s(ddpsim.simulate(ddpsim.load_scenario(scenario))), step)


def _scaled(row: dict[str, str], file: Path) -> Scaled:
    workload = {
        "model": str(file),
        "batch_per_rank": int(row["batch"]),
        "precision": row["precision"],
        "compile": True,
        "step_time": f"{row['one_ms']} ms",
        "optimizer": {"name": "sgd", "fused": True},
    }
    if row["memory_format"]:
        workload["memory_format"] = row["memory_format"]
    cluster = {"device": row["device"], "nodes": 1, "gpus_per_node": int(row["gpus"])}
    one_s, step_s = (float(row[key]) / 1e3 for key in ("one_ms", "step_ms"))
    scenario = {"schema": "ddpsim/1", "workload": workload, "cluster": cluster}
    told = row["model"], row["precision"], int(row["gpus"])
    result = ddpsim.simulate(ddpsim.load_scenario(scenario))
    return Scaled(step_s, *predicted_s(result), *told, one_s)
