"""Many jobs at once: those that differ in numbers alone are lanes of one simulation."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from ddpsim.cluster.process_groups import GroupedCost
from ddpsim.engine.fast.host import Host, Trial
from ddpsim.engine.request import Request
from ddpsim.engine.run import MOST_MORE, host_of, run_settled, settled, step_begun_ns
from ddpsim.result.summary import SteadyStep, lengths_ns
from ddpsim.units import NS_PER_S

if TYPE_CHECKING:
    from ddpsim.cluster.algorithms.max_plus import Ticks
    from ddpsim.engine.fast.lanes import Lanes

# whether the step at this place is told well enough by its least and its most seconds
Suffices = Callable[[int, float, float], bool]

_LANES = 2**17  # at once: some hundred bytes each
_SENT = 16  # collectives of which each takes as much again
_FEW_LANES = 24  # instruction by instruction they take less than as arrays
_FEW_RANKS = 1024  # of more, variants side by side are no quicker than one after the other
_LATE_NS = 2.0**50  # twelve days, after all that a host launches in a few steps
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
    by_key = dict(zip((key for key, _ in different), steps, strict=True))
    return [by_key[key] for key in keys]


def mean_steps_s(requests: Sequence[Request]) -> list[float]:
    """Seconds of each one's mean steady step: that of a cycle, where steps come again."""
    return [least_s for least_s, _ in step_ranges_s(requests, lambda *_: False)]


def step_ranges_s(requests: Sequence[Request], suffices: Suffices) -> list[tuple[float, float]]:
    """Seconds that hold each one's mean steady step: the least and the most, equal if it is known.

    A step of many ranks is a function of when each of them begins it, x(k+1) = f(x(k)), that is
    never earlier where x is later, and later by d where all of x are: a collective waits for its
    last rank, and works follow each other. So two x are never further apart after it than before,
    and f comes to the same mean length whatever x it begins with. Where no launch comes late, ranks
    begin after all launches, those that differ for good as the last job's on them ended. The
    shortest and the longest of a step's lengths on all ranks hold those of every later step.
    """
    ranges_s: dict[int, tuple[float, float]] = {}
    groups: dict[tuple[Hashable, int, Hashable], dict[int, Request]] = defaultdict(dict)
    for place, request in enumerate(requests):
        if not _may_begin_late(request):
            continue
        is_first = request.sums is not None and request.sums.stood_ns is None
        if is_first or request.plan.period > _FEW_RANKS:
            ranges_s |= _begun_late_s({place: request}, suffices)
        else:
            mesh = request.cost.mesh if isinstance(request.cost, GroupedCost) else None
            key = request.program.steady_period[0].shape, request.plan.period, mesh
            groups[key][place] = request
    for (_, ranks, _), group in groups.items():
        differ = any(each.sums for each in group.values())  # for good, from a usual rank
        alone = ranks == 1 and not differ and len(group) < _FEW_LANES
        ranges_s |= _begun_alone_s(group) if alone else _begun_late_s(group, suffices)
    left = [place for place in range(len(requests)) if place not in ranges_s]
    steps = _run_different([requests[place] for place in left], lambda _: None, counts=False)
    ranges_s |= {place: 2 * (step.mean_s,) for place, step in zip(left, steps, strict=True)}
    return [ranges_s[place] for place in range(len(requests))]


def _may_begin_late(request: Request) -> bool:
    """Whether f is as `step_ranges_s` says, and a host that is ahead is likely.

    It is where compute is as slow under every collective: a later rank sees no less of them.
    """
    program, plan = request.program, request.plan
    waits = program.synchronizes or program.loader is not None
    if waits or request.varies or not (plan.needs_no_events and program.is_uniform):
        return False
    if request.sums is None and program.steady_period[0].is_bound_by_host:
        return False
    return len({each.interference.compute for each in program.transfers(request.cost)}) <= 1


