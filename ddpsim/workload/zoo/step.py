"""A captured step at a batch and a size: its rows of operators, and what autograd keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ddpsim.scenario.workload import Precision
from ddpsim.workload.operators import MULTIPLYING, Operator

__all__ = ["Row", "Step", "outputs_of", "step_of"]

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

    def rewritten(self, rewrite: Callable[[Operator], Iterable[Operator]]) -> Step:
        """With other operators in the place of each."""
        known: dict[Row, Row] = {}

        def new(row: Row) -> Row:
            if row not in known:
                known[row] = tuple(part for one in row for part in rewrite(one))
            return known[row]

        return self._replace(
            forward=tuple(map(new, self.forward)),
            backward=tuple(map(new, self.backward)),
            reruns=tuple((place, new(row)) for place, row in self.reruns),
        )


def step_of(
    table: dict[str, Any], precision: Precision, batch: int, x: int, *, casts_weights: bool = True
) -> Step:
    """The step of a table (schema `ddpsim.model/2`) in a precision.

    Of bf16 weights it is the float32 step with half the bytes. `casts_weights`: autocast casts
    them; not where they are half already.
    """
    recorded = "amp" if precision.startswith("amp") else "fp32"
    scale = 0.5 if precision == "bf16" else 1.0
    polynomials, listed = table["polynomials"], table["operators"]
    values = [_value(polynomial, batch, x) for polynomial in polynomials]
    operators = [Operator(kind, *(values[place] for place in places)) for kind, *places in listed]
    if scale != 1.0:
        operators = [_scaled(one, scale) for one in operators]
    dropped = set[int]()
    if recorded == "amp" and not casts_weights:
        dropped = {i for i, one in enumerate(listed) if _casts_weight(one, polynomials)}
    step, plain = table["steps"][recorded], table["steps"]["fp32"]

    def of(row: Sequence[int]) -> Row:
        """A row's operators."""
        return tuple(operators[i] for i in row if i not in dropped)

    def kept(key: str) -> tuple[float, ...]:
        """Bytes, without what autocast keeps of weights where it casts none."""
        found = [values[place] * scale for place in step[key]]
        if dropped:
            pairs = zip(step[key], plain[key], strict=True)
            casts = (_fixed(polynomials[a]) - _fixed(polynomials[b]) for a, b in pairs)
            found = [value - cast for value, cast in zip(found, casts, strict=True)]
        return tuple(found)

    rows = [of(row) for row in table["rows"]]
    places = step["forward"]
    return Step(
        tuple(rows[place] for place in places),
        tuple(rows[place] for place in step["backward"]),
        kept("saved_bytes")[0],
        kept("own_bytes"),
        kept("others_bytes"),
        tuple(
            (row, of(table["rows"][places[row]][:count]) if row < len(places) else ())
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
    """Of 1, x, x^2, b, b x, b x^2; zeros at the end are left out."""
    terms = (1, x, x * x, batch, batch * x, batch * x * x)
    return sum(map(float.__mul__, map(float, polynomial), map(float, terms)))


def _scaled(one: Operator, scale: float) -> Operator:
    return one._replace(
        bytes_read=one.bytes_read * scale,
        bytes_written=one.bytes_written * scale,
        item_bytes=one.item_bytes * scale,
    )


def _casts_weight(operator: list[Any], polynomials: list[list[float]]) -> bool:
    """Whether it copies as much at every batch into half the bytes, or back."""
    kind, read, written = operator[0], polynomials[operator[-3]], polynomials[operator[-2]]
    if kind != "copy" or len(read) != 1 or len(written) != 1:
        return False
    return read[0] in (2 * written[0], written[0] / 2)


def _fixed(polynomial: list[float]) -> float:
    return float(polynomial[0]) if polynomial else 0.0
