"""All-reduces by direct exchange: halving and doubling, every rank to every other, servers.

Costs: a latency and b seconds per byte of one link, n ranks, M bytes.
Source of halving and doubling: Rabenseifner 2004.
"""

from __future__ import annotations

from math import ceil

from ddpsim.cluster.paths import Paths, leaving_ns, step_ns
from ddpsim.cluster.schedule import Schedule, Scheduler
from ddpsim.cluster.topology import Link

__all__ = [
    "direct_ns",
    "direct_schedule",
    "halving_doubling_ns",
    "halving_doubling_schedule",
    "server_ns",
    "server_schedule",
]


def halving_doubling_schedule(paths: Paths, size_bytes: int) -> Schedule:
    """Partners at half the distance swap halves of what is left, then gather the way back.

    Ranks beyond the largest power of two hand their data to a partner first, and get it back last.
    """
    out, n, link = Scheduler(paths.left), paths.ranks, paths.slowest
    power = 1 << (n.bit_length() - 1)
    last: dict[int, list[int]] = {rank: [] for rank in range(n)}
    for extra in range(power, n):
        last[extra - power] = [out.send(extra, extra - power, size_bytes, link)]
    for distance, chunk in _halvings(power, size_bytes):
        swapped = {}
        for target in range(power):
            source = target ^ distance
            after = [*last[source], *last[target]]
            swapped[target] = [out.send(source, target, chunk, link, after=after)]
        last |= swapped
    for extra in range(power, n):
        partner = extra - power
        out.send(partner, extra, size_bytes, link, after=last[partner])
    return out.schedule(n)


def _halvings(power: int, size_bytes: int) -> list[tuple[int, int]]:
    """(distance, bytes) of each swap: halves, quarters ... and back."""
    down = []
    distance, parts = power // 2, 2
    while distance:
        down.append((distance, ceil(size_bytes / parts)))
        distance, parts = distance // 2, 2 * parts
    return [*down, *reversed(down)]


def halving_doubling_ns(paths: Paths, size_bytes: int) -> int:
    """2 log2(n) a + 2(n-1)/n M b; where n is no power of two, 2 a + 2 M b more."""
    n, link = paths.ranks, paths.slowest
    power = 1 << (n.bit_length() - 1)
    swaps = sum(step_ns(link, chunk) for _, chunk in _halvings(power, size_bytes))
    return swaps + (2 * step_ns(link, size_bytes) if n > power else 0)


def direct_schedule(paths: Paths, size_bytes: int) -> Schedule:
    """Every rank sends every other its shard, one after another; then the sums likewise."""
    out, n, link = Scheduler(paths.left), paths.ranks, paths.slowest
    chunk = ceil(size_bytes / n)
    into: dict[int, list[int]] = {}
    for _ in range(2):
        busy: dict[int, list[int]] = {rank: [] for rank in range(n)}
        received: dict[int, list[int]] = {rank: [] for rank in range(n)}
        for shift in range(1, n):
            for source in range(n):
                target = (source + shift) % n
                after = into.get(source, [])
                place = out.send(source, target, chunk, link, after=after, behind=busy[source])
                busy[source] = [place]
                received[target].append(place)
        into = received
    return out.schedule(n)


def direct_ns(paths: Paths, size_bytes: int) -> int:
    """2 a + 2(n-1)/n M b."""
    n, link = paths.ranks, paths.slowest
    chunk = ceil(size_bytes / n)
    return 2 * ((n - 2) * leaving_ns(link, chunk) + step_ns(link, chunk))


def server_schedule(paths: Paths, size_bytes: int) -> Schedule:
    """Every rank sends each server its shard of the gradients; sums come back as they went.

    The GPUs of a node send at once and share its network; nodes (on one node: GPUs) take turns, so
    that a server serves one at a time, and a node sends to one server at a time.
    """
    out, n, (groups, members, link) = Scheduler(paths.left), paths.ranks, _senders(paths)
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
                    waits = [*busy, *behind[rank]]
                    sent.append(out.send(*ends, shard, link, after=after, behind=waits))
                    behind[rank] = [sent[-1]]
                behind[server] = sent
                if not back:
                    pushed[server] += sent
        behind = {end: [] for end in behind}
    return out.schedule(n)


def _senders(paths: Paths) -> tuple[int, int, Link]:
    """How many send in turn, how many ranks each is, and the link that each rank has."""
    if paths.nodes > 1:
        return paths.nodes, paths.gpus_per_node, paths.flat
    return paths.ranks, 1, paths.inside


def server_ns(paths: Paths, size_bytes: int) -> int:
    """2 (a + n M / servers b): it grows with the ranks. Of servers there are no more than turns."""
    groups, _, link = _senders(paths)
    shard = ceil(size_bytes / paths.servers)
    return 2 * ((groups - 1) * leaving_ns(link, shard) + step_ns(link, shard))
