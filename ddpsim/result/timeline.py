"""What happened: spans of time on the lanes of ranks, in integer nanoseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Kind = Literal[
    "data_wait",  # host lane: no batch is ready
    "device_wait",  # host lane: it waits until the device has done all that was launched
    "stall",  # a rank stands still, for a cause of its own
    "input_copy",  # of a micro-batch, from the host's memory
    "forward",
    "backward",
    "bucket_copy",  # gradient to bucket, and a hook's work before the all-reduce
    "comm_wait",  # the compute lane waits for communication
    "copy_back",  # bucket to gradient, and a division after the all-reduce
    "buffers",  # flatten and unflatten around the buffer broadcast
    "unshard",  # copies of gathered parameters
    "optimizer",
    "unscale",  # GradScaler's pass over the gradients, and its update
    "clip",  # the gradients' norm, and their scaling
    "zero_grad",  # gradients filled with zeros
    "item",  # a value copied to the host
    "averaging",  # copies and a division around the average of parameters
]


class Span(NamedTuple):
    """One piece of work (or waiting) on a rank's host or compute lane.

    `names`: of the module or the gradient that it is of, or of the first and the last.
    """

    kind: Kind
    start_ns: int
    end_ns: int
    names: tuple[str, ...] = ()

    def moved(self, by_ns: int) -> Span:
        """Return the span so many ticks later."""
        return self._replace(start_ns=self.start_ns + by_ns, end_ns=self.end_ns + by_ns)


class CommSpan(NamedTuple):
    """One collective as one rank saw it.

    `ready_ns`: its data was there; `joined_ns`: the communication lane had come to it; `met_ns`:
    the last peer had joined; `end_ns`: this rank was done. `bucket` is -1 for other collectives.
    `number`: its place among the step's collectives; `wire_bytes` are sent for `cause` among the
    ranks of `group`: the world, a node, one rank of each node (across_nodes), or those that keep a
    copy of parameters (kept).
    """

    operation: str
    bucket: int
    size_bytes: int
    num_params: int
    ready_ns: int
    joined_ns: int
    met_ns: int
    end_ns: int
    number: int = 0
    wire_bytes: int = 0
    cause: str = ""
    group: str = "world"

    def moved(self, by_ns: int) -> CommSpan:
        """Return the collective so many ticks later."""
        moments = ("ready_ns", "joined_ns", "met_ns", "end_ns")
        return self._replace(**{moment: getattr(self, moment) + by_ns for moment in moments})

    @property
    def is_of_norm(self) -> bool:
        """Whether it is a batch norm's, whose statistics are those of all ranks."""
        return self.cause.startswith("sync_batch_norm")


class MessageSpan(NamedTuple):
    """One message of a collective, on its way to a rank."""

    target: int
    start_ns: int
    end_ns: int


@dataclass
class RankTimeline:
    """The lanes of one rank, and when its compute lane came to each iteration's backward and end.

    With several micro-batches the backward is the last one's, which communicates.
    """

    host: list[Span] = field(default_factory=list)
    compute: list[Span] = field(default_factory=list)
    comm: list[CommSpan] = field(default_factory=list)
    backward_starts_ns: list[int] = field(default_factory=list)
    step_ends_ns: list[int] = field(default_factory=list)

    def comm_ns(self) -> int:
        """Ticks in collectives, added up over all of them."""
        return sum(span.end_ns - span.joined_ns for span in self.comm)


@dataclass
class Timeline:
    """The lanes of the ranks that were observed, and what is known of all that were simulated.

    `late_peers_ns`: ticks in which each rank's compute lane idles for late peers, over the steady
    steps. The last step goes on `repeats` times, exactly alike.
    """

    ranks: dict[int, RankTimeline]
    warmup: int
    slowest_rank: int
    late_peers_ns: Sequence[int]
    repeats: int = 0

    @property
    def slowest(self) -> RankTimeline:
        """The lanes of the rank that ends the last iteration last.

        Of equals the one whose collectives took longest (behind the slowest link), then the lowest.
        """
        return self.ranks[self.slowest_rank]
