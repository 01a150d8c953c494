"""Collectives that go round rings: NCCL's, gloo's in segments, and rings of rings.

Costs: a latency and b seconds per byte of one link, n ranks, M bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from typing import TYPE_CHECKING

from ddpsim.cluster.algorithms.schedule import Schedule, Scheduler, joined_ring_ns
from ddpsim.cluster.topology.paths import Ends, Link, Paths, leaving_ns, step_ns

if TYPE_CHECKING:
    from ddpsim.cluster.algorithms.max_plus import Ticks

_GLOO_SEGMENT_BYTES = 2**20  # gloo/allreduce.h


def _ring_steps(
    out: Scheduler,
    ring: Sequence[int],
    steps: int,
    size_bytes: int,
    link: Callable[[Ends], Link],
    before: dict[int, list[int]],
) -> dict[int, list[int]]:
    """`steps` messages from each member to the next; returns the last that each waits for."""
    last = {rank: before.get(rank, []) for rank in ring}
    for step in range(steps):
        sent = {}
        for i, target in enumerate(ring):
            source, hop = ring[i - 1], link((ring[i - 1], target))
            after, behind = last[source], last[target]
            if not step:  # what came before has to be there
                after, behind = [*after, *behind], []
            place = out.send(source, target, size_bytes, hop, after=after, behind=behind)
            sent[target] = [place]
        last = sent
    return last


def ring_schedule(paths: Paths, size_bytes: int) -> Schedule:
    """2(n-1) steps of a chunk of M/n; a node's whole network serves the one hop that leaves it."""
    out, n, links = Scheduler(), paths.ranks, ring(paths)
    chunk = ceil(size_bytes / n)
    _ring_steps(out, range(n), 2 * (n - 1), chunk, lambda ends: links[ends[1] % len(links)], {})
    return out.schedule(n)


def _hops(paths: Paths) -> tuple[Link, ...]:
    """The links that lead to the ranks of a usual node from their left neighbours.

    A hop between nodes gets min(intra, inter), as the ring enters and leaves a node through all
    its NICs (`inter`) but each GPU sends no faster than it can.
    """
    inside = (paths.within(),) * paths.gpus_per_node if paths.intra else ()
    return (paths.across(1), *inside[1:]) if paths.nodes > 1 else inside


def _hop(paths: Paths, ends: Ends) -> Link:
    """The ring's link between two neighbours."""
    return paths.within(ends) if paths.are_together(ends) else paths.across(1, ends)


def ring(paths: Paths) -> tuple[Link, ...]:
    """The link that leads to each rank from its left neighbour in the ring of all ranks.

    Where no link is unlike the others all nodes are alike, and these are the links of one.
    """
    hops, n = _hops(paths), paths.ranks
    if paths.is_even:
        return hops
    links = [hop for size in paths.sizes for hop in hops[:size]]
    ranks = {end for end in paths.touched if end < n}
    for rank in ranks | {(rank + 1) % n for rank in ranks}:
        links[rank] = _hop(paths, ((rank - 1) % n, rank))
    return tuple(links)


