"""Steps of zoo models: forward, backward, optimizer; and with DDP, compiled, scaled, synced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 -- torch's own custom
from torch.nn.modules._functions import SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel

from calibrate.measure.clock import Mark
from calibrate.measure.device.kernels import DTYPES, Bench
from calibrate.measure.model.samples import Samples, iterate
from calibrate.measure.model.training import Made, Training, reduced_parameters
from calibrate.measure.ranks.job import process_group
from calibrate.measure.zoo.models import build, inputs_of, loss_of
from calibrate.records.device_record import Case, DeviceMeasurement
from ddpsim.files import no_collection

_WARMUPS = 2
_WARMUPS_OF_DDP = 12  # its first ten iterations log, and the buckets are built anew
_RATE = 1e-9  # of learning: the arithmetic is a step's, and the weights stay
PARTS = ("forward", "backward", "optimizer")


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
    """Of a case's model, which may be changed before its optimizer is made."""
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
    return DeviceMeasurement(
        case=case, samples_s=_by_part(samples), peak_bytes=peak, ready=_ready(stepper)
    )


def _by_part(samples: list[tuple[float, ...]]) -> dict[str, tuple[float, ...]]:
    return dict(zip(PARTS, zip(*samples, strict=True), strict=True))


def _ready(stepper: _Stepper) -> tuple[float | None, ...]:
    """Of each parameter the part of a backward after which its gradient is there."""
    samples = Samples()
    iterate(stepper, samples, hooked=True)
    found = (samples.ready_s.get(name) for name in reduced_parameters(stepper.model))
    return tuple(round(at[0][0] / max(at[0][1], 1e-9), 6) if at else None for at in found)


def one_rank_ddp(case: Case, bench: Bench) -> DeviceMeasurement:
    """Steps under DDP of this process alone and without it, in turns."""
    timed = replace(bench, clock=bench.wall)  # gloo has threads of its own
    with process_group("nccl" if bench.on_gpu else "gloo"):
        bare = _stepper(case, timed)
        wrapped = _stepper(case, timed, DistributedDataParallel)
        found = _in_turns(bare, wrapped, bench.steps, _WARMUPS_OF_DDP if bench.on_gpu else 3)
    return _pairs(case, ("bare", "wrapped"), found)


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
    return _pairs(case, ("plain", "synced"), pairs)


def grad_scaler(case: Case, bench: Bench) -> DeviceMeasurement:
    """Steps with torch's GradScaler, and without, in turns; host waits included."""
    timed = replace(bench, clock=bench.wall)
    plain = _stepper(case, timed)
    scaler = torch.amp.GradScaler(bench.device.type, init_scale=1.0)
    scaled = replace(_stepper(case, timed), scaler=scaler)
    found = _in_turns(plain, scaled, bench.steps, _WARMUPS)
    return _pairs(case, ("plain", "scaled"), found)


def _in_turns(
    first: _Stepper, second: _Stepper, count: int, warmups: int
) -> list[tuple[float, float]]:
    """Seconds of whole steps of both, a pair each."""
    seconds = first.bench.clock.seconds
    with no_collection():
        pairs = [(first.step(), second.step()) for _ in range(warmups + count)][warmups:]
    return [(seconds(a[0], a[-1]), seconds(b[0], b[-1])) for a, b in pairs]


def _pairs(
    case: Case, names: tuple[str, str], pairs: list[tuple[float, float]]
) -> DeviceMeasurement:
    samples_s = dict(zip(names, zip(*pairs, strict=True), strict=True))
    return DeviceMeasurement(case=case, samples_s=samples_s)


def compiled(case: Case, bench: Bench) -> DeviceMeasurement:
    """A step under torch.compile, without what it takes to compile it."""

    def change(model: nn.Module) -> nn.Module:
        model.compile()
        return model

    samples = _stepper(case, bench, change).steps_s(bench.steps, _WARMUPS + 1)
    return DeviceMeasurement(case=case, samples_s=_by_part(samples))


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
