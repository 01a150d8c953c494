"""Simulate a program on ranks: the plain model, or a shortcut that gives the same ticks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING, Literal

from ddpsim.cluster.network import NO_TRAFFIC
from ddpsim.cluster.process_groups import cost_of
from ddpsim.cluster.transfers import duration_ns
from ddpsim.engine.fast.flows import Flows, whole
from ddpsim.engine.fast.host import Host, Trial
from ddpsim.engine.fast.lane import Lane, Meet, Met, closed_form
from ddpsim.engine.program import Loader
from ddpsim.engine.request import Request
from ddpsim.result.timeline import Timeline
from ddpsim.strategies.instructions import Communicate

if TYPE_CHECKING:
    from ddpsim.engine.fast.lanes import Lanes
    from ddpsim.engine.reference.messages import MessageObserver

EngineMode = Literal["auto", "reference"]

MOST_MORE = 100  # steps of warm-up: by then, steps that still differ do so by little


@dataclass(frozen=True)
class Simulated:
    """A timeline, and which ways of computing it were used."""

    timeline: Timeline
    ranks_simulated: int
    paths: tuple[str, ...]


def run(
    request: Request,
    mode: EngineMode = "auto",
    observed: Sequence[int] | None = None,
    observe_message: MessageObserver | None = None,
) -> Simulated:
    """Simulate a training loop.

    `mode` "reference" is the plain model, an event for every message of every rank; "auto" takes
    shortcuts that give the same ticks: some ranks stand for all, and none need events
    (`ddpsim.engine.request`, `ddpsim.engine.fast`). `observed`: the ranks whose lanes are wanted;
    None: the slowest one's, and those that come by themselves. `observe_message` hears of every
    message of the plain model.
    Raises SimulationError if a rank never ends.
    """
    return run_settled(settled(request, mode), mode, observed, observe_message)


def run_settled(
    request: Request,
    mode: EngineMode = "auto",
    observed: Sequence[int] | None = None,
    observe_message: MessageObserver | None = None,
    *,
    tells: bool = True,
) -> Simulated:
    """See `run`, of a job as `settled` makes it.

    Without `tells` a lane may lack all but when steps begin and end.
    """
    result, participants, repeats = None, request.world_size, 0
    simulated = request
    if mode == "auto":
        plan = request.plan
        participants = plan.period
        if plan.needs_no_events or plan.on_hosts:
            result = _without_events(request, participants, observed, tells=tells)
            if result is None:  # what stands for all without events may not do so with them
                participants = request.world_size
        elif plan.repeats:  # one steady step, and the others are like it
            repeats = request.program.iterations - 1
            simulated = replace(request, program=replace(request.program, iterations=1))
    if result is None:
        from ddpsim.engine.reference.simulation import simulate  # noqa: PLC0415 -- SimPy is slow to import

        timeline, paths = simulate(simulated, participants, observe_message)
        result = replace(timeline, repeats=repeats), paths
    timeline, paths = result
    folds = participants < request.world_size
    folding = f"folded {request.world_size} into {participants}" if folds else "every rank"
    return Simulated(timeline, participants, (folding, *sorted(paths)))


def settled(request: Request, mode: EngineMode = "auto") -> Request:
    """The job with so long a warm-up that its steady steps are alike, but for noise.

    The host's head start and the batches that were made before are used up only after some steps
    where the host, or the loader, turns out to be the slower one. Where no events are needed and no
    step is unlike another the simulation itself tells when.
    """
    program = request.program
    if mode == "auto" and request.plan.needs_no_events and not request.varies:
        return request
    if request.traffic.loader_share and program.loader:  # no shortcut tells
        return request.longer(program.warmup + program.loader.capacity)
    calm = request.without_variation()
    if calm.plan.needs_no_events:
        warmup = _settles_after(calm)
        return request if warmup is None else request.longer(warmup)
    if program.blocking and program.loader:
        return request.longer(program.warmup + _steps_ahead(calm, program.loader))
    return request


def _steps_ahead(calm: Request, loader: Loader) -> int:
    """In how many steps a slower loader's batches that were made in the warm-up are used up.

    Its steps are longer, as gradients are not in their last buckets yet.
    """
    program = replace(calm.program, loader=None, iterations=1)
    ends_ns = run_settled(replace(calm, program=program)).timeline.slowest.step_ends_ns
    *warmup_ns, usual_ns = (end - start for start, end in pairwise([0, *ends_ns]))
    batches_ns = loader.batch_ns * program.micro_batches
    behind_ns = batches_ns - usual_ns
    if behind_ns <= 0:
        return 0
    most_ns = loader.capacity * loader.batch_ns
    ahead_ns = 0 if program.micro_batches == 1 else most_ns  # more than one may wait within a step
    started_ns = ahead_ns
    for length_ns in warmup_ns:
        started_ns, ahead_ns = ahead_ns, min(most_ns, max(0, ahead_ns + length_ns - batches_ns))
    if not (started_ns or ahead_ns):
        return 0
    more = ceil(ahead_ns / behind_ns) + 1  # after one that waits for a part of its batch alone
    return min(max(0, MOST_MORE - program.warmup), more)


def _without_events(
    request: Request, participants: int, observed: Sequence[int] | None, *, tells: bool
) -> tuple[Timeline, set[str]] | None:
    """None where the clock would get too long to be exact so."""
    if participants == 1 and request.is_calm:
        return _alone(request, tells=tells)
    lanes = _trained(request, participants)
    name = "hosts" if request.plan.on_hosts else "lanes"
    return None if lanes is None else (lanes.timeline(0, observed), {name, *lanes.paths})


def _settles_after(request: Request) -> int | None:
    """Steps of warm-up, as `_without_events` finds them, without the lane of any rank."""
    participants = request.plan.period
    if participants == 1 and request.is_calm:
        return _alone(request, tells=False)[0].warmup
    lanes = _trained(request, participants, remembers=())
    return None if lanes is None else lanes.past[0].warmup


def _trained(
    request: Request, participants: int, remembers: Sequence[int] | None = None
) -> Lanes | None:
    """All ranks at once; None as for `_without_events`."""
    from ddpsim.engine.fast.lanes import Lanes  # noqa: PLC0415 -- numpy is slow to import

    on_threads = request.plan.on_hosts
    host = Host(request.program) if on_threads else host_of(request)
    lanes = Lanes([Trial(host, request)], participants, remembers=remembers, on_threads=on_threads)
    try:
        lanes.train()
    except OverflowError:
        return None
    return lanes


def host_of(request: Request) -> Host:
    """Its iterations, with as many of warm-up as it may take where nothing varies."""
    return Host(request.program, 0 if request.varies else MOST_MORE)


def _alone(request: Request, *, tells: bool) -> tuple[Timeline, set[str]]:
    """A rank that stands for all."""
    host, paths = host_of(request), {"lane"}
    lane = Lane(host, _meet_alone(request, paths), tells=tells)
    warmup, repeats = lane.train(host.steps if request.varies else None)
    return Timeline({0: lane.timeline}, warmup, 0, [0], repeats), paths


def step_begun_ns(request: Request, host: Host, begin_ns: int) -> int:
    """Length of the first step, of a rank that stands for all and begins it then."""
    lane = Lane(host, _meet_alone(request, set()), tells=False)
    lane.begin_late(begin_ns)
    lane.train(1)
    return lane.timeline.step_ends_ns[0] - begin_ns


def _meet_alone(request: Request, paths: set[str]) -> Meet:
    """A rank that stands for all never waits for a peer; `paths`: how collectives are found."""
    traffic = request.traffic
    network = Flows(traffic)
    alone: dict[tuple[str, str, int], tuple[int, Fraction]] = {}  # what nothing else slows down

    def meet(launched: Communicate, joined_ns: int) -> Met:
        collective = launched.group, launched.operation, launched.size_bytes
        if collective in alone:
            taken_ns, slowdown = alone[collective]
            return Met(joined_ns, joined_ns + taken_ns, slowdown)
        cost = cost_of(request.cost, launched.group)
        transfer = cost.transfer(launched.operation, launched.size_bytes)
        slowdown = transfer.interference.compute
        if traffic == NO_TRAFFIC or launched.group != "world":
            paths.add(closed_form(transfer))
            alone[collective] = duration_ns(transfer), slowdown
            return meet(launched, joined_ns)
        flow, path = whole(transfer, traffic)
        paths.update(("whole", path))
        return Met(joined_ns, network.end_alone_ns(joined_ns, flow), slowdown)

    return meet
