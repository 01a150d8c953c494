"""Work of many lanes at once, and the times in which it is slowed down: `work_end_ns` by arrays.

Until the next edge of a period a lane's pace is the same, so that the works that end by then end at
sums. The one that crosses it is worked out on both sides, and one that crosses several edges by
fractions of integers. All are exact: products and sums of whole numbers below 2^53, and quotients
that are rounded.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ddpsim.cluster.algorithms.max_plus import Ticks
from ddpsim.engine.fast.lane import PER_MILLE, Slow, work_end_ns
from ddpsim.engine.fast.work_sums import WorkSums, among

_Lanes = npt.NDArray[np.int64] | slice
_Integers = npt.NDArray[np.int64]
_ALL = slice(None)
_FEW = 3  # periods; of more, to look at one after the other takes longer
_CACHED = 2**13  # lanes whose periods fit a cache together
_NEVER = -np.inf  # start and end of a lane's period that is none


class _Period(NamedTuple):
    """From `start_ns` to `end_ns` of each lane work takes `factor` thousandths as long."""

    start_ns: Ticks
    end_ns: Ticks
    factor: Ticks | float

    def of(self, lanes: _Lanes) -> tuple[Ticks, Ticks, Ticks | float]:
        """The period of some lanes: its start, end and factor."""
        factor = self.factor if isinstance(self.factor, float) else self.factor[lanes]
        return self.start_ns[lanes], self.end_ns[lanes], factor


class _Crossing(NamedTuple):
    """A work over an edge of a period, by lane: so many were done before it, it began at `at_ns`.

    It takes `whole_ns` at the usual pace, of which `left_ns` were left at `since_ns`.
    """

    done: _Integers
    at_ns: Ticks
    whole_ns: Ticks
    since_ns: Ticks
    left_ns: Ticks


class SlowPeriods:
    """The slow periods that some lane has not passed yet, in each lane's order.

    None of a lane's overlap; factors are in thousandths, and one where periods may overlap.
    """

    def __init__(self) -> None:
        self._periods: list[_Period] = []
        self._stacked: Ticks | None = None  # [periods, lanes, start, end and factor] where many

    def append(self, start_ns: Ticks, end_ns: Ticks, factor: Ticks | float) -> None:
        """One more of every lane; one that follows without time between goes on with the last."""
        periods, more = self._periods, _Period(start_ns, end_ns, factor)
        self._stacked = None
        if not periods:
            periods.append(more)
        elif (start_ns < periods[-1].start_ns).any():
            self._insert(more)
        elif not _are_alike(factor, periods[-1].factor):
            periods.append(more)
        else:
            periods[-1:] = _joined(periods[-1], more)

    def _insert(self, more: _Period) -> None:
        """In the order of their starts; what overlaps or touches goes on."""
        periods = self._periods
        for i in reversed(range(len(periods))):
            before = more.start_ns < periods[i].start_ns
            later = _chosen(before, periods[i], more)
            periods[i + 1 : i + 2], more = [later], _chosen(before, more, periods[i])
        joined = [more]
        for each in periods[1:]:
            joined[-1:] = _joined(joined[-1], each)
        self._periods = joined

    def pass_over(self, now_ns: Ticks) -> None:
        """All lanes have come so far."""
        while self._periods and (self._periods[0].end_ns <= now_ns).all():
            del self._periods[0]
            self._stacked = None

    def standing(self, now_ns: Ticks) -> list[Ticks]:
        """What is left of all periods where lanes are at `now_ns`, [trials, ranks]."""
        return [
            np.maximum(ns.reshape(now_ns.shape), now_ns)
            for period in self._periods
            for ns in (period.start_ns, period.end_ns)
        ]

    def factors(self) -> list[Ticks]:
        """Each period's."""
        return [np.asarray(period.factor) for period in self._periods]

    def put_off(self, by_ns: Ticks) -> None:
        """All of them come so much later."""
        self._stacked = None
        self._periods = [
            _Period(period.start_ns + by_ns, period.end_ns + by_ns, period.factor)
            for period in self._periods
        ]

    def lasting_ends(self, sums: WorkSums, lanes: slice, now_ns: Ticks, works_ns: Ticks) -> Ticks:
        """When these lanes have done all works, [works], which were launched before `now_ns`.

        Lanes are the ranks of `sums`; they go through one period after the other. One that is so
        far at `now_ns` would have begun at `begun_ns`, had it done all works at the usual pace.
        """
        usual_ns = sums.of(works_ns, PER_MILLE)[lanes]
        if not self._periods:
            return now_ns + usual_ns
        if len(works_ns) == 1:
            return self._cross(lanes, now_ns, usual_ns, *self._pace(lanes, now_ns))
        begun_ns, now_ns = now_ns.copy(), now_ns.copy()
        for number, period in enumerate(self._periods):
            start_ns, end_ns, _ = period.of(lanes)
            start_ns = np.maximum(start_ns, now_ns)
            comes = np.flatnonzero((end_ns > now_ns) & (begun_ns + usual_ns > start_ns))
            if comes.size:
                those = _of(comes, begun_ns, start_ns, end_ns)
                passed = self._through(number, sums, works_ns, among(lanes, comes), *those)
                now_ns[comes], begun_ns[comes] = passed
        return begun_ns + usual_ns

    def _through(
        self,
        number: int,
        sums: WorkSums,
        works_ns: Ticks,
        ranks: _Lanes,
        begun_ns: Ticks,
        start_ns: Ticks,
        end_ns: Ticks,
    ) -> tuple[Ticks, Ticks]:
        """`now_ns` and `begun_ns` of `lasting_ends`, once ranks left a period or ended in it."""
        factor = float(self._periods[number].factor)
        prefixes = partial(sums.prefixes, works_ns)  # of all ranks, which takes long
        first, over = None, np.zeros(len(end_ns), dtype=bool)
        if (begun_ns != start_ns).any():  # some have begun before
            done, at_ns, whole_ns = prefixes(PER_MILLE).until(ranks, begun_ns, start_ns)
            first = _Crossing(done, at_ns, whole_ns, start_ns, whole_ns - (start_ns - at_ns))
            now_ns = start_ns + _paced(first.left_ns, factor)
            begun_ns = now_ns - prefixes(factor).before(ranks, done + 1)
            over = now_ns > end_ns
        now_ns = begun_ns + sums.of(works_ns, factor)[ranks]
        then_ns, leaves = now_ns - sums.of(works_ns, PER_MILLE)[ranks], over | (now_ns > end_ns)
        if not leaves.any():
            return now_ns, then_ns
        places = _mostly(leaves)
        ranks, (begun_ns, end_ns) = among(ranks, places), _of(places, begun_ns, end_ns)
        done, at_ns, whole_ns = prefixes(factor).until(ranks, begun_ns, end_ns)
        last = _Crossing(done, at_ns, whole_ns, at_ns, whole_ns)
        if first and over.any():  # in one work over all of the period
            each = zip(_of(places, *first), last, strict=True)
            last = _Crossing(*(np.where(over[places], *both) for both in each))
        left_ns = self._left_ns(number, ranks, last, end_ns, leaves[places])
        passed = left_ns, left_ns - prefixes(PER_MILLE).before(ranks, last.done + 1)
        for each_ns, passed_ns in zip((now_ns, then_ns), passed, strict=True):
            each_ns[places] = np.where(leaves[places], passed_ns, each_ns[places])
        return now_ns, then_ns

    def _left_ns(
        self,
        number: int,
        ranks: _Lanes,
        last: _Crossing,
        end_ns: Ticks,
        leaves: npt.NDArray[np.bool_],
    ) -> Ticks:
        """When the works end in which ranks leave a period; some of them cross a later one too."""
        factor = float(self._periods[number].factor)
        left_ns: Ticks = end_ns + last.left_ns - _done_ns(end_ns - last.since_ns, factor)
        for later in self._periods[number + 1 :]:
            start_ns, later_end_ns, _ = later.of(ranks)
            again = np.flatnonzero(leaves & (start_ns < left_ns) & (later_end_ns > end_ns))
            if again.size:
                some, at_ns = among(ranks, again), last.at_ns[again]
                left_ns[again] = self._cross(
                    some, at_ns, last.whole_ns[again], *self._pace(some, at_ns)
                )
        return left_ns

    def work_ends(
        self, lanes: _Lanes, now_ns: Ticks, works_ns: Ticks, launched_ns: Ticks | None
    ) -> tuple[Ticks, npt.NDArray[np.bool_] | None]:
        """When these lanes have done all of their works, [lanes, works], one after the other.

        `now_ns`: when they can begin; `launched_ns`: a work begins no earlier, [lanes or 1, works];
        None: all were launched before. Also says which lanes have waited for a launch, if any may.
        """
        if not self._periods:
            done_ns, late = _in_turn(now_ns, works_ns, launched_ns)
            return done_ns[:, -1], late
        ends_ns = np.empty_like(now_ns)
        place: _Lanes = _ALL
        waited = None if launched_ns is None else np.zeros(len(now_ns), dtype=bool)
        while True:
            edge_ns, factor = self._pace(lanes, now_ns)
            paced_ns = _paced(works_ns, factor[:, np.newaxis])
            done_ns, late = _in_turn(now_ns, paced_ns, launched_ns)
            ends_ns[place] = done_ns[:, -1]
            if waited is not None:
                waited[place] |= late
            if not (crosses := np.flatnonzero(done_ns[:, -1] > edge_ns)).size:
                return ends_ns, waited
            place, lanes = among(place, crosses), among(lanes, crosses)
            if launched_ns is not None:
                launched_ns = np.broadcast_to(launched_ns, works_ns.shape)[crosses]
            finished = np.count_nonzero(done_ns[crosses] <= edge_ns[crosses, np.newaxis], axis=1)
            done_ns, now_ns, works_ns = done_ns[crosses], now_ns[crosses], works_ns[crosses]
            lane, first = np.arange(len(crosses)), finished.min() + 1
            now_ns = np.where(finished > 0, done_ns[lane, finished - 1], now_ns)
            if launched_ns is not None:
                now_ns = np.maximum(now_ns, launched_ns[lane, finished])
            crossing_ns = works_ns[lane, finished]
            now_ns = self._cross(lanes, now_ns, crossing_ns, *self._pace(lanes, now_ns))
            ends_ns[place] = now_ns
            if first == works_ns.shape[1]:
                return ends_ns, waited
            later = np.arange(first, works_ns.shape[1]) > finished[:, np.newaxis]
            works_ns = works_ns[:, first:] * later
            if launched_ns is not None:
                launched_ns = np.where(later, launched_ns[:, first:], -np.inf)

    def _pace(self, lanes: _Lanes, now_ns: Ticks) -> tuple[Ticks, Ticks]:
        """Until when each lane's pace stays the same, and its factor; some periods are known."""
        if len(self._periods) > _FEW and now_ns.size <= _CACHED:
            return self._pace_among_many(lanes, now_ns)
        edge_ns: Any = np.inf
        factor: Any = float(PER_MILLE)
        for period in reversed(self._periods):
            start_ns, end_ns, its_factor = period.of(lanes)
            is_ahead, is_begun = end_ns > now_ns, start_ns <= now_ns
            change_ns = np.where(is_begun, end_ns, start_ns)
            pace = np.where(is_begun, its_factor, float(PER_MILLE))
            edge_ns = np.where(is_ahead, change_ns, edge_ns)
            factor = np.where(is_ahead, pace, factor)
        return edge_ns, factor

    def _pace_among_many(self, lanes: _Lanes, now_ns: Ticks) -> tuple[Ticks, Ticks]:
        """Find `_pace` by the first of each lane's periods that is not over."""
        if self._stacked is None:
            starts, ends, factors = zip(*self._periods, strict=True)
            of_lanes = [np.broadcast_to(factor, starts[0].shape) for factor in factors]
            self._stacked = np.stack([starts, ends, of_lanes], axis=2)
        periods = self._stacked[:, lanes]
        first = (periods[..., 1] > now_ns).argmax(axis=0)
        start_ns, end_ns, its_factor = periods[first, np.arange(len(now_ns))].T
        is_ahead, is_begun = end_ns > now_ns, start_ns <= now_ns
        edge_ns = np.where(is_ahead, np.where(is_begun, end_ns, start_ns), np.inf)
        return edge_ns, np.where(is_ahead & is_begun, its_factor, float(PER_MILLE))

    def _cross(
        self,
        lanes: _Lanes,
        now_ns: Ticks,
        work_ns: Ticks,
        edge_ns: Ticks,
        factor: Ticks,
    ) -> Ticks:
        """The ends of one work of each lane, over edges; the first edge and the pace are known.

        With so many ticks passed at the usual pace, and so many slowed down by one factor, what is
        left is a whole number of ticks less a fraction, or a whole number of thousandths.
        """
        ends_ns = now_ns + _paced(work_ns, factor)
        place = np.flatnonzero(ends_ns > edge_ns)
        lanes = among(lanes, place)
        begun_ns, whole_ns, now_ns, slowing = _of(place, now_ns, work_ns, edge_ns, factor)
        passed_ns = now_ns - begun_ns
        slow_ns = np.where(slowing > PER_MILLE, passed_ns, 0)
        left_ns = whole_ns - (passed_ns - slow_ns)
        while place.size:
            edge_ns, factor = self._pace(lanes, now_ns)
            is_slow = factor > PER_MILLE
            last_ns = now_ns + left_ns - _done_ns(slow_ns, slowing)
            if is_slow.any():
                several = is_slow & (slowing > PER_MILLE) & (factor != slowing)
                for i in np.flatnonzero(several).tolist():
                    lane = i + lanes.start if isinstance(lanes, slice) else int(lanes[i])
                    one = lane, int(begun_ns[i]), int(whole_ns[i])
                    last_ns[i] = edge_ns[i] = self._end_of_one(*one)
                is_slow &= ~several
                slowing = np.where(is_slow, factor, slowing)
                thousandths = left_ns * slowing - slow_ns * PER_MILLE
                last_ns = np.where(is_slow, now_ns + np.ceil(thousandths / PER_MILLE), last_ns)
            ends_ns[place] = last_ns
            more = np.flatnonzero(last_ns > edge_ns)
            lanes = among(lanes, more)
            place, is_slow, slowing = _of(more, place, is_slow, slowing)
            begun_ns, whole_ns = _of(more, begun_ns, whole_ns)
            now_ns, edge_ns, left_ns, slow_ns = _of(more, now_ns, edge_ns, left_ns, slow_ns)
            passed_ns, now_ns = edge_ns - now_ns, edge_ns
            left_ns = left_ns - np.where(is_slow, 0, passed_ns)
            slow_ns = slow_ns + np.where(is_slow, passed_ns, 0)
        return ends_ns

    def _end_of_one(self, lane: int, now_ns: int, work_ns: int) -> int:
        """The end of one lane's work, by Python's own integers, which have no limit."""
        here = slice(lane, lane + 1)
        slow = []
        for period in self._periods:
            start_ns, end_ns, factor = period.of(here)
            if end_ns[0] > now_ns:
                its_factor = factor if isinstance(factor, float) else factor[0]
                slow.append(Slow(int(start_ns[0]), int(end_ns[0]), int(its_factor), PER_MILLE))
        return work_end_ns(now_ns, work_ns, slow)


