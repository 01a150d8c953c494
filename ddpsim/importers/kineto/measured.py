"""What a trace says of one step: its pieces of work, its gradients, and its collectives."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

__all__ = ["Gradient", "KinetoStep", "MeasuredCollective", "Piece"]


class Piece(NamedTuple):
    """Seconds that the device works, and that the host takes to launch it."""

    device_s: float
    host_s: float


class Gradient(NamedTuple):
    """What a trace with shapes tells of a gradient; None without.

    `in_checkpoint`: made by a reentrant checkpoint, which makes them of its inputs too.
    """

    shape: tuple[int, ...] | None
    dtype: str | None
    in_checkpoint: bool = False

    @property
    def numel(self) -> int | None:
        """Its elements."""
        return None if self.shape is None else prod(self.shape)


class MeasuredCollective(NamedTuple):
    """One collective of the rank, waiting for late peers included; None: size not recorded."""

    operation: str
    elements: int | None
    dtype: str | None
    duration_s: float
    of_gradients: bool


@dataclass(frozen=True)
class KinetoStep:
    """One step: `backward[i]` ends with `gradients[i]`, one more piece is the tail.

    `length_s` is by the host's clock, `loader_s` its wait for a batch; `beside_comm_s` of the
    device's work was done while a collective was under way. `has_optimizer`: whether one stepped.
    """

    name: str
    length_s: float
    forward: tuple[Piece, ...]
    backward: tuple[Piece, ...]
    optimizer: Piece
    gradients: tuple[Gradient, ...]
    collectives: tuple[MeasuredCollective, ...]
    loader_s: float
    beside_comm_s: float
    has_optimizer: bool

    @property
    def device_s(self) -> float:
        """All the device's work."""
        return sum(piece.device_s for piece in self._pieces)

    @property
    def host_s(self) -> float:
        """All that the host takes to launch it, waits left out."""
        return sum(piece.host_s for piece in self._pieces)

    @property
    def busy_s(self) -> float:
        """What the longer of the two takes."""
        return max(self.device_s, self.host_s)

    @property
    def _pieces(self) -> tuple[Piece, ...]:
        return (*self.forward, *self.backward, self.optimizer)

    @property
    def bucket_elements(self) -> tuple[int, ...] | None:
        """Elements of the gradients' all-reduces as launched; None where one has no size."""
        sizes = [c.elements for c in self.collectives if c.of_gradients]
        return None if None in sizes else tuple(size for size in sizes if size is not None)
