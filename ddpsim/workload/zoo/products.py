"""The matrix products and convolutions of a zoo table's rows: their shapes, and what follows.

A product's output is cut into tiles, one for each thread block, and a device runs as many blocks at
once as it has multiprocessors. What the last wave of blocks leaves idle counts where there are few.
Source: NVIDIA, "Matrix multiplication background user's guide", tile and wave quantization.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ddpsim.scenario.device import Device, Rate
from ddpsim.workload.zoo.table import product_of

__all__ = ["Product", "outputs_of", "products_of"]

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


class Product(NamedTuple):
    """Of a row: a weight's shape, empty where it multiplies none; and so many products of it."""

    shape: tuple[int, ...] = ()
    passes: int = 1

    @property
    def is_convolution(self) -> bool:
        """Whether its weight has four dimensions."""
        return len(self.shape) == 4

    def filled(self, flops: float, multiprocessors: int | None) -> float:
        """The part of a device's multiprocessors that is at work, 1 where it is not known.

        Of w waves w + 1 are paid, as a last one is half empty on average, and one more begins late.
        """
        if not (self.shape and flops and multiprocessors):
            return 1.0
        outputs = flops / (2 * product_of(list(self.shape[1:])) * self.passes)
        waves = max(1.0, outputs / _TILE) / multiprocessors
        return waves / (waves + 1)

    def done_flops(self, flops: float, rate: Rate, device: Device) -> float:
        """Those that a GPU computes of a convolution: padded channels too, or Winograd's fewer."""
        if device.kind != "gpu" or not self.is_convolution:
            return flops
        if rate == "fp32":
            is_dense = self.shape[2:] == (3, 3) and self.shape[1] >= 32
            return flops / _WINOGRAD if is_dense else flops
        padding = max(1.0, _CHANNELS[rate] / self.shape[1])
        is_of_images = self.shape[1] <= _OF_IMAGES
        return flops * padding if is_of_images else flops * padding**2  # a group's outputs too


def products_of(table: dict[str, Any]) -> tuple[list[Product], list[Product]]:
    """Of the rows of forward and backward, which has two: for the input and for the weight."""
    names, shapes = table["parameters"]["name"], table["parameters"]["shape"]
    owners = [name.rpartition(".")[0] for name in names]
    weights = {owner: tuple(shape) for owner, shape in _matrices(owners, shapes)}
    forward = [Product(weights.get(module, ())) for module in table["forward"]["module"]]
    backward = [Product(weights.get(owners[i], ()), passes=2) for i in table["ready_order"]]
    return forward, [*backward, Product()]


def outputs_of(
    table: dict[str, Any], evaluated: Callable[[dict[str, list[float]], int], list[float]]
) -> Iterator[float]:
    """Elements that each row of the forward hands on: the output of its product, or of the last.

    FLOPs are two for each element and each element of its sum; attention's (c2) are another's. A
    weight that another module owns is not known: all that is moved, but the input, is output then.
    """
    forward, parameters = table["forward"], table["parameters"]
    columns = zip(parameters["name"], parameters["shape"], parameters["module"], strict=True)
    summed = {
        name.rpartition(".")[0]: product_of(shape[:-1] if kind == "Conv1D" else shape[1:])
        for name, shape, kind in columns
        if len(shape) > 1
    }
    rows = len(forward["module"])
    flops = evaluated(_without(forward["matmul_flops"], "c2"), rows)
    moved = evaluated(_without(forward["matmul_elements"], "fixed", "c2"), rows)
    outputs = 0.0
    for module, row_flops, row_moved in zip(forward["module"], flops, moved, strict=True):
        if row_flops:
            each = summed.get(module)
            outputs = row_flops / 2 / each if each else row_moved - outputs
        yield outputs


def _without(polynomial: dict[str, list[float]], *terms: str) -> dict[str, list[float]]:
    return {term: values for term, values in polynomial.items() if term not in terms}


def _matrices(owners: list[str], shapes: list[list[int]]) -> Iterator[tuple[str, list[int]]]:
    """The first weight of each module that is a matrix, last to first."""
    for owner, shape in reversed(list(zip(owners, shapes, strict=True))):
        if len(shape) > 1:
            yield owner, shape