def _of(places: _Lanes, *figures: Any) -> tuple[Any, ...]:
    """Figures at some places, as they are where these are all: to gather them takes long."""
    is_all = isinstance(places, slice) or len(places) == len(figures[0])
    return tuple(figures if is_all else [each[places] for each in figures])


def _mostly(which: npt.NDArray[np.bool_]) -> _Lanes:
    """Places where that is so; all of them, where it is of most."""
    return _ALL if 2 * np.count_nonzero(which) > len(which) else np.flatnonzero(which)


def _in_turn(
    now_ns: Ticks, paced_ns: Ticks, launched_ns: Ticks | None
) -> tuple[Ticks, npt.NDArray[np.bool_] | None]:
    """When works end one after the other, [lanes, works], and which lanes waited for a launch."""
    done_ns = paced_ns if paced_ns.shape[1] == 1 else np.cumsum(paced_ns, axis=1)
    if launched_ns is None:
        return done_ns + now_ns[:, np.newaxis], None
    waits_ns = np.maximum.accumulate(launched_ns - (done_ns - paced_ns), axis=1)
    begun_ns = np.maximum(now_ns[:, np.newaxis], waits_ns)
    return done_ns + begun_ns, waits_ns[:, -1] > now_ns


def _done_ns(slow_ns: Ticks, factor: Ticks | float) -> Ticks:
    """Whole ticks of a work that are done in so many slow ones."""
    done_ns: Ticks = np.floor(slow_ns * PER_MILLE / factor)  # rounded up to a whole number, if so
    done_ns -= done_ns * factor > slow_ns * PER_MILLE
    return done_ns


