"""Files of measurements: a profile as a dictionary, nccl-tests' JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from ddpsim.scenario.quantity import SourceFile
from logs.nccl_log_writer import TIMES

Write = Callable[..., SourceFile]


def json_of(
    *, nodes: int = 2, processes: int = 2, threads: int = 1, gpus: int = 1
) -> dict[str, Any]:
    """As nccl-tests' src/util.cu writes it: one device entry a process. SYNTHETIC."""
    ranks = nodes * processes * threads * gpus

    def half(size: int, time_us: float) -> dict[str, Any]:
        algbw = size / time_us / 1e3
        return {
            "time": time_us,
            "alg_bw": algbw,
            "bus_bw": algbw * 2 * (ranks - 1) / ranks,
            "nwrong": 0.0,
        }

    hosts = [f"node{node}" for node in range(nodes) for _ in range(processes)]
    return {
        "version": 2,
        "args": ["all_reduce_perf", "-J", "log.json"],
        "config": {
            "nthreads": threads,
            "ngpus": gpus,
            "devices": [
                {"rank": i, "group": 0, "hostname": host, "device_info": "GPU"}
                for i, host in enumerate(hosts)
            ],
        },
        "results": [
            {"size": size, "out_of_place": half(size, 1.05 * us), "in_place": half(size, us)}
            for size, us in TIMES.items()
        ],
        "out_of_bounds": {"count": 0, "okay": "true"},
    }


PROFILE: dict[str, Any] = {
    "schema": "ddpsim.model/3",
    "parameters": {
        "name": ["a.weight", "a.bias", "unused"],
        "shape": [[10, 10], 10, []],
        "dtype": ["float32", "bfloat16", "float32"],
        "sparse": [2],
    },
    "buffers": {"name": ["mask"], "shape": [[4]], "dtype": "bool"},
    "measured": {
        "batch_per_rank": 8,
        "ready_origin": "backward_start",
        "forward_s": 0.001,
        "backward_s": 0.002,
        "optimizer_s": 0.0001,
        "ready_s": [0.002, 0.0015, None],
    },
}


def model_file(
    parameters: Sequence[tuple[str, int, float | None]], **measured: Any
) -> dict[str, Any]:
    """A model's file by the name, the elements and the ready time of each float32 parameter."""
    names, numels, ready_s = (list(column) for column in zip(*parameters, strict=True))
    return {
        "schema": "ddpsim.model/3",
        "parameters": {"name": names, "shape": numels},
        "measured": {"ready_origin": "backward_start", "ready_s": ready_s} | measured,
    }


def measured(**told: Any) -> str:
    """The text of a model's file in which some of what was measured is other."""
    return json.dumps(PROFILE | {"measured": PROFILE["measured"] | told})
