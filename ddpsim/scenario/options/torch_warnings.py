"""Warnings of options with which torch itself stops, or does what its user does not expect."""

from __future__ import annotations

from collections.abc import Iterator

from ddpsim.scenario.ddp import Ddp
from ddpsim.scenario.device import Device


def torch_warnings(ddp: Ddp, device: Device) -> Iterator[str]:
    """One of each, as a reader must know it; all were seen with torch 2.13 on CPUs."""
    if ddp.static_graph and ddp.accumulation_steps > 1 and ddp.no_sync:
        yield (
            "ddp.static_graph: torch stops in a first step whose micro-batches are under "
            "no_sync (expect_autograd_hooks_, reducer.cpp); take that step without no_sync"
        )
    if ddp.zero.counts_in_hooks:
        yield (
            f"ddp.deepspeed.version: in {ddp.zero.version} the hook of each gradient counts all "
            "parameters, on the host (DeepSpeed#7886); 0.18.7 and newer do not"
        )
    if ddp.overlaps_optimizer:
        steps = "three" if ddp.static_graph else "two"
        yield (
            f"ddp.zero1.overlap_with_ddp: the first {steps} steps update no parameters, until "
            "torch knows the rebuilt buckets (ddp_zero_hook.py)"
        )
    if ddp.mixed_precision:
        steps = "first two backwards" if ddp.static_graph else "first backward"
        yield (
            "ddp.mixed_precision: torch 2.13 reduces memory that holds no gradient in the "
            f"{steps}, until the buckets are rebuilt (set_mixed_precision_param_dtype, reducer.cpp)"
        )
    if ddp.sent_dtype == "bfloat16" and device.kind == "cpu":
        yield (
            "ddp.comm_hook: a torch that is built for CPUs alone refuses bf16_compress "
            "(distributed.py); fp16_compress sends as little"
        )
    if ddp.powers and ddp.powers.batched:
        yield (
            "ddp.power_sgd.batched: batched_powerSGD_hook of torch 2.13 stops in an "
            "AssertionError (_orthogonalize wants three dimensions); mend it to use it"
        )


def unused_by_data_parallel(ddp: Ddp) -> Iterator[str]:
    """A warning of options that DataParallel, which has no reducer and no no_sync, leaves alone."""
    keys = ("bucket_cap_mb", "bucket_order", "broadcast_buffers", "no_sync", "optimize_ddp")
    usual = type(ddp).model_fields
    stated = [f"ddp.{key}" for key in keys if getattr(ddp, key) != usual[key].default]
    if stated:
        verb = "has" if len(stated) == 1 else "have"
        yield f"{', '.join(stated)} {verb} no effect: DataParallel has none of DDP's options"
