"""Each kind of case on a device: kernels and launches one by one, and steps of zoo models.

Those are forward, backward and optimizer; and with DDP, compiled, scaled, with synced batch norms.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 -- torch's own custom
from torch.nn.modules._functions import SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel

from calibrate.measure.clock import Clock, Mark
from calibrate.measure.model.samples import Samples, iterate
from calibrate.measure.model.training import Made, Training, reduced_parameters
from calibrate.measure.ranks.job import process_group
from calibrate.measure.zoo.models import build, inputs_of, loss_of
from calibrate.records.device_record import Case, DeviceMeasurement, Kind
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
_WARMUPS = 2
_WARMUPS_OF_DDP = 12  # its first ten iterations log, and the buckets are built anew
_RATE = 1e-9  # of learning: the arithmetic is a step's, and the weights stay
PARTS = ("forward", "backward", "optimizer")


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
    weight = x[0].clone()
    works: dict[str, Callable[[], object]] = {
        "copy": x.clone,
        "add": lambda: x + x,  # both operands are the same memory
        "gelu": lambda: F.gelu(x),
        "relu": lambda: F.relu(x),
        "layer norm": lambda: F.layer_norm(x, (1024,), weight, weight),
        "softmax": lambda: F.softmax(x, -1),
    }
    return DeviceMeasurement(
        case=case,
        samples_s={"kernel": bench.kernel_s(works[case.variant])},
        moved_bytes=float(2 * elements * dtype.itemsize),  # each is read and written
    )


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
        name: tuple(s / _GRAPH_KERNELS for s in each_s)
        for name, each_s in (("host", host_s), ("kernel", kernel_s))
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


@dataclass(frozen=True, kw_only=True)
class _Stepper(Training):
    """A case's model, ready to step in the case's precision."""

    bench: Bench
    case: Case

    def forward(self) -> Tensor:
        """Run the model and the loss, under autocast where the precision says so."""
        with self.bench.precision(self.case.precision):
            return super().forward()

    def backward(self, loss: Tensor) -> None:
        """Make the gradients of a loss, in the same precision."""
        with self.bench.precision(self.case.precision):
            super().backward(loss)

    def step(self) -> list[Mark]:
        """One step, and the points between forward, backward and optimizer.

        To be read later: a host that waits for each step is never ahead of its device.
        """
        return [*self.passes(), self.update()]

    def steps_s(self, count: int, warmups: int = _WARMUPS) -> list[tuple[float, ...]]:
        """Seconds of forward, backward and optimizer, of so many steps after a warm-up."""
        with no_collection():
            steps = [self.step() for _ in range(warmups + count)][warmups:]
        seconds = self.bench.clock.seconds
        return [tuple(seconds(a, b) for a, b in pairwise(marks)) for marks in steps]


def _stepper(
    case: Case, bench: Bench, change: Callable[[nn.Module], nn.Module] | None = None
) -> _Stepper:
    """Make the steps of a case's model, which `change` may wrap before its optimizer is made."""
    whole_half = case.precision == "bf16"
    dtype = DTYPES[case.precision] if whole_half else torch.float32
    model = build(case.model, bench.device, dtype)
    inputs = inputs_of(model, case.batch, case.size, bench.device)
    if case.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        inputs = inputs.to(memory_format=torch.channels_last)
    model = change(model) if change else model
    made, optimizer = Made(model, inputs, loss_of), torch.optim.SGD(model.parameters(), lr=_RATE)
    return _Stepper(*made, optimizer, bench.clock, lambda: made, bench=bench, case=case)


def step(case: Case, bench: Bench) -> DeviceMeasurement:
    """A model's step, the most memory that it takes on a GPU, and when its gradients are ready."""
    if bench.on_gpu:
        torch.cuda.reset_peak_memory_stats(bench.device)
    stepper = _stepper(case, bench)
    samples = stepper.steps_s(bench.steps)
    peak = torch.cuda.max_memory_allocated(bench.device) if bench.on_gpu else None
    return _measured(case, PARTS, samples, peak_bytes=peak, ready=_ready(stepper))


def _measured(
    case: Case, parts: Sequence[str], rows: Sequence[tuple[float, ...]], **more: Any
) -> DeviceMeasurement:
    """A measurement of rows of seconds, a column of each part."""
    samples_s = dict(zip(parts, zip(*rows, strict=True), strict=True))
    return DeviceMeasurement(case=case, samples_s=samples_s, **more)


