"""Times of a zoo model on a device that nobody measured: a roofline per piece of work.

Matrix products and convolutions take their FLOPs at the reached peak rate, as far as their tiles
fill the device, and their bytes at the reached memory bandwidth; everything else takes its bytes.
No kernel is shorter than the device's floor. The reached fractions are the device preset's. The
host takes its time for every operator, and for what each of them launches; compiled code has no
operators.
What the tables do not hold comes on top: attention that is written out, and convolutions whose
operands cuDNN turns to the layout that its tensor-core kernels want.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from ddpsim.scenario.device import Device, Rate
from ddpsim.scenario.workload import Workload
from ddpsim.workload.arithmetic import Arithmetic, arithmetic_of, other_left
from ddpsim.workload.checkpointing import KeptBytes, checkpointed, with_reruns
from ddpsim.workload.model import Model, Work, joined
from ddpsim.workload.optimizer import optimizer_work
from ddpsim.workload.roofline_sources import roofline_provenance
from ddpsim.workload.zoo.products import Product, outputs_of, products_of
from ddpsim.workload.zoo.table import (
    batch_norms_of,
    check_options,
    input_size_of,
    input_values,
    is_convolutional,
    polynomial_values,
    product_of,
    read_buffers,
    read_parameters,
)

__all__ = ["zoo_model"]

Works = tuple[Work, ...]


def zoo_model(
    table: dict[str, Any],
    workload: Workload,
    device: Device,
    *,
    half_weights: bool = False,
    knows_outputs: bool = False,
) -> Model:
    """A zoo table (schema `ddpsim.model/1`) as a model on a device; raises InputError.

    `half_weights`: they are half already where the model is called, so that autocast casts none.
    `knows_outputs`: with what each work of the forward hands on.
    """
    arithmetic = arithmetic_of(workload.precision, device).of(table)
    size = input_size_of(table["size"], workload)
    check_options(table, workload)
    parameters = read_parameters(table["parameters"], workload.precision)
    ready_order = tuple(table["ready_order"])
    step = _Step(workload, size, device, arithmetic, other_left(table, workload))
    of_forward, of_backward = products_of(table)
    forward = tuple(step.works(table["forward"], of_forward, _WRITTEN_OUT_FORWARD))
    backward = tuple(step.works(table["backward"], of_backward, _WRITTEN_OUT_BACKWARD))
    casts = _casts_of(table, step) if arithmetic.casts and not half_weights else None
    if casts:
        forward, backward = casts.added_to(forward, backward)
    kept = _kept(table, step, casts_weights=casts is not None)
    twice = checkpointed(workload, table["blocks"]["name"])
    if twice:
        last_rows = _last_rows(table, step, of_forward, casts)
        chosen = {name: last_rows[name] for name in twice}
        forward, backward = with_reruns(forward, backward, kept.blocks, chosen)
    return Model(
        parameters=parameters,
        ready_order=ready_order,
        buffers=read_buffers(table["buffers"]),
        forward=forward,
        backward=backward,
        optimizer=optimizer_work(workload.optimizer, parameters, device),
        launch_s=device.launch_s,
        activation_bytes=kept.at_most(twice),
        provenance=roofline_provenance(
            table,
            workload,
            device,
            arithmetic,
            convolutions=any(product.is_convolution for product in of_forward),
        ),
        basis="roofline",
        # images in three channels of float32, tokens as int64
        sample_bytes=(12 if table["size"]["key"] == "image_size" else 8)
        * input_values(table, size),
        forward_modules=tuple(table["forward"]["module"]),
        forward_outputs=tuple(outputs_of(table, step.evaluated)) if knows_outputs else (),
        batch_norms=batch_norms_of(table),
        flops=step.flops(table),
    )


class _WrittenOut(NamedTuple):
    """What a pass of written-out attention moves for each score, and its kernels.

    Passes over scores in the width of matrix products, and in that of the softmax (under autocast
    four bytes, and four casts besides); a byte for dropout's mask, twice with what reads it.
    """

    matmul_passes: int
    softmax_passes: int
    flops_per_score: float
    kernels: int


_HEAD_WIDTH = 64  # of all attention in the zoo
# transformers' eager_attention_forward: product (w), scale (rw), mask (rw), softmax (rw), dropout
# (rw), product (r); and back: product (w) and another (r), dropout (rw), softmax (rrw), scale (rw),
# two products (rr)
_WRITTEN_OUT_FORWARD = _WrittenOut(6, 4, 4 * _HEAD_WIDTH, 5)
_WRITTEN_OUT_BACKWARD = _WrittenOut(6, 5, 10 * _HEAD_WIDTH, 5)
_CASTS_KERNELS = 2


@dataclass(frozen=True)
class _Step:
    """What prices the rows of a table."""

    workload: Workload
    size: int
    device: Device
    arithmetic: Arithmetic
    other_left: float  # of the bytes that are no matrix product's

    def works(
        self, columns: dict[str, Any], products: Sequence[Product], written_out: _WrittenOut
    ) -> Iterator[Work]:
        """Device time and kernels, row by row."""
        arithmetic, device = self.arithmetic, self.device
        rows = len(columns["kernels"])
        keys = ("matmul_flops", "matmul_elements", "other_elements")
        evaluated = (self.evaluated(columns.get(key, {}), rows) for key in keys)
        usual_flops_per_s = self._flops_per_s(arithmetic.rate)
        convolution_rate = arithmetic.convolution_rate(device)
        convolution_flops_per_s = self._flops_per_s(convolution_rate, convolution=True)
        scores = _scores(columns, self.workload, self.size, written_out)
        for flops, matmul, other, count, product, of_scores in zip(
            *evaluated, columns["kernels"], products, scores, strict=True
        ):
            is_one = product.is_convolution
            flops_per_s = convolution_flops_per_s if is_one else usual_flops_per_s
            matmul_bytes = matmul * arithmetic.matmul_bytes
            flops_s = product.done_flops(flops, convolution_rate, device) / flops_per_s
            filled = product.filled(flops, device.multiprocessors)
            matmul_s = flops_s / filled + matmul_bytes / self._bytes_per_s
            other_bytes = other * arithmetic.other_bytes + self._bytes_of(of_scores, written_out)
            other_bytes *= self.other_left
            operators = count
            if of_scores:
                operators += written_out.kernels + arithmetic.casts * _CASTS_KERNELS
            kernels = operators
            if is_one and flops and self._turns_layouts:
                other_bytes += 2 * matmul_bytes  # each operand read and written once more
                kernels += 3
            device_s = matmul_s + other_bytes / self._bytes_per_s
            host_s = operators * self.operator_s
            yield Work(max(device_s, kernels * device.kernel_floor_s), kernels, host_s)

    @property
    def operator_s(self) -> float:
        """The host's seconds an operator, launches apart; compiled code has none."""
        without = self.workload.compile or self.device.kind == "cpu"
        return 0.0 if without else self.device.operator_s

    @property
    def _bytes_per_s(self) -> float:
        return self.device.memory_bandwidth_bytes_per_s * self.device.memory_efficiency

    def _flops_per_s(self, rate: Rate, *, convolution: bool = False) -> float:
        reached = self.device.efficiency(rate, convolution=convolution)
        return self.device.peak_flops_per_s[rate] * reached

    @property
    def _turns_layouts(self) -> bool:
        """Tensor-core kernels of cuDNN want channels last, and turn what comes otherwise, and back.

        Source: NVIDIA, "Convolutional layers user's guide", tensor layouts. What is compiled is
        laid out so from the start (torch/_inductor/config.py: layout_optimization).
        """
        channels_last = self.workload.memory_format == "channels_last" or self.workload.compile
        rate = self.arithmetic.convolution_rate(self.device)
        return rate != "fp32" and not channels_last

    def flops(self, table: dict[str, Any]) -> float:
        """Those of matrix products and convolutions in forward and backward."""
        phases = [table["forward"], table["backward"]]
        return sum(
            sum(self.evaluated(phase["matmul_flops"], len(phase["kernels"]))) for phase in phases
        )

    def evaluated(self, polynomial: dict[str, list[float]], rows: int) -> list[float]:
        """Each row's value at this batch and size."""
        return polynomial_values(polynomial, self.workload.batch_per_rank, self.size, rows)

    def _bytes_of(self, scores: float, written_out: _WrittenOut) -> float:
        arithmetic = self.arithmetic
        casts = 2 * (arithmetic.matmul_bytes + arithmetic.softmax_bytes) * arithmetic.casts
        moved = written_out.matmul_passes * arithmetic.matmul_bytes
        softmax = written_out.softmax_passes * arithmetic.softmax_bytes
        return scores * (moved + softmax + casts + 1)


