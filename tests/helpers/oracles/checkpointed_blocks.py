"""A small model whose blocks torch's own checkpoint runs twice, and what that run does."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint


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


class Model(nn.Module):
    """Tokens, blocks of both kinds, and a head."""

    def __init__(self, width: int = 64, tokens: int = 300) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(
            kind(width) for kind in (Residual, Residual, Activated, Residual)
        )
        self.head = nn.Linear(width, tokens)
        self.checkpointed: Collection[str] = ()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            if f"blocks.{number}" in self.checkpointed:
                hidden = checkpoint(block, hidden, use_reentrant=False)
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


def observe(names: Collection[str], batch: int, size: int) -> dict[str, Any]:
    """One real step: modules that are called and gradients that come in the backward, and bytes.

    `end_bytes`: held of the forward when it has ended; `most_bytes`: the most in the backward.
    """
    model = Model()
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
