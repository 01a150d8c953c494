"""What a step holds beside shards, as its hooks allocate and free it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ddpsim.result.model import HeldBytes

__all__ = ["Held"]

_What = Literal["parameters", "gradients", "reductions"]


@dataclass
class Held:
    """Bytes of gradients and of what is not sharded, and the most that there ever was.

    `works`: so many works of the device are launched; `place`: where in the step that is;
    `walked`: what was held after how many works, each change.
    """

    now: HeldBytes = HeldBytes()  # noqa: RUF009 -- a tuple of numbers
    works: int = 0
    place: str = ""
    peak: HeldBytes = HeldBytes()  # noqa: RUF009 -- likewise
    peak_place: str = ""
    walked: list[tuple[int, HeldBytes]] = field(default_factory=list)

    def add(self, what: _What, size_bytes: int) -> None:
        """Allocate, or free a negative number."""
        self.now = self.now._replace(**{what: getattr(self.now, what) + size_bytes})
        self.walked.append((self.works, self.now))
        if sum(self.now) > sum(self.peak):
            self.peak, self.peak_place = self.now, self.place
