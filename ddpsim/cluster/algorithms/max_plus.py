"""When the ranks of a ring end a collective, without following its messages.

The plain model (`ddpsim.engine.reference.messages`) sends 2(N-1) chunks to each of N ranks:
t_r(s+1) = max(t_r(s), t_(r-1)(s)) + c_r: a rank's next chunk is under way once it has its last one
and its left neighbour has that many too, and takes c_r. Written in full, t_r(S) is the length of
the longest way of S steps that ends at r, where a step either stays on a rank or moves one to the
right, costs the c of the rank it leads to, and a way from rank q begins at q's arrival a_q.

* Equal links: every step costs c, and within S >= N-1 steps every rank can be reached from every
  other. So all ranks end at max(a) + S c.
* Unequal links: a way that moves from q to r passes each rank between them once and stays S - (r-q)
  times; the longest one stays where c is largest of what it passes. With P the sum of c from some
  fixed place to the right, and ranks numbered on around the ring (q <= r, more than one turn too):
  t_r = max over q <= j <= r of a_q + P_r - P_q + (S - (r-q)) c_j.
  - No way needs 2N-1 moves or more: with a turn less it begins at the same rank and still passes
    every rank, and N stays where c is largest cost no less than the turn.
  - For one value m of c, j is any rank with c_j = m, best the last one up to r, and
    a_q - P_q + q m is maximal over q <= j: a running maximum. Every rank occurs between 1-N and 0,
    so that such a j exists from 1-N on, where ways from q >= 1-N may end anywhere up to N-1
    (2N-2 moves). Ways from q < 1-N to r pass every rank and stay where c is largest of all: a
    running maximum to the left.
  With K different values of c this takes O(K N) instead of O(N^2).
* Where K is no smaller than the steps, the rule itself, all ranks of a step at once.

All of these give the ticks of the plain model exactly: sums of integers far below 2^53, which
float64 holds. A ring whose links repeat in a shorter period, with arrivals that repeat likewise,
has times that repeat: one period, of N ranks then, over all the steps of the whole ring.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

__all__ = ["Ticks", "by_steps", "ring_ends_ns"]

Ticks = npt.NDArray[np.float64]  # whole numbers
_LEVEL_STEPS = 8  # about so many steps of the rule cost as much as one value of c


def ring_ends_ns(step_ns: tuple[int, ...], steps: int, begun_ns: Ticks) -> tuple[Ticks, str]:
    """When each rank ends so many steps around a ring, and how that was found.

    `begun_ns`: when each begins, [..., participants], of one period of the ring or of a whole
    number of them; the result has the same shape. `step_ns` is c of one period. One participant
    stands behind the slowest link.
    """
    participants = begun_ns.shape[-1]
    equal = min(step_ns) == max(step_ns) and steps >= participants - 1
    if participants == 1 or equal:
        last_ns = begun_ns.max(axis=-1, keepdims=True) + steps * max(step_ns)
        return np.broadcast_to(last_ns, begun_ns.shape), "closed-form"
    line = _line(step_ns, participants)
    if steps < 2 * (participants - 1) or _LEVEL_STEPS * len(line.kinds) > steps:
        return by_steps(line.step_ns[-participants:], steps, begun_ns), "recurrence"
    return _longest_ways(line, steps, begun_ns), "max-plus"


@dataclass(frozen=True)
class _Line:
    """A ring of N ranks unrolled, at the places 1-N to N-1.

    `step_ns` is c there, `moved_ns` P; `kinds` are the values of c, the largest last, with their
    places.
    """

    step_ns: Ticks
    moved_ns: Ticks
    place: Ticks
    kinds: tuple[tuple[float, npt.NDArray[np.bool_]], ...]


@lru_cache(maxsize=64)
def _line(step_ns: tuple[int, ...], ranks: int) -> _Line:
    once = np.array(step_ns * max(1, ranks // len(step_ns)), dtype=np.float64)[:ranks]
    steps_ns = np.concatenate([once[1:], once])
    place = np.arange(1 - ranks, ranks, dtype=np.float64)
    kinds = tuple((kind, steps_ns != kind) for kind in sorted(set(once.tolist())))
    return _Line(steps_ns, np.cumsum(steps_ns), place, kinds)


def by_steps(step_ns: Ticks, steps: int, begun_ns: Ticks) -> Ticks:
    """The rule itself, for rings along the last axis; `step_ns` may differ between them."""
    times_ns = begun_ns
    for _ in range(steps):
        times_ns = np.maximum(times_ns, np.roll(times_ns, 1, axis=-1)) + step_ns
    return times_ns


def _longest_ways(line: _Line, steps: int, begun_ns: Ticks) -> Ticks:
    """See above; ranks are the places 0 to N-1."""
    n = begun_ns.shape[-1]
    ranks = line.place[n - 1 :]
    from_ns = np.concatenate([begun_ns[..., 1:], begun_ns], axis=-1) - line.moved_ns  # a - P
    ways = np.full(begun_ns.shape, -np.inf)
    for kind, elsewhere in line.kinds:
        best = np.maximum.accumulate(from_ns + line.place * kind, axis=-1)
        best[..., elsewhere] = -np.inf
        last = np.maximum.accumulate(best, axis=-1)[..., n - 1 :]
        np.maximum(ways, last + (steps - ranks) * kind, out=ways)
    # from the places 2-2N to -N: those of 2-N to 0, a turn before, where P is smaller by the turn
    largest, turn_ns = line.kinds[-1][0], line.step_ns[n - 1 :].sum()
    before = from_ns[..., 1:n] + turn_ns + (line.place[1:n] - n) * largest
    leftwards = np.maximum.accumulate(before[..., ::-1], axis=-1)[..., ::-1]
    # rank r reaches back to r - (2N-2): to all of them if r = 0, to none if r = N-1
    around = leftwards + (steps - ranks[:-1]) * largest
    np.maximum(ways[..., :-1], around, out=ways[..., :-1])
    return np.asarray(ways + line.moved_ns[n - 1 :])
