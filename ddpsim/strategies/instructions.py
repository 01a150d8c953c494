"""What a rank's host may do in a step: the instructions that a strategy yields.

An instruction depends neither on the rank nor on time. So SimPy's ranks (`ddpsim.engine.reference`)
and many ranks at once (`ddpsim.engine.fast`) carry out the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ddpsim.cluster.transfers import Operation, ProcessGroup
from ddpsim.result.timeline import CommSpan, Kind
from ddpsim.strategies.ticks import Launch


@dataclass(frozen=True, slots=True)
class LoadBatch:
    """Wait for the data loader."""


class Compute(NamedTuple):
    """Spend the host's time, then append work to the compute stream; `names`: of a Work."""

    kind: Kind
    host_ns: int
    device_ns: int
    names: tuple[str, ...] = ()


class Communicate(NamedTuple):
    """Launch a collective on what the compute stream holds so far.

    `number` is its place among the iteration's collectives; `bucket` is -1 for other ones. `cause`
    names what is sent. `waits_for`: the number of a Record, up to which alone the collective waits
    for the compute stream, as on a stream of its own; None: for all of it. `follows`: the number of
    another collective, whose end alone it waits for. `before_ns`: its own work on that stream
    before it. `group`: its ranks; the collectives of each group have a communicator of their own.
    """

    number: int
    host_ns: int
    operation: Operation
    size_bytes: int
    bucket: int = -1
    bucket_bytes: int = 0
    num_params: int = 0
    after_ns: int = 0
    cause: str = ""
    waits_for: int | None = None
    before_ns: int = 0
    group: ProcessGroup = "world"
    follows: int | None = None

    def span(self, ready_ns: int, joined_ns: int, met_ns: int, end_ns: int) -> CommSpan:
        """The collective as one rank saw it."""
        size_bytes = self.bucket_bytes or self.size_bytes
        seen = (ready_ns, joined_ns, met_ns, end_ns)
        what = (self.operation, self.bucket, size_bytes, self.num_params)
        return CommSpan(*what, *seen, self.number, self.size_bytes, self.cause, self.group)


class Await(NamedTuple):
    """Let the compute stream (on a CPU: the host) wait for a collective."""

    number: int


@dataclass(frozen=True, slots=True)
class Synchronize:
    """Let the host wait until the compute stream has done all that was launched (`.item()`)."""


class Mark(NamedTuple):
    """Note when the compute stream has come so far."""

    place: Literal["backward_starts", "step_ends"]


class Record(NamedTuple):
    """Remember how far the compute stream has come, for collectives launched later in the step."""

    number: int


Instruction = LoadBatch | Compute | Communicate | Await | Synchronize | Mark | Record


class Exchange(NamedTuple):
    """A layer's work with collectives in its midst, each of which it awaits before the next."""

    instructions: tuple[Instruction, ...]


Piece = Launch | Exchange


def compute(kind: Kind, work: Launch) -> Compute:
    """Launch one piece of work."""
    return Compute(kind, work.host_ns, work.device_ns, work.names)


def compute_all(kind: Kind, works: Iterable[Piece]) -> Iterator[Instruction]:
    """Launch several pieces of work, one after the other."""
    for work in works:
        if isinstance(work, Exchange):
            yield from work.instructions
        else:
            yield compute(kind, work)


def numbered(instructions: Iterable[Instruction]) -> Iterator[Instruction]:
    """A step's instructions with collectives numbered by their place among all of the step.

    A strategy numbers those that it knows of; an exchange has a number that comes again.
    """
    places: dict[int, int] = {}
    count = 0
    for instruction in instructions:
        if isinstance(instruction, Communicate):
            places[instruction.number] = count
            follows = None if instruction.follows is None else places[instruction.follows]
            is_numbered = (instruction.number, instruction.follows) == (count, follows)
            yield (
                instruction if is_numbered else instruction._replace(number=count, follows=follows)
            )
            count += 1
        elif isinstance(instruction, Await):
            yield Await(places[instruction.number])
        else:
            yield instruction