def _ready(stepper: _Stepper) -> tuple[float | None, ...]:
    """Part of a backward after which each parameter's gradient is there; None: it gets none."""
    samples = Samples()
    iterate(stepper, samples, hooked=True)
    times = (samples.ready_s.get(name) for name in reduced_parameters(stepper.model))
    return tuple(round(at[0][0] / max(at[0][1], 1e-9), 6) if at else None for at in times)


def one_rank_ddp(case: Case, bench: Bench) -> DeviceMeasurement:
    """Steps under DDP of this process alone and without it, in turns."""
    timed = replace(bench, clock=bench.wall)  # gloo has threads of its own
    with process_group("nccl" if bench.on_gpu else "gloo"):
        bare = _stepper(case, timed)
        wrapped = _stepper(case, timed, DistributedDataParallel)
        samples = _in_turns(bare, wrapped, bench.steps, _WARMUPS_OF_DDP if bench.on_gpu else 3)
    return _measured(case, ("bare", "wrapped"), samples)


def sync_batch_norm(case: Case, bench: Bench) -> DeviceMeasurement:
    """Forward and backward of one batch norm: torch's usual one, and SyncBatchNorm's own function.

    The module takes the usual one where a rank is alone; its function does not (torch's
    nn/modules/_functions.py), and so tells its kernels, the host's wait, and two collectives of one
    rank. shape: batch, channels, side.
    """
    batch, channels, side = case.shape
    images = torch.rand(batch, channels, side, side, device=bench.device, requires_grad=True)
    weight, bias = (torch.ones(channels, device=bench.device, requires_grad=True) for _ in "wb")
    mean, var = (make(channels, device=bench.device) for make in (torch.zeros, torch.ones))

    def run(norm: Callable[..., Tensor], *last: object) -> float:
        bench.wall.finish()
        start = bench.wall.mark()
        norm(images, *last).sum().backward()  # type: ignore[no-untyped-call]
        seconds = bench.wall.seconds(start, bench.wall.mark())
        images.grad = weight.grad = bias.grad = None
        return seconds

    plain = mean, var, weight, bias, True
    with process_group("nccl" if bench.on_gpu else "gloo"):
        synced = weight, bias, mean, var, 1e-5, 0.1, dist.group.WORLD, 1
        pairs = [
            (run(F.batch_norm, *plain), run(SyncBatchNorm.apply, *synced))
            for _ in range(_WARMUPS + 2 * bench.samples)
        ][_WARMUPS:]
    return _measured(case, ("plain", "synced"), pairs)


def grad_scaler(case: Case, bench: Bench) -> DeviceMeasurement:
    """Steps with torch's GradScaler, and without, in turns; host waits included."""
    timed = replace(bench, clock=bench.wall)
    plain = _stepper(case, timed)
    scaler = torch.amp.GradScaler(bench.device.type, init_scale=1.0)
    scaled = replace(_stepper(case, timed), scaler=scaler)
    samples = _in_turns(plain, scaled, bench.steps, _WARMUPS)
    return _measured(case, ("plain", "scaled"), samples)


def _in_turns(
    first: _Stepper, second: _Stepper, count: int, warmups: int
) -> list[tuple[float, float]]:
    """Seconds of whole steps of both, a pair each."""
    seconds = first.bench.clock.seconds
    with no_collection():
        pairs = [(first.step(), second.step()) for _ in range(warmups + count)][warmups:]
    return [(seconds(a[0], a[-1]), seconds(b[0], b[-1])) for a, b in pairs]


def compiled(case: Case, bench: Bench) -> DeviceMeasurement:
    """A step under torch.compile, without what it takes to compile it."""

    def change(model: nn.Module) -> nn.Module:
        model.compile()
        return model

    samples = _stepper(case, bench, change).steps_s(bench.steps, _WARMUPS + 1)
    return _measured(case, PARTS, samples)


def trace(case: Case, bench: Bench, path: str) -> None:
    """One step of a model by torch's profiler, as Chrome's JSON in a file."""
    stepper = _stepper(case, bench)
    stepper.steps_s(1)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if bench.on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        stepper.step()
        bench.clock.finish()
    profiler.export_chrome_trace(path)


RUNNERS: dict[Kind, Callable[[Case, Bench], DeviceMeasurement]] = {
    "product": product,
    "convolution": convolution,
    "memory": memory,
    "launch": launch,
    "optimizer": optimizer,
    "step": step,
    "ddp": one_rank_ddp,
    "compile": compiled,
    "sync_batch_norm": sync_batch_norm,
    "grad_scaler": grad_scaler,
}
