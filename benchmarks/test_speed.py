"""Speed, by hand: `python -m pytest benchmarks`. Medians; the cold starts as user CPU seconds.

The first benchmark is the yardstick: bare SimPy timeouts in this process. Read the others as
ratios to it when machines differ.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from simpy import Environment

import ddpsim

ROOT = Path(__file__).resolve().parent.parent
EIGHT = ROOT / "scenarios" / "resnet50-8xa100.yaml"


def test_yardstick_100_000_timeouts(benchmark: Any) -> None:
    def timeouts() -> None:
        env = Environment()

        def ticking() -> Any:
            for _ in range(100_000):
                yield env.timeout(1)

        env.process(ticking())
        env.run()

    benchmark(timeouts)


def test_simulate_eight_folded_gpus(benchmark: Any) -> None:
    scenario = ddpsim.load_scenario(EIGHT)
    benchmark(ddpsim.simulate, scenario)


def test_simulate_sixteen_jittering_ranks(benchmark: Any) -> None:
    scenario = ddpsim.load_scenario(
        ROOT / "scenarios" / "resnet50-2x8-25gbit.yaml",
        ["run.jitter={sigma: 0.01}", "run.iterations=5"],
    )
    benchmark.pedantic(ddpsim.simulate, (scenario,), rounds=3)


@pytest.mark.parametrize("command", [["--help"], ["run", str(EIGHT)]], ids=["help", "run-8-gpu"])
def test_cold_start_user_cpu(command: list[str], benchmark: Any) -> None:
    """User CPU seconds of a whole process; pytest-benchmark's own column is wall time."""
    spent: list[float] = []

    def start() -> None:
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        subprocess.run(
            [sys.executable, "-m", "ddpsim", *command], check=True, stdout=subprocess.DEVNULL
        )
        spent.append(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before)

    benchmark.pedantic(start, rounds=7, warmup_rounds=1)
    benchmark.extra_info["user_cpu_s"] = {
        "median": round(median(spent), 3),
        "min": round(min(spent), 3),
        "max": round(max(spent), 3),
    }
    print(f"\nuser CPU {' '.join(command[:1])}: {benchmark.extra_info['user_cpu_s']}")
