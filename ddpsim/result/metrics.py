"""Timeline to figures: the breakdown of a step, its communication, its critical path.

A step is the time between two ends of the optimizer on a rank's compute lane. The compute lane
is cut at its spans; what lies between them was spent waiting for data, or for the host.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal, NamedTuple

from ddpsim.result.model import Breakdown
from ddpsim.result.timeline import CommSpan, RankTimeline, Span
from ddpsim.units import NS_PER_S

Interval = tuple[int, int]
_AVERAGE = "average"  # of the parameters: how its cause begins


@dataclass(frozen=True, slots=True)
class BreakdownNs:
    """Ticks of one or more steps on the compute lane; the parts sum to their whole."""

    data_wait: int = 0
    forward: int = 0
    backward_compute: int = 0
    exposed_comm: int = 0
    optimizer: int = 0
    other: int = 0

    def __add__(self, more: BreakdownNs) -> BreakdownNs:
        return BreakdownNs(*(getattr(self, f.name) + getattr(more, f.name) for f in fields(self)))

    @property
    def total(self) -> int:
        """All parts together: the length of the steps."""
        return sum(getattr(self, field.name) for field in fields(self))

    def seconds(self, steps: int) -> Breakdown:
        """The mean of so many steps."""
        return Breakdown(*(getattr(self, f.name) / steps / NS_PER_S for f in fields(self)))


@dataclass(frozen=True, slots=True)
class CriticalSpan:
    """One link of the chain that sets the step's length; ticks from the start of the step."""

    kind: str
    start_ns: int
    end_ns: int


