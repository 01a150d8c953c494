"""Causes in a rank's own work: compute, host, data, options; as in `links`, sizes and changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from ddpsim.diagnosis.case import Case, Change
from ddpsim.scenario.workload import Precision

__all__ = [
    "LONGER",
    "batches",
    "busy_hosts",
    "eager",
    "every_micro_batch",
    "find_unused",
    "late_batches",
    "logged_collectives",
    "no_anomaly_mode",
    "nothing_overlaps",
    "of_data_parallel",
    "other_batch",
    "other_precision",
    "own_statistics",
    "precision_of",
    "precisions",
    "rebuilt_buckets",
    "shared_loader",
    "shared_weights",
    "slow_hosts",
    "slow_loader",
    "slow_rank",
    "slow_ranks",
    "small_buckets",
    "switch",
    "throttled",
    "throttled_ranks",
    "unchecked_collectives",
    "unlogged_collectives",
    "unread_losses",
]

LONGER = {"work of a rank": "longer"}  # what traces show where all ranks compute longer
_PRECISIONS: tuple[str, ...] = get_args(Precision)
_LATE = (1.05, 2.0, 5.0, 12.0)  # a batch's time, of the predicted step
_BATCHES = (0.25, 0.5, 2.0, 4.0)
_WORKERS = 4


def slow_ranks(case: Case) -> Sequence[float]:
    """How many times as long one rank computes, of those that otherwise are alike."""
    known = case.cluster.stragglers
    drawn = known is not None and known.factors is None
    return (1.1, 1.5, 2.5, 8.0) if case.whole and case.cluster.world_size > 1 and not drawn else ()


def slow_rank(case: Case, times: float) -> Change:
    """The last one; jobs on fewer GPUs are without it."""
    last = case.cluster.world_size - 1
    known = (case.cluster.stragglers and case.cluster.stragglers.factors) or {}
    factor = min(1000.0, times * known.get(last, 1.0))
    return Change((f"cluster.stragglers.factors.{last}={factor:.4g}",))


def throttled_ranks(case: Case) -> Sequence[float]:  # noqa: ARG001 -- any scenario's
    """How many times as long every rank computes."""
    return (1.1, 1.4, 2.0, 3.0)


def throttled(case: Case, times: float) -> Change:  # noqa: ARG001 -- of all changes
    """All GPUs alike."""
    return Change(factors={"compute": times})


def slow_hosts(case: Case) -> Sequence[float]:
    """How many times as long hosts launch, where launches are estimated."""
    is_gpu = case.cluster.device.kind == "gpu"
    return (1.5, 3.0, 6.0, 12.0) if is_gpu and case.is_estimated else ()


def busy_hosts(case: Case, times: float) -> Change:  # noqa: ARG001 -- of all changes
    """All that a host does."""
    return Change(factors={"host": times})


def unread_losses(case: Case) -> Sequence[float]:
    """Where a GPU's host runs ahead from step to step, as far as stated."""
    is_gpu = case.cluster.device.kind == "gpu"
    return switch(is_gpu and case.scenario.workload.read_loss_every is None)


def precisions(case: Case) -> Sequence[float]:
    """The others that the device has, by number, where compute is estimated."""
    if not case.is_estimated:
        return ()
    stated, known = case.scenario.workload.precision, case.cluster.device.peak_flops_per_s
    others = [name for name in _PRECISIONS if name != stated and name.split("-")[-1] in known]
    return [1.0 + _PRECISIONS.index(name) for name in others]


def other_precision(case: Case, number: float) -> Change:  # noqa: ARG001 -- of all changes
    """One of them, by its number."""
    return Change((f"workload.precision={precision_of(number)}",))


def precision_of(number: float) -> str:
    """The name of a precision, of which the first has number 1."""
    return _PRECISIONS[round(number) - 1]


def batches(case: Case) -> Sequence[float]:
    """Parts and multiples of the stated batch; by the ranks too, a global batch taken for one."""
    ranks = case.cluster.world_size
    return sorted({*_BATCHES, 1.0 / ranks, float(ranks)} - {1.0})


def other_batch(case: Case, times: float) -> Change:
    """A measured step grows with its samples (assumed)."""
    batch = max(1, round(case.scenario.workload.batch_per_rank * times))
    if case.is_estimated:
        return Change((f"workload.batch_per_rank={batch}",))
    return Change(factors={"compute": times})


