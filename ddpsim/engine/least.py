"""The least that a mean steady step can take, told without simulating it.

- A device does all of its works in a step.
- All ranks meet in a collective, and the last of them sets when the next works begin. So from one
  meeting to the next a step takes as long as on the rank whose works are the longest in it.
- A host launches all of a step, however early its device could begin it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ddpsim.cluster.algorithms.dispatch import has_recurrence
from ddpsim.cluster.algorithms.max_plus import Ticks
from ddpsim.cluster.process_groups import cost_of
from ddpsim.cluster.transfers import ScheduledTransfer, Transfer, WholeTransfer, duration_ns
from ddpsim.engine.compiled import CompiledStep, Stretch
from ddpsim.engine.fast.collectives import collective_ends_ns
from ddpsim.engine.fast.flows import longest_ns
from ddpsim.engine.request import Request
from ddpsim.strategies.instructions import Await, Communicate
from ddpsim.units import NS_PER_S

_Step = Sequence[Stretch]


def least_step_s(request: Request) -> float:
    """Seconds that no rank's mean steady step is shorter than.

    0 where hosts compute themselves, or steps are of several kinds.
    """
    program = request.program
    if program.blocking or not program.is_uniform or not request.plan.needs_no_events:
        return 0.0
    compiled = program.compiled(program.warmup)
    of_device_ns = max(
        _of_device_ns(request, compiled.stretches), _of_meetings_ns(request, compiled.stretches)
    )
    return max(0.0, of_device_ns, _of_host_ns(request, compiled)) / NS_PER_S


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


def _of_meetings_ns(request: Request, step: _Step) -> float:
    """Works to the first meeting, from each to the next, and from the last one to the end.

    Of many steps side by side, each from a meeting at 0 on. 0 where all ranks meet in no
    collective, or some of them in others.
    """
    place = None if request.program.is_grouped else _meeting(request, step)
    if place is None:
        return 0.0
    factors = _factors(request)
    head, tail, begun = step[:place], step[place + 1 :], step[place]
    first_ns = float(factors[0].min()) * sum(each.least_ns for each in (*head, begun))
    now_ns, free_ns = np.full(factors.shape, -np.inf), np.zeros(factors.shape)  # before its await
    done_ns: dict[int, Ticks] = {}

    def go(some: _Step, factors: Ticks) -> Ticks:
        """Works and collectives of ranks for which nothing waits for a host."""
        nonlocal now_ns, free_ns
        for stretch in some:
            now_ns = now_ns + (factors * stretch.works_ns - stretch.number)
            match stretch.then:
                case Communicate() as sent:
                    if sent.waits_for is None and sent.follows is None:
                        free_ns = np.maximum(free_ns, now_ns + sent.before_ns)
                    free_ns = np.floor(_least_ends_ns(_sent(request, sent), free_ns))
                    done_ns[sent.number] = free_ns + sent.after_ns
                case Await(number) if number in done_ns:  # launched since the meeting
                    now_ns = np.maximum(now_ns, done_ns[number])
        return now_ns

    if isinstance(begun.then, Communicate):
        transfer = _sent(request, begun.then)
        if isinstance(transfer, WholeTransfer):
            free_ns = free_ns + duration_ns(transfer)
        done_ns[begun.then.number] = free_ns + begun.then.after_ns
    last_ns = float(go(tail, factors)[-1].max())
    rest = [*head, begun._replace(then=None)]
    between_ns = float(go(rest, np.roll(factors, -1, axis=0))[:-1].max(axis=1).sum())
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


def _of_host_ns(request: Request, step: CompiledStep) -> float:
    """All launches of a step, where all that they launch takes no longer, one after the other.

    Then a device is never further behind its host than that; twice it, for steps of the warm-up.
    """
    if request.stalls is not None:
        return 0.0
    launched_ns = sum(each.host_ns for each in step.works)
    launched_ns += sum(each.host_ns for each in step.sent)
    slowest = 1.0 if request.slowdowns is None else float(request.slowdowns.max())
    transfers = [_sent(request, each) for each in step.sent]
    slowed = max((float(each.interference.compute) for each in transfers), default=1.0)
    behind_ns = slowest * slowed * sum(each.device_ns for each in step.works)
    behind_ns += sum(each.before_ns + each.after_ns for each in step.sent)
    behind_ns += sum(longest_ns(transfer, request.traffic) for transfer in transfers)
    if behind_ns > launched_ns:
        return 0.0
    return launched_ns - 2 * behind_ns / request.program.iterations
