"""Algorithms of collectives: messages over links, a closed form of their time, and their volume.

n ranks, M bytes. What each does: `rings`, `trees` and `direct` beside this file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from ddpsim.cluster.algorithms import pipeline
from ddpsim.cluster.algorithms.direct import (
    direct_ends_ns,
    direct_ns,
    direct_schedule,
    halving_doubling_ends_ns,
    halving_doubling_ns,
    halving_doubling_schedule,
    server_ends_ns,
    server_ns,
    server_schedule,
)
from ddpsim.cluster.algorithms.rings import (
    gloo_all_gather_ends_ns,
    gloo_all_gather_ns,
    gloo_all_gather_schedule,
    gloo_ends_ns,
    gloo_ns,
    gloo_schedule,
    hierarchical_ends_ns,
    hierarchical_ns,
    hierarchical_schedule,
    ring_ns,
    ring_schedule,
)
from ddpsim.cluster.algorithms.schedule import Schedule
from ddpsim.cluster.algorithms.trees import both_switched, both_trees, gathering
from ddpsim.cluster.topology.paths import Paths

if TYPE_CHECKING:
    from ddpsim.cluster.algorithms.max_plus import Ticks


@dataclass(frozen=True)
class Algorithm:
    """`schedule` sends the messages; `closed_form_ns` is its time where all links of a
    kind are alike.

    `sent_bytes`: what a rank sends of a message, the mean over ranks: theory's volume. `ends_ns`:
    when it ends, given when each rank joins ([..., ranks] to [...]), where there is a faster way
    than each message.
    """

    schedule: Callable[[Paths, int], Schedule]
    closed_form_ns: Callable[[Paths, int], int]
    sent_bytes: Callable[[Paths, int], float]
    ends_ns: Callable[[Paths, int, Ticks], Ticks] | None = None


def _piped(
    pipelines: Callable[[Paths], tuple[pipeline.Pipeline, ...]],
    sent_bytes: Callable[[Paths, int], float],
) -> Algorithm:
    """An algorithm whose pipelines carry equal parts of the bytes, side by side."""
    return Algorithm(
        lambda paths, size: pipeline.side_by_side(pipelines(paths), paths, size),
        lambda paths, size: pipeline.duration_ns(pipelines(paths), paths, size),
        sent_bytes,
        lambda paths, size, joined: pipeline.ends_ns(pipelines(paths), paths, size, joined),
    )


@lru_cache(maxsize=16)
def schedule(algorithm: str, paths: Paths, size_bytes: int) -> Schedule:
    """A collective of `size_bytes` as messages: an all-reduce, unless its name says another."""
    return ALGORITHMS[algorithm].schedule(paths, size_bytes)


@lru_cache(maxsize=4096)
def duration_ns(algorithm: str, paths: Paths, size_bytes: int) -> int:
    """Its time when all ranks join at once: by the closed form, unless links differ."""
    if not paths.is_even:
        import numpy as np  # noqa: PLC0415 -- slow to import, and closed forms do without

        return int(ends_ns(algorithm, paths, size_bytes, np.zeros(paths.ranks)))
    return ALGORITHMS[algorithm].closed_form_ns(paths, size_bytes)


def has_recurrence(algorithm: str) -> bool:
    """Whether `ends_ns` has a faster way than each message."""
    return ALGORITHMS[algorithm].ends_ns is not None


def ends_ns(algorithm: str, paths: Paths, size_bytes: int, joined_ns: Ticks) -> Ticks:
    """When it ends, given when each rank joins: [..., ranks] to [...]."""
    import numpy as np  # noqa: PLC0415 -- slow to import, and closed forms do without

    faster = ALGORITHMS[algorithm].ends_ns
    if faster:
        return faster(paths, size_bytes, joined_ns)
    messages = schedule(algorithm, paths, size_bytes)
    rows = joined_ns.reshape(-1, paths.ranks).astype(np.int64).tolist()
    ends = [float(messages.end_ns(row)) for row in rows]
    return np.array(ends).reshape(joined_ns.shape[:-1])


def _around(paths: Paths, size_bytes: int) -> float:
    """2(n-1)/n M: every shard but one, twice; of a tree all its n-1 edges, up and down."""
    return 2 * (paths.ranks - 1) / paths.ranks * size_bytes


def _once(_: Paths, size_bytes: int) -> float:
    """M."""
    return size_bytes


def _to_one(paths: Paths, size_bytes: int) -> float:
    """(n-1)/n M: each but one sends the whole once, or each sends every shard but one."""
    return (paths.ranks - 1) / paths.ranks * size_bytes


def _folded(paths: Paths, size_bytes: int) -> float:
    """2(p-1)/p M for p ranks, a power of two; 2 M for each rank beyond, there and back."""
    power = 1 << (paths.ranks.bit_length() - 1)
    return (2 * (power - 1) + 2 * (paths.ranks - power)) / paths.ranks * size_bytes


ALGORITHMS: dict[str, Algorithm] = {
    "ring": Algorithm(ring_schedule, ring_ns, _around),
    "gloo_ring": Algorithm(gloo_schedule, gloo_ns, _around, gloo_ends_ns),
    "gloo_all_gather": Algorithm(
        gloo_all_gather_schedule, gloo_all_gather_ns, _to_one, gloo_all_gather_ends_ns
    ),
    "tree": _piped(both_trees, _around),
    "halving_doubling": Algorithm(
        halving_doubling_schedule, halving_doubling_ns, _folded, halving_doubling_ends_ns
    ),
    "hierarchical": Algorithm(
        hierarchical_schedule, hierarchical_ns, _around, hierarchical_ends_ns
    ),
    "hierarchical_scatter": Algorithm(
        partial(hierarchical_schedule, gathers=False),
        partial(hierarchical_ns, turns=1),
        _to_one,
        partial(hierarchical_ends_ns, gathers=False),
    ),
    "hierarchical_gather": Algorithm(
        partial(hierarchical_schedule, scatters=False),
        partial(hierarchical_ns, turns=1),
        _to_one,
        partial(hierarchical_ends_ns, scatters=False),
    ),
    "direct": Algorithm(direct_schedule, direct_ns, _around, direct_ends_ns),
    "gather": _piped(gathering, _to_one),
    "nvls": _piped(both_switched, _once),
    "parameter_server": Algorithm(server_schedule, server_ns, _once, server_ends_ns),
}
