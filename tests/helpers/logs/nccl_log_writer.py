"""Synthetic logs of nccl-tests."""

from __future__ import annotations

TIMES = {1024: 20.5, 1_048_576: 140.25, 67_108_864: 6415.5}


def device_lines(nodes: int, gpus: int) -> list[str]:
    ranks = [(node, gpu) for node in range(nodes) for gpu in range(gpus)]
    return [
        f"#  Rank {rank:2} Group  0 Pid {1000 + rank} on node{node} device {gpu:2} [0x0{gpu}] GPU"
        for rank, (node, gpu) in enumerate(ranks)
    ]


def nccl_log(
    *,
    root: bool,
    nodes: int = 2,
    gpus: int = 2,
    times: dict[int, float] = TIMES,
    operation: str = "all_reduce",
) -> str:
    """A synthetic log; its out-of-place times are 1.05 x the in-place ones."""
    reduced, turns = (
        ("none" if operation == "all_gather" else "sum"),
        1 + (operation == "all_reduce"),
    )
    columns, redop, last = (
        ("redop    root", f"{reduced}      -1", "#wrong") if root else ("redop", reduced, "error")
    )
    ranks = nodes * gpus
    lines = ["# SYNTHETIC: nobody measured it", "# Using devices", *device_lines(nodes, gpus)]
    lines += [f"#  size  count  type  {columns}  {'time   algbw   busbw  ' + last} x 2"]
    lines += ["#   (B)  (elements)  (us)  (GB/s)  (GB/s)  (us)  (GB/s)  (GB/s)"]
    for size, time_us in times.items():
        halves = []
        for shown_us in (1.05 * time_us, time_us):
            algbw = size / shown_us / 1e3
            halves.append(f"{shown_us} {algbw:.2f} {algbw * turns * (ranks - 1) / ranks:.2f} 0e+00")
        lines.append(f"  {size}  {size // 4}  float  {redop}  {'  '.join(halves)}")
        lines.append("node0:1000:1000 [0] NCCL INFO comm 0x1 rank 0 nranks 4")
    return "\n".join([*lines, "# Out of bounds values : 0 OK", "# Avg bus bandwidth : 1.0", ""])
