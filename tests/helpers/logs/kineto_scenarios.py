"""Profiler traces of known steps, read and put into scenarios. All are SYNTHETIC."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import ddpsim
from ddpsim.errors import ScenarioError
from ddpsim.importers.kineto.measured import Piece
from ddpsim.importers.kineto.ranks import KinetoTrace, read_trace
from ddpsim.prediction.resolve import resolve
from ddpsim.scenario.quantity import SourceFile
from logs.kineto_writer import CpuStep, Step, Writer

STEP = Step(
    forward=[300.0, 200.0, 100.0],
    backward=[[400.0, 50.0], [150.0], [], [300.0]],
    optimizer=[80.0, 20.0],
    shapes=[(10,), (10, 20), (20,), (20, 5)],
)
ON_CPU = CpuStep(forward=300.0, backward=[200.0, 100.0, 300.0], optimizers=[50.0])


def read(path: Path) -> KinetoTrace:
    return read_trace(SourceFile(path.name, path))


def written(tmp_path: Path, *steps: Step, **how: Any) -> Path:
    writer = Writer(**how)
    for step in steps:
        writer.step(step)
    return writer.save(tmp_path / "trace.json.gz")


def written_on_cpu(tmp_path: Path, *steps: CpuStep) -> Path:
    writer = Writer()
    for step in steps:
        writer.cpu_step(step)
    return writer.save(tmp_path / "cpu.json")


def scenario(
    path: Path, *settings: str, gpus: int = 1, device: str = "v100-sxm-32gb", **workload: Any
) -> ddpsim.Scenario:
    return ddpsim.load_scenario(
        {
            "schema": "ddpsim/1",
            "workload": {"trace": str(path), "batch_per_rank": 32, **workload},
            "cluster": {"nodes": 1, "gpus_per_node": gpus, "device": device},
        },
        settings,
    )


def device_us(pieces: Sequence[Piece]) -> list[float]:
    return [piece.device_s * 1e6 for piece in pieces]


def refusal(path: Path, *settings: str, **workload: Any) -> str:
    with pytest.raises(ScenarioError) as caught:
        resolve(scenario(path, *settings, **workload))
    (problem,) = caught.value.problems
    assert problem.key == "workload.trace"
    assert str(path) in problem.message
    return problem.message.replace(f"{path}: ", "")


def parameters(tmp_path: Path, *elements: int) -> str:
    listed = tmp_path / "list.csv"
    rows = (f"p{number},{count},float32" for number, count in enumerate(elements))
    listed.write_text("\n".join(["name,shape,dtype", *rows]))
    return str(listed)
