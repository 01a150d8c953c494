"""The campaigns' models, for one CPU core each, as `calibrate rounds` wants them.

Each takes a batch and returns (model, inputs, loss); forward and backward together take 0.1 to
0.5 s on one core of some 75 GFLOP/s. Weights and inputs are random with a fixed seed.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 -- torch's own custom

Trainable = tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]


def transformer(batch: int = 2) -> Trainable:
    """A decoder of 6 layers, width 512, with 20 M parameters; samples of 64 tokens."""
    torch.manual_seed(0)
    vocabulary, width = 1024, 512
    layer = nn.TransformerEncoderLayer(
        width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True
    )
    model = nn.Sequential(
        nn.Embedding(vocabulary, width),
        nn.TransformerEncoder(layer, 6, enable_nested_tensor=False),
        nn.LayerNorm(width),
        nn.Linear(width, vocabulary, bias=False),
    )
    tokens = torch.randint(0, vocabulary, (batch, 64))
    return model, tokens, _cross_entropy(torch.randint(0, vocabulary, (batch, 64)))


def cnn(batch: int = 4) -> Trainable:
    """Convolutions with batch norm, as in a ResNet's last stages: 10 M parameters."""
    torch.manual_seed(0)
    widths = (3, 64, 128, 256, 512, 512, 512, 512)
    layers: list[nn.Module] = []
    for i, (inputs, outputs) in enumerate(pairwise(widths)):
        stride = 2 if i in (1, 2, 3) else 1
        layers += [
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
        ]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))
    images = torch.randn(batch, 3, 64, 64)
    return model, images, _cross_entropy(torch.randint(0, 1000, (batch,)))


def wide_mlp(batch: int = 64) -> Trainable:
    """Four layers 2700 wide: 30 M parameters in few large tensors."""
    torch.manual_seed(0)
    width = 2700
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(width, width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(width, 100))
    return model, torch.randn(batch, width), _cross_entropy(torch.randint(0, 100, (batch,)))


def embedding(batch: int = 64) -> Trainable:
    """A large table whose gradient is dense, and a small network: 15 M parameters."""
    torch.manual_seed(0)
    rows, width = 55_000, 256
    model = nn.Sequential(
        nn.Embedding(rows, width),
        nn.Linear(width, 1024),
        nn.ReLU(),
        nn.Linear(1024, 512),
        nn.ReLU(),
        nn.Linear(512, 100),
    )
    tokens = torch.randint(0, rows, (batch, 32))
    return model, tokens, _cross_entropy(torch.randint(0, 100, (batch, 32)))


def deep_mlp(batch: int = 1024) -> Trainable:
    """200 layers 64 wide with layer norm: 800 small parameters, 0.9 M elements."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(200):
        layers += [nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(64, 10))
    return model, torch.randn(batch, 64), _cross_entropy(torch.randint(0, 10, (batch,)))


def mixer(batch: int = 4) -> Trainable:
    """An MLP-Mixer of 8 blocks, width 384, on 64 patches: 10 M parameters (arXiv 2105.01601)."""
    torch.manual_seed(0)
    patches, width, classes = 64, 384, 1000
    blocks = [_MixerBlock(patches, width) for _ in range(8)]
    model = nn.Sequential(
        nn.Conv2d(3, width, 8, 8),
        nn.Flatten(2),
        *blocks,
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(width, classes),
    )
    images = torch.randn(batch, 3, 64, 64)
    return model, images, _cross_entropy(torch.randint(0, classes, (batch,)))


class _MixerBlock(nn.Module):
    """Mixes patches, then channels, of [batch, channels, patches]."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.over_patches = _perceptron(patches, 2 * patches)
        self.over_channels = _perceptron(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.norms
        x = x + self.over_patches(first(x.transpose(1, 2)).transpose(1, 2))
        mixed: Tensor = x + self.over_channels(second(x.transpose(1, 2))).transpose(1, 2)
        return mixed


def _perceptron(width: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


def _cross_entropy(targets: Tensor) -> Callable[[Tensor], Tensor]:
    """Cross entropy over the last dimension; the targets move to the output's device."""

    def loss(output: Tensor) -> Tensor:
        wanted = targets.to(output.device).flatten()
        return F.cross_entropy(output.flatten(0, -2), wanted)

    return loss
