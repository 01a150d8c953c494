"""What torch.compile's partitioner keeps for the backward under an activation memory budget.

It may keep the outputs of operators that compute much, and runs the others again: a knapsack by
bytes and FLOPs. What is cheap it always runs again. A budget is a part of what it would keep
without one: those outputs, and the inputs that others hand to products. Source: torch 2.13
torch/_functorch/partitioners.py (choose_saved_values_set) and
_activation_checkpointing/knapsack.py (dp_knapsack); config.activation_memory_budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from ddpsim.workload.checkpointing import Block
from ddpsim.workload.model import Work, joined
from ddpsim.workload.operators import MULTIPLYING, Operator
from ddpsim.workload.zoo.step import Row

_HANDING_ON = ("pointwise", "copy")  # what follows a product whose output no backward reads
_STATISTICS = 1.05  # a normalization's output with them, over the output at most
_PARTS = 10_000  # of the memory without a budget, to which sizes are rounded


class Budgeted(NamedTuple):
    """Bytes that graphs keep, and the operators that run again, by row of the forward."""

    kept_bytes: float
    rerun: dict[int, Row]


def budgeted(forward: Sequence[Row], graphs: Iterable[tuple[int, int]], budget: float) -> Budgeted:
    """A part of what each graph would keep: first row of the forward, and one beyond the last.

    Where a graph begins, its input is kept by others.
    """
    kept_bytes, rerun = 0.0, dict[int, Row]()
    for first, end in graphs:
        graph = [(row, one) for row in range(first, end) for one in forward[row]]
        own = _of_graph(graph, budget)
        kept_bytes += own.kept_bytes
        rerun |= own.rerun
    return Budgeted(kept_bytes, rerun)


def with_budget(
    backward: Sequence[Work],
    blocks: Sequence[Block],
    plan: Budgeted,
    priced: Callable[[Row], Work],
) -> tuple[Work, ...]:
    """The backward with what runs again: before a block's first gradient, else before all.

    `priced`: the work of some operators.
    """
    works = list(backward)
    for row, operators in plan.rerun.items():
        inside = (block.backward for block in blocks if block.rows[0] <= row < block.rows[1])
        place = next(inside, None) or 0
        works[place] = joined([priced(operators), works[place]])
    return tuple(works)


def _of_graph(graph: Sequence[tuple[int, Operator]], budget: float) -> Budgeted:
    """What is cheap runs again under each budget."""
    operators = [one for _, one in graph]
    wanted = _wanted(operators)
    sizes = [operators[place].bytes_written for place in wanted]
    usual_bytes = sum(sizes) + sum(_inputs_bytes(operators))
    if budget == 1:
        return Budgeted(usual_bytes, {})
    # the partitioner counts an attention's output twice: as it is, and as a product takes it
    seen = (one.bytes_written for one in operators if one.kind == "attention")
    counted_bytes = usual_bytes + sum(seen)
    kept = set(wanted)
    if sum(sizes) > budget * counted_bytes:
        kept = _chosen(operators, wanted, budget, counted_bytes)
    multiplying = [place for place, one in enumerate(operators) if one.kind in MULTIPLYING]
    rerun: dict[int, Row] = {}
    for place, (row, one) in enumerate(graph[: max(multiplying, default=-1) + 1]):
        if place not in kept and (one.kind not in MULTIPLYING or place in wanted):
            rerun[row] = (*rerun.get(row, ()), one)
    return Budgeted(sum(operators[place].bytes_written for place in kept), rerun)


def _wanted(operators: Sequence[Operator]) -> list[int]:
    """Places of what computes much, but the last where what follows hands its output on alone."""
    places = [place for place, one in enumerate(operators) if one.kind in MULTIPLYING]
    if places and all(one.kind in _HANDING_ON for one in operators[places[-1] + 1 :]):
        places.pop()
    return places


def _inputs_bytes(operators: Iterable[Operator]) -> Iterator[float]:
    """What products and convolutions take from operators that compute little, each input once.

    It is as large as what one of those wrote since the last product; a copy alone makes none.
    """
    written, is_copied = set[float](), True
    for one in operators:
        if one.kind not in MULTIPLYING:
            written.add(one.bytes_written)
            is_copied = is_copied and one.kind == "copy"
            continue
        taken = 0.0
        if one.kind == "product":
            taken = one.m * one.k * one.item_bytes
        elif one.kind == "convolution":
            taken = one.bytes_read - one.n * one.k * one.count * one.item_bytes
        if not is_copied and any(taken <= size < _STATISTICS * taken for size in written):
            yield taken
        written, is_copied = set(), True


def _chosen(
    operators: Sequence[Operator], wanted: Sequence[int], budget: float, counted_bytes: float
) -> set[int]:
    """Places of the outputs of most FLOPs that fit into the budget."""
    import numpy as np  # noqa: PLC0415 -- slow to import, and needed only here

    places = sorted(wanted, key=lambda place: operators[place].bytes_written, reverse=True)
    sizes = [round(operators[at].bytes_written / counted_bytes * _PARTS) for at in places]
    capacity = round(budget * _PARTS)
    best = np.zeros(capacity + 1, dtype=np.float32)
    taken = np.zeros((len(places), capacity + 1), dtype=bool)
    for i, (place, size) in enumerate(zip(places, sizes, strict=True)):
        if size > capacity:
            continue
        more = best[: capacity + 1 - size] + np.float32(max(1.0, operators[place].flops))
        taken[i, size:] = more > best[size:]
        best[size:] = np.maximum(best[size:], more)
    left, kept = capacity, set[int]()
    for i in reversed(range(len(places))):
        if taken[i, left]:
            kept.add(places[i])
            left -= sizes[i]
    return kept
