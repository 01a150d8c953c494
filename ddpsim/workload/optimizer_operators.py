"""Operators of a step of Adafactor or Muon, which go from parameter to parameter.

Source: torch 2.13 torch/optim/_adafactor.py (_single_tensor_adafactor: foreach is off by default)
and _muon.py (_single_tensor_muon: there is no other), operator by operator. A product that adds to
a matrix copies that first (aten/src/ATen/native/cuda/Blas.cpp). Nesterov's momentum is on.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from ddpsim.errors import InputError
from ddpsim.scenario.workload import Optimizer
from ddpsim.workload.model import ITEM_BYTES, Parameter
from ddpsim.workload.operators import Operator, moving, product

_ITERATIONS = 5  # Muon's ns_steps
_HALF = ITEM_BYTES["bfloat16"]  # Newton-Schulz is computed in it


def is_muons(optimizer: Optimizer, parameter: Parameter) -> bool:
    """Whether Muon takes a parameter: a matrix, and none that AdamW is to take."""
    if len(_shape(parameter)) != 2:
        return False
    if optimizer.adamw is None:
        return not parameter.is_edge
    return not any(parameter.name.startswith(f"{module}.") for module in optimizer.adamw)


def factored_numel(parameter: Parameter) -> int:
    """Elements of Adafactor's second moment: a column and a row of each matrix; all of a vector."""
    shape = _shape(parameter)
    if len(shape) < 2:
        return parameter.numel
    return prod(shape[:-2]) * (shape[-2] + shape[-1])


def optimizer_operators(optimizer: Optimizer, parameter: Parameter) -> tuple[Operator, ...]:
    """List what Adafactor or Muon runs for one parameter, which Muon must take."""
    if optimizer.name == "muon":
        return tuple(_muon(parameter, iterations(optimizer)))
    return tuple(_adafactor(optimizer, parameter))


def half_product(
    m: int, n: int, k: int, *, adds: bool, of_itself: bool = False
) -> tuple[Operator, ...]:
    """A product in bfloat16 of m x k by k x n.

    `adds`: to one of its operands, which it copies first; `of_itself`: both are one matrix.
    """
    read = _HALF * (m * k + (0 if of_itself else k * n))
    made = product(m, n, k, _HALF)._replace(bytes_read=read)
    return (_copied(m * n, _HALF, _HALF), made) if adds else (made,)


def iterations(optimizer: Optimizer) -> int:
    """How many Newton-Schulz iterations Muon makes."""
    return _ITERATIONS if optimizer.ns_steps is None else optimizer.ns_steps


def around_products(
    rows: int, columns: int, item_bytes: int
) -> tuple[tuple[Operator, ...], tuple[Operator, ...]]:
    """Muon's operators before the first product, and after the last."""
    numel, item = rows * columns, item_bytes
    before = (
        _pointwise(numel, 2 * item, item),  # the momentum
        _pointwise(numel, 2 * item, item),  # Nesterov's
        _copied(numel, item, _HALF),
        moving("reduction", _HALF * numel, _HALF),
        _pointwise(1, _HALF, _HALF),
        _pointwise(numel, _HALF, _HALF, also_read=_HALF),
    )
    decay, update = _pointwise(numel, item, item), _pointwise(numel, item + _HALF, item)
    return before, (decay, update)


def _muon(parameter: Parameter, steps: int) -> Iterator[Operator]:
    rows, columns = _shape(parameter)
    before, after = around_products(rows, columns, ITEM_BYTES[parameter.dtype])
    short, long = sorted((rows, columns))
    yield from before
    for _ in range(steps):
        yield from half_product(short, short, long, adds=False, of_itself=True)
        yield from half_product(short, short, short, adds=True, of_itself=True)
        yield from half_product(short, long, short, adds=True)
    yield from after


def _adafactor(optimizer: Optimizer, parameter: Parameter) -> Iterator[Operator]:
    """Each norm of the parameter and of its update goes to the host, a copy of one value."""
    shape, numel, item = _shape(parameter), parameter.numel, ITEM_BYTES[parameter.dtype]

    def normed(kept: int) -> Operator:
        return moving("reduction", item * numel, item * kept)

    yield from (normed(1), _copied(1, item, item))
    if optimizer.weight_decay:
        yield _pointwise(numel, item, item)
    if len(shape) > 1:
        kept = prod(shape[:-1]), prod(shape[:-2]) * shape[-1]
        for extent in kept:  # of rows, and of columns: their norm, squared, divided, averaged
            yield normed(extent)
            yield from (_pointwise(extent, item, item), _pointwise(extent, item, item))
            yield _pointwise(extent, 2 * item, item)
        # an outer product of one term, which its bytes bound
        yield _pointwise(numel, 0, item, also_read=item * sum(kept))._replace(flops=2 * numel)
        averages = prod(shape[:-2])
        yield moving("reduction", item * kept[0], item * averages)
        yield _pointwise(averages, item, item)
        yield _pointwise(numel, item, item, also_read=item * averages)
    else:
        yield _pointwise(numel, item, item)
        yield _pointwise(numel, 2 * item, item)
        yield _copied(numel, item, item)
    yield from (_pointwise(numel, item, item), _pointwise(numel, item, item))
    yield _pointwise(numel, 2 * item, item)
    yield from (normed(1), _copied(1, item, item))
    yield _pointwise(numel, 2 * item, item)


def _pointwise(numel: int, read: int, written: int, also_read: int = 0) -> Operator:
    """Bytes of an element that are read and written."""
    bytes_read = numel * read + also_read
    return moving("pointwise", bytes_read, numel * written)


def _copied(numel: int, read: int, written: int) -> Operator:
    return moving("copy", numel * read, numel * written)


def _shape(parameter: Parameter) -> tuple[int, ...]:
    """Raises InputError where it is not known."""
    if parameter.shape is None:
        problem = f"goes by shapes, and nobody tells that of {parameter.name}"
        remedy = "give a zoo model or a parameter list"
        raise InputError("workload.optimizer.name", f"{problem}; {remedy}")
    return parameter.shape
