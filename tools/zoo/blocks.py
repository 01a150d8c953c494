"""The blocks of a model: what each keeps for the backward, and what of it a checkpoint reruns.

A checkpoint keeps a block's inputs alone, and runs its forward again in the backward up to the last
tensor that autograd saves (torch/utils/checkpoint.py: _StopRecomputationError).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from zoo.operator_costs import Cost, storage_of, tensors

_NUMBERED = re.compile(r"(.*_)?\d+")  # the name of a module in a list of them


def block_names(model: nn.Module) -> list[str]:
    """Numbered modules of several layers, such as layers.0, the outermost of each layer."""
    found: dict[str, set[str]] = {}
    for name, _ in model.named_parameters():
        owner = name.rpartition(".")[0]
        parts = owner.split(".")
        numbered = (i for i, part in enumerate(parts, 1) if _NUMBERED.fullmatch(part))
        end = next(numbered, None)
        if end is not None:
            found.setdefault(".".join(parts[:end]), set()).add(owner)
    return [name for name, owners in found.items() if len(owners) > 1]


@dataclass
class Block:
    """One call of a block: its inputs, and the cost of its last row up to the last tensor saved."""

    name: str
    inputs: list[Any]
    rerun: Cost = field(default_factory=Cost)
    rows: int = 0  # forward segments begun when that tensor was saved


@dataclass
class SavedByBlock:
    """Storages of the forward by the blocks that save them (None: outside), in order of the first.

    `owned`: storages of the model itself, which do not count.
    """

    owned: set[Any]
    sizes: dict[Any, int] = field(default_factory=dict)
    places: dict[Any, set[int | None]] = field(default_factory=dict)
    since: dict[Any, int] = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=list)
    current: int | None = None
    ended: int = 0

    def save(self, tensor: Tensor, segment: Cost, rows: int) -> None:
        """Note a tensor that autograd keeps, and the work so far of the segment that is open."""
        self._note(tensor)
        if self.current is not None:
            block = self.blocks[self.current]
            block.rerun, block.rows = Cost(**vars(segment)), rows

    def enter(self, name: str, arguments: Any) -> None:
        """Begin a block, whose checkpoint would keep its arguments."""
        inputs = tensors(arguments)
        for tensor in inputs:
            self._note(tensor)
        self.blocks.append(Block(name, [storage_of(tensor) for tensor in inputs]))
        self.current = len(self.blocks) - 1

    def leave(self) -> None:
        """End the block that is open."""
        self.current = None
        self.ended += 1

    def _note(self, tensor: Tensor) -> None:
        storage = storage_of(tensor)
        if storage in self.owned:
            return
        self.sizes[storage] = tensor.untyped_storage().nbytes()
        self.places.setdefault(storage, set()).add(self.current)
        self.since.setdefault(storage, self.ended)

    def own_bytes(self) -> list[int]:
        """Of each block, what it alone keeps: its checkpoint would not."""
        owners = self._owners()
        return [
            sum(self.sizes[storage] for storage, owner in owners.items() if owner == number)
            for number in range(len(self.blocks))
        ]

    def others_bytes(self) -> Iterator[int]:
        """All else that is kept when each block ends, and at last when the forward does."""
        owners = self._owners()
        for number in range(len(self.blocks) + 1):
            yield sum(
                self.sizes[storage]
                for storage, since in self.since.items()
                if owners[storage] is None and since <= number
            )

    def _owners(self) -> dict[Any, int | None]:
        inputs = {storage for block in self.blocks for storage in block.inputs}
        return {
            storage: next(iter(places)) if len(places) == 1 and storage not in inputs else None
            for storage, places in self.places.items()
        }
