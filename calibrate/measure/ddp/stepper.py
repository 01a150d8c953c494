"""One step of DDP or of the bare model, timed part by part."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from calibrate.measure.clock import Mark
from calibrate.measure.ddp.log import logged, start_log
from calibrate.measure.errors import MeasureError
from calibrate.measure.host.machine import stolen_s
from calibrate.measure.model.training import Training, reduced_parameters
from calibrate.records.rounds import Logged, Steps, Variant

__all__ = [
    "PARTS",
    "ReducedAsByDdp",
    "Row",
    "Stepper",
    "step",
]

PARTS = tuple(Steps.model_fields)  # in the order in which `step` returns them
Row = tuple[float, ...]


class Stepper:
    """One variant of DDP over a model of its own, and its rows of seconds by iteration.

    Over all ranks, or those of `group`.
    """

    def __init__(
        self,
        bare: Training,
        variant: Variant,
        *,
        find_unused_parameters: bool,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.variant = variant
        own = bare.again()
        # every rank makes the same weights: init_sync would only send them once more
        self._ddp = DistributedDataParallel(
            own.model,
            process_group=group,
            bucket_cap_mb=variant.bucket_cap_mb,
            init_sync=False,
            find_unused_parameters=find_unused_parameters,
        )
        start_log(self._ddp)
        if variant.comm_hook != "none":
            _register(self._ddp, variant.comm_hook)
        self._training = replace(own, model=self._ddp)
        self.warmups: list[Row] = []
        self.rows: list[Row] = []  # the parts, then the logged times

    def step(self, begin: Callable[[], None], *, warm: bool) -> None:
        """One iteration, as `step` takes it."""
        micro_batches = self.variant.accumulation_steps
        row = step(self._training, micro_batches, self._ddp.no_sync, begin)
        log = logged(self._ddp)
        times = (getattr(log, name) for name in Logged.model_fields)
        (self.warmups if warm else self.rows).append((*row, *times))

    def backwards_s(self) -> list[float]:
        """Seconds of each backward without what DDP does at its end: it waits, and copies back."""
        backward = PARTS.index("backward_s")
        return [row[backward] - (comm_s - overlap_s) for *row, comm_s, overlap_s in self.rows]

    def bucket_bytes(self) -> tuple[int, ...]:
        """Sizes of the buckets in use, in the order in which they are reduced."""
        return logged(self._ddp).bucket_bytes


def _register(ddp: DistributedDataParallel, name: str) -> None:
    try:
        ddp.register_comm_hook(None, getattr(default_hooks, f"{name}_hook"))
    except TypeError as error:  # torch takes no bf16_compress but with NCCL
        raise MeasureError(f"the hook {name} cannot be measured here (torch: {error})") from None


def step(
    training: Training,
    micro_batches: int,
    no_sync: Callable[[], Any],
    begin: Callable[[], None],
    before_optimizer: Callable[[Training], None] | None = None,
) -> Row:
    """Seconds of one iteration: whole, forward, backward, optimizer; and what was stolen of it.

    All ranks `begin` at once. What comes before the optimizer does not count.
    """
    clock, parts = training.clock, list[tuple[Mark, Mark, Mark]]()
    stolen_before_s = stolen_s()  # which takes milliseconds on a machine of many cores
    begin()
    start = clock.mark()
    for i in range(micro_batches):
        with nullcontext() if i == micro_batches - 1 else no_sync():
            first = clock.mark()
            loss = training.forward()
            second = clock.mark()
            loss.backward()  # type: ignore[no-untyped-call]
            parts.append((first, second, clock.mark()))
    computed = resumed = clock.mark()
    if before_optimizer:
        stolen_before_s -= stolen_s()
        before_optimizer(training)
        stolen_before_s += stolen_s()
        resumed = clock.mark()
    training.optimizer.step()
    training.optimizer.zero_grad()
    end = clock.mark()
    # read at the end: on a GPU each reading waits, and a step does not
    forward_s = sum(clock.seconds(first, second) for first, second, _ in parts)
    backward_s = sum(clock.seconds(second, third) for _, second, third in parts)
    optimizer_s = clock.seconds(resumed, end)
    whole_s = clock.seconds(start, computed) + optimizer_s
    return whole_s, forward_s, backward_s, optimizer_s, stolen_s() - stolen_before_s


class ReducedAsByDdp:
    """What an optimizer finds behind it under DDP: the ranks met, and the gradients copied back.

    Its core's memory is slower to it after the wait, and its caches hold what was copied last.
    """

    def __init__(self, bare: Training, wait: Callable[[], object]) -> None:
        self._wait = wait
        self._buckets = [
            torch.zeros_like(parameter) for parameter in reduced_parameters(bare.model).values()
        ]

    @torch.no_grad()
    def __call__(self, training: Training) -> None:
        """Copy the dense gradients into buckets, wait for the other ranks, and copy them back."""
        parameters = reduced_parameters(training.model).values()
        dense = [
            (parameter.grad, bucket)
            for parameter, bucket in zip(parameters, self._buckets, strict=True)
            if parameter.grad is not None and not parameter.grad.is_sparse
        ]
        dense.reverse()  # as the last layers' are reduced first
        for gradient, bucket in dense:
            bucket.copy_(gradient)
        self._wait()
        for gradient, bucket in dense:
            gradient.copy_(bucket)
