"""Until when the steps of a trial are simulated: those that come again are like earlier ones."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from ddpsim.cluster.algorithms.max_plus import Ticks
from ddpsim.engine.fast.host import Trial


class Repeats:
    """The steps of one trial so far, as `hear` is told of them where they do not vary.

    All that a step does follows from when each rank begins it, beside the first, and from what
    hosts have launched by then. `warmup`: so many first steps are not steady; `last`: the last that
    is simulated, counted from 0, once it is known, and `repeats`: how often it comes again.
    `cycle_ns`: the lengths of steps that come again and again, once they do. `is_brief`: no more is
    asked then.
    """

    def __init__(self, trial: Trial, *, is_brief: bool = False) -> None:
        self._host, program, self._is_brief = trial.host, trial.host.program, is_brief
        self._waits, self._iterations = program.synchronizes, program.iterations
        self._state: Ticks | None = None  # of hosts and loaders, since the last step's end
        self._ended: dict[bytes, int] = {}  # the step after which ranks stood so to each other
        self._ends_ns: list[int] = []  # of each step, on the first rank
        self._have_waited: list[bool] = []  # by step
        self._since: int | None = None  # the last step that the latest one is like
        self.warmup, self.repeats = self._host.steps - self._iterations, 0
        self.last: int | None = None
        self.cycle_ns: list[int] = []

    def go_to_the_end(self) -> None:
        """No step is like another."""
        self.last = self._host.steps - 1

    def hear(
        self, number: int, lengths_ns: Ticks, ends_ns: Ticks, state: Ticks | None, *, waited: bool
    ) -> None:
        """One more step, [ranks]; `state`: of hosts that wait for their devices, [figures, ranks].

        `waited`: a device, or a collective, for a launch.
        """
        self._have_waited.append(waited)
        self._ends_ns.append(int(ends_ns[0]))
        before, self._state = self._state, state
        length_ns = int(lengths_ns[0])
        if (lengths_ns == length_ns).all() and self._are_alike_from(
            number, length_ns, before, waited=waited
        ):
            self.warmup, self.repeats, self.last = number, self._iterations - 1, number
            self.cycle_ns = [length_ns]
            return
        key = (ends_ns - ends_ns[0]).tobytes() + (b"" if state is None else state.tobytes())
        self._since = self._ended.get(key)
        self._ended[key] = number
        if number + 1 < self.warmup and self._come_again(number):
            self.warmup = number + 1
        is_told = self._is_brief and self.cycle_ns
        if is_told or number + 1 == self.warmup + self._iterations:
            self.last = number

    def _are_alike_from(
        self, number: int, length_ns: int, before: Ticks | None, *, waited: bool
    ) -> bool:
        """Whether all steps after this one are exactly like it, which takes so long on all ranks.

        Where hosts wait for their devices they are, once hosts and loaders stand to these as they
        did one step `before`.
        """
        if not self._waits:
            return self._host.repeats_from(number, length_ns, waited=waited)
        if before is None or self._state is None or not np.array_equal(before, self._state):
            return False
        return self._host.goes_on_alike(number)

    def _come_again(self, number: int) -> bool:
        """Whether steps after this one are like those since an earlier one."""
        if self._since is None:
            return False
        count = number - self._since
        length_ns = self._ends_ns[number] - self._ends_ns[-1 - count]
        waited = any(self._have_waited[-count:])
        if not self._host.comes_again(number, count, length_ns, waited=waited):
            return False
        self.cycle_ns = [b - a for a, b in pairwise(self._ends_ns[-1 - count :])]
        return True
