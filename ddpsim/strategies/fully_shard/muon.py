"""Muon on matrices whose rows are shared out: torch.optim.Muon over DTensors.

For each product DTensor takes the placement of operands that costs least to reach, by a cost model
of its own, so collectives depend on shapes and ranks. Source: torch 2.13 torch/distributed/tensor
(_ops/_matrix_ops.py: placements of mm and addmm; _sharding_prop.py: the choice;
_collective_utils.py: costs).

Host times: 40 matrices of two rows over two ranks that send nothing, on one core of a Xeon, torch
2.13, as many times foreach Adam's as measured beside it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, prod
from typing import Literal, NamedTuple

from ddpsim.cluster.transfers import Operation
from ddpsim.scenario.workload import Optimizer
from ddpsim.strategies.context import StrategyContext
from ddpsim.strategies.ddp.costs import Prices
from ddpsim.strategies.instructions import Await, Communicate, Instruction, compute
from ddpsim.workload.model import ITEM_BYTES, Model, Parameter, Work
from ddpsim.workload.operators import Operator
from ddpsim.workload.optimizer import beside_muon, operators_s, optimizer_work, parted
from ddpsim.workload.optimizer_operators import around_products, half_product, iterations

# of a matrix: each rank has rows of it, columns of it, all of it, or a part of a sum
Placement = Literal["rows", "columns", "whole", "partial"]
_Shape = tuple[int, int]
_HALF = 2  # bytes of an element
# of a product's operands and result, in torch's order, which decides between equal costs
_PLACED: tuple[tuple[Placement, Placement, Placement], ...] = (
    ("whole", "whole", "whole"),
    ("columns", "rows", "partial"),
    ("rows", "whole", "rows"),
    ("whole", "columns", "columns"),
    ("partial", "whole", "partial"),
    ("whole", "partial", "partial"),
)
_TURNED: dict[Placement, Placement] = {"rows": "columns", "columns": "rows"}
_GIB = 1024**3
_OTHERS_S, _PRODUCT_S = 110e-6, 27e-6  # the host's, of what is around the products, and of each
_NUMBER = -2  # of its collectives, each of which is awaited before the next one
_NORM_BYTES = 2
_CAUSE = "Muon's matrices"


class Sent(NamedTuple):
    """A collective; `size_bytes`: of all of the matrix, or of a rank's part of an exchange."""

    operation: Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all"]
    size_bytes: int


class LocalProduct(NamedTuple):
    """One rank's part of a product: m x k by k x n; `adds`: to a matrix."""

    m: int
    n: int
    k: int
    adds: bool


class _Matrix(NamedTuple):
    shape: _Shape
    placement: Placement

    @property
    def turned(self) -> _Matrix:
        rows, columns = self.shape
        return _Matrix((columns, rows), _TURNED.get(self.placement, self.placement))


@dataclass(frozen=True)
class Mesh:
    """So many ranks that share each matrix, and how many of them a node has."""

    ranks: int
    per_node: int

    def cost(self, one: _Matrix, wanted: Placement) -> float:
        """Microseconds that torch assumes for a change of placement."""
        if one.placement in (wanted, "whole"):
            return 0.0
        size = _HALF * prod(one.shape)
        if one.placement == "partial":
            hops = 1 if wanted in ("rows", "columns") else 2
            return self._ring_us(size, hops)
        if wanted == "partial":
            return inf
        if wanted == "whole":
            return self._ring_us(size, 1)
        return self._ring_us(size / self.ranks, 1) + 1

    def _ring_us(self, size_bytes: float, turns: int) -> float:
        is_wide = self.ranks > self.per_node
        gib_per_s, latency_us = (87.7 * 0.22, 2.7) if is_wide else (87.7, 0.6)
        hops = turns * (self.ranks - 1)
        return 6.6 + hops * latency_us + size_bytes / _GIB * hops / self.ranks / gib_per_s * 1e6

    def can_split(self, one: _Matrix, placement: Placement) -> bool:
        """Whether each rank gets a row, or a column."""
        extent = {"rows": one.shape[0], "columns": one.shape[1]}.get(placement, self.ranks)
        return extent >= self.ranks

    def local(self, one: _Matrix, placement: Placement) -> _Shape:
        """Extents of the first rank's part."""
        rows, columns = one.shape
        if placement == "rows":
            return ceil(rows / self.ranks), columns
        return rows, ceil(columns / self.ranks) if placement == "columns" else columns

    def sent(self, one: _Matrix, wanted: Placement) -> Iterator[Sent]:
        """What a change of placement sends; a rank cuts what it has whole itself."""
        if one.placement in (wanted, "whole"):
            return
        size_bytes = _HALF * prod(one.shape)
        if one.placement == "partial":
            yield Sent("all_reduce" if wanted == "whole" else "reduce_scatter", size_bytes)
        elif wanted == "whole":
            yield Sent("all_gather", size_bytes)
        else:
            yield Sent("all_to_all", _HALF * prod(self.local(one, one.placement)))


def newton_schulz(shape: _Shape, iterations: int, mesh: Mesh) -> Iterator[Sent | LocalProduct]:
    """What Muon computes and sends for a matrix whose rows are shared out, in order."""
    matrix = _Matrix(shape, "rows")
    is_tall = shape[0] > shape[1]
    if is_tall:
        matrix = matrix.turned
    for _ in range(iterations):
        gram = yield from _product(mesh, matrix, matrix.turned)
        update = yield from _product(mesh, gram, gram, gram)
        matrix = yield from _product(mesh, update, matrix, matrix)
    if is_tall:
        matrix = matrix.turned
    yield from mesh.sent(matrix, "rows")


