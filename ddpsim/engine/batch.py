"""Many jobs at once: those that differ in numbers alone are lanes of one simulation."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ddpsim.cluster.process_groups import GroupedCost
from ddpsim.engine.fast.host import Host
from ddpsim.engine.request import Request
from ddpsim.engine.run import Settled, host_of, run_settled, settled
from ddpsim.result.summary import SteadyStep, lengths_ns

if TYPE_CHECKING:
    from ddpsim.engine.fast.lanes import Lanes

__all__ = ["mean_steps_s", "run_many"]

_LANES = 2**17  # at once: some hundred bytes each
_SENT = 16  # collectives of which each takes as much again
_FEW_LANES = 24  # instruction by instruction they take less than as arrays
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
    jobs = _all_settled(requests, advance)
    found: dict[int, SteadyStep] = {}
    for places, lanes in _together([job.request for job in jobs], counts=counts):
        found |= {place: lanes.steady_step(i) for i, place in enumerate(places)}
        advance((1 - _SETTLED) * len(places))
    for i, job in enumerate(jobs):
        if i not in found:
            found[i] = _alone(job, counts=counts)
            advance(1 - _SETTLED)
    return [found[i] for i in range(len(jobs))]


def _all_settled(requests: Sequence[Request], advance: Callable[[float], None]) -> list[Settled]:
    """Each as `settled` gives it, which is asked once of those that differ in draws alone."""
    keys: list[Hashable] = []
    calm: dict[Hashable, Request] = {}
    for asked in requests:
        usual = asked.without_variation() if asked.varies else asked
        lasting = None if usual.slowdowns is None else usual.slowdowns[:, 0].tobytes()
        keys.append((id(asked.program), id(asked.cost), asked.world_size, asked.traffic, lasting))
        if asked.varies and usual.plan.needs_no_events and not asked.traffic.loader_share:
            calm.setdefault(keys[-1], usual)
    warmups: dict[Hashable, int] = {}
    for places, lanes in _together(list(calm.values()), counts=False):
        warmups |= {list(calm)[p]: lanes.past[i].warmup for i, p in enumerate(places)}
    jobs = []
    for key, asked in zip(keys, requests, strict=True):
        if key not in warmups:
            warmups[key] = settled(asked).request.program.warmup
        jobs.append(Settled(asked.longer(warmups[key])))
        advance(_SETTLED)
    return jobs


def _alone(job: Settled, *, counts: bool) -> SteadyStep:
    """By a simulation of its own."""
    timeline = run_settled(job, tells=counts).timeline
    return SteadyStep.of(timeline) if counts else SteadyStep(lengths_ns(timeline), 0, 0)


def _together(
    requests: Sequence[Request], *, counts: bool
) -> Iterator[tuple[Sequence[int], Lanes]]:
    """Those that can be simulated together, by their places, when they are.

    None of those where the clock would get too long.
    """
    for ranks, group in _groups(requests):
        sent = sum(len(each.sent) for each in group[0][1].program.kinds) if counts else 0
        many = max(1, _LANES // (1 + sent // _SENT) // ranks)
        for i in range(0, len(group), many):
            some = group[i : i + many]
            lanes = _lanes(ranks, some, counts=counts)
            with suppress(OverflowError):
                lanes.train()
                yield [place for place, *_ in some], lanes


_Group = Sequence[tuple[int, Host, Request]]  # by their places


def _groups(requests: Sequence[Request]) -> Iterator[tuple[int, _Group]]:
    """Ranks to simulate, and the jobs whose steps differ in numbers alone."""
    hosts: dict[Hashable, tuple[Host, Hashable]] = {}  # by a program, which many may share
    groups: dict[tuple[int, Hashable], list[tuple[int, Host, Request]]] = defaultdict(list)
    for place, asked in enumerate(requests):
        plan, program = asked.plan, asked.program
        if not plan.needs_no_events:
            continue
        shared = id(program), asked.varies
        if shared not in hosts:
            host = host_of(asked)
            hosts[shared] = host, _structure(host)
        host, structure = hosts[shared]
        mesh = asked.cost.mesh if isinstance(asked.cost, GroupedCost) else None
        groups[plan.period, (asked.varies, structure, mesh)].append((place, host, asked))
    for (ranks, _), group in groups.items():
        if ranks > 1 or len(group) >= _FEW_LANES:
            yield ranks, group


def _structure(host: Host) -> Hashable:
    """What trials of one simulation must have in common: the loop without its numbers."""
    program = host.program
    kinds = tuple(program.kind(number) for number in range(host.steps))
    return (
        *(program.warmup, program.iterations, program.loader and program.loader.capacity, kinds),
        tuple(each.shape for each in program.kinds),
    )


def _lanes(ranks: int, group: _Group, *, counts: bool) -> Lanes:
    from ddpsim.engine.fast.lanes import Lanes  # noqa: PLC0415 -- numpy is slow to import
    from ddpsim.engine.fast.trials import Trial  # noqa: PLC0415 -- numpy is slow to import

    trials = [
        Trial(host, each.cost, each.slowdowns, each.stalls, each.sums, each.traffic)
        for _, host, each in group
    ]
    return Lanes(trials, ranks, counts=counts, remembers=())
