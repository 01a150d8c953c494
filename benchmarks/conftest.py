"""Every benchmark beside a yardstick that is timed around it: bare SimPy events in this process."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import pytest
from simpy import Environment

YARDSTICK_EVENTS = 100_000
_LOOP = "total = 0\nfor number in range(10_000_000):\n    total += number"
gc.set_threshold(500_000)  # as `ddpsim` sets it
QUICK = bool(os.environ.get("DDPSIM_BENCHMARKS_QUICK"))  # one round of each: does it run at all?


def yardstick_s(timer: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of 100,000 timeouts, each with a callback that appends: SimPy's bare rate."""
    env, seen = Environment(), list[int]()

    def tick(_: Any) -> None:
        seen.append(int(env.now))
        if len(seen) < YARDSTICK_EVENTS:
            env.timeout(1).callbacks.append(tick)

    env.timeout(1).callbacks.append(tick)
    begun = timer()
    env.run()
    return timer() - begun


def loop_s() -> float:
    """CPU seconds in which a module's loop adds ten million integers: a core's own speed.

    Its names are global, which takes three times as long as a function's do.
    """
    begun_s = time.process_time()
    exec(_LOOP, {})
    return time.process_time() - begun_s


@pytest.fixture(scope="session")
def core_loop_s() -> float:
    """Median of five."""
    return median(loop_s() for _ in range(5))


@pytest.fixture
def measure(benchmark: Any, request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Time a function some rounds, with the yardstick in turn; keeps the ratio of the medians.

    Both by the timer of the test's mark `benchmark`, or else by the clock.
    """
    yardsticks: list[float] = []
    mark = request.node.get_closest_marker("benchmark")
    timer = mark.kwargs["timer"] if mark else time.perf_counter

    def timed(function: Callable[[], Any], rounds: int = 7, **known: Any) -> Any:
        def setup() -> None:
            yardsticks.append(yardstick_s(timer))
            gc.collect()

        rounds, warmup = (1, 0) if QUICK else (rounds, 1)
        found = benchmark.pedantic(function, setup=setup, rounds=rounds, warmup_rounds=warmup)
        benchmark.extra_info.update(known)
        return found

    yield timed
    if benchmark.stats:
        bare_s = median(yardsticks)
        benchmark.extra_info["yardstick_s"] = round(bare_s, 4)
        benchmark.extra_info["ratio"] = round(benchmark.stats["median"] / bare_s, 4)
