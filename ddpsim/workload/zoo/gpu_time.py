"""How long a GPU takes for one operator, from its shape.

A product or a convolution takes its FLOPs at the rate that the device reaches in usual models,
longer where its shape is worse than theirs: outputs that do not fill tiles or multiprocessors,
short sums, unaligned rows, few channels in a group. Everything else takes passes over its bytes.
Tensors that fit into the last cache move faster, and some kernels are bound by multiprocessors
where memory is fast. What the shapes cost was fitted to measured steps and products by
`tools/held_out/shapes.py`; docs/explanation/compute.md says which, and how far models are off that
were left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp
from typing import NamedTuple

from ddpsim.scenario.device import Device, Rate
from ddpsim.workload.operators import Operator


class Shapes(NamedTuple):
    """What shapes cost on all GPUs.

    Passes over an operator's bytes, of memory at its reached bandwidth: `pointwise` to `other`.
    `sum_of_product`, `sum_of_convolution`: terms of a sum that its start and end are worth.
    `tile`, `tile_fp32`: rows and columns of an output's tile with and without tensor cores.
    `unaligned`, `unaligned_hopper`: times as long if rows do not begin at 16 bytes. `waves`: of
    blocks that a product's last one costs. `weight_gradient`: times as long as a forward;
    `weight_gradient_tf32`: in TF32 and channels last, whose sums run over pixels that are not next
    to each other. `turned`, `turned_1x1`: times that a convolution's bytes are read and written to
    turn layouts.
    Groups of convolutions on tensor cores in channels_last: `groups_fast` times their FLOPs where
    cuDNN has a kernel, else so many passes (`few_groups_wide`: of fewer than 24 groups of more than
    48 channels); in other layouts and types `groups` times (1 + `groups_padding` / channels) to
    `groups_power`. One channel a group (depthwise): passes and the part of the fp32 rate, by
    layout, `depthwise_slow` times as long where cuDNN has no kernel for channels_last.
    `attention`, `attention_backward`: times as long as FLOPs at the products' rate.
    `product_passes`: over its bytes; `sharpness` of the corner between both bounds. `cached`: of
    the last cache that an operator's bytes may fill; `cache_speedup` of what does. Parts of a time
    that multiprocessors bound: `bound_norms`, `bound_others`. `contiguous_bf16`: times as long of
    batch norms under autocast.
    """

    pointwise: float
    copy: float
    normalization: float
    normalization_backward: float
    softmax: float
    reduction: float
    pooling: float
    embedding: float
    embedding_backward: float
    other: float
    sum_of_product: float
    sum_of_convolution: float
    tile: float
    tile_fp32: float
    unaligned: float
    unaligned_hopper: float
    waves: float
    weight_gradient: float
    weight_gradient_tf32: float
    turned: float
    turned_1x1: float
    groups_narrow: float
    few_groups_wide: float
    groups_fast: float
    groups: float
    groups_power: float
    groups_padding: float
    depthwise_slow: float
    depthwise_passes: float
    depthwise_passes_contiguous: float
    depthwise_rate: float
    depthwise_rate_contiguous: float
    depthwise_rate_weight: float
    product_passes: float
    sharpness: float
    attention: float
    attention_backward: float
    cached: float
    cache_speedup: float
    bound_norms: float
    bound_others: float
    contiguous_bf16: float


FITTED = Shapes(
    pointwise=1.05,
    copy=0.966,
    normalization=1.03,
    normalization_backward=1.19,
    softmax=1.12,
    reduction=1.26,
    pooling=1.68,
    embedding=1.3,
    embedding_backward=3.02,
    other=1.15,
    sum_of_product=108.0,
    sum_of_convolution=87.8,
    tile=82.6,
    tile_fp32=159.0,
    unaligned=1.4,
    unaligned_hopper=4.13,
    waves=0.397,
    weight_gradient=1.26,
    weight_gradient_tf32=2.89,
    turned=1.43,
    turned_1x1=0.448,
    groups_narrow=29.6,
    few_groups_wide=103.0,
    groups_fast=3.92,
    groups=2.21,
    groups_power=1.32,
    groups_padding=22.1,
    depthwise_slow=5.95,
    depthwise_passes=1.4,
    depthwise_passes_contiguous=2.66,
    depthwise_rate=0.0929,
    depthwise_rate_contiguous=0.0416,
    depthwise_rate_weight=0.0784,
    product_passes=0.919,
    sharpness=1.14,
    attention=1.06,
    attention_backward=1.56,
    cached=0.344,
    cache_speedup=2.44,
    bound_norms=0.783,
    bound_others=0.176,
    contiguous_bf16=2.4,
)

# what usual models' products and convolutions (BERT, ResNet-50) take longer by their shapes: a
# device's fractions are those that they reach
_USUAL_PRODUCT, _USUAL_CONVOLUTION = 1.2, 1.7
# multiplications of a 3 x 3 convolution over those of Winograd's F(2 x 2, 3 x 3), which cuDNN takes
# for float32. Source: A. Lavin, S. Gray, arXiv 1509.09308
_WINOGRAD, _WINOGRAD_CHANNELS = 2.25, 32
_BLOCK = 128  # rows and columns of a thread block's output; source: CUTLASS's usual tiles
_SPLIT = 1024  # terms of a sum after which it is split between blocks (assumed)
_LANES = 8  # channels that a tensor core's fragment holds; images have 3
_MOST_WASTE = 4  # where a product is so thin, other kernels are taken (assumed)
# bytes a second of memory for a multiprocessor, up to which none bounds kernels: an RTX 3090's
_FED_BYTES_PER_S = 936e9 * 0.85 / 82
_CONVOLUTIONS = ("convolution", "convolution_input_gradient", "convolution_weight_gradient")


class _Channels(NamedTuple):
    """A convolution's channels in a group and outputs of a group, seen from its forward."""

    taken: float
    given: float

    @classmethod
    def of(cls, one: Operator) -> _Channels:
        """Return the channels of an operator."""
        if one.kind == "convolution":
            return cls(one.k / one.kernel, one.n)
        if one.kind == "convolution_input_gradient":
            return cls(one.n, one.k / one.kernel)
        return cls(one.n / one.kernel, one.m)


