"""Collectives that real training loops call: run as rank 0 and 1 of a gloo job, writes JSON.

python tests/helpers/oracles/strategy_oracle.py 2 STORE_FILE OUTPUT
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from cpu_synced_norm import CpuSyncBatchNorm, synced
from ddp_oracle import MODELS as PLAIN
from hooked_loops import (
    FRACTION,
    DdpMixed,
    DdpMixedStatic,
    DdpOptimizesInHook,
    DdpPowerSgd,
    DdpPowerSgd2,
    DdpPowerSgd3,
    DdpPowerSgdBatched,
    DdpPowerSgdHalf,
    DdpQuantised,
    DdpQuantisedChannels,
    DdpTopK,
    Zero1InShards,
    Zero1Interleaved,
    Zero1Overlapped,
)
from logged_calls import Calls, logged
from torch import nn
from training_loops import (
    EVERY,
    STEPS,
    Ddp,
    DdpJoined,
    DdpPostLocal,
    DdpPostLocalAlone,
    DdpReducedAfter,
    DdpReducedInHooks,
    DdpSynced,
    LocalSgd,
    Loop,
    Naive,
    NaiveFlat,
    NaiveGroups,
    PerParameter,
    PerParameterBlocking,
    PerParameterSynced,
    Server,
    Servers,
    Zero1,
    Zero1InOne,
)
from two_ranks import run_as_rank

FEW_STEPS = 3  # DDP orders its buckets after the first
# loops whose steps differ later too
CHANGING = ("local_sgd", "ddp joined", "ddp post_localSGD", "ddp zero1 ", "ddp powerSGD")
CHANGING += ("ddp reduced again after",)
MODELS = PLAIN | {"synced": (synced, lambda: torch.randn(6, 64))}


LOOPS: dict[str, tuple[type[Loop], dict[str, Any]]] = {
    "naive": (Naive, {"strategy": "naive"}),
    "naive_flat": (NaiveFlat, {"strategy": "naive_flat"}),
    "naive_flat groups": (
        NaiveGroups,
        {"strategy": "naive_flat", "bucket_groups": [["2", "4.weight", "4.bias"], ["0", "1"]]},
    ),
    "per_parameter": (PerParameter, {"strategy": "per_parameter"}),
    "per_parameter synced": (PerParameterSynced, {"strategy": "per_parameter", "no_sync": False}),
    "per_parameter blocking": (
        PerParameterBlocking,
        {"strategy": "per_parameter", "per_parameter": {"async_op": False}},
    ),
    "server": (Server, {"strategy": "parameter_server"}),
    "servers": (Servers, {"strategy": "parameter_server", "parameter_server": {"servers": 2}}),
    "local_sgd": (LocalSgd, {"strategy": "local_sgd", "local_sgd": {"every": EVERY}}),
    "ddp": (Ddp, {"bucket_cap_mb": 0.2}),
    "ddp joined": (DdpJoined, {"bucket_cap_mb": 0.2, "join": True}),
    "ddp post_localSGD": (
        DdpPostLocal,
        {
            "bucket_cap_mb": 0.2,
            "comm_hook": "post_localSGD",
            "post_local_sgd": {"period": EVERY},
        },
    ),
    "ddp zero1": (Zero1, {"strategy": "zero1", "bucket_cap_mb": 0.2}),
    "ddp zero1 in one": (
        Zero1InOne,
        {
            "strategy": "zero1",
            "bucket_cap_mb": 0.2,
            "zero1": {"parameters_as_bucket_view": True},
        },
    ),
    "ddp zero1 overlapped": (
        Zero1Overlapped,
        {"strategy": "zero1", "bucket_cap_mb": 0.2, "zero1": {"overlap_with_ddp": True}},
    ),
    "ddp zero1 interleaved": (
        Zero1Interleaved,
        {
            "strategy": "zero1",
            "bucket_cap_mb": 0.2,
            "zero1": {"overlap_with_ddp": True, "hook": "hook_with_zero_step_interleaved"},
        },
    ),
    "ddp zero1 in shards": (
        Zero1InShards,
        {
            "strategy": "zero1",
            "bucket_cap_mb": 0.2,
            "static_graph": True,
            "zero1": {
                "overlap_with_ddp": True,
                "hook": "hook_with_zero_step_interleaved",
                "shard_buckets": True,
            },
        },
    ),
    "ddp powerSGD": (DdpPowerSgd, {"bucket_cap_mb": 0.2, "comm_hook": "powerSGD"}),
    "ddp powerSGD of rank 2": (
        DdpPowerSgd2,
        {
            "bucket_cap_mb": 0.2,
            "comm_hook": "powerSGD",
            "power_sgd": {"matrix_approximation_rank": 2},
        },
    ),
    "ddp powerSGD in half": (
        DdpPowerSgdHalf,
        {
            "bucket_cap_mb": 0.2,
            "comm_hook": "powerSGD",
            "power_sgd": {"matrix_approximation_rank": 3, "wrapper": "bf16_compress"},
        },
    ),
    "ddp powerSGD of rank 3": (
        DdpPowerSgd3,
        {
            "bucket_cap_mb": 0.2,
            "comm_hook": "powerSGD",
            "power_sgd": {"matrix_approximation_rank": 3},
        },
    ),
    "ddp powerSGD batched": (
        DdpPowerSgdBatched,
        {
            "bucket_cap_mb": 0.2,
            "comm_hook": "powerSGD",
            "power_sgd": {"matrix_approximation_rank": 2, "batched": True},
        },
    ),
    "ddp post_localSGD alone": (
        DdpPostLocalAlone,
        {
            "bucket_cap_mb": 0.2,
            "comm_hook": "post_localSGD",
            "post_local_sgd": {"period": EVERY, "post_local_gradient_allreduce": False},
        },
    ),
    "ddp hook quantization": (
        DdpQuantised,
        {"bucket_cap_mb": 0.2, "comm_hook": "quantization_pertensor"},
    ),
    "ddp hook quantization of channels": (
        DdpQuantisedChannels,
        {"bucket_cap_mb": 0.2, "comm_hook": "quantization_perchannel"},
    ),
    "ddp hook top_k": (
        DdpTopK,
        {"bucket_cap_mb": 0.2, "comm_hook": "top_k", "top_k": {"fraction": FRACTION}},
    ),
    "ddp hook optimizer": (
        DdpOptimizesInHook,
        {"bucket_cap_mb": 0.2, "optimizer_in_backward": True},
    ),
    "ddp mixed precision": (
        DdpMixed,
        {
            "bucket_cap_mb": 0.2,
            "no_sync": False,
            "mixed_precision": {"param": "bfloat16", "reduce": "float32", "buffer": "bfloat16"},
        },
    ),
    "ddp mixed precision, static": (
        DdpMixedStatic,
        {
            "bucket_cap_mb": 0.2,
            "no_sync": False,
            "static_graph": True,
            "mixed_precision": {"param": "bfloat16", "buffer": "bfloat16"},
        },
    ),
    "ddp reduced again in hooks": (
        DdpReducedInHooks,
        {"bucket_cap_mb": 0.2, "reduced_again": "hooks"},
    ),
    "ddp reduced again after it": (
        DdpReducedAfter,
        {"bucket_cap_mb": 0.2, "reduced_again": "after_backward", "barrier_every": EVERY},
    ),
    "ddp synced": (DdpSynced, {"bucket_cap_mb": 0.2, "no_sync": False}),
}


def ready_order(module: nn.Module, make_input: Callable[[], torch.Tensor]) -> list[int]:
    """Parameters by registration, in the order in which a backward makes their gradients."""
    found: list[int] = []
    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda _, i=i: found.append(i))
        for i, parameter in enumerate(module.parameters())
    ]
    module(make_input()).sum().backward()
    for hook in hooks:
        hook.remove()
    return found


def observe(model: str, loop: str, micro_batches: int) -> dict[str, Any]:
    """Train a few steps and return what was called in each."""
    build, make_input = MODELS[model]
    torch.manual_seed(0)
    module = build()
    order = ready_order(module, make_input)
    module.zero_grad()
    training = LOOPS[loop][0](module, make_input)
    steps: list[Calls] = []
    for _ in range(STEPS if loop.startswith(CHANGING) else FEW_STEPS):
        steps.append([])
        with logged(steps[-1]):
            training.step(steps[-1], micro_batches)
    return {
        "model": model,
        "loop": loop,
        "micro_batches": micro_batches,
        "ready_order": order,
        "parameters": [
            (
                name,
                parameter.numel(),
                str(parameter.dtype).removeprefix("torch."),
                parameter.shape[0],
            )
            for name, parameter in module.named_parameters()
        ],
        "buffers": [
            (str(buffer.dtype).removeprefix("torch."), buffer.numel())
            for buffer in module.buffers()
        ],
        "batch_norms": [
            (name, layer.num_features)
            for name, layer in module.named_modules()
            if isinstance(layer, CpuSyncBatchNorm)
        ],
        "steps": steps,
    }


def cases() -> list[tuple[str, str, int]]:
    """Model, loop and micro-batches; DDP stops at unused parameters, ZeRO-1 at two dtypes.

    PowerSGD's hook is slow on few threads: two models tell.
    """
    return [
        (model, loop, micro_batches)
        for model in ("dense", "tied", "mixed", "unused", "synced")
        for loop in LOOPS
        for micro_batches in (1, 3)
        if not (model == "unused" and loop.startswith("ddp"))
        and not (model == "mixed" and loop.startswith("ddp zero1"))
        and not (micro_batches > 1 and loop.endswith(("in one", "in shards")))
        and not (model != "tied" and "post_localSGD" in loop)
        and not (loop == "per_parameter synced" and micro_batches == 1)  # as per_parameter
        and not (loop.endswith("blocking") and (model, micro_batches) != ("mixed", 3))
        and not (" hook " in loop and (model != "tied" or micro_batches > 1))
        and not (model != "dense" and loop == "ddp joined")  # it shadows no norm's sends
        and not (loop.endswith(("overlapped", "interleaved", "in shards")) and model != "tied")
        and not (loop.startswith("server") and (model in ("dense", "synced") or micro_batches > 1))
        and not (" powerSGD " in loop and model != "tied")
        and not (loop.endswith("groups") and model != "dense")
        and not ("again" in loop and model not in ("dense", "tied"))
        and not ("mixed precision" in loop and model not in ("dense", "mixed"))
        and not (loop.endswith("static") and (model, micro_batches) != ("dense", 1))
        and not ("powerSGD" in loop and (model not in ("tied", "synced") or micro_batches > 1))
    ]


if __name__ == "__main__":
    run_as_rank(observe, cases())
