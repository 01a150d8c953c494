"""Work to time: tensors, layers, and what all ranks do at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from calibrate.measure.clock import Lap
from calibrate.measure.cluster.plan import Task
from calibrate.measure.ranks.job import Job
from calibrate.records.record import HALF, LAYER

Round = Callable[[], Sequence[Lap]]
Work = Callable[[], object]
Unit = Callable[[int], object]  # the i-th piece of compute
LAUNCH_S = 60e-6

# a piece of compute takes some 0.3 ms on one CPU core of 100 GFLOP/s and 20 GB/s (of layers: 2 ms),
# 0.3 to 2 ms on an H100, 2 to 13 on a T4
_GEMM = {"cpu": 256, "cuda": 2048}  # rows and columns
_MEMORY = {"cpu": (2**18, 32), "cuda": (2**26, 1)}  # floats, and how many arrays of them
# layers, their width, and rows that go through them
_LAYERS = {"cpu": (16, 512, 128), "cuda": (4, 4096, 1024)}
_WAIT_BYTES = 2**24  # 30 ms at 5 Gbit/s: after 15 the effect of a wait is nearly whole


def compute_unit(work: str, device: torch.device) -> Unit:
    """One short piece of compute, the i-th: "gemm" is bound by arithmetic, "memory" by bandwidth.

    A "layer" is the forward and the backward of one: of the three it is what a step is made of, and
    lives in caches that threads of a backend clear. Pieces of memory traffic go round arrays that
    no cache holds, those of layers round as many layers.
    """
    if work == LAYER:
        return _layer_unit(device)
    if work == "gemm":
        n = _GEMM[device.type]
        a, b, out = (torch.rand(n, n, device=device) for _ in range(3))
        return lambda _: torch.mm(a, b, out=out)
    count, parts = _MEMORY[device.type]
    x, y, total = (torch.rand(parts, count, device=device) for _ in range(3))
    return lambda i: torch.add(x[i % parts], y[i % parts], out=total[i % parts])


def _layer_unit(device: torch.device) -> Unit:
    count, width, rows = _LAYERS[device.type]
    x = torch.rand(rows, width, device=device, requires_grad=True)
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()).to(device) for _ in range(count)]

    def unit(i: int) -> None:
        layer = layers[i % count]
        layer.zero_grad()
        x.grad = None
        layer(x).sum().backward()

    return unit


def floats_of(size_bytes: int, job: Job) -> Tensor:
    """A float32 tensor of a size, on the job's device."""
    return zeros_of(size_bytes, job, torch.float32)


def zeros_of(size_bytes: int, job: Job, dtype: torch.dtype) -> Tensor:
    """In memory that really exists: an untouched page of calloc is none."""
    count = max(1, size_bytes // dtype.itemsize)
    return torch.empty(count, device=job.device, dtype=dtype).fill_(0.0)


def dtype_of(task: Task) -> torch.dtype:
    """Of what a task reduces: float32, unless its variant says half."""
    return torch.float16 if task.first.variant.endswith(HALF) else torch.float32


def all_at_once(job: Job) -> Work:
    """Has all ranks wait for an all-reduce, as they do in a step of DDP.

    A core's memory is slower to it after that: on an Intel core SGD over 17 M parameters took 16 %
    longer after a sleep of 5 ms, 25 % after one of 50.
    """
    reduced = floats_of(_WAIT_BYTES, job)
    return lambda: dist.all_reduce(reduced)
