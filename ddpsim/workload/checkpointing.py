"""Activation checkpointing of a captured model: what runs twice, and what is kept meanwhile.

As `torch.utils.checkpoint.checkpoint(block, ..., use_reentrant=False)` does: a block's inputs and
the outputs of some operators are kept, and its other operators run again before its backward, up to
the last tensor that autograd saves. Compiled code keeps no output that the backward does not need
(torch/_functorch/partitioners.py), which are those behind that tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

from ddpsim.errors import InputError, shown
from ddpsim.scenario.options.checkpointing import Checkpointing
from ddpsim.workload.model import Work, joined
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
        """Of each block, its first row of the forward, and one beyond the last."""
        modules = self._table["forward_modules"]
        found = {}
        for name in self._table["blocks"]:
            rows = [row for row, module in enumerate(modules) if module.startswith(f"{name}.")]
            found[name] = (rows[0], rows[-1] + 1)
        return found

    @property
    def _begin_backward(self) -> Iterator[int | None]:
        """The row of the backward, by block, that ends with its first gradient, or the next."""
        names, modules = self._table["parameters"]["name"], self._table["forward_modules"]
        called = {module: row for row, module in reversed([*enumerate(modules)])}
        ready = [names[index] for index in self._table["ready_order"]]
        rows = [called.get(name.rpartition(".")[0], len(modules)) for name in ready]
        for block, (_, end) in self._rows.items():
            own = (i for i, name in enumerate(ready) if name.startswith(f"{block}."))
            yield next(own, next((i for i, row in enumerate(rows) if row < end), None))

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
    found = {}
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
        found[block.name] = Rerun(rerun, kept_bytes + unread_bytes, unread_bytes, looked_at)
    return found


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
