"""The data of a page: a drawn step, other bucket caps, other node counts, sensitivities."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ddpsim.result.capacity import LongRun
from ddpsim.result.changes import Sensitivity
from ddpsim.result.metrics import Interval, Step, free_lanes, steps_of
from ddpsim.result.model import HeldBytes, MemoryWalk, Result
from ddpsim.result.summary import steady_steps, typical_step
from ddpsim.result.timeline import CommSpan, Span, Timeline
from ddpsim.wording import ends_of

_MOST_SPANS = 300  # of a rank's compute lane: more cannot be told apart on a screen
_NO_WORK = ("comm_wait", "stall")
_MOST_COLLECTIVES = 300  # of a rank


@dataclass(frozen=True, slots=True)
class DrawnCollective:
    """One collective as one rank saw it; all ticks are from the start of the drawn step.

    `lane`: 0, or more where several are in flight; `exposed`: the pieces in which the compute
    lane waits for communication. `ring_steps` equal parts of the transfer begin at
    `ring_start_ns`; 0 where it is not a ring of known links.
    """

    span: CommSpan
    lane: int
    exposed: tuple[Interval, ...]
    ring_steps: int
    ring_start_ns: int


@dataclass(frozen=True, slots=True)
class DrawnRank:
    """The lanes of one rank in the drawn step, and of `ranks` that are exactly alike.

    `hidden_ns` and `exposed_ns` add up to the union of its collectives, those that are not drawn
    included: `left_out` of them, the shortest ones. Spans of the compute lane below `shortest_ns`
    are drawn with the one before them.
    """

    ranks: tuple[int, ...]
    is_slowest: bool
    compute: tuple[Span, ...]
    host: tuple[Span, ...]
    collectives: tuple[DrawnCollective, ...]
    hidden_ns: int
    exposed_ns: int
    left_out: int
    shortest_ns: int


@dataclass(frozen=True, slots=True)
class DrawnStep:
    """The slowest rank's step of median length, on all drawn ranks; the slowest rank is first."""

    length_ns: int
    backward_start_ns: int
    ranks: tuple[DrawnRank, ...]


@dataclass(frozen=True, slots=True)
class Dial:
    """The key that the page's slider changes, and what it is called.

    `name`: of the key, in words; `other`: with another value of it; `sent`: what gradients are
    sent in; `values`: all of them, in words; `unit`: of a value; `usual`: torch's default, in words
    that say more than its key.
    """

    key: str
    name: str
    other: str
    sent: str
    values: str = "Bucket sizes"
    unit: str = ""
    usual: str = ""

    def words_of(self, value: str) -> str:
        """One of its values."""
        if value == "default" and self.usual:
            return self.usual
        if value == "null":
            return f"the default {self.short_key}"
        if self.unit == "elements":
            return f"{int(value):,} elements".replace(",", " ")
        return f"{value} {self.unit}" if self.unit else f"{self.short_key}: {value}"

    @property
    def short_key(self) -> str:
        """The key's last part."""
        return self.key.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class CapChoice:
    """One value of the dial, as `--set` takes it and in words, with its result and a drawn step.

    `held`: what is held beside shards, by ticks from the start of the drawn step; empty: nothing is
    sharded.
    """

    cap: str
    words: str
    result: Result
    step: DrawnStep
    held: tuple[tuple[int, HeldBytes], ...] = ()


