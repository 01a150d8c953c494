"""Random models, and how torch's fully_shard shards them: for its oracle."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import _recursive_wrap, size_based_auto_wrap_policy

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, None: None}


class Residual(nn.Module):
    """A branch beside the input, of one or more layers."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.branch = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.branch(x)


class Decoder(nn.Module):
    """An embedding, blocks and a head, as language models have them."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        width = draw.choice([3, 8, 10])
        self.embed = nn.Embedding(draw.choice([7, 20]), width)
        self.layers = nn.ModuleList(block(draw, width) for _ in range(draw.randint(1, 4)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 5, bias=draw.random() < 0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def block(draw: random.Random, width: int) -> nn.Module:
    inner = draw.choice([5, 12])
    layers = [nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width, bias=draw.random() < 0.7)]
    return Residual(*([nn.LayerNorm(width)] if draw.random() < 0.5 else []), *layers)


def dense(draw: random.Random) -> nn.Module:
    """Blocks alone: the first one's input needs no gradient."""
    width = draw.choice([4, 9])
    return nn.Sequential(*(block(draw, width) for _ in range(draw.randint(2, 4))))


class Adapted(nn.Linear):
    """Frozen, with two adapters of rank 2 that are not."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__(inputs, outputs, bias)
        self.requires_grad_(requires_grad=False)
        self.lora_a = nn.Linear(inputs, 2, bias=False)
        self.lora_b = nn.Linear(2, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.lora_b(self.lora_a(x))


def adapt(module: nn.Module) -> nn.Module:
    """All frozen, with adapters at the linear layers of blocks."""
    module.requires_grad_(requires_grad=False)
    for outer in (child for child in module.modules() if isinstance(child, nn.Sequential)):
        for name, child in outer.named_children():
            if isinstance(child, nn.Linear):
                own = child.in_features, child.out_features, child.bias is not None
                setattr(outer, name, Adapted(*own))
    return module


def built(model: str, seed: int) -> tuple[nn.Module, torch.Tensor]:
    """Equal on both ranks."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    if model == "adapted":
        return adapt(Decoder(draw)), torch.arange(6).reshape(2, 3)
    if model == "decoder":
        return Decoder(draw), torch.arange(6).reshape(2, 3)
    module = dense(draw)
    return module, torch.ones(2, next(iter(module.parameters())).shape[-1])


def ready_order(module: nn.Module, x: torch.Tensor) -> list[int]:
    """Parameters by registration, in the order in which a backward makes their gradients."""
    found: list[int] = []
    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda _, i=i: found.append(i))
        for i, parameter in enumerate(module.parameters())
        if parameter.requires_grad
    ]
    module(x).sum().backward()
    for hook in hooks:
        hook.remove()
    module.zero_grad()
    return found


def units_of(module: nn.Module, choice: str) -> list[str]:
    """Names of modules to shard on their own, the inner ones of nested ones too."""
    names = [name for name, child in module.named_modules() if isinstance(child, Residual)]
    if choice == "one":
        return names[-1:]
    if choice == "nested":
        return [name for outer in names for name in (outer, f"{outer}.branch")]
    if choice == "embedding":
        return [*(["embed"] if hasattr(module, "embed") else []), *names]
    return names


def shard_units(module: nn.Module, units: Any, **options: Any) -> None:
    """Modules of a least size, as torch's policy finds them, or those of some names."""
    if isinstance(units, dict):
        least = {"min_num_params": units["min_parameters"]}
        policy = partial(size_based_auto_wrap_policy, **least)
        nothing: set[Any] = set()
        _recursive_wrap(
            module, policy, fully_shard, nothing, nothing, only_wrap_children=True, **options
        )
        return
    for name in reversed(units):  # inner ones first
        fully_shard(module.get_submodule(name), **options)


class Wide(nn.Module):
    """Blocks whose parameters are all that takes memory."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.layers = nn.ModuleList(
            Residual(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
            for _ in range(5)
        )
        self.head = nn.Linear(width, 3 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def parameters_of(module: nn.Module) -> list[tuple[str, int, int]]:
    return [(name, p.numel(), p.shape[0]) for name, p in module.named_parameters()]


def policy_of(mixed: bool) -> tuple[dict[str, str], dict[str, Any]]:
    precision = {"param": "bfloat16", "reduce": "float32"} if mixed else {}
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[precision.get("param")], reduce_dtype=DTYPES[precision.get("reduce")]
    )
    return precision, {"mp_policy": policy}
