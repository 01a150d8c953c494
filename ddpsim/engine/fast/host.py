"""What the host of a GPU does, and when: it never waits for the device, so the clock is its own.

It launches the instructions of the training loop one after the other, ahead of the device, and
waits for nothing but the data loader. So all of a job's hosts keep the same time, and it can be
told before anything is computed. (A CPU's host computes itself; `Rank` alone can do that.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from ddpsim.engine.program import Loader, Program
from ddpsim.strategies.instructions import Communicate, Compute, Instruction, LoadBatch

__all__ = ["Host", "Script"]


@dataclass(frozen=True)
class Script:
    """The instructions of an iteration, each with its moment: ticks since the last batch came.

    `between_ns`: from each batch to the request for the next one, or to the iteration's end.
    """

    instructions: tuple[tuple[int, Instruction], ...]
    between_ns: tuple[int, ...]

    @classmethod
    def of(cls, step: Iterable[Instruction]) -> Script:
        """A step's instructions, the first of which loads a batch."""
        timed: list[tuple[int, Instruction]] = []
        between_ns: list[int] = []
        now_ns = 0
        for instruction in step:
            if isinstance(instruction, LoadBatch):
                if timed:
                    between_ns.append(now_ns)
                now_ns = 0
            elif isinstance(instruction, Compute | Communicate):
                now_ns += instruction.host_ns
            timed.append((now_ns, instruction))
        return cls(tuple(timed), (*between_ns, now_ns))


@dataclass(frozen=True)
class Host:
    """The scripts of a job's iterations, and when each of their batches is asked for and comes.

    `more`: so many steps, at most, come before the steady ones beside the program's own warm-up:
    as many as it takes until steps are alike, where nothing varies.
    """

    program: Program
    more: int = 0

    @property
    def steps(self) -> int:
        """Of the warm-up, at its longest, and steady ones."""
        return self.program.warmup + self.more + self.program.iterations

    @cached_property
    def scripts(self) -> tuple[Script, ...]:
        """One for each kind of step."""
        return tuple(Script.of(step) for step in self.program.strategy.steps)

    def script(self, number: int) -> Script:
        """Of an iteration, counted from 0."""
        return self.scripts[self.program.kind(number)]

    @cached_property
    def batches_ns(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """(asked for, come) of each batch of each iteration, in ticks."""
        loader = _Batches(self.program.loader) if self.program.loader else None
        now_ns, iterations = 0, []
        for number in range(self.steps):
            batches = []
            for between_ns in self.script(number).between_ns:
                come_ns = loader.take(now_ns) if loader else now_ns
                batches.append((now_ns, come_ns))
                now_ns = come_ns + between_ns
            iterations.append(tuple(batches))
        return tuple(iterations)

    def repeats_from(self, number: int, length_ns: int, *, waited: bool) -> bool:
        """Whether all iterations after this one are like it, if the device takes so long for it.

        `waited`: the device waited for a launch in it. If it never did, launches that come no
        later, seen from the step's start, change nothing; otherwise they must come at the same
        moments. (The proof is by induction over the iterations: the state with which a step
        begins, on the device, is its start alone, as the step before has awaited every collective.)
        """
        here, last = self.batches_ns[number], len(self.batches_ns) - 1
        if not self.program.warmup <= number < last:  # of the last one nothing tells
            return False
        if not self.program.is_uniform or self.script(number) is not self.script(last):
            return False
        for later, batches in enumerate(self.batches_ns[number + 1 :], 1):
            for moments_ns, later_ns in zip(here, batches, strict=True):
                asked, come = (
                    b - a - later * length_ns for a, b in zip(moments_ns, later_ns, strict=True)
                )
                if (asked or come) if waited else come > 0:
                    return False
        return True


class _Batches:
    """A loader makes one batch after the other, and pauses while `capacity` of them wait."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._made_ns = 0
        self._taken_ns: list[int] = []

    def take(self, asked_ns: int) -> int:
        """When the next batch comes that is asked for at `asked_ns`."""
        self._made_ns += self._loader.batch_ns
        if len(self._taken_ns) >= self._loader.capacity:
            self._made_ns = max(self._made_ns, self._taken_ns[-self._loader.capacity])
        self._taken_ns.append(max(asked_ns, self._made_ns))
        return self._taken_ns[-1]
