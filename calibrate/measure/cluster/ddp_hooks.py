"""DDP's hooks and copies into buckets, timed on layers of a size."""

from __future__ import annotations

import math
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from calibrate.measure.clock import Lap
from calibrate.measure.cluster.plan import Task
from calibrate.measure.cluster.work import Round, all_at_once
from calibrate.measure.ddp.stepper import logged, start_log
from calibrate.measure.model.ddp_alone import Looks, alone
from calibrate.measure.ranks.job import Job
from calibrate.records.record import COPIES_BACK, COPIES_IN

_SMALL = 16  # width of a layer whose bytes hardly count
_BATCH_OF_LAYERS = 256


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
