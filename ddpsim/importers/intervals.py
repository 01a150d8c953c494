"""Times during which something happens, merged, and how much of another time they take."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import accumulate


class Intervals:
    """A union of intervals (start, end)."""

    def __init__(self, intervals: Iterable[tuple[float, float]]) -> None:
        self.starts: list[float] = []
        self.ends: list[float] = []
        for start, end in sorted(intervals):
            if self.ends and start <= self.ends[-1]:
                self.ends[-1] = max(self.ends[-1], end)
            elif end > start:
                self.starts.append(start)
                self.ends.append(end)
        lengths = (end - start for start, end in zip(self.starts, self.ends, strict=True))
        self._before = [0.0, *accumulate(lengths)]

    @property
    def length(self) -> float:
        """How long they take together."""
        return self._before[-1]

    def __contains__(self, time: float) -> bool:
        index = bisect_right(self.starts, time) - 1
        return index >= 0 and time < self.ends[index]

    def beginning_at(self, start: float) -> float:
        """How long the one is that begins then; 0 where none does."""
        index = bisect_right(self.starts, start) - 1
        return self.ends[index] - start if index >= 0 and self.starts[index] == start else 0.0

    def beginning_within(self, start: float, end: float) -> Iterable[tuple[float, float]]:
        """Those that begin from `start` on and before `end`."""
        those = slice(bisect_left(self.starts, start), bisect_left(self.starts, end))
        return zip(self.starts[those], self.ends[those], strict=True)

    def within(self, start: float, end: float) -> float:
        """How much of the time from `start` to `end` they take."""
        return max(0.0, self._until(end) - self._until(start)) if end > start else 0.0

    def _until(self, time: float) -> float:
        index = bisect_right(self.starts, time) - 1
        if index < 0:
            return 0.0
        return self._before[index] + min(time, self.ends[index]) - self.starts[index]
