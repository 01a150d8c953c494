"""Files of measurements: a profile as a dictionary, nccl-tests' JSON."""

from __future__ import annotations

from collections.abc import Callable
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
    "schema": "ddpsim.model-profile/1",
    "batch_per_rank": 8,
    "ready_origin": "backward_start",
    "forward_s": 0.001,
    "backward_s": 0.002,
    "optimizer_s": 0.0001,
    "parameters": [
        {"name": "a.weight", "numel": 100, "dtype": "float32", "ready_s": 0.002},
        {"name": "a.bias", "numel": 10, "dtype": "torch.bfloat16", "ready_s": 0.0015},
        {"name": "unused", "numel": 1, "dtype": "float32", "ready_s": None, "sparse": True},
    ],
    "buffers": [{"numel": 4, "dtype": "bool"}],
}