def ring_hops_ns(paths: Paths, size_bytes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """How long a chunk keeps the link to each rank busy, and its latency beyond that.

    Of the ranks of one node, where all nodes are alike.
    """
    chunk, before = ceil(size_bytes / paths.ranks), None
    busy_ns, latency_ns = list[int](), list[int]()
    for link in ring(paths):
        if link is not before:
            before, leaves_ns = link, leaving_ns(link, chunk)
            arrives_ns = step_ns(link, chunk)
        busy_ns.append(leaves_ns)
        latency_ns.append(arrives_ns - leaves_ns)
    return tuple(busy_ns), tuple(latency_ns)


def ring_ns(paths: Paths, size_bytes: int) -> int:
    """Over equal links 2(n-1) a + 2(n-1)/n M b."""
    return joined_ring_ns(*ring_hops_ns(paths, size_bytes), 2 * (paths.ranks - 1))


def gloo_schedule(paths: Paths, size_bytes: int) -> Schedule:
    """gloo's ring: reduce-scatter, then all-gather, in segments of at most 1 MiB, two in flight.

    A segment goes once the one before the last has arrived, and what it passes on is there. The
    time in which a thread adds is not in it: a profile knows it (`ddpsim.cluster.fitted.laws`).
    """
    return _gloo_phases(paths, *_segments(paths.ranks, size_bytes), phases=2)


def gloo_all_gather_schedule(paths: Paths, size_bytes: int) -> Schedule:
    """gloo's all-gather: a ring on which shards go in halves, two in flight (gloo/allgather.cc)."""
    return _gloo_phases(paths, *_halves(paths.ranks, size_bytes), phases=1)


def _gloo_phases(paths: Paths, each: int, segment: int, phases: int) -> Schedule:
    """So many times around the ring, `each` segments for every rank's share."""
    out, n = Scheduler(), paths.ranks
    ends = [(rank, (rank - 1) % n) for rank in range(n)]
    links = [_slowest_hop(paths, hop) for hop in ends]
    count = each * (n - 1)  # of a phase, by each rank
    began: dict[int, list[int]] = {rank: [] for rank in range(n)}
    for _ in range(phases):
        sent: dict[int, list[int]] = {rank: [] for rank in range(n)}
        for j in range(count):
            for rank in range(n):
                received = sent[(rank + 1) % n][j - each : j - each + 1] if j >= each else []
                before = sent[rank][j - 2 : j - 1] if j >= 2 else []
                after = [*began[rank], *received, *before]
                behind = sent[rank][-1:]
                place = out.send(*ends[rank], segment, links[rank], after=after, behind=behind)
                sent[rank].append(place)
        began = {rank: [sent[rank][-1], sent[(rank + 1) % n][-1]] for rank in range(n)}
    return out.schedule(n)


def gloo_ends_ns(paths: Paths, size_bytes: int, joined_ns: Ticks) -> Ticks:
    """When it ends, given when each rank joins, [..., ranks] to [...]: segment by segment."""
    return _gloo_phases_ends_ns(paths, _segments(paths.ranks, size_bytes), 2, joined_ns)


def gloo_all_gather_ends_ns(paths: Paths, size_bytes: int, joined_ns: Ticks) -> Ticks:
    """When an all-gather ends, given when each rank joins, [..., ranks] to [...]."""
    return _gloo_phases_ends_ns(paths, _halves(paths.ranks, size_bytes), 1, joined_ns)


def _gloo_phases_ends_ns(
    paths: Paths, segments: tuple[int, int], phases: int, joined_ns: Ticks
) -> Ticks:
    """All ranks' next segments at once, each to its left neighbour."""
    import numpy as np  # noqa: PLC0415 -- slow to import, and closed forms do without

    n, (each, segment) = paths.ranks, segments
    links = [_slowest_hop(paths)] * n
    for rank in {end + more for end in paths.touched if end < n for more in (0, 1)}:
        links[rank % n] = _slowest_hop(paths, (rank % n, (rank - 1) % n))
    occupied_ns, taken_ns = (
        np.array([of(link, segment) for link in links], dtype=np.float64)
        for of in (leaving_ns, step_ns)
    )
    begun_ns = np.maximum(joined_ns, np.roll(joined_ns, 1, axis=-1))
    for _ in range(phases):
        sent_ns: deque[Ticks] = deque(maxlen=each)  # of the last segments, when each has arrived
        left_ns = begun_ns
        for _ in range(each * (n - 1)):
            start_ns = left_ns if len(sent_ns) < 2 else np.maximum(left_ns, sent_ns[-2])
            if len(sent_ns) == each:
                start_ns = np.maximum(start_ns, np.roll(sent_ns[0], -1, axis=-1))
            left_ns = start_ns + occupied_ns
            sent_ns.append(start_ns + taken_ns)
        begun_ns = np.maximum(sent_ns[-1], np.roll(sent_ns[-1], -1, axis=-1))
    return np.asarray(begun_ns.max(axis=-1))


def _slowest_hop(paths: Paths, ends: Ends | None = None) -> Link:
    """The longest latency and least bandwidth of a ring's hops; taken for all (an approximation).

    But for hops that are slower still.
    """
    this_hop = () if ends is None else (_hop(paths, ends),)
    hops: tuple[Link, ...] = (*_hops(paths), *this_hop)
    slowest = min(link.bandwidth_bytes_per_s for link in hops)
    return Link(max(link.latency_s for link in hops), slowest)


def _segments(ranks: int, size_bytes: int) -> tuple[int, int]:
    """How many segments a rank's share has, two at least, and their bytes (gloo/allreduce.cc)."""
    count = max(ceil(size_bytes / _GLOO_SEGMENT_BYTES), 2 * ranks)
    each = ceil(count / ranks)
    return each, ceil(size_bytes / (each * ranks))


def _halves(ranks: int, size_bytes: int) -> tuple[int, int]:
    """A shard of an all-gather goes in two halves: how many, and bytes of the longer one."""
    return 2, ceil(ceil(size_bytes / ranks) / 2)


def gloo_ns(paths: Paths, size_bytes: int) -> int:
    """Twice K segments of s bytes, two in flight: K max(s b, (a + s b) / 2) and a wait of a."""
    return 2 * _phase_ns(paths, *_segments(paths.ranks, size_bytes))


def gloo_all_gather_ns(paths: Paths, size_bytes: int) -> int:
    """Time of once around the ring, with 2(n-1) segments of M/2n bytes."""
    return _phase_ns(paths, *_halves(paths.ranks, size_bytes))


def _phase_ns(paths: Paths, each: int, segment: int) -> int:
    link = _slowest_hop(paths)
    takes, leaves = step_ns(link, segment), leaving_ns(link, segment)
    pairs, odd = divmod(each * (paths.ranks - 1) - 1, 2)
    return pairs * max(2 * leaves, takes) + odd * leaves + takes


def hierarchical_schedule(
    paths: Paths, size_bytes: int, *, scatters: bool = True, gathers: bool = True
) -> Schedule:
    """Reduce-scatter in each node, all-reduce of each shard over the nodes, all-gather in each.

    A reduce-scatter alone is the first half of it, an all-gather alone the second.
    """
    out, (m, g) = Scheduler(), (paths.nodes, paths.gpus_per_node)
    shard = ceil(size_bytes / g)
    nodes = [range(node * g, (node + 1) * g) for node in range(m)]
    rails = [range(gpu, m * g, g) for gpu in range(g)]
    rails_link = partial(paths.across, g)
    last: dict[int, list[int]] = {}
    for node in nodes if scatters else ():
        last |= _ring_steps(out, node, g - 1, shard, paths.within, last)
    for rail in rails:
        steps = (scatters + gathers) * (m - 1)
        last |= _ring_steps(out, rail, steps, ceil(shard / m), rails_link, last)
    for node in nodes if gathers else ():
        last |= _ring_steps(out, node, g - 1, shard, paths.within, last)
    return out.schedule(paths.ranks)


def hierarchical_ends_ns(
    paths: Paths,
    size_bytes: int,
    joined_ns: Ticks,
    *,
    scatters: bool = True,
    gathers: bool = True,
) -> Ticks:
    """When it ends, given when each rank joins, [..., ranks] to [...]: rings after rings."""
    import numpy as np  # noqa: PLC0415 -- slow to import, and closed forms do without

    from ddpsim.cluster.algorithms.max_plus import by_steps, ring_ends_ns  # noqa: PLC0415

    m, g = paths.nodes, paths.gpus_per_node
    shard = ceil(size_bytes / g)
    now_ns = joined_ns.reshape(*joined_ns.shape[:-1], m, g)
    if g > 1:
        busy_ns, latency_ns = (np.reshape(ns, (m, g)) for ns in _hops_ns(paths, shard, inside=True))
    if g > 1 and scatters:
        now_ns = by_steps(busy_ns, latency_ns, g - 1, now_ns)
    if m > 1:
        rails_busy_ns, rails_latency_ns = _hops_ns(paths, ceil(shard / m), inside=False)
        ends_ns = [
            ring_ends_ns(
                tuple(rails_busy_ns[gpu::g]),
                tuple(rails_latency_ns[gpu::g]),
                (scatters + gathers) * (m - 1),
                now_ns[..., gpu],
            )[0]
            for gpu in range(g)
        ]
        now_ns = np.stack(ends_ns, axis=-1)
    if g > 1 and gathers:
        now_ns = by_steps(busy_ns, latency_ns, g - 1, now_ns)
    return np.asarray(now_ns.max(axis=(-2, -1)))


def _hops_ns(paths: Paths, size_bytes: int, *, inside: bool) -> tuple[list[int], list[int]]:
    """How long a message to each rank keeps its link busy in a ring of its node, or of its rail.

    And its latency beyond that.
    """
    n, g = paths.ranks, paths.gpus_per_node
    links = [paths.direct(inside=inside)] * n

    def left_of(rank: int) -> int:
        first = rank - rank % g
        return first + (rank - first - 1) % g if inside else (rank - g) % n

    ranks = {end for end in paths.touched if end < n}
    for rank in ranks if inside else ranks | {(rank + g) % n for rank in ranks}:
        links[rank] = paths.direct((left_of(rank), rank), inside=inside)
    busy_ns = [leaving_ns(link, size_bytes) for link in links]
    taken_ns = [step_ns(link, size_bytes) for link in links]
    return busy_ns, [taken - busy for taken, busy in zip(taken_ns, busy_ns, strict=True)]


def hierarchical_ns(paths: Paths, size_bytes: int, turns: int = 2) -> int:
    """2(g-1)(a_i + M/g b_i) + 2(m-1)(a_e + M/(g m) b_e), b_e of a node's network over its GPUs.

    A reduce-scatter or an all-gather alone has one of the two `turns`.
    """
    m, g = paths.nodes, paths.gpus_per_node
    shard = ceil(size_bytes / g)
    inside = (g - 1) * step_ns(paths.within(), shard) if g > 1 else 0
    outside = (m - 1) * step_ns(paths.across(g), ceil(shard / m)) if m > 1 else 0
    return turns * (inside + outside)
