"""The least that a mean steady step can take, told without simulating it.

- A device does all of its works in a step.
- All ranks meet in a collective, and the last of them sets when the next works begin. So from one
  meeting to the next a step takes as long as on the rank whose works are the longest in it.
- A host launches all of a step, however early its device could begin it.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from ddpsim.cluster.algorithms.dispatch import has_recurrence
from ddpsim.cluster.algorithms.max_plus import Ticks
from ddpsim.cluster.process_groups import cost_of
from ddpsim.cluster.transfers import ScheduledTransfer, Transfer, WholeTransfer, duration_ns
from ddpsim.engine.compiled import Stretch
from ddpsim.engine.fast.collectives import collective_ends_ns
from ddpsim.engine.fast.flows import longest_ns
from ddpsim.engine.fast.lane import PER_MILLE
from ddpsim.engine.fast.slow_periods import SlowPeriods
from ddpsim.engine.request import Request
from ddpsim.strategies.instructions import Await, Communicate
from ddpsim.units import NS_PER_S

__all__ = ["least_step_s"]


_Step = Sequence[Stretch]


def least_step_s(request: Request, *, closely: bool = False) -> float:
    """Seconds that no rank's mean steady step is shorter than.

    0 where hosts compute themselves, or steps are of several kinds. `closely`: works are slowed
    down by collectives in flight, which takes ten times as long to tell.
    """
    program = request.program
    if program.blocking or not program.is_uniform or not request.plan.needs_no_events:
        return 0.0
    step = program.compiled(program.warmup).stretches
    slowing = _slowing(request, step) if closely else Fraction(1)
    of_device_ns = max(_of_device_ns(request, step), _of_meetings_ns(request, step, slowing))
    return max(0.0, of_device_ns, _of_host_ns(request, step)) / NS_PER_S


def _sent(request: Request, launched: Communicate) -> Transfer:
    cost = cost_of(request.cost, launched.group)
    return cost.transfer(launched.operation, launched.size_bytes)


def _factors(request: Request) -> Ticks:
    """How many times as long works take in steady steps, [steps, ranks], or [steps, 1] of all."""
    if request.slowdowns is None:
        return np.ones((request.program.iterations, 1))
    return request.slowdowns[:, request.program.warmup :].T


def _of_device_ns(request: Request, step: _Step) -> float:
    """All works of a step, between the ends of two, on the rank whose steps have the least."""
    least = float(_factors(request).mean(axis=0).min())
    return least * sum(each.least_ns for each in step)


def _slowing(request: Request, step: _Step) -> Fraction:
    """How many times as long works take under any collective; 1 where that cannot be bounded.

    A rank that is earlier than another, or never waits for its host, is never slowed down where the
    other has passed already: it launches the same collectives earlier, and they end earlier. Not so
    where works slow down unequally, or collectives wait for something else than works.
    """
    launched = [each.then for each in step if isinstance(each.then, Communicate)]
    if any(each.waits_for is not None or each.follows is not None for each in launched):
        return Fraction(1)
    factors = {_sent(request, each).interference.compute for each in launched}
    return factors.pop() if len(factors) == 1 else Fraction(1)


def _of_meetings_ns(request: Request, step: _Step, slowing: Fraction) -> float:
    """Works to the first meeting, from each to the next, and from the last one to the end.

    0 where all ranks meet in no collective, or some of them in others.
    """
    place = None if request.program.is_grouped else _meeting(request, step)
    if place is None:
        return 0.0
    factors = _factors(request)
    head, tail = step[: place + 1], step[place + 1 :]
    first_ns = float(factors[0].min()) * sum(each.least_ns for each in head)
    ranks = _Ranks(request, factors.shape, head[-1], slowing)
    ranks.go(tail, factors)
    last_ns = float(ranks.now_ns[-1].max())
    ranks.go([*head[:-1], head[-1]._replace(then=None)], np.roll(factors, -1, axis=0))
    between_ns = float(ranks.now_ns[:-1].max(axis=1).sum())
    return (first_ns + between_ns + last_ns) / len(factors)


def _meeting(request: Request, step: _Step) -> int | None:
    """After which works is the collective with which least is lost: what goes on until its end.

    That are works, and its own time, unless all ranks leave it together.
    """
    launched: dict[int, tuple[int, int]] = {}
    lost: list[tuple[int, int]] = []
    now_ns = 0
    for place, stretch in enumerate(step):
        now_ns += stretch.works_ns
        match stretch.then:
            case Communicate(number=number, waits_for=None, follows=None):
                transfer = _sent(request, stretch.then)
                own_ns = 0 if isinstance(transfer, WholeTransfer) else duration_ns(transfer)
                launched[number] = now_ns - own_ns, place
            case Await(number) if number in launched:
                begun_ns, begun = launched[number]
                lost.append((now_ns - begun_ns, begun))
    return min(lost)[1] if lost else None


class _Ranks:
    """The ranks of many steps side by side, each step from a meeting at 0 on, [steps, ranks].

    Nothing waits for a host; `slowing`: works take so many times as long under collectives. Before
    a rank awaits the meeting's end nothing is known of it. `now_ns`: when it has done all so far,
    at least.
    """

    def __init__(
        self, request: Request, shape: tuple[int, ...], meeting: Stretch, slowing: Fraction
    ) -> None:
        self.now_ns = np.full(shape, -np.inf)
        self._request = request
        self._slow = SlowPeriods()
        self._slowing = float(PER_MILLE * slowing)
        self._free_ns = np.zeros(shape)  # when collectives have ended
        self._done_ns: dict[int, Ticks] = {}
        if isinstance(meeting.then, Communicate):
            transfer = _sent(request, meeting.then)
            if isinstance(transfer, WholeTransfer):
                self._free_ns += duration_ns(transfer)
            self._done_ns[meeting.then.number] = self._free_ns + meeting.then.after_ns

    def go(self, step: _Step, factors: Ticks) -> None:
        """Carry out a part of a step."""
        for stretch in step:
            self._work(factors * stretch.works_ns - stretch.number)  # each is rounded to a tick
            match stretch.then:
                case Communicate():
                    self._communicate(stretch.then)
                case Await(number) if number in self._done_ns:  # launched since the meeting
                    self.now_ns = np.maximum(self.now_ns, self._done_ns[number])
                    self._slow.pass_over(self.now_ns.reshape(-1))

    def _work(self, works_ns: Ticks) -> None:
        if self._slowing == PER_MILLE or self.now_ns[0, 0] < 0:
            self.now_ns = self.now_ns + works_ns
            return
        lanes = slice(0, self.now_ns.size)
        each_ns = np.floor(np.maximum(works_ns, 0)).reshape(-1, 1)
        ends_ns, _ = self._slow.work_ends(lanes, self.now_ns.reshape(-1), each_ns, None)
        self.now_ns = ends_ns.reshape(self.now_ns.shape)

    def _communicate(self, launched: Communicate) -> None:
        begun_ns = self._free_ns
        if launched.waits_for is None and launched.follows is None:
            begun_ns = np.maximum(begun_ns, self.now_ns + launched.before_ns)
        self._free_ns = np.floor(_least_ends_ns(_sent(self._request, launched), begun_ns))
        self._done_ns[launched.number] = self._free_ns + launched.after_ns
        if self._slowing != PER_MILLE:
            self._slow.append(begun_ns.reshape(-1), self._free_ns.reshape(-1), self._slowing)


def _least_ends_ns(transfer: Transfer, joined_ns: Ticks) -> Ticks:
    """When ranks end a collective at least, which they join no earlier, [steps, ranks]."""
    if joined_ns.shape[1] == 1:
        return joined_ns + duration_ns(transfer)
    is_slow = isinstance(transfer, ScheduledTransfer) and not has_recurrence(transfer.algorithm)
    if is_slow:  # followed message by message
        first_ns = joined_ns.min(axis=1, keepdims=True) + duration_ns(transfer)
        last_ns = joined_ns.max(axis=1, keepdims=True)
        return np.broadcast_to(np.maximum(first_ns, last_ns), joined_ns.shape)
    return collective_ends_ns(transfer, joined_ns)[0]


def _of_host_ns(request: Request, step: _Step) -> float:
    """All launches of a step, where all that they launch takes no longer, one after the other.

    Then a device is never further behind its host than that; twice it, for steps of the warm-up.
    """
    if request.stalls is not None:
        return 0.0
    sent = [each.then for each in step if isinstance(each.then, Communicate)]
    launched_ns = sum(each.host_ns for each in step) + sum(each.host_ns for each in sent)
    slowest = 1.0 if request.slowdowns is None else float(request.slowdowns.max())
    transfers = [_sent(request, each) for each in sent]
    slowed = max((float(each.interference.compute) for each in transfers), default=1.0)
    own_ns = sum(each.before_ns + each.after_ns for each in sent)
    works_ns = slowest * slowed * sum(each.works_ns for each in step)
    sent_ns = sum(longest_ns(transfer, request.traffic) for transfer in transfers)
    behind_ns = works_ns + own_ns + sent_ns
    if behind_ns > launched_ns:
        return 0.0
    return launched_ns - 2 * behind_ns / request.program.iterations
