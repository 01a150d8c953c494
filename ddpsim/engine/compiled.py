"""A step of a strategy, compiled once: what the engine asks of its instructions is found here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby
from typing import NamedTuple

from ddpsim.strategies.instructions import (
    Await,
    Communicate,
    Compute,
    Instruction,
    LoadBatch,
    Record,
    Synchronize,
)

_KEPT = 64  # variants of a job have the same steps
_ALIKE = ("number", "waits_for", "follows", "group", "place")  # of instructions but Compute


class Part(NamedTuple):
    """What a host launches: works that follow each other, or another instruction alone.

    `offset_ns`: when it launches the first, in ticks since it last waited; `works`: each with its
    own offset, and `device_ns`: all of them.
    """

    offset_ns: int
    first: Instruction
    works: tuple[tuple[int, Compute], ...] = ()
    device_ns: int = 0


class Stretch(NamedTuple):
    """So many works between collectives; `then` is one launched or awaited, or None at the end."""

    works_ns: int
    number: int
    then: Communicate | Await | None

    @property
    def least_ns(self) -> int:
        """At full rate, each work less a tick, to which it is rounded."""
        return self.works_ns - self.number


class _Moments(NamedTuple):
    """Instructions, each with its moment, and what lies between batches; see CompiledStep."""

    timed: tuple[tuple[int, Instruction], ...]
    between_ns: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class CompiledStep:
    """The instructions of a step, as launched, and with their moments.

    `timed`: each with the ticks since the host last waited, in the order of launch, but that a
    collective which waits for a Record alone comes right after it, or after the collective before
    it: the device may come to it before works that were launched earlier, which it then slows down.
    The host waits for a batch, or for the device; one that computes itself (`blocks`) waits in all
    that it computes or awaits. `between_ns`: from each batch to the request for the next one, or to
    the step's end, where it waits for batches alone. `last_ns`: from the last wait to the step's
    end.
    """

    launched: tuple[Instruction, ...]
    blocks: bool

    @classmethod
    def of(cls, step: tuple[Instruction, ...], *, blocks: bool = False) -> CompiledStep:
        """A step's instructions, the first of which loads a batch; of equal steps once."""
        cached, compiled = _cache.get((id(step), blocks), (None, None))
        if cached is not step or compiled is None:  # to find it by its value takes a while
            compiled = _compiled(step, blocks)
            _cache[id(step), blocks] = step, compiled
            if len(_cache) > _KEPT:
                del _cache[next(iter(_cache))]
        return compiled

    @property
    def timed(self) -> tuple[tuple[int, Instruction], ...]:
        """Each instruction with its moment."""
        return self._moments.timed

    @property
    def between_ns(self) -> tuple[int, ...]:
        """Ticks between batches, and after the last one."""
        return self._moments.between_ns

    @property
    def last_ns(self) -> int:
        """Ticks from the last wait to the step's end."""
        return self._moments.between_ns[-1]

    @cached_property
    def _moments(self) -> _Moments:
        """Found once somebody asks, as many steps of a warm-up are never simulated."""
        blocks = self.blocks
        waits = (LoadBatch, Synchronize, *((Await,) if blocks else ()))
        timed: list[tuple[int, Instruction]] = []
        between_ns: list[int] = []
        now_ns = 0
        for instruction in self.launched:
            if isinstance(instruction, Compute):
                now_ns += instruction.host_ns
                timed.append((now_ns, instruction))
                if blocks:
                    now_ns = 0
                continue
            if isinstance(instruction, Communicate):
                now_ns += instruction.host_ns
            if isinstance(instruction, LoadBatch) and timed:
                between_ns.append(now_ns)
            place = len(timed) if blocks else _place(timed, instruction)
            timed.insert(place, (now_ns, instruction))
            if isinstance(instruction, waits):
                now_ns = 0
        return _Moments(tuple(timed), (*between_ns, now_ns))

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """What is `timed`, with works that follow each other as one."""
        parts: list[Part] = []
        for computes, group in groupby(self.timed, key=lambda each: isinstance(each[1], Compute)):
            if computes:
                works = tuple((offset_ns, i) for offset_ns, i in group if isinstance(i, Compute))
                parts.append(Part(*works[0], works, sum(i.device_ns for _, i in works)))
            else:
                parts += [Part(*each) for each in group]
        return tuple(parts)

    @cached_property
    def sent(self) -> tuple[Communicate, ...]:
        """The collectives, in the order of launch."""
        return tuple(i for i in self.launched if isinstance(i, Communicate))

    @cached_property
    def works(self) -> tuple[Compute, ...]:
        """What the device computes, in the order of launch."""
        return tuple(i for i in self.launched if isinstance(i, Compute))

    @cached_property
    def longest_work_ns(self) -> int:
        """The longest of the device's works, at full rate."""
        return max((each.device_ns for each in self.works), default=0)

    @cached_property
    def is_bound_by_host(self) -> bool:
        """Whether to launch its works takes the host longer than its device to do them."""
        return sum(each.host_ns for each in self.works) > sum(each.device_ns for each in self.works)

    @cached_property
    def batches(self) -> int:
        """How many it loads."""
        return sum(isinstance(instruction, LoadBatch) for instruction in self.launched)

    @cached_property
    def synchronizes(self) -> bool:
        """Whether the host waits for the device."""
        return any(isinstance(instruction, Synchronize) for instruction in self.launched)

    @cached_property
    def sends_in_line(self) -> bool:
        """Whether every collective waits for all that the device was given before it."""
        return all(each.waits_for is None and each.follows is None for each in self.sent)

    @cached_property
    def overtakes(self) -> bool:
        """Whether a collective may begin before one of other ranks that is launched before it.

        Not where a prefetch follows at once upon the Record that it waits for.
        """
        before: dict[int, str | None] = {}  # the group of what was launched last since each Record
        for instruction in self.launched:
            if isinstance(instruction, Record):
                before[instruction.number] = None
            if isinstance(instruction, Communicate):
                group, waits_for = instruction.group, instruction.waits_for
                if waits_for is not None and before[waits_for] not in (None, group):
                    return True
                before = dict.fromkeys(before, group)
        return False

    @cached_property
    def shape(self) -> tuple[object, ...]:
        """Equal for steps that differ in numbers alone."""
        return tuple(
            Compute
            if isinstance(i, Compute)
            else (type(i), *(getattr(i, name, None) for name in _ALIKE))
            for _, i in self.timed
        )

    @cached_property
    def stretches(self) -> tuple[Stretch, ...]:
        """The works from each collective, launched or awaited, to the next."""
        return tuple(self._stretches())

    def _stretches(self) -> Iterator[Stretch]:
        works_ns, count = 0, 0
        for instruction in self.launched:
            if isinstance(instruction, Compute):
                works_ns += instruction.device_ns
                count += 1
            elif isinstance(instruction, Communicate | Await):
                yield Stretch(works_ns, count, instruction)
                works_ns, count = 0, 0
        yield Stretch(works_ns, count, None)


# by identity, and whether hosts block; the oldest first
_cache: dict[tuple[int, bool], tuple[tuple[Instruction, ...], CompiledStep]] = {}


@lru_cache(maxsize=_KEPT)
def _compiled(step: tuple[Instruction, ...], blocks: bool) -> CompiledStep:  # noqa: FBT001
    return CompiledStep(step, blocks)


def _place(timed: Sequence[tuple[int, Instruction]], instruction: Instruction) -> int:
    """An instruction's place among those that are launched before it."""
    place = len(timed)
    if isinstance(instruction, Communicate) and instruction.waits_for is not None:
        while not _is_before(timed[place - 1][1], instruction.waits_for):
            place -= 1
    return place


def _is_before(instruction: Instruction, record: int) -> bool:
    """Whether a collective that waits for a Record cannot come ahead of an instruction."""
    if isinstance(instruction, Record):
        return instruction.number == record
    return isinstance(instruction, Communicate | LoadBatch | Synchronize)
