"""Causes in what the training script or its environment asks for."""

from __future__ import annotations

from collections.abc import Sequence

from ddpsim.diagnosis.case import Case, Change
from ddpsim.diagnosis.hypothesis import FactName, Hypothesis, switch
from ddpsim.diagnosis.own_work import LONGER
from ddpsim.units import format_duration


def _reduces(case: Case) -> bool:
    """Whether several ranks send DDP's buckets."""
    return case.is_ddp and case.cluster.world_size > 1


def _rebuilds_buckets(case: Case) -> bool:
    """Whether DDP rebuilds its buckets in the order of the first step's gradients."""
    ddp = case.scenario.ddp
    rebuilds = not ddp.finds_unused and ddp.torch != "1.4"
    return _reduces(case) and rebuilds and ddp.bucket_order == "ready"


def _has_norms_of_its_own(case: Case) -> bool:
    """Whether a zoo model's batch norms take their statistics from each rank alone."""
    workload = case.scenario.workload
    return _reduces(case) and bool(workload.model) and not workload.sync_batch_norm


def _could_be_data_parallel(case: Case) -> bool:
    """Whether DDP on one node could be DataParallel."""
    cluster, ddp = case.cluster, case.scenario.ddp
    alone = cluster.nodes == 1 < cluster.gpus_per_node and ddp.accumulation_steps == 1
    return alone and case.is_ddp and cluster.algorithm == "auto" and ddp.backend == "nccl"


def _debugs(case: Case, option: str) -> bool:
    """Whether the scenario states a debug setting."""
    debug = case.scenario.workload.debug
    return bool(debug and getattr(debug, option))


def _line_times_s(case: Case) -> Sequence[float]:
    """What a line takes: to a file on a disk, to a terminal, to a file system that is far away."""
    logs = case.scenario.ddp.backend != "nccl" or _debugs(case, "nccl_line_s")
    return () if logs or case.cluster.world_size == 1 else (1e-4, 1e-3, 1e-2)