def _begun_late_s(
    group: Mapping[int, Request], suffices: Suffices
) -> dict[int, tuple[float, float]]:
    """Lengths of a step in seconds, by places: the least and the most, or the mean twice.

    Jobs whose hosts fall behind are left out. Steps that do not come again have the mean of the
    last half or more, on the rank that ends last.
    """
    import numpy as np  # noqa: PLC0415 -- slow to import

    requests, ranks = list(group.values()), next(iter(group.values())).plan.period
    hosts = [Host(replace(each.program, warmup=0), MOST_MORE) for each in requests]
    lanes = _lanes(ranks, list(zip(group, map(Trial, hosts, requests), strict=True)), counts=False)
    stood_ns = [each.sums.stood_ns if each.sums else None for each in requests]
    now_ns = np.stack([np.full(ranks, _LATE_NS) + (0.0 if ns is None else ns) for ns in stood_ns])
    lanes.begin_late(now_ns)
    count, middles = 0, [(0, now_ns)] * 2  # moments after 2^k steps, the last two such
    try:
        for lengths_ns in islice(lanes.trained(), MOST_MORE):
            if not count and len(few := _ahead(group, hosts, lengths_ns)) < len(group):
                return _begun_late_s(few, suffices) if few else {}
            now_ns = now_ns + lengths_ns
            count += 1
            if count.bit_count() == 1:
                middles = [middles[1], (count, now_ns)]
            edges_s = np.stack([lengths_ns.min(axis=1), lengths_ns.max(axis=1)], axis=1) / NS_PER_S
            held = zip(group, map(tuple, edges_s.tolist()), strict=True)
            ranges_s = {place: each for place, each in held if suffices(place, *each)}
            pasts = zip(group, lanes.past, strict=True)
            if all(place in ranges_s or past.cycle_ns for place, past in pasts):
                break
    except OverflowError:
        return {}
    middle, middle_ns = middles[0]
    trials, last = np.arange(len(requests)), now_ns.argmax(axis=1)
    means_ns = (now_ns - middle_ns)[trials, last] / (count - middle)
    means_ns = means_ns.clip(lengths_ns.min(axis=1), lengths_ns.max(axis=1))
    for i, (place, past) in enumerate(zip(group, lanes.past, strict=True)):
        cycle_ns = past.cycle_ns
        mean_ns = sum(cycle_ns) / len(cycle_ns) if cycle_ns else float(means_ns[i])
        if cycle_ns or place not in ranges_s:
            ranges_s[place] = 2 * (mean_ns / NS_PER_S,)
    return ranges_s


def _begun_alone_s(group: Mapping[int, Request]) -> dict[int, tuple[float, float]]:
    """Lengths of a step in seconds, of jobs of which one rank stands for all, by their places."""
    ranges_s: dict[int, tuple[float, float]] = {}
    for place, request in group.items():
        host = Host(replace(request.program, warmup=0), MOST_MORE)
        length_ns = step_begun_ns(request, host, int(_LATE_NS))
        if _is_ahead(host, length_ns):
            ranges_s[place] = 2 * (length_ns / NS_PER_S,)
    return ranges_s


def _ahead(
    group: Mapping[int, Request], hosts: Sequence[Host], lengths_ns: Ticks
) -> dict[int, Request]:
    """Select requests whose devices, at their shortest step, begin one when all was launched."""
    shortest_ns = map(int, lengths_ns.min(axis=1))
    each = zip(group.items(), hosts, shortest_ns, strict=True)
    return dict(item for item, host, ns in each if _is_ahead(host, ns))


def _is_ahead(host: Host, shortest_ns: int) -> bool:
    """Whether that is so of a step in the middle, and of all after it."""
    number = 1 + host.more // 2
    launched_ns = host.batches_ns[number][-1][-1] + host.step(number).last_ns
    begun_ns = (number - 1) * shortest_ns  # the first is another kind of step
    return begun_ns >= launched_ns and host.repeats_from(number, shortest_ns, waited=False)


def _keys(requests: Sequence[Request]) -> list[Hashable]:
    """Equal for jobs that do the same: some bucket caps give the same buckets."""
    sent = [_sent(request) for request in requests]
    times = Counter(sent)
    return [
        (job, _instructions(request) if times[job] > 1 else None)
        for job, request in zip(sent, requests, strict=True)
    ]


def _sent(request: Request) -> Hashable:
    """All of a job but its instructions, which take longer to compare."""
    program, drawn = request.program, (request.slowdowns, request.stalls, request.kept_deviations)
    return (
        *(program.warmup, program.iterations, program.loader, program.blocking),
        *(program.comm_workers, program.comm_spins, request.world_size, request.traffic),
        *(None if each is None else each.tobytes() for each in drawn),
        tuple(program.transfers(request.cost)),
    )


def _instructions(request: Request) -> Hashable:
    """The instructions of each kind of step, and which step is of which kind."""
    program = request.program
    numbers = range(program.warmup + program.iterations + program.strategy.period)
    kinds = tuple(program.kind(number) for number in numbers)
    return kinds, tuple(map(program.strategy.instructions, sorted({*kinds})))


