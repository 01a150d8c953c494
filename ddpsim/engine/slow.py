"""Times in which compute is slowed down, for many lanes at once: the vectorised `work_end_ns`.

Every lane has a list of slow periods, in order and without overlap, and is at the first one that
it has not passed. Most work lies wholly before that period or wholly in it, which takes a few
passes over all lanes; the few lanes whose work crosses an edge are worked out by fractions of
integers. Both are exact.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ddpsim.engine.lane import Slow, work_end_ns
from ddpsim.engine.ring import Ticks

__all__ = ["PER_MILLE", "SlowPeriods"]

PER_MILLE = 1000
_Lanes = npt.NDArray[np.intp]
_LATEST = 2**62


class SlowPeriods:
    """Of [trials, ranks] lanes; factors are in thousandths, one for each trial."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self._shape = shape
        self._periods: list[tuple[Ticks, Ticks, Ticks]] = []  # start, end, factor
        self._at = np.zeros(shape, dtype=np.intp)
        self._start = np.full(shape, np.inf)
        self._end = np.full(shape, np.inf)
        self._factor = np.full(shape, PER_MILLE, dtype=np.float64)
        self._look()

    def __bool__(self) -> bool:
        """Whether any lane has a period before it."""
        return bool(self._periods)

    def append(self, start_ns: Ticks, end_ns: Ticks, factor: Ticks) -> None:
        """A period of every lane, [trials, ranks]; the factors are [trials, 1]."""
        self._periods.append(
            (start_ns.ravel(), end_ns.ravel(), np.broadcast_to(factor, self._shape).ravel())
        )
        self._reload(np.flatnonzero(self._at == len(self._periods) - 1))
        self._look()

    def paced(self, work_ns: Ticks, start_ns: Ticks) -> tuple[Ticks, Ticks]:
        """What all this work takes at the pace of `start_ns`, [..., trials, ranks]; until when.

        Until then, [trials], it goes on at that pace on all ranks of a trial.
        """
        if not self._all_slow and (start_ns.min(axis=1) >= self._latest_start).all():
            self._all_slow = True
        if self._all_slow:
            return np.ceil(work_ns * self._factor_here / PER_MILLE), self._earliest_end
        return work_ns, self._earliest_start

    def work_ends(self, start_ns: Ticks, work_ns: Ticks | float) -> Ticks:
        """The first tick at which each lane has done its work."""
        plain = start_ns + work_ns
        stretched = start_ns + np.ceil(work_ns * self._factor / PER_MILLE)
        is_slow = start_ns >= self._start
        ends: Ticks = np.where(is_slow, stretched, plain)
        crossing = np.flatnonzero(ends > np.where(is_slow, self._end, self._start))
        if len(crossing):
            work = np.broadcast_to(work_ns, self._shape).ravel()
            self._cross(crossing, start_ns.ravel()[crossing], work[crossing], ends.reshape(-1))
            self._look()
        return ends

    def pass_over(self, now_ns: Ticks) -> None:
        """All lanes have come so far."""
        flat = now_ns.reshape(-1)
        passed = np.flatnonzero(self._end <= now_ns)
        if not len(passed):
            return
        while len(passed):
            self._advance(passed)
            passed = passed[self._end.reshape(-1)[passed] <= flat[passed]]
        if (self._at == len(self._periods)).all():
            self._periods.clear()
            self._at[:] = 0
        self._look()

    def _look(self) -> None:
        """The bounds of all lanes of a trial, and the factor if all have one."""
        self._all_slow = False  # not known to be
        self._latest_start = self._start.max(axis=1)
        self._earliest_start = self._start.min(axis=1)
        self._earliest_end = self._end.min(axis=1)
        low, high = self._factor.min(), self._factor.max()
        self._factor_here = low if low == high else self._factor

    def _advance(self, lanes: _Lanes) -> None:
        self._at.reshape(-1)[lanes] += 1
        self._reload(lanes)

    def _reload(self, lanes: _Lanes) -> None:
        """The period that these lanes are at; none lasts for ever, from the end of time on."""
        places = self._at.reshape(-1)[lanes]
        for place in np.unique(places):
            here = lanes[places == place]
            if place == len(self._periods):
                self._start.reshape(-1)[here] = np.inf
                self._end.reshape(-1)[here] = np.inf
                continue
            start_ns, end_ns, factor = self._periods[place]
            self._start.reshape(-1)[here] = start_ns[here]
            self._end.reshape(-1)[here] = end_ns[here]
            self._factor.reshape(-1)[here] = factor[here]

    def _cross(self, lanes: _Lanes, now_ns: Ticks, work_ns: Ticks, ends_ns: Ticks) -> None:
        """Work of these lanes over edges of their periods; what is left is left / parts ticks."""
        now, left = now_ns.astype(np.int64), work_ns.astype(np.int64)
        parts = np.ones(len(lanes), dtype=np.int64)
        while len(lanes):
            start, end = (a.reshape(-1)[lanes] for a in (self._start, self._end))
            free = np.maximum(0, np.minimum(start, _LATEST) - now).astype(np.int64)
            need = -(-left // parts)
            done = need <= free
            ends_ns[lanes[done]] = (now + need)[done]
            lanes, now, left, parts = lanes[~done], now[~done], left[~done], parts[~done]
            if not len(lanes):
                return
            free, end = free[~done], end[~done].astype(np.int64)
            left, now = left - free * parts, np.maximum(now, now + free)
            factor = self._factor.reshape(-1)[lanes].astype(np.int64)
            if float(left.max()) * float(factor.max()) > _LATEST:
                self._cross_one_by_one(lanes, now, left, parts, ends_ns)
                return
            need = -(-left * factor // (parts * PER_MILLE))
            done = now + need <= end
            ends_ns[lanes[done]] = (now + need)[done]
            left = left * factor - (end - now) * parts * PER_MILLE
            parts = parts * factor
            lanes, now, left, parts = (a[~done] for a in (lanes, end, left, parts))
            self._advance(lanes)

    def _cross_one_by_one(
        self,
        lanes: _Lanes,
        now: npt.NDArray[np.int64],
        left: npt.NDArray[np.int64],
        parts: npt.NDArray[np.int64],
        ends_ns: Ticks,
    ) -> None:
        """The same by Python's own integers, which do not overflow."""
        for lane, start, over, under in zip(
            lanes.tolist(), now.tolist(), left.tolist(), parts.tolist(), strict=True
        ):
            slow = [
                Slow(int(begin[lane]), int(end[lane]), int(factor[lane]), PER_MILLE)
                for begin, end, factor in self._periods[self._at.reshape(-1)[lane] :]
            ]
            ends_ns[lane] = work_end_ns(start, over, slow, parts=under)
