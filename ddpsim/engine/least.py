"""The least that a mean steady step can take, told without simulating it."""

from __future__ import annotations

from collections.abc import Sequence

from ddpsim.cluster.network import NO_TRAFFIC
from ddpsim.cluster.process_groups import cost_of
from ddpsim.cluster.transfers import duration_ns
from ddpsim.engine.request import Request
from ddpsim.strategies.instructions import Communicate, Compute, Instruction
from ddpsim.units import NS_PER_S

__all__ = ["least_step_s"]


def least_step_s(request: Request) -> float:
    """Seconds that no rank's mean steady step is shorter than.

    0 where hosts compute themselves, or steps are of several kinds.
    """
    program = request.program
    if program.blocking or not program.is_uniform or not request.plan.needs_no_events:
        return 0.0
    step = program.step(program.warmup)
    return max(0.0, _of_device_ns(request, step), _of_host_ns(request, step)) / NS_PER_S


def _of_device_ns(request: Request, step: Sequence[Instruction]) -> float:
    """All works of a step, between the ends of two, on the rank whose steps have the least."""
    works_ns = [i.device_ns for i in step if isinstance(i, Compute)]
    drawn = request.slowdowns
    least = 1.0
    if drawn is not None:
        least = float(drawn[:, request.program.warmup :].mean(axis=1).min())
    return least * (sum(works_ns) - len(works_ns))  # each is rounded to a tick


def _of_host_ns(request: Request, step: Sequence[Instruction]) -> float:
    """All launches of a step, where all that they launch takes no longer, one after the other.

    Then a device is never further behind its host than that; twice it, for steps of the warm-up.
    """
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
    behind_ns = works_ns + own_ns + sum(map(duration_ns, transfers))
    if behind_ns > launched_ns or request.traffic != NO_TRAFFIC or request.stalls is not None:
        return 0.0
    return launched_ns - 2 * behind_ns / request.program.iterations
