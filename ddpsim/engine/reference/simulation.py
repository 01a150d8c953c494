"""The plain model: wire ranks and network, run until every rank is done, say so if one never is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from simpy import Environment

from ddpsim.engine.reference.messages import MessageObserver
from ddpsim.engine.reference.network import Network
from ddpsim.engine.reference.rank import Rank
from ddpsim.engine.request import Request
from ddpsim.errors import SimulationError
from ddpsim.result.metrics import steps_of
from ddpsim.result.timeline import RankTimeline, Timeline

if TYPE_CHECKING:
    from numpy.typing import NDArray


def simulate(
    request: Request, participants: int, observe_message: MessageObserver | None
) -> tuple[Timeline, set[str]]:
    """Every participant's lanes, and how collectives were run.

    Raises SimulationError if a rank never comes to its end.
    """
    env, program, cost = Environment(), request.program, request.cost
    transfers = program.transfers(cost)
    network = Network(
        env,
        cost,
        participants,
        shared=program.comm_workers > 1,
        slows_compute=any(transfer.interference.slows_compute for transfer in transfers),
        traffic=request.traffic,
        observe=observe_message,
    )

    def of_rank(drawn: NDArray[Any] | None, rank: int) -> list[Any] | None:
        return None if drawn is None else drawn[rank].tolist()

    ranks = [
        Rank(
            env,
            i,
            program,
            network,
            of_rank(request.slowdowns, i),
            RankTimeline(),
            of_rank(request.stalls, i),
            of_rank(request.kept_deviations, i),
        )
        for i in range(participants)
    ]
    run_to_the_end(env, ranks, network)
    return _timeline([rank.timeline for rank in ranks], program.warmup), network.paths


def _timeline(ranks: Sequence[RankTimeline], warmup: int) -> Timeline:
    """The ranks' timeline with the slowest: of equals the one whose collectives took longest."""
    keys = [(rank.step_ends_ns[-1], rank.comm_ns()) for rank in ranks]
    late = (
        [sum(s.late_peers_ns() for s in steps_of(rank)[warmup:]) for rank in ranks]
        if len(ranks) > 1
        else [0]
    )
    return Timeline(dict(enumerate(ranks)), warmup, keys.index(max(keys)), late)


def run_to_the_end(env: Environment, ranks: Sequence[Rank], network: Network) -> None:
    """Until every rank has trained; raises SimulationError if one never ends."""
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
