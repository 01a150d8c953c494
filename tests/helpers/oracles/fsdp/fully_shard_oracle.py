"""Collectives that torch's fully_shard launches on rank 0 of four; writes JSON.

PYTHONPATH=tests/helpers/oracles python tests/helpers/oracles/fsdp/fully_shard_oracle.py 4 STORE OUT
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from sharded_models import (
    Wide,
    built,
    parameters_of,
    policy_of,
    ready_order,
    shard_units,
    units_of,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.utils.checkpoint import checkpoint
from two_ranks import join_silent, run_as_rank

STEPS = 2
RESHARDS = bool | int | None  # given to units and root alike
OPTIONS = (
    *((None, 1, True), (True, 1, True), (False, 1, True)),
    *((None, 2, True), (True, 2, False), (False, 2, False)),
)
Calls = list[tuple[str, int, int, list[int]]]
NAMES = {"all_gather_single": "all_gather", "all_gather_into_tensor": "all_gather"}
NAMES |= dict.fromkeys(("reduce_scatter_single", "reduce_scatter_tensor"), "reduce_scatter")
NAMES["all_reduce"] = "all_reduce"


@contextmanager
def logged(calls: Calls) -> Iterator[None]:
    """Append each all-gather's output and each reduction's input: elements, their bytes, ranks."""
    real = {name: getattr(dist, name) for name in NAMES if hasattr(dist, name)}

    def watched(name: str):  # type: ignore[no-untyped-def]
        def call(*args: Any, **options: Any) -> Any:
            tensors = [t for t in (*args, *options.values()) if isinstance(t, torch.Tensor)]
            largest = max(tensors, key=torch.Tensor.numel)
            ranks = dist.get_process_group_ranks(options["group"])
            calls.append((NAMES[name], largest.numel(), largest.element_size(), ranks))
            return real[name](*args, **options)

        return call

    with patch.multiple(dist, **{name: watched(name) for name in real}):
        yield


def observe(
    model: str,
    seed: int,
    choice: str | int,
    reshard: RESHARDS,
    micro_batches: int,
    no_sync: bool,
    mixed: bool,
    nodes: int = 1,
    strategy: str = "fully_shard",
    last_only: bool = False,
    checkpoints: bool = False,
) -> dict[str, Any]:
    """Train a few steps and return what was called in each, on this many nodes of two ranks.

    `checkpoints`: units run again in the backward, inside of what shards them.
    """
    module, x = built(model, seed)
    listed = parameters_of(module)
    order, (precision, options) = ready_order(module, x), policy_of(mixed)
    by_size = {"min_parameters": choice}
    units = by_size if isinstance(choice, int) else units_of(module, choice)
    if nodes == 1 or strategy == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        options["mesh"] = mesh["shard"] if nodes == 1 else mesh
    for name in units if checkpoints else ():
        unit = module.get_submodule(name)
        unit.forward = partial(checkpoint, unit.forward, use_reentrant=False)
    shard_units(module, units, reshard_after_forward=reshard, **options)
    fully_shard(module, reshard_after_forward=reshard, **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    steps: list[Calls] = []
    for _ in range(STEPS):
        steps.append([])
        with logged(steps[-1]):
            optimizer.zero_grad()
            for number in range(micro_batches):
                is_last = number == micro_batches - 1
                module.set_requires_gradient_sync(is_last or not no_sync)
                module.set_requires_all_reduce(is_last or not last_only)
                module(x).sum().backward()
            optimizer.step()
    return {
        "parameters": listed,
        "ready_order": order,
        "options": {
            "strategy": strategy,
            "accumulation_steps": micro_batches,
            "no_sync": no_sync,
            "fully_shard": {
                "units": units,
                "reshard_after_forward": reshard,
                "mixed_precision": precision,
                "all_reduce_last_only": last_only,
            },
        },
        "nodes": nodes,
        "case": [strategy, model, seed, choice, reshard, micro_batches, no_sync, mixed],
        "steps": steps,
    }


def ranges_of(profile: Any) -> list[tuple[float, float, str]]:
    """What the profiler saw, by its beginning: from when to when, and its name."""
    times = ((event.time_range, event.name) for event in profile.events())
    return sorted((time.start, time.end, name) for time, name in times)


def observe_order(
    choice: str,
    reshard: RESHARDS,
    no_sync: bool,
    between: dict[str, bool],
    checks: bool,
    strategy: str = "fully_shard",
) -> dict[str, Any]:
    """Ranges of a step of two micro-batches, whose loop clips gradients; two nodes of two ranks."""
    module, x = built("decoder", 3)
    listed, order, units = parameters_of(module), ready_order(module, x), units_of(module, choice)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    options = {"mesh": mesh} if strategy == "hsdp" else {}
    shard_units(module, units, reshard_after_forward=reshard, **options)
    fully_shard(module, reshard_after_forward=reshard, **options)
    module(x).sum().backward()
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with profile:
        for is_last in (False, True):
            module.set_requires_gradient_sync(is_last or not no_sync)
            module.set_reshard_after_backward(is_last or between["reshard_after_backward"])
            module.set_is_last_backward(is_last or not between["set_is_last_backward"])
            module.set_requires_all_reduce(is_last or not between.get("all_reduce_last_only"))
            module(x).sum().backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0, error_if_nonfinite=checks)
    sharding = {"units": units, "reshard_after_forward": reshard, **between}
    return {
        "parameters": listed,
        "ready_order": order,
        "nodes": 2,
        "options": {
            "strategy": strategy,
            "accumulation_steps": 2,
            "no_sync": no_sync,
            "fully_shard": sharding,
        },
        "checks": checks,
        "ranges": ranges_of(profile),
    }


def observe_divisors() -> dict[str, Any]:
    """By what gradients are divided before and after their sum: torch's own function."""
    found = []
    for dtype in ("float16", "bfloat16"):
        for ranks, replicas in ((1, 1), (2, 1), (3, 1), (8, 1), (4, 3), (1, 6), (128, 8)):
            for factor in (None, 1.0, 6.0, 64.0):
                groups = [SimpleNamespace(size=lambda n=n: n) for n in (ranks, replicas)]
                kind = getattr(torch, dtype)
                before, after, *_ = _fsdp_collectives._get_gradient_divide_factors(
                    groups[0], groups[1] if replicas > 1 else None, kind, "cuda", factor
                )
                found.append((dtype, ranks, replicas, factor, before or 1, after or 1))
    return {"divisors": found}


