"""A collective as messages that wait for each other: what the plain model runs, step by step.

A message starts when its sender and its receiver have joined the collective, the messages that it
comes `after` have arrived and those that it is `behind` have left (its sender's link was busy with
them). The link is free after `occupies_ns`, and the message arrives after `takes_ns`. The
collective ends on all ranks together, when the last message has arrived (an approximation: in a
tree, ranks near the root have their result some hops earlier).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ddpsim.cluster.topology.link import Link
from ddpsim.cluster.topology.paths import leaving_ns, step_ns

__all__ = ["Message", "Schedule", "Scheduler"]


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