def _paced(works_ns: Ticks, factor: Ticks | float) -> Ticks:
    """Works that take so many thousandths as long."""
    paced_ns: Ticks = works_ns * factor
    paced_ns /= PER_MILLE
    return np.ceil(paced_ns, out=paced_ns)


def _are_alike(one: Ticks | float, other: Ticks | float) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return one == other
    return np.array_equal(one, other)


def _chosen(first: npt.NDArray[np.bool_], one: _Period, other: _Period) -> _Period:
    """One period in some lanes, the other elsewhere."""
    start_ns = np.where(first, one.start_ns, other.start_ns)
    return _Period(start_ns, np.where(first, one.end_ns, other.end_ns), one.factor)


def _joined(one: _Period, later: _Period) -> list[_Period]:
    """Two periods of one factor, the later as one with the other where they touch."""
    touches = later.start_ns <= one.end_ns
    if not touches.any():
        return [one, later]
    end_ns = np.maximum(one.end_ns, later.end_ns)
    if touches.all():
        return [_Period(one.start_ns, end_ns, one.factor)]
    both = _Period(one.start_ns, end_ns, one.factor)
    none_ns = np.full_like(end_ns, _NEVER)
    never = _Period(none_ns, none_ns, one.factor)
    return [_chosen(touches, never, one), _chosen(touches, both, later)]
