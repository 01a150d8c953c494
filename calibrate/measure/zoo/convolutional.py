"""ResNet, ResNeXt and VGG, with the parameters' names, shapes and order of torchvision's.

Sources: He et al., arXiv 1512.03385 (with torchvision's stride, in the 3x3 of a bottleneck); Xie et
al., arXiv 1611.05431; Simonyan and Zisserman, arXiv 1409.1556.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor, nn

_CLASSES = 1000
_VGG16 = ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))  # convolutions of a stage, channels


class _Layer(NamedTuple):
    """A convolution of a block, without a bias, and the batch norm behind it."""

    outputs: int
    size: int
    stride: int = 1
    groups: int = 1

    def convolution(self, inputs: int) -> nn.Conv2d:
        """For so many channels."""
        return nn.Conv2d(
            inputs,
            self.outputs,
            self.size,
            self.stride,
            padding=self.size // 2,
            groups=self.groups,
            bias=False,
        )


class _Block(nn.Module):
    """Convolutions and their batch norms beside a shortcut, which are added up."""

    def __init__(self, inputs: int, layers: Sequence[_Layer], stride: int) -> None:
        super().__init__()
        self._count, before = len(layers), inputs
        for i, layer in enumerate(layers, start=1):
            self.add_module(f"conv{i}", layer.convolution(before))
            self.add_module(f"bn{i}", nn.BatchNorm2d(layer.outputs))
            before = layer.outputs
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != before:
            shortcut = _Layer(before, 1, stride).convolution(inputs)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(before))

    def forward(self, x: Tensor) -> Tensor:
        """Of [batch, channels, height, width]."""
        out = x
        for i in range(1, self._count + 1):
            out = self.get_submodule(f"bn{i}")(self.get_submodule(f"conv{i}")(out))
            if i < self._count:
                out = self.relu(out)
        out += x if self.downsample is None else self.downsample(x)
        added: Tensor = self.relu(out)
        return added


def _basic(width: int, stride: int) -> tuple[_Layer, ...]:
    return _Layer(width, 3, stride), _Layer(width, 3)


def _bottleneck(width: int, stride: int, groups: int, width_per_group: int) -> tuple[_Layer, ...]:
    inner = width * width_per_group // 64 * groups
    return _Layer(inner, 1), _Layer(inner, 3, stride, groups), _Layer(4 * width, 1)


class _ResNet(nn.Module):
    def __init__(self, depths: Sequence[int], *, basic: bool, groups: int, per_group: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        channels = 64
        for stage, depth in enumerate(depths):
            blocks, width = [], 64 * 2**stage
            for i in range(depth):
                stride = 2 if stage > 0 and i == 0 else 1
                shape = _bottleneck(width, stride, groups, per_group)
                layers = _basic(width, stride) if basic else shape
                blocks.append(_Block(channels, layers, stride))
                channels = layers[-1].outputs
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, _CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [batch, 1000] of [batch, 3, height, width]."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        for stage in range(1, 5):
            x = self.get_submodule(f"layer{stage}")(x)
        logits: Tensor = self.fc(self.avgpool(x).flatten(1))
        return logits


def resnet(
    depths: Sequence[int], *, basic: bool = False, groups: int = 1, per_group: int = 64
) -> nn.Module:
    """Of four stages with so many blocks, basic ones or bottlenecks of grouped convolutions."""
    return _ResNet(depths, basic=basic, groups=groups, per_group=per_group)


class _Vgg(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(*_vgg_features())
        self.avgpool = nn.AdaptiveAvgPool2d(7)
        self.classifier = nn.Sequential(
            *(nn.Linear(512 * 7 * 7, 4096), nn.ReLU(inplace=True), nn.Dropout()),
            *(nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout()),
            nn.Linear(4096, _CLASSES),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Logits [batch, 1000] of [batch, 3, height, width]."""
        logits: Tensor = self.classifier(self.avgpool(self.features(images)).flatten(1))
        return logits


def _vgg_features() -> Iterator[nn.Module]:
    channels = 3
    for convolutions, width in _VGG16:
        for _ in range(convolutions):
            yield nn.Conv2d(channels, width, 3, padding=1)
            yield nn.ReLU(inplace=True)
            channels = width
        yield nn.MaxPool2d(2, 2)


def vgg16() -> nn.Module:
    """VGG with 16 layers, without batch norms."""
    return _Vgg()
