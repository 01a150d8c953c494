"""Traces as PyTorch's profiler writes them, SYNTHETIC: made from known times."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["MAIN", "CpuStep", "Step", "Writer"]

MAIN, ENGINE, GLOO = 1, 2, 3
COMPUTE, NCCL = 7, 20
NODE = "autograd::engine::evaluate_function: "
ACCUMULATE = "torch::autograd::AccumulateGrad"


@dataclass
class Step:
    """Microseconds of kernels; `backward[i]` are those before gradient i is there.

    `reduced` maps a gradient to the elements of the all-reduce that its hook launches. `waits`: the
    host waits for the device before the optimizer and at the end. `reads`: it reads the loss.
    """

    forward: Sequence[float]
    backward: Sequence[Sequence[float]]
    optimizer: Sequence[float]
    shapes: Sequence[Sequence[int]] | None = None
    reduced: dict[int, int] = field(default_factory=dict)
    copies: bool = False
    loader_us: float = 0.0
    launch_us: float = 1.0
    reduce_us: float = 40.0
    waits: bool = False
    reads: bool = False


@dataclass
class CpuStep:
    """Microseconds of the host; `backward[i]` before gradient i, `optimizers` one after another.

    `gloo_us`: an all-reduce that begins with each gradient, on a thread of its own.
    `own_us`: one of the loop's own after the optimizer, for which it waits.
    """

    forward: float
    backward: Sequence[float]
    optimizers: Sequence[float]
    micro_batches: int = 1
    gloo_us: float = 0.0
    own_us: float = 0.0
    marked: bool = True


class Writer:
    """Writes step after step; the host runs ahead of the device."""

    def __init__(self, *, old: bool = False, world_size: int | None = None, rank: int = 0) -> None:
        self.events: list[dict[str, Any]] = []
        self.now = 1000.0
        self.free_us = {COMPUTE: 0.0, NCCL: 0.0}
        self._old = old
        self._world_size, self._rank = world_size, rank
        self._correlation = 0
        self._steps = 0
        self.device = 0

    def op(self, name: str, start_us: float, thread: int, **args: Any) -> None:
        """Something of the host that ends now."""
        annotation = name.startswith(("ProfilerStep", "Optimizer", "enumerate"))
        kind = "user_annotation" if annotation else "cpu_op"
        self._add("Operator" if self._old else kind, name, start_us, self.now, thread, args)

    def _add(
        self, cat: str, name: str, start: float, end: float, tid: int, args: dict[str, Any]
    ) -> None:
        where = {"pid": 100 if tid < COMPUTE else 0, "tid": tid}
        timed = {"ts": round(start, 6), "dur": round(end - start, 6)}
        self.events.append({"ph": "X", "cat": cat, "name": name, **where, **timed, "args": args})

    def kernel(
        self, lasts_us: float, thread: int, launch_us: float, *, elements: int | None = None
    ) -> None:
        """Launched now; it begins when its stream is free."""
        stream = COMPUTE if elements is None else NCCL
        self._correlation += 1
        args = {"correlation": self._correlation}
        launched = self.now
        self.now += launch_us
        runtime = "Runtime" if self._old else "cuda_runtime"
        self._add(runtime, "cudaLaunchKernel", launched, self.now, thread, args)
        start = max(self.now, self.free_us[stream])
        if elements is not None:
            start = max(start, self.free_us[COMPUTE])
            args |= {"Collective name": "allreduce", "In msg nelems": elements, "dtype": "Float"}
        self.free_us[stream] = start + lasts_us
        name = "sgemm" if elements is None else "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
        kind = "Kernel" if self._old else "kernel"
        place = {"device": self.device, "stream": stream}
        self._add(kind, name, start, start + lasts_us, stream, args | place)

    def step(self, step: Step) -> None:
        """One whole step."""
        began = self.now
        if step.loader_us:
            self.now += step.loader_us
            self.op("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", began, MAIN)
        for lasts in step.forward:
            self.kernel(lasts, MAIN, step.launch_us)
        for number, kernels in enumerate(step.backward):
            self._node(step, number, kernels)
        if step.copies:
            for _ in step.backward:
                at = self.now
                self.kernel(3.0, ENGINE, step.launch_us)
                self.op("torch.distributed.ddp.reducer::copy_bucket_to_grad", at, ENGINE)
        self._wait(step)
        at = self.now
        for lasts in step.optimizer:
            self.kernel(lasts, MAIN, step.launch_us)
        self.op("Optimizer.step#SGD.step", at, MAIN)
        self._wait(step)
        if step.reads:
            at = self.now
            self._add("cuda_runtime", "cudaStreamSynchronize", at, at + 1.0, MAIN, {})
            self.now += 2.0
            self.op("aten::_local_scalar_dense", at, MAIN)
        self.op(f"ProfilerStep#{self._steps}", began, MAIN)
        self._steps += 1

    def _wait(self, step: Step) -> None:
        """For all that the device has been given."""
        if step.waits:
            at, self.now = self.now, max(self.now, *self.free_us.values())
            self._add("cuda_runtime", "cudaDeviceSynchronize", at, self.now, MAIN, {})

    def _node(self, step: Step, number: int, kernels: Sequence[float]) -> None:
        at = self.now
        for lasts in kernels:
            self.kernel(lasts, ENGINE, step.launch_us)
        if kernels:
            self.op("MmBackward" if self._old else NODE + "MmBackward0", at, ENGINE)
        at = self.now
        shapes = step.shapes
        told = {"Input Dims": [shapes[number]], "Input type": ["float"]} if shapes else {}
        self.now += 0.5
        self.op(ACCUMULATE, at, ENGINE, **told)
        hooked = self.now
        if step.copies:
            self.kernel(2.0, ENGINE, step.launch_us)
            self.op("torch::distributed::reducer::mul_out", hooked, ENGINE)
        if number in step.reduced:
            elements = step.reduced[number]
            self.kernel(step.reduce_us, ENGINE, step.launch_us, elements=elements)
        if not self._old:
            self.op(NODE + ACCUMULATE, at, ENGINE)

    def cpu_step(self, step: CpuStep) -> None:
        """One whole step without a device."""
        began = self.now
        for _ in range(step.micro_batches):
            self._busy("aten::linear", step.forward)
            for lasts in step.backward:
                self._busy(NODE + "MmBackward0", lasts)
                at = self.now
                self._busy(ACCUMULATE, 0.5)
                if step.gloo_us:
                    self.gloo(step.gloo_us)
                self.op(NODE + ACCUMULATE, at, MAIN)
        for lasts in step.optimizers:
            self._busy("Optimizer.step#SGD.step", lasts)
        if step.own_us:
            self.gloo(step.own_us)
            self.now += step.own_us
        if step.marked:
            self.op(f"ProfilerStep#{self._steps}", began, MAIN)
        self._steps += 1

    def gloo(self, lasts_us: float, **args: Any) -> None:
        """An all-reduce that the host asks for now, and another thread carries out from then."""
        self._busy("c10d::allreduce_", 1.0)
        begins, ends = self.now - 0.5, self.now + lasts_us
        self._add("user_annotation", "gloo:all_reduce", begins, ends, GLOO, args)

    def _busy(self, name: str, lasts_us: float) -> None:
        at, self.now = self.now, self.now + lasts_us
        self.op(name, at, MAIN)

    def document(self) -> dict[str, Any]:
        """The whole file."""
        size = self._world_size
        told = {"distributedInfo": {"backend": "nccl", "rank": self._rank, "world_size": size}}
        return {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "Tesla V100-SXM2-32GB"}],
            **(told if size else {}),
            "traceEvents": self.events,
        }

    def save(self, path: Path) -> Path:
        """Gzipped where the name says so."""
        text = json.dumps(self.document())
        zipped = path.suffix == ".gz"
        path.write_bytes(gzip.compress(text.encode(), mtime=0) if zipped else text.encode())
        return path
