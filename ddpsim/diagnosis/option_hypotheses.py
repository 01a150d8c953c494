"""Causes in what the training script or its environment asks for, as in `hypotheses`."""

from __future__ import annotations

from collections.abc import Callable

from ddpsim.diagnosis import own_work
from ddpsim.diagnosis.case import Case, Change
from ddpsim.diagnosis.hypothesis import Hypothesis
from ddpsim.units import format_duration

__all__ = ["DEBUGGING", "OPTIONS", "set_to"]


def set_to(*settings: str) -> Callable[[Case, float], Change]:
    """A change that is the same in every case, whatever the size."""
    return lambda _case, _size: Change(settings)


OPTIONS = (
    Hypothesis(
        "unused_parameters",
        4.0,
        "find_unused_parameters=True is left on",
        "pass find_unused_parameters=False, or static_graph=True where the graph stays the same",
        own_work.find_unused,
        set_to("ddp.find_unused_parameters=true"),
        graded=False,
        signs={"code": "find_unused_parameters=True"},
        shows={"unused parameters": "looked for"},
    ),
    Hypothesis(
        "without_no_sync",
        6.0,
        "every micro-batch reduces its gradients: accumulation without no_sync",
        "wrap all micro-batches but the last in model.no_sync()",
        own_work.every_micro_batch,
        set_to("ddp.no_sync=false"),
        graded=False,
        signs={"code": "backward of all micro-batches outside no_sync()"},
        shows={"micro-batches that reduce": "all"},
    ),
    Hypothesis(
        "small_buckets",
        1.0,
        "buckets are small: bucket_cap_mb=1",
        "leave bucket_cap_mb out, or see ddpsim tune",
        own_work.small_buckets,
        set_to("ddp.bucket_cap_mb=1"),
        graded=False,
        signs={"code": "bucket_cap_mb is set"},
        shows={"all-reduces of gradients": "many"},
    ),
    Hypothesis(
        "stale_buckets",
        1.0,
        "buckets keep the order of the first step: later gradients come in another one",
        "let the first step run all layers as later ones do; where layers vary from step to step, "
        "register modules in the order of the forward",
        own_work.rebuilt_buckets,
        set_to("ddp.bucket_order=reversed"),
        graded=False,
        signs={"ddp_logging": "gradients of the first bucket come last"},
        shows={"the first all-reduce": "after the last gradient"},
    ),
    Hypothesis(
        "no_overlap",
        3.0,
        "no communication overlaps the backward: all gradients are reduced after it",
        "leave bucket_cap_mb as it is; turn off CUDA_LAUNCH_BLOCKING and host syncs in backward "
        "hooks; leave torch._dynamo.config.optimize_ddp on",
        own_work.nothing_overlaps,
        set_to("ddp.bucket_cap_mb=100000"),
        graded=False,
        signs={"code": "a large bucket_cap_mb, or a sync in a hook"},
        shows={
            "all-reduces of gradients": "one",
            "the first all-reduce": "after the last gradient",
        },
    ),
    Hypothesis(
        "sync_batch_norm",
        0.5,  # it is written in the owner's own code
        "batch norms take their statistics from all ranks: nn.SyncBatchNorm",
        "leave out convert_sync_batchnorm where a rank's batch is large enough",
        own_work.own_statistics,
        set_to("workload.sync_batch_norm=true"),
        graded=False,
        signs={"code": "convert_sync_batchnorm"},
    ),
    Hypothesis(
        "data_parallel",
        3.0,
        "the model is wrapped in nn.DataParallel: one process feeds all GPUs",
        "start the job with torchrun and wrap the model in DistributedDataParallel",
        own_work.of_data_parallel,
        set_to("cluster.algorithm=data_parallel"),
        graded=False,
        signs={"code": "nn.DataParallel", "nccl_log": "one process alone"},
    ),
    Hypothesis(
        "hook_missing",
        2.0,
        "the communication hook is not registered: gradients travel in full",
        "call model.register_comm_hook after wrapping the model",
        lambda case: own_work.switch(case.scenario.ddp.sent_dtype is not None),
        set_to("ddp.comm_hook=none"),
        graded=False,
        signs={"code": "no register_comm_hook"},
    ),
    Hypothesis(
        "shared_weights",
        1.0,
        "torch is older than 1.9: a shared weight is in the first bucket too, and ready last",
        "update torch, or pass find_unused_parameters=False",
        own_work.shared_weights,
        set_to("ddp.torch='1.7'"),
        graded=False,
        signs={"code": "torch is older than 1.9"},
        shows={"the first all-reduce": "after the last gradient"},
    ),
    Hypothesis(
        "counting_hooks",
        4.0,
        "DeepSpeed is 0.18.5 or 0.18.6: the hook of each gradient counts all parameters",
        "update DeepSpeed to 0.18.7 or newer",
        lambda case: own_work.switch(
            case.scenario.ddp.strategy == "deepspeed" and not case.scenario.ddp.zero.counts_in_hooks
        ),
        set_to("ddp.deepspeed.version='0.18.6'"),
        graded=False,
        signs={"code": "DeepSpeed is 0.18.5 or 0.18.6"},
        shows=own_work.LONGER,
    ),
)

DEBUGGING = (
    Hypothesis(
        "anomaly_mode",
        0.6,
        "autograd's anomaly mode is on: each operator records a stack, each gradient is awaited",
        "drop torch.autograd.set_detect_anomaly and detect_anomaly (Trainer: detect_anomaly=False)",
        own_work.no_anomaly_mode,
        set_to("workload.debug.detect_anomaly=true"),
        graded=False,
        signs={
            "code": "detect_anomaly",
            "gpu_state": "utilization below 90 %",
            "per_rank": "longer on all ranks",
        },
        shows={"values that the host waits for": "in every step", **own_work.LONGER},
    ),
    Hypothesis(
        "distributed_debug",
        1.0,
        "TORCH_DISTRIBUTED_DEBUG=DETAIL: ranks meet over gloo before each collective",
        "unset TORCH_DISTRIBUTED_DEBUG, or set it to OFF",
        own_work.unchecked_collectives,
        set_to("workload.debug.distributed_detail=true"),
        graded=False,
        signs={"environment": "TORCH_DISTRIBUTED_DEBUG=DETAIL"},
    ),
    Hypothesis(
        "nccl_debug",
        0.5,
        "NCCL logs every collective: a line takes the host {size}",
        "unset NCCL_DEBUG_SUBSYS (NCCL_DEBUG=INFO alone logs nothing in a step), or write the log "
        "to a local disk with NCCL_DEBUG_FILE",
        own_work.unlogged_collectives,
        own_work.logged_collectives,
        format_duration,
        falls=1.0,
        signs={"environment": "NCCL_DEBUG_SUBSYS", "nccl_log": "opCount in a line per collective"},
        shows={"collectives in the log": "each"},
    ),
)
