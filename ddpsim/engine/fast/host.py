"""What the host of a GPU does, and when.

It launches the instructions of the training loop one after the other, ahead of the device. Where it
waits for nothing but the data loader, its clock is its own: all of a job's hosts keep the same
time, which can be told before anything is computed. In `Synchronize` it waits for the device, and
each rank's clock goes on from there. (A CPU's host computes itself; `Rank` alone can do that.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from ddpsim.engine.compiled import CompiledStep
from ddpsim.engine.program import Loader, Program
from ddpsim.engine.request import Request


class Batches:
    """A loader makes one batch after the other, and pauses while `capacity` of them wait.

    Without a loader a batch comes when it is asked for. Moments are integers, or arrays with
    `latest` numpy.maximum, each of its own loader of the same capacity.
    """

    def __init__(self, loader: Loader | None, latest: Callable[[Any, Any], Any] = max) -> None:
        self._loader = loader
        self._latest = latest
        self._made_ns: Any = 0
        self._taken_ns: deque[Any] = deque(maxlen=loader.capacity if loader else 0)

    def take(self, asked_ns: Any) -> Any:
        """When the next batch comes that is asked for at `asked_ns`."""
        loader = self._loader
        if loader is None:
            return asked_ns
        self._made_ns = self._made_ns + loader.batch_ns
        if len(self._taken_ns) == loader.capacity:
            self._made_ns = self._latest(self._made_ns, self._taken_ns[0])
        self._taken_ns.append(self._latest(asked_ns, self._made_ns))
        return self._taken_ns[-1]

    def since(self, now_ns: Any) -> list[Any]:
        """All that later batches depend on, in ticks since `now_ns`."""
        if self._loader is None:
            return []
        return [moment_ns - now_ns for moment_ns in (self._made_ns, *self._taken_ns)]


@dataclass(frozen=True)
class Host:
    """A job's iterations, and when each of their batches is asked for and comes.

    `more`: so many steps, at most, come before the steady ones beside the program's own warm-up:
    as many as it takes until steps are alike, where nothing varies.
    """

    program: Program
    more: int = 0

    @property
    def steps(self) -> int:
        """How many steps there are: of the warm-up, at its longest, and steady ones."""
        return self.program.warmup + self.more + self.program.iterations

    def step(self, number: int) -> CompiledStep:
        """An iteration, counted from 0."""
        return self.program.compiled(number)

    @cached_property
    def batches_ns(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """(asked for, come) of each batch of each iteration, in ticks, by a host's own clock."""
        loader = Batches(self.program.loader)
        now_ns, iterations = 0, []
        for number in range(self.steps):
            batches = []
            for between_ns in self.step(number).between_ns:
                come_ns = loader.take(now_ns)
                batches.append((now_ns, come_ns))
                now_ns = come_ns + between_ns
            iterations.append(tuple(batches))
        return tuple(iterations)

    def goes_on_alike(self, number: int) -> bool:
        """Whether this iteration and all after it have the same instructions."""
        last = self.steps - 1
        if not self.program.warmup <= number < last:  # of the last one nothing tells
            return False
        return self.program.is_uniform and self.step(number) is self.step(last)

    def comes_again(self, number: int, count: int, length_ns: int, *, waited: bool) -> bool:
        """Whether the iterations after this one are like the last `count` ones.

        As for `repeats_from`, where the device takes so long for all of these. A host that waits
        for its device has no clock of its own, that tells.
        """
        first = number + 1 - count
        if first < self.program.warmup or number == self.steps - 1:
            return False
        later = range(number + 1, self.steps)
        return all(self.step(each) is self.step(each - count) for each in later) and (
            self.program.synchronizes
            or all(
                self._launches_alike(place, count, length_ns, waited=waited)
                for place in range(first, number + 1)
            )
        )

    def repeats_from(self, number: int, length_ns: int, *, waited: bool) -> bool:
        """Whether all iterations after this one are like it, if the device takes so long for it.

        Of a host whose clock is its own. `waited`: the device waited for a launch in it. If it
        never did, launches that come no later, seen from the step's start, change nothing;
        otherwise they must come at the same moments. (The proof is by induction over the
        iterations: the state with which a step begins, on the device, is its start alone, as the
        step before has awaited every collective.)
        """
        alike = self.goes_on_alike(number)
        return alike and self._launches_alike(number, 1, length_ns, waited=waited)

    def _launches_alike(self, number: int, every: int, length_ns: int, *, waited: bool) -> bool:
        """Whether this iteration and each that comes so many later launch alike, so long apart."""
        here = self.batches_ns[number]
        for later, batches in enumerate(self.batches_ns[number + every :: every], 1):
            shift_ns = later * length_ns
            for (ask_ns, come_ns), (later_ask_ns, later_come_ns) in zip(here, batches, strict=True):
                late_ns = later_come_ns - come_ns - shift_ns
                if late_ns > 0 or (waited and (late_ns or later_ask_ns - ask_ns != shift_ns)):
                    return False
        return True


class Trial(NamedTuple):
    """A job among those that are simulated together, and its iterations."""

    host: Host
    request: Request
