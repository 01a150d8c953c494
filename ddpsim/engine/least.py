"""The least that a mean steady step can take, told without simulating it.

- A device does all of its works in a step.
- All ranks meet in a collective, and the last of them sets when the next works begin. So from one
  meeting to the next a step takes as long as on the rank whose works are the longest in it.
- A host launches all of a step, however early its device could begin it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ddpsim.cluster.algorithms.max_plus import Ticks
from ddpsim.cluster.cost import CollectiveCost
from ddpsim.cluster.process_groups import cost_of
from ddpsim.cluster.transfers import ScheduledTransfer, Transfer, WholeTransfer, duration_ns
from ddpsim.engine.fast.collectives import collective_ends_ns
from ddpsim.engine.fast.flows import longest_ns
from ddpsim.engine.request import Request
from ddpsim.strategies.instructions import Await, Communicate, Compute, Instruction
from ddpsim.units import NS_PER_S

__all__ = ["least_step_s"]

_Step = Sequence[Instruction]


def least_step_s(request: Request) -> float:
    """Seconds that no rank's mean steady step is shorter than.

    0 where hosts compute themselves, or steps are of several kinds.
    """
    program = request.program
    if program.blocking or not program.is_uniform or not request.plan.needs_no_events:
        return 0.0
    step = program.step(program.warmup)
    of_device_ns = max(_of_device_ns(request, step), _of_meetings_ns(request, step))
    return max(0.0, of_device_ns, _of_host_ns(request, step)) / NS_PER_S


def _factors(request: Request) -> Ticks:
    """How many times as long works take in steady steps, [steps, ranks], or [steps, 1] of all."""
    if request.slowdowns is None:
        return np.ones((request.program.iterations, 1))
    return request.slowdowns[:, request.program.warmup :].T


def _works_ns(step: _Step) -> Iterator[int]:
    """Of each work, less a tick, to which it is rounded."""
    return (i.device_ns - 1 for i in step if isinstance(i, Compute) and i.device_ns)


def _of_device_ns(request: Request, step: _Step) -> float:
    """All works of a step, between the ends of two, on the rank whose steps have the least."""
    return float(_factors(request).mean(axis=0).min()) * sum(_works_ns(step))


def _of_meetings_ns(request: Request, step: _Step) -> float:
    """Works to the first meeting, from each to the next, and from the last one to the end.

    0 where all ranks meet in no collective, or some of them in others.
    """
    place = None if request.program.is_grouped else _meeting(request.cost, step)
    if place is None:
        return 0.0
    factors = _factors(request)
    head, tail = step[:place], step[place:]
    first_ns = float(factors[0].min()) * sum(_works_ns(head))
    ranks = _Ranks(request.cost, factors.shape)
    ranks.go(tail, factors)
    last_ns = float(ranks.now_ns[-1].max())
    ranks.go(head, np.roll(factors, -1, axis=0))
    between_ns = float(ranks.now_ns[:-1].max(axis=1).sum())
    return (first_ns + between_ns + last_ns) / len(factors)


def _meeting(cost: CollectiveCost, step: _Step) -> int | None:
    """The place of the collective with which least is lost: what goes on until it is awaited.

    That are works, and its own time, unless all ranks leave it together.
    """
    launched: dict[int, tuple[int, int]] = {}
    lost: list[tuple[int, int]] = []
    now_ns = 0
    for place, instruction in enumerate(step):
        match instruction:
            case Compute(device_ns=work_ns):
                now_ns += work_ns
            case Communicate(number, _, operation, size_bytes, waits_for=None, follows=None):
                transfer = cost.transfer(operation, size_bytes)
                own_ns = 0 if isinstance(transfer, WholeTransfer) else duration_ns(transfer)
                launched[number] = now_ns - own_ns, place
            case Await(number) if number in launched:
                begun_ns, begun = launched[number]
                lost.append((now_ns - begun_ns, begun))
    return min(lost)[1] if lost else None


class _Ranks:
    """The ranks of many steps side by side, each step from a meeting at 0 on, [steps, ranks].

    Nothing slows their works or waits for a host. Before a rank awaits the meeting's end nothing is
    known of it. `now_ns`: when it has done all so far, at least.
    """

    def __init__(self, cost: CollectiveCost, shape: tuple[int, ...]) -> None:
        self.now_ns = np.full(shape, -np.inf)
        self._cost = cost
        self._free_ns: Ticks | None = None  # when collectives have ended
        self._done_ns: dict[int, Ticks] = {}

    def go(self, instructions: _Step, factors: Ticks) -> None:
        """Carry out instructions; the very first one is the meeting."""
        works_ns, count = 0, 0
        for instruction in instructions:
            if isinstance(instruction, Compute):
                works_ns += instruction.device_ns
                count += 1
            elif isinstance(instruction, Communicate | Await):
                self.now_ns = self.now_ns + factors * works_ns - count  # each is rounded to a tick
                works_ns, count = 0, 0
                self._carry_out(instruction)
        self.now_ns = self.now_ns + factors * works_ns - count

    def _carry_out(self, instruction: Communicate | Await) -> None:
        if isinstance(instruction, Await):
            if instruction.number in self._done_ns:  # else one that was launched before the meeting
                self.now_ns = np.maximum(self.now_ns, self._done_ns[instruction.number])
            return
        known = cost_of(self._cost, instruction.group)
        transfer = known.transfer(instruction.operation, instruction.size_bytes)
        if self._free_ns is None:
            met_ns = duration_ns(transfer) if isinstance(transfer, WholeTransfer) else 0
            self._free_ns = np.full(self.now_ns.shape, float(met_ns))
        else:
            begun_ns = self._free_ns
            if instruction.waits_for is None and instruction.follows is None:
                begun_ns = np.maximum(begun_ns, self.now_ns + instruction.before_ns)
            self._free_ns = _least_ends_ns(transfer, begun_ns)
        self._done_ns[instruction.number] = self._free_ns + instruction.after_ns


def _least_ends_ns(transfer: Transfer, joined_ns: Ticks) -> Ticks:
    """When ranks end a collective at least, which they join no earlier, [steps, ranks]."""
    if joined_ns.shape[1] == 1:
        return joined_ns + duration_ns(transfer)
    if isinstance(transfer, ScheduledTransfer):  # some are followed message by message
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
    launched_ns = sum(i.host_ns for i in step if isinstance(i, Compute | Communicate))
    slowest = 1.0 if request.slowdowns is None else float(request.slowdowns.max())
    transfers = [
        cost_of(request.cost, i.group).transfer(i.operation, i.size_bytes)
        for i in step
        if isinstance(i, Communicate)
    ]
    slowed = max((float(each.interference.compute) for each in transfers), default=1.0)
    own_ns = sum(i.before_ns + i.after_ns for i in step if isinstance(i, Communicate))
    works_ns = slowest * slowed * sum(i.device_ns for i in step if isinstance(i, Compute))
    sent_ns = sum(longest_ns(transfer, request.traffic) for transfer in transfers)
    behind_ns = works_ns + own_ns + sent_ns
    if behind_ns > launched_ns:
        return 0.0
    return launched_ns - 2 * behind_ns / request.program.iterations
