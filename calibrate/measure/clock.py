"""Time: CUDA events on a GPU, `time.perf_counter` on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

Mark = float | torch.cuda.Event
_CYCLES_PER_S = 3e9  # no GPU's clock is faster


class Lap(NamedTuple):
    """From `start` to `end` the same thing was done `times` times."""

    start: Mark
    end: Mark
    times: int = 1


class Clock:
    """Marks points of a device's work; a mark costs no wait, reading one waits for its work."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"

    def mark(self) -> Mark:
        """The point that the work so far reaches on the current stream."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, start: Mark, end: Mark) -> float:
        """Seconds from one mark to the other."""
        if isinstance(start, float) or isinstance(end, float):
            return float(end) - float(start)  # type: ignore[arg-type]
        start.synchronize()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3

    def run_ahead(self, seconds: float) -> None:
        """Keep a GPU busy for so long or longer, while its host launches what comes next.

        So that what is timed on it begins and goes on without waiting for Python.
        """
        if self._on_gpu:
            torch.cuda._sleep(int(seconds * _CYCLES_PER_S))  # type: ignore[no-untyped-call]  # noqa: SLF001

    def reach(self, mark: Mark) -> None:
        """Wait until the work before a mark is done."""
        if not isinstance(mark, float):
            mark.synchronize()

    def finish(self) -> None:
        """Wait until the work of the current stream is done."""
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()

    def lap(self, work: Callable[[], object], times: int = 1) -> Lap:
        """Do the work, which does the same thing so many times."""
        start = self.mark()
        work()
        return Lap(start, self.mark(), times)

    def read(self, lap: Lap) -> float:
        """Seconds of one of the things that a lap did."""
        return self.seconds(lap.start, lap.end) / lap.times
