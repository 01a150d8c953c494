"""How long an operator takes on a device that nobody measured, and what an attention consists of.

A GPU's time follows from the operator's shape (`ddpsim.workload.zoo.gpu_time`). A CPU core takes
its FLOPs at the reached rate and its bytes at the reached bandwidth. No kernel is shorter than the
device's floor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from ddpsim.scenario.device import Device
from ddpsim.scenario.workload import Workload
from ddpsim.workload.arithmetic import Arithmetic
from ddpsim.workload.model import Work
from ddpsim.workload.operators import MULTIPLYING, Kind, Operator, moving
from ddpsim.workload.zoo.gpu_time import GpuTime

# kernels that turn a convolution's operands to channels last and its result back; the gradient's
# two convolutions share theirs
_TURNS = {"convolution": 3, "convolution_input_gradient": 1, "convolution_weight_gradient": 2}

_SMALL_CHANNELS = 64  # of convolutions that torch.compile leaves contiguous


@dataclass(frozen=True)
class Law:
    """What prices operators; `other_left`: of the bytes that are no product's what is moved.

    `compiles`: torch.compile made them. `channels_last`: the layout of convolutions.
    """

    device: Device
    arithmetic: Arithmetic
    other_left: float = 1.0
    compiles: bool = False
    channels_last: bool = False

    @classmethod
    def of(
        cls,
        workload: Workload,
        device: Device,
        arithmetic: Arithmetic,
        other_left: float,
        operators: Iterable[Operator] = (),
    ) -> Law:
        """Return the law of a step, whose operators tell how torch.compile lays them out."""
        compiles = bool(workload.compile)
        last = workload.memory_format == "channels_last"
        last = last or (compiles and _compiled_to_channels_last(operators))
        return cls(device, arithmetic, other_left, compiles=compiles, channels_last=last)

    def work(self, one: Operator) -> Work:
        """Device time, kernels, and the host's time of one operator."""
        pricing, device = self._gpu_time, self.device
        kernels = round(one.kernel) if one.kind == "recurrence" else 1
        if device.kind == "cpu":
            device_s = self._core_s(one)
        else:
            device_s = pricing.seconds(one)
            if pricing.turns_layouts(one):
                kernels += _TURNS[one.kind]
        return Work(max(device_s, kernels * device.kernel_floor_s), kernels, self.operator_s)

    @property
    def operator_s(self) -> float:
        """The host's seconds an operator, launches apart; compiled code has none."""
        without = self.compiles or self.device.kind == "cpu"
        return 0.0 if without else self.device.operator_s

    @cached_property
    def _gpu_time(self) -> GpuTime:
        arithmetic = self.arithmetic
        return GpuTime(
            self.device,
            arithmetic.rate,
            arithmetic.convolution_rate(self.device),
            channels_last=self.channels_last,
            casts=arithmetic.casts,
            left=self.other_left,
        )

    def _core_s(self, one: Operator) -> float:
        device, moved_bytes = self.device, one.bytes_read + one.bytes_written
        bytes_per_s = device.memory_bandwidth_bytes_per_s * device.memory_efficiency
        if one.kind not in MULTIPLYING:
            return moved_bytes * self.other_left / bytes_per_s
        reached = device.efficiency(self.arithmetic.rate, convolution=one.kind in _TURNS)
        peak = device.peak_flops_per_s[self.arithmetic.rate]
        return one.flops / (peak * reached) + moved_bytes / bytes_per_s


def _compiled_to_channels_last(operators: Iterable[Operator]) -> bool:
    """Whether torch.compile turns a model in contiguous tensors to channels last.

    Not with grouped or narrowing convolutions, or small ones alone. Source:
    torch/_inductor/graph.py (decide_layout_opt).
    """
    every_one_is_small = True
    for one in operators:
        if one.kind != "convolution":
            continue
        taken, given = one.k / one.kernel, one.count * one.n
        if (one.count > 1 and taken > 1) or (one.kernel > 1 and 2 * given <= taken):
            return False
        every_one_is_small = every_one_is_small and max(taken, given) <= _SMALL_CHANNELS
    return not every_one_is_small


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
            yield moving("copy", scores * read, scores * written)
