"""A published bucket sweep whose model and GPU are guessed."""

from __future__ import annotations

import csv
import tempfile
from functools import cache
from pathlib import Path

from ddpsim.units import MIB
from validation.folders import DATA
from validation.rows import Row, job_of, step_s

# all-reduces of 2 GPUs as published beside the bucket sweep of tests/data: MB, seconds
CS336_ALL_REDUCE = ((1, 0.0001183), (10, 0.0005938), (100, 0.0052744), (1000, 0.0507776))


@cache
def cs336_rows() -> tuple[Row, ...]:
    """A published bucket sweep whose model and GPU are guessed: a known gap."""
    text = (DATA / "cs336-bucket-sweep.csv").read_text("utf-8").splitlines()
    figures = list(csv.DictReader(line for line in text if not line.startswith("#")))
    with tempfile.TemporaryDirectory() as folder:
        parameters, times = Path(folder) / "parameters.csv", Path(folder) / "all-reduce.csv"
        parameters.write_text("\n".join(_cs336_parameters()), encoding="utf-8")
        header = "size_bytes,time_us,nodes,gpus_per_node"
        lines = [f"{size * 10**6},{seconds * 1e6},1,2" for size, seconds in CS336_ALL_REDUCE]
        times.write_text("\n".join([header, *lines]), encoding="utf-8")
        alone = {
            (f["local_bs"], f["seq_len"]): float(f["iter_s"]) - float(f["wait_s"])
            for f in figures
            if f["bucket_mb"] == "none"
        }
        return tuple(
            _cs336_row(f, alone[f["local_bs"], f["seq_len"]], parameters, times)
            for f in figures
            if f["bucket_mb"] != "none"
        )


def _cs336_row(figure: dict[str, str], alone_s: float, parameters: Path, times: Path) -> Row:
    job = job_of(
        {
            "workload": {
                "parameters": str(parameters),
                "batch_per_rank": int(figure["local_bs"]),
                "step_time": f"{alone_s} s",
                "optimizer": {"name": "adamw"},
            },
            "ddp": {"bucket_cap_mb": float(figure["bucket_mb"]) * 1e6 / MIB},
            "cluster": {
                "nodes": 1,
                "gpus_per_node": 2,
                "device": "h100-sxm-80gb",
                "all_reduce": str(times),
            },
            "run": {"iterations": 1, "allow_extrapolation": True},
        }
    )
    naive, ours_s = job.baselines(), step_s(job)
    return Row(
        label=f"batch {figure['local_bs']} x {figure['seq_len']}",
        case=figure["bucket_mb"],
        measured_s=float(figure["iter_s"]),
        predicted_s=ours_s,
        equal_gpus_s=ours_s,
        compute_only_s=naive.compute_only,
        no_overlap_s=naive.no_overlap,
        perfect_overlap_s=naive.perfect_overlap,
    )


def _cs336_parameters() -> list[str]:
    """Width 1600, 48 blocks of four attention and three feed-forward matrices: 2.0 B elements."""
    block = [("attention.qkvo", "6400x1600"), ("norm1", "1600"), ("norm2", "1600")]
    block += [(f"ffn.w{i}", "6400x1600") for i in (1, 2, 3)]
    rows = [f"blocks.{i}.{name},{shape},float32" for i in range(48) for name, shape in block]
    ends = ["head.weight,10000x1600,float32"]
    return ["name,shape,dtype", "embedding.weight,10000x1600,float32", *rows, *ends]