@dataclass(frozen=True, slots=True)
class Rival:
    """The scenario with another setting, whose step is drawn below the scenario's own."""

    setting: str
    result: Result
    step: DrawnStep


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What a page could not show, and why."""

    what: str
    reason: str


@dataclass(frozen=True, slots=True)
class Storyboard:
    """Everything that a page shows.

    `choices[current]` is the scenario itself; `scaling` holds its results by number of nodes.
    `month`: 30 days of its steps with the failures that it states.
    """

    dial: Dial
    result: Result
    choices: tuple[CapChoice, ...]
    current: int
    scaling: tuple[Result, ...]
    sensitivity: tuple[Sensitivity, ...]
    left_out: tuple[LeftOut, ...]
    rivals: tuple[Rival, ...] = ()
    month: LongRun | None = None

    @property
    def steps(self) -> tuple[DrawnStep, ...]:
        """All that are drawn, on one time axis."""
        rivals = (rival.step for rival in self.rivals)
        return (*(choice.step for choice in self.choices), *rivals)


# the steps of a ring, and ticks until its first one begins; None: not a ring of known links
RingOf = Callable[[CommSpan], tuple[int, int] | None]


def drawn_step(timeline: Timeline, ranks: Iterable[int], ring_of: RingOf) -> DrawnStep:
    """The typical step of a timeline on its slowest rank and on `ranks`, which it has observed."""
    steady = steady_steps(timeline)
    typical = typical_step(steady)
    number = timeline.warmup + steady.index(typical)
    alike: dict[DrawnRank, list[int]] = {}
    for rank in dict.fromkeys((timeline.slowest_rank, *ranks)):
        step = steps_of(timeline.ranks[rank])[number]
        alike.setdefault(_drawn(step, typical.start_ns, ring_of), []).append(rank)
    return DrawnStep(
        typical.length_ns,
        typical.backward_start_ns - typical.start_ns,
        tuple(
            replace(drawn, ranks=tuple(sorted(group)), is_slowest=timeline.slowest_rank in group)
            for drawn, group in alike.items()
        ),
    )


def held_over_step(timeline: Timeline, walk: MemoryWalk) -> tuple[tuple[int, HeldBytes], ...]:
    """The bytes held in a drawn step on the slowest rank, each from when its device comes to it."""
    step = typical_step(steady_steps(timeline))
    works = [span.end_ns for span in step.compute if span.kind not in _NO_WORK]
    ends_ns = [0, *(end_ns - step.start_ns for end_ns in works)]
    last_of = {ends_ns[min(works, len(ends_ns) - 1)]: held for works, held in walk}
    return tuple(last_of.items())


def _drawn(step: Step, origin_ns: int, ring_of: RingOf) -> DrawnRank:
    exposed_ns = step.breakdown().exposed_comm
    shortest_ns = _shortest_ns(step)
    waits = [(span.start_ns, span.end_ns) for span in step.compute if span.kind == "comm_wait"]
    comm = step.comm
    order = sorted(range(len(comm)), key=lambda i: (comm[i].joined_ns, comm[i].end_ns))
    lanes = dict(zip(order, free_lanes(comm[i] for i in order), strict=True))
    longest = sorted(range(len(comm)), key=lambda i: comm[i].joined_ns - comm[i].end_ns)
    chosen = longest[:_MOST_COLLECTIVES]
    collectives = tuple(
        _collective(comm[i], lanes[i], waits, origin_ns, ring_of) for i in sorted(chosen)
    )
    return DrawnRank(
        ranks=(),
        is_slowest=False,
        compute=_since(_merged(_merged(step.compute, 0), shortest_ns), origin_ns),
        host=_since(_merged(step.host, 0), origin_ns),
        collectives=collectives,
        hidden_ns=step.comm_ns() - exposed_ns,
        exposed_ns=exposed_ns,
        left_out=len(step.comm) - len(chosen),
        shortest_ns=shortest_ns,
    )


def _collective(
    span: CommSpan, lane: int, waits: Sequence[Interval], origin_ns: int, ring_of: RingOf
) -> DrawnCollective:
    ring_steps, ring_start_ns = ring_of(span) or (0, 0)
    exposed = tuple(
        (max(start, span.joined_ns) - origin_ns, min(end, span.end_ns) - origin_ns)
        for start, end in waits
        if max(start, span.joined_ns) < min(end, span.end_ns)
    )
    drawn = span.moved(-origin_ns)
    return DrawnCollective(drawn, lane, exposed, ring_steps, drawn.met_ns + ring_start_ns)


def _shortest_ns(step: Step) -> int:
    """The least span length at which the compute lane has few enough spans to draw."""
    joined = _merged(step.compute, 0)
    for parts in (4000, 2000, 1000, 500):
        shortest_ns = step.length_ns // parts
        if len(_merged(joined, shortest_ns)) <= _MOST_SPANS:
            break
    return shortest_ns


def _merged(spans: Iterable[Span], shortest_ns: int) -> list[Span]:
    """Spans with neighbours of one kind and block joined, and short ones to the one before."""
    merged: list[Span] = []
    for span in spans:
        if span.end_ns == span.start_ns:
            continue
        last = merged[-1] if merged else None
        touches = last is not None and last.end_ns == span.start_ns
        small = span.end_ns - span.start_ns < shortest_ns and "comm_wait" not in (
            span.kind,
            last and last.kind,
        )
        if last and touches and (small or _is_of_one_block(last, span)):
            names = ends_of([last.names, span.names if span.kind == last.kind else ()])
            merged[-1] = last._replace(end_ns=span.end_ns, names=names)
        else:
            merged.append(span)
    return merged


def _since(spans: Iterable[Span], origin_ns: int) -> tuple[Span, ...]:
    return tuple(span.moved(-origin_ns) for span in spans)


def _is_of_one_block(some: Span, other: Span) -> bool:
    """Whether two spans are of one kind, and of no other block where both have names."""
    if some.kind != other.kind:
        return False
    return len({block_of(name) for name in (*some.names, *other.names)}) < 2


@lru_cache(maxsize=1 << 14)
def block_of(name: str) -> str:
    """The block of a module or a parameter: its name up to the first number, or its module's."""
    parts = name.split(".")
    numbers = (place for place, part in enumerate(parts) if part.isdecimal())
    return ".".join(parts[: next(numbers, max(0, len(parts) - 2)) + 1])
