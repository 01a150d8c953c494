"""All-reduce algorithms: messages over links, a closed form of their time, and their volume.

n ranks, M bytes. What each does: `rings`, `trees` and `exchanges` beside this file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ddpsim.cluster.exchanges import (
    direct_ns,
    direct_schedule,
    halving_doubling_ns,
    halving_doubling_schedule,
    server_ns,
    server_schedule,
)
from ddpsim.cluster.paths import Paths
from ddpsim.cluster.rings import (
    gloo_ns,
    gloo_schedule,
    hierarchical_ns,
    hierarchical_schedule,
    ring_ns,
    ring_schedule,
)
from ddpsim.cluster.schedule import Schedule
from ddpsim.cluster.trees import (
    gather_end_ns,
    gather_ns,
    gather_schedule,
    nvls_end_ns,
    nvls_ns,
    nvls_schedule,
    tree_end_ns,
    tree_ns,
    tree_schedule,
)

__all__ = ["ALGORITHMS", "Algorithm", "duration_ns", "end_ns", "schedule"]


@dataclass(frozen=True)
class Algorithm:
    """`schedule` sends the messages; `closed_form_ns` is its time on links without weak ones.

    `sent_bytes`: what a rank sends of a message, the mean over ranks: theory's volume. `end_ns`:
    when it ends, given when each rank joins, where there is a faster way than each message.
    """

    schedule: Callable[[Paths, int], Schedule]
    closed_form_ns: Callable[[Paths, int], int]
    sent_bytes: Callable[[Paths, int], float]
    end_ns: Callable[[Paths, int, Sequence[int]], int] | None = None


@lru_cache(maxsize=16)
def schedule(algorithm: str, paths: Paths, size_bytes: int) -> Schedule:
    """An all-reduce of `size_bytes` as messages."""
    return ALGORITHMS[algorithm].schedule(paths, size_bytes)


@lru_cache(maxsize=4096)
def duration_ns(algorithm: str, paths: Paths, size_bytes: int) -> int:
    """Its time when all ranks join at once: by the closed form, unless a link is weak."""
    if paths.weak:
        return end_ns(algorithm, paths, size_bytes, [0] * paths.ranks)
    return ALGORITHMS[algorithm].closed_form_ns(paths, size_bytes)


def end_ns(algorithm: str, paths: Paths, size_bytes: int, arrivals_ns: Sequence[int]) -> int:
    """When it ends, given when each rank joins."""
    faster = ALGORITHMS[algorithm].end_ns
    if faster:
        return faster(paths, size_bytes, arrivals_ns)
    return schedule(algorithm, paths, size_bytes).end_ns(arrivals_ns)


def _around(paths: Paths, size_bytes: int) -> float:
    """2(n-1)/n M: every shard but one, twice; of a tree all its n-1 edges, up and down."""
    return 2 * (paths.ranks - 1) / paths.ranks * size_bytes


def _once(_: Paths, size_bytes: int) -> float:
    """M."""
    return size_bytes


def _to_one(paths: Paths, size_bytes: int) -> float:
    """(n-1)/n M: each but one sends the whole once."""
    return (paths.ranks - 1) / paths.ranks * size_bytes


def _folded(paths: Paths, size_bytes: int) -> float:
    """2(p-1)/p M for p ranks, a power of two; 2 M for each rank beyond, there and back."""
    power = 1 << (paths.ranks.bit_length() - 1)
    return (2 * (power - 1) + 2 * (paths.ranks - power)) / paths.ranks * size_bytes


ALGORITHMS: dict[str, Algorithm] = {
    "ring": Algorithm(ring_schedule, ring_ns, _around),
    "gloo_ring": Algorithm(gloo_schedule, gloo_ns, _around),
    "tree": Algorithm(tree_schedule, tree_ns, _around, tree_end_ns),
    "halving_doubling": Algorithm(halving_doubling_schedule, halving_doubling_ns, _folded),
    "hierarchical": Algorithm(hierarchical_schedule, hierarchical_ns, _around),
    "direct": Algorithm(direct_schedule, direct_ns, _around),
    "gather": Algorithm(gather_schedule, gather_ns, _to_one, gather_end_ns),
    "nvls": Algorithm(nvls_schedule, nvls_ns, _once, nvls_end_ns),
    "parameter_server": Algorithm(server_schedule, server_ns, _once),
}
