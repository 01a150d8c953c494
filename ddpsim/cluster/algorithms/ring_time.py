"""How long a ring takes when all its ranks join at once, without arrays.

The longest ways of `ddpsim.cluster.algorithms.max_plus`, from one period of the ring.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from operator import add

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
    n, after_first, largest = len(busy_ns), steps - 1, max(busy_ns)
    busy, latency = 3 * busy_ns, 3 * latency_ns  # beside whole turns no way moves on by two
    moved = [0, *accumulate(map(add, latency, busy[1:]))]
    turn, few = moved[n], range(min(after_first, 2 * n - 2) + 1)
    if turn > n * largest:
        few = range(max(0, after_first - n + 1), after_first + 1)
    turns, rest = divmod(few.start, n)
    longest = 0
    for first in range(n):
        begun = busy[first] + turns * turn - moved[first]
        passed = largest if turns else max(busy[first : first + rest + 1])
        for end, count in enumerate(few, first + rest):
            passed = max(passed, busy[end])
            way = begun + moved[end] + (after_first - count) * passed + latency[end]
            longest = max(longest, way)
    return longest
