"""How long works that follow each other take on ranks that differ for good, summed once.

Simulations of a job ask for the same sums in each of its steps, and so do its variants whose
compute is the same: another network, another host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ddpsim.cluster.algorithms.max_plus import Ticks
from ddpsim.engine.fast.lane import PER_MILLE

_FIT = 2**15  # figures that fit a cache
_EVERY = 8  # works from one kept sum to the next
_FEW = 2**18  # figures, 2 MiB: of so few works on so few ranks each sum is kept
_MOST_SUMS, _MOST_PREFIXES = 2**22, 2**23  # figures that are kept, 32 and 64 MiB
_Integers = npt.NDArray[np.int64]
_Ranks = npt.NDArray[np.int64] | slice
_Kept = TypeVar("_Kept")


class Prefixes:
    """Ticks of the first works of each rank.

    Kept for each work where they are few, else for every eighth and worked out between.
    """

    def __init__(self, works_ns: Ticks, factors: Ticks, pace: float) -> None:
        self._factors, self._pace, self._places = factors, pace, np.arange(len(factors))
        self._every = every = 1 if len(works_ns) * len(factors) <= _FEW else _EVERY
        blocks = -(-len(works_ns) // every)
        padded_ns = np.full(blocks * every, np.inf)  # after the last work none ever ends
        self._each_ns = works_ns
        padded_ns[: len(works_ns)] = works_ns
        self._works_ns = np.ascontiguousarray(padded_ns.reshape(blocks, every).T)
        self._kept_ns = np.zeros((blocks + 1, len(factors)))
        many = max(1, _FIT // every)
        for begin in range(0, len(factors), many):
            some = slice(begin, begin + many)
            for block in range(1, blocks + 1):
                work_ns = self._works_ns[:, block - 1, np.newaxis]
                taken_ns = _taken_ns(work_ns, factors[some], pace).sum(axis=0)
                self._kept_ns[block, some] = self._kept_ns[block - 1, some] + taken_ns

    @property
    def size(self) -> int:
        """How many sums are kept."""
        return self._kept_ns.size

    def before(self, ranks: _Ranks, counts: _Integers) -> Ticks:
        """Ticks of the first `counts` works of these ranks."""
        if self._every == 1 or not counts.any():
            return self._sums_ns(counts, ranks)
        blocks, more = np.divmod(counts, _EVERY)
        works_ns = self._works_ns.take(blocks, axis=1, mode="clip")
        taken_ns = _taken_ns(works_ns, self._factors[ranks], self._pace)
        counted = np.arange(_EVERY)[:, np.newaxis] < more
        more_ns: Ticks = np.where(counted, taken_ns, 0.0).sum(axis=0)
        return self._sums_ns(blocks, ranks) + more_ns

    def _sums_ns(self, blocks: _Integers, ranks: _Ranks) -> Ticks:
        """Gives the kept sums before so many blocks of works: faster than by two indices."""
        return self._kept_ns.ravel().take(blocks * len(self._places) + self._places[ranks])

    def until(
        self, ranks: _Ranks, begun_ns: Ticks, until_ns: Ticks
    ) -> tuple[_Integers, Ticks, Ticks]:
        """How many works ranks have done by then, fewer than all, and when the next one begins.

        Where the first begins at `begun_ns`. Also how long the next one takes at the usual pace.
        """
        most_ns, lanes = until_ns - begun_ns, self._places[: len(until_ns)]
        done: _Integers = np.zeros(len(lanes), dtype=np.int64)
        for each_ns in self._kept_ns[1:-1, ranks]:
            done += each_ns <= most_ns
        taken_ns = self._sums_ns(done, ranks)
        if self._every > 1:
            sums_ns = np.empty((_EVERY + 1, len(lanes)))
            sums_ns[0] = taken_ns
            each_ns = _taken_ns(self._works_ns[:, done], self._factors[ranks], self._pace)
            for i in range(_EVERY):  # numpy's cumsum walks down columns, four times as slow
                np.add(sums_ns[i], each_ns[i], out=sums_ns[i + 1])
            more = np.count_nonzero(sums_ns[1:] <= most_ns, axis=0)
            done, taken_ns = done * _EVERY + more, sums_ns[more, lanes]
        done = np.minimum(done, len(self._each_ns) - 1)
        next_ns = np.rint(self._each_ns[done] * self._factors[ranks])
        return done, begun_ns + taken_ns, next_ns


class WorkSums:
    """Sums of works on ranks whose work takes so many times as long, [ranks].

    `stood_ns`: how they stood to each other at the end of some job's steps.
    """

    def __init__(self, factors: Ticks) -> None:
        self.factors = np.ascontiguousarray(factors)
        self.stood_ns: Ticks | None = None
        # by works and pace, those that were asked for last at the end
        self._sums: dict[tuple[bytes, float], Ticks] = {}
        self._prefixes: dict[tuple[bytes, float], Prefixes] = {}
        self._usual: tuple[WorkSums, int, WorkSums] | None = None  # see `changed`

    def slowdowns(self, iterations: int) -> Ticks:
        """The factors of each iteration, [ranks, iterations]."""
        return np.broadcast_to(self.factors[:, np.newaxis], (len(self.factors), iterations))

    def changed(self, rank: int, times: float) -> WorkSums:
        """The sums where one rank's work takes so many times as long, and others' as before."""
        factors = self.factors.copy()
        factors[rank] = times
        sums = WorkSums(factors)
        sums._usual = self, rank, WorkSums(factors[rank : rank + 1])
        sums.stood_ns = self.stood_ns
        return sums

    def of(self, works_ns: Sequence[int] | Ticks, pace: float) -> Ticks:
        """Ticks of all works on each rank, each work rounded, `pace` thousandths as long."""
        works = np.array(works_ns, dtype=np.float64)
        key = works.tobytes(), pace
        if key not in self._sums:
            self._sums[key] = self._summed(works, pace)
            _forget(self._sums, _MOST_SUMS)
        return _as_last(self._sums, key)

    def prefixes(self, works_ns: Ticks, pace: float) -> Prefixes:
        """Ticks of the first works on each rank, `pace` thousandths as long."""
        key = works_ns.tobytes(), pace
        if key not in self._prefixes:
            self._prefixes[key] = Prefixes(works_ns, self.factors, pace)
            _forget(self._prefixes, _MOST_PREFIXES)
        return _as_last(self._prefixes, key)

    def _summed(self, works_ns: Ticks, pace: float) -> Ticks:
        if self._usual:
            usual, rank, alone = self._usual
            if (works_ns.tobytes(), pace) in usual._sums:  # noqa: SLF001 -- of this class
                sums_ns = usual.of(works_ns, pace).copy()
                sums_ns[rank] = alone.of(works_ns, pace)[0]
                return sums_ns
        each_ns, count = np.unique(works_ns, return_counts=True)
        times = count.astype(np.float64)
        many = max(1, _FIT // len(each_ns))
        sums_ns = np.empty(len(self.factors))
        for begin in range(0, len(sums_ns), many):
            some = slice(begin, begin + many)
            taken_ns = _taken_ns(each_ns[:, np.newaxis], self.factors[some], pace)
            np.einsum("i,ij->j", times, taken_ns, out=sums_ns[some])
        return sums_ns


def _as_last(kept: dict[tuple[bytes, float], _Kept], key: tuple[bytes, float]) -> _Kept:
    """What is kept, and was asked for last."""
    kept[key] = kept.pop(key)
    return kept[key]


def _forget(kept: dict[tuple[bytes, float], Any], most: int) -> None:
    """All but those that were asked for last, and that fit; the last one of all stays."""
    while len(kept) > 1 and sum(each.size for each in kept.values()) > most:
        del kept[next(iter(kept))]


def among(ranks: _Ranks, places: _Ranks) -> _Ranks:
    """Ranks at some places, in a slice as long as these are all."""
    if isinstance(places, slice):
        return ranks
    if isinstance(ranks, slice):
        begin = ranks.start or 0
        is_all = ranks.stop is not None and len(places) == ranks.stop - begin
        return ranks if is_all else places + begin
    return ranks if len(places) == len(ranks) else ranks[places]


def _taken_ns(works_ns: Ticks, factors: Ticks, pace: float) -> Ticks:
    """Ticks of works on ranks, [works, ranks], `pace` thousandths as long."""
    taken_ns = works_ns * factors
    np.rint(taken_ns, out=taken_ns)
    if pace != PER_MILLE:
        taken_ns *= pace
        taken_ns /= PER_MILLE
        np.ceil(taken_ns, out=taken_ns)
    return taken_ns
