"""Random scenarios over the whole schema, as a user may combine its options."""

from __future__ import annotations

from random import Random
from typing import Any

import ddpsim

MODELS = (
    *("resnet18", "resnet50", "resnet152", "resnext50_32x4d", "vgg16", "vit_b_16", "vit_l_16"),
    *("bert-base", "bert-large", "gpt2", "gpt2-medium", "gpt2-xl", "llama-1b", "llama-3b"),
)
CONVOLVE = ("resnet", "resnext", "vgg")
MACHINES = (
    *("dgx-a100", "dgx-h100", "p3.16xlarge", "p4d.24xlarge", "a3-mega", "g5.12xlarge"),
    *("nd96isr-mi300x-v5", "frontier", "alps-gh200", "rented-8x4090", "dgx-1-v100"),
)
STRATEGIES: tuple[dict[str, Any], ...] = (
    *({},) * 4,
    *({"strategy": name} for name in ("naive", "naive_flat", "per_parameter", "parameter_server")),
    *({"strategy": name} for name in ("zero1", "distributed_optimizer", "fsdp1", "hsdp")),
    {"strategy": "local_sgd", "local_sgd": {"every": 4}},
    {"strategy": "zero1", "zero1": {"overlap_with_ddp": True}},
    {"strategy": "deepspeed", "deepspeed": {"stage": 1}},
    {"strategy": "deepspeed", "deepspeed": {"stage": 2}},
    {"strategy": "fully_shard"},
    {"strategy": "fully_shard", "fully_shard": {"reshard_after_forward": False}},
)
HOOKS = ("none", "none", "none", "fp16_compress", "bf16_compress", "powerSGD", "top_k")
ALGORITHMS = ("ring", "tree", "hierarchical", "halving_doubling", "direct", "nvls")
LOADER = {"workers": 4, "prefetch": 2}
WORKLOAD: dict[str, tuple[Any, ...]] = {
    "read_loss_every": (1, 2, 5),
    "data": ({"rate": "300 samples/s"}, {"rate": "40 samples/s", **LOADER}),
    "input_copy": ({}, {"pinned": True, "non_blocking": True}),
    "clip_grad_norm": (True, {"error_if_nonfinite": True}),
    "compile": (True,),
    "sync_batch_norm": (True,),
    "optimizer": ({"name": "adamw"}, {"name": "adamw", "fused": True}, {"fused": True}),
    "precision": ("amp-fp16", "amp-bf16", "bf16"),
    "evaluation": ({"every": 100, "samples": 5000},),
    "checkpointing": ("blocks",),
}
DDP: dict[str, tuple[Any, ...]] = {
    "accumulation_steps": (2, 4, 8),
    "no_sync": (False,),
    "bucket_cap_mb": (1, 100, [1, 5, 50]),
    "gradient_as_bucket_view": (True,),
    "find_unused_parameters": (True,),
    "static_graph": (True,),
    "broadcast_buffers": (False,),
    "join": (True,),
    "optimizer_in_backward": (True,),
}
BURSTS = {"rate": "1 GB/s", "busy": "30 ms", "every": "100 ms"}
CLUSTER: dict[str, tuple[Any, ...]] = {
    "stragglers": (
        *({"distribution": "lognormal", "sigma": sigma} for sigma in (0.01, 0.05)),
        {"factors": {0: 1.3}},
    ),
    "background": ({"rate": "1 GB/s"}, BURSTS),
    "weak_links": ({0: 0.5},),
    "inter_node": ({"bandwidth": "1 Gbit/s"}, {"bandwidth": "25 Gbit/s"}),
}
RUN: dict[str, tuple[Any, ...]] = {
    "jitter": ({"sigma": 0.02}, {"sigma": 0.2}),
    "stalls": ({"probability": 0.01, "duration": "20 ms"},),
    "iterations": (1, 5, 40),
}


def document(number: int, most_nodes: int = 64) -> dict[str, Any]:
    """The scenario of a number, the same whenever it is asked for; it is one that is allowed."""
    draw = Random(number)
    while True:
        drawn = _drawn(draw, most_nodes)
        try:
            ddpsim.load_scenario(drawn)
        except ddpsim.ScenarioError:
            continue
        return drawn


def _drawn(draw: Random, most_nodes: int) -> dict[str, Any]:
    model = draw.choice(MODELS)
    workload = {"model": model, "batch_per_rank": draw.choice((1, 2, 8, 32))}
    if not model.startswith((*CONVOLVE, "vit")):
        workload["seq_len"] = draw.choice((128, 512))
    on_cores = draw.random() < 0.1
    ddp = dict(draw.choice(STRATEGIES))
    if on_cores or draw.random() < 0.1:
        ddp["backend"] = "gloo"
    if "strategy" not in ddp:
        ddp["comm_hook"] = draw.choice(HOOKS)
    machine = "cpu-10gbe" if on_cores else draw.choice(MACHINES)
    cluster = {"machine": machine, "nodes": draw.choice((1, 2, 3, 4, 8, 16, 32, most_nodes))}
    if draw.random() < 0.2:
        cluster["gpus_per_node"] = draw.choice((1, 2, 4))
    if draw.random() < 0.15:
        cluster["algorithm"] = draw.choice(ALGORITHMS)
    return {
        "schema": "ddpsim/1",
        "workload": workload | _some(draw, WORKLOAD, 0.12),
        "ddp": ddp | _some(draw, DDP, 0.15),
        "cluster": cluster | _some(draw, CLUSTER, 0.15),
        "run": _some(draw, RUN, 0.2),
    }


def _some(draw: Random, options: dict[str, tuple[Any, ...]], chance: float) -> dict[str, Any]:
    return {key: draw.choice(v) for key, v in options.items() if draw.random() < chance}
