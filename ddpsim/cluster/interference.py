"""A cost model whose transfers and compute slow each other down, as a calibration measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from ddpsim.cluster.cost import ChangedCost
from ddpsim.cluster.transfers import (
    LEAST_KEPT,
    TURNS,
    Interference,
    Operation,
    Transfer,
    WholeTransfer,
    duration_ns,
)
from ddpsim.units import NS_PER_S, to_ns


class Kept(NamedTuple):
    """The share of its speed that compute keeps beside so many bytes a second of messages.

    `spread`: the standard deviation of the share, over ranks and steps; `beside_one`: the share
    where one message is in flight and no other, None: the same.
    """

    bytes_per_s: float
    share: float
    spread: float = 0.0
    beside_one: float | None = None

    @property
    def alone(self) -> float:
        """The share beside one message."""
        return self.share if self.beside_one is None else self.beside_one


@dataclass(frozen=True)
class InterferingCost(ChangedCost):
    """A cost model whose transfers and compute slow each other down.

    `compute` and `comm` are factors. Compute keeps a share of its speed: `kept` tells which, by the
    bytes of a message that move in a second, growing. `comm_s2_per_byte2` times the square of those
    bytes is added to `comm`, `crowded_s_per_byte` times them to the factor beside another transfer,
    and `comm_delay_s` once to a transfer. Of its latency, in which the link is idle, another
    transfer may use the share `idle_link_use` (`ddpsim.importers.profiles.cluster`). `effect`
    stretches the delay, and how far the factors lie above 1. Compute is slowed down by its factor
    to the power `exponent`: not every model suffers as usual layers do. Where messages are of
    float16, `kept_beside_single` tells the shares beside as many bytes of float32, and the power is
    of these: what float16 costs more is the processor's own time, which all models lose alike.
    `kept` holds for all-reduces. A reduce-scatter (`scatter_turns` around a ring) and an all-gather
    count by the bytes that a rank sends.
    """

    compute: float = 1.0
    comm: float = 1.0
    kept: tuple[Kept, ...] = ()
    kept_beside_single: tuple[Kept, ...] = ()
    comm_s2_per_byte2: float = 0.0
    crowded_s_per_byte: float = 0.0
    comm_delay_s: float = 0.0
    idle_link_use: float = 1.0
    effect: float = 1.0
    exponent: float = 1.0
    scatter_turns: int = 1
    _transfers: dict[tuple[Operation, int], Transfer] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def transfer(self, operation: Operation, size_bytes: int) -> Transfer:
        """See CollectiveCost."""
        message = operation, size_bytes
        if message not in self._transfers:
            self._transfers[message] = self._priced(operation, size_bytes)
        return self._transfers[message]

    def _priced(self, operation: Operation, size_bytes: int) -> Transfer:
        transfer = self._split(self.cost.transfer(operation, size_bytes))
        turns = {**TURNS, "reduce_scatter": self.scatter_turns}.get(operation, 2)
        bytes_per_s = turns / 2 * size_bytes / max(duration_ns(transfer), 1) * NS_PER_S
        comm = self.comm + self.comm_s2_per_byte2 * bytes_per_s**2
        kept = _kept(self.kept, bytes_per_s / comm)
        single = _kept(self.kept_beside_single or self.kept, bytes_per_s / comm)
        power = self.exponent
        suffered = Interference(
            self._factor((self.compute / single.alone) ** power * single.alone / kept.alone),
            self._factor((self.compute / single.share) ** power * single.share / kept.share),
            self._factor(comm),
            self._factor(1 + self.crowded_s_per_byte * bytes_per_s),
            to_ns(self.comm_delay_s * self.effect),
            kept.spread * power * single.share ** (power - 1),  # of a share to that power
        )
        return replace(transfer, interference=suffered)

    def stronger(self, factor: float, power: float) -> InterferingCost:
        """Put the factors so many times as far above 1, and another power for a model."""
        return replace(self, effect=self.effect * factor, exponent=self.exponent * power)

    def _split(self, transfer: Transfer) -> Transfer:
        if not isinstance(transfer, WholeTransfer):
            return transfer
        latency_ns = round(transfer.latency_ns * self.idle_link_use)
        shared_ns = duration_ns(transfer) - latency_ns
        # a latency that keeps others from the idle link is not in the bytes that a burst lets pass
        return replace(
            transfer, latency_ns=latency_ns, transfer_ns=shared_ns, wire_ns=transfer.transfer_ns
        )

    def _factor(self, slowdown: float) -> Fraction:
        """In thousandths, so that fractions of time stay small."""
        return _thousandths(max(1000, round(1000 + 1000 * (slowdown - 1) * self.effect)))


@lru_cache(maxsize=4096)
def _thousandths(count: int) -> Fraction:
    """One object for each, as many are made and compared."""
    return Fraction(count, 1000)


def _kept(points: Sequence[Kept], bytes_per_s: float) -> Kept:
    """Linear between points, from all of its speed beside no bytes.

    Beyond the last point what compute lacks grows in proportion to the bytes.
    """
    if not points:
        return Kept(bytes_per_s, 1.0)
    for below, above in pairwise((Kept(0.0, 1.0), *points)):
        if bytes_per_s <= above.bytes_per_s:
            part = (bytes_per_s - below.bytes_per_s) / (above.bytes_per_s - below.bytes_per_s)
            share, spread, one = (
                low + part * (high - low)
                for low, high in zip(_figures(below), _figures(above), strict=True)
            )
            return Kept(bytes_per_s, share, spread, one)
    share, spread, one = _figures(points[-1])
    times = bytes_per_s / points[-1].bytes_per_s
    return Kept(bytes_per_s, _beyond(share, times), spread, _beyond(one, times))


def _figures(point: Kept) -> tuple[float, float, float]:
    return point.share, point.spread, point.alone


def _beyond(share: float, times: float) -> float:
    """What is kept beside so many times the bytes: no less than Linux leaves, or was measured."""
    return max(min(LEAST_KEPT, share), 1 - (1 - share) * times)
