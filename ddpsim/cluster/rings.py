"""All-reduces that go round rings: NCCL's, gloo's in segments, and rings of rings.

Costs: a latency and b seconds per byte of one link, n ranks, M bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from typing import TYPE_CHECKING

from ddpsim.cluster.paths import Paths, leaving_ns, step_ns
from ddpsim.cluster.schedule import Schedule, Scheduler
from ddpsim.cluster.topology import Link

if TYPE_CHECKING:
    from ddpsim.cluster.longest_ways import Ticks

__all__ = [
    "gloo_ns",
    "gloo_schedule",
    "hierarchical_ends_ns",
    "hierarchical_ns",
    "hierarchical_schedule",
    "ring",
    "ring_ns",
    "ring_schedule",
    "ring_step_ns",
]

_GLOO_SEGMENT_BYTES = 2**20  # gloo/allreduce.h


def _ring_steps(
    out: Scheduler,
    ring: Sequence[int],
    steps: int,
    size_bytes: int,
    link: Callable[[int, int], Link],
    before: dict[int, list[int]],
) -> dict[int, list[int]]:
    """`steps` messages from each member to the next; returns the last that each waits for."""
    last = {rank: before.get(rank, []) for rank in ring}
    for _ in range(steps):
        sent = {}
        for i, target in enumerate(ring):
            source = ring[i - 1]
            after = [*last[source], *last[target]]
            sent[target] = [out.send(source, target, size_bytes, link(source, target), after=after)]
        last = sent
    return last


def ring_schedule(paths: Paths, size_bytes: int) -> Schedule:
    """2(n-1) steps of a chunk of M/n; a node's whole network serves the one hop that leaves it."""
    out, n, links = Scheduler(paths.left), paths.ranks, _hops(paths)
    chunk = ceil(size_bytes / n)
    _ring_steps(out, range(n), 2 * (n - 1), chunk, lambda _, to: links[to % len(links)], {})
    return out.schedule(n)


def _hops(paths: Paths) -> tuple[Link, ...]:
    """The links that lead to the ranks of one node from their left neighbours, but for weak ones.

    A hop between nodes gets min(intra, inter), as the ring enters and leaves a node through all
    its NICs (`inter`) but each GPU sends no faster than it can.
    """
    inside = (paths.inside,) * paths.gpus_per_node if paths.intra else ()
    return (_between_nodes(paths), *inside[1:]) if paths.nodes > 1 else inside


def _between_nodes(paths: Paths) -> Link:
    network, intra = paths.network, paths.intra
    if intra is None:
        return network
    rate = min(network.bandwidth_bytes_per_s, intra.bandwidth_bytes_per_s)
    return Link(network.latency_s, rate)


def ring(paths: Paths) -> tuple[Link, ...]:
    """The link that leads to each rank from its left neighbour in the ring of all ranks.

    Where no link is weak all nodes are alike, and these are the links of one.
    """
    hops, n = _hops(paths), paths.ranks
    if not paths.weak:
        return hops
    links = list(hops * paths.nodes)
    for rank, *_ in paths.weak:
        links[rank] = links[rank].widened(paths.left((rank - 1) % n, rank))
    return tuple(links)


def ring_step_ns(paths: Paths, size_bytes: int) -> tuple[int, ...]:
    """What each rank needs to get a chunk from its left neighbour: of one node if all are alike."""
    links, chunk = ring(paths), ceil(size_bytes / paths.ranks)
    taken_ns = {link: step_ns(link, chunk) for link in set(links)}
    return tuple(taken_ns[link] for link in links)


def ring_ns(paths: Paths, size_bytes: int) -> int:
    """2(n-1) a + 2(n-1)/n M b."""
    return 2 * (paths.ranks - 1) * max(ring_step_ns(paths, size_bytes))


def gloo_schedule(paths: Paths, size_bytes: int) -> Schedule:
    """gloo's ring: reduce-scatter, then all-gather, in segments of at most 1 MiB, two in flight.

    A segment goes once the one before the last has arrived, and what it passes on is there. The
    time in which a thread adds is not in it: a profile knows it (`ddpsim.cluster.fitted`).
    """
    out, n = Scheduler(paths.left), paths.ranks
    each, segment = _segments(n, size_bytes)
    link = _slowest_hop(paths, segment)
    count = each * (n - 1)  # of a phase, by each rank
    began: dict[int, list[int]] = {rank: [] for rank in range(n)}
    for _ in range(2):
        sent: dict[int, list[int]] = {rank: [] for rank in range(n)}
        for j in range(count):
            for rank in range(n):
                received = sent[(rank + 1) % n][j - each : j - each + 1] if j >= each else []
                before = sent[rank][j - 2 : j - 1] if j >= 2 else []
                after = [*began[rank], *received, *before]
                behind = sent[rank][-1:]
                place = out.send(
                    rank, rank - 1 if rank else n - 1, segment, link, after=after, behind=behind
                )
                sent[rank].append(place)
        began = {rank: [sent[rank][-1], sent[(rank + 1) % n][-1]] for rank in range(n)}
    return out.schedule(n)


