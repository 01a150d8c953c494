"""Models of others' benchmarks, built alike, for `calibrate capture` as a user would call it.

`python -m held_out.own_models` (in tools/) captures them into tests/data/own-models.json.gz. Source
of their shapes: xiaoran007/GPU-Insights, benchmark/models (ViT-B/16, a U-Net of 31 million
parameters, a diffusion model of 62 million); params.json of Llama 2 and Code Llama 34B.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from calibrate.capture.capture import capture
from calibrate.capture.sources import function_source

__all__ = ["LLAMAS", "MODELS", "ddpm", "llama2", "unet", "vit"]

MODELS = Path(__file__).resolve().parent.parent.parent / "tests" / "data" / "own-models.json.gz"
LLAMAS = {  # width, layers, heads, heads of keys, inner width
    "llama2-7b": (4096, 32, 32, 32, 11008),
    "llama2-13b": (5120, 40, 40, 40, 13824),
    "llama2-34b": (8192, 48, 64, 8, 22016),
    "llama2-70b": (8192, 80, 64, 8, 28672),
}
Made = tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]
_CLASSES = 10
_WIDTHS = (64, 128, 256, 512, 1024)  # of the U-Net
_CHANNELS = (128, 256, 384, 512)  # of the diffusion model
_TIME, _NOISE_STEPS = 512, 1000
_WORDS = 32000  # of Llama 2


def vit(batch: int = 8) -> Made:
    """Make ViT-B/16, with images and cross entropy."""
    return _ViT(), torch.empty(batch, 3, 224, 224), _cross_entropy(torch.zeros(batch).long())


def unet(batch: int = 8) -> Made:
    """Make the U-Net, with images and cross entropy of each pixel."""
    labels = torch.zeros(batch, 256, 256).long()
    return _UNet(), torch.empty(batch, 3, 256, 256), _cross_entropy(labels)


def ddpm(batch: int = 8) -> Made:
    """Make the diffusion model, whose output is its loss."""
    return _Diffusion(), torch.empty(batch, 3, 64, 64), lambda loss: loss


def llama2(batch: int = 2, seq_len: int = 4096, *, name: str = "llama2-7b") -> Made:
    """Make a Llama 2, with tokens and cross entropy in float32."""
    tokens = torch.zeros(batch, seq_len).long()
    entropy = _cross_entropy(tokens.flatten())
    return _Llama(*LLAMAS[name]), tokens, lambda scores: entropy(scores.flatten(0, 1).float())


def _cross_entropy(labels: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda output: functional.cross_entropy(output, labels.to(output.device))


def _twice(taken: int, given: int) -> nn.Sequential:
    """Two convolutions, each with its batch norm."""
    layers: list[nn.Module] = []
    for one in (taken, given):
        layers += [
            nn.Conv2d(one, given, 3, padding=1, bias=False),
            nn.BatchNorm2d(given),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers)


class _UNet(nn.Module):
    """Four levels down and up, with transposed convolutions."""

    def __init__(self) -> None:
        super().__init__()
        levels = list(pairwise(_WIDTHS))
        self.first = _twice(3, _WIDTHS[0])
        self.down = nn.ModuleList(
            nn.Sequential(nn.MaxPool2d(2), _twice(narrow, wide)) for narrow, wide in levels
        )
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(wide, narrow, 2, 2) for narrow, wide in reversed(levels)
        )
        self.joined = nn.ModuleList(_twice(wide, narrow) for narrow, wide in reversed(levels))
        self.last = nn.Conv2d(_WIDTHS[0], _CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = [self.first(x)]
        for down in self.down:
            kept.append(down(kept[-1]))
        x = kept.pop()
        for up, joined in zip(self.up, self.joined, strict=True):
            x = joined(torch.cat([kept.pop(), up(x)], 1))
        return self.last(x)


class _Block(nn.Module):
    """A pre-norm encoder block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.wide = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        own = self.norms[0](x)
        x = x + self.attention(own, own, own, need_weights=False)[0]
        return x + self.wide(self.norms[1](x))


class _ViT(nn.Module):
    """ViT-B/16."""

    def __init__(self, width: int = 768, layers: int = 12, heads: int = 12) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.zeros(1, 197, width))
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1) + self.places
        return self.head(self.norm(self.blocks(x))[:, 0])


