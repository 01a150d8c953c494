"""How long works that follow each other take on ranks that differ for good, summed once.

Simulations of a job ask for the same sums in each of its steps, and so do its variants whose
compute is the same: another network, another host.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ddpsim.cluster.algorithms.max_plus import Ticks
from ddpsim.engine.fast.scalar import PER_MILLE

__all__ = ["WorkSums"]

_FIT = 2**15  # figures that fit a cache


class WorkSums:
    """Of ranks whose work takes so many times as long, [ranks]."""

    def __init__(self, factors: Ticks) -> None:
        self.factors = np.ascontiguousarray(factors)
        self._known: dict[tuple[bytes, float], Ticks] = {}

    def slowdowns(self, iterations: int) -> Ticks:
        """The factors of each iteration, [ranks, iterations]."""
        return np.broadcast_to(self.factors[:, np.newaxis], (len(self.factors), iterations))

    def of(self, works_ns: Sequence[int] | Ticks, pace: float) -> Ticks:
        """Ticks of all works on each rank, each work rounded, `pace` thousandths as long."""
        works = np.array(works_ns, dtype=np.float64)
        asked = works.tobytes(), pace
        if asked not in self._known:
            self._known[asked] = self._summed(works, pace)
        return self._known[asked]

    def _summed(self, works_ns: Ticks, pace: float) -> Ticks:
        each_ns, count = np.unique(works_ns, return_counts=True)
        times = count.astype(np.float64)
        many = max(1, _FIT // len(each_ns))
        sums_ns = np.empty(len(self.factors))
        for begin in range(0, len(sums_ns), many):
            some = slice(begin, begin + many)
            taken_ns = each_ns[:, np.newaxis] * self.factors[some]
            np.rint(taken_ns, out=taken_ns)
            if pace != PER_MILLE:
                taken_ns *= pace
                taken_ns /= PER_MILLE
                np.ceil(taken_ns, out=taken_ns)
            np.einsum("i,ij->j", times, taken_ns, out=sums_ns[some])
        return sums_ns
