"""Activation checkpointing of a captured model: what runs twice, and what is kept meanwhile.

As `torch.utils.checkpoint.checkpoint(block, ..., use_reentrant=False)` does: a block's inputs and
the outputs of some operators are kept, and its other operators run again before its backward, up to
the last tensor that autograd saves. Compiled code keeps no output that the backward does not need
(torch/_functorch/partitioners.py), which are those behind that tensor.

Under an activation memory budget torch.compile's partitioner chooses. It may keep the outputs of
operators that compute much, and runs the others again: a knapsack by bytes and FLOPs. What is cheap
it always runs again. A budget is a part of what it would keep without one: those outputs, and the
inputs that others hand to products. Source: torch 2.13 torch/_functorch/partitioners.py
(choose_saved_values_set) and _activation_checkpointing/knapsack.py (dp_knapsack);
config.activation_memory_budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

from ddpsim.errors import InputError, shown
from ddpsim.scenario.options.checkpointing import Checkpointing
from ddpsim.workload.model import Work, joined
from ddpsim.workload.operators import MULTIPLYING, Operator
from ddpsim.workload.zoo.step import Row, Step

# the host's seconds a checkpoint, operators apart: torch 2.13's on a function of one operator on a
# CPU (an EPYC); states of random numbers, contexts and hooks
_HOST_FORWARD_S = 26e-6
_HOST_RERUN_S = 43e-6
# the same for each operator where a policy looks at it: the modes of
# create_selective_checkpoint_contexts, over 20 to 100 operators
_HOST_CACHING_S = 8e-6
_HOST_CACHED_S = 12e-6
_SOME = 3  # names in a message


class Block(NamedTuple):
    """A numbered module of several layers: its rows of the forward, and where its backward begins.

    `rows`: first and one beyond the last. `backward`: the row of its first gradient, or of the next
    one where it is frozen; None: no gradient passes through it. `own_bytes`: what it alone keeps
    for the backward, `others_bytes`: what all else keeps when it ends. `last`: the row that a
    checkpoint runs again in part, and that part.
    """

    name: str
    rows: tuple[int, int]
    backward: int | None
    own_bytes: float
    others_bytes: float
    last: tuple[int, Row]


class Rerun(NamedTuple):
    """A block's checkpoint: the operators that run again, and bytes of the outputs that are kept.

    `unread_bytes`: of those outputs, what the second forward does not come to. `looked_at`: all
    operators that a policy decides on at run time.
    """

    operators: Row
    kept_bytes: float = 0.0
    unread_bytes: float = 0.0
    looked_at: int = 0


class KeptBytes:
    """Bytes that autograd keeps of a table's forward.

    `by_rows`: what rows of the forward keep beyond the step's own figures.
    """

    def __init__(self, table: dict[str, Any], step: Step, by_rows: Sequence[float]) -> None:
        self._table, self._step, self._by_rows = table, step, by_rows

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The table's blocks in the order of the forward."""
        return tuple(
            Block(
                name, rows, first, own_bytes + sum(self._by_rows[slice(*rows)]), others_bytes, last
            )
            for (name, rows), first, own_bytes, others_bytes, last in zip(
                self._rows.items(),
                self._begin_backward,
                self._step.own_bytes,
                self._others,
                self._step.reruns,
                strict=False,
            )
        )

    def at_most(self, reruns: Mapping[str, Rerun], first_gradients_bytes: float = 0.0) -> float:
        """The most at a time, where these blocks are run again.

        It is when the backward begins, with its first gradients, or when a block has run again,
        those after it being done.
        """
        if not reruns:
            return self._step.saved_bytes + sum(self._by_rows) + first_gradients_bytes
        by_blocks, most = 0.0, 0.0
        for block in self.blocks:
            rerun = reruns.get(block.name)
            if rerun:
                whole = block.own_bytes + rerun.unread_bytes
                most = max(most, block.others_bytes + by_blocks + whole)
            by_blocks += rerun.kept_bytes if rerun else block.own_bytes
        return max(most, by_blocks + self._others[-1] + first_gradients_bytes)

    @property
    def outside_bytes(self) -> float:
        """What is kept outside of blocks, and of their inputs, when the forward ends."""
        return self._others[-1]

    @cached_property
    def _rows(self) -> dict[str, tuple[int, int]]:
        """The first row of each block's forward, and one beyond the last."""
        modules = self._table["forward_modules"]
        rows_of = {}
        for name in self._table["blocks"]:
            rows = [row for row, module in enumerate(modules) if module.startswith(f"{name}.")]
            rows_of[name] = (rows[0], rows[-1] + 1)
        return rows_of

    @property
    def _begin_backward(self) -> Iterator[int | None]:
        """The row of the backward, by block, that ends with its first gradient, or the next."""
        names, modules = self._table["parameters"]["name"], self._table["forward_modules"]
        called = {module: row for row, module in reversed([*enumerate(modules)])}
        ready = [names[index] for index in self._table["ready_order"]]
        rows = [called.get(name.rpartition(".")[0], len(modules)) for name in ready]
        for block, (_, end) in self._rows.items():
            of_block = (i for i, name in enumerate(ready) if name.startswith(f"{block}."))
            yield next(of_block, next((i for i, row in enumerate(rows) if row < end), None))

    @cached_property
    def _others(self) -> list[float]:
        """What is kept outside of blocks when each ends, and when the forward does."""
        rows = self._rows.values()
        inside = {row for each in rows for row in range(*each)}
        outside = [0.0 if row in inside else kept for row, kept in enumerate(self._by_rows)]
        ends = [*(end for _, end in rows), len(outside)]
        kept = zip(self._step.others_bytes, ends, strict=True)
        return [each + sum(outside[:end]) for each, end in kept]