class _Attention(nn.Module):
    """Attention over an image's places."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, channels)
        self.attention = nn.MultiheadAttention(channels, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        own = self.norm(x).flatten(2).transpose(1, 2)
        own = self.attention(own, own, own, need_weights=False)[0]
        return x + own.transpose(1, 2).reshape(x.shape)


class _Residual(nn.Module):
    """Two normed convolutions, the time added between them."""

    def __init__(self, taken: int, given: int) -> None:
        super().__init__()
        self.before, self.after = self._normed(taken, given), self._normed(given, given)
        self.time = nn.Sequential(nn.SiLU(), nn.Linear(_TIME, given))
        self.skip = nn.Conv2d(taken, given, 1) if taken != given else nn.Identity()

    @staticmethod
    def _normed(taken: int, given: int) -> nn.Sequential:
        convolution = nn.Conv2d(taken, given, 3, padding=1, bias=False)
        return nn.Sequential(nn.GroupNorm(8, taken), nn.SiLU(), convolution)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        own = self.before(x) + self.time(time)[:, :, None, None]
        return self.after(own) + self.skip(x)


class _Level(nn.Module):
    """Two residual blocks of a level; attention in the third."""

    def __init__(self, taken: int, given: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Residual(taken, given), _Residual(given, given)])
        attends = given == _CHANNELS[2]
        self.attention = _Attention(given) if attends else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, time)
        return self.attention(x)


class _Diffusion(nn.Module):
    """A U-Net that tells the noise of an image; its output is the loss."""

    def __init__(self) -> None:
        super().__init__()
        first, *_, widest = _CHANNELS
        self.time = nn.Sequential(nn.Linear(first, _TIME), nn.SiLU(), nn.Linear(_TIME, _TIME))
        self.first = nn.Conv2d(3, first, 3, padding=1)
        taken = (first, *_CHANNELS)
        self.down = nn.ModuleList(_Level(*pair) for pair in zip(taken, _CHANNELS, strict=False))
        self.smaller = nn.ModuleList(nn.Conv2d(one, one, 3, 2, 1) for one in _CHANNELS[:-1])
        self.middle = nn.ModuleList([_Residual(widest, widest), _Residual(widest, widest)])
        self.attention = _Attention(widest)
        below = (*_CHANNELS[1:], widest)
        self.up = nn.ModuleList(
            _Level(low + one, one) for low, one in zip(below[::-1], _CHANNELS[::-1], strict=True)
        )
        self.larger = nn.ModuleList(nn.Conv2d(one, one, 3, padding=1) for one in _CHANNELS[:0:-1])
        self.last = nn.Sequential(
            nn.GroupNorm(8, first), nn.SiLU(), nn.Conv2d(first, 3, 3, padding=1)
        )

    def forward(self, images: Tensor) -> Tensor:
        noise = torch.randn_like(images)
        at = torch.randint(0, _NOISE_STEPS, (images.shape[0],), device=images.device)
        kept = (1 - at.float() / _NOISE_STEPS).view(-1, 1, 1, 1)
        x = self.first(kept.sqrt() * images + (1 - kept).sqrt() * noise)
        waves = at.float()[:, None] * torch.arange(_CHANNELS[0] // 2, device=x.device).neg().exp()
        time = self.time(torch.cat([waves.sin(), waves.cos()], -1))
        levels = []
        for i, level in enumerate(self.down):
            x = level(self.smaller[i - 1](x) if i else x, time)
            levels.append(x)
        x = self.middle[1](self.attention(self.middle[0](x, time)), time)
        for i, level in enumerate(self.up):
            if i:
                x = self.larger[i - 1](functional.interpolate(x, scale_factor=2.0))
            x = level(torch.cat([x, levels.pop()], 1), time)
        return functional.mse_loss(self.last(x), noise)


class _Layer(nn.Module):
    """A decoder's layer: rotated attention of grouped heads, and a gated pair of layers."""

    def __init__(self, width: int, heads: int, key_heads: int, inner: int) -> None:
        super().__init__()
        self.heads, self.key_heads, self.size = heads, key_heads, width // heads
        keys = key_heads * self.size
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.queries, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.keys, self.values = (nn.Linear(width, keys, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self._attended(self.norms[0](x), cosine, sine)
        y = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))

    def _attended(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        def in_heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, self.size)).transpose(1, 2)

        def rotated(y: Tensor) -> Tensor:
            first, second = y.chunk(2, -1)
            return y * cosine + torch.cat([-second, first], -1) * sine

        queries = rotated(in_heads(self.queries(x)))
        keys, values = rotated(in_heads(self.keys(x))), in_heads(self.values(x))
        if self.heads > self.key_heads:
            shared = self.heads // self.key_heads
            keys, values = (y.repeat_interleave(shared, 1) for y in (keys, values))
        y = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class _Llama(nn.Module):
    """Llama 2."""

    def __init__(self, width: int, layers: int, heads: int, key_heads: int, inner: int) -> None:
        super().__init__()
        self.size = width // heads
        self.words = nn.Embedding(_WORDS, width)
        self.layers = nn.ModuleList(_Layer(width, heads, key_heads, inner) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, _WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        places = torch.arange(x.shape[1], device=x.device)[:, None].float()
        angles = places * torch.ones(self.size, device=x.device)
        cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cosine, sine)
        return self.head(self.norm(x))


def __getattr__(name: str) -> Callable[..., Made]:
    """A function for each Llama, as `MODULE:FUNCTION` names it."""
    if name not in LLAMAS:
        raise AttributeError(name)

    def made(batch: int = 2, seq_len: int = 4096) -> Made:
        return llama2(batch, seq_len, name=name)

    return made


def main() -> None:
    """Capture the models, and write the file."""
    names = ("vit", "unet", "ddpm", *LLAMAS)
    sources = [function_source(f"{__package__}.own_models:{name}", None, None) for name in names]
    tables = dict(zip(names, map(capture, sources), strict=True))
    text = json.dumps(tables, separators=(",", ":"))
    MODELS.write_bytes(gzip.compress(text.encode(), compresslevel=9, mtime=0))


if __name__ == "__main__":
    main()
