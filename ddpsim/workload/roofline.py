"""Times of a zoo model on a device that nobody measured: a roofline per piece of work.

Matrix products and convolutions take the longer of their FLOPs at the reached peak rate and
their bytes at the reached memory bandwidth; everything else takes its bytes. No kernel is
shorter than the device's floor. The reached fractions are the device preset's assumptions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ddpsim.errors import InputError
from ddpsim.provenance import Provenance
from ddpsim.scenario.cluster import Rate
from ddpsim.scenario.schema import Device, Precision, Workload
from ddpsim.workload.model import Buffer, Model, Parameter, Work
from ddpsim.workload.optimizer import optimizer_work

__all__ = ["zoo_model"]


@dataclass(frozen=True, slots=True)
class _Arithmetic:
    """What a precision means: the device's rate, and bytes per element of each kind of work."""

    rate: Rate
    matmul_bytes: float
    other_bytes: float
    casts: bool = False

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
    arithmetic = _arithmetic(workload.precision, device)
    size = _input_size(table["size"], workload)
    parameters = _parameters(table["parameters"], workload.precision)
    ready_order = tuple(table["ready_order"])
    in_forward, in_backward = _convolutions(table)
    forward = tuple(_works(table["forward"], in_forward, workload, size, device, arithmetic))
    backward = tuple(_works(table["backward"], in_backward, workload, size, device, arithmetic))
    if arithmetic.casts:
        forward, backward = _with_casts(forward, backward, parameters, ready_order, device)
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


def _works(
    columns: dict[str, Any],
    convolutions: Sequence[bool],
    workload: Workload,
    size: int,
    device: Device,
    arithmetic: _Arithmetic,
) -> Iterator[Work]:
    kernels = columns["kernels"]
    evaluated = (
        _evaluate(columns.get(key, {}), workload.batch_per_rank, size, len(kernels))
        for key in ("matmul_flops", "matmul_elements", "other_elements")
    )
    rate, convolution_rate = arithmetic.rate, arithmetic.convolution_rate(device)
    usual_flops_per_s = device.peak_flops_per_s[rate] * device.efficiency(rate)
    reached = device.efficiency(convolution_rate, convolution=True)
    convolution_flops_per_s = device.peak_flops_per_s[convolution_rate] * reached
    bytes_per_s = device.memory_bandwidth_bytes_per_s * device.memory_efficiency
    for flops, matmul, other, count, is_one in zip(*evaluated, kernels, convolutions, strict=True):
        flops_per_s = convolution_flops_per_s if is_one else usual_flops_per_s
        matmul_s = max(flops / flops_per_s, matmul * arithmetic.matmul_bytes / bytes_per_s)
        other_s = other * arithmetic.other_bytes / bytes_per_s
        yield Work(max(matmul_s + other_s, count * device.kernel_floor_s), count)


def _evaluate(polynomial: dict[str, list[float]], batch: int, size: int, rows: int) -> list[float]:
    """fixed + batch (c0 + c1 x + c2 x^2) for every row; a missing column is zero."""
    zeros = [0] * rows
    fixed, c0, c1, c2 = (polynomial.get(key, zeros) for key in ("fixed", "c0", "c1", "c2"))
    return [
        a + batch * (b + size * (c + size * d))
        for a, b, c, d in zip(fixed, c0, c1, c2, strict=True)
    ]


def _with_casts(
    forward: tuple[Work, ...],
    backward: tuple[Work, ...],
    parameters: tuple[Parameter, ...],
    ready_order: tuple[int, ...],
    device: Device,
) -> tuple[tuple[Work, ...], tuple[Work, ...]]:
    """Autocast's own work: fp32 weights to half each forward, half gradients back to fp32."""
    per_element_s = 6 / (device.memory_bandwidth_bytes_per_s * device.memory_efficiency)
    weights_s = per_element_s * sum(parameter.numel for parameter in parameters)
    casts = [parameters[i].numel * per_element_s for i in ready_order] + [0.0]
    return (
        (Work(weights_s, len(parameters)), *forward),
        tuple(Work(w.device_s + s, w.kernels + 1) for w, s in zip(backward, casts, strict=True)),
    )


def _activations(
    table: dict[str, Any], workload: Workload, size: int, arithmetic: _Arithmetic
) -> float:
    """Bytes kept for the backward; stored for fp32, scaled by the width that they have.

    Under autocast autograd keeps its half copies of the weights too (ATen/autocast_mode.cpp).
    """
    columns = {key: [value] for key, value in table["saved_bytes"].items()}
    in_fp32 = _evaluate(columns, workload.batch_per_rank, size, rows=1)[0]
    copies = arithmetic.matmul_bytes * _multiplied_weights(table) if arithmetic.casts else 0.0
    in_half = arithmetic.casts and _is_convolutional(table)
    width = arithmetic.matmul_bytes if in_half else arithmetic.other_bytes
    return in_fp32 * width / 4 + copies


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
            f"by {workload.model}",
            "assumed",
        ),
    )