def observe_peak(
    reshard: RESHARDS,
    mixed: bool,
    nodes: int = 1,
    strategy: str = "fully_shard",
    micro_batches: int = 1,
) -> dict[str, Any]:
    """The most that is allocated in a step on nodes of two ranks, by torch's own tracker."""
    dist.destroy_process_group()
    join_silent(2 * nodes)
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    module, x = Wide(96), torch.ones(1, 96)
    listed = parameters_of(module)
    order, (precision, options) = ready_order(module, x), policy_of(mixed)
    if strategy == "hsdp":
        options["mesh"] = init_device_mesh("cpu", (nodes, 2), mesh_dim_names=("replicate", "shard"))
    for layer in module.layers:
        fully_shard(layer, reshard_after_forward=reshard, **options)
    fully_shard(module, reshard_after_forward=reshard, **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)  # it holds nothing of its own
    tracker = FSDPMemTracker(module, optimizer)
    with tracker:
        for _ in range(2):
            for number in range(micro_batches):
                module.set_requires_all_reduce(number == micro_batches - 1)
                module(x).sum().backward()
                tracker.reset_mod_stats()
            optimizer.step()
            optimizer.zero_grad()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    return {
        "parameters": listed,
        "ready_order": order,
        "nodes": nodes,
        "options": {
            "strategy": strategy,
            "accumulation_steps": micro_batches,
            "no_sync": False,
            "fully_shard": {
                "reshard_after_forward": reshard,
                "mixed_precision": precision,
                "all_reduce_last_only": micro_batches > 1,
            },
        },
        "peak_bytes": sum(size for kind, size in peak.items() if "Total" in str(kind)),
    }