@dataclass(frozen=True)
class GpuTime:
    """What prices operators on a GPU.

    `rate`, `convolution_rate`: of the step's products and convolutions. `channels_last`: the layout
    of convolutions. `casts`: autocast. `left`: of the bytes that are no product's what is moved.
    """

    device: Device
    rate: Rate
    convolution_rate: Rate
    channels_last: bool
    casts: bool
    left: float = 1.0
    shapes: Shapes = FITTED

    def seconds(self, one: Operator) -> float:
        """The device's time of one operator."""
        if one.kind in _CONVOLUTIONS:
            return self._convolution_s(one)
        if one.kind == "recurrence":
            return one.count * self.seconds(_one_step(one))
        if one.kind == "product":
            return self._bounded_s(one, self._product_s(one))
        if one.kind.startswith("attention"):
            longer = getattr(self.shapes, one.kind)
            return self._bounded_s(one, longer * self._plain_s(one, self._rate_of(one)))
        return self._moving_s(one)

    def turns_layouts(self, one: Operator) -> bool:
        """Whether a convolution's operands are turned to another layout, and its result back.

        Tensor-core kernels of cuDNN want channels last, float32's (Winograd) contiguous tensors.
        Source: NVIDIA, "Convolutional layers user's guide", tensor layouts.
        """
        is_such = one.kind in _CONVOLUTIONS and not _is_depthwise(one)
        return is_such and self.channels_last == (self._rate_of(one) == "fp32")

    def _moving_s(self, one: Operator) -> float:
        """Passes over what an operator reads and writes."""
        shapes, is_norm = self.shapes, one.kind.startswith("normalization")
        passes: float = getattr(shapes, one.kind)
        if one.kind != "pointwise":
            passes *= self._bound(shapes.bound_norms if is_norm else shapes.bound_others)
        if is_norm and self.rate == "bf16" and self.casts and one.item_bytes == 2:
            # autocast takes layer norms to fp32, so this is a batch norm, which is not cuDNN's then
            # (aten/src/ATen/native/Normalization.cpp); slow in this layout
            passes *= 1.0 if self.channels_last else shapes.contiguous_bf16
        return passes * self.left * self._bytes_s(one)

    def _bytes_s(self, one: Operator) -> float:
        """One pass over its bytes, faster where the last cache holds them."""
        moved, device = one.bytes_read + one.bytes_written, self.device
        seconds = moved / (device.memory_bandwidth_bytes_per_s * device.memory_efficiency)
        if not device.cache_bytes:
            return seconds
        filled = moved / (self.shapes.cached * device.cache_bytes)
        return seconds * (1 - (1 - 1 / self.shapes.cache_speedup) / (1 + filled**2))

    def _bound(self, part: float) -> float:
        """How much longer a kernel takes of which multiprocessors bound a part."""
        device = self.device
        if not device.multiprocessors:
            return 1.0
        reached = device.memory_bandwidth_bytes_per_s * device.memory_efficiency
        fed = reached / device.multiprocessors / _FED_BYTES_PER_S
        return 1 + part * (max(1.0, fed) - 1)

    def _bounded_s(self, one: Operator, flops_s: float) -> float:
        """By its FLOPs or its bytes, whichever takes longer; more where they are alike."""
        bytes_s, power = self.shapes.product_passes * self._bytes_s(one), self.shapes.sharpness
        return float((flops_s**power + bytes_s**power) ** (1 / power))

    def _rate_of(self, one: Operator) -> Rate:
        """Rate of an operator: what is left in fp32 has that one, where the device has it."""
        if one.kind == "product" and one.item_bytes == 1:
            return "fp8"
        is_left = self.rate in ("fp16", "bf16") and one.item_bytes > 2
        if is_left and "fp32" in self.device.peak_flops_per_s:
            return "fp32"
        return self.convolution_rate if one.kind in _CONVOLUTIONS else self.rate

    def _plain_s(self, one: Operator, rate: Rate) -> float:
        """FLOPs at the rate that the device reaches with shapes that cost nothing."""
        is_convolution = one.kind in _CONVOLUTIONS
        usual = _USUAL_CONVOLUTION if is_convolution else _USUAL_PRODUCT
        reached = self.device.efficiency(rate, convolution=is_convolution) * usual
        return one.flops / (self.device.peak_flops_per_s[rate] * reached)

    def _product_s(self, one: Operator) -> float:
        """A product or a convolution without groups, by its FLOPs."""
        shapes, rate = self.shapes, self._rate_of(one)
        is_convolution = one.kind in _CONVOLUTIONS
        tile = shapes.tile_fp32 if rate == "fp32" else shapes.tile
        begun = shapes.sum_of_convolution if is_convolution else shapes.sum_of_product
        seconds: float = self._plain_s(one, rate) * _waste(one.m, tile) * _waste(one.n, tile)
        seconds *= 1 + begun / one.k
        if self.device.multiprocessors:
            blocks = one.count * max(1, one.m / _BLOCK) * max(1, one.n / _BLOCK)
            waves = blocks * max(1, one.k / _SPLIT) / self.device.multiprocessors
            seconds *= 1 + shapes.waves / waves
        if not is_convolution and rate != "fp32" and _is_unaligned(one):
            is_new = self.device.architecture in ("hopper", "blackwell")
            seconds *= shapes.unaligned_hopper if is_new else shapes.unaligned
        return seconds

    def _convolution_s(self, one: Operator) -> float:
        rate, channels = self._rate_of(one), _Channels.of(one)
        if _is_depthwise(one):
            return self._depthwise_s(one, rate, channels)
        if one.count > 1:
            flops_s = self._grouped_s(one, rate, channels)
        else:
            flops_s = self._dense_s(one, rate, channels)
        seconds = self._bounded_s(one, flops_s)
        if self.turns_layouts(one):
            shapes = self.shapes
            turned = shapes.turned if one.kernel > 1 else shapes.turned_1x1
            seconds += 2 * turned * self._bytes_s(one) * self._bound(shapes.bound_others)
        return seconds

    def _dense_s(self, one: Operator, rate: Rate, channels: _Channels) -> float:
        seconds, shapes = self._product_s(one), self.shapes
        if rate != "fp32":
            seconds *= max(1.0, _LANES / channels.taken) ** 2
        elif one.kernel == 9 and channels.taken >= _WINOGRAD_CHANNELS:
            seconds /= _WINOGRAD
        if one.kind == "convolution_weight_gradient":
            is_strided = rate == "tf32" and self.channels_last
            seconds *= shapes.weight_gradient_tf32 if is_strided else shapes.weight_gradient
        return seconds

    def _grouped_s(self, one: Operator, rate: Rate, channels: _Channels) -> float:
        """By groups: cuDNN has kernels for some shapes, and runs others group by group."""
        shapes, taken = self.shapes, channels.taken
        plain_s: float = self._plain_s(one, rate)
        if not (self.channels_last and rate in ("fp16", "bf16")):
            padding = (1 + shapes.groups_padding / taken) ** shapes.groups_power
            return float(plain_s * shapes.groups * padding)
        is_many = one.count >= 24 and one.count % 8 == 0
        if is_many and taken in (4, 8, 16, 32) and channels.given == taken:
            return plain_s * shapes.groups_fast
        wide = 0.0 if one.count >= 24 else 1 / (1 + exp((48 - taken) / 4))
        passes: float = shapes.groups_narrow * min(1.0, taken / 16)
        passes *= (shapes.few_groups_wide / shapes.groups_narrow) ** wide
        bandwidth = self.device.memory_bandwidth_bytes_per_s
        return passes * (one.bytes_read + one.bytes_written) / bandwidth

    def _depthwise_s(self, one: Operator, rate: Rate, channels: _Channels) -> float:
        """Without tensor cores: passes over the bytes, and the window's FLOPs."""
        shapes, fp32 = self.shapes, self.device.peak_flops_per_s.get("fp32")
        if rate == "fp32" or self.channels_last:
            passes, part = shapes.depthwise_passes, shapes.depthwise_rate
        else:
            passes, part = shapes.depthwise_passes_contiguous, shapes.depthwise_rate_contiguous
            if one.kind == "convolution_weight_gradient":
                part = shapes.depthwise_rate_weight
        flops_per_s = part * (fp32 or self.device.peak_flops_per_s[rate])
        seconds = passes * self._bytes_s(one) + one.flops / flops_per_s
        is_half_last = self.channels_last and rate in ("fp16", "bf16")
        has_kernel = one.kernel in (9, 25, 49) and one.count % 8 == 0 and channels.given == 1
        return seconds * (shapes.depthwise_slow if is_half_last and not has_kernel else 1.0)


def _waste(extent: float, tile: float) -> float:
    """What a product computes of an output's side, over its extent: tiles that are not full."""
    if extent >= tile:
        return 1 + 0.25 * tile / extent
    return min(_MOST_WASTE, (extent + 0.7 * (tile - extent)) / extent)


def _one_step(one: Operator) -> Operator:
    """A recurrence's product and the bytes of its pointwise operators."""
    return one._replace(
        kind="product",
        count=1,
        kernel=1,
        flops=one.flops / one.count,
        bytes_read=one.bytes_read / one.count,
        bytes_written=one.bytes_written / one.count,
    )


def _is_depthwise(one: Operator) -> bool:
    return one.count > 1 and _Channels.of(one).taken == 1


def _is_unaligned(one: Operator) -> bool:
    elements = 16 // max(1, round(one.item_bytes))
    return bool(one.n % elements or one.k % elements)
