"""How long an operator takes on a device that nobody measured: a roofline for each.

A product's output is cut into tiles, one for each thread block, and a device runs as many blocks at
once as it has multiprocessors. What the last wave of blocks leaves idle counts where there are few.
Source: NVIDIA, "Matrix multiplication background user's guide", tile and wave quantization.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ddpsim.scenario.device import Device, Rate
from ddpsim.scenario.workload import Workload
from ddpsim.workload.arithmetic import Arithmetic
from ddpsim.workload.model import Work
from ddpsim.workload.operators import MULTIPLYING, Kind, Operator

__all__ = ["Law", "written_out"]

_TILE = 128 * 64  # elements of the output; libraries' tiles are 64 x 64 to 256 x 128
# multiplications of a 3 x 3 convolution over those of Winograd's F(2 x 2, 3 x 3), which cuDNN takes
# for float32. Source: A. Lavin, S. Gray, arXiv 1509.09308
_WINOGRAD = 2.25
# channels of a group that tensor cores sum in a step: 64 bytes, padded where there are fewer.
# Source: tiles of CUTLASS's implicit_gemm_convolution.md. On an H200 (tests/data/devices) bf16
# convolutions of images reach an eighth to an eleventh, and of 32 groups of four channels about
# a sixtieth, of what 64 channels do
_CHANNELS: dict[Rate, int] = {"tf32": 16, "fp16": 32, "bf16": 32}
_OF_IMAGES = 3  # channels of a convolution that has no groups, as all in the zoo with fewer than 64
# kernels that turn a convolution's operands to channels last and its result back; the gradient's
# two convolutions share theirs
_TURNS = {"convolution": 3, "convolution_input_gradient": 1, "convolution_weight_gradient": 2}


@dataclass(frozen=True)
class Law:
    """What prices operators; `other_left`: of the bytes that are no product's what is moved."""

    workload: Workload
    device: Device
    arithmetic: Arithmetic
    other_left: float

    def work(self, one: Operator) -> Work:
        """Device time, kernels, and the host's time of one operator."""
        device, kernels = self.device, 1
        moved_bytes = one.bytes_read + one.bytes_written
        bytes_per_s = device.memory_bandwidth_bytes_per_s * device.memory_efficiency
        if one.kind not in MULTIPLYING:
            device_s = moved_bytes * self.other_left / bytes_per_s
        else:
            is_convolution = one.kind in _TURNS
            rate = self._rate(one, is_convolution=is_convolution)
            peak = device.peak_flops_per_s[rate]
            flops_per_s = peak * device.efficiency(rate, convolution=is_convolution)
            flops = self._done_flops(one, rate) if is_convolution else one.flops
            device_s = flops / flops_per_s / self._filled(one) + moved_bytes / bytes_per_s
            if is_convolution and rate != "fp32" and not self._channels_last:
                kernels += _TURNS[one.kind]
                shared = one.kind == "convolution_input_gradient"
                turned_bytes = one.bytes_written if shared else moved_bytes
                device_s += 2 * turned_bytes * self.other_left / bytes_per_s
        return Work(max(device_s, kernels * device.kernel_floor_s), kernels, self.operator_s)

    @property
    def operator_s(self) -> float:
        """The host's seconds an operator, launches apart; compiled code has none."""
        without = self.workload.compile or self.device.kind == "cpu"
        return 0.0 if without else self.device.operator_s

    @property
    def _channels_last(self) -> bool:
        """Tensor-core kernels of cuDNN want channels last, and turn what comes otherwise, and back.

        Source: NVIDIA, "Convolutional layers user's guide", tensor layouts. What is compiled is
        laid out so from the start (torch/_inductor/config.py: layout_optimization).
        """
        return self.workload.memory_format == "channels_last" or self.workload.compile

    def _rate(self, one: Operator, *, is_convolution: bool) -> Rate:
        """Of a product that autocast leaves in float32 its rate, where the device has one."""
        arithmetic = self.arithmetic
        if arithmetic.is_half and one.item_bytes > 2:
            return "fp32" if "fp32" in self.device.peak_flops_per_s else arithmetic.rate
        return arithmetic.convolution_rate(self.device) if is_convolution else arithmetic.rate

    def _filled(self, one: Operator) -> float:
        """The part of a device's multiprocessors that is at work, 1 where it is not known.

        Of w waves w + 1 are paid, as a last one is half empty on average, and one more begins late.
        """
        multiprocessors = self.device.multiprocessors
        if not multiprocessors or one.kind.startswith("attention"):
            return 1.0
        # a long sum over a small output, as of a weight's gradient, is split between blocks
        outputs = one.count * max(one.m * one.n, one.m * one.k, one.n * one.k)
        waves = max(1.0, outputs / _TILE) / multiprocessors
        return waves / (waves + 1)

    def _done_flops(self, one: Operator, rate: Rate) -> float:
        """Those that a GPU computes of a convolution: padded channels too, or Winograd's fewer."""
        if self.device.kind != "gpu":
            return one.flops
        inner = one.n if one.kind == "convolution_weight_gradient" else one.k
        channels = inner / one.kernel
        if rate == "fp32":
            is_dense = one.kernel == 9 and channels >= 32
            return one.flops / _WINOGRAD if is_dense else one.flops
        padding = max(1.0, _CHANNELS[rate] / channels)
        is_of_images = channels <= _OF_IMAGES
        return (
            one.flops * padding if is_of_images else one.flops * padding**2
        )  # and a group's outputs