class Gap(NamedTuple):
    """The compute lane has nothing to do: no batch is there, or the host has launched nothing."""

    waits_for: Literal["data", "host"]
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class Step:
    """One rank's lanes within one step, `start_ns` to `end_ns`."""

    start_ns: int
    end_ns: int
    backward_start_ns: int
    host: tuple[Span, ...]
    compute: tuple[Span, ...]
    comm: tuple[CommSpan, ...]

    @property
    def length_ns(self) -> int:
        """Ticks from this step's start to the next one's."""
        return self.end_ns - self.start_ns

    def moved(self, by_ns: int) -> Step:
        """Gives the step that happens so many ticks later."""
        return Step(
            self.start_ns + by_ns,
            self.end_ns + by_ns,
            self.backward_start_ns + by_ns,
            tuple(span.moved(by_ns) for span in self.host),
            tuple(span.moved(by_ns) for span in self.compute),
            tuple(span.moved(by_ns) for span in self.comm),
        )

    def breakdown(self) -> BreakdownNs:
        """Divides the compute lane's time by what it went to; a hook's own waits are `other`."""
        return self._breakdown

    @cached_property
    def _breakdown(self) -> BreakdownNs:
        spent: dict[str, int] = dict.fromkeys(("data_wait", *_PART_OF.values(), "other"), 0)
        for span in self.compute:
            spent[_PART_OF.get(span.kind, "other")] += span.end_ns - span.start_ns
        hooks_ns = spent["exposed_comm"] - self.exposed_ns(self.comm)
        spent["exposed_comm"] -= hooks_ns
        spent["other"] += hooks_ns
        for gap in self.gaps():
            spent["data_wait" if gap.waits_for == "data" else "other"] += gap.end_ns - gap.start_ns
        return BreakdownNs(**spent)

    def exposed_ns(self, collectives: Iterable[CommSpan]) -> int:
        """Ticks in which the compute lane waits while one of these is in flight."""
        return _common_ns(self._awaited, _united((c.joined_ns, c.end_ns) for c in collectives))

    @cached_property
    def _awaited(self) -> list[Interval]:
        return _united((s.start_ns, s.end_ns) for s in self.compute if s.kind == "comm_wait")

    def backward_ns(self) -> int:
        """Ticks from the start of the (last) backward to the end of its last work."""
        ends = [span.end_ns for span in self.compute if span.kind == "backward"]
        return max(0, max(ends, default=0) - self.backward_start_ns)

    def host_bound_ns(self) -> int:
        """Ticks in which the compute lane waits for neither data nor communication, but idles."""
        return sum(gap.end_ns - gap.start_ns for gap in self.gaps() if gap.waits_for == "host")

    def input_copies_ns(self) -> int:
        """Ticks of inputs' copies to the device, and of the waits for the host that end in one."""
        copies = [span for span in self.compute if span.kind == "input_copy"]
        starts = {span.start_ns for span in copies}
        staged = [gap for gap in self.gaps() if gap.waits_for == "host" and gap.end_ns in starts]
        copied_ns = sum(span.end_ns - span.start_ns for span in copies)
        return copied_ns + sum(gap.end_ns - gap.start_ns for gap in staged)

    def gaps(self) -> Iterator[Gap]:
        """What lies between the compute lane's spans, in order, cut where a batch comes."""
        waits = _united(self._waits_for_data())
        for start_ns, end_ns in self._between():
            now = start_ns
            for wait_ns, come_ns in waits:
                begin_ns, stop_ns = max(now, wait_ns), min(end_ns, come_ns)
                if begin_ns < stop_ns:
                    if now < begin_ns:
                        yield Gap("host", now, begin_ns)
                    yield Gap("data", begin_ns, stop_ns)
                    now = stop_ns
            if now < end_ns:
                yield Gap("host", now, end_ns)

    def _waits_for_data(self) -> list[Interval]:
        return [(s.start_ns, s.end_ns) for s in self.host if s.kind == "data_wait"]

    def _between(self) -> list[Interval]:
        edges = [self.start_ns]
        for span in self.compute:
            edges += [span.start_ns, span.end_ns]
        edges.append(self.end_ns)
        return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]

    def idle_comm_ns(self) -> int:
        """Ticks in which a collective is in flight and the compute lane idles, for another cause.

        No work hides it, yet it is not exposed: without it the step would be as long.
        """
        return overlap_ns([(gap.start_ns, gap.end_ns) for gap in self.gaps()], self._in_flight())

    def comm_ns(self) -> int:
        """Union of the intervals in which a collective is in flight, late peers included."""
        return union_ns(self._in_flight())

    def _in_flight(self) -> list[Interval]:
        return [(span.joined_ns, span.end_ns) for span in self.comm]

    def skew_ns(self) -> int:
        """The part of them spent waiting for late peers alone."""
        return union_ns((span.joined_ns, span.met_ns) for span in self.comm)

    def late_peers_ns(self) -> int:
        """Ticks in which the compute lane idles because a peer has not come to a collective."""
        return _common_ns(self._awaited, _united((s.joined_ns, s.met_ns) for s in self.comm))

    def critical_path(self) -> tuple[CriticalSpan, ...]:
        """The chain of work, transfers and waits that ends the step, from its start on."""
        chain: list[CriticalSpan] = []
        now, in_comm = self.end_ns, False
        starts = [span.start_ns for span in self.compute]  # rising: it is one lane
        while now > self.start_ns:
            links, in_comm = (
                self._comm_before(now) if in_comm else self._compute_before(now, starts)
            )
            chain += links
            now = chain[-1].start_ns if links else now
        return _merged(reversed(chain), self.start_ns)

    def _compute_before(self, now: int, starts: Sequence[int]) -> tuple[list[CriticalSpan], bool]:
        """What the compute lane did until `now`; True: it waited, look at communication."""
        begun = bisect_left(starts, now)
        span = self.compute[begun - 1] if begun else None
        if span is None or span.end_ns < now:
            begin_ns = span.end_ns if span else self.start_ns
            waited = overlap_ns([(begin_ns, now)], self._waits_for_data())
            return [CriticalSpan("data_wait" if waited else "host", begin_ns, now)], False
        if span.kind == "comm_wait":
            if any(span.start_ns < each.end_ns <= now for each in self.comm):
                return [], True
            return [CriticalSpan("comm_hook", span.start_ns, now)], False
        return [CriticalSpan(span.kind, span.start_ns, now)], False

    def _comm_before(self, now: int) -> tuple[list[CriticalSpan], bool]:
        """The collective that ended last by `now`; True: it queued behind another one.

        One that took no time at `now` itself explains nothing, and would be found again and again.
        """
        ended = [span for span in self.comm if span.end_ns <= now and span.joined_ns < now]
        if not ended:
            return [CriticalSpan("host", self.start_ns, now)], False
        span = max(ended, key=lambda comm: comm.end_ns)
        links = [CriticalSpan("comm_hook", span.end_ns, now)] if span.end_ns < now else []
        links.append(CriticalSpan(_called(span), span.met_ns, span.end_ns))
        if span.met_ns > span.joined_ns:
            links.append(CriticalSpan("late peer", span.joined_ns, span.met_ns))
        return links, span.joined_ns > span.ready_ns


