"""Times of a zoo model on a device that nobody measured: a roofline per piece of work.

Matrix products and convolutions take the longer of their FLOPs at the reached peak rate and
their bytes at the reached memory bandwidth; everything else takes its bytes. No kernel is
shorter than the device's floor. The reached fractions are the device preset's. The host takes its
time for every operator, and for what each of them launches; compiled code has no operators.
What the tables do not hold comes on top: attention that is written out, and convolutions whose
operands cuDNN turns to the layout that its half kernels want.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ddpsim.errors import InputError
from ddpsim.provenance import Provenance
from ddpsim.scenario.cluster import Rate
from ddpsim.scenario.schema import Device, Precision, Workload
from ddpsim.workload.model import Buffer, Model, Parameter, Work, joined
from ddpsim.workload.optimizer import optimizer_work

__all__ = ["zoo_model"]


@dataclass(frozen=True, slots=True)
class _Arithmetic:
    """What a precision means: the device's rate, and bytes per element of each kind of work."""

    rate: Rate
    matmul_bytes: float
    other_bytes: float
    casts: bool = False

    @property
    def softmax_bytes(self) -> float:
        """Of an element of a softmax that is written out, which autocast takes to fp32."""
        return 4.0 if self.casts else self.matmul_bytes

    @property
    def is_half(self) -> bool:
        """Whether matrix products and convolutions are of two bytes."""
        return self.matmul_bytes == 2

    def of(self, table: dict[str, Any]) -> _Arithmetic:
        """As a model has it: autocast leaves batch norms and what follows them in half."""
        in_half = self.casts and _is_convolutional(table)
        return replace(self, other_bytes=self.matmul_bytes) if in_half else self

    def convolution_rate(self, device: Device) -> Rate:
        """torch leaves convolutions of fp32 to TF32 where a GPU has it, but no matrix products.

        Source: torch.backends.cudnn.allow_tf32 is true unless set, cuda.matmul.allow_tf32 false.
        """
        return "tf32" if self.rate == "fp32" and "tf32" in device.peak_flops_per_s else self.rate


# autocast runs matrix products in half and keeps layer norms, softmax and loss in fp32: 3 bytes
# are the assumed mean of its other work. Source: torch.amp's op lists
_ARITHMETIC: dict[Precision, _Arithmetic] = {
    "fp32": _Arithmetic("fp32", 4, 4),
    "tf32": _Arithmetic("tf32", 4, 4),
    "amp-fp16": _Arithmetic("fp16", 2, 3, casts=True),
    "amp-bf16": _Arithmetic("bf16", 2, 3, casts=True),
    "bf16": _Arithmetic("bf16", 2, 2),
}


def zoo_model(table: dict[str, Any], workload: Workload, device: Device) -> Model:
    """A zoo table (schema `ddpsim.model/1`) as a model on a device; raises InputError."""
    arithmetic = _arithmetic(workload.precision, device).of(table)
    size = _input_size(table["size"], workload)
    _check_options(table, workload)
    parameters = _parameters(table["parameters"], workload.precision)
    ready_order = tuple(table["ready_order"])
    in_forward, in_backward = _convolutions(table)
    step = _Step(workload, size, device, arithmetic, _other_left(table, workload))
    forward = tuple(step.works(table["forward"], in_forward, _WRITTEN_OUT_FORWARD))
    backward = tuple(step.works(table["backward"], in_backward, _WRITTEN_OUT_BACKWARD))
    if arithmetic.casts:
        forward, backward = _with_casts(forward, backward, table, step)
    return Model(
        parameters=parameters,
        ready_order=ready_order,
        buffers=_buffers(table["buffers"]),
        forward=forward,
        backward=backward,
        optimizer=optimizer_work(workload.optimizer, parameters, device),
        launch_s=device.launch_s,
        activation_bytes=_activations(table, workload, size, arithmetic),
        provenance=_provenance(table, workload, device, arithmetic, convolutions=any(in_forward)),
        basis="roofline",
        # images in three channels of float32, tokens as int64
        sample_bytes=(12 if table["size"]["key"] == "image_size" else 8) * _inputs(table, size),
    )