def _run_different(
    requests: Sequence[Request], advance: Callable[[float], None], *, counts: bool = True
) -> list[SteadyStep]:
    jobs = _all_settled(requests, advance)
    steps: dict[int, SteadyStep] = {}
    for places, lanes in _together(jobs, counts=counts):
        steps |= {place: lanes.steady_step(i) for i, place in places.items()}
        advance((1 - _SETTLED) * len(places))
    for i, job in enumerate(jobs):
        if i not in steps:
            steps[i] = _alone(job, counts=counts)
            advance(1 - _SETTLED)
    return [steps[i] for i in range(len(jobs))]


def _all_settled(requests: Sequence[Request], advance: Callable[[float], None]) -> list[Request]:
    """Each as `settled` gives it, which is asked once of those that differ in draws alone."""
    keys: list[Hashable] = []
    calm: dict[Hashable, Request] = {}
    for request in requests:
        usual = request.without_variation()
        lasting = None if usual.slowdowns is None else usual.slowdowns[:, 0].tobytes()
        keys.append((id(usual.program), id(usual.cost), usual.world_size, request.traffic, lasting))
        if request.varies and usual.plan.needs_no_events and not request.traffic.loader_share:
            calm.setdefault(keys[-1], usual)
    warmups: dict[Hashable, int] = {}
    for places, lanes in _together(list(calm.values()), counts=False):
        warmups |= {list(calm)[p]: lanes.past[i].warmup for i, p in places.items()}
    jobs = []
    for key, request in zip(keys, requests, strict=True):
        if key not in warmups:
            warmups[key] = settled(request).program.warmup
        jobs.append(request.longer(warmups[key]))
        advance(_SETTLED)
    return jobs


def _alone(job: Request, *, counts: bool) -> SteadyStep:
    """By a simulation of its own."""
    timeline = run_settled(job, tells=counts).timeline
    return SteadyStep.of(timeline) if counts else SteadyStep(lengths_ns(timeline), 0, 0)


def _together(
    requests: Sequence[Request], *, counts: bool
) -> Iterator[tuple[Mapping[int, int], Lanes]]:
    """Jobs that can be simulated together, once they are: places by trials, and the trials.

    None of those where the clock would get too long.
    """
    for ranks, group in _groups(requests):
        sent = sum(len(each.sent) for each in group[0][1].request.program.kinds) if counts else 0
        many = max(1, _LANES // (1 + sent // _SENT) // ranks)
        for i in range(0, len(group), many):
            with suppress(OverflowError):
                yield from _trained(ranks, group[i : i + many], counts=counts)


def _trained(
    ranks: int, group: _Group, *, counts: bool
) -> Iterator[tuple[Mapping[int, int], Lanes]]:
    """Jobs side by side; those that take twice as many steps as half of them go on alone, anew."""
    lanes, half, left = _lanes(ranks, group, counts=counts), 0, []
    for steps, _ in enumerate(lanes.trained(), 1):
        left = [i for i, past in enumerate(lanes.past) if past.last is None]
        if not half and 2 * len(left) <= len(group):
            half = steps
        if left and half and steps >= 2 * half:
            break
    yield {i: place for i, (place, _) in enumerate(group) if i not in left}, lanes
    if left:
        yield from _trained(ranks, [group[i] for i in left], counts=counts)


_Group = Sequence[tuple[int, Trial]]  # by their places


def _groups(requests: Sequence[Request]) -> Iterator[tuple[int, _Group]]:
    """Ranks to simulate, and the jobs whose steps differ in numbers alone."""
    hosts: dict[Hashable, tuple[Host, Hashable]] = {}  # by a program, which many may share
    groups: dict[tuple[int, Hashable], list[tuple[int, Trial]]] = defaultdict(list)
    for place, request in enumerate(requests):
        plan, program = request.plan, request.program
        if not plan.needs_no_events:
            continue
        shared = id(program), request.varies
        if shared not in hosts:
            host = host_of(request)
            hosts[shared] = host, _structure(host)
        host, structure = hosts[shared]
        mesh = request.cost.mesh if isinstance(request.cost, GroupedCost) else None
        groups[plan.period, (request.varies, structure, mesh)].append((place, Trial(host, request)))
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

    return Lanes([trial for _, trial in group], ranks, counts=counts, remembers=())
