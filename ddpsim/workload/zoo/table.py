"""A zoo model's table: parameters, buffers, layers, and the sizes of inputs that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from ddpsim.errors import InputError
from ddpsim.scenario.workload import Precision, Workload
from ddpsim.workload.model import BatchNorm, Buffer, Parameter


def is_convolutional(table: dict[str, Any]) -> bool:
    """Whether its norms, if any, are batch norms, which autocast leaves in half; not so a ViT's.

    Source: torch.amp's op lists, which take layer_norm and softmax to fp32, and not batch_norm.
    """
    names, shapes = table["parameters"]["name"], table["parameters"]["shape"]
    owners = [name.rpartition(".")[0] for name in names]
    convolve = {owner for owner, shape in zip(owners, shapes, strict=True) if len(shape) == 4}
    return sum(module in convolve for module in table["forward_modules"]) > 1


def is_recurrent(table: dict[str, Any]) -> bool:
    """Whether it has layers whose steps follow one another."""
    return any(kind == "recurrence" for kind, *_ in table["operators"])


def check_options(table: dict[str, Any], workload: Workload) -> None:
    """Raise InputError for an option of layers that the model does not have."""
    if workload.memory_format and not is_convolutional(table):
        raise InputError(
            "workload.memory_format",
            f"{table['name']} is no convolutional network, and has no such choice; drop it",
        )
    if workload.attention and not any(one[0] == "attention" for one in table["operators"]):
        raise InputError("workload.attention", f"{table['name']} has no attention; drop it")


def input_size_of(table: dict[str, Any], workload: Workload) -> int:
    """The x of the cost polynomials: tokens per sample, or pixels per image; raises InputError."""
    only = table["batch"]
    if only and workload.batch_per_rank != only["only"]:
        raise InputError(
            "workload.batch_per_rank",
            f"{table['name']} was captured at a batch of {only['only']} alone "
            f"({only['because']}); capture it again with --batch {workload.batch_per_rank}",
        )
    size = table["size"]
    key = size["key"] if size else None
    for other in ("seq_len", "image_size"):
        if other != key and getattr(workload, other) is not None:
            words = f"its size is {key}" if key else "it was captured at one size"
            raise InputError(f"workload.{other}", f"this model has no {other}; {words}")
    if not size:
        return 1
    given = getattr(workload, size["key"])
    value = size["default"] if given is None else given
    step, least, most = size["multiple_of"], size["min"], size["max"]
    if value % step or not least <= value <= most:
        steps = f", a multiple of {step}" if step > 1 and least < most else ""
        wanted = f"from {least} to {most}{steps}" if least < most else f"{least} alone"
        why = f" ({size['because']})" if "because" in size else ""
        raise InputError(f"workload.{key}", f"{value} is not possible here; wanted {wanted}{why}")
    return int(value**2 if size["variable"] == "pixels" else value)


class ListedParameter(NamedTuple):
    """One parameter as a table's columns have it."""

    name: str
    shape: list[int]
    module: str
    dtype: str
    is_sparse: bool

    @property
    def owner(self) -> str:
        """The name of the module that has it."""
        return self.name.rpartition(".")[0]


def listed(columns: dict[str, Any]) -> list[ListedParameter]:
    """The parameters of columns, in registration order."""
    modules = columns.get("module") or [""] * len(columns["name"])
    sparse = frozenset(columns.get("sparse", ()))
    each = zip(columns["name"], columns["shape"], modules, _dtypes(columns), strict=True)
    return [ListedParameter(*one, place in sparse) for place, one in enumerate(each)]


def columns_of(parameters: Sequence[ListedParameter], like: dict[str, Any]) -> dict[str, Any]:
    """Columns of these parameters; of one dtype where those they are made `like` are."""
    dtypes = [one.dtype for one in parameters]
    return dict(
        like,
        name=[one.name for one in parameters],
        shape=[one.shape for one in parameters],
        module=[one.module for one in parameters],
        dtype=like["dtype"] if isinstance(like["dtype"], str) else dtypes,
        sparse=[place for place, one in enumerate(parameters) if one.is_sparse],
    )


def read_parameters(
    columns: dict[str, Any], precision: Precision, output_layer: str | None = None
) -> tuple[Parameter, ...]:
    """The table's parameters, in registration order; under bf16 those of floats have two bytes."""
    in_half = precision == "bf16"
    return tuple(
        Parameter(
            one.name,
            prod(one.shape),
            "bfloat16" if in_half and one.dtype == "float32" else one.dtype,
            sparse=one.is_sparse,
            shape=tuple(one.shape),
            is_edge="Embedding" in one.module or one.owner == output_layer,
        )
        for one in listed(columns)
    )


def _dtypes(columns: dict[str, Any]) -> list[str]:
    dtypes = columns["dtype"]
    return [dtypes] * len(columns["name"]) if isinstance(dtypes, str) else dtypes


def read_buffers(columns: dict[str, Any]) -> tuple[Buffer, ...]:
    """The table's buffers."""
    return tuple(
        Buffer(dtype, prod(shape))
        for dtype, shape in zip(_dtypes(columns), columns["shape"], strict=True)
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
        for row, module in enumerate(table["forward_modules"])
        if module in channels and module in owners
    )
