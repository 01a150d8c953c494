"""Collectives that torch's FullyShardedDataParallel launches on rank 0 of four; writes JSON.

PYTHONPATH=tests/helpers/oracles python tests/helpers/oracles/fsdp/fsdp1_oracle.py 4 STORE OUTPUT
"""

from __future__ import annotations

import random
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from sharded_models import DTYPES, Wide, built, parameters_of, ready_order, units_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import CustomPolicy, size_based_auto_wrap_policy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from two_ranks import join_silent, run_as_rank

STEPS = 2  # the order of the forward is known from the second on
Calls = list[tuple[str, int, int, list[int]]]
NAMES = {"all_gather": "all_gather", "all_reduce": "all_reduce"}
NAMES |= dict.fromkeys(("reduce_scatter_single", "reduce_scatter_tensor"), "reduce_scatter")
HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


@contextmanager
def logged(calls: Calls) -> Iterator[None]:
    """Append each all-gather's output and each reduction's input: elements, their bytes, ranks."""
    real = {name: getattr(dist, name) for name in NAMES if hasattr(dist, name)}

    def watched(name: str):  # type: ignore[no-untyped-def]
        def call(*args: Any, **options: Any) -> Any:
            tensors = [t for t in args if isinstance(t, torch.Tensor)]
            gathered = args[0] if isinstance(args[0], list) else []  # as torch does it on a CPU
            elements = max(*(t.numel() for t in tensors), sum(t.numel() for t in gathered), 0)
            ranks = dist.get_process_group_ranks(options["group"])
            calls.append((NAMES[name], elements, tensors[0].element_size(), ranks))
            return real[name](*args, **options)

        return call

    with patch.multiple(dist, **{name: watched(name) for name in real}):
        yield


def wrapped(module: Any, units: Any, options: dict[str, Any], mesh: Any) -> Any:
    """As a scenario's ddp.fsdp1 says."""
    own = {key: value for key, value in options.items() if key not in ("units", "cpu_offload")}
    if isinstance(units, dict):
        least = units["min_parameters"]
        own["auto_wrap_policy"] = partial(size_based_auto_wrap_policy, min_num_params=least)
    else:
        chosen = {module.get_submodule(name) for name in units}
        own["auto_wrap_policy"] = CustomPolicy(lambda each: each in chosen)
    own["sharding_strategy"] = getattr(ShardingStrategy, own["sharding_strategy"])
    if prefetch := own["backward_prefetch"]:
        own["backward_prefetch"] = getattr(BackwardPrefetch, prefetch)
    if precision := own.pop("mixed_precision", None):
        types = {f"{key}_dtype": DTYPES[precision.get(key)] for key in ("param", "reduce")}
        own["mixed_precision"] = MixedPrecision(**types)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NO_SHARD is deprecated
        return FullyShardedDataParallel(
            module, device_id=torch.device("cpu"), device_mesh=mesh, **own
        )


@cache
def two_by_two() -> Any:
    """Made once: its groups take longer than a case."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def mesh_of(options: dict[str, Any], nodes: int) -> Any:
    """A mesh of so many nodes of two ranks, or one of them alone."""
    mesh = two_by_two()
    if options["sharding_strategy"] in HYBRID:
        return mesh
    return mesh["shard"] if nodes == 1 else None


def observe(
    model: str, seed: int, choice: str | int, options: dict[str, Any], loop: dict[str, Any]
) -> dict[str, Any]:
    """Train a few steps and return what was called in each, on so many nodes of two ranks."""
    module, x = built(model, seed)
    listed, order, nodes = parameters_of(module), ready_order(module, x), loop["nodes"]
    units: Any = [] if choice == "none" else {"min_parameters": choice}
    if isinstance(choice, str) and units:
        units = units_of(module, choice)
    module = wrapped(module, units, options, mesh_of(options, nodes))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    steps: list[Calls] = []
    for _ in range(STEPS):
        steps.append([])
        with logged(steps[-1]):
            optimizer.zero_grad()
            for number in range(loop["micro_batches"]):
                quiet = loop["no_sync"] and number < loop["micro_batches"] - 1
                with module.no_sync() if quiet else nullcontext():
                    module(x).sum().backward()
            if loop["clips"]:
                module.clip_grad_norm_(1.0)
            optimizer.step()
    return {
        "parameters": listed,
        "ready_order": order,
        "nodes": nodes,
        "clips": loop["clips"],
        "options": {
            "strategy": "fsdp1",
            "accumulation_steps": loop["micro_batches"],
            "no_sync": loop["no_sync"],
            "fsdp1": {"units": units, **options},
        },
        "freed": len(module._free_event_queue._queue),
        "steps": steps,
    }


def observe_divisors() -> dict[str, Any]:
    """By what gradients are divided before their sum: torch's own function."""
    from torch.distributed.algorithms._comm_hooks.default_hooks import DefaultState

    ranks = (1, 2, 3, 4, 6, 8, 12, 48, 1024)
    of = DefaultState._get_gradient_predivide_factor
    return {"divisors": [(each, of(each)) for each in ranks]}