def _slowest_hop(paths: Paths, size_bytes: int) -> Link:
    """Of a ring; taken for all its hops (an approximation)."""
    return max(_hops(paths), key=lambda link: step_ns(link, size_bytes))


def _segments(ranks: int, size_bytes: int) -> tuple[int, int]:
    """How many segments a rank's share has, two at least, and their bytes (gloo/allreduce.cc)."""
    count = max(ceil(size_bytes / _GLOO_SEGMENT_BYTES), 2 * ranks)
    each = ceil(count / ranks)
    return each, ceil(size_bytes / (each * ranks))


def gloo_ns(paths: Paths, size_bytes: int) -> int:
    """Twice K segments of s bytes, two in flight: K max(s b, (a + s b) / 2) and a wait of a."""
    n = paths.ranks
    each, segment = _segments(n, size_bytes)
    link = _slowest_hop(paths, segment)
    takes, leaves = step_ns(link, segment), leaving_ns(link, segment)
    pairs, odd = divmod(each * (n - 1) - 1, 2)
    return 2 * (pairs * max(2 * leaves, takes) + odd * leaves + takes)


def hierarchical_schedule(paths: Paths, size_bytes: int) -> Schedule:
    """Reduce-scatter in each node, all-reduce of each shard over the nodes, all-gather in each."""
    out, (m, g) = Scheduler(paths.left), (paths.nodes, paths.gpus_per_node)
    shard = ceil(size_bytes / g)
    nodes = [range(node * g, (node + 1) * g) for node in range(m)]
    rails = [range(gpu, m * g, g) for gpu in range(g)]
    last: dict[int, list[int]] = {}
    for node in nodes:
        last |= _ring_steps(out, node, g - 1, shard, lambda *_: paths.inside, last)
    for rail in rails:
        last |= _ring_steps(out, rail, 2 * (m - 1), ceil(shard / m), lambda *_: paths.flat, last)
    for node in nodes:
        last |= _ring_steps(out, node, g - 1, shard, lambda *_: paths.inside, last)
    return out.schedule(paths.ranks)


def hierarchical_ends_ns(paths: Paths, size_bytes: int, joined_ns: Ticks) -> Ticks:
    """When it ends, given when each rank joins, [..., ranks] to [...]: rings after rings."""
    import numpy as np  # noqa: PLC0415 -- slow to import, and closed forms do without

    from ddpsim.cluster.longest_ways import by_steps, ring_ends_ns  # noqa: PLC0415

    m, g = paths.nodes, paths.gpus_per_node
    shard = ceil(size_bytes / g)
    now_ns = joined_ns.reshape(*joined_ns.shape[:-1], m, g)
    if g > 1:
        inside_ns = np.reshape(_steps_ns(paths, paths.inside, shard, g), (m, g))
        now_ns = by_steps(inside_ns, g - 1, now_ns)
    if m > 1:
        rails_ns = np.reshape(_steps_ns(paths, paths.flat, ceil(shard / m), 1), (m, g)).T
        now_ns = np.stack(
            [
                ring_ends_ns(tuple(rails_ns[gpu].tolist()), 2 * (m - 1), now_ns[..., gpu])[0]
                for gpu in range(g)
            ],
            axis=-1,
        )
    if g > 1:
        now_ns = by_steps(inside_ns, g - 1, now_ns)
    return np.asarray(now_ns.max(axis=(-2, -1)))


def _steps_ns(paths: Paths, link: Link, size_bytes: int, ring: int) -> list[int]:
    """What each rank needs to get a message over such a link, but for weak ones.

    From its left neighbour in rings of so many neighbours; 1: from the node before.
    """
    taken = [step_ns(link, size_bytes)] * paths.ranks
    for rank, *_ in paths.weak:
        start = rank - rank % ring
        left = start + (rank - start - 1) % ring if ring > 1 else rank - paths.gpus_per_node
        weak = link.widened(paths.left(left % paths.ranks, rank))
        taken[rank] = step_ns(weak, size_bytes)
    return taken


def hierarchical_ns(paths: Paths, size_bytes: int) -> int:
    """2(g-1)(a_i + M/g b_i) + 2(m-1)(a_e + M/(g m) b_e), b_e of a node's network over its GPUs."""
    m, g = paths.nodes, paths.gpus_per_node
    shard = ceil(size_bytes / g)
    inside = 2 * (g - 1) * step_ns(paths.inside, shard) if g > 1 else 0
    return inside + (2 * (m - 1) * step_ns(paths.flat, ceil(shard / m)) if m > 1 else 0)
