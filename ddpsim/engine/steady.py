"""The mean steady step of a job whose steps do not vary, simulated as far as somebody asks.

Of many ranks a step is a function of when each of them begins it, x(k+1) = f(x(k)), that is never
earlier where x is later, and later by d where all of x are: a collective waits for its last rank,
and works follow each other. So the shortest and the longest of a step's lengths on all ranks hold
those of every later step (if x(k+1) >= x(k) + m on all ranks, x(k+2) >= x(k+1) + m). That needs

- a host that never waits again: launches come no later, seen from steps of the shortest length. A
  host that waits for its device in every step has its clock in x beside the device's, and is held
  by the same lengths;
- compute that all collectives slow down alike: then it is slow while any is in flight, which a
  later rank sees no less of;
- ranks that await all collectives in a step, as those of every strategy do.

A host that needs less than a step is ahead of its device in the end, by a whole step and more. So
steps are simulated as if all was launched long before (`_far_behind_s`): that f comes to the same
lengths whatever x it begins with, as two x are never further apart after it than before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, count, islice
from typing import TYPE_CHECKING, NamedTuple

from ddpsim.cluster.process_groups import GroupedCost
from ddpsim.engine.batch import mean_steps_s
from ddpsim.engine.fast.host import Host
from ddpsim.engine.request import Request
from ddpsim.engine.run import MOST_MORE
from ddpsim.units import NS_PER_S

if TYPE_CHECKING:
    from ddpsim.cluster.algorithms.max_plus import Ticks
    from ddpsim.engine.fast.lanes import Lanes

__all__ = ["steady_ranges_s", "steady_steps_s"]

_FEW_RANKS = 1024  # of more, variants side by side are no quicker than one after the other
_LATE_NS = 2.0**50  # twelve days, after all that a host launches in a few steps


def steady_steps_s(requests: Sequence[Request]) -> list[float]:
    """Seconds of each one's mean steady step, the last of its `steady_ranges_s`.

    Variants with the same instructions are simulated side by side, once one of them has told how
    ranks stand to each other.
    """
    exact = [i for i, request in enumerate(requests) if not _is_told_by_steps(request)]
    found = dict(zip(exact, mean_steps_s([requests[i] for i in exact]), strict=True))
    behind: dict[Hashable, dict[int, _FarBehind]] = defaultdict(dict)
    for i, request in enumerate(requests):
        if i in found:
            continue
        far = _FarBehind.of(request) if request.plan.period <= _FEW_RANKS else None
        if far is not None and far.stands:
            mesh = request.cost.mesh if isinstance(request.cost, GroupedCost) else None
            behind[far.host.step(1).shape, request.plan.period, mesh][i] = far
        else:
            *_, (found[i], _) = steady_ranges_s(request)
    for group in behind.values():
        found |= zip(group, _side_by_side_s(list(group.values())), strict=True)
    return [found[i] for i in range(len(requests))]


def _is_told_by_steps(request: Request) -> bool:
    program = request.program
    knows = request.sums is not None and request.plan.needs_no_events and not request.varies
    return knows and not (program.synchronizes and program.loader)


def steady_ranges_s(request: Request) -> Iterator[tuple[float, float]]:
    """Seconds that hold the mean steady step, least and most; the last are both the step itself.

    `request` has one kind of step, one step of warm-up, and nothing that varies.
    """
    if not _is_told_by_steps(request):
        (exact_s,) = mean_steps_s([request])
        yield exact_s, exact_s
        return
    yield from (_far_behind_s(request) or _narrowing_s(request))


def _narrowing_s(request: Request) -> Iterator[tuple[float, float]]:
    """Step by step."""
    host = Host(request.program, MOST_MORE)
    lanes = _lanes([request], [host])
    slowed_alike, waits = _slowed_alike(request), request.program.synchronizes
    hosts_ns = lanes.hosts_ns
    try:
        for number, lengths_ns in enumerate(lanes.trained()):
            least_ns, most_ns = int(lengths_ns.min()), int(lengths_ns.max())
            if waits:
                of_hosts_ns, hosts_ns = lanes.hosts_ns - hosts_ns, lanes.hosts_ns
                least_ns = min(least_ns, int(of_hosts_ns.min()))
                most_ns = max(most_ns, int(of_hosts_ns.max()))
                is_told = host.goes_on_alike(number)
            else:
                is_told = not lanes.waited and host.repeats_from(number, least_ns, waited=False)
            if lanes.past[0].cycle_ns is not None:
                break
            if slowed_alike and is_told:
                yield least_ns / NS_PER_S, most_ns / NS_PER_S
    except OverflowError:
        (exact_s,) = mean_steps_s([request])
    else:
        if lanes.past[0].cycle_ns is not None:
            exact_s = lanes.past[0].cycle_ns / NS_PER_S
        elif lanes.past[0].repeats:
            exact_s = lanes.steady_step(0).mean_s
        else:
            (exact_s,) = mean_steps_s([request])
    yield exact_s, exact_s


class _FarBehind(NamedTuple):
    """A job whose steps are simulated each after all of its launches.

    The same bounds hold, and from the first step that all real ones begin after their launches they
    are alike. `begin_ns`: when ranks begin the first.
    """

    request: Request
    host: Host
    begin_ns: Ticks | float

    @classmethod
    def of(cls, request: Request) -> _FarBehind | None:
        """None where some launches may come late."""
        if request.program.synchronizes or request.program.loader or not _slowed_alike(request):
            return None
        stood_ns = None if request.sums is None else request.sums.stood_ns
        begin_ns = _LATE_NS if stood_ns is None else _LATE_NS + stood_ns
        return cls(request, Host(request.program, MOST_MORE), begin_ns)

    @property
    def stands(self) -> bool:
        """Whether it is known how ranks stand to each other."""
        return not isinstance(self.begin_ns, float)

    def ranges_s(self, lengths_ns: Iterator[Ticks]) -> Iterator[tuple[float, float]] | None:
        """Step by step, [1, ranks] each; None where some launches may come late."""
        try:
            first_ns = next(lengths_ns)
        except OverflowError:
            return None
        if not _falls_behind(self.host, int(first_ns.min())):
            return None
        return _told_s(self.request, chain([first_ns], lengths_ns), self.begin_ns)


def _far_behind_s(request: Request) -> Iterator[tuple[float, float]] | None:
    far = _FarBehind.of(request)
    if far is None:
        return None
    return far.ranges_s(_lanes([request], [far.host]).steps_from(1, far.begin_ns))


def _side_by_side_s(group: Sequence[_FarBehind]) -> Iterator[float]:
    """The mean steady step of each."""
    import numpy as np  # noqa: PLC0415 -- slow to import

    begin_ns = np.zeros((len(group), group[0].request.plan.period))
    for row_ns, each in zip(begin_ns, group, strict=True):
        row_ns[:] = each.begin_ns
    lanes = _lanes([each.request for each in group], [each.host for each in group])
    steps_ns = lanes.steps_from(1, begin_ns)
    seen_ns: list[Ticks] = []

    def lengths_ns(trial: int) -> Iterator[Ticks]:
        for number in count():
            if number == len(seen_ns):
                seen_ns.append(next(steps_ns))
            yield seen_ns[number][trial : trial + 1]

    for trial, each in enumerate(group):
        ranges_s = each.ranges_s(lengths_ns(trial)) or _narrowing_s(each.request)
        *_, (mean_s, _) = ranges_s
        yield mean_s


def _falls_behind(host: Host, shortest_ns: int) -> bool:
    """Whether a device that needs no less for a step begins one when all of it was launched.

    And so all after it.
    """
    number = host.program.warmup + host.more // 2
    launched_ns = host.batches_ns[number][-1][-1] + host.step(number).last_ns
    begun_ns = (number - 1) * shortest_ns  # the first is another kind of step
    return begun_ns >= launched_ns and host.repeats_from(number, shortest_ns, waited=False)


def _told_s(
    request: Request, lengths_ns: Iterable[Ticks], begin_ns: Ticks | float
) -> Iterator[tuple[float, float]]:
    """What steps that follow each other tell, until they come again, or for long enough."""
    ended: dict[bytes, tuple[int, float]] = {}  # by how ranks stood to each other
    lasts_ns: list[float] = []
    now_ns = begin_ns
    with suppress(OverflowError):
        for number, each_ns in enumerate(islice(lengths_ns, MOST_MORE)):
            least_ns, most_ns = int(each_ns.min()), int(each_ns.max())
            yield least_ns / NS_PER_S, most_ns / NS_PER_S
            now_ns = now_ns + each_ns
            last_ns = float(now_ns.max())
            stood_ns = now_ns - last_ns
            lasts_ns.append(last_ns)
            since = ended.setdefault(stood_ns.tobytes(), (number, last_ns))
            if least_ns == most_ns or since[0] < number:
                _begin_others_from(request, stood_ns)
                if least_ns < most_ns:
                    cycle_s = (last_ns - since[1]) / (number - since[0]) / NS_PER_S
                    yield cycle_s, cycle_s
                return
        half = len(lasts_ns) // 2
        mean_ns = (lasts_ns[-1] - lasts_ns[-1 - half]) / half
        mean_s = min(max(mean_ns, least_ns), most_ns) / NS_PER_S  # as the last step's lengths hold
        yield mean_s, mean_s
        return
    (exact_s,) = mean_steps_s([request])
    yield exact_s, exact_s


def _begin_others_from(request: Request, stood_ns: Ticks) -> None:
    """Variants on the same ranks come sooner to their own lengths from where these steps ended.

    The first to end are those of the job itself, from which each variant is as far.
    """
    if request.sums is not None and request.sums.stood_ns is None:
        request.sums.stood_ns = stood_ns - stood_ns.min()


def _slowed_alike(request: Request) -> bool:
    """Whether compute is as slow under every collective."""
    transfers = request.program.transfers(request.cost)
    return len({transfer.interference.compute for transfer in transfers}) <= 1


def _lanes(requests: Sequence[Request], hosts: Sequence[Host]) -> Lanes:
    """The ranks of variants with the same instructions, side by side."""
    from ddpsim.engine.fast.lanes import Lanes  # noqa: PLC0415 -- numpy is slow to import
    from ddpsim.engine.fast.trials import Trial  # noqa: PLC0415 -- numpy is slow to import

    trials = [
        Trial(host, each.cost, each.slowdowns, sums=each.sums, traffic=each.traffic)
        for host, each in zip(hosts, requests, strict=True)
    ]
    return Lanes(trials, requests[0].plan.period, counts=False, remembers=())
