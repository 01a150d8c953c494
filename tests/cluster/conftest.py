"""A prediction from a cluster profile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from clusters.profiles import profile

import ddpsim


@pytest.fixture
def predict(tmp_path: Path) -> Any:
    """A prediction of ResNet-18 on two CPU hosts from a profile."""

    def run(
        changes: dict[str, Any],
        *,
        comm_hook: str = "none",
        bucket_cap_mb: float | list[float] = 5,
        **cluster: Any,
    ) -> ddpsim.Result:
        path = tmp_path / "cluster.json"
        path.write_text(json.dumps(profile(**changes)), "utf-8")
        scenario = {
            "schema": "ddpsim/1",
            "workload": {"model": "resnet18", "batch_per_rank": 8, "step_time": "800 ms"},
            "ddp": {
                "backend": "gloo",
                "bucket_cap_mb": bucket_cap_mb,
                "broadcast_buffers": False,
                "comm_hook": comm_hook,
            },
            "cluster": {"nodes": 2, "gpus_per_node": 1, "device": "cpu-core"}
            | {"profile": str(path)}
            | cluster,
            "run": {"iterations": 4},
        }
        return ddpsim.simulate(ddpsim.load_scenario(scenario))

    return run
