"""A small model whose blocks torch's own checkpoint runs twice, and what that run does."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

ATEN = torch.ops.aten
PRODUCTS = (ATEN.mm.default, ATEN.addmm.default)
KEPT = {
    "attention": (
        ATEN._scaled_dot_product_flash_attention.default,
        ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    ),
    "product": (*PRODUCTS, ATEN.bmm.default, ATEN.baddbmm.default),
    "normalization": (ATEN.native_layer_norm.default, ATEN._fused_rms_norm.default),
    "alternate_product": PRODUCTS,
}


def selective(keep: Collection[str]) -> Callable[..., Any]:
    """Contexts that keep the outputs of some operators, as torchtitan's policy does."""
    kept = {operator for name in keep for operator in KEPT[name]}
    counts = {True: 0, False: 0}

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        again = context.is_recompute
        counts[again] += operator in PRODUCTS
        every_second = operator in PRODUCTS and "alternate_product" in keep
        keeps = operator in kept and not (every_second and counts[again] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return lambda: create_selective_checkpoint_contexts(policy)


class Residual(nn.Module):
    """Ends with a matrix product that saves its inputs, and an addition that saves nothing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.wide = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))


class Activated(nn.Module):
    """Ends with an activation, which saves what it computes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x).relu()).tanh()


class Gated(nn.Module):
    """Attention and a gated layer without biases, as Llama's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.norms[0](x)
        q, k, v = (
            each(inner).unflatten(-1, (4, -1)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(seen.transpose(1, 2).flatten(2))
        inner = self.norms[1](x)
        return x + self.down(nn.functional.silu(self.gate(inner)) * self.up(inner))


class Model(nn.Module):
    """Tokens, blocks of some kinds, and a head."""

    def __init__(
        self,
        kinds: Collection[type[nn.Module]] = (Residual, Residual, Activated, Residual),
        width: int = 64,
        tokens: int = 300,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(kind(width) for kind in kinds)
        self.head = nn.Linear(width, tokens)
        self.checkpointed: Collection[str] = ()
        self.keep: Collection[str] = ()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            if f"blocks.{number}" in self.checkpointed:
                own = {"context_fn": selective(self.keep)} if self.keep else {}
                hidden = checkpoint(block, hidden, use_reentrant=False, **own)
            else:
                hidden = block(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


class _Live(TorchDispatchMode):
    """Storages made by forwards, first or again, and the most of them between backward's work."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[StorageWeakRef, int] = {}
        self.most_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_backward = not torch.is_grad_enabled()
        if is_backward:
            self.most_bytes = max(self.most_bytes, self.live_bytes())
        out = func(*args, **(kwargs or {}))
        if not is_backward:
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor):
                    self.note(leaf)
        return out

    def note(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage while somebody holds it."""
        storage = tensor.untyped_storage()
        self.sizes.setdefault(StorageWeakRef(storage), storage.nbytes())

    def live_bytes(self) -> int:
        """Bytes that are still held by somebody."""
        return sum(size for storage, size in self.sizes.items() if not storage.expired())


def counted_flops(model: Model, batch: int, size: int) -> int:
    """FLOPs of a real step's forward and backward, by torch's own counter."""
    tokens = torch.randint(0, 300, (batch, size))
    on_cpu = ATEN._scaled_dot_product_flash_attention_for_cpu
    attention = {on_cpu: lambda query, key, value, *_, **__: sdpa_flop_count(query, key, value)}
    with FlopCounterMode(display=False, custom_mapping=attention) as counter:
        model(tokens).backward()
    return int(counter.get_total_flops())


def observe(
    names: Collection[str], batch: int, size: int, model: Model | None = None
) -> dict[str, Any]:
    """One real step: modules that are called and gradients that come in the backward, and bytes.

    `end_bytes`: held of the forward when it has ended; `most_bytes`: the most in the backward.
    """
    model = model or Model()
    model.checkpointed = names
    tokens = torch.randint(0, 300, (batch, size))
    events: list[str] = []
    _watch(model, events.append)
    live = _Live()
    live.sizes.update({StorageWeakRef(p.untyped_storage()): 0 for p in model.parameters()})
    live.note(tokens)
    gradient = torch.ones(())
    with live:
        loss = model(tokens)
        live.sizes[StorageWeakRef(loss.untyped_storage())] = 0  # the loop's own
        end_bytes = live.live_bytes()
        events.clear()
        loss.backward(gradient)
    return {"events": events, "end_bytes": end_bytes, "most_bytes": live.most_bytes}


def _watch(model: nn.Module, tell: Callable[[str], None]) -> None:
    for name, module in model.named_modules():
        if any(True for _ in module.parameters(recurse=False)):
            module.register_forward_pre_hook(lambda *_, name=name: tell(name))
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: tell(name))
