"""Units by size are those that torch's policy chooses."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest

from ddpsim.strategies.fully_shard.blocks import large_modules


def test_modules_are_those_of_torchs_recursion() -> None:
    """Random models: lists of modules, attention, nested blocks, parameters of a block's own."""
    torch = pytest.importorskip("torch", reason="its policy is the oracle of ours")
    from torch.distributed.fsdp.wrap import _recursive_wrap, size_based_auto_wrap_policy

    sizes: set[int] = set()
    for seed in range(40):
        draw = random.Random(seed)
        module = random_module(torch, draw, depth=3)
        elements = [(name, p.numel()) for name, p in module.named_parameters()]
        least = draw.randint(1, 1 + sum(numel for _, numel in elements) // 2)
        names = {child: name for name, child in module.named_modules()}
        wrapped: list[str] = []

        def wrap(child: Any, names: dict[Any, str] = names, to: list[str] = wrapped) -> Any:
            to.append(names[child])
            return child

        policy = partial(size_based_auto_wrap_policy, min_num_params=least)
        nothing: set[Any] = set()
        _recursive_wrap(module, policy, wrap, nothing, nothing, only_wrap_children=True)
        assert large_modules(elements, least) == tuple(wrapped), (seed, least)
        sizes.add(len(wrapped))
    assert len(sizes) > 5


def random_module(torch: Any, draw: random.Random, depth: int) -> Any:
    """Children by name, some of them in a ModuleList; leaves are linear or attention."""
    nn = torch.nn
    if not depth or draw.random() < 0.2:
        width = 2 * draw.randint(1, 6)
        if draw.random() < 0.3:
            return nn.MultiheadAttention(width, 2, device="meta")
        return nn.Linear(width, draw.randint(1, 12), device="meta")
    module = nn.Module()
    for i in range(draw.randint(1, 3)):
        inner = [random_module(torch, draw, depth - 1) for _ in range(draw.randint(1, 3))]
        module.add_module(f"part{i}", nn.ModuleList(inner) if draw.random() < 0.5 else inner[0])
    if draw.random() < 0.3:
        module.scale = nn.Parameter(torch.empty(draw.randint(1, 50), device="meta"))
    return module