def _called(span: CommSpan) -> str:
    if span.bucket >= 0:
        return f"{span.operation} of bucket {span.bucket}"
    return "sync_batch_norm" if span.is_of_norm else span.operation


_PART_OF = {
    "forward": "forward",
    "backward": "backward_compute",
    "bucket_copy": "backward_compute",
    "comm_wait": "exposed_comm",
    "optimizer": "optimizer",
    "unscale": "optimizer",
    "clip": "optimizer",
    "zero_grad": "optimizer",
    "item": "optimizer",
}


def steps_of(rank: RankTimeline) -> list[Step]:
    """The steps of a rank, the first one from time 0."""
    ends_ns = rank.step_ends_ns
    host: list[list[Span]] = [[] for _ in ends_ns]
    compute: list[list[Span]] = [[] for _ in ends_ns]
    comm: list[list[CommSpan]] = [[] for _ in ends_ns]
    for span in rank.compute:
        compute[bisect_left(ends_ns, span.end_ns)].append(span)
    for collective in rank.comm:
        step = bisect_left(ends_ns, collective.end_ns)
        while collective.ready_ns == ends_ns[step] and _has(comm[step], collective.number):
            step += 1  # it took no time at the very start of a later step
        comm[step].append(collective)
    for wait in rank.host:  # the host runs ahead: a wait may last into several steps
        for step in range(bisect_right(ends_ns, wait.start_ns), len(ends_ns)):
            host[step].append(wait)
            if ends_ns[step] >= wait.end_ns:
                break
    return [
        Step(start, end, backward, tuple(host[i]), tuple(compute[i]), tuple(comm[i]))
        for i, (start, end, backward) in enumerate(
            zip([0, *ends_ns], ends_ns, rank.backward_starts_ns, strict=False)
        )
    ]


def _has(comm: Iterable[CommSpan], number: int) -> bool:
    """Whether the step's collective of this number is among them."""
    return any(span.number == number for span in comm)


def free_lanes(collectives: Iterable[CommSpan]) -> Iterator[int]:
    """Yields the first lane that is free for each collective, in the order in which they join."""
    free_ns: list[int] = []
    for span in collectives:
        free = (lane for lane, end_ns in enumerate(free_ns) if end_ns <= span.joined_ns)
        lane = next(free, len(free_ns))
        free_ns[lane : lane + 1] = [span.end_ns]
        yield lane


def union_ns(intervals: Iterable[Interval]) -> int:
    """Ticks covered by at least one of the intervals."""
    return sum(end - start for start, end in _united(intervals))


def overlap_ns(some: Iterable[Interval], others: Iterable[Interval]) -> int:
    """Ticks covered by both of two sets of intervals."""
    return _common_ns(_united(some), _united(others))


def _common_ns(some: Sequence[Interval], others: Sequence[Interval]) -> int:
    """Sums up what two lists have in common, each in order and without overlaps."""
    if not others:
        return 0
    common_ns, other = 0, 0
    for start, end in some[max(0, bisect_right(some, others[0]) - 1) :]:
        while other < len(others) and others[other][1] <= start:
            other += 1
        while other < len(others) and others[other][0] < end:
            common_ns += min(end, others[other][1]) - max(start, others[other][0])
            if others[other][1] > end:
                break
            other += 1
        if other == len(others):
            break
    return common_ns


