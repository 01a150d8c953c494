"""Activation checkpointing of a zoo model: which blocks run twice, and what is kept meanwhile.

As `torch.utils.checkpoint.checkpoint(block, ..., use_reentrant=False)` does: a block's inputs are
kept, and its forward runs again before its backward, up to the last tensor that autograd saves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from ddpsim.errors import InputError, shown
from ddpsim.scenario.workload import Workload
from ddpsim.workload.model import Work, joined
from ddpsim.workload.zoo.step import Step

__all__ = ["Block", "KeptBytes", "checkpointed", "with_reruns"]

# the host's seconds a checkpoint, operators apart: torch 2.13's on a function of one operator on a
# CPU (an EPYC); states of random numbers, contexts and hooks
_HOST_FORWARD_S = 26e-6
_HOST_RERUN_S = 43e-6
_SOME = 3  # names in a message


class Block(NamedTuple):
    """A numbered module of several layers: its rows of the forward, and where its backward begins.

    `rows`: first and one beyond the last. `backward`: the row of its first gradient. `own_bytes`:
    what it alone keeps for the backward, `others_bytes`: what all else keeps when it ends.
    """

    name: str
    rows: tuple[int, int]
    backward: int
    own_bytes: float
    others_bytes: float


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
            Block(name, rows, first, own_bytes + sum(self._by_rows[slice(*rows)]), others_bytes)
            for (name, rows), first, own_bytes, others_bytes in zip(
                self._rows.items(),
                self._begin_backward,
                self._step.own_bytes,
                self._others,
                strict=False,
            )
        )

    def at_most(self, twice: frozenset[str]) -> float:
        """The most at a time, where these blocks are run again.

        It is when the forward ends, or when a block has run again, those after it being done.
        """
        if not twice:
            return self._step.saved_bytes + sum(self._by_rows)
        by_blocks, most = 0.0, 0.0
        for block in self.blocks:
            if block.name in twice:
                most = max(most, block.others_bytes + by_blocks + block.own_bytes)
            else:
                by_blocks += block.own_bytes
        return max(most, by_blocks + self._others[-1])

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
    def _begin_backward(self) -> Iterator[int]:
        """Of each block, the row of the backward that ends with its first gradient."""
        names = self._table["parameters"]["name"]
        ready = [names[index] for index in self._table["ready_order"]]
        for block in self._rows:
            yield next(i for i, name in enumerate(ready) if name.startswith(f"{block}."))

    @cached_property
    def _others(self) -> list[float]:
        """What is kept outside of blocks when each ends, and when the forward does."""
        rows = self._rows.values()
        inside = {row for each in rows for row in range(*each)}
        outside = [0.0 if row in inside else kept for row, kept in enumerate(self._by_rows)]
        ends = [*(end for _, end in rows), len(outside)]
        kept = zip(self._step.others_bytes, ends, strict=True)
        return [each + sum(outside[:end]) for each, end in kept]


def checkpointed(workload: Workload, model: str, names: Sequence[str]) -> frozenset[str]:
    """The blocks that are; raises InputError where the model has none, or none of a name."""
    asked = workload.checkpointing
    if asked == "none":
        return frozenset()
    if not names:
        reason = f"{model} has no blocks (numbered modules of several layers); drop it"
        raise InputError("workload.checkpointing", reason)
    if asked == "full":
        return frozenset(names)
    unknown = next((name for name in asked if name not in names), None)
    if unknown is not None:
        some = ", ".join(names[:_SOME]) + (", ..." if len(names) > _SOME else "")
        raise InputError(
            "workload.checkpointing",
            f"{shown(unknown)} is no block of {model}: its blocks are {some}",
        )
    return frozenset(asked)


def with_reruns(
    forward: Sequence[Work],
    backward: Sequence[Work],
    blocks: Sequence[Block],
    last_rows: Mapping[str, tuple[int, Work]],
) -> tuple[tuple[Work, ...], tuple[Work, ...]]:
    """Forward and backward where some blocks run again before their first gradient.

    `last_rows`: by the names of those blocks, the last row that runs again, and its work then.
    """
    once, twice = list(forward), list(backward)
    for block in blocks:
        if block.name not in last_rows:
            continue
        first = block.rows[0]
        last, work = last_rows[block.name]
        rerun = [*forward[first:last], work, Work(0.0, 0, _HOST_RERUN_S)]
        once[first] = joined([Work(0.0, 0, _HOST_FORWARD_S), once[first]])
        twice[block.backward] = joined([*rerun, twice[block.backward]])
    return tuple(once), tuple(twice)
