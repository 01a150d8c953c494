"""A zoo model's table: parameters, buffers, layers, and the sizes of inputs that it takes."""

from __future__ import annotations

from typing import Any

from ddpsim.errors import InputError
from ddpsim.scenario.workload import Precision, Workload
from ddpsim.workload.model import BatchNorm, Buffer, Parameter

__all__ = [
    "batch_norms_of",
    "check_options",
    "input_size_of",
    "input_values",
    "is_convolutional",
    "polynomial_values",
    "product_of",
    "read_buffers",
    "read_parameters",
]


def input_values(table: dict[str, Any], size: int) -> int:
    """Pixels or tokens of a sample."""
    is_side = table["size"]["key"] == "image_size" and table["size"]["variable"] != "pixels"
    return size**2 if is_side else size


def is_convolutional(table: dict[str, Any]) -> bool:
    """Whether its norms, if any, are batch norms, which autocast leaves in half; not so a ViT's.

    Source: torch.amp's op lists, which take layer_norm and softmax to fp32, and not batch_norm.
    """
    names, shapes = table["parameters"]["name"], table["parameters"]["shape"]
    owners = [name.rpartition(".")[0] for name in names]
    convolve = {owner for owner, shape in zip(owners, shapes, strict=True) if len(shape) == 4}
    return sum(module in convolve for module in table["forward"]["module"]) > 1


def check_options(table: dict[str, Any], workload: Workload) -> None:
    """Raise InputError for an option of layers that the model does not have."""
    if workload.memory_format and not is_convolutional(table):
        raise InputError(
            "workload.memory_format",
            f"{workload.model} is no convolutional network, and has no such choice; drop it",
        )
    if workload.attention and not any(table["forward"]["matmul_flops"].get("c2", ())):
        raise InputError(
            "workload.attention",
            f"{workload.model} has no attention over tokens of a seq_len; drop it",
        )


def input_size_of(size: dict[str, Any], workload: Workload) -> int:
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


def read_parameters(columns: dict[str, Any], precision: Precision) -> tuple[Parameter, ...]:
    """The table's parameters, in registration order."""
    dtype = "bfloat16" if precision == "bf16" else "float32"
    return tuple(
        Parameter(name, product_of(shape), dtype, rows=shape[0] if shape else None)
        for name, shape in zip(columns["name"], columns["shape"], strict=True)
    )


def read_buffers(columns: dict[str, Any]) -> tuple[Buffer, ...]:
    """The table's buffers."""
    dtypes = columns["dtype"]
    names = [dtypes] * len(columns["name"]) if isinstance(dtypes, str) else dtypes
    return tuple(
        Buffer(dtype, product_of(shape))
        for dtype, shape in zip(names, columns["shape"], strict=True)
    )


def batch_norms_of(table: dict[str, Any]) -> tuple[BatchNorm, ...]:
    """Modules with a running mean, in the order of their calls."""
    buffers = zip(table["buffers"]["name"], table["buffers"]["shape"], strict=True)
    mean = ".running_mean"
    channels = {n.removesuffix(mean): shape[0] for n, shape in buffers if n.endswith(mean)}
    names = table["parameters"]["name"]
    owners = [names[index].rpartition(".")[0] for index in table["ready_order"]]
    return tuple(
        BatchNorm(module, channels[module], row, owners.index(module))
        for row, module in enumerate(table["forward"]["module"])
        if module in channels
    )


def product_of(shape: list[int]) -> int:
    """Elements of a tensor."""
    product = 1
    for extent in shape:
        product *= extent
    return product


def polynomial_values(
    polynomial: dict[str, list[float]], batch: int, size: int, rows: int
) -> list[float]:
    """fixed + batch (c0 + c1 x + c2 x^2) for every row; a missing column is zero."""
    zeros = [0] * rows
    fixed, c0, c1, c2 = (polynomial.get(key, zeros) for key in ("fixed", "c0", "c1", "c2"))
    return [
        a + batch * (b + size * (c + size * d))
        for a, b, c, d in zip(fixed, c0, c1, c2, strict=True)
    ]