# transformers' eager_attention_forward: product (w), scale (rw), mask (rw), softmax (rw), dropout
# (rw), product (r); and back: product (w) and another (r), dropout (rw), softmax (rrw), scale (rw),
# two products (rr); each as bytes read and written for a score: of the products' width, of the
# softmax's, and of dropout's mask
_Parts = tuple[tuple[Kind, tuple[int, int], tuple[int, int], int], ...]
_FORWARD: _Parts = (
    ("product", (0, 1), (0, 0), 0),
    ("pointwise", (1, 1), (0, 0), 0),
    ("pointwise", (1, 1), (0, 0), 0),
    ("softmax", (0, 0), (1, 1), 0),
    ("pointwise", (0, 0), (1, 1), 1),
    ("product", (1, 0), (0, 0), 0),
)
_BACKWARD: _Parts = (
    ("product", (0, 1), (0, 0), 0),
    ("product", (1, 0), (0, 0), 0),
    ("pointwise", (0, 0), (1, 1), 1),
    ("softmax", (0, 0), (2, 1), 0),
    ("pointwise", (1, 1), (0, 0), 0),
    ("product", (1, 0), (0, 0), 0),
    ("product", (1, 0), (0, 0), 0),
)


def written_out(one: Operator, softmax_bytes: float) -> Iterator[Operator]:
    """The operators of an attention that is not fused; any other operator as it is.

    `softmax_bytes`: of a score in the softmax, which autocast takes to fp32 and back.
    """
    if not one.kind.startswith("attention"):
        yield one
        return
    scores = one.count * one.m * one.n
    parts = _FORWARD if one.kind == "attention" else _BACKWARD
    products = sum(kind == "product" for kind, *_ in parts)
    for kind, products_width, softmax_width, mask in parts:
        read, written = (
            scores * (a * one.item_bytes + b * softmax_bytes)
            for a, b in zip(products_width, softmax_width, strict=True)
        )
        made = Operator(kind, bytes_read=read, bytes_written=written + mask * scores)
        if kind == "product":
            read += (one.bytes_read + one.bytes_written) / products
            made = made._replace(count=one.count, m=one.m, n=one.n, k=one.k, bytes_read=read)
            made = made._replace(flops=2 * scores * one.k)
        yield made._replace(item_bytes=one.item_bytes)
    if softmax_bytes > one.item_bytes:
        for read, written in ((one.item_bytes, softmax_bytes), (softmax_bytes, one.item_bytes)):
            yield Operator("copy", bytes_read=scores * read, bytes_written=scores * written)
