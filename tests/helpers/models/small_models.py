"""Small models of every kind that users train, each with inputs and a loss: for captures."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

__all__ = ["BATCH", "MODELS", "Case", "Tied", "total"]

BATCH = 2
Case = tuple[Callable[[], nn.Module], Callable[[], Any]]  # makes the model, makes its inputs


def total(said: Any) -> Tensor:
    """A loss of one output, or the sum over several."""
    parts = said if isinstance(said, tuple) else (said,)
    return torch.stack([part.float().square().mean() for part in parts]).sum()


class Tied(nn.Module):
    """An embedding that is also the head, and frozen positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.positions = nn.Parameter(torch.zeros(6, 16), requires_grad=False)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class UNet(nn.Module):
    """Down, up by a transposed convolution, and across; grouped and depthwise in between."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.grouped = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.norm = nn.GroupNorm(2, 8)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.out = nn.Conv2d(7, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.norm(self.depthwise(self.grouped(self.down(x)))))
        return self.out(torch.cat([self.up(y), x], 1))


class Recurrent(nn.Module):
    """A GRU, a module that is called twice, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.twice = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, _ = self.gru(self.twice(x))
        return y, self.twice(y)


class Cells(nn.Module):
    """An LSTM step by step; a CPU's own layer takes all inputs at once, which CUDA's does not."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for token in x.unbind(1):
            state = self.cell(token, state)
        return self.head(state[0])


class Experts(nn.Module):
    """A mixture of experts whose router sends every other token to each."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gate = nn.Linear(8, 8), nn.Linear(8, 2)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        share = self.gate(x).softmax(-1)
        parts = [
            expert(x[:, i::2]) * share[:, i::2, i, None] for i, expert in enumerate(self.experts)
        ]
        return torch.stack(parts, 2).flatten(1, 2)


class Branches(nn.Module):
    """Two heads, of which the first is called last; one is a classifier with its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.classes, self.boxes = nn.Linear(16, 5), nn.Linear(16, 4)
        self.stem = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.stem(x).relu()
        boxes = self.boxes(y).sigmoid()
        wanted = torch.zeros(len(x), dtype=torch.long, device=x.device)
        return boxes, F.cross_entropy(self.classes(y), wanted, reduction="none")


class Checkpointed(nn.Module):
    """Layers that run again in the backward, of a tensor that is kept anyway."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 32), nn.Tanh())
        self.last = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        return self.last(checkpoint(self.inner, y, use_reentrant=False))


class Masked(nn.Module):
    """Attention of grouped heads with a mask, RMS norms and a gated product."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.query = nn.RMSNorm(32), nn.Linear(32, 32, bias=False)
        self.key_value, self.out = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
        self.gate, self.up = nn.Linear(32, 64, bias=False), nn.Linear(32, 64, bias=False)
        self.down = nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        query = self.query(y).unflatten(-1, (4, 8)).transpose(1, 2)
        key, value = self.key_value(y).unflatten(-1, (4, 8)).transpose(1, 2).chunk(2, 1)
        key, value = (one.repeat_interleave(2, 1) for one in (key, value))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class LearnedLoss(nn.Module):
    """A contrastive loss with a temperature that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))
        self.left, self.right = nn.Linear(8, 16), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        left, right = (F.normalize(side(x)) for side in (self.left, self.right))
        return F.log_softmax(left @ right.T * self.temperature.exp(), -1).diagonal()


class ByShape(nn.Module):
    """Has as many layers as there are tokens, and a shortcut where the width stays."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, width) for width in (8, 8, 6))

    def forward(self, x: Tensor) -> Tensor:
        for _, layer in zip(range(x.shape[1]), self.layers, strict=False):
            y = layer(x)
            x = x + y if y.shape == x.shape else y
        return x


class Translator(nn.Module):
    """A transformer's encoder and decoder, with cross attention."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"num_encoder_layers": 1, "num_decoder_layers": 1, "dim_feedforward": 32}
        self.inner = nn.Transformer(16, 2, dropout=0.0, batch_first=True, **sizes)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x[:, :4])