def _scores(
    columns: dict[str, Any], workload: Workload, size: int, written_out: _WrittenOut
) -> list[float]:
    """Batch x heads x tokens^2 of each row, told by its FLOPs; 0 where attention is fused."""
    squared = columns["matmul_flops"].get("c2")
    if workload.attention != "eager" or squared is None:
        return [0.0] * len(columns["kernels"])
    samples = workload.batch_per_rank * size**2
    return [samples * flops / written_out.flops_per_score for flops in squared]


class _Casts(NamedTuple):
    """Autocast's own work, by rows of the forward and of the backward."""

    forward: list[Work]
    backward: list[Work]

    def added_to(self, forward: Works, backward: Works) -> tuple[Works, Works]:
        """A step with them."""
        return _joined_rows(self.forward, forward), _joined_rows(backward, self.backward)


def _joined_rows(one: Sequence[Work], other: Sequence[Work]) -> Works:
    return tuple(map(joined, zip(one, other, strict=True)))


def _casts_of(table: dict[str, Any], step: _Step) -> _Casts:
    """fp32 weights to half in each forward, half gradients back to fp32.

    Of what matrix products and convolutions take: a module's parameters where one is a matrix. They
    are cast where the module is called, and once (ATen/autocast_mode.cpp caches them). What a layer
    norm leaves in fp32 is cast too where a product takes it, and so are gradients of the sums of
    both.
    """
    names, shapes = table["parameters"]["name"], table["parameters"]["shape"]
    owners = [name.rpartition(".")[0] for name in names]
    multiplying = {owner for owner, shape in zip(owners, shapes, strict=True) if len(shape) > 1}
    device = step.device
    per_element_s = 6 / (device.memory_bandwidth_bytes_per_s * device.memory_efficiency)
    casts = [
        Work(per_element_s * product_of(shape), 1, step.operator_s)
        if owner in multiplying
        else Work(0.0)
        for owner, shape in zip(owners, shapes, strict=True)
    ]
    of_module: dict[str, list[Work]] = defaultdict(list)
    for owner, cast in zip(owners, casts, strict=True):
        of_module[owner].append(cast)
    # bytes of activations that are cast are in the mean of all other work
    activation = Work(0.0, 1, step.operator_s)
    for module in _after_norms(table) & multiplying:
        of_module[module].append(activation)
    called = table["forward"]["module"]
    forward = [joined([Work(0.0), *of_module.pop(module, ())]) for module in called]
    of_gradient = Work(0.0) if is_convolutional(table) else activation
    back = [
        joined([casts[i], of_gradient]) if len(shapes[i]) > 1 else casts[i]
        for i in table["ready_order"]
    ]
    return _Casts(forward, [*back, Work(0.0)])