def percentile(values: Sequence[float], rank: float) -> float:
    """Linear between the two nearest order statistics; `rank` from 0 to 100."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * rank / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _merged(chain: Iterable[CriticalSpan], origin_ns: int) -> tuple[CriticalSpan, ...]:
    """Neighbours of one kind as one, from the origin on."""
    merged: list[CriticalSpan] = []
    for link in chain:
        span = CriticalSpan(link.kind, link.start_ns - origin_ns, link.end_ns - origin_ns)
        if merged and merged[-1].kind == span.kind:
            span = CriticalSpan(span.kind, merged.pop().start_ns, span.end_ns)
        merged.append(span)
    return tuple(merged)


def _united(intervals: Iterable[Interval]) -> list[Interval]:
    united: list[Interval] = []
    for start, end in sorted(intervals):
        if united and start <= united[-1][1]:
            united[-1] = (united[-1][0], max(united[-1][1], end))
        elif end > start:
            united.append((start, end))
    return united


def is_reduced(span: CommSpan, reduced: str) -> bool:
    """Whether it is one of what is `reduced`: beside buckets, some steps average parameters."""
    is_beside = reduced == "bucket" and span.cause.startswith(_AVERAGE)
    return span.bucket >= 0 and not is_beside


class Wait(NamedTuple):
    """The collective that a step waits for longest; `share`: of the wait, of those of its kind."""

    longest: CommSpan
    words: str
    share: float


def longest_wait(step: Step, broadcast: str, reduced: str = "bucket") -> Wait:
    """The collective that a step waits for longest.

    `broadcast` says what goes to all ranks before the forward, `reduced` what is reduced.
    """
    buckets = [span for span in step.comm if is_reduced(span, reduced)]
    others = [span for span in step.comm if not is_reduced(span, reduced)]
    are_late = step.exposed_ns(buckets) >= step.exposed_ns(others)
    if are_late:
        waited, words = buckets, _late(step, buckets, reduced)
    else:
        kinds: dict[str, list[CommSpan]] = {}
        for span in others:
            kinds.setdefault(_purpose(span, broadcast), []).append(span)
        purpose = max(kinds, key=lambda kind: step.exposed_ns(kinds[kind]))
        waited, words = kinds[purpose], f"mostly {purpose}"
    longest = max(waited, key=lambda collective: step.exposed_ns([collective]))
    return Wait(longest, words, step.exposed_ns(waited) / max(1, step.exposed_ns(step.comm)))


def _purpose(span: CommSpan, broadcast: str) -> str:
    """What a collective that reduces no bucket is for."""
    causes = {
        "sync_batch_norm": "the statistics of SyncBatchNorm",
        _AVERAGE: "the average of the parameters, in steps that have one",
        "a barrier": "barriers, where ranks wait for each other",
        "parameter ": "gradients that are reduced beside DDP",
        "join": "join's all-reduce, which counts the ranks that have inputs",
        "Muon": "Muon's matrices, which are sharded",
    }
    operations = {
        "broadcast": f"{broadcast} before the forward",
        "all_gather": "all-gathers of parameters",
    }
    for cause, purpose in causes.items():
        if span.cause.startswith(cause):
            return purpose
    unused = "the all-reduce that tells which parameters are unused"
    return operations.get(span.operation, unused)


def _late(step: Step, reduced: list[CommSpan], called: str) -> str:
    """How many buckets, or what else is reduced and `called` so, end after the backward."""
    end_ns = max((s.end_ns for s in step.compute if s.kind == "backward"), default=step.start_ns)
    if any(span.operation != "all_reduce" for span in reduced):  # HSDP, and hooks that gather
        reduced = [span for span in reduced if span.num_params]
    late = sum(span.end_ns > end_ns for span in reduced)
    buckets = sum(span.num_params > 0 for span in reduced)
    if 0 < buckets < len(reduced):  # others are stages of one, before its last
        return f"each of {buckets} {called}s is waited for in its hook"
    if len(reduced) == 1:
        return f"its one {called} ends after the backward"
    if late == 1:
        return f"the last of {len(reduced)} {called}s ends after the backward"
    which = "all" if late == len(reduced) else f"the last {late} of"
    return f"{which} {len(reduced)} {called}s end after the backward"
