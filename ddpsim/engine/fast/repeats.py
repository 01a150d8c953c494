"""When steps that do not vary are like earlier ones, and so all after them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ddpsim.cluster.algorithms.max_plus import Ticks
from ddpsim.engine.fast.clocks import Clocks
from ddpsim.engine.fast.trials import Trial

__all__ = ["Repeats"]


class Repeats:
    """The steps of trials so far, as `alike` hears of them.

    All that a step does follows from when each rank begins it, beside the first, and from what
    hosts have launched by then. `cycle_ns`: the mean of some steps that come again and again, once
    `come_again` has found them.
    """

    def __init__(self, trials: Sequence[Trial], clocks: Clocks) -> None:
        self._trials, self._clocks = trials, clocks
        self._program = trials[0].host.program
        self._state: list[Ticks] = []  # of hosts and loaders, since the last step's end
        self._ended: dict[bytes, int] = {}  # the step after which ranks stood so to each other
        self._ends_ns: list[list[int]] = []  # of each step, the first rank's in each trial
        self._have_waited: list[npt.NDArray[np.bool_]] = []  # by step
        self._since: int | None = None  # the last step that the latest one is like
        self.cycle_ns: float | None = None

    def alike(
        self, number: int, lengths: Ticks, ends_ns: Ticks, waited: npt.NDArray[np.bool_]
    ) -> list[bool]:
        """Of each trial whether all iterations after this one are like it."""
        self._have_waited.append(waited.copy())
        self._ends_ns.append([int(end_ns) for end_ns in ends_ns[:, 0]])
        stand = [ends_ns - ends_ns[:, :1]]
        if self._program.synchronizes:
            before, self._state = self._state, self._clocks.since(ends_ns)
            found = self._alike_again(number, lengths, before)
            stand += self._state
        else:
            found = [
                bool((each == each[0]).all())
                and trial.host.repeats_from(number, int(each[0]), waited=bool(has_waited))
                for trial, each, has_waited in zip(self._trials, lengths, waited, strict=True)
            ]
        key = b"".join(each.tobytes() for each in stand)
        self._since = self._ended.get(key)
        self._ended[key] = number
        return found

    def _alike_again(self, number: int, lengths: Ticks, before: Sequence[Ticks]) -> list[bool]:
        """The same where hosts wait for their devices: see `Lane`."""
        lasting = zip(self._trials, lengths, self._state, strict=True)
        return [
            bool((each == each[0]).all())
            and len(before) > i
            and np.array_equal(before[i], state)
            and trial.host.goes_on_alike(number)
            for i, (trial, each, state) in enumerate(lasting)
        ]

    def come_again(self, number: int) -> bool:
        """Whether steps after this one are like those since an earlier one, in all trials."""
        if self._since is None:
            return False
        count = number - self._since
        waited = np.any(self._have_waited[-count:], axis=0)
        lengths_ns = [
            after - before
            for after, before in zip(self._ends_ns[number], self._ends_ns[-1 - count], strict=True)
        ]
        each = zip(self._trials, lengths_ns, waited, strict=True)
        if not all(
            trial.host.comes_again(number, count, length_ns, waited=bool(late))
            for trial, length_ns, late in each
        ):
            return False
        self.cycle_ns = lengths_ns[0] / count
        return True