def checkpointed(policy: Checkpointing, model: str, names: Sequence[str]) -> frozenset[str]:
    """The blocks that are; raises InputError where the model has none, or none of a name."""
    if not names:
        reason = f"{model} has no blocks (numbered modules of several layers); drop it"
        raise InputError("workload.checkpointing", reason)
    if policy.every:
        if policy.every > len(names):
            reason = f"{policy.every} is more than the {len(names)} blocks of {model}"
            raise InputError("workload.checkpointing.every", reason)
        return frozenset(names[policy.every - 1 :: policy.every])
    chosen = names if policy.blocks is None else policy.blocks
    unknown = next((name for name in chosen if name not in names), None)
    if unknown is not None:
        some = ", ".join(names[:_SOME]) + (", ..." if len(names) > _SOME else "")
        raise InputError(
            "workload.checkpointing",
            f"{shown(unknown)} is no block of {model}: its blocks are {some}",
        )
    return frozenset(chosen)


def reruns_of(
    policy: Checkpointing, forward: Sequence[Row], blocks: Sequence[Block], *, compiled: bool
) -> dict[str, Rerun]:
    """The checkpoints of some blocks under a policy, by the blocks' names."""
    reruns = {}
    for block in blocks:
        first, end = block.rows
        last, partly = block.last
        operators = tuple(chain.from_iterable(forward[first:end]))
        again = sum(map(len, forward[first:last])) + len(partly)
        keeps = tuple(_keeps(operators, policy))
        rerun = tuple(one for one, keep in zip(operators[:again], keeps, strict=False) if not keep)
        kept_bytes = _written_bytes(operators[:again], keeps)
        # a block's last output is the next one's input
        unread_bytes = 0.0 if compiled else _written_bytes(operators[again:-1], keeps[again:])
        looked_at = 0 if compiled or not policy.keep else len(operators)
        reruns[block.name] = Rerun(rerun, kept_bytes + unread_bytes, unread_bytes, looked_at)
    return reruns


def _keeps(operators: Row, policy: Checkpointing) -> Iterator[bool]:
    """Whether a policy keeps the output of each operator of a block."""
    alternates, products = "alternate_product" in policy.keep, 0
    for one in operators:
        is_plain = one.kind == "product" and one.count == 1  # torchtitan counts mm, and no bmm
        products += is_plain
        yield one.kind in policy.keep or (alternates and is_plain and products % 2 == 1)


def _written_bytes(operators: Row, keeps: Sequence[bool]) -> float:
    return sum(one.bytes_written for one, keep in zip(operators, keeps, strict=False) if keep)


def with_reruns(
    forward: Sequence[Work],
    backward: Sequence[Work],
    blocks: Sequence[Block],
    reruns: Mapping[str, Rerun],
    priced: Callable[[Row], Work],
    *,
    compiled: bool,
) -> tuple[tuple[Work, ...], tuple[Work, ...]]:
    """Forward and backward where some blocks run again before their first gradient.

    `priced`: the work of some operators.
    """
    once, twice = list(forward), list(backward)
    for block in blocks:
        if block.name not in reruns or block.backward is None:
            continue
        rerun, first = reruns[block.name], block.rows[0]
        works = [priced(rerun.operators), twice[block.backward]]
        if not compiled:
            caching_s = _HOST_FORWARD_S + rerun.looked_at * _HOST_CACHING_S
            once[first] = joined([Work(0.0, 0, caching_s), once[first]])
            works.append(Work(0.0, 0, _HOST_RERUN_S + rerun.looked_at * _HOST_CACHED_S))
        twice[block.backward] = joined(works)
    return tuple(once), tuple(twice)


# --- torch.compile's activation memory budget ---------------------------------------------------

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
        plan = _of_graph(graph, budget)
        kept_bytes += plan.kept_bytes
        rerun |= plan.rerun
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
