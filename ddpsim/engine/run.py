"""Wire ranks and network, run until every rank is done, and say so if one never is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from simpy import Environment

from ddpsim.cluster.collectives import (
    NO_TRAFFIC,
    CollectiveCost,
    RingTransfer,
    ScheduledTransfer,
    Traffic,
    Transfer,
)
from ddpsim.engine.network import Network
from ddpsim.engine.noise import Slowdowns, Stalls
from ddpsim.engine.program import Program
from ddpsim.engine.rank import Rank
from ddpsim.errors import SimulationError
from ddpsim.result.timeline import RankTimeline, Timeline

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
) -> Simulated:
    """Simulate a training loop on `world_size` ranks.

    Without slowdowns and stalls some ranks stand for all (see `_representatives`); `mode`
    "reference" folds nothing and runs algorithms step by step. `traffic`: what else the nodes'
    network carries.
    """
    env = Environment()
    folded = mode == "auto" and slowdowns is None and stalls is None
    transfers = [cost.transfer("all_reduce", size) for size in program.all_reduce_bytes]
    shared = program.comm_workers > 1
    slowed = any(transfer.interference.slows_transfer for transfer in transfers)
    whole = shared or slowed or traffic != NO_TRAFFIC
    representatives = 1 if whole else _representatives(transfers)
    participants = representatives if folded else world_size
    network = Network(
        env,
        cost,
        participants,
        shared=shared,
        slows_compute=any(transfer.interference.compute != 1 for transfer in transfers),
        stepwise=mode == "reference",
        traffic=traffic,
    )
    ranks = [
        Rank(
            env,
            i,
            program,
            network,
            slowdowns[i] if slowdowns else None,
            RankTimeline(),
            stalls[i] if stalls else None,
        )
        for i in range(participants)
    ]
    _run_to_the_end(env, ranks, network)
    timeline = Timeline([rank.timeline for rank in ranks], program.warmup)
    folds = participants < world_size
    folding = f"folded {world_size} into {participants}" if folds else "every rank"
    return Simulated(timeline, participants, (folding, *sorted(network.paths)))


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


def _run_to_the_end(env: Environment, ranks: Sequence[Rank], network: Network) -> None:
    processes = [env.process(rank.train()) for rank in ranks]
    try:
        env.run(until=env.all_of(processes))
    except RuntimeError as error:
        if any(process.is_alive for process in processes) and "No scheduled events" in str(error):
            raise SimulationError(_deadlock(ranks, processes, network)) from None
        raise


def _deadlock(ranks: Sequence[Rank], processes: Sequence[object], network: Network) -> str:
    stuck = [r for r, p in zip(ranks, processes, strict=True) if getattr(p, "is_alive", False)]
    lines = ["the simulated job hangs:"]
    lines += [f"  rank {rank.rank} waits for {rank.waiting_for}" for rank in stuck[:8]]
    lines += [f"  collective {line}" for line in network.missing()[:8]]
    return "\n".join(lines)
