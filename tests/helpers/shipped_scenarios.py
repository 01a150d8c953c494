"""The scenarios that ship with ddpsim, by name."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import ddpsim
from ddpsim.prediction import api

ROOT = Path(__file__).resolve().parent.parent.parent


def load(name: str, *overrides: str) -> ddpsim.Scenario:
    return ddpsim.load_scenario(ROOT / "scenarios" / f"{name}.yaml", overrides)


@cache
def predict(name: str, *overrides: str) -> ddpsim.Result:
    return api.predict(load(name, *overrides))


@cache
def simulated(name: str, *overrides: str) -> ddpsim.Result:
    return ddpsim.simulate(load(name, *overrides))


def mean_ms(name: str, *overrides: str) -> float:
    return predict(name, *overrides).iteration_time_s.mean * 1e3


def suggested(name: str, *overrides: str) -> list[str]:
    """The settings of all next steps."""
    steps = simulated(name, *overrides).next_steps
    return [setting for step in steps for setting in step.settings]


LEADS = {  # the host is the slower one, but has a head start after the first iterations
    "schema": "ddpsim/1",
    "workload": {"model": "resnet50", "batch_per_rank": 16, "precision": "amp-bf16"},
    "ddp": {"static_graph": True},
    "cluster": {
        "machine": "dgx-h100",
        "device": {"preset": "h100-sxm-80gb", "operator": "25 us"},
        "nodes": 2,
        "gpus_per_node": 2,
        "inter_node": {"bandwidth": "25 Gbit/s", "nics_per_node": 8, "transport": "rdma"},
    },
}