def cases() -> list[tuple[Any, ...]]:
    """Random models and precisions, each choice of units with a few of the other options."""
    draw = random.Random(7)
    return [
        ("calls", model, seed, choice, *each, draw.random() < 0.5)
        for model in ("decoder", "dense")
        for choice in ("blocks", "one", "nested", "embedding")[: 4 if model == "decoder" else 3]
        for seed in [draw.randrange(1000)]
        for each in OPTIONS
    ]


def mesh_cases() -> list[tuple[Any, ...]]:
    """HSDP, and parameters that are gathered again from the ranks of a node."""
    meshed = [("hsdp", None, 1, True), ("hsdp", False, 2, False), ("hsdp", True, 2, True)]
    last_only = [("hsdp", None, 3, False), ("hsdp", False, 2, False)]
    again = [("fully_shard", 2, 1, True), ("fully_shard", 2, 2, False)]
    draw = random.Random(11)
    return [
        (
            *("calls", model, draw.randrange(1000), choice, *options, draw.random() < 0.5),
            *(2, strategy, part is last_only),
        )
        for model, choice in (("decoder", "blocks"), ("dense", "nested"))
        for part in (meshed, again, last_only)
        for strategy, *options in part
    ]


def sized_cases() -> list[tuple[Any, ...]]:
    """Units by their size: blocks, parts of them, several of them with the embedding."""
    draw = random.Random(5)
    return [
        ("calls", "decoder", draw.randrange(1000), least, reshard, 1, True, False, 2)
        for least in (20, 60, 150)
        for reshard in (None, 2)
    ]


def checkpointed_cases() -> list[tuple[Any, ...]]:
    """Units that run again gather as others do."""
    return [
        ("calls", "decoder", 3, "blocks", *each, False, 1, "fully_shard", False, True)
        for each in OPTIONS
    ]


def adapted_cases() -> list[tuple[Any, ...]]:
    """Frozen units with adapters, whose gradients alone are reduced."""
    return [("calls", "adapted", 3, "blocks", *each, False) for each in OPTIONS]


def ordered_cases() -> list[tuple[Any, ...]]:
    """Each setter between micro-batches, with units of every kind and a mesh."""
    usual = {"reshard_after_backward": True, "set_is_last_backward": False}
    stays, quick = usual | {"reshard_after_backward": False}, usual | {"set_is_last_backward": True}
    return [
        ("order", "blocks", None, True, usual, False),
        ("order", "nested", None, True, stays | quick, True),
        ("order", "blocks", 2, False, stays, False),
        ("order", "embedding", False, False, quick, False),
        ("order", "nested", False, True, stays, False),
        ("order", "blocks", None, False, quick, True, "hsdp"),
        ("order", "one", True, False, stays, False, "hsdp"),
        ("order", "nested", True, False, usual | {"all_reduce_last_only": True}, False, "hsdp"),
        ("order", "one", True, False, quick | {"all_reduce_last_only": True}, False, "hsdp"),
    ]


KINDS = {"calls": observe, "peak": observe_peak, "order": observe_order}
KINDS["divisors"] = observe_divisors
PEAKS = [
    ("peak", None, False),
    ("peak", True, False),
    ("peak", None, True),
    ("peak", False, False),
    ("peak", 2, False, 2),
    ("peak", None, True, 2, "hsdp"),
    ("peak", True, False, 2, "hsdp", 3),
    ("peak", True, True, 2, "hsdp", 2),
]

if __name__ == "__main__":
    all_cases = [*cases(), *mesh_cases(), *sized_cases(), *checkpointed_cases()]
    all_cases += [*adapted_cases(), *ordered_cases(), ("divisors",)]
    run_as_rank(lambda kind, *case: KINDS[kind](*case), [*all_cases, *PEAKS], sends=False)
