"""A collective as messages that wait for each other: what the plain model runs, step by step.

A message starts when its sender and its receiver have joined the collective, the messages that it
comes `after` have arrived and those that it is `behind` have left (its sender's link was busy with
them). The link is free after `occupies_ns`, and the message arrives after `takes_ns`. The
collective ends on all ranks together, when the last message has arrived (an approximation: in a
tree, ranks near the root have their result some hops earlier).

A ring that all ranks join at once needs no messages: the longest ways of
`ddpsim.cluster.algorithms.max_plus` follow from one period of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import add

from ddpsim.cluster.topology.paths import Link, leaving_ns, step_ns

_LONGEST_PERIOD = 64  # beyond it arrays are faster


@dataclass(frozen=True, slots=True)
class Message:
    """`size_bytes` from one endpoint to another; `after` and `behind` are places in a schedule."""

    source: int
    target: int
    size_bytes: int
    occupies_ns: int
    takes_ns: int
    after: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()


@dataclass(frozen=True)
class Schedule:
    """Messages in an order in which each follows all that it waits for.

    Endpoints from `ranks` on are no ranks: a switch that reduces, or servers of parameters.
    """

    ranks: int
    messages: tuple[Message, ...]

    def end_ns(self, arrivals_ns: Sequence[int]) -> int:
        """When the collective ends, given when each rank joins it: the recurrence, evaluated."""
        left: list[int] = []
        arrived: list[int] = []
        for message in self.messages:
            start = 0
            for end in (message.source, message.target):
                if end < self.ranks:
                    start = max(start, arrivals_ns[end])
            for i in message.after:
                start = max(start, arrived[i])
            for i in message.behind:
                start = max(start, left[i])
            left.append(start + message.occupies_ns)
            arrived.append(start + message.takes_ns)
        return max(arrived, default=max(arrivals_ns))

    def sent_bytes(self) -> dict[int, int]:
        """Bytes that each endpoint sends."""
        sent: dict[int, int] = defaultdict(int)
        for message in self.messages:
            sent[message.source] += message.size_bytes
        return dict(sent)


class Scheduler:
    """Collects messages; each `send` returns the place that later messages wait for."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def send(
        self,
        source: int,
        target: int,
        size_bytes: int,
        link: Link,
        *,
        after: Sequence[int] = (),
        behind: Sequence[int] = (),
    ) -> int:
        """Add a message over a link whose figures are its own part of the wire."""
        times_ns = leaving_ns(link, size_bytes), step_ns(link, size_bytes)
        waits = tuple(after), tuple(behind)
        self.messages.append(Message(source, target, size_bytes, *times_ns, *waits))
        return len(self.messages) - 1

    def schedule(self, ranks: int) -> Schedule:
        """What was collected."""
        return Schedule(ranks, tuple(self.messages))


@lru_cache(maxsize=4096)
def joined_ring_ns(busy_ns: tuple[int, ...], latency_ns: tuple[int, ...], steps: int) -> int:
    """How long a ring takes that all ranks join at once, until the last has its last chunk."""
    if len(set(zip(busy_ns, latency_ns, strict=True))) == 1:
        return steps * (busy_ns[0] + latency_ns[0])
    if len(busy_ns) > _LONGEST_PERIOD:
        import numpy as np  # noqa: PLC0415 -- slow to import, and most rings do without

        from ddpsim.cluster.algorithms.max_plus import ring_ends_ns  # noqa: PLC0415

        return int(ring_ends_ns(busy_ns, latency_ns, steps, np.zeros(len(busy_ns)))[0].max())
    return _longest_way_ns(busy_ns, latency_ns, steps)


def _longest_way_ns(busy_ns: tuple[int, ...], latency_ns: tuple[int, ...], steps: int) -> int:
    """The first chunk, then ways that move little where links wait for bytes, else stay little."""
    n, after_first, largest = len(busy_ns), steps - 1, max(busy_ns)
    busy, latency = 3 * busy_ns, 3 * latency_ns  # beside whole turns no way moves on by two
    moved = [0, *accumulate(map(add, latency, busy[1:]))]
    turn, few = moved[n], range(min(after_first, 2 * n - 2) + 1)
    if turn > n * largest:
        few = range(max(0, after_first - n + 1), after_first + 1)
    turns, rest = divmod(few.start, n)
    longest = 0
    for first in _begins(busy_ns, latency_ns):
        begun = busy[first] + turns * turn - moved[first]
        passed = largest if turns else max(busy[first : first + rest + 1])
        for end, count in enumerate(few, first + rest):
            if busy[end] > passed:  # noqa: PLR1730 -- `max` takes three times as long
                passed = busy[end]
            way = begun + moved[end] + (after_first - count) * passed + latency[end]
            if way > longest:  # noqa: PLR1730 -- likewise
                longest = way
    return longest


def _begins(busy_ns: tuple[int, ...], latency_ns: tuple[int, ...]) -> Sequence[int]:
    """The links with which ways begin that are unlike each other.

    Where one link alone is unlike the others, as that between nodes, a way of so many steps has
    that link as often as the one that begins with it, or as the one that begins right after it.
    """
    links = list(zip(busy_ns, latency_ns, strict=True))
    changes = [i for i, link in enumerate(links) if link != links[i - 1]]
    is_one = len(changes) == 2 and changes[1] - changes[0] in (1, len(links) - 1)
    return changes if is_one else range(len(links))
