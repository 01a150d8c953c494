"""Models of the zoo that no library has as a module: their architecture in torch alone."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 -- torch's own custom

__all__ = ["Dit", "Dlrm"]


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value)
        return self.proj(seen.transpose(1, 2).flatten(2))


def _mlp(width: int, inner: int, act: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, inner), act, nn.Linear(inner, width))


def _modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class _DitBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.attn = _Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.mlp = _mlp(width, 4 * width, nn.GELU("tanh"))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate, shift2, scale2, gate2 = self.modulation(condition).chunk(6, dim=1)
        x = x + gate.unsqueeze(1) * self.attn(_modulated(self.norm1(x), shift, scale))
        return x + gate2.unsqueeze(1) * self.mlp(_modulated(self.norm2(x), shift2, scale2))


class Dit(nn.Module):
    """A diffusion transformer on latents of 4 channels, by class, which learns its variance.

    `side`: of a latent, in steps of `patch`. Source: W. Peebles, S. Xie, "Scalable diffusion models
    with transformers", arXiv 2212.09748, adaLN-Zero; 1000 classes and one for none.
    """

    def __init__(self, width: int, depth: int, heads: int, patch: int, side: int = 32) -> None:
        super().__init__()
        self.patch, self.frequencies = patch, 256
        tokens = (side // patch) ** 2
        self.x_embedder = nn.Conv2d(4, width, patch, stride=patch)
        self.t_embedder = nn.Sequential(
            nn.Linear(self.frequencies, width), nn.SiLU(), nn.Linear(width, width)
        )
        self.y_embedder = nn.Embedding(1001, width)
        self.pos_embed = nn.Parameter(torch.empty(1, tokens, width), requires_grad=False)
        self.blocks = nn.ModuleList(_DitBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))
        self.linear = nn.Linear(width, patch * patch * 8)

    def forward(self, latents: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        """Noise and variance of each latent value."""
        x = self.x_embedder(latents).flatten(2).transpose(1, 2) + self.pos_embed
        half = torch.arange(self.frequencies // 2, device=times.device, dtype=torch.float32)
        angles = times[:, None].float() * torch.exp(-math.log(1e4) / len(half) * half)
        frequencies = torch.cat([angles.cos(), angles.sin()], dim=-1)
        condition = self.t_embedder(frequencies) + self.y_embedder(labels)
        for block in self.blocks:
            x = block(x, condition)
        shift, scale = self.modulation(condition).chunk(2, dim=1)
        return F.pixel_shuffle(self._image(_modulated(self.norm(x), shift, scale)), self.patch)

    def _image(self, x: Tensor) -> Tensor:
        side = math.isqrt(x.shape[1])
        return self.linear(x).transpose(1, 2).unflatten(2, (side, side))


class Dlrm(nn.Module):
    """DLRM without its tables: both MLPs, and products of all pairs of 26 embeddings and features.

    Source: MLPerf Training v1.0, recommendation (Criteo 1TB): 13 features, embeddings of 128,
    bottom MLP 512-256-128, top MLP 1024-1024-512-256-1.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bottom = self._layers(13, 512, 256, 128)
        pairs = 27 * 26 // 2
        self.top = self._layers(pairs + 128, 1024, 1024, 512, 256, 1)[:-1]
        self.register_buffer("pairs", torch.tril_indices(27, 27, -1), persistent=False)

    @staticmethod
    def _layers(*widths: int) -> nn.Sequential:
        layers = ((nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(widths))
        return nn.Sequential(*(one for pair in layers for one in pair))

    def forward(self, features: Tensor, embedded: Tensor) -> Tensor:
        """The logit of a click; `embedded`: samples x 26 x 128, and gets a gradient."""
        dense = self.bottom(features)
        vectors = torch.cat([dense.unsqueeze(1), embedded.requires_grad_()], 1)
        products = vectors @ vectors.transpose(1, 2)
        chosen = products.flatten(1)[:, self.pairs[0] * 27 + self.pairs[1]]
        return self.top(torch.cat([dense, chosen], 1)).squeeze(1)
