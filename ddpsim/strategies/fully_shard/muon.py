"""Muon on matrices whose rows are shared out: torch.optim.Muon over DTensors.

Host times: 40 matrices of two rows over two ranks that send nothing, on one core of a Xeon, torch
2.13, as many times foreach Adam's as measured beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from ddpsim.cluster.transfers import Operation
from ddpsim.scenario.device import Device
from ddpsim.scenario.workload import Optimizer
from ddpsim.strategies.ddp.costs import PYTHON_COLLECTIVE_S
from ddpsim.strategies.fully_shard.newton_schulz import Mesh, Sent, newton_schulz
from ddpsim.strategies.instructions import Await, Communicate, Instruction, compute
from ddpsim.strategies.ticks import Ticks
from ddpsim.workload.model import ITEM_BYTES, Parameter, Work
from ddpsim.workload.operators import Operator
from ddpsim.workload.optimizer import operators_s
from ddpsim.workload.optimizer_operators import around_products, half_product, iterations

_OTHERS_S, _PRODUCT_S = 110e-6, 27e-6  # the host's, of what is around the products, and of each
_NUMBER = -2  # of its collectives, each of which is awaited before the next one
_NORM_BYTES = 2
_CAUSE = "Muon's matrices"


@dataclass(frozen=True)
class MuonOnShards:
    """The steps of matrices, one after the other.

    `stretch`: how many times as long as estimated its device work takes, where the optimizer was
    measured.
    """

    optimizer: Optimizer
    device: Device
    ticks: Ticks
    mesh: Mesh
    stretch: float = 1.0

    def instructions(self, matrices: Sequence[Parameter]) -> Iterator[Instruction]:
        """Yield the steps of all matrices, as registered; matrices of one shape are priced once."""
        known: dict[object, tuple[Instruction, ...]] = {}
        for matrix in matrices:
            like = matrix.shape, matrix.dtype
            if like not in known:
                known[like] = tuple(self._of_one(matrix))
            yield from known[like]

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
            device_s = self.stretch * operators_s(operators, self.device)
            work = Work(device_s, len(operators), host_s)
            yield compute("optimizer", self.ticks.launch(work))

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
            host_ns = self.ticks.host_ns(PYTHON_COLLECTIVE_S)
            yield Communicate(_NUMBER, host_ns, operation, size_bytes, cause=_CAUSE)
            yield Await(_NUMBER)
