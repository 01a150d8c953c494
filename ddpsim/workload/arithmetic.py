"""Which arithmetic a precision uses on a device, and at what rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ddpsim.errors import InputError
from ddpsim.scenario.device import Device, Rate
from ddpsim.scenario.workload import Precision, Workload
from ddpsim.workload.zoo.table import is_convolutional


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """What a precision means: the rate and the bytes of an element of matrix products.

    `casts`: autocast, under which softmax and loss are of four bytes.
    """

    rate: Rate
    matmul_bytes: float
    casts: bool = False

    @property
    def softmax_bytes(self) -> float:
        """Bytes of an element of a softmax that is written out, which autocast takes to fp32."""
        return 4.0 if self.casts else self.matmul_bytes

    @property
    def is_half(self) -> bool:
        """Whether matrix products and convolutions are of two bytes."""
        return self.matmul_bytes == 2

    def convolution_rate(self, device: Device) -> Rate:
        """torch leaves convolutions of fp32 to TF32 where a GPU has it, but no matrix products.

        Source: torch.backends.cudnn.allow_tf32 is true unless set, cuda.matmul.allow_tf32 false.
        """
        return "tf32" if self.rate == "fp32" and "tf32" in device.peak_flops_per_s else self.rate


_ARITHMETIC: dict[Precision, Arithmetic] = {
    "fp32": Arithmetic("fp32", 4),
    "tf32": Arithmetic("tf32", 4),
    "amp-fp16": Arithmetic("fp16", 2, casts=True),
    "amp-bf16": Arithmetic("bf16", 2, casts=True),
    "bf16": Arithmetic("bf16", 2),
}


def arithmetic_of(precision: Precision, device: Device) -> Arithmetic:
    """The arithmetic of a precision; raises InputError where the device does not have it."""
    arithmetic = _ARITHMETIC[precision]
    if arithmetic.rate not in device.peak_flops_per_s:
        fits = [p for p, a in _ARITHMETIC.items() if a.rate in device.peak_flops_per_s]
        raise InputError(
            "workload.precision",
            f"{device.name} has no {arithmetic.rate} matmul rate; wanted one of {', '.join(fits)}",
        )
    return arithmetic


def half_arithmetic(device: Device) -> Arithmetic:
    """Arithmetic of products in bfloat16, or in float32 where a device has no such rate.

    A GPU without one computes them so (assumed).
    """
    rate: Rate = "bf16" if "bf16" in device.peak_flops_per_s else "fp32"
    return Arithmetic(rate, 2)


# of the bytes that are no matrix product's, what is left where torch.compile fuses kernels
# (assumed; docs/validation.md, section 3); a batch norm needs its statistics before it can go on
_LEFT_BY_COMPILE = 0.25
_LEFT_IN_CONVOLUTIONAL = 0.6


def other_left(table: dict[str, Any], workload: Workload) -> float:
    """The part of the bytes that are no matrix product's which is moved."""
    if not workload.compile:
        return 1.0
    return _LEFT_IN_CONVOLUTIONAL if is_convolutional(table) else _LEFT_BY_COMPILE