OPTIONS = (
    switch(
        "unused_parameters",
        4.0,
        "find_unused_parameters=True is left on",
        "pass find_unused_parameters=False, or static_graph=True where the graph stays the same",
        lambda case: case.is_ddp and not case.scenario.ddp.find_unused_parameters,
        "ddp.find_unused_parameters=true",
        signs={"code": "find_unused_parameters=True"},
        shows={FactName.UNUSED: "looked for"},
    ),
    switch(
        "without_no_sync",
        6.0,
        "every micro-batch reduces its gradients: accumulation without no_sync",
        "wrap all micro-batches but the last in model.no_sync()",
        lambda case: (
            case.is_ddp and case.scenario.ddp.accumulation_steps > 1 and case.scenario.ddp.no_sync
        ),
        "ddp.no_sync=false",
        signs={"code": "backward of all micro-batches outside no_sync()"},
        shows={FactName.REDUCING: "all"},
    ),
    switch(
        "small_buckets",
        1.0,
        "buckets are small: bucket_cap_mb=1",
        "leave bucket_cap_mb out, or see ddpsim tune",
        lambda case: case.is_ddp and case.scenario.ddp.bucket_cap_mb is None,
        "ddp.bucket_cap_mb=1",
        signs={"code": "bucket_cap_mb is set"},
        shows={FactName.BUCKETS: "many"},
    ),
    switch(
        "stale_buckets",
        1.0,
        "buckets keep the order of the first step: later gradients come in another one",
        "let the first step run all layers as later ones do; where layers vary from step to step, "
        "register modules in the order of the forward",
        _rebuilds_buckets,
        "ddp.bucket_order=reversed",
        signs={"ddp_logging": "gradients of the first bucket come last"},
        shows={FactName.FIRST: "after the last gradient"},
    ),
    switch(
        "no_overlap",
        3.0,
        "no communication overlaps the backward: all gradients are reduced after it",
        "leave bucket_cap_mb as it is; turn off CUDA_LAUNCH_BLOCKING and host syncs in backward "
        "hooks; leave torch._dynamo.config.optimize_ddp on",
        _reduces,
        "ddp.bucket_cap_mb=100000",
        signs={"code": "a large bucket_cap_mb, or a sync in a hook"},
        shows={FactName.BUCKETS: "one", FactName.FIRST: "after the last gradient"},
    ),
    switch(
        "sync_batch_norm",
        0.5,  # it is written in the owner's own code
        "batch norms take their statistics from all ranks: nn.SyncBatchNorm",
        "leave out convert_sync_batchnorm where a rank's batch is large enough",
        _has_norms_of_its_own,
        "workload.sync_batch_norm=true",
        signs={"code": "convert_sync_batchnorm"},
    ),
    switch(
        "data_parallel",
        3.0,
        "the model is wrapped in nn.DataParallel: one process feeds all GPUs",
        "start the job with torchrun and wrap the model in DistributedDataParallel",
        _could_be_data_parallel,
        "cluster.algorithm=data_parallel",
        signs={"code": "nn.DataParallel", "nccl_log": "one process alone"},
    ),
    switch(
        "hook_missing",
        2.0,
        "the communication hook is not registered: gradients travel in full",
        "call model.register_comm_hook after wrapping the model",
        lambda case: case.scenario.ddp.sent_dtype is not None,
        "ddp.comm_hook=none",
        signs={"code": "no register_comm_hook"},
    ),
    switch(
        "shared_weights",
        1.0,
        "torch is older than 1.9: a shared weight is in the first bucket too, and ready last",
        "update torch, or pass find_unused_parameters=False",
        lambda case: (
            case.is_ddp
            and case.scenario.ddp.finds_unused
            and case.job.model.tied
            and not case.scenario.ddp.is_torch_1
        ),
        "ddp.torch='1.7'",
        signs={"code": "torch is older than 1.9"},
        shows={FactName.FIRST: "after the last gradient"},
    ),
    switch(
        "counting_hooks",
        4.0,
        "DeepSpeed is 0.18.5 or 0.18.6: the hook of each gradient counts all parameters",
        "update DeepSpeed to 0.18.7 or newer",
        lambda case: (
            case.scenario.ddp.strategy == "deepspeed" and not case.scenario.ddp.zero.counts_in_hooks
        ),
        "ddp.deepspeed.version='0.18.6'",
        signs={"code": "DeepSpeed is 0.18.5 or 0.18.6"},
        shows=LONGER,
    ),
)

DEBUGGING = (
    switch(
        "anomaly_mode",
        0.6,
        "autograd's anomaly mode is on: each operator records a stack, each gradient is awaited",
        "drop torch.autograd.set_detect_anomaly and detect_anomaly (Trainer: detect_anomaly=False)",
        lambda case: case.scenario.workload.model and not _debugs(case, "detect_anomaly"),
        "workload.debug.detect_anomaly=true",
        signs={
            "code": "detect_anomaly",
            "gpu_state": "utilization below 90 %",
            "per_rank": "longer on all ranks",
        },
        shows={FactName.READS: "in every step", **LONGER},
    ),
    switch(
        "distributed_debug",
        1.0,
        "TORCH_DISTRIBUTED_DEBUG=DETAIL: ranks meet over gloo before each collective",
        "unset TORCH_DISTRIBUTED_DEBUG, or set it to OFF",
        lambda case: case.cluster.world_size > 1 and not _debugs(case, "distributed_detail"),
        "workload.debug.distributed_detail=true",
        signs={"environment": "TORCH_DISTRIBUTED_DEBUG=DETAIL"},
    ),
    Hypothesis(
        "nccl_debug",
        0.5,
        "NCCL logs every collective: a line takes the host {size}",
        "unset NCCL_DEBUG_SUBSYS (NCCL_DEBUG=INFO alone logs nothing in a step), or write the log "
        "to a local disk with NCCL_DEBUG_FILE",
        _line_times_s,
        lambda _case, seconds: Change((f"workload.debug.nccl_line={1e6 * seconds:.4g} us",)),
        format_duration,
        falls=1.0,
        signs={"environment": "NCCL_DEBUG_SUBSYS", "nccl_log": "opCount in a line per collective"},
        shows={FactName.LOGGED: "each"},
    ),
)
