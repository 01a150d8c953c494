"""Work of many lanes at once, and the times in which it is slowed down: `work_end_ns` by arrays.

Every lane has a list of slow periods, in order and without overlap, and is at the first one that
it has not passed. From edge to edge of these its pace is the same, so that the works that end by
the next edge end at sums; the one that crosses it is worked out by fractions of integers. Then it
goes on from there. Both are exact: products and sums of whole numbers below 2^53, and a quotient
that is rounded up has at most three digits after the point.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ddpsim.cluster.algorithms.max_plus import Ticks
from ddpsim.engine.fast.scalar import PER_MILLE, Slow, work_end_ns
from ddpsim.engine.fast.work_sums import WorkSums

__all__ = ["SlowPeriods"]

_Integers = npt.NDArray[np.int64]
_ALL = slice(None)  # lanes; to name each of them takes as long as to work on them
_LATEST = 2**62  # of an int64, with room for a sum


class SlowPeriods:
    """Of so many lanes; factors are in thousandths, and one where periods may overlap."""

    def __init__(self, lanes: int) -> None:
        self._periods: list[tuple[Ticks, Ticks, Ticks]] = []  # start, end, factor of each lane
        self._at = np.zeros(lanes, dtype=np.int64)
        self._start = np.full(lanes, np.inf)
        self._end = np.full(lanes, np.inf)
        self._factor = np.full(lanes, PER_MILLE, dtype=np.float64)

    def append(self, start_ns: Ticks, end_ns: Ticks, factor: Ticks) -> None:
        """One more period of every lane, which begins after all that the lane has passed."""
        known = self._periods
        if not known:
            known.append((start_ns, end_ns, factor))
            self._reload(_where(self._at == 0))
        elif (start_ns < known[-1][0]).any():
            self._insert(start_ns, end_ns, factor)
        else:
            self._follow(start_ns, end_ns, factor)

    def _follow(self, start_ns: Ticks, end_ns: Ticks, factor: Ticks) -> None:
        """After the last one; it goes on with the new one where there is no time between."""
        known, last = self._periods, len(self._periods) - 1
        last_start_ns, last_end_ns, last_factor = known[last]
        goes_on = (start_ns <= last_end_ns) & (self._at <= last)
        if goes_on.any() and (factor == last_factor).all():
            until_ns = np.where(goes_on, np.maximum(last_end_ns, end_ns), last_end_ns)
            known[last] = last_start_ns, until_ns, factor
            start_ns = np.where(goes_on, until_ns, start_ns)
            end_ns = np.where(goes_on, until_ns, end_ns)
        if (start_ns < end_ns).any():
            known.append((start_ns, end_ns, factor))
        self._reload(_where(self._at >= last))

    def _insert(self, start_ns: Ticks, end_ns: Ticks, factor: Ticks) -> None:
        """Among those to come, in the order of their starts, each without what others cover."""
        known, first = self._periods, int(self._at.min())
        place = len(known) - 1  # of those that some lane's begins before the end of
        while place > first and (start_ns < known[place - 1][1]).any():
            place -= 1
        covered_ns = np.full_like(start_ns, -np.inf)
        for i in range(place, len(known)):
            is_before = start_ns < known[i][0]
            here_ns = np.where(is_before, start_ns, known[i][0])
            here_end_ns = np.where(is_before, end_ns, known[i][1])
            start_ns = np.where(is_before, known[i][0], start_ns)
            end_ns = np.where(is_before, known[i][1], end_ns)
            known[i] = np.maximum(here_ns, covered_ns), here_end_ns, factor
            covered_ns = np.maximum(covered_ns, here_end_ns)
        known.append((np.maximum(start_ns, covered_ns), end_ns, factor))
        self._reload(_where(self._at >= place))

    def pass_over(self, now_ns: Ticks) -> None:
        """All lanes have come so far."""
        if not self._periods:
            return
        while (over := self._end <= now_ns).all():
            self._advance(_ALL)
        self._pass(np.flatnonzero(over), now_ns)
        if (self._at == len(self._periods)).all():
            self._periods.clear()
            self._at[:] = 0

    def ends_by_sums(self, sums: WorkSums, works_ns: Ticks, now_ns: Ticks) -> Ticks:
        """When each lane has done all works if its pace stays as it is at `now_ns`; -1: unknown.

        A lane whose pace changes before that, or is one of several, is unknown.
        """
        if not self._periods:
            return now_ns + sums.of(works_ns, PER_MILLE)
        is_slow = self._start <= now_ns
        if not is_slow.any():
            ends_ns = now_ns + sums.of(works_ns, PER_MILLE)
            ends_ns[ends_ns > self._start] = -1.0
            return ends_ns
        pace = self._factor[is_slow.argmax()]
        ends_ns = now_ns + sums.of(works_ns, float(pace))
        unknown = (ends_ns > self._end) | (self._factor != pace)
        if not is_slow.all():
            usual_ns = now_ns + sums.of(works_ns, PER_MILLE)
            unknown = np.where(is_slow, unknown, usual_ns > self._start)
            ends_ns = np.where(is_slow, ends_ns, usual_ns)
        ends_ns[unknown] = -1.0
        return ends_ns

    def lasting_ends(
        self, sums: WorkSums, lanes: _Integers, now_ns: Ticks, works_ns: Ticks
    ) -> Ticks:
        """When these lanes have done all works, [works], which were launched before `now_ns`.

        Lanes are the ranks of `sums`.
        """
        ends_ns, place = np.empty_like(now_ns), np.arange(len(lanes))
        done: _Integers = np.zeros(len(lanes), dtype=np.int64)
        while len(lanes):
            edge_ns, paces = self._edges(lanes, now_ns)
            begun_ns, last_ns = sums.begun_and_last_ns(works_ns, paces, lanes, done, now_ns)
            ends_ns[place] = last_ns
            crosses = np.flatnonzero(last_ns > edge_ns)
            lanes, place, begun_ns = lanes[crosses], place[crosses], begun_ns[crosses]
            left_ns = np.maximum(edge_ns, now_ns)[crosses] - begun_ns  # a period may be over
            done, taken_ns = sums.within(works_ns, paces[crosses], lanes, left_ns)
            crossing_ns = np.rint(works_ns[done] * sums.factors[lanes])
            now_ns = self._cross(lanes, begun_ns + taken_ns, crossing_ns)
            ends_ns[place], done = now_ns, done + 1
            more = np.flatnonzero(done < len(works_ns))
            lanes, place, done, now_ns = lanes[more], place[more], done[more], now_ns[more]
        return ends_ns

    def work_ends(
        self, lanes: _Integers, now_ns: Ticks, works_ns: Ticks, launched_ns: Ticks | None
    ) -> tuple[Ticks, npt.NDArray[np.bool_]]:
        """When these lanes have done all of their works, [lanes, works], one after the other.

        `now_ns`: when they can begin; `launched_ns`: a work begins no earlier, [lanes or 1, works];
        None: all were launched before. Also says which lanes have waited for a launch.
        """
        ends_ns, place = np.empty_like(now_ns), np.arange(len(lanes))
        waited = np.zeros(len(lanes), dtype=bool)
        while True:
            edge_ns, paced_ns = self._pace(lanes, now_ns, works_ns)
            if launched_ns is None:
                last_ns = now_ns + paced_ns.sum(axis=1)
            else:
                done_ns = np.cumsum(paced_ns, axis=1)
                waits_ns = np.maximum.accumulate(launched_ns - (done_ns - paced_ns), axis=1)
                waited[place] |= waits_ns[:, -1] > now_ns
                done_ns += np.maximum(now_ns[:, np.newaxis], waits_ns)
                last_ns = done_ns[:, -1]
            ends_ns[place] = last_ns
            crosses = np.flatnonzero(last_ns > edge_ns)
            if not len(crosses):
                return ends_ns, waited
            if launched_ns is None:
                done_ns = np.cumsum(paced_ns[crosses], axis=1)
                done_ns += now_ns[crosses, np.newaxis]
            else:
                done_ns = done_ns[crosses]
                launched_ns = np.broadcast_to(launched_ns, paced_ns.shape)[crosses]
            lanes, place, works_ns = lanes[crosses], place[crosses], works_ns[crosses]
            finished = np.count_nonzero(done_ns <= edge_ns[crosses, np.newaxis], axis=1)
            lane, first = np.arange(len(crosses)), finished.min() + 1
            now_ns = np.where(finished > 0, done_ns[lane, finished - 1], now_ns[crosses])
            if launched_ns is not None:
                now_ns = np.maximum(now_ns, launched_ns[lane, finished])
            now_ns = self._cross(lanes, now_ns, works_ns[lane, finished])
            later = np.arange(first, works_ns.shape[1]) > finished[:, np.newaxis]
            works_ns = works_ns[:, first:] * later
            if launched_ns is not None:
                launched_ns = np.where(later, launched_ns[:, first:], -np.inf)
            if not works_ns.size:
                ends_ns[place] = now_ns
                return ends_ns, waited

    def _pace(self, lanes: _Integers, now_ns: Ticks, works_ns: Ticks) -> tuple[Ticks, Ticks]:
        """Until when the pace of each lane stays the same, and its works at this pace."""
        if not self._periods:
            return np.full(len(lanes), np.inf), works_ns
        edge_ns, factor = self._edges(lanes, now_ns)
        if (factor == PER_MILLE).all():
            return edge_ns, works_ns
        paced_ns = works_ns * factor[:, np.newaxis]
        paced_ns /= PER_MILLE
        return edge_ns, np.ceil(paced_ns, out=paced_ns)

    def _edges(self, lanes: _Integers, now_ns: Ticks) -> tuple[Ticks, Ticks]:
        """Until when the pace of each lane stays the same, and its factor."""
        start_ns = self._start[lanes]
        is_slow = start_ns <= now_ns
        factor = np.where(is_slow, self._factor[lanes], PER_MILLE)
        return np.where(is_slow, self._end[lanes], start_ns), factor

    def _pass(self, lanes: _Integers, now_ns: Ticks) -> None:
        """Lanes whose period is over go on to the next that is not; `now_ns` is of all lanes."""
        while len(lanes):
            self._advance(lanes)
            lanes = lanes[self._end[lanes] <= now_ns[lanes]]

    def _advance(self, lanes: _Integers | slice) -> None:
        self._at[lanes] += 1
        self._reload(lanes)

    def _reload(self, lanes: _Integers | slice) -> None:
        """The period that these lanes are at; after the last comes one at the end of time."""
        places = self._at[lanes]
        if not len(places):
            return
        first, last = int(places.min()), int(places.max())
        for place in range(first, last + 1):
            here = lanes
            if first != last:
                of_all = np.arange(len(places)) if isinstance(lanes, slice) else lanes
                here = of_all[places == place]
            if place == len(self._periods):
                self._start[here] = self._end[here] = np.inf
                continue
            for figures, known in zip(
                (self._start, self._end, self._factor), self._periods[place], strict=True
            ):
                figures[here] = known[here]

    def _cross(self, lanes: _Integers, now_ns: Ticks, work_ns: Ticks) -> Ticks:
        """The ends of one work of each lane, over edges; what is left is left / parts ticks."""
        ends_ns, place = np.empty_like(now_ns), np.arange(len(lanes))
        now, left = now_ns.astype(np.int64), work_ns.astype(np.int64)
        parts = np.ones(len(lanes), dtype=np.int64)
        while len(lanes):
            over = self._end[lanes] <= now
            if over.any():
                self._advance(lanes[over])
                continue
            start, end = (np.minimum(a[lanes], _LATEST) for a in (self._start, self._end))
            free = np.maximum(0, start.astype(np.int64) - now)
            need = -(-left // parts)
            done = need <= free
            ends_ns[place[done]] = (now + need)[done]
            lanes, place, now, left, parts, free = (
                a[~done] for a in (lanes, place, now, left, parts, free)
            )
            if not len(lanes):
                break
            end = end[~done].astype(np.int64)
            left, now = left - free * parts, now + free
            factor = self._factor[lanes].astype(np.int64)
            if float(left.max()) * float(factor.max()) > _LATEST:
                ends_ns[place] = self._cross_one_by_one(lanes, now, left, parts)
                break
            need = -(-left * factor // (parts * PER_MILLE))
            done = now + need <= end
            ends_ns[place[done]] = (now + need)[done]
            left, parts = left * factor - (end - now) * parts * PER_MILLE, parts * factor
            lanes, place, now, left, parts = (a[~done] for a in (lanes, place, end, left, parts))
            self._advance(lanes)
        return ends_ns

    def _cross_one_by_one(
        self, lanes: _Integers, now: _Integers, left: _Integers, parts: _Integers
    ) -> Ticks:
        """The same by Python's own integers, which do not overflow."""
        ends_ns = np.empty(len(lanes))
        for i, lane in enumerate(lanes.tolist()):
            slow = [
                Slow(int(start[lane]), int(end[lane]), int(factor[lane]), PER_MILLE)
                for start, end, factor in self._periods[self._at[lane] :]
            ]
            ends_ns[i] = work_end_ns(int(now[i]), int(left[i]), slow, parts=int(parts[i]))
        return ends_ns


def _where(chosen: npt.NDArray[np.bool_]) -> _Integers | slice:
    """The lanes that are chosen."""
    return _ALL if chosen.all() else np.flatnonzero(chosen)
