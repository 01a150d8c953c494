"""What few ask for: options in odd company, and random scenarios over the whole schema."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from jobs.random_documents import document

import ddpsim

Measure = Callable[..., Any]

DGX = {"machine": "dgx-a100", "nodes": 2}
LLAMA_1B = {"model": "llama-1b", "batch_per_rank": 1, "seq_len": 1024}
UNEVEN = {"stragglers": {"distribution": "lognormal", "sigma": 0.05}}
ODD: dict[str, dict[str, Any]] = {
    "zero1-reads-loss": {
        "workload": LLAMA_1B | {"read_loss_every": 1},
        "ddp": {"strategy": "zero1"},
        "cluster": {
            "device": "mi300x",
            "nodes": 2,
            "gpus_per_node": 2,
            "intra_node": {"bandwidth": "200 GB/s"},
            "inter_node": {"bandwidth": "1 Gbit/s"},
        },
        "run": {"iterations": 1},
    },
    "naive-hierarchical-jitter": {
        "workload": {"model": "resnext50_32x4d", "batch_per_rank": 32},
        "ddp": {"strategy": "naive"},
        "cluster": DGX | {"nodes": 3, "algorithm": "hierarchical"} | UNEVEN,
        "run": {"jitter": {"sigma": 0.02}},
    },
    "per-parameter-jitter": {
        "workload": {"model": "bert-large", "batch_per_rank": 8, "seq_len": 128},
        "ddp": {"strategy": "per_parameter", "accumulation_steps": 4, "no_sync": False},
        "cluster": DGX,
        "run": {"jitter": {"sigma": 0.02}},
    },
    "fully-shard-reads-loss-and-data": {
        "workload": LLAMA_1B | {"read_loss_every": 5, "data": {"rate": "20 samples/s"}},
        "ddp": {"strategy": "fully_shard"},
        "cluster": DGX,
    },
    "naive-gloo-jitter": {
        "workload": {"model": "bert-large", "batch_per_rank": 2, "seq_len": 128},
        "ddp": {"strategy": "naive", "backend": "gloo"},
        "cluster": {"machine": "cpu-10gbe", "nodes": 16, "gpus_per_node": 1},
        "run": {"jitter": {"sigma": 0.02}},
    },
}


@pytest.mark.parametrize("name", ODD)
def test_odd_combination(name: str, measure: Measure) -> None:
    """The whole answer."""
    asked = ddpsim.load_scenario({"schema": "ddpsim/1", **ODD[name]})
    measure(lambda: ddpsim.simulate(asked), rounds=3)


def test_random_scenarios(measure: Measure, benchmark: Any, core_loop_s: float) -> None:
    """Whole answers of 500 over the whole schema; CPU seconds, as if the loop took 0.6."""
    numbers, each_s = count(), list[float]()

    def answer() -> None:
        asked, begun_s = ddpsim.load_scenario(document(next(numbers))), time.process_time()
        ddpsim.simulate(asked)
        each_s.append((time.process_time() - begun_s) * 0.6 / core_loop_s)

    measure(answer, rounds=500)
    each_s.sort()
    benchmark.extra_info["p99_s"] = round(each_s[int(0.99 * len(each_s))], 3)
    benchmark.extra_info["worst_s"] = round(each_s[-1], 3)
