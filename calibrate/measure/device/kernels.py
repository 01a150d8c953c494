"""The device under measurement, and kernels one by one: products, convolutions, launches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 -- torch's own custom

from calibrate.measure.clock import Clock, Mark
from calibrate.records.device_record import Case, DeviceMeasurement
from ddpsim.files import no_collection
from ddpsim.scenario.device import Rate
from ddpsim.scenario.workload import Precision

DTYPES: dict[Precision | Rate, torch.dtype] = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "amp-fp16": torch.float16,
    "amp-bf16": torch.bfloat16,
}
_SAMPLE_S = {"cpu": 2e-3, "cuda": 1e-3}  # of repeated work: far above a clock's resolution
_MOST_REPEATS = 200
_FINE_S = 1e-6  # resolution below which a thread's own time can be used
_GRAPH_KERNELS = 100


class OwnTime(Clock):
    """On a CPU the time that this thread had of it: what others took meanwhile does not count."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        fine = time.get_clock_info("thread_time").resolution <= _FINE_S
        self._read = time.thread_time if fine else time.perf_counter

    def mark(self) -> Mark:
        """The point that the work so far reaches."""
        return super().mark() if self._on_gpu else self._read()


@dataclass(frozen=True)
class Bench:
    """A device, its clocks, and the samples of one round.

    `clock` is the device's own; `wall` a usual clock, where several threads work together.
    """

    device: torch.device
    clock: Clock
    wall: Clock
    samples: int = 5
    steps: int = 3

    @classmethod
    def of(cls, device: torch.device, *, samples: int = 5, steps: int = 3) -> Bench:
        """With its clocks."""
        return cls(device, OwnTime(device), Clock(device), samples, steps)

    @property
    def on_gpu(self) -> bool:
        """Whether it is a GPU, by CUDA's name for all of them."""
        return self.device.type == "cuda"

    def kernel_s(self, work: Callable[[], object]) -> tuple[float, ...]:
        """Seconds of work on the device, each sample of so many in a row that a clock tells it."""
        work()
        first_s = self._sample(work, 1)
        wanted = _SAMPLE_S[self.device.type] / max(first_s, 1e-7)
        repeats = max(1, min(_MOST_REPEATS, round(wanted)))
        with no_collection():
            return tuple(self._sample(work, repeats) for _ in range(self.samples))

    def _sample(self, work: Callable[[], object], repeats: int) -> float:
        self.clock.finish()
        if repeats > 1:
            self.clock.run_ahead(repeats * 20e-6)  # so that the device waits for no launch
        start = self.clock.mark()
        for _ in range(repeats):
            work()
        return self.clock.seconds(start, self.clock.mark()) / repeats

    def host_s(self, work: Callable[[], object], repeats: int = 100) -> tuple[float, ...]:
        """Seconds of the host for work, which the device does meanwhile or later."""
        host = OwnTime(torch.device("cpu"))
        work()
        samples = []
        with no_collection():
            for _ in range(self.samples):
                self.clock.finish()
                start = host.mark()
                for _ in range(repeats):
                    work()
                samples.append(host.seconds(start, host.mark()) / repeats)
        return tuple(samples)

    @contextmanager
    def precision(self, precision: Precision | Rate) -> Iterator[None]:
        """Autocast, and whether products in fp32 may be TF32's."""
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        casts = precision.startswith("amp-")
        try:
            with torch.autocast(self.device.type, DTYPES[precision], enabled=casts):
                yield
        finally:
            torch.set_float32_matmul_precision(before)


def supported_rates(device: torch.device) -> tuple[Rate, ...]:
    """The types of matrix products that a device has units for, fp32 first.

    Source: NVIDIA, "CUDA C programming guide", compute capabilities (half from 7.0, TF32 and bf16
    from 8.0); AMD's matrix cores have both halves, and torch gives them no TF32 by default.
    """
    if device.type != "cuda":
        return ("fp32",)
    if torch.version.hip:
        return "fp32", "fp16", "bf16"
    major, _ = torch.cuda.get_device_capability(device)
    return ("fp32", "tf32", "fp16", "bf16") if major >= 8 else ("fp32", "fp16")


def product(case: Case, bench: Bench) -> DeviceMeasurement:
    """One matrix product as a linear layer has it: rows x inner by (columns x inner) transposed."""
    rows, inner, columns = case.shape
    dtype = DTYPES[case.precision]
    x, weight = (_random((n, inner), dtype, bench) for n in (rows, columns))
    with bench.precision(case.precision):
        samples_s = bench.kernel_s(lambda: F.linear(x, weight))
    elements = rows * inner + inner * columns + rows * columns
    return DeviceMeasurement(
        case=case,
        samples_s={"kernel": samples_s},
        flops=2.0 * rows * inner * columns,
        moved_bytes=float(elements * dtype.itemsize),
    )


