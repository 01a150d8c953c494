"""A captured step at a batch and a size: its rows of operators, and what autograd keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

from ddpsim.scenario.workload import Precision
from ddpsim.workload.operators import MULTIPLYING, Operator

Row = tuple[Operator, ...]


class Step(NamedTuple):
    """Rows of forward and backward, and bytes kept for the backward.

    `own_bytes`, `others_bytes`: by blocks, and the latter when the forward ends. `reruns`: of each
    block its last row that a checkpoint runs again, and what of it. `input_bytes`: of
    a batch's inputs.
    """

    forward: tuple[Row, ...]
    backward: tuple[Row, ...]
    saved_bytes: float
    own_bytes: tuple[float, ...]
    others_bytes: tuple[float, ...]
    reruns: tuple[tuple[int, Row], ...]
    input_bytes: float

    @property
    def rows(self) -> Iterator[Row]:
        """All of them."""
        yield from self.forward
        yield from self.backward

    @property
    def first_gradients_bytes(self) -> float:
        """Bytes of the largest two gradients in a row that the backward makes first.

        Nothing that the forward kept is free by then. A language model's are the loss's, of the
        logits' size in float32: that of the log-softmax, and its input's.
        """
        loss = takewhile(lambda one: one.kind not in MULTIPLYING, self.backward[0])
        return max(a + b for a, b in pairwise([0.0, *(one.bytes_written for one in loss), 0.0]))

    @property
    def recast_bytes(self) -> float:
        """Bytes of outputs that the loss casts to a wider type, and that are free after it.

        Their block is too small for the backward's first gradients, which are of the wider type.
        """
        loss: list[float] = []
        for one in self.forward[-1]:
            if one.kind in MULTIPLYING:
                loss.clear()
            elif one.kind == "copy" and one.bytes_written >= 2 * one.bytes_read:
                loss.append(one.bytes_read)
        return max(loss, default=0.0)

    def rewritten(self, rewrite: Callable[[Operator], Iterable[Operator]]) -> Step:
        """With other operators in the place of each."""
        rewritten: dict[Row, Row] = {}

        def new(row: Row) -> Row:
            if row not in rewritten:
                rewritten[row] = tuple(part for one in row for part in rewrite(one))
            return rewritten[row]

        return self._replace(
            forward=tuple(map(new, self.forward)),
            backward=tuple(map(new, self.backward)),
            reruns=tuple((place, new(row)) for place, row in self.reruns),
        )


def step_of(
    table: dict[str, Any], precision: Precision, batch: int, x: int, *, half_weights: bool = False
) -> Step:
    """The step of a table (schema `ddpsim.model/3`) in a precision.

    `half_weights`: they are half already where the model is called, as under bf16, so that
    activations are too, and autocast casts nothing. Of a model whose code does not run so it is the
    float32 step with half the bytes.
    """
    recorded, scale = "amp" if precision.startswith("amp") else "fp32", 1.0
    if half_weights or precision == "bf16":
        recorded = "half"
        if "half" not in table["steps"]:
            recorded, scale = "fp32", 0.5
    values = [_value(polynomial, batch, x) for polynomial in table["polynomials"]]
    operators = [
        Operator(kind, *(values[place] for place in places)) for kind, *places in table["operators"]
    ]
    if scale != 1.0:
        operators = [_scaled(one, scale) for one in operators]
    rows = [tuple(operators[i] for i in row) for row in table["rows"]]
    step = table["steps"][recorded]

    def kept(key: str) -> tuple[float, ...]:
        return tuple(values[place] * scale for place in step[key])

    forward = tuple(rows[place] for place in step["forward"])
    return Step(
        forward,
        tuple(rows[place] for place in step["backward"]),
        kept("saved_bytes")[0],
        kept("own_bytes"),
        kept("others_bytes"),
        tuple(
            (row, forward[row][:count] if row < len(forward) else ())
            for row, count in step["rerun"]
        ),
        values[table["input_bytes"]],
    )


def outputs_of(forward: Sequence[Row]) -> Iterator[float]:
    """Elements that each row of the forward hands on: the output of its product, or of the last."""
    outputs = 0.0
    for row in forward:
        for one in row:
            if one.kind in MULTIPLYING:
                width = one.k if one.kind in ("attention", "recurrence") else one.n
                outputs = float(one.count * one.m * width)
        yield outputs


def _value(polynomial: list[float], batch: int, x: int) -> float:
    """The value of a polynomial in 1, x, x^2, b, b x, b x^2; zeros at the end are left out."""
    terms = (1, x, x * x, batch, batch * x, batch * x * x)
    return sum(map(float.__mul__, map(float, polynomial), map(float, terms)))


def _scaled(one: Operator, scale: float) -> Operator:
    return one._replace(
        bytes_read=one.bytes_read * scale,
        bytes_written=one.bytes_written * scale,
        item_bytes=one.item_bytes * scale,
    )
