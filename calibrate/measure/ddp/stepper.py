"""One step of a training loop or of the bare model, timed part by part; what DDP says of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from calibrate.measure.clock import Mark
from calibrate.measure.ddp.loops import loop_of
from calibrate.measure.host.machine import stolen_s
from calibrate.measure.model.training import Training, reduced_parameters
from calibrate.records.record import Layout
from calibrate.records.rounds import Logged, Steps
from calibrate.records.variant import DDP, Variant

PARTS = tuple(Steps.model_fields)  # in the order in which `step` returns them
Row = tuple[float, ...]


class Stepper:
    """One variant over a model of its own, and its rows of seconds by iteration.

    Over all ranks, or, with DDP, those of `group`. DDP may be told to find unused parameters.
    """

    def __init__(
        self,
        bare: Training,
        variant: Variant,
        layout: Layout,
        *,
        find_unused_parameters: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.variant = variant
        if find_unused_parameters and variant.strategy in DDP:
            variant = variant.model_copy(update={"find_unused_parameters": True})
        self._loop = loop_of(bare, variant, layout, group)
        if self._loop.ddp:
            start_log(self._loop.ddp)
        self.warmups: list[Row] = []
        self.rows: list[Row] = []  # the parts, then the logged times of DDP

    def step(self, begin: Callable[[], None], *, warm: bool) -> None:
        """One iteration, as `step` takes it; those before it that are not timed are lost."""
        loop, variant = self._loop, self.variant
        no_sync = loop.no_sync if variant.no_sync else None
        for _ in range(loop.untimed_steps + 1):
            row = step(
                loop.training, variant.accumulation_steps, no_sync, begin, reduce=loop.reduce
            )
        if loop.ddp:
            log = logged(loop.ddp)
            row = (*row, *(getattr(log, name) for name in Logged.model_fields))
        (self.warmups if warm else self.rows).append(row)

    def backwards_s(self) -> list[float]:
        """Seconds of each backward without what DDP does at its end: it waits, and copies back."""
        backward = PARTS.index("backward_s")
        return [row[backward] - (comm_s - overlap_s) for *row, comm_s, overlap_s in self.rows]

    def bucket_bytes(self) -> tuple[int, ...]:
        """Sizes of what is reduced together, in the order in which it is; none of fully_shard."""
        return logged(self._loop.ddp).bucket_bytes if self._loop.ddp else self._loop.sent_bytes

    @property
    def units(self) -> tuple[str, ...]:
        """Modules that fully_shard shards on their own."""
        return self._loop.units


def step(
    training: Training,
    micro_batches: int,
    no_sync: Callable[[], Any] | None,
    begin: Callable[[], None],
    before_optimizer: Callable[[Training], None] | None = None,
    reduce: Callable[[], object] = lambda: None,
) -> Row:
    """Seconds of one iteration: whole, forward, backward, optimizer; and what was stolen of it.

    All ranks `begin` at once. All micro-batches but the last are within `no_sync`, if there is one;
    `reduce` belongs to the backward of the others. What comes before the optimizer does not count.
    """
    clock, parts = training.clock, list[tuple[Mark, Mark, Mark]]()
    stolen_before_s = stolen_s()  # which takes milliseconds on a machine of many cores
    begin()
    start = clock.mark()
    for i in range(micro_batches):
        if no_sync is None or i == micro_batches - 1:
            parts.append(training.passes(reduce))
            continue
        with no_sync():
            parts.append(training.passes())
    computed = resumed = clock.mark()
    if before_optimizer:
        stolen_before_s -= stolen_s()
        before_optimizer(training)
        stolen_before_s += stolen_s()
        resumed = clock.mark()
    training.update()
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


class Log(NamedTuple):
    """The last iteration, as `calibrate.records.rounds.Logged` has it, and the buckets in use.

    `bucket_bytes` are in the order in which buckets are reduced.
    """

    forward_s: float
    backward_compute_s: float
    comm_s: float
    overlap_s: float
    bucket_bytes: tuple[int, ...]


class _LaterLogger:
    """DDP's logger, which sums up an iteration when `logged` asks for it and not before.

    DDP does so as the next forward begins, for one iteration in a hundred. Were it done for each,
    every forward would take longer, by 0.2 to 0.3 us a parameter.
    """

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)

    def set_runtime_stats_and_log(self) -> None:
        """What DDP calls in each forward."""

    def sum_up(self) -> None:
        self._logger.set_runtime_stats_and_log()


def start_log(ddp: DistributedDataParallel) -> None:
    """Have DDP log every iteration, at no cost to its forward; one in a hundred is its default."""
    ddp._set_ddp_runtime_logging_sample_rate(1)  # type: ignore[no-untyped-call]  # noqa: SLF001
    ddp.logger = _LaterLogger(ddp.logger)


def logged(ddp: DistributedDataParallel) -> Log:
    """The last iteration of one whose log was started; 0 s and no buckets if DDP says nothing."""
    ddp.logger.sum_up()  # type: ignore[union-attr]
    found: Mapping[str, Any] = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]  # noqa: SLF001

    def seconds(key: str) -> float:
        return float(found.get(key, 0)) * 1e-9

    sizes = str(found.get("rebuilt_bucket_sizes") or found.get("bucket_sizes", ""))
    return Log(
        forward_s=seconds("forward_compute_time"),
        backward_compute_s=seconds("backward_compute_time"),
        comm_s=seconds("backward_comm_time"),
        overlap_s=seconds("backward_compute_comm_overlap_time"),
        bucket_bytes=tuple(int(size) for size in sizes.split(",") if size.strip()),
    )
