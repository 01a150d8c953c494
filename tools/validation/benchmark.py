"""PyTorch's published DDP benchmark, predicted from the steps of one GPU."""

from __future__ import annotations

import csv
import os
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from ddpsim.prediction.parts import Parts
from validation.folders import DATA
from validation.rows import Row, job_of, step_s, steps_s

V100_LOG = "nccl/logs/abci-V-1x4.txt"


# Identical GPUs of one cluster differ: 8 % on average over five clusters (arXiv 2208.11035), read
# as the range of a box plot's whiskers, which is 5.4 standard deviations of a normal distribution
GPU_SIGMA = 0.08 / 5.4
SEEDS = range(10)
# One V100 pair of a DGX-1 shares one or two NVLinks: one is taken (NCCL topo.h: 20 GB/s on SM70)
PAIR = {"bandwidth": "20 GB/s", "latency": "5 us"}
LAYOUT = {1: (1, 1), 2: (1, 2), 4: (1, 4), 8: (1, 8), 16: (2, 8)}


def reference_log() -> Path | None:
    """The V100 log of the reference data, if there is any."""
    folder = os.environ.get("DDPSIM_REFERENCE_DATA")
    return Path(folder) / V100_LOG if folder else None


@cache
def benchmark_rows(bucket_cap_mb: int) -> tuple[Row, ...]:
    """PyTorch's DDP benchmark; without the reference data, without its 4-GPU rows."""
    text = (DATA / "pytorch-ddp-benchmark.csv").read_text("utf-8").splitlines()
    figures = list(csv.DictReader(line for line in text if not line.startswith("#")))
    alone = {f["model"]: f["seconds"] for f in figures if f["gpus"] == "0"}
    here = [f for f in figures if f["gpus"] != "0" and int(f["bucket_cap_mb"]) == bucket_cap_mb]
    one = {f["model"]: f["seconds"] for f in here if f["gpus"] == "1"}
    return tuple(
        _benchmark_row(
            f["model"],
            int(f["gpus"]),
            bucket_cap_mb,
            {"total": f"{alone[f['model']]} s"},
            {"total": f"{alone[f['model']]} s", "with_ddp": f"{one[f['model']]} s"},
            float(f["seconds"]),
        )
        for f in here
        if f["gpus"] != "4" or reference_log()
    )


def _benchmark_row(
    model: str,
    gpus: int,
    cap: int,
    alone: dict[str, str],
    knowing_ddp: dict[str, str],
    measured_s: float,
) -> Row:
    equal = job_of(_benchmark_scenario(model, gpus, cap, alone))
    equal_s, naive = step_s(equal), equal.baselines()

    parts = Parts()
    jobs = [
        job_of(_benchmark_scenario(model, gpus, cap, step_time, seed), parts)
        for step_time in (alone, knowing_ddp)
        for seed in SEEDS
        if gpus > 1
    ]
    drawn_s = steps_s(jobs)
    return Row(
        label=model,
        case=f"{gpus}",
        measured_s=measured_s,
        predicted_s=fmean(drawn_s[: len(SEEDS)]) if jobs else equal_s,
        equal_gpus_s=equal_s,
        compute_only_s=naive.compute_only,
        no_overlap_s=naive.no_overlap,
        perfect_overlap_s=naive.perfect_overlap,
        knowing_ddp_s=fmean(drawn_s[len(SEEDS) :]) if jobs else None,
    )


def _benchmark_scenario(
    model: str, gpus: int, cap: int, step_time: dict[str, str], seed: int | None = None
) -> dict[str, Any]:
    """The benchmark's own settings; `seed` draws GPUs that differ as published."""
    nodes, per_node = LAYOUT[gpus]
    cluster: dict[str, Any] = {"nodes": nodes, "gpus_per_node": per_node, "device": "v100-sxm-32gb"}
    if gpus == 2:
        cluster["intra_node"] = PAIR
    if gpus == 4:
        cluster["all_reduce"] = str(reference_log())
    if seed is not None:
        cluster["stragglers"] = {"distribution": "lognormal", "sigma": GPU_SIGMA}
    optimizer = {"name": "sgd", "momentum": 0.9, "weight_decay": 1e-4}
    return {
        "workload": {
            "model": model,
            "batch_per_rank": 32,
            "step_time": step_time,
            "optimizer": optimizer,
        },
        "ddp": {"torch": "1.4", "bucket_cap_mb": cap, "broadcast_buffers": False},
        "cluster": cluster,
        "run": {"iterations": 1, "seed": seed or 0, "allow_extrapolation": True},
    }
