"""Simulate a program on ranks: the plain model, or a shortcut that gives the same ticks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ddpsim.cluster.collectives import (
    NO_TRAFFIC,
    CollectiveCost,
    RingTransfer,
    ScheduledTransfer,
    Traffic,
    Transfer,
    duration_ns,
)
from ddpsim.engine.host import Host
from ddpsim.engine.lane import Lane, Met
from ddpsim.engine.loop import Communicate
from ddpsim.engine.noise import Slowdowns, Stalls
from ddpsim.engine.program import Program
from ddpsim.result.timeline import Timeline

if TYPE_CHECKING:
    from ddpsim.engine.steps import MessageObserver

__all__ = ["EngineMode", "Simulated", "run"]

EngineMode = Literal["auto", "reference"]


@dataclass(frozen=True)
class Simulated:
    """A timeline, and which ways of computing it were used."""

    timeline: Timeline
    ranks_simulated: int
    paths: tuple[str, ...]


def run(
    program: Program,
    cost: CollectiveCost,
    world_size: int,
    slowdowns: Slowdowns | None = None,
    mode: EngineMode = "auto",
    traffic: Traffic = NO_TRAFFIC,
    stalls: Stalls | None = None,
    observed: Sequence[int] | None = None,
    observe_message: MessageObserver | None = None,
) -> Simulated:
    """Simulate a training loop on `world_size` ranks.

    Without slowdowns and stalls some ranks stand for all (see `_representatives`). Where hosts run
    ahead of their devices and one collective is in flight at a time, ranks need no events (see
    `ddpsim.engine.lanes`). `mode` "reference" is the plain model of every rank and every message.
    `traffic`: what else the nodes' network carries. `observed`: the ranks whose lanes are wanted;
    None: the slowest one's, and all that come by themselves. `observe_message` hears of every
    message of the plain model.
    """
    transfers = [cost.transfer("all_reduce", size) for size in program.all_reduce_bytes]
    transfers += [cost.transfer("broadcast", b.size_bytes) for b in program.buffers]
    slowed = any(transfer.interference.slows_transfer for transfer in transfers)
    whole = program.comm_workers > 1 or slowed or traffic != NO_TRAFFIC
    folded = mode == "auto" and slowdowns is None and stalls is None
    participants = (1 if whole else _representatives(transfers)) if folded else world_size
    fold = f"folded {world_size} into {participants}" if participants < world_size else "every rank"
    if mode == "auto" and not whole and _needs_no_events(program, transfers):
        found = _without_events(program, cost, participants, slowdowns, stalls, observed)
        if found:
            timeline, paths = found
            return Simulated(timeline, participants, (fold, *sorted(paths)))
    from ddpsim.engine.plain import simulate  # noqa: PLC0415 -- SimPy is slow to import

    timeline, paths = simulate(
        program, cost, transfers, participants, slowdowns, traffic, stalls, observe_message
    )
    return Simulated(timeline, participants, (fold, *sorted(paths)))


def _needs_no_events(program: Program, transfers: Sequence[Transfer]) -> bool:
    """Hosts that run ahead, one collective at a time, and slowdowns in thousandths."""
    thousandths = (1000 * transfer.interference.compute for transfer in transfers)
    return (
        not program.blocking
        and program.comm_workers == 1
        and program.comm_spins
        and all(factor.denominator == 1 for factor in thousandths)
    )


def _without_events(
    program: Program,
    cost: CollectiveCost,
    participants: int,
    slowdowns: Slowdowns | None,
    stalls: Stalls | None,
    observed: Sequence[int] | None,
) -> tuple[Timeline, set[str]] | None:
    """None where the clock would get too long to be exact so."""
    host = Host(program)
    if participants == 1 and slowdowns is None and stalls is None:
        return _alone(host, cost)
    from ddpsim.engine.lanes import Lanes, Trial  # noqa: PLC0415 -- numpy is slow to import

    lanes = Lanes([Trial(host, cost, slowdowns, stalls)], participants)
    try:
        lanes.train()
    except OverflowError:
        return None
    return lanes.timeline(0, observed), {"lanes", *lanes.paths}


def _alone(host: Host, cost: CollectiveCost) -> tuple[Timeline, set[str]]:
    """A rank that stands for all never waits for a peer."""
    paths = {"lane"}

    def meet(launched: Communicate, joined_ns: int) -> Met:
        transfer = cost.transfer(launched.operation, launched.size_bytes)
        name = "ring" if isinstance(transfer, RingTransfer) else ""
        name = transfer.algorithm if isinstance(transfer, ScheduledTransfer) else name
        paths.add(f"{name}:closed-form" if name else "whole")
        return Met(joined_ns, joined_ns + duration_ns(transfer), transfer.interference.compute)

    lane = Lane(host, meet)
    repeats = lane.train()
    return Timeline({0: lane.timeline}, host.program.warmup, 0, (0,), repeats), paths


def _representatives(transfers: Sequence[Transfer]) -> int:
    """How many neighbouring ranks stand for all that differ at most by their link.

    Where all ranks leave every transfer together, they are alike and one does.

    A rank behind a link that is the slowest for every size sent never waits for a peer: it joins
    every collective last or together with the last (by induction, as nobody leaves one later), so
    it alone gives the slowest rank's times. Where no link is, one period of the ring (a node) does;
    so too beside other algorithms, whose messages may pass between the ranks that do not wait.
    """
    rings = [transfer.step_ns for transfer in transfers if isinstance(transfer, RingTransfer)]
    steps_of_rank = list(zip(*rings, strict=True))
    if len(set(steps_of_rank)) <= 1:
        return 1
    others = any(isinstance(transfer, ScheduledTransfer) for transfer in transfers)
    if not others and tuple(map(max, rings)) in steps_of_rank:
        return 1
    ranks = len(steps_of_rank)
    divisors = (period for period in range(1, ranks + 1) if ranks % period == 0)
    return next(p for p in divisors if steps_of_rank[:p] * (ranks // p) == steps_of_rank)