def _product(
    mesh: Mesh, first: _Matrix, second: _Matrix, added: _Matrix | None = None
) -> Generator[Sent | LocalProduct, None, _Matrix]:
    """A product that is added to a matrix, if there is one; its result."""
    placed = _cheapest(mesh, first, second, added)
    if added is not None:
        yield from mesh.sent(added, placed[2])
    yield from mesh.sent(first, placed[0])
    yield from mesh.sent(second, placed[1])
    (m, k), (_, n) = mesh.local(first, placed[0]), mesh.local(second, placed[1])
    yield LocalProduct(m, n, k, added is not None)
    return _Matrix((first.shape[0], second.shape[1]), placed[2])


def _cheapest(
    mesh: Mesh, first: _Matrix, second: _Matrix, added: _Matrix | None
) -> tuple[Placement, Placement, Placement]:
    """Placements of both operands and of the result, which is that of what is added.

    Those that need no change come first. Nothing is cut where nothing was.
    """
    operands = [first, second, *([added] if added else [])]
    is_cut = any(one.placement in ("rows", "columns") for one in operands)

    def cost(placed: tuple[Placement, Placement, Placement]) -> tuple[float, bool]:
        pairs = list(zip(operands, placed, strict=False))
        if any(not mesh.can_split(one, wanted) for one, wanted in pairs[:2]):
            return inf, True
        if not is_cut and not {"rows", "columns"}.isdisjoint(placed):
            return inf, True
        changes = any(one.placement != wanted for one, wanted in pairs)
        return sum(mesh.cost(one, wanted) for one, wanted in pairs), changes

    return min(_PLACED, key=cost)


@dataclass(frozen=True)
class MuonOnShards:
    """The steps of matrices, one after the other.

    `stretch`: how many times as long as estimated its device work takes, where the optimizer was
    measured.
    """

    optimizer: Optimizer
    prices: Prices
    mesh: Mesh
    stretch: float = 1.0

    def instructions(self, matrices: Sequence[Parameter]) -> Iterator[Instruction]:
        """Yield the steps of all matrices, as registered; matrices of one shape are priced once."""
        steps: dict[object, tuple[Instruction, ...]] = {}
        for matrix in matrices:
            like = matrix.shape, matrix.dtype
            if like not in steps:
                steps[like] = tuple(self._of_one(matrix))
            yield from steps[like]

    def _of_one(self, matrix: Parameter) -> Iterator[Instruction]:
        rows, columns = matrix.shape or (1, 1)
        own_rows = ceil(rows / self.mesh.ranks)
        before, after = around_products(own_rows, columns, ITEM_BYTES[matrix.dtype])
        *normed, scaled = before
        yield from self._computed(normed, _OTHERS_S)
        yield from self._communicated("all_reduce", _NORM_BYTES)
        pending = [scaled]
        products = 0
        for one in newton_schulz((rows, columns), iterations(self.optimizer), self.mesh):
            if isinstance(one, Sent):
                yield from self._computed(pending, products * _PRODUCT_S)
                yield from self._sent(one)
                pending, products = [], 0
            else:
                pending.extend(half_product(one.m, one.n, one.k, adds=one.adds))
                products += 1
        yield from self._computed([*pending, *after], products * _PRODUCT_S)

    def _computed(self, operators: Sequence[Operator], host_s: float) -> Iterator[Instruction]:
        if operators:
            device_s = self.stretch * operators_s(operators, self.prices.device)
            work = Work(device_s, len(operators), host_s)
            yield compute("optimizer", self.prices.ticks.launch(work))

    def _sent(self, one: Sent) -> Iterator[Instruction]:
        """An exchange of parts sends as an all-gather does of as many bytes as a node's ranks have.

        They share its links to others (assumed).
        """
        if one.operation == "all_to_all":
            is_wide = self.mesh.ranks > self.mesh.per_node
            size_bytes = one.size_bytes * (self.mesh.per_node if is_wide else 1)
            yield from self._communicated("all_gather", size_bytes)
        else:
            yield from self._communicated(one.operation, one.size_bytes)

    def _communicated(self, operation: Operation, size_bytes: int) -> Iterator[Instruction]:
        if self.mesh.ranks > 1:
            host_ns = self.prices.call_ns
            yield Communicate(_NUMBER, host_ns, operation, size_bytes, cause=_CAUSE)
            yield Await(_NUMBER)


def muon_apart(
    context: StrategyContext,
) -> tuple[Model, Sequence[Parameter], tuple[Instruction, ...]]:
    """The model with the AdamW beside Muon, Muon's matrices, and its instructions on shards.

    Without Muon: the model as it is, and none. A measured optimizer is shared as estimated.
    """
    scenario, model = context.scenario, context.model
    optimizer, cluster = scenario.workload.optimizer, scenario.cluster
    if optimizer.name != "muon":
        return model, (), ()
    matrices, others = parted(optimizer, model.used)
    whole = optimizer_work(optimizer, model.used, cluster.device)
    beside = optimizer_work(beside_muon(optimizer), others, cluster.device)
    stretch = model.optimizer.device_s / whole.device_s if whole.device_s else 1.0
    mesh = Mesh(cluster.world_size, cluster.gpus_per_node)
    on_shards = MuonOnShards(optimizer, context.prices, mesh, stretch)
    apart = replace(model, optimizer=beside._replace(device_s=stretch * beside.device_s))
    return apart, matrices, tuple(on_shards.instructions(matrices))
