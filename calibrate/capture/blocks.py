"""The blocks of a model: what each keeps for the backward, and what of it a checkpoint reruns.

A checkpoint keeps a block's inputs alone, and runs its forward again in the backward up to the last
tensor that autograd saves (torch/utils/checkpoint.py: _StopRecomputationError).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from calibrate.capture.shapes import tensors

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
    """One call of a block: its inputs, and its last row up to the last tensor that it saves.

    `row`: the row of the forward that was open at that tensor; `operators`: how many of it had run.
    """

    name: str
    inputs: list[int]
    row: int = 0
    operators: int = 0


@dataclass
class Kept:
    """Memory of the forward by the blocks that save it (None: outside), in order of the first.

    `owned`: that of the model itself, which does not count. Each is known by the address of its
    storage, and held so that no other takes the address.
    """

    owned: set[int]
    sizes: dict[int, int] = field(default_factory=dict)
    places: dict[int, set[int | None]] = field(default_factory=dict)
    since: dict[int, int] = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=list)
    current: int | None = None
    ended: int = 0
    held: list[Any] = field(default_factory=list)
    saved: set[int] = field(default_factory=set)

    def save(self, tensor: Tensor, row: int, operators: int) -> None:
        """Note a tensor that autograd keeps, and how far the open row of the forward is."""
        storage = self._note(tensor)
        if storage not in self.owned:
            self.saved.add(storage)
        if self.current is not None:
            block = self.blocks[self.current]
            block.row, block.operators = row, operators

    def enter(self, name: str, arguments: Any) -> None:
        """Begin a block, whose checkpoint would keep its arguments."""
        inputs = [self._note(tensor) for tensor in tensors(arguments)]
        self.blocks.append(Block(name, inputs))
        self.current = len(self.blocks) - 1

    def leave(self) -> None:
        """End the block that is open."""
        self.current = None
        self.ended += 1

    def _note(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        key: int = storage._cdata  # noqa: SLF001 - of the storage behind the object
        if key in self.owned:
            return key
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.held.append(storage)
            self.since[key] = self.ended
        self.places.setdefault(key, set()).add(self.current)
        return key

    def nbytes(self) -> int:
        """Bytes of all that autograd keeps."""
        return sum(self.sizes[key] for key in self.saved)

    def own_bytes(self) -> list[int]:
        """Bytes that each block alone keeps for the backward, and its checkpoint would not."""
        own = [0] * len(self.blocks)
        for key, owner in self._owners().items():
            if owner is not None:
                own[owner] += self.sizes[key]
        return own

    def others_bytes(self) -> Iterator[int]:
        """All else that is kept when each block ends, and at last when the forward does."""
        owners = self._owners()
        others = [(since, key) for key, since in self.since.items() if owners[key] is None]
        for number in range(len(self.blocks) + 1):
            yield sum(self.sizes[key] for since, key in others if since <= number)

    def _owners(self) -> dict[int, int | None]:
        inputs = {key for block in self.blocks for key in block.inputs}
        return {
            key: next(iter(places)) if len(places) == 1 and key not in inputs else None
            for key, places in self.places.items()
        }


def storages_of(group: Iterable[Tensor]) -> set[int]:
    """Addresses of the storages behind tensors."""
    return {tensor.untyped_storage()._cdata for tensor in group}  # noqa: SLF001
