"""How each kind is run: a round does once what its task measures, and returns a lap per slot.

Collectives follow one another without a barrier between: each starts when its forerunner has
ended on all ranks, as buckets do in a step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from calibrate.measure.clock import Clock, Lap
from calibrate.measure.cluster.interference import (
    LAUNCH_S,
    InterferenceRound,
    Round,
    Work,
    all_at_once,
    compute_unit,
    dtype_of,
    floats_of,
    zeros_of,
)
from calibrate.measure.cluster.plan import MIB, Task
from calibrate.measure.ddp.loops import logged, start_log
from calibrate.measure.errors import MeasureError
from calibrate.measure.model.samples import Looks, alone
from calibrate.measure.ranks.job import Job
from calibrate.records.record import COPIES_BACK, COPIES_IN, RESTED, TOGETHER

Loader = Callable[[], Iterable[object]]
_TENSORS_OF_OPTIMIZER = 16
# on a GPU a collective up to so many bytes may be shorter than Python's launch of it, which takes
# so long: so many in a row are timed
_IN_A_ROW = ((2**20, 20), (2**24, 5))
# what shapers save up meanwhile: 128 KiB (ours) at 20 Mbit/s
_REST_S = 0.05
_JITTER_UNITS = 30
_SIDE = 512  # of a matrix of 1 MiB of float32

_SMALL = 16  # width of a layer whose bytes hardly count
_BATCH_OF_LAYERS = 256


def build_round(task: Task, job: Job, loader: Loader | None) -> Round:
    """Get ready to run a task on this rank; raises RuntimeError where torch cannot."""
    kind = task.first.kind
    if kind == "data_loader":
        return _data_loader(task, job, loader)
    return _BUILDERS[kind](task, job)


def _timed(job: Job, work: Work, times: int = 1) -> Round:
    def run() -> list[Lap]:
        start = job.clock.mark()
        work()
        return [Lap(start, job.clock.mark(), times)]

    return run


def _collective(task: Task, job: Job, work: Work, times: int = 1) -> Round:
    """Small ones of a GPU back to back, as nccl-tests times them: alone they are all launch.

    They are launched ahead of it, behind one that is not timed: with it all ranks begin together.
    """
    size = task.first.size_bytes
    again = next((count for below, count in _IN_A_ROW if size < below), 1)
    if job.device.type != "cuda" or again == 1:
        return _timed(job, work, times)

    def run() -> list[Lap]:
        job.clock.run_ahead((1 + again) * times * LAUNCH_S)
        work()
        start = job.clock.mark()
        for _ in range(again):
            work()
        return [Lap(start, job.clock.mark(), again * times)]

    return run


def _all_reduce(task: Task, job: Job) -> Round:
    group = job.group(task.team.ranks)
    data = zeros_of(task.first.size_bytes, job, dtype_of(task))
    if task.first.variant == RESTED:
        return _rested(job, lambda: dist.all_reduce(data, group=group))
    return _collective(task, job, lambda: dist.all_reduce(data, group=group))


def _rested(job: Job, work: Work) -> Round:
    """After compute in which nothing is sent, as a step's first collective is."""
    unit = compute_unit("gemm", job.device)

    def run() -> list[Lap]:
        rests_until = time.monotonic() + _REST_S
        while time.monotonic() < rests_until:
            unit(0)
            job.clock.finish()
        job.barrier()
        start = job.clock.mark()
        work()
        return [Lap(start, job.clock.mark())]

    return run


def _broadcast(task: Task, job: Job) -> Round:
    group, root = job.group(task.team.ranks), task.team.ranks[0]
    data = floats_of(task.first.size_bytes, job)
    return _collective(task, job, lambda: dist.broadcast(data, root, group=group))