def _inputs(table: dict[str, Any], size: int) -> int:
    """Pixels or tokens of a sample."""
    is_side = table["size"]["key"] == "image_size" and table["size"]["variable"] != "pixels"
    return size**2 if is_side else size


def _arithmetic(precision: Precision, device: Device) -> _Arithmetic:
    arithmetic = _ARITHMETIC[precision]
    if arithmetic.rate not in device.peak_flops_per_s:
        fits = [p for p, a in _ARITHMETIC.items() if a.rate in device.peak_flops_per_s]
        raise InputError(
            "workload.precision",
            f"{device.name} has no {arithmetic.rate} matmul rate; wanted one of {', '.join(fits)}",
        )
    return arithmetic


def _is_convolutional(table: dict[str, Any]) -> bool:
    """Whether its norms, if any, are batch norms, which autocast leaves in half; not so a ViT's.

    Source: torch.amp's op lists, which take layer_norm and softmax to fp32, and not batch_norm.
    """
    return sum(_convolutions(table)[0]) > 1


def _check_options(table: dict[str, Any], workload: Workload) -> None:
    """Raise InputError for an option of layers that the model does not have."""
    if workload.memory_format and not _is_convolutional(table):
        raise InputError(
            "workload.memory_format",
            f"{workload.model} is no convolutional network, and has no such choice; drop it",
        )
    if workload.attention and not any(table["forward"]["matmul_flops"].get("c2", ())):
        raise InputError(
            "workload.attention",
            f"{workload.model} has no attention over tokens of a seq_len; drop it",
        )


def _input_size(size: dict[str, Any], workload: Workload) -> int:
    """The x of the cost polynomials: tokens per sample, or pixels per image."""
    key = size["key"]
    other = "image_size" if key == "seq_len" else "seq_len"
    if getattr(workload, other) is not None:
        raise InputError(f"workload.{other}", f"this model has no {other}; its size is {key}")
    given = getattr(workload, key)
    value = size["default"] if given is None else given
    step, least, most = size["multiple_of"], size["min"], size["max"]
    if value % step or value < least or (most is not None and value > most):
        limit = f"from {least}" + (f" to {most}" if most is not None else " up")
        steps = f", a multiple of {step}" if step > 1 else ""
        raise InputError(f"workload.{key}", f"{value} is not possible here; wanted {limit}{steps}")
    return int(value**2 if size["variable"] == "pixels" else value)


def _parameters(columns: dict[str, Any], precision: Precision) -> tuple[Parameter, ...]:
    dtype = "bfloat16" if precision == "bf16" else "float32"
    return tuple(
        Parameter(name, _product(shape), dtype)
        for name, shape in zip(columns["name"], columns["shape"], strict=True)
    )


def _buffers(columns: dict[str, Any]) -> tuple[Buffer, ...]:
    dtypes = columns["dtype"]
    names = [dtypes] * len(columns["name"]) if isinstance(dtypes, str) else dtypes
    return tuple(
        Buffer(dtype, _product(shape)) for dtype, shape in zip(names, columns["shape"], strict=True)
    )


def _product(shape: list[int]) -> int:
    product = 1
    for extent in shape:
        product *= extent
    return product


