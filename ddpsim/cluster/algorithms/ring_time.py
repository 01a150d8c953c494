"""How long a ring takes when all its ranks join at once, without arrays.

The longest ways of `ddpsim.cluster.algorithms.max_plus`, from one period of the ring.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

__all__ = ["duration_ns"]

_LONGEST_PERIOD = 64  # beyond it arrays are faster


@lru_cache(maxsize=4096)
def duration_ns(busy_ns: tuple[int, ...], latency_ns: tuple[int, ...], steps: int) -> int:
    """Until the last rank has its last chunk."""
    if len(set(zip(busy_ns, latency_ns, strict=True))) == 1:
        return steps * (busy_ns[0] + latency_ns[0])
    if len(busy_ns) > _LONGEST_PERIOD:
        import numpy as np  # noqa: PLC0415 -- slow to import, and most rings do without

        from ddpsim.cluster.algorithms.max_plus import ring_ends_ns  # noqa: PLC0415

        return int(ring_ends_ns(busy_ns, latency_ns, steps, np.zeros(len(busy_ns)))[0].max())
    return _longest_way_ns(busy_ns, latency_ns, steps)


def _longest_way_ns(busy_ns: tuple[int, ...], latency_ns: tuple[int, ...], steps: int) -> int:
    """The first chunk, then ways that move little where links wait for bytes, else stay little."""
    n, after_first = len(busy_ns), steps - 1
    twice = range(2 * n)
    moves = [latency_ns[i % n] + busy_ns[(i + 1) % n] for i in twice]
    moved = [0, *accumulate(moves)]
    turn, largest = moved[n], max(busy_ns)
    few = range(min(after_first, 2 * n - 2) + 1)
    if turn > n * largest:
        few = range(max(0, after_first - n + 1), after_first + 1)
    longest = 0
    for first in range(n):
        for count in few:
            turns, rest = divmod(count, n)
            way = turns * turn + moved[first + rest] - moved[first]
            passed = largest if count >= n - 1 else _largest_of(busy_ns, first, count)
            last = latency_ns[(first + count) % n]
            longest = max(longest, busy_ns[first] + way + (after_first - count) * passed + last)
    return longest


def _largest_of(busy_ns: tuple[int, ...], first: int, count: int) -> int:
    """Of the link to the first rank and of so many after it."""
    return max(busy_ns[(first + i) % len(busy_ns)] for i in range(count + 1))