def _after_norms(table: dict[str, Any]) -> set[str]:
    """Modules called right after a norm that autocast takes to fp32; batch norms it leaves."""
    if is_convolutional(table):
        return set()
    names, classes = table["parameters"]["name"], table["parameters"]["module"]
    owners = zip((name.rpartition(".")[0] for name in names), classes, strict=True)
    norms = {owner for owner, kind in owners if "Norm" in kind}
    return {module for before, module in pairwise(table["forward"]["module"]) if before in norms}


def _last_rows(
    table: dict[str, Any], step: _Step, products: Sequence[Product], casts: _Casts | None
) -> dict[str, Work]:
    """By blocks, what of their last rows a checkpoint runs again; `products`: the forward's."""
    blocks, modules = table["blocks"], table["forward"]["module"]
    lasts = [
        max(row for row, module in enumerate(modules) if module.startswith(f"{name}."))
        for name in blocks["name"]
    ]
    works = step.works(blocks["rerun"], [products[row] for row in lasts], _WRITTEN_OUT_FORWARD)
    cast = [casts.forward[row] if casts else Work(0.0) for row in lasts]
    return dict(zip(blocks["name"], _joined_rows(cast, tuple(works)), strict=True))


def _kept(table: dict[str, Any], step: _Step, *, casts_weights: bool) -> KeptBytes:
    """Bytes kept for the backward; stored for fp32, scaled by the width that they have.

    Of attention that is written out also the softmax, what dropout left of it, and its mask. Under
    autocast autograd keeps its half copies of the weights too (ATen/autocast_mode.cpp).
    """
    workload, arithmetic = step.workload, step.arithmetic
    weights = table["forward"]["matmul_elements"]["fixed"]
    copy_bytes = arithmetic.matmul_bytes if casts_weights else 0.0
    score_bytes = arithmetic.softmax_bytes + arithmetic.matmul_bytes + 1
    scores = _scores(table["forward"], workload, step.size, _WRITTEN_OUT_FORWARD)

    def evaluated(polynomial: dict[str, list[float]], rows: int) -> list[float]:
        values = polynomial_values(polynomial, workload.batch_per_rank, step.size, rows)
        return [value * arithmetic.other_bytes / 4 for value in values]

    by_row = zip(weights, scores, strict=True)
    return KeptBytes(
        table, evaluated, [copy_bytes * weight + score_bytes * score for weight, score in by_row]
    )