def late_batches(case: Case) -> Sequence[float]:
    """Samples per second of one rank's loader, too few for the predicted step."""
    samples = case.job.samples_per_rank
    return [samples / (late * case.step_s) for late in _LATE]


def slow_loader(case: Case, rate: float) -> Change:
    """A loader of that rate on each rank."""
    known = case.scenario.workload.data
    said = f"{rate:.6g} samples/s"
    if known:
        return Change((f"workload.data.rate={said}",))
    return Change((f"workload.data={{rate: {said}, workers: {_WORKERS}}}",))


def shared_loader(case: Case, rate: float) -> Change:
    """Loaders that share a node's cores, disk or network: `rate` of them all."""
    return slow_loader(case, rate / case.cluster.gpus_per_node)


def switch(applies: bool) -> Sequence[float]:  # noqa: FBT001 -- a fact
    """The one size of a cause that is there or not."""
    return (1.0,) if applies else ()


def find_unused(case: Case) -> Sequence[float]:
    """Where DDP does not look for unused parameters, as far as stated."""
    return switch(case.is_ddp and not case.scenario.ddp.find_unused_parameters)


def every_micro_batch(case: Case) -> Sequence[float]:
    """Where gradients are accumulated under no_sync."""
    ddp = case.scenario.ddp
    return switch(case.is_ddp and ddp.accumulation_steps > 1 and ddp.no_sync)


def small_buckets(case: Case) -> Sequence[float]:
    """Where buckets are torch's own."""
    return switch(case.is_ddp and case.scenario.ddp.bucket_cap_mb is None)


def shared_weights(case: Case) -> Sequence[float]:
    """Asked where DDP looks for unused parameters of a model that ties weights."""
    ddp = case.scenario.ddp
    return switch(
        case.is_ddp and ddp.finds_unused and bool(case.job.model.tied and not ddp.is_torch_1)
    )


def nothing_overlaps(case: Case) -> Sequence[float]:
    """Where buckets are sent during the backward."""
    return switch(case.is_ddp and case.cluster.world_size > 1)


def own_statistics(case: Case) -> Sequence[float]:
    """Where a zoo model's batch norms take them from each rank alone."""
    workload = case.scenario.workload
    synced = workload.sync_batch_norm or case.cluster.world_size == 1
    return switch(case.is_ddp and bool(workload.model) and not synced)


def of_data_parallel(case: Case) -> Sequence[float]:
    """Where DDP on one node could be DataParallel."""
    cluster, ddp = case.cluster, case.scenario.ddp
    alone = cluster.nodes == 1 < cluster.gpus_per_node and ddp.accumulation_steps == 1
    return switch(alone and case.is_ddp and cluster.algorithm == "auto" and ddp.backend == "nccl")


def eager(case: Case) -> Sequence[float]:
    """Where a zoo model with tokens is estimated with fused attention."""
    workload = case.scenario.workload
    return switch(case.is_estimated and workload.attention != "eager" and bool(workload.model))


def rebuilt_buckets(case: Case) -> Sequence[float]:
    """Where DDP rebuilds its buckets in the order of the first step's gradients."""
    ddp = case.scenario.ddp
    rebuilds = case.is_ddp and not ddp.finds_unused and ddp.torch != "1.4"
    return switch(rebuilds and ddp.bucket_order == "ready" and case.cluster.world_size > 1)


def no_anomaly_mode(case: Case) -> Sequence[float]:
    """Where a zoo model's operators are known, and autograd does not watch them."""
    debug = case.scenario.workload.debug
    return switch(bool(case.scenario.workload.model) and not (debug and debug.detect_anomaly))


def unchecked_collectives(case: Case) -> Sequence[float]:
    """Where ranks do not compare what they are about to send."""
    debug = case.scenario.workload.debug
    return switch(case.cluster.world_size > 1 and not (debug and debug.distributed_detail))


def unlogged_collectives(case: Case) -> Sequence[float]:
    """What a line takes: to a file on a disk, to a terminal, to a file system that is far away."""
    debug = case.scenario.workload.debug
    logs = case.scenario.ddp.backend != "nccl" or (debug and debug.nccl_line_s)
    return () if logs or case.cluster.world_size == 1 else (1e-4, 1e-3, 1e-2)


def logged_collectives(case: Case, seconds: float) -> Change:  # noqa: ARG001 -- of all changes
    """One line for each."""
    return Change((f"workload.debug.nccl_line={1e6 * seconds:.4g} us",))
