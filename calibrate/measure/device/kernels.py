"""Kernels one by one: products, convolutions, memory-bound ones, launches; optimizer steps."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 -- torch's own custom

from calibrate.measure.device.bench import DTYPES, Bench
from calibrate.records.device_record import Case, DeviceMeasurement

_GRAPH_KERNELS = 100


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
        layer, images = _channels_last(layer), images.to(memory_format=torch.channels_last)
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


def _channels_last(layer: nn.Conv2d) -> nn.Conv2d:
    return layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


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
