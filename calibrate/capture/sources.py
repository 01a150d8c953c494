"""A model to capture, made by a user's function, which may take a batch and a size."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from calibrate.capture.shapes import META, building, drop_memory, tensors, without_memory
from calibrate.measure.errors import MeasureError
from calibrate.measure.model.training import SIZES, Made, checked
from calibrate.measure.model.user_code import find_function, users_own_errors

SizeKey = Literal["seq_len", "image_size"]
_STRIDE = 32  # of most convolutional networks as a whole: images of other sizes are padded


@dataclass(frozen=True)
class Sizes:
    """The sizes to capture at: three that the polynomials go through, and one that checks them."""

    key: SizeKey
    default: int
    points: tuple[int, int, int]
    check: int
    multiple_of: int = 1

    def x(self, size: int) -> int:
        """The variable of the polynomials: tokens, or pixels."""
        return size * size if self.key == "image_size" else size

    def entry(self, *, is_free: bool) -> dict[str, Any]:
        """The document's "size" object."""
        least, most = (self.points[0], self.points[-1]) if is_free else (self.default,) * 2
        return {
            "key": self.key,
            "default": self.default,
            "variable": ("pixels" if self.key == "image_size" else "seq_len")
            if is_free
            else "none",
            "multiple_of": self.multiple_of if is_free else self.default,
            "min": least,
            "max": most,
        }

    @classmethod
    def around(cls, key: SizeKey, default: int) -> Iterator[Sizes]:
        """What to try for a model whose limits nobody states, the widest first."""
        if key == "image_size":
            low = max(_STRIDE, default // 2 // _STRIDE * _STRIDE)
            check = default if default not in (low, 2 * low) else low + _STRIDE
            if default % _STRIDE == 0:
                yield cls(key, default, (low, 2 * low, 4 * low), check, _STRIDE)
            return
        quarter, half = default // 4, default // 2
        if quarter < 2:
            return
        # no more than the usual one: a lookup of positions that a model lacks shows no shape
        yield cls(key, default, (quarter, half + 1, default), default - 1)
        if default % 16 == 0:  # what takes whole blocks alone
            yield cls(key, default, (quarter, half, default), 3 * quarter, quarter)


@dataclass(frozen=True)
class Source:
    """A model that can be made at a batch and a size.

    `make`: called with both, with the model and the inputs without memory. `batch`, `sizes`: the
    usual ones, and those to try; none where the model takes no size. `told`: of the model in words.
    """

    name: str
    title: str
    family: str
    told: str
    make: Callable[[int, int | None], Made]
    batch: int
    default: int | None = None
    sizes: tuple[Sizes, ...] = ()


def function_source(reference: str, batch: int | None, size: int | None) -> Source:
    """MODULE:FUNCTION, with the batch and the size that the user gave; raises MeasureError."""
    function = find_function(reference)
    parameters = inspect.signature(function).parameters
    key = next((key for key in SIZES if key in parameters), None)
    default = None
    if key:
        default = _default(reference, parameters[key], size)
    elif size is not None:
        raise MeasureError(
            f"{reference} takes no size: write an argument seq_len or image_size, or drop --size"
        )
    takes_batch = "batch" in parameters
    usual = _default(reference, parameters["batch"], batch) if takes_batch else (batch or 2)

    def make(batch: int, size: int | None) -> Made:
        options: dict[str, int] = {"batch": batch} if takes_batch else {}
        if key:
            options[key] = size or default or 1
        with users_own_errors(reference), building():
            made = checked(reference, function(**options))
        drop_memory(made.model)
        inputs = without_memory(made.inputs)
        return made._replace(inputs=inputs if takes_batch else of_batch(inputs, batch))

    if not takes_batch and batch is None:
        with users_own_errors(reference), building():
            usual = batch_of(checked(reference, function()).inputs)
    sizes = tuple(Sizes.around(key, default)) if key and default else ()  # type: ignore[arg-type]
    name = reference.rpartition(":")[2]
    return Source(name, reference, "own", reference, make, usual, default, sizes)


def _default(reference: str, parameter: inspect.Parameter, given: int | None) -> int:
    value = parameter.default if given is None else given
    if value is parameter.empty:
        option = "--batch" if parameter.name == "batch" else "--size"
        raise MeasureError(f"{reference} has no default {parameter.name}: give {option}")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise MeasureError(f"{parameter.name} is {value!r}: wanted a whole number from 1")
    return value


def batch_of(inputs: Any) -> int:
    """The first extent that all inputs have."""
    extents = {tensor.shape[0] for tensor in tensors(inputs) if tensor.dim()}
    if len(extents) != 1:
        raise MeasureError(
            "the inputs have no common first dimension to take as the batch: write an argument "
            "batch of the function"
        )
    return int(extents.pop())


def of_batch(inputs: Any, batch: int) -> Any:
    """Inputs with another first extent."""

    def resized(tensor: Tensor) -> Tensor:
        if not tensor.dim():
            return tensor
        return torch.empty(batch, *tensor.shape[1:], dtype=tensor.dtype, device=META)

    return tree_map_only(Tensor, resized, inputs)
