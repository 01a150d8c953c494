"""When the ranks of a ring end a collective, without following its messages.

The plain model (`ddpsim.engine.reference.messages`) sends S = 2(N-1) chunks to each of N ranks. The
link that leads to rank r is busy b_r with a chunk, which arrives l_r later. With u_r(s) the time at
which chunk s has left for r, and t_r(s) = u_r(s) + l_r when it has arrived:

    u_r(s+1) = max(u_r(s), t_(r-1)(s)) + b_r

A chunk leaves once the link is free and its sender has it; the first, once both ranks have joined
(u_r(0) = t_r(0) = a_r). From the first chunk on this is the longest way of S-1 steps that ends at
r: a step stays on a rank or moves from q to q+1 for l_q more, and costs the b of the rank it leads
to. A way that moves from q to r passes each rank between them, and stays where b is largest of what
it passes. With P the sum of l and b from some fixed place to the right, and ranks numbered on
around the ring (q <= r, more than one turn too):

    u_r(S) = max over q <= j <= r of u_q(1) + P_r - P_q + (S-1 - (r-q)) b_j

Let D = P_(r+N) - P_r be the length of a turn, and c the largest b.

* D <= N c, links wait for bytes: no way needs 2N-1 moves or more, as N stays at c are no shorter
  than the turn that they replace. For one value m of b, j is any rank with b_j = m, best the last
  one up to r, and u_q(1) - P_q + q m is maximal over q <= j: a running maximum. Every rank occurs
  between 1-N and 0, so that such a j exists from 1-N on, where ways from q >= 1-N may end anywhere
  up to N-1 (2N-2 moves; where S-1 = 2N-3, up to N-2, and rank N-1 is at -1). Ways from q < 1-N to r
  pass every rank and stay at c: a running maximum to the left. With K different values of b this
  takes O(K N).
* D > N c, links wait for latency: no way stays N times or more, as a turn is longer. The N ways to
  r that stay 0 to N-1 times begin at N neighbours, one at each rank. They pass every rank and stay
  at c: a maximum over a window of N, O(N). Where S-1 = 2N-3 the way that stays N-1 times passes all
  but the rank after r, and stays where b is largest of the others.
* S = N-1, one turn: ways to r begin no earlier than at r-(N-2). With j the last rank up to r with
  b_j = m, from such an m at 0 on, those to r begin up to 0, a running maximum to the left, or from
  1 to j, one to the right: O(K N).
* Where K is no smaller than the steps, the rule itself, all ranks of a step at once.

All of these give the ticks of the plain model exactly: sums of integers far below 2^53, which
float64 holds. A ring whose links repeat in a shorter period, with arrivals that repeat likewise,
has times that repeat: one period, of N ranks then, over all the steps of the whole ring.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ticks = npt.NDArray[np.float64]  # whole numbers
_KEPT_LINES = 16
_BLOCK, _MANY = 32, 2**14  # values in turn, of as many blocks as there are; of so many values
_LEVEL_STEPS = 8  # about so many steps of the rule cost as much as one value of b


def ring_ends_ns(
    busy_ns: tuple[int, ...], latency_ns: tuple[int, ...], steps: int, begun_ns: Ticks
) -> tuple[Ticks, str]:
    """When each rank ends so many steps around a ring, and how that was found.

    `begun_ns`: when each begins, [..., participants], of one period of the ring or of a whole
    number of them; the result has the same shape. `busy_ns` and `latency_ns` are b and l of one
    period.
    """
    participants = begun_ns.shape[-1]
    line = _line(busy_ns, latency_ns, participants)
    if line.is_even and (begun_ns == begun_ns[..., :1]).all():
        return begun_ns + steps * (line.busy_ns[0] + line.latency_ns[0]), "closed-form"
    if line.is_even and not line.latency_ns[0] and steps >= participants - 1:
        last_ns = begun_ns.max(axis=-1, keepdims=True) + steps * line.busy_ns[0]
        return np.broadcast_to(last_ns, begun_ns.shape), "closed-form"
    longest = _longest_ways(line, steps)
    if longest is None and line.is_even and steps >= participants - 1:
        return _even_ends_ns(line, steps, begun_ns), "recurrence"
    if longest is None:
        return by_steps(line.busy_ns, line.latency_ns, steps, begun_ns), "recurrence"
    lefts_ns = _further(begun_ns, -1)
    first_ns = np.maximum(begun_ns, lefts_ns) + line.busy_ns
    return longest(line, steps - 1, first_ns) + line.latency_ns, "max-plus"


def _even_ends_ns(line: _Line, steps: int, begun_ns: Ticks) -> Ticks:
    """The ends of a turn or more of steps over equal links.

    The longest way to a rank moves on as often as it can, in its first step alone without latency:
    a maximum over N-1 neighbours, found by doubling.
    """
    latency_ns, seen = line.latency_ns[0], 1
    longest = np.maximum(begun_ns, _further(begun_ns, 1))
    while seen < line.ranks - 1:
        more = min(seen, line.ranks - 1 - seen)
        longest = np.maximum(longest, _further(longest, more) - more * latency_ns)
        seen += more
    ends_ns: Ticks = _further(longest, -steps % line.ranks)
    return np.asarray(ends_ns + steps * (line.busy_ns[0] + latency_ns))


def _further(ns: Ticks, places: int) -> Ticks:
    """The values of the ranks so many places further on around the ring."""
    return np.concatenate((ns[..., places:], ns[..., :places]), axis=-1)


@dataclass(frozen=True, eq=False)
class _Line:
    """A ring of N ranks: b and l of each, and P at the places 0 to N-1; `turn_ns` is D."""

    busy_ns: Ticks
    latency_ns: Ticks
    moved_ns: Ticks
    turn_ns: float
    kinds: tuple[float, ...]  # values of b, the largest last

    @property
    def ranks(self) -> int:
        """N."""
        return len(self.busy_ns)

    @cached_property
    def is_even(self) -> bool:
        """Whether all links are alike."""
        return len(self.kinds) == 1 and bool((self.latency_ns == self.latency_ns[0]).all())

    @cached_property
    def longest_move_ns(self) -> float:
        """From a rank to the next."""
        return float((self.busy_ns + np.roll(self.latency_ns, 1)).max())

    @cached_property
    def most_without_largest(self) -> int:
        """How many ranks at most follow each other whose b is not the largest."""
        places = np.flatnonzero(self.busy_ns == self.kinds[-1])
        return int(np.diff(places, append=places[0] + self.ranks).max()) - 1

    @property
    def waits_for_latency(self) -> bool:
        """D > N c."""
        return self.turn_ns > self.ranks * self.kinds[-1]


_Ways = Callable[[_Line, int, Ticks], Ticks]


def _longest_ways(line: _Line, steps: int) -> _Ways | None:
    """What finds them sooner than so many steps of the rule; None: nothing does."""
    n, levels = line.ranks, len(line.kinds)
    if n > 1 and steps == n - 1:
        ways_of: _Ways = _within_a_turn
    elif n > 1 and steps >= 2 * (n - 1):
        ways_of = _few_stays if line.waits_for_latency else _few_moves
        levels = 1 if line.waits_for_latency else levels
    else:
        return None
    return ways_of if _LEVEL_STEPS * levels <= steps else None


@lru_cache(maxsize=_KEPT_LINES)
def _line(busy_ns: tuple[int, ...], latency_ns: tuple[int, ...], ranks: int) -> _Line:
    repeats = max(1, ranks // len(busy_ns))
    busy, latency = (
        np.tile(np.array(times, dtype=np.float64), repeats)[:ranks]
        for times in (busy_ns, latency_ns)
    )
    moves = busy + np.roll(latency, 1)  # to each rank from its left neighbour
    moved_ns = np.cumsum(moves) - moves[0]
    kinds = tuple(sorted(map(float, set(busy_ns[:ranks]))))
    return _Line(busy, latency, moved_ns, float(moves.sum()), kinds)


def by_steps(busy_ns: Ticks, latency_ns: Ticks, steps: int, begun_ns: Ticks) -> Ticks:
    """The rule itself, for rings along the last axis; links may differ between them."""
    axes = begun_ns.ndim

    def ranks_first(ns: Ticks) -> Ticks:  # numpy is slow along the few ranks of many rings
        return ns[(np.newaxis,) * (axes - ns.ndim)].transpose(axes - 1, *range(axes - 1))

    busy, latency = ranks_first(busy_ns), ranks_first(latency_ns)
    arrived_ns = left_ns = np.ascontiguousarray(ranks_first(begun_ns))
    from_left_ns = np.empty(left_ns.shape)
    for _ in range(steps):
        from_left_ns[1:] = arrived_ns[:-1]
        from_left_ns[0] = arrived_ns[-1]
        left_ns = np.maximum(left_ns, from_left_ns) + busy
        arrived_ns = left_ns + latency
    return np.ascontiguousarray(arrived_ns.transpose(*range(1, axes), 0))


def _kinds_to_try(line: _Line, steps: int, first_ns: Ticks) -> tuple[float, ...]:
    """Values of b at which a longest way may stay, the largest last.

    A way that passes a rank of the largest value had better stay there. One that passes none is
    short; it is longer than all others only where what it begins with is later by as much.
    """
    *others, largest = line.kinds
    if not others:
        return line.kinds
    passed = line.most_without_largest
    least_ns = float(first_ns.min()) + (steps - passed - 1) * largest
    most_ns = float(first_ns.max()) + passed * line.longest_move_ns
    return (*(kind for kind in others if most_ns + steps * kind > least_ns), largest)


class _OfKind(NamedTuple):
    """What ways cost that stay at one value of b, whatever the arrivals are.

    `begin_ns`: by the places where they begin; `end_ns`: by those where they end, 0 to N-1 or a
    place earlier; `last`: the last rank of that value up to these, by its place among those where
    ways begin. `first`: so many ends come before the first such rank.
    """

    begin_ns: Ticks
    end_ns: Ticks
    last: npt.NDArray[np.int64]
    first: int


@lru_cache(maxsize=_KEPT_LINES)
def _of_kind(line: _Line, kind: float, steps: int, begin: int, end: int) -> _OfKind:
    """Tell what ways over links of one kind gain, from `begin` on to the N places from `end` on."""
    n = line.ranks
    places = np.arange(begin, end + n)
    turns, ranks = np.divmod(places, n)
    moved_ns = line.moved_ns[ranks] + turns * line.turn_ns
    at_kind = np.where(line.busy_ns[ranks] == kind, np.arange(len(places)), -1)
    last = np.maximum.accumulate(at_kind)[end - begin :]
    ends = np.arange(end, end + n)
    end_ns = moved_ns[end - begin :] + (steps - ends) * kind
    first = int(np.count_nonzero(last < max(0, end - begin)))
    return _OfKind(places * kind - moved_ns, end_ns, last, first)


def _within_a_turn(line: _Line, steps: int, first_ns: Ticks) -> Ticks:
    """The longest ways of N-2 steps; see above. They begin at 2-N to N-1, and end at 0 to N-1."""
    n = line.ranks
    ways = np.full(first_ns.shape, -np.inf)
    behind_ns = np.empty((*first_ns.shape[:-1], n - 1))  # the places 2-N to 0
    for kind in _kinds_to_try(line, steps, first_ns):
        of_kind = _of_kind(line, kind, steps, 2 - n, 0)
        np.add(first_ns[..., 2:], of_kind.begin_ns[: n - 2], out=behind_ns[..., : n - 2])
        behind_ns[..., n - 2] = first_ns[..., 0] + of_kind.begin_ns[n - 2]
        ends_ns = np.empty(first_ns.shape)
        ends_ns[..., 0] = -np.inf
        ends_ns[..., 1:] = _running_maxima(first_ns[..., 1:] + of_kind.begin_ns[n - 1 :])
        if len(line.kinds) > 1:
            ends_ns = ends_ns[..., np.maximum(of_kind.last - (n - 2), 0)]
        np.maximum(ends_ns[..., :-1], _maxima_from(behind_ns), out=ends_ns[..., :-1])
        if of_kind.first:  # they stay on the last such rank of the turn before
            ends_ns[..., : of_kind.first] = -np.inf
            stay_ns = _maxima_from(behind_ns[..., : of_kind.last[0] + 1])
            until = min(of_kind.first, stay_ns.shape[-1])
            ends_ns[..., :until] = stay_ns[..., :until]
        ends_ns += of_kind.end_ns
        np.maximum(ways, ends_ns, out=ways)
    return ways


def _maxima_from(values: Ticks) -> Ticks:
    """The largest of each value and those after it, along the last axis."""
    return _running_maxima(values[..., ::-1])[..., ::-1]


def _few_moves(line: _Line, steps: int, first_ns: Ticks) -> Ticks:
    """The longest ways where links wait for bytes; see above. They end at 0 to N-1 or -1 to N-2."""
    n, largest = line.ranks, line.kinds[-1]
    before = 0 if steps >= 2 * n - 2 else 1
    twice_ns = np.concatenate([first_ns[..., 1:], first_ns], axis=-1)[..., : 2 * n - 1 - before]
    ways = np.full(first_ns.shape, -np.inf)
    for kind in _kinds_to_try(line, steps, first_ns):
        of_kind = _of_kind(line, kind, steps, 1 - n, -before)
        from_ns = twice_ns + of_kind.begin_ns
        ends_ns = _running_maxima(from_ns)
        ends_ns = (
            ends_ns[..., of_kind.last] if len(line.kinds) > 1 else ends_ns[..., n - 1 - before :]
        )
        ends_ns = ends_ns + of_kind.end_ns
        ends_ns[..., of_kind.last < 0] = -np.inf
        np.maximum(ways, ends_ns, out=ways)
    # from the places 2-2N to -N: those of 2-N to 0, a turn before, where P is smaller by the turn;
    # the first end reaches back to all of them, the last to none
    around = _maxima_from(from_ns[..., 1:n]) + (line.turn_ns - n * largest)
    around += of_kind.end_ns[:-1]
    np.maximum(ways[..., :-1], around, out=ways[..., :-1])
    return np.asarray(np.roll(ways, -before, axis=-1)) if before else ways


def _few_stays(line: _Line, steps: int, first_ns: Ticks) -> Ticks:
    """The longest ways where links wait for latency; see above. They begin at -S to 2N-2-S."""
    n, stays = line.ranks, _stays(line, steps)
    window, begin = stays.window, -steps % n
    pieces = (first_ns[..., begin:], first_ns, first_ns[..., : max(0, begin - 1)])
    from_ns = np.concatenate(pieces, axis=-1)[..., : 2 * n - 1]
    from_ns += stays.from_ns
    ways = np.empty(first_ns.shape)
    ways[..., window - 1 :: -1] = _running_maxima(from_ns[..., window - 1 :: -1])
    ways[..., window:] = -np.inf
    later = _running_maxima(from_ns[..., window : window + n - 1])
    np.maximum(ways[..., 1:], later, out=ways[..., 1:])
    ways += stays.ends_ns
    if window < n:
        np.maximum(ways, from_ns[..., n - 1 :] + stays.alone_ns, out=ways)
    return ways


def _running_maxima(values: Ticks) -> Ticks:
    """The largest of each value and those before it, along the last axis; may be `values`.

    Blocks side by side where there are many: numpy's own goes from value to value.
    """
    count = values.shape[-1]
    if count < _MANY:
        return np.asarray(np.maximum.accumulate(values, axis=-1))
    if (values[..., 1:] >= values[..., :-1]).all():
        return values
    whole = count - count % _BLOCK
    maxima = np.array(values, order="C")
    blocks = maxima[..., :whole].reshape(*values.shape[:-1], -1, _BLOCK)
    for i in range(1, _BLOCK):
        np.maximum(blocks[..., i - 1], blocks[..., i], out=blocks[..., i])
    before = np.maximum.accumulate(blocks[..., :-1, -1], axis=-1)
    np.maximum(blocks[..., 1:, :], before[..., np.newaxis], out=blocks[..., 1:, :])
    maxima[..., :whole] = blocks.reshape(*values.shape[:-1], whole)
    np.maximum.accumulate(maxima[..., whole - 1 :], axis=-1, out=maxima[..., whole - 1 :])
    return maxima


@dataclass(frozen=True)
class _Stays:
    """What ways with few stays cost whatever the arrivals are.

    `from_ns`: by their place, what they begin with; `ends_ns`: by rank, what they end with, and
    `alone_ns` one that stays N-1 times, if that passes all but one rank: `window` is N-1 then.
    """

    window: int
    from_ns: Ticks
    ends_ns: Ticks
    alone_ns: Ticks


@lru_cache(maxsize=_KEPT_LINES)
def _stays(line: _Line, steps: int) -> _Stays:
    n, largest = line.ranks, line.kinds[-1]
    turn, rank = divmod(-steps, n)  # of the first place
    moved_ns = np.concatenate(
        (line.moved_ns[rank:], line.moved_ns, line.moved_ns[: max(0, rank - 1)])
    )
    moved_ns = moved_ns[: 2 * n - 1]
    moved_ns[: n - rank] += turn * line.turn_ns
    moved_ns[n - rank : 2 * n - rank] += (turn + 1) * line.turn_ns
    moved_ns[2 * n - rank :] += (turn + 2) * line.turn_ns
    from_ns = np.arange(-steps, 2 * n - 1 - steps, dtype=np.float64) * largest - moved_ns
    ends_ns = (steps - np.arange(n, dtype=np.float64)) * largest + line.moved_ns
    others_ns = np.roll(_largest_of_others(line), -1)
    alone_ns = ends_ns + (n - 1) * (others_ns - largest)
    return _Stays(n if steps >= 2 * n - 2 else n - 1, from_ns, ends_ns, alone_ns)


def _largest_of_others(line: _Line) -> Ticks:
    """The largest value of b among all ranks but each one itself."""
    is_largest = line.busy_ns == line.kinds[-1]
    if np.count_nonzero(is_largest) > 1:
        return np.full(line.ranks, line.kinds[-1])
    return np.where(is_largest, line.kinds[-2], line.kinds[-1])
