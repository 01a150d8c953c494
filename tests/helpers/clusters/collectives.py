"""Clusters and their collectives' times, for tests of collectives."""

from __future__ import annotations

from typing import Any

from ddpsim.prediction.api import load_scenario, simulate
from ddpsim.prediction.collective_times import collective_table, load_cluster
from ddpsim.result.model import Result

MIB = 2**20
WORKLOAD = {"model": "resnet50", "batch_per_rank": 64}
BASE = {
    "schema": "ddpsim/1",
    "workload": {"model": "resnet50", "batch_per_rank": 32},
    "cluster": {"machine": "dgx-1-v100", "nodes": 2, "gpus_per_node": 2},
    "run": {"iterations": 5},
}


def cluster(**keys: Any) -> dict[str, Any]:
    return {"cluster": {"nodes": 1} | keys}


def time_of(size: int = 256 * MIB, **keys: Any) -> float:
    return time_in(load_cluster(cluster(**keys)), size)


def time_in(scenario: Any, size: int = 256 * MIB) -> float:
    return collective_table(scenario, "all_reduce", [size]).rows[0].time_s


def simulated(*settings_: str) -> Result:
    return simulate(load_scenario(BASE, settings_))