def _sharded(task: Task, job: Job) -> Round:
    """`size_bytes` is what each rank puts in or gets out: the whole, as nccl-tests count it."""
    group, ranks = job.group(task.team.ranks), len(task.team.ranks)
    part = floats_of(task.first.size_bytes // ranks, job)
    whole = floats_of(4 * part.numel() * ranks, job)
    if task.first.kind == "all_gather":
        return _collective(task, job, lambda: dist.all_gather_into_tensor(whole, part, group=group))
    return _collective(task, job, lambda: dist.reduce_scatter_tensor(part, whole, group=group))


def _point_to_point(task: Task, job: Job) -> Round:
    first, second = task.team.ranks
    data = floats_of(task.first.size_bytes, job)

    def there_and_back() -> None:
        if job.rank == first:
            dist.send(data, second)
            dist.recv(data, second)
        else:
            dist.recv(data, first)
            dist.send(data, first)

    return _collective(task, job, there_and_back, times=2)


def _device_copy(task: Task, job: Job) -> Round:
    source = floats_of(task.first.size_bytes, job)
    target = torch.empty_like(source).fill_(0.0)
    return _on_device(task, job, lambda: target.copy_(source))


def _on_device(task: Task, job: Job, work: Work) -> Round:
    """Of this rank's own accord, or, where its variant says so, as soon as an all-reduce is done.

    Ranks of one machine share its memory, and in DDP they copy at the same time.
    """
    run = _timed(job, work)
    if not task.first.variant.endswith(TOGETHER):
        return run
    wait = all_at_once(job)

    def together() -> Sequence[Lap]:
        wait()
        return run()

    return together


def _device_cast(task: Task, job: Job) -> Round:
    """What torch's fp16_compress_hook does to a bucket before its all-reduce, or after it."""
    bucket = floats_of(task.first.size_bytes, job)
    if task.first.variant.startswith("compress"):
        return _on_device(task, job, lambda: bucket.to(torch.float16).div_(2))
    half = bucket.to(torch.float16)
    return _on_device(task, job, lambda: bucket.copy_(half))


def _optimizer(task: Task, job: Job) -> Round:
    """Plain SGD, or AdamW: one step over gradients of `size_bytes` in all, in 16 tensors."""
    name, _, how = task.first.variant.partition(" ")
    each = task.first.size_bytes // _TENSORS_OF_OPTIMIZER
    parameters = [nn.Parameter(floats_of(each, job)) for _ in range(_TENSORS_OF_OPTIMIZER)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    fused = how == "fused"
    optimizer: torch.optim.Optimizer = (
        torch.optim.SGD(parameters, 1e-6, foreach=not fused, fused=fused)
        if name == "sgd"
        else torch.optim.AdamW(parameters, 1e-6, foreach=not fused, fused=fused)
    )
    return _timed(job, optimizer.step)


def _narrow_products(task: Task, job: Job) -> Round:
    """M Q, the transpose of M times P, and P times that of Q, as torch's powerSGD_hook calls them.

    Of as many matrices of 1 MiB. The rate depends on the shape: on an EPYC's core those of models
    took up to a quarter more or less.
    """
    count, rank = task.first.size_bytes // MIB, int(task.first.variant.split()[1])
    matrices = [torch.rand(1, _SIDE, _SIDE, device=job.device) for _ in range(count)]
    p, q = (torch.rand(1, _SIDE, rank, device=job.device) for _ in range(2))

    def work() -> None:
        for matrix in matrices:
            torch.bmm(matrix, q, out=p)
        for matrix in matrices:
            torch.bmm(matrix.transpose(1, 2), p, out=q)
        p.div_(p.norm())
        q.div_(q.norm())  # or they would grow from round to round
        for matrix in matrices:
            torch.bmm(p, q.transpose(1, 2), out=matrix)

    return _timed(job, work)


def _jitter(_task: Task, job: Job) -> Round:
    """Matrix products of some 10 ms in all."""
    unit = compute_unit("gemm", job.device)

    def work() -> None:
        for i in range(_JITTER_UNITS):
            unit(i)

    return _timed(job, work)


def _data_loader(task: Task, job: Job, loader: Loader | None) -> Round:
    """One batch of the user's iterable, which begins again where it ends."""
    if loader is None:
        raise MeasureError(f"no data loader was given for {task}")
    batches = _endless(loader, task.first.variant)
    clock = Clock(torch.device("cpu"))

    def run() -> list[Lap]:
        job.clock.finish()
        start = clock.mark()
        next(batches)
        return [Lap(start, clock.mark())]

    return run


def _endless(loader: Loader, name: str) -> Iterator[object]:
    while True:
        empty = True
        try:
            for batch in loader():
                empty = False
                yield batch
        except Exception as error:
            raise MeasureError(f"the data loader {name} failed: {error!r}") from error
        if empty:
            raise MeasureError(f"the data loader {name} returned an iterable without a batch")


class _Layers(nn.Module):
    """Many equal layers, so that hooks and copies come between other work, as in a real backward.

    All of them pass on what they get: gradients that vanish would cost time of their own.
    """

    def __init__(self, parameters: int, width: int) -> None:
        super().__init__()
        layers = [nn.Linear(width, width) for _ in range(parameters // 2)]
        for layer in layers:
            nn.init.eye_(layer.weight)
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).sum()  # type: ignore[no-any-return]


def ddp_hook_round(task: Task, job: Job) -> Round:
    """A backward with DDP, what of it DDP logs as copies back, and a backward without it."""
    if task.first.variant == COPIES_IN:
        return copies_in_round(task, job)
    wrapped, x = _layers_in_ddp(task, job)
    plain = deepcopy(wrapped.module)
    back = any(slot.variant == COPIES_BACK for slot in task.slots)
    if back:
        start_log(wrapped)

    def backward(model: nn.Module) -> Lap:
        model.zero_grad()
        loss = model(x)
        job.clock.finish()
        start = job.clock.mark()
        loss.backward()
        return Lap(start, job.clock.mark())

    def run() -> list[Lap]:
        laps = [backward(wrapped), backward(plain)]
        if back:
            log = logged(wrapped)
            laps.append(difference(log.overlap_s, log.comm_s))
        return laps

    return run


def difference(less_s: float, more_s: float) -> Lap:
    """What one took more than the other; not less than nothing, where one was disturbed."""
    return Lap(less_s, max(less_s, more_s))


def _layers_in_ddp(task: Task, job: Job) -> tuple[DistributedDataParallel, Tensor]:
    """A task's layers under DDP over this rank alone, so that nothing is sent; and their input."""
    size_bytes, parameters = task.first.size_bytes, task.first.parameters
    width = math.isqrt(size_bytes // (4 * (parameters // 2))) if size_bytes else _SMALL
    layers = _Layers(parameters, width).to(job.device)
    x = torch.ones(_BATCH_OF_LAYERS, width, device=job.device)
    return DistributedDataParallel(layers, process_group=alone()), x


def copies_in_round(task: Task, job: Job) -> Round:
    """DDP's hooks on weights in a backward, less those on the biases: copies of large gradients.

    Python's hooks before and after DDP's tell what that takes; they cost a weight and a bias the
    same.
    """
    model, x = _layers_in_ddp(task, job)
    looks = Looks(model.module)
    wait = all_at_once(job)

    def run() -> list[Lap]:
        model.zero_grad()
        wait()
        model(x).backward()
        taken_s = looks.taken_s().items()
        biases_s, weights_s = (
            sum(seconds for name, seconds in taken_s if name.endswith(kind))
            for kind in ("bias", "weight")
        )
        return [difference(biases_s, weights_s)]

    return run


_BUILDERS: dict[str, Callable[[Task, Job], Round]] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "reduce_scatter": _sharded,
    "all_gather": _sharded,
    "point_to_point": _point_to_point,
    "device_copy": _device_copy,
    "device_cast": _device_cast,
    "narrow_products": _narrow_products,
    "optimizer": _optimizer,
    "ddp_hook": ddp_hook_round,
    "jitter": _jitter,
    "compute": lambda task, job: InterferenceRound(task, job).run,
}
