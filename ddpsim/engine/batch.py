"""Many jobs at once: those that differ in numbers alone are lanes of one simulation."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence

from ddpsim.engine.fast.host import Host
from ddpsim.engine.fast.trials import Trial
from ddpsim.engine.fast.vectorised import Lanes
from ddpsim.engine.request import Request
from ddpsim.engine.run import Settled, run_settled, settled
from ddpsim.result.summary import SteadyStep
from ddpsim.strategies.instructions import Compute

__all__ = ["run_many"]

_LANES = 2**17  # at once: some hundred bytes each
_SETTLED = 0.4  # of the simulation of a job, about
_MORE = 8  # steps of warm-up for those that settle later than others


def run_many(
    requests: Sequence[Request], advance: Callable[[float], None] = lambda _: None
) -> list[SteadyStep]:
    """The steady steps of each, as `run` gives them; of equal ones one is simulated.

    `advance` hears how many more have ended, or parts of one.
    """
    keys = _keys(requests)
    different = list(dict(zip(reversed(keys), reversed(requests), strict=True)).items())
    advance(len(requests) - len(different))
    steps = _run_different([request for _, request in different], advance)
    found = dict(zip((key for key, _ in different), steps, strict=True))
    return [found[key] for key in keys]


def _keys(requests: Sequence[Request]) -> list[Hashable]:
    """Equal for jobs that do the same: some bucket caps give the same buckets."""
    sent = [_sent(request) for request in requests]
    times = Counter(sent)
    return [
        (own, _instructions(request) if times[own] > 1 else None)
        for own, request in zip(sent, requests, strict=True)
    ]


def _sent(asked: Request) -> Hashable:
    """All of a job but its instructions, which take longer to compare."""
    program, drawn = asked.program, (asked.slowdowns, asked.stalls, asked.kept_deviations)
    return (
        *(program.warmup, program.iterations, program.loader, program.blocking),
        *(program.comm_workers, program.comm_spins, asked.world_size, asked.traffic),
        *(None if each is None else each.tobytes() for each in drawn),
        tuple(program.transfers(asked.cost)),
    )


def _instructions(asked: Request) -> Hashable:
    """Those of each kind of step, and which step is of which kind."""
    program = asked.program
    numbers = range(program.warmup + program.iterations + program.strategy.period)
    kinds = tuple(program.kind(number) for number in numbers)
    return kinds, tuple(program.strategy.steps[kind] for kind in sorted({*kinds}))


def _run_different(
    requests: Sequence[Request], advance: Callable[[float], None]
) -> list[SteadyStep]:
    found: dict[int, SteadyStep] = {}
    jobs = []
    for job in _all_settled(requests):
        jobs.append(job)
        advance(_SETTLED)
    for ranks, group in _groups(jobs):
        many = max(1, _LANES // ranks)
        for i in range(0, len(group), many):
            ended = _together(ranks, group[i : i + many])
            found |= ended
            advance((1 - _SETTLED) * len(ended))
    for i, job in enumerate(jobs):
        if i not in found:
            found[i] = _alone(job)
            advance(1 - _SETTLED)
    return [found[i] for i in range(len(jobs))]


def _all_settled(requests: Sequence[Request]) -> Iterator[Settled]:
    """Each as `settled` gives it, which is asked once of those that differ in draws alone."""
    warmups: dict[Hashable, int] = {}
    for asked in requests:
        if not asked.varies:
            yield settled(asked)
            continue
        lasting = asked.without_variation().slowdowns
        ranks = None if lasting is None else lasting[:, 0].tobytes()
        same = id(asked.program), id(asked.cost), asked.world_size, asked.traffic, ranks
        if same not in warmups:
            warmups[same] = settled(asked).request.program.warmup
        yield Settled(asked.longer(warmups[same]))


def _alone(job: Settled) -> SteadyStep:
    """By a simulation of its own."""
    return SteadyStep.of(run_settled(job).timeline)


def _groups(jobs: Sequence[Settled]) -> Iterator[tuple[int, list[tuple[int, Trial]]]]:
    """Ranks to simulate, and the jobs by their place that can be simulated together."""
    hosts: dict[tuple[int, int], tuple[Host, Hashable]] = {}  # by a program, which many may share
    groups: dict[tuple[int, bool, Hashable], list[tuple[int, Trial]]] = defaultdict(list)
    for place, asked in enumerate(job.request for job in jobs):
        plan, program = asked.plan, asked.program
        if not plan.needs_no_events or program.is_grouped:
            continue
        more = 0 if asked.varies else _MORE
        if (id(program), more) not in hosts:
            host = Host(program, more)
            hosts[id(program), more] = host, _structure(host)
        host, structure = hosts[id(program), more]
        drawn = asked.slowdowns, asked.stalls
        trial = Trial(host, asked.cost, *drawn, traffic=asked.traffic)
        groups[plan.period, asked.varies, structure].append((place, trial))
    for (ranks, *_), group in groups.items():
        yield ranks, group


def _structure(host: Host) -> Hashable:
    """What trials of one simulation must have in common: the loop without its numbers."""
    program = host.program
    kinds = tuple(program.kind(number) for number in range(host.steps))
    loops = tuple(
        tuple(
            type(i)
            if isinstance(i, Compute)
            else (type(i), getattr(i, "number", None), getattr(i, "waits_for", None))
            for _, i in script.instructions
        )
        for script in host.scripts
    )
    return program.warmup, program.iterations, kinds, loops


def _together(ranks: int, group: Sequence[tuple[int, Trial]]) -> dict[int, SteadyStep]:
    """Nothing of those that take longer to settle, or where the clock would get too long."""
    lanes = Lanes([trial for _, trial in group], ranks, remembers=())
    try:
        lanes.train()
    except OverflowError:
        return {}
    return {
        place: lanes.steady_step(i)
        for i, (place, _) in enumerate(group)
        if lanes.varies or lanes.settled[i]
    }
