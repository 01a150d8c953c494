"""Linear layers in float8, as torchao computes them: casts, and products of one byte.

Each operand of a product is cast: a pass for its largest value, one for the cast itself. Eager code
writes each part of that (absolute values, float32, the scaled, the clamped); torch.compile fuses it
into the two passes, and casts a gradient once for both of its products. Products want a second
operand that is contiguous by columns: the backward copies three of its operands.
Source: torchao 0.13 float8_linear.py, float8_training_tensor.py, float8_ops.py, float8_utils.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from ddpsim.errors import InputError, shown
from ddpsim.scenario.options.linear_layers import Float8
from ddpsim.workload.operators import Kind, Operator, moving
from ddpsim.workload.zoo.step import Row, Step

_MULTIPLE = 16  # of a layer's extents: torch._scaled_mm
# bytes an element that eager casts move besides its own width: absolute values and their maximum;
# to float32, scaled, clamped, and cast
_EAGER_MAXIMUM, _EAGER_CAST = 2, 25
_Shape = tuple[float, float]  # outputs and inputs of a layer


@dataclass(frozen=True)
class Float8Linears:
    """The layers that are converted: their names, and their weights' shapes.

    `gathered`: places of weights that come in float8. `compiled`: casts are fused; `left`: what
    the law leaves of the bytes of operators that are no products.
    """

    names: frozenset[str]
    shapes: frozenset[_Shape]
    gathered: frozenset[int]
    compiled: bool
    left: float

    @classmethod
    def of(
        cls, table: dict[str, Any], options: Float8, *, compiled: bool, left: float
    ) -> Float8Linears:
        """Find them in a captured model; raises InputError for layers that cannot be told apart."""
        columns = table["parameters"]
        linears = {
            name.removesuffix(".weight"): place
            for place, (name, module) in enumerate(
                zip(columns["name"], columns["module"], strict=True)
            )
            if module == "Linear" and name.endswith(".weight")
        }
        for part in options.skip:
            if not any(part in name for name in (*linears, *table["forward_modules"])):
                reason = f"{shown(part)} is in no name of a linear layer of {table['name']}"
                raise InputError("workload.float8.skip", reason)

        def shape(name: str) -> _Shape:
            outputs, inputs = columns["shape"][linears[name]]
            return outputs, inputs

        chosen = {
            name: place
            for name, place in linears.items()
            if not any(part in name for part in options.skip)
            and all(extent % _MULTIPLE == 0 for extent in shape(name))
        }
        if not chosen:
            reason = f"{table['name']} has no linear layer left to convert; drop it"
            raise InputError("workload.float8", reason)
        shapes = frozenset(map(shape, chosen))
        alike = next((n for n in linears if n not in chosen and shape(n) in shapes), None)
        if alike is not None:
            reason = f"leaves {alike} alone, but converts others of its shape: skip all of a shape"
            raise InputError("workload.float8.skip", reason)
        gathered = frozenset(chosen.values() if options.all_gather else ())
        return cls(frozenset(chosen), shapes, gathered, compiled, left)

    def converted(self, step: Step, modules: Sequence[str]) -> Step:
        """A step with these layers' products in float8; `modules`: of the forward's rows."""
        tokens = self._tokens(step, modules)

        def forward(row: Row) -> Row:
            return tuple(chain.from_iterable(map(self._in_forward, row)))

        mine = [module in self.names for module in modules]
        return step._replace(
            forward=tuple(
                forward(row) if linear else row
                for row, linear in zip(step.forward, mine, strict=True)
            ),
            backward=tuple(tuple(self._in_backward(row, tokens)) for row in step.backward),
            reruns=tuple(
                (place, forward(row) if place < len(mine) and mine[place] else row)
                for place, row in step.reruns
            ),
        )

    def _tokens(self, step: Step, modules: Sequence[str]) -> frozenset[float]:
        """Rows of the layers' inputs."""
        rows = zip(step.forward, modules, strict=True)
        return frozenset(
            one.m
            for row, module in rows
            if module in self.names
            for one in row
            if self._is_forward(one)
        )

    def _is_forward(self, one: Operator) -> bool:
        return one.kind == "product" and one.count == 1 and (one.n, one.k) in self.shapes

    def _in_forward(self, one: Operator) -> Iterator[Operator]:
        if self._is_forward(one):
            yield from self._cast(one.m * one.k, one.item_bytes)
            yield from self._cast_weight(one)
            yield _of_one_byte(one)
        else:
            yield one

    def _in_backward(self, row: Row, tokens: frozenset[float]) -> Iterator[Operator]:
        """Products that take the gradient of a layer's output, told by their shapes."""
        casts = True
        for one in row:
            plain = one.kind == "product" and one.count == 1
            of_input = plain and one.m in tokens and (one.k, one.n) in self.shapes
            turned = (one.m, one.n) in self.shapes or (one.n, one.m) in self.shapes
            if not of_input and not (plain and one.k in tokens and turned):
                yield one
                continue
            a, b = one.m * one.k, one.k * one.n
            if casts or not self.compiled:
                yield from self._cast(a, one.item_bytes)
            casts = False
            if of_input:
                yield from self._cast_weight(one)
            else:
                yield from self._cast(b, one.item_bytes)
                yield self._moved(a, 1, 1)
            yield self._moved(b, 1, 1)
            yield _of_one_byte(one)

    def _cast_weight(self, one: Operator) -> Iterator[Operator]:
        if not self.gathered:
            yield from self._cast(one.k * one.n, one.item_bytes)

    def _cast(self, elements: float, item_bytes: float) -> Iterator[Operator]:
        """To float8: the largest value, then the cast."""
        maximum, cast = (0, 0) if self.compiled else (_EAGER_MAXIMUM * item_bytes, _EAGER_CAST)
        yield self._moved(elements, item_bytes + maximum, 0, "reduction")
        yield self._moved(elements, item_bytes + cast, 1)

    def _moved(self, elements: float, read: float, written: float, kind: Kind = "copy") -> Operator:
        """What is fused already counts whole where the law leaves a part."""
        read, written = (elements * each / self.left for each in (read, written))
        return moving(kind, read, written, 1)


def _of_one_byte(one: Operator) -> Operator:
    return one._replace(bytes_read=one.m * one.k + one.k * one.n, item_bytes=1)
