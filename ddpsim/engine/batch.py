"""Many jobs at once: those that differ in numbers alone are lanes of one simulation."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence

from ddpsim.cluster.process_groups import GroupedCost
from ddpsim.engine.fast.host import Host
from ddpsim.engine.request import Request
from ddpsim.engine.run import MOST_MORE, Settled, run_settled, settled
from ddpsim.result.summary import SteadyStep, lengths_ns

__all__ = ["mean_steps_s", "run_many"]

_LANES = 2**17  # at once: some hundred bytes each
_SENT = 16  # collectives of which each takes as much again
_FEW_LANES = 8  # instruction by instruction they take less than as arrays
_SETTLED = 0.4  # of the simulation of a job, about


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


def mean_steps_s(requests: Sequence[Request]) -> list[float]:
    """Seconds of each one's mean steady step, as `run` gives them."""
    return [step.mean_s for step in _run_different(requests, lambda _: None, counts=False)]


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
    requests: Sequence[Request], advance: Callable[[float], None], *, counts: bool = True
) -> list[SteadyStep]:
    found: dict[int, SteadyStep] = {}
    jobs = []
    for job in _all_settled(requests):
        jobs.append(job)
        advance(_SETTLED)
    for ranks, group in _groups(jobs):
        sent = sum(len(each.sent) for each in group[0][1].program.kinds) if counts else 0
        many = max(1, _LANES // (1 + sent // _SENT) // ranks)
        for i in range(0, len(group), many):
            ended = _together(ranks, group[i : i + many], counts=counts)
            found |= ended
            advance((1 - _SETTLED) * len(ended))
    for i, job in enumerate(jobs):
        if i not in found:
            found[i] = _alone(job, counts=counts)
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


def _alone(job: Settled, *, counts: bool) -> SteadyStep:
    """By a simulation of its own."""
    timeline = run_settled(job, tells=counts).timeline
    return SteadyStep.of(timeline) if counts else SteadyStep(lengths_ns(timeline), 0, 0)


_Group = Sequence[tuple[int, Host, Request]]  # by their places


def _groups(jobs: Sequence[Settled]) -> Iterator[tuple[int, _Group]]:
    """Ranks to simulate, and the jobs that can be simulated together."""
    hosts: dict[tuple[int, int], tuple[Host, Hashable]] = {}  # by a program, which many may share
    groups: dict[tuple[int, Hashable], list[tuple[int, Host, Request]]] = defaultdict(list)
    for place, asked in enumerate(job.request for job in jobs):
        plan, program = asked.plan, asked.program
        if not plan.needs_no_events:
            continue
        more = 0 if asked.varies else MOST_MORE
        if (id(program), more) not in hosts:
            host = Host(program, more)
            hosts[id(program), more] = host, _structure(host)
        host, structure = hosts[id(program), more]
        mesh = asked.cost.mesh if isinstance(asked.cost, GroupedCost) else None
        groups[plan.period, (asked.varies, structure, mesh)].append((place, host, asked))
    for (ranks, _), group in groups.items():
        if ranks * len(group) >= _FEW_LANES:
            yield ranks, group


def _structure(host: Host) -> Hashable:
    """What trials of one simulation must have in common: the loop without its numbers."""
    program = host.program
    kinds = tuple(program.kind(number) for number in range(host.steps))
    return (
        program.warmup,
        program.iterations,
        kinds,
        tuple(each.shape for each in program.kinds),
    )


def _together(ranks: int, group: _Group, *, counts: bool) -> dict[int, SteadyStep]:
    """Nothing where the clock would get too long."""
    from ddpsim.engine.fast.trials import Trial  # noqa: PLC0415 -- numpy is slow to import
    from ddpsim.engine.fast.vectorised import Lanes  # noqa: PLC0415 -- numpy is slow to import

    trials = [
        Trial(host, each.cost, each.slowdowns, each.stalls, each.sums, each.traffic)
        for _, host, each in group
    ]
    lanes = Lanes(trials, ranks, counts=counts, remembers=())
    try:
        lanes.train()
    except OverflowError:
        return {}
    return {place: lanes.steady_step(i) for i, (place, *_) in enumerate(group)}
