"""What a step holds beside shards, as its hooks allocate and free it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from ddpsim.result.model import HeldBytes, MemoryPeak, MemoryWalk
from ddpsim.strategies.instructions import Compute, Instruction

_What = Literal["parameters", "gradients", "reductions"]
_Change = tuple[int, str, _What, int]


@dataclass
class Held:
    """Bytes of gradients and of what is not sharded.

    `works`: so many works of the device are launched; `place`: where in the step that is. Changes
    are noted, and summed up once somebody asks.
    """

    works: int = 0
    place: str = ""
    _changes: list[_Change] = field(default_factory=list)

    def add(self, what: _What, size_bytes: int) -> None:
        """Allocate, or free a negative number."""
        self._changes.append((self.works, self.place, what, size_bytes))

    def walk(self, instructions: Iterable[Instruction]) -> Iterator[Instruction]:
        """A step's instructions, during which changes are noted, and its works counted."""
        for instruction in instructions:
            self.works += isinstance(instruction, Compute) and instruction.device_ns > 0
            yield instruction

    @property
    def gradients(self) -> int:
        """Bytes of gradients now."""
        return sum(size for _, _, what, size in self._changes if what == "gradients")

    def walked(self) -> MemoryWalk:
        """What was held after how many works, each change."""
        held, walked = dict.fromkeys(HeldBytes._fields, 0), []
        for works, _, what, size_bytes in self._changes:
            held[what] += size_bytes
            walked.append((works, HeldBytes(*held.values())))
        return tuple(walked)

    def peak(self) -> MemoryPeak:
        """The most that there ever was, and where it was first."""
        each = [(sum(held), held) for _, held in self.walked()]
        most = max((total for total, _ in each), default=0)
        if most <= 0:
            return MemoryPeak("", *HeldBytes())
        first = next(i for i, (total, _) in enumerate(each) if total == most)
        return MemoryPeak(self._changes[first][1], *each[first][1])
