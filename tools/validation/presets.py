"""All-reduces of machine presets beside published nccl-tests sweeps."""

from __future__ import annotations

import math
from functools import cache
from statistics import fmean

from ddpsim.cluster.transfers import duration_ns
from ddpsim.units import MIB, NS_PER_S
from validation.markdown import markdown
from validation.rows import job_of

# nccl-tests all_reduce_perf, 32 MiB in place: sweep, device, nodes, GPUs a node, microseconds
SWEEPS = (
    ("ABCI V", "v100-sxm-16gb", 1, 4, 447.7),
    ("ABCI A", "a100-sxm-40gb", 1, 4, 279.2),
    ("ABCI A", "a100-sxm-40gb", 1, 8, 358.5),
    ("SuperBench", "a100-sxm-40gb", 1, 8, 372.8),
    ("NVIDIA dgxc-benchmarking", "h100-sxm-80gb", 1, 8, 198.9),
    ("ABCI V", "v100-sxm-16gb", 2, 4, 2969.8),
    ("ABCI V", "v100-sxm-16gb", 4, 4, 3157.7),
    ("ABCI V", "v100-sxm-16gb", 8, 4, 3318.2),
    ("ABCI A", "a100-sxm-40gb", 2, 8, 1885.6),
    ("AWS p4de, EFA", "a100-sxm-80gb", 2, 8, 1540.7),
    ("AWS p5, EFA", "h100-sxm-80gb", 2, 8, 417.7),
    ("dstack, Nebius", "h100-sxm-80gb", 2, 8, 276.45),
    ("dstack, Lambda", "b200", 2, 8, 253.88),
)


@cache
def preset_errors() -> tuple[float, ...]:
    """Presets over measured all-reduce times, minus 1, for every entry of SWEEPS."""
    return tuple(_preset_s(*sweep[1:4]) / (sweep[4] * 1e-6) - 1 for sweep in SWEEPS)


def _preset_s(device: str, nodes: int, gpus: int) -> float:
    cluster = {"nodes": nodes, "gpus_per_node": gpus, "device": device}
    job = job_of({"workload": {"model": "resnet50", "batch_per_rank": 1}, "cluster": cluster})
    return duration_ns(job.network.cost.transfer("all_reduce", 32 * MIB)) / NS_PER_S


def preset_sigma(*, several_nodes: bool) -> float:
    """Root mean square of the logarithmic errors, on one node or on several."""
    chosen = zip(SWEEPS, preset_errors(), strict=True)
    errors = [error for sweep, error in chosen if (sweep[2] > 1) == several_nodes]
    return math.sqrt(fmean(math.log1p(error) ** 2 for error in errors))


def preset_table() -> str:
    """An all-reduce of 32 MiB on each preset: measured, and the error."""
    rows = (
        (name, device, f"{nodes} x {gpus}", f"{time_us:.0f} us", f"{error:+.0%}")
        for (name, device, nodes, gpus, time_us), error in zip(SWEEPS, preset_errors(), strict=True)
    )
    return markdown(["sweep", "device", "nodes x GPUs", "measured", "error"], rows)