class Cast(nn.Module):
    """To another type."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


def chain(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Layers that are made when the model is."""
    return lambda: nn.Sequential(*(layer() for layer in layers))


def frozen() -> nn.Module:
    """A backbone that is not trained, below a head that is."""
    backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    pooled = (nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(backbone.requires_grad_(requires_grad=False), *pooled, nn.Linear(8, 5))


def normalised(norm: Any) -> Callable[[], nn.Module]:
    """Linear layers whose weights are made of other tensors."""
    return lambda: nn.Sequential(norm(nn.Linear(8, 16)), nn.ReLU(), norm(nn.Linear(16, 4)))


def tokens() -> Tensor:
    return torch.randint(0, 50, (BATCH, 6))


def numbers(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(BATCH, *shape)


def linear(inputs: int, outputs: int, **options: Any) -> Callable[[], nn.Module]:
    return partial(nn.Linear, inputs, outputs, **options)


IMAGES = numbers(3, 8, 8)
MODELS: dict[str, Case] = {
    "mlp": (chain(linear(8, 32), nn.GELU, linear(32, 4)), numbers(8)),
    "convolutional": (
        chain(
            *(partial(nn.Conv2d, 3, 8, 3, bias=False), partial(nn.BatchNorm2d, 8), nn.ReLU),
            *(partial(nn.MaxPool2d, 2), nn.Flatten, partial(nn.LazyLinear, 5)),
        ),
        IMAGES,
    ),
    "depthwise": (
        chain(
            partial(nn.Conv2d, 3, 6, 3, padding=1, groups=3),
            *(partial(nn.BatchNorm2d, 6), nn.Hardswish, partial(nn.Conv2d, 6, 4, 1)),
        ),
        IMAGES,
    ),
    "unet": (UNet, IMAGES),
    "gru": (Recurrent, numbers(5, 8)),
    "lstm": (Cells, numbers(3, 8)),
    "tied": (Tied, tokens),
    "frozen": (frozen, IMAGES),
    "experts": (Experts, numbers(6, 8)),
    "branches": (Branches, numbers(8)),
    "sparse": (chain(partial(nn.Embedding, 50, 16, sparse=True), linear(16, 4)), tokens),
    "bags": (chain(partial(nn.EmbeddingBag, 50, 256), linear(256, 4)), tokens),
    "checkpointed": (Checkpointed, numbers(8)),
    "dropout": (chain(linear(8, 32), partial(nn.Dropout, 0.5), linear(32, 4)), numbers(8)),
    "group norm": (
        chain(partial(nn.Conv3d, 2, 8, 3, padding=1), partial(nn.GroupNorm, 2, 8), nn.PReLU),
        numbers(2, 4, 4, 4),
    ),
    "masked": (Masked, numbers(32, 32)),
    "transposed": (
        chain(
            *(partial(nn.ConvTranspose2d, 3, 8, 4, stride=2, padding=1), nn.LeakyReLU),
            *(partial(nn.ConvTranspose2d, 8, 4, 3, padding=1, groups=2), nn.Tanh),
        ),
        IMAGES,
    ),
    "sound": (
        chain(
            partial(nn.Conv1d, 3, 8, 3, dilation=2),
            *(partial(nn.InstanceNorm1d, 8, affine=True), nn.SiLU, partial(nn.AvgPool1d, 2)),
        ),
        numbers(3, 16),
    ),
    "weight norm": (normalised(parametrizations.weight_norm), numbers(8)),
    "spectral norm": (normalised(parametrizations.spectral_norm), numbers(8)),
    "learned loss": (LearnedLoss, numbers(8)),
    "by shape": (ByShape, numbers(3, 8)),
    "translator": (Translator, numbers(6, 16)),
    "two types": (
        chain(linear(8, 8, dtype=torch.float64), partial(Cast, torch.float32), linear(8, 4)),
        lambda: torch.randn(BATCH, 8, dtype=torch.float64),
    ),
}
