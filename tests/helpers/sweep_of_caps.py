"""A sweep over bucket caps, small enough to compute again and again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ddpsim.planning.sweeps.grid import Grid
from ddpsim.planning.sweeps.sweep import sweep
from ddpsim.report.sweep import render_csv
from ddpsim.result.sweep import Sweep

ROOT = Path(__file__).resolve().parent.parent.parent
SCENARIO = ROOT / "scenarios" / "resnet50-2x8-25gbit.yaml"


def swept(*settings: str, **options: Any) -> Sweep:
    return sweep(SCENARIO, Grid.of(settings), **options)


BIG = ["--set", "ddp.bucket_cap_mb=" + ",".join(map(str, range(1, 26)))]
BIG += ["--set", "workload.batch_per_rank=" + ",".join(map(str, range(32, 52)))]
_EXPECTED: list[str] = []


def expected_csv() -> str:
    if not _EXPECTED:
        _EXPECTED.append(render_csv(swept(*BIG[1::2])))
    return _EXPECTED[0]