def _convolutions(table: dict[str, Any]) -> tuple[list[bool], list[bool]]:
    """Which rows of forward and backward are a convolution's: its weight has four dimensions."""
    names, shapes = table["parameters"]["name"], table["parameters"]["shape"]
    owners = [name.rpartition(".")[0] for name in names]
    found = {owner for owner, shape in zip(owners, shapes, strict=True) if len(shape) == 4}
    in_backward = [owners[i] in found for i in table["ready_order"]]
    return [module in found for module in table["forward"]["module"]], [*in_backward, False]


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
# of the bytes that are no matrix product's, what is left where torch.compile fuses kernels
# (assumed; docs/validation.md, section 3); a batch norm needs its statistics before it can go on
_LEFT_BY_COMPILE = 0.25
_LEFT_IN_CONVOLUTIONAL = 0.6
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
    arithmetic: _Arithmetic
    other_left: float  # of the bytes that are no matrix product's

    def works(
        self, columns: dict[str, Any], convolutions: Sequence[bool], written_out: _WrittenOut
    ) -> Iterator[Work]:
        """Device time and kernels, row by row."""
        arithmetic, device = self.arithmetic, self.device
        rows = len(columns["kernels"])
        keys = ("matmul_flops", "matmul_elements", "other_elements")
        evaluated = (self._evaluated(columns.get(key, {}), rows) for key in keys)
        usual_flops_per_s = self._flops_per_s(arithmetic.rate)
        convolution_rate = arithmetic.convolution_rate(device)
        convolution_flops_per_s = self._flops_per_s(convolution_rate, convolution=True)
        scores = _scores(columns, self.workload, self.size, written_out)
        for flops, matmul, other, count, is_one, of_scores in zip(
            *evaluated, columns["kernels"], convolutions, scores, strict=True
        ):
            flops_per_s = convolution_flops_per_s if is_one else usual_flops_per_s
            matmul_bytes = matmul * arithmetic.matmul_bytes
            matmul_s = max(flops / flops_per_s, matmul_bytes / self._bytes_per_s)
            other_bytes = other * arithmetic.other_bytes + self._bytes_of(of_scores, written_out)
            other_bytes *= self.other_left
            operators = count
            if of_scores:
                operators += written_out.kernels + arithmetic.casts * _CASTS_KERNELS
            kernels = operators
            if is_one and self._turns_layouts:
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
        """Half kernels of cuDNN want channels last, and turn what comes otherwise, and back.

        Source: NVIDIA, "Convolutional layers user's guide", tensor layouts. What is compiled is
        laid out so from the start (torch/_inductor/config.py: layout_optimization).
        """
        channels_last = self.workload.memory_format == "channels_last" or self.workload.compile
        return self.arithmetic.is_half and not channels_last

    def _evaluated(self, polynomial: dict[str, list[float]], rows: int) -> list[float]:
        return _evaluate(polynomial, self.workload.batch_per_rank, self.size, rows)

    def _bytes_of(self, scores: float, written_out: _WrittenOut) -> float:
        arithmetic = self.arithmetic
        casts = 2 * (arithmetic.matmul_bytes + arithmetic.softmax_bytes) * arithmetic.casts
        moved = written_out.matmul_passes * arithmetic.matmul_bytes
        softmax = written_out.softmax_passes * arithmetic.softmax_bytes
        return scores * (moved + softmax + casts + 1)


def _other_left(table: dict[str, Any], workload: Workload) -> float:
    """The part of the bytes that are no matrix product's which is moved."""
    if not workload.compile:
        return 1.0
    return _LEFT_IN_CONVOLUTIONAL if _is_convolutional(table) else _LEFT_BY_COMPILE


def _scores(
    columns: dict[str, Any], workload: Workload, size: int, written_out: _WrittenOut
) -> list[float]:
    """Batch x heads x tokens^2 of each row, told by its FLOPs; 0 where attention is fused."""
    squared = columns["matmul_flops"].get("c2")
    if workload.attention != "eager" or squared is None:
        return [0.0] * len(columns["kernels"])
    samples = workload.batch_per_rank * size**2
    return [samples * flops / written_out.flops_per_score for flops in squared]


def _evaluate(polynomial: dict[str, list[float]], batch: int, size: int, rows: int) -> list[float]:
    """fixed + batch (c0 + c1 x + c2 x^2) for every row; a missing column is zero."""
    zeros = [0] * rows
    fixed, c0, c1, c2 = (polynomial.get(key, zeros) for key in ("fixed", "c0", "c1", "c2"))
    return [
        a + batch * (b + size * (c + size * d))
        for a, b, c, d in zip(fixed, c0, c1, c2, strict=True)
    ]