def convolution(case: Case, bench: Bench) -> DeviceMeasurement:
    """A convolution's forward, and its backward to inputs and weights."""
    batch, inputs, side, outputs, kernel, stride, groups = case.shape
    dtype = DTYPES[case.precision]
    layer = nn.Conv2d(
        inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False
    ).to(device=bench.device, dtype=dtype)
    images = _random((batch, inputs, side, side), dtype, bench)
    if case.channels_last:
        layer = layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        images = images.to(memory_format=torch.channels_last)
    images.requires_grad_()
    with bench.precision(case.precision):
        out = layer(images)
        gradient = torch.ones_like(out)
        wanted = (images, layer.weight)
        forward_s = bench.kernel_s(lambda: layer(images))
        backward_s = bench.kernel_s(
            lambda: torch.autograd.grad(out, wanted, gradient, retain_graph=True)
        )
    elements = images.numel() + layer.weight.numel() + out.numel()
    return DeviceMeasurement(
        case=case,
        samples_s={"forward": forward_s, "backward": backward_s},
        flops=2.0 * out.numel() * inputs // groups * kernel**2,
        moved_bytes=float(elements * dtype.itemsize),
    )


def memory(case: Case, bench: Bench) -> DeviceMeasurement:
    """A kernel that bandwidth bounds, on new results as in a model; elements in rows of 1024."""
    (elements,) = case.shape
    dtype = DTYPES[case.precision]
    x = _random((elements // 1024, 1024), dtype, bench)
    work, passes = _memory_work(case.variant, x)
    return DeviceMeasurement(
        case=case,
        samples_s={"kernel": bench.kernel_s(work)},
        moved_bytes=float(passes * elements * dtype.itemsize),
    )


def _memory_work(variant: str, x: Tensor) -> tuple[Callable[[], object], int]:
    """The kernel, and how often it reads or writes each element."""
    weight = x[0].clone()
    works: dict[str, tuple[Callable[[], object], int]] = {
        "copy": (x.clone, 2),
        "add": (lambda: x + x, 2),  # both operands are the same memory
        "gelu": (lambda: F.gelu(x), 2),
        "relu": (lambda: F.relu(x), 2),
        "layer norm": (lambda: F.layer_norm(x, (1024,), weight, weight), 2),
        "softmax": (lambda: F.softmax(x, -1), 2),
    }
    return works[variant]


def launch(case: Case, bench: Bench) -> DeviceMeasurement:
    """What the host takes to launch the smallest kernel, and the device to run it."""
    x = torch.zeros(1, device=bench.device)
    works: dict[str, Callable[[], object]] = {
        "kernel": lambda: torch.cuda._sleep(1),  # type: ignore[no-untyped-call]  # noqa: SLF001
        "operator": lambda: x.add(1.0),
        "step": _smallest_layer(bench),
    }
    if case.variant == "graph":
        return _graph(case, bench, x)
    work = works[case.variant]
    samples_s = {"host": bench.host_s(work), "kernel": bench.kernel_s(work)}
    return DeviceMeasurement(case=case, samples_s=samples_s)


def _smallest_layer(bench: Bench) -> Callable[[], object]:
    """Forward and backward of ten additions to one number: ten operators, and as many again."""
    x = torch.zeros(1, device=bench.device, requires_grad=True)

    def work() -> None:
        y = x
        for _ in range(10):
            y = y + 1.0
        y.backward()  # type: ignore[no-untyped-call]
        x.grad = None

    return work


def _graph(case: Case, bench: Bench, x: Tensor) -> DeviceMeasurement:
    """A CUDA graph of many such kernels, per kernel."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_GRAPH_KERNELS):
            x.add_(1.0)
    host_s, kernel_s = bench.host_s(graph.replay, 5), bench.kernel_s(graph.replay)
    samples_s = {
        "host": tuple(s / _GRAPH_KERNELS for s in host_s),
        "kernel": tuple(s / _GRAPH_KERNELS for s in kernel_s),
    }
    return DeviceMeasurement(case=case, samples_s=samples_s)


def _random(shape: tuple[int, ...], dtype: torch.dtype, bench: Bench) -> Tensor:
    return torch.rand(shape, device=bench.device, dtype=torch.float32).sub_(0.5).to(dtype)


def optimizer(case: Case, bench: Bench) -> DeviceMeasurement:
    """One step, with its launches; the first makes the optimizer's state."""
    tensors, elements = case.shape
    parameters = [nn.Parameter(torch.zeros(elements, device=bench.device)) for _ in range(tensors)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    made = _made(case.variant.split(), parameters)
    made.step()
    return DeviceMeasurement(
        case=case,
        samples_s={"step": bench.kernel_s(made.step), "host": bench.host_s(made.step, 3)},
        moved_bytes=float(4 * tensors * elements),
    )


def _made(words: list[str], parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    fused = "fused" in words
    foreach = not fused
    if words[0] == "sgd":
        momentum = 0.9 if "momentum" in words else 0.0
        return torch.optim.SGD(parameters, 1e-9, momentum, foreach=foreach, fused=fused)
    kind = torch.optim.AdamW if words[0] == "adamw" else torch.optim.Adam
    return kind(parameters, 1e-9, weight_decay=0.0, foreach=foreach, fused=fused)
