"""All-reduces by direct exchange: halving and doubling, every rank to every other, servers.

Costs: a latency and b seconds per byte of one link, n ranks, M bytes.
Source of halving and doubling: Rabenseifner 2004.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import ceil
from typing import TYPE_CHECKING

from ddpsim.cluster.algorithms.schedule import Schedule, Scheduler
from ddpsim.cluster.topology.paths import Ends, Link, Paths, leaving_ns, step_ns

if TYPE_CHECKING:
    from numpy import int64
    from numpy.typing import NDArray

    from ddpsim.cluster.algorithms.max_plus import Ticks

    Integers = NDArray[int64]


def halving_doubling_schedule(paths: Paths, size_bytes: int) -> Schedule:
    """Partners at half the distance swap halves of what is left, then gather the way back.

    Ranks beyond the largest power of two hand their data to a partner first, and get it back last.
    """
    out, n = Scheduler(), paths.ranks
    last: dict[int, list[int]] = {rank: [] for rank in range(n)}
    for pairs, chunk in _swaps(n, size_bytes):
        swapped = {}
        for source, target in pairs:
            link, after = _link(paths, (source, target)), [*last[source], *last[target]]
            swapped[target] = [out.send(source, target, chunk, link, after=after)]
        last |= swapped
    return out.schedule(n)


def _link(paths: Paths, ends: Ends) -> Link:
    """Inside the node where both are in one, else their part of its network."""
    return paths.direct(ends, inside=paths.are_together(ends))


def _swaps(ranks: int, size_bytes: int) -> Iterator[tuple[list[Ends], int]]:
    """(source, target) of each message of a round, and its bytes."""
    power = 1 << (ranks.bit_length() - 1)
    extra = [(rank, rank - power) for rank in range(power, ranks)]
    if extra:
        yield extra, size_bytes
    for distance, chunk in _halvings(power, size_bytes):
        yield [(rank ^ distance, rank) for rank in range(power)], chunk
    if extra:
        yield [(partner, rank) for rank, partner in extra], size_bytes


def _halvings(power: int, size_bytes: int) -> list[tuple[int, int]]:
    """(distance, bytes) of each swap: halves, quarters ... and back."""
    down = []
    distance, parts = power // 2, 2
    while distance:
        down.append((distance, ceil(size_bytes / parts)))
        distance, parts = distance // 2, 2 * parts
    return [*down, *reversed(down)]


def halving_doubling_ends_ns(paths: Paths, size_bytes: int, joined_ns: Ticks) -> Ticks:
    """When it ends, given when each rank joins, [..., ranks] to [...]: round by round."""
    import numpy as np  # noqa: PLC0415 -- slow to import, and most closed forms do without

    usual = {inside: paths.direct(inside=inside) for inside in _kinds(paths)}
    now_ns = np.array(joined_ns)
    for pairs, chunk in _swaps(paths.ranks, size_bytes):
        source, target = np.array(pairs).T
        is_inside = source // paths.gpus_per_node == target // paths.gpus_per_node
        of_kind_ns = {inside: step_ns(link, chunk) for inside, link in usual.items()}
        taken_ns = np.where(is_inside, of_kind_ns.get(True, 0), of_kind_ns.get(False, 0))
        for i in np.flatnonzero(np.isin(pairs, list(paths.touched)).any(axis=1)):
            taken_ns[i] = step_ns(_link(paths, pairs[i]), chunk)
        begun_ns = np.maximum(now_ns[..., source], now_ns[..., target])
        now_ns[..., target] = begun_ns + taken_ns
    return np.asarray(now_ns.max(axis=-1))


def _kinds(paths: Paths) -> list[bool]:
    """Whether there are messages that leave their node, and such that do not."""
    return [*([False] if paths.nodes > 1 else []), *([True] if paths.gpus_per_node > 1 else [])]


def halving_doubling_ns(paths: Paths, size_bytes: int) -> int:
    """2 log2(n) a + 2(n-1)/n M b; where n is no power of two, 2 a + 2 M b more.

    a and b of the network for distances of a node and more; where partners at one distance are in
    one node or not, round by round.
    """
    n, g = paths.ranks, paths.gpus_per_node
    if paths.nodes > 1 and g & (g - 1):
        import numpy as np  # noqa: PLC0415 -- see above

        return int(halving_doubling_ends_ns(paths, size_bytes, np.zeros(n)))
    power = 1 << (n.bit_length() - 1)
    rounds = [*_halvings(power, size_bytes), *[(power, size_bytes)] * (2 if n > power else 0)]
    return sum(
        step_ns(paths.direct(inside=paths.nodes == 1 or distance < g), chunk)
        for distance, chunk in rounds
    )


def direct_schedule(paths: Paths, size_bytes: int) -> Schedule:
    """Every rank sends every other its shard, one after another; then the sums likewise.

    Those of its own node come first, then one node after the other, so that all are as far at any
    time: no rank gets two shards at once, and a node's ranks leave it together.
    """
    out, n = Scheduler(), paths.ranks
    chunk = ceil(size_bytes / n)
    rounds = [[(ends, _link(paths, ends)) for ends in pairs] for pairs in _shifts(paths)]
    into: dict[int, list[int]] = {rank: [] for rank in range(n)}
    sent: dict[int, list[int]] = {rank: [] for rank in range(n)}
    got: dict[int, list[int]] = {rank: [] for rank in range(n)}
    for _ in range(2):
        received: dict[int, list[int]] = {rank: [] for rank in range(n)}
        for pairs in rounds:
            for (source, target), link in pairs:
                waits = [*sent[source], *got[target]]
                after = into[source]
                place = out.send(source, target, chunk, link, after=after, behind=waits)
                sent[source], got[target] = [place], [place]
                received[target].append(place)
        into = received
    return out.schedule(n)


def direct_ends_ns(paths: Paths, size_bytes: int, joined_ns: Ticks) -> Ticks:
    """When it ends, given when each rank joins, [..., ranks] to [...]: round by round."""
    import numpy as np  # noqa: PLC0415 -- see above

    rounds = _rounds(paths, ceil(size_bytes / paths.ranks))
    ready_ns, ends_ns = joined_ns, joined_ns.max(axis=-1)
    sent_ns, got_ns = np.array(joined_ns), np.array(joined_ns)  # the last message has left
    for _ in range(2):
        arrived_ns = np.array(joined_ns)
        for targets, occupied_ns, taken_ns in rounds:
            begun_ns = np.maximum(np.maximum(ready_ns, sent_ns), got_ns[..., targets])
            sent_ns = begun_ns + occupied_ns
            got_ns[..., targets] = sent_ns
            arrives_ns = np.maximum(arrived_ns[..., targets], begun_ns + taken_ns)
            arrived_ns[..., targets] = arrives_ns
        ready_ns, ends_ns = arrived_ns, np.maximum(ends_ns, arrived_ns.max(axis=-1))
    return np.asarray(ends_ns)


@lru_cache(maxsize=16)
def _rounds(paths: Paths, chunk: int) -> list[tuple[Integers, Ticks, Ticks]]:
    """The rounds: to whom every rank sends, how long its link is busy, and the message takes."""
    import numpy as np  # noqa: PLC0415 -- see above

    times_of: dict[Link, tuple[int, int]] = {}

    def times_ns(link: Link) -> tuple[int, int]:
        if link not in times_of:
            times_of[link] = leaving_ns(link, chunk), step_ns(link, chunk)
        return times_of[link]

    nodes, gpus = np.divmod(np.arange(paths.ranks), paths.gpus_per_node)
    is_touched = np.isin(np.arange(paths.ranks), list(paths.touched))
    rounds = []
    for far, shift in _turns(paths):
        targets = (nodes + far) % paths.nodes * paths.gpus_per_node
        targets += (gpus + shift) % paths.gpus_per_node
        usual = np.array(times_ns(paths.direct(inside=not far)), dtype=np.float64)
        both_ns = np.repeat(usual[:, np.newaxis], paths.ranks, axis=1)
        for source in np.flatnonzero(is_touched | is_touched[targets]).tolist():
            both_ns[:, source] = times_ns(_link(paths, (source, int(targets[source]))))
        rounds.append((targets, both_ns[0], both_ns[1]))
    return rounds


def _turns(paths: Paths) -> Iterator[tuple[int, int]]:
    """How many nodes and GPUs further on each rank sends, round by round."""
    for far in range(paths.nodes):
        for shift in range(0 if far else 1, paths.gpus_per_node):
            yield far, shift


def _shifts(paths: Paths) -> Iterator[list[Ends]]:
    """Who sends to whom in each round."""
    m, g = paths.nodes, paths.gpus_per_node
    for far, shift in _turns(paths):
        yield [
            (node * g + gpu, (node + far) % m * g + (gpu + shift) % g)
            for node in range(m)
            for gpu in range(g)
        ]


def direct_ns(paths: Paths, size_bytes: int) -> int:
    """2 a + 2(n-1)/n M b: all that are sent inside the node, then all that leave it."""
    n, g, chunk = paths.ranks, paths.gpus_per_node, ceil(size_bytes / paths.ranks)
    left_ns, phase_ns = 0, 0
    for inside in reversed(_kinds(paths)):
        link = paths.direct(inside=inside)
        left_ns += (g - 1 if inside else n - g) * leaving_ns(link, chunk)
        phase_ns = max(phase_ns, left_ns - leaving_ns(link, chunk) + step_ns(link, chunk))
    return 2 * phase_ns


def server_schedule(paths: Paths, size_bytes: int) -> Schedule:
    """Every rank sends each server its shard of the gradients; sums come back as they went.

    The GPUs of a node send at once and share its network; nodes (on one node: GPUs) take turns, so
    that a server serves one at a time, and a node sends to one server at a time.
    """
    out, n, (groups, members) = Scheduler(), paths.ranks, _senders(paths)
    shard = ceil(size_bytes / paths.servers)
    behind: dict[int, list[int]] = {end: [] for end in range(n + paths.servers)}
    pushed: dict[int, list[int]] = {server: [] for server in range(n, n + paths.servers)}
    for back in (False, True):
        for turn in range(groups):
            for server in range(n, n + paths.servers):
                group = (server - n + turn) % groups
                ranks = range(group * members, (group + 1) * members)
                busy, sent = [*behind[server]], []
                for rank in ranks:
                    ends = (server, rank) if back else (rank, server)
                    after = pushed[server] if back else []
                    link = paths.direct(ends, inside=paths.nodes == 1)
                    waits = [*busy, *behind[rank]]
                    sent.append(out.send(*ends, shard, link, after=after, behind=waits))
                    behind[rank] = [sent[-1]]
                behind[server] = sent
                if not back:
                    pushed[server] += sent
        behind = {end: [] for end in behind}
    return out.schedule(n)


def server_ends_ns(paths: Paths, size_bytes: int, joined_ns: Ticks) -> Ticks:
    """When it ends, given when each rank joins, [..., ranks] to [...]: turn by turn.

    Of servers there are no more than turns, so that each serves others at a time.
    """
    import numpy as np  # noqa: PLC0415 -- see above

    servers, (groups, members) = paths.servers, _senders(paths)
    joined_ns = joined_ns.reshape(*joined_ns.shape[:-1], groups, members)
    came_ns = np.zeros((*joined_ns.shape[:-2], servers, 1))  # all pushes to a server
    for back in (False, True):
        occupied_ns, taken_ns = _served_ns(paths, ceil(size_bytes / servers), back=back)
        ready_ns, free_ns = came_ns, np.zeros_like(came_ns)
        sent_ns = np.zeros_like(joined_ns)
        for turn in range(groups):
            served = (np.arange(servers) + turn) % groups
            each = np.arange(servers), served
            begun_ns = np.maximum(joined_ns[..., served, :], sent_ns[..., served, :])
            begun_ns = np.maximum(begun_ns, free_ns)
            if back:
                begun_ns = np.maximum(begun_ns, ready_ns)
            sent_ns[..., served, :] = begun_ns + occupied_ns[each]
            free_ns = sent_ns[..., served, :].max(axis=-1, keepdims=True)
            came_ns = np.maximum(came_ns, (begun_ns + taken_ns[each]).max(-1, keepdims=True))
    return np.asarray(came_ns.max(axis=(-2, -1)))


def _served_ns(paths: Paths, shard: int, *, back: bool) -> tuple[Ticks, Ticks]:
    """How long a shard keeps its link busy, and takes, [servers, groups, members]."""
    import numpy as np  # noqa: PLC0415 -- see above

    n, inside = paths.ranks, paths.nodes == 1
    usual = paths.direct(inside=inside)
    shape = (paths.servers, *_senders(paths))
    occupied_ns, taken_ns = (
        np.full((paths.servers, n), float(of(usual, shard))) for of in (leaving_ns, step_ns)
    )
    for server in range(paths.servers):
        is_touched = n + server in paths.touched
        for rank in range(n) if is_touched else paths.touched & set(range(n)):
            ends = (n + server, rank) if back else (rank, n + server)
            link = paths.direct(ends, inside=inside)
            occupied_ns[server, rank] = leaving_ns(link, shard)
            taken_ns[server, rank] = step_ns(link, shard)
    return occupied_ns.reshape(shape), taken_ns.reshape(shape)


def _senders(paths: Paths) -> tuple[int, int]:
    """How many send in turn, and how many ranks each is."""
    return (paths.nodes, paths.gpus_per_node) if paths.nodes > 1 else (paths.ranks, 1)


def server_ns(paths: Paths, size_bytes: int) -> int:
    """2 (a + n M / servers b): it grows with the ranks. Of servers there are no more than turns."""
    groups, _ = _senders(paths)
    link, shard = paths.direct(inside=paths.nodes == 1), ceil(size_bytes / paths.servers)
    return 2 * ((groups - 1) * leaving_ns(link, shard) + step_ns(link, shard))
