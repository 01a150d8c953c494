"""Values of events' arguments: operations, sizes and types by their names in ddpsim."""

from __future__ import annotations

from math import prod
from typing import Any

from ddpsim.importers.kineto.events import MOST, count_of
from ddpsim.importers.kineto.measured import Gradient

_DTYPES = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "bfloat16": "bfloat16",
    **dict.fromkeys(("long int", "long"), "int64"),
    "int": "int32",
    **dict.fromkeys(("short int", "short"), "int16"),
    **dict.fromkeys(("signed char", "char"), "int8"),
    **dict.fromkeys(("unsigned char", "byte"), "uint8"),
    "bool": "bool",
}
_OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce")


def operation_of(name: str) -> str:
    """`allreduce`, `ncclKernel_AllReduce_RING_LL_Sum_float` and `gloo:all_reduce` are one."""
    plain = name.lower().replace("_", "")
    return next((known for known in _OPERATIONS if known.replace("_", "") in plain), name)


def gradient_of(args: dict[str, Any]) -> Gradient:
    """Of the first input."""
    shape, dtype = first(args.get("Input Dims")), first(args.get("Input type"))
    return Gradient(_shape(shape), dtype_of(dtype))


def first(inputs: Any) -> Any:
    """Of several inputs; None where there is none."""
    return inputs[0] if isinstance(inputs, list) and inputs else None


def _shape(extents: Any) -> tuple[int, ...] | None:
    if not isinstance(extents, list) or not all(isinstance(extent, int) for extent in extents):
        return None
    return tuple(extents) if 0 < prod(extents) <= MOST else None


def first_count(extents: Any) -> int | None:
    """The first extent of a grid or a block."""
    return count_of(first(extents))


def dtype_of(name: Any) -> str | None:
    """A type by torch's name for it."""
    return _DTYPES.get(name_of(name))


def name_of(dtype: Any) -> str:
    """`c10::Half` of an op is `Half` of a collective."""
    return str(dtype).removeprefix("c10::").lower()