class Counted(TorchDispatchMode):
    """The most bytes that there are in storages after any operator."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[Any]] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.saw(each for each in tree_leaves(made) if isinstance(each, torch.Tensor))
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        return made

    def saw(self, tensors: Iterable[torch.Tensor]) -> None:
        for storage in (tensor.untyped_storage() for tensor in tensors):
            self._storages[storage._cdata] = weakref.ref(storage)

    @property
    def bytes(self) -> int:
        """Of those that are left."""
        left = (known() for known in self._storages.values())
        return sum(storage.nbytes() for storage in left if storage is not None)


def observe_peak(options: dict[str, Any], micro_batches: int = 1) -> dict[str, Any]:
    """The most that is allocated in a step of two ranks, counted by storages."""
    dist.destroy_process_group()
    join_silent(2)
    module, x = Wide(96), torch.ones(1, 96)
    listed, order = parameters_of(module), ready_order(module, x)
    units = [f"layers.{i}" for i in range(5)]
    module = wrapped(module, units, options, None)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)  # it holds nothing of its own
    module(x).sum().backward()
    optimizer.zero_grad()
    counted = Counted()
    counted.saw(module.parameters())
    with counted:
        for number in range(micro_batches):
            with module.no_sync() if number < micro_batches - 1 else nullcontext():
                module(x).sum().backward()
        optimizer.step()
    return {
        "parameters": listed,
        "ready_order": order,
        "nodes": 1,
        "options": {
            "strategy": "fsdp1",
            "accumulation_steps": micro_batches,
            "fsdp1": {"units": units, **options},
        },
        "peak_bytes": counted.peak_bytes,
    }


STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", *HYBRID)
MIXED = ({"param": "bfloat16", "reduce": "float32"}, {"param": "bfloat16"}, {"reduce": "bfloat16"})


LOOPS = ((1, True), (2, True), (2, False))  # micro-batches, no_sync


def cases() -> list[tuple[Any, ...]]:
    """Random models, units and options; each strategy with each prefetch."""
    draw = random.Random(3)
    asked = product(STRATEGIES, ("BACKWARD_PRE", "BACKWARD_POST", None))
    loops = [(*each, LOOPS[i % 3]) for i, each in enumerate(asked)]
    loops += [("FULL_SHARD", "BACKWARD_PRE", loop) for loop in LOOPS for _ in range(2)]
    return [drawn(draw, *each) for each in loops]


def drawn(
    draw: random.Random, strategy: str, prefetch: str | None, loop: tuple[int, bool]
) -> tuple[Any, ...]:
    """A case with this strategy, prefetch and loop."""
    model = draw.choice(["decoder", "dense"])
    options = {
        "sharding_strategy": strategy,
        "backward_prefetch": prefetch,
        "forward_prefetch": draw.random() < 0.5,
        "use_orig_params": draw.random() < 0.5,
    }
    if draw.random() < 0.6:
        options["mixed_precision"] = draw.choice(MIXED)
    choices: list[Any] = ["blocks", "one", "nested", "none"]
    choices += ["embedding", 20, 60] if model == "decoder" else []
    around = {
        "nodes": 2 if strategy in HYBRID else draw.choice([1, 2]),
        "micro_batches": loop[0],
        "no_sync": loop[1],
        "clips": draw.random() < 0.5,
    }
    return "calls", model, draw.randrange(1000), draw.choice(choices), options, around


KINDS = {"calls": observe, "peak": observe_peak, "divisors": observe_divisors}
PEAKS = [
    ("peak", {"sharding_strategy": strategy, "backward_prefetch": prefetch, **more}, *loop)
    for strategy, prefetch, more, *loop in (
        ("FULL_SHARD", "BACKWARD_PRE", {}),
        ("FULL_SHARD", "BACKWARD_POST", {}),
        ("FULL_SHARD", "BACKWARD_PRE", {"forward_prefetch": True}),
        ("FULL_SHARD", None, {"mixed_precision": MIXED[0]}),
        ("SHARD_GRAD_OP", "BACKWARD_PRE", {"use_orig_params": True}),
        ("NO_SHARD", "BACKWARD_PRE", {}),
        ("NO_SHARD", None, {"mixed_precision": MIXED[0]}),
        ("FULL_SHARD", "BACKWARD_PRE", {"mixed_precision": MIXED[1]}, 2),
        ("SHARD_GRAD_OP", "BACKWARD_PRE", {"mixed_precision": MIXED[2]}, 2),
    )
]

if __name__ == "__main__":
    all_cases = [*cases(), ("divisors",), *PEAKS]
    run_as_rank(lambda kind, *case: KINDS[kind](*case), all_cases, sends=False)