def _with_casts(
    forward: tuple[Work, ...], backward: tuple[Work, ...], table: dict[str, Any], step: _Step
) -> tuple[tuple[Work, ...], tuple[Work, ...]]:
    """Autocast's own work: fp32 weights to half each forward, half gradients back to fp32.

    Of what matrix products and convolutions take: a module's parameters where one is a matrix.
    """
    names, shapes = table["parameters"]["name"], table["parameters"]["shape"]
    owners = [name.rpartition(".")[0] for name in names]
    multiplying = {owner for owner, shape in zip(owners, shapes, strict=True) if len(shape) > 1}
    device = step.device
    per_element_s = 6 / (device.memory_bandwidth_bytes_per_s * device.memory_efficiency)
    casts = [
        Work(per_element_s * _product(shape), 1, step.operator_s)
        if owner in multiplying
        else Work(0.0)
        for owner, shape in zip(owners, shapes, strict=True)
    ]
    back = [*(casts[i] for i in table["ready_order"]), Work(0.0)]
    return (joined(casts), *forward), tuple(map(joined, zip(backward, back, strict=True)))


def _activations(
    table: dict[str, Any], workload: Workload, size: int, arithmetic: _Arithmetic
) -> float:
    """Bytes kept for the backward; stored for fp32, scaled by the width that they have.

    Of attention that is written out also the softmax, what dropout left of it, and its mask. Under
    autocast autograd keeps its half copies of the weights too (ATen/autocast_mode.cpp).
    """
    columns = {key: [value] for key, value in table["saved_bytes"].items()}
    in_fp32 = _evaluate(columns, workload.batch_per_rank, size, rows=1)[0]
    copies = arithmetic.matmul_bytes * _multiplied_weights(table) if arithmetic.casts else 0.0
    scores = sum(_scores(table["forward"], workload, size, _WRITTEN_OUT_FORWARD))
    kept = scores * (arithmetic.softmax_bytes + arithmetic.matmul_bytes + 1)
    return in_fp32 * arithmetic.other_bytes / 4 + copies + kept


def _multiplied_weights(table: dict[str, Any]) -> int:
    """Elements that matrix products and convolutions read whatever the batch: their weights."""
    return int(sum(table["forward"]["matmul_elements"]["fixed"]))


def _provenance(
    table: dict[str, Any],
    workload: Workload,
    device: Device,
    arithmetic: _Arithmetic,
    *,
    convolutions: bool,
) -> tuple[Provenance, ...]:
    rates, reached = [arithmetic.rate], f"{device.efficiency(arithmetic.rate):.0%}"
    of_convolutions = arithmetic.convolution_rate(device)
    if convolutions and of_convolutions not in rates:
        rates.append(of_convolutions)
    peaks = [f"{device.peak_flops_per_s[rate] / 1e12:g} TFLOP/s {rate}" for rate in rates]
    others = " for convolutions, torch's default" if len(rates) > 1 else ""
    mostly = of_convolutions if _is_convolutional(table) else arithmetic.rate
    by_them = f"{device.efficiency(of_convolutions, convolution=True):.0%}"
    if convolutions and by_them != reached:
        reached = f"{reached} (convolutions {by_them})"
    return (
        Provenance("workload.model", table["source"], "measured"),
        Provenance(
            "compute time",
            f"roofline of {device.name}: {', '.join(peaks)}{others}, "
            f"{device.memory_bandwidth_bytes_per_s / 1e9:g} GB/s",
            "datasheet" if device.sources else "stated",
        ),
        Provenance(
            "compute efficiency",
            f"{reached} of the FLOP rate, {device.memory_efficiency:.0%} of the bandwidth reached "
            f"by {workload.model}{_told_by(device, mostly)}",
            device.efficiency_trust(mostly),
        ),
        *_of_layers(table, workload, arithmetic),
    )


def _of_layers(
    table: dict[str, Any], workload: Workload, arithmetic: _Arithmetic
) -> Iterator[Provenance]:
    """What is taken of the layers where the scenario does not say it."""
    if workload.compile:
        left = _other_left(table, workload)
        what = f"{left:.0%} of the bytes beside matrix products left by torch.compile"
        yield Provenance("compute layers", what, "assumed")
    elif _is_convolutional(table) and arithmetic.is_half and workload.memory_format is None:
        what = "contiguous tensors, torch's default, which convolutions turn and turn back"
        yield Provenance("compute layers", what, "assumed")


def _told_by(device: Device, rate: Rate) -> str:
    steps = device.published_steps.get(rate)
    return f"; set by {steps} published steps" if steps else ""
