"""All-reduce algorithms: each as messages over links, and as a closed form of their time.

Ranks are numbered node by node. `Paths` says what an algorithm may use; each takes the part of a
link that its own messages leave it, so that a schedule never promises more than the wire has.
Costs in the docstrings: a latency and b seconds per byte of one link, n ranks, M bytes.
Sources: Rabenseifner 2004 (halving-doubling), Sanders, Speck, Traff 2009 (two trees),
nccl src/graph/trees.cc (which trees), src/device/all_reduce.h (what a tree and NVLS send).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

from ddpsim.cluster.schedule import Message, Schedule, Scheduler
from ddpsim.cluster.topology import Link, ring_links
from ddpsim.units import to_ns

__all__ = ["ALGORITHMS", "Algorithm", "Paths", "duration_ns", "ring_step_ns", "schedule"]

_GLOO_SEGMENT_BYTES = 2**20  # gloo/allreduce.h
# assumed sizes of a pipeline's chunks, all channels together: up to 16 as small as the first, then
# as large as the second (NCCL: 24 channels x 128 to 512 KiB)
LEAST_CHUNK_BYTES, LARGEST_CHUNK_BYTES, USUAL_CHUNKS = 65_536, 8 * 2**20, 16


@dataclass(frozen=True)
class Paths:
    """Where an all-reduce may run: `intra` of one GPU in its node, `inter` of a node's network.

    `switch`: one GPU's link to a switch that reduces (NVLS), at the rate of the message itself.
    A layout of one node needs no `inter`, one GPU per node no `intra`. `servers` are those of a
    parameter server, each with a link like a node's (of one node: like a GPU's). `weak`: ranks with
    the part of its bandwidth that is left of whatever link leads to each.
    """

    nodes: int
    gpus_per_node: int
    intra: Link | None
    inter: Link | None
    switch: Link | None = None
    servers: int = 1
    weak: tuple[tuple[int, float], ...] = ()

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.nodes * self.gpus_per_node

    @property
    def inside(self) -> Link:
        """Between GPUs of one node; raises ValueError where none is known."""
        if self.intra is None:
            raise ValueError("a node of several GPUs needs intra_node links")
        return self.intra

    @property
    def network(self) -> Link:
        """Of a node to the others; raises ValueError where none is known."""
        if self.inter is None:
            raise ValueError("several nodes need inter_node links")
        return self.inter

    @property
    def flat(self) -> Link:
        """Of one rank to one in another node, when all ranks of its node send there at once."""
        return _part(self.network, self.gpus_per_node)

    def stretched(self, factor: float) -> Paths:
        """The same where everything takes `factor` times as long."""

        def slower(link: Link | None) -> Link | None:
            if link is None:
                return None
            return Link(link.latency_s * factor, link.bandwidth_bytes_per_s / factor)

        return replace(
            self, intra=slower(self.intra), inter=slower(self.inter), switch=slower(self.switch)
        )

    @property
    def slowest(self) -> Link:
        """What limits algorithms that do not know nodes."""
        return self.flat if self.nodes > 1 else self.inside


@dataclass(frozen=True)
class Algorithm:
    """`schedule` sends the messages; `closed_form_ns` is its time on links without weak ones.

    `sent_bytes`: what a rank sends of a message, the mean over ranks: theory's volume.
    """

    schedule: Callable[[Paths, int], Schedule]
    closed_form_ns: Callable[[Paths, int], int]
    sent_bytes: Callable[[Paths, int], float]


def schedule(algorithm: str, paths: Paths, size_bytes: int) -> Schedule:
    """An all-reduce of `size_bytes` as messages."""
    return ALGORITHMS[algorithm].schedule(paths, size_bytes)


@lru_cache(maxsize=4096)
def duration_ns(algorithm: str, paths: Paths, size_bytes: int) -> int:
    """Its time when all ranks join at once: by the closed form, unless a link is weak."""
    if paths.weak:
        return schedule(algorithm, paths, size_bytes).end_ns([0] * paths.ranks)
    return ALGORITHMS[algorithm].closed_form_ns(paths, size_bytes)


def _around(paths: Paths, size_bytes: int) -> float:
    """2(n-1)/n M: every shard but one, twice; of a tree all its n-1 edges, up and down."""
    return 2 * (paths.ranks - 1) / paths.ranks * size_bytes


def _once(_: Paths, size_bytes: int) -> float:
    """M."""
    return size_bytes


def _folded(paths: Paths, size_bytes: int) -> float:
    """2(p-1)/p M for p ranks, a power of two; 2 M for each rank beyond, there and back."""
    power = 1 << (paths.ranks.bit_length() - 1)
    return (2 * (power - 1) + 2 * (paths.ranks - power)) / paths.ranks * size_bytes


def _part(link: Link, flows: float) -> Link:
    """What one of so many equal flows has of a link."""
    return replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / flows)


def _step_ns(link: Link, size_bytes: int) -> int:
    return to_ns(link.latency_s + size_bytes / link.bandwidth_bytes_per_s)


# --- rings -------------------------------------------------------------------------------------


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


def _ring_schedule(paths: Paths, size_bytes: int) -> Schedule:
    """2(n-1) steps of a chunk of M/n; a node's whole network serves the one hop that leaves it."""
    out, n, links = Scheduler(dict(paths.weak)), paths.ranks, _ring(paths)
    _ring_steps(out, range(n), 2 * (n - 1), ceil(size_bytes / n), lambda _, to: links[to], {})
    return out.schedule(n)


def _ring(paths: Paths) -> tuple[Link, ...]:
    return ring_links(paths.nodes, paths.gpus_per_node, paths.intra, paths.inter)


def ring_step_ns(paths: Paths, size_bytes: int) -> tuple[int, ...]:
    """What each rank needs to get a chunk from its left neighbour in the ring of all ranks."""
    chunk, left = ceil(size_bytes / paths.ranks), dict(paths.weak)
    return tuple(
        to_ns(link.latency_s + chunk / (link.bandwidth_bytes_per_s * left.get(rank, 1.0)))
        for rank, link in enumerate(_ring(paths))
    )


def _ring_ns(paths: Paths, size_bytes: int) -> int:
    """2(n-1) a + 2(n-1)/n M b."""
    return 2 * (paths.ranks - 1) * max(ring_step_ns(paths, size_bytes))


def _gloo_schedule(paths: Paths, size_bytes: int) -> Schedule:
    """gloo's ring: reduce-scatter, then all-gather, in segments of at most 1 MiB, two in flight.

    A segment goes once the one before the last has arrived, and what it passes on is there. The
    time in which a thread adds is not in it: a profile knows it (`ddpsim.cluster.fitted`).
    """
    out, n = Scheduler(dict(paths.weak)), paths.ranks
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
    return max(_ring(paths), key=lambda link: _step_ns(link, size_bytes))


def _segments(ranks: int, size_bytes: int) -> tuple[int, int]:
    """How many segments a rank's share has, two at least, and their bytes (gloo/allreduce.cc)."""
    count = max(ceil(size_bytes / _GLOO_SEGMENT_BYTES), 2 * ranks)
    each = ceil(count / ranks)
    return each, ceil(size_bytes / (each * ranks))


def _gloo_ns(paths: Paths, size_bytes: int) -> int:
    """Twice K segments of s bytes, two in flight: K max(s b, (a + s b) / 2) and a wait of a."""
    n = paths.ranks
    each, segment = _segments(n, size_bytes)
    link = _slowest_hop(paths, segment)
    takes, leaves = _step_ns(link, segment), _leaving_ns(link, segment)
    pairs, odd = divmod(each * (n - 1) - 1, 2)
    return 2 * (pairs * max(2 * leaves, takes) + odd * leaves + takes)


def _hierarchical_schedule(paths: Paths, size_bytes: int) -> Schedule:
    """Reduce-scatter in each node, all-reduce of each shard over the nodes, all-gather in each."""
    out, (m, g) = Scheduler(dict(paths.weak)), (paths.nodes, paths.gpus_per_node)
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


def _hierarchical_ns(paths: Paths, size_bytes: int) -> int:
    """2(g-1)(a_i + M/g b_i) + 2(m-1)(a_e + M/(g m) b_e), b_e of a node's network over its GPUs."""
    m, g = paths.nodes, paths.gpus_per_node
    shard = ceil(size_bytes / g)
    inside = 2 * (g - 1) * _step_ns(paths.inside, shard) if g > 1 else 0
    return inside + (2 * (m - 1) * _step_ns(paths.flat, ceil(shard / m)) if m > 1 else 0)


# --- halving and doubling, direct ---------------------------------------------------------------


def _halving_doubling_schedule(paths: Paths, size_bytes: int) -> Schedule:
    """Partners at half the distance swap halves of what is left, then gather the way back.

    Ranks beyond the largest power of two hand their data to a partner first, and get it back last.
    """
    out, n, link = Scheduler(dict(paths.weak)), paths.ranks, paths.slowest
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


def _halving_doubling_ns(paths: Paths, size_bytes: int) -> int:
    """2 log2(n) a + 2(n-1)/n M b; where n is no power of two, 2 a + 2 M b more."""
    n, link = paths.ranks, paths.slowest
    power = 1 << (n.bit_length() - 1)
    swaps = sum(_step_ns(link, chunk) for _, chunk in _halvings(power, size_bytes))
    return swaps + (2 * _step_ns(link, size_bytes) if n > power else 0)


def _direct_schedule(paths: Paths, size_bytes: int) -> Schedule:
    """Every rank sends every other its shard, one after another; then the sums likewise."""
    out, n, link = Scheduler(dict(paths.weak)), paths.ranks, paths.slowest
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


def _direct_ns(paths: Paths, size_bytes: int) -> int:
    """2 a + 2(n-1)/n M b."""
    n, link = paths.ranks, paths.slowest
    chunk = ceil(size_bytes / n)
    return 2 * ((n - 2) * _leaving_ns(link, chunk) + _step_ns(link, chunk))


def _leaving_ns(link: Link, size_bytes: int) -> int:
    return to_ns(size_bytes / link.bandwidth_bytes_per_s)


# --- trees and switches that reduce ----------------------------------------------------------


@dataclass(frozen=True)
class _Edge:
    """One hop that every chunk takes; `after` are the edges that bring its sender what it sends."""

    source: int
    target: int
    link: Link
    after: tuple[int, ...]


class _Pipeline:
    """Edges over which one half of the bytes flows in chunks: up to a root, and down again."""

    def __init__(self) -> None:
        self.edges: list[_Edge] = []

    def add(self, source: int, target: int, link: Link, after: Sequence[int]) -> list[int]:
        """An edge; returns its place, as what later edges wait for."""
        self.edges.append(_Edge(source, target, link, tuple(after)))
        return [len(self.edges) - 1]

    def over_nodes(
        self, paths: Paths, tree: int, heads: Sequence[int], ready: Sequence[list[int]]
    ) -> list[list[int]]:
        """Up one of the two trees of nodes and down; `ready` and the result are by node.

        An edge has the part of its nodes' networks that the edges of both trees leave it.
        """
        trees = _two_trees(paths.nodes)
        parent, flows = trees[tree], _flows(trees)
        brought = [list(edges) for edges in ready]
        climb = _leaves_first(parent)
        for node in climb[:-1]:
            link = _part(paths.network, max(flows[node], flows[parent[node]]))
            brought[parent[node]] += self.add(heads[node], heads[parent[node]], link, brought[node])
        for node in reversed(climb[:-1]):
            up = parent[node]
            link = _part(paths.network, max(flows[node], flows[up]))
            brought[node] = self.add(heads[up], heads[node], link, brought[up])
        return brought

    def schedule(self, paths: Paths, size_bytes: int) -> Schedule:
        """Each chunk goes over all edges; on an edge chunks follow each other."""
        out, (count, chunk) = Scheduler(dict(paths.weak)), _chunks(size_bytes)
        for number in range(count):
            base = number * len(self.edges)
            for edge in self.edges:
                behind = [len(out.messages) - len(self.edges)] if number else []
                after = [base + i for i in edge.after]
                out.send(edge.source, edge.target, chunk, edge.link, after=after, behind=behind)
        return out.schedule(paths.ranks)

    def closed_form_ns(self, size_bytes: int) -> int:
        """The first chunk's longest way, then each further one behind the slowest edge on a way.

        Exact, as chunks are equal: they wait for each other at the slowest edge so far, and
        leave it at that pace.
        """
        count, chunk = _chunks(size_bytes)
        # by edge: pairs of (when the first chunk has arrived, pace of the ones behind it)
        ways: list[set[tuple[int, int]]] = []
        for edge in self.edges:
            takes, leaves = _step_ns(edge.link, chunk), _leaving_ns(edge.link, chunk)
            before = {way for i in edge.after for way in ways[i]} or {(0, 0)}
            ways.append(_longest({(end + takes, max(pace, leaves)) for end, pace in before}))
        return max(end + (count - 1) * pace for edge in ways for end, pace in edge)


def _longest(ways: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """Those that no other way is both later and slower than."""
    kept: set[tuple[int, int]] = set()
    for end, pace in sorted(ways, reverse=True):
        if all(pace > other for _, other in kept):
            kept.add((end, pace))
    return kept


def _chunks(size_bytes: int) -> tuple[int, int]:
    """How many chunks of how many bytes a message is cut into."""
    usual = min(USUAL_CHUNKS, max(1, size_bytes // LEAST_CHUNK_BYTES))
    count = max(usual, ceil(size_bytes / LARGEST_CHUNK_BYTES))
    return count, ceil(size_bytes / count)


def _halves(
    pipelines: Callable[[Paths], Sequence[_Pipeline]],
) -> tuple[Callable[[Paths, int], Schedule], Callable[[Paths, int], int]]:
    """Schedule and closed form of two pipelines side by side, each carrying half of the bytes."""

    def both(paths: Paths, size_bytes: int) -> Schedule:
        half = ceil(size_bytes / 2)
        first, second = (p.schedule(paths, half).messages for p in pipelines(paths))
        return Schedule(paths.ranks, (*first, *(_moved(m, len(first)) for m in second)))

    def longest_ns(paths: Paths, size_bytes: int) -> int:
        return max(p.closed_form_ns(ceil(size_bytes / 2)) for p in pipelines(paths))

    return both, longest_ns


def _moved(message: Message, places: int) -> Message:
    return replace(
        message,
        after=tuple(places + i for i in message.after),
        behind=tuple(places + i for i in message.behind),
    )


@lru_cache(maxsize=64)
def _trees(paths: Paths) -> tuple[_Pipeline, ...]:
    """Sums flow up to the root and the result down, half of the bytes in each of two trees.

    In a node GPUs are a chain that ends at its first. Every node is a leaf in one of the trees.
    About 2 log2(n) a + 2 M b.
    """
    return tuple(_tree(paths, tree) for tree in (0, 1))


def _tree(paths: Paths, tree: int) -> _Pipeline:
    pipe, g = _Pipeline(), paths.gpus_per_node
    heads = range(0, paths.ranks, g)
    ready: list[list[int]] = []
    for head in heads:
        summed: list[int] = []
        for gpu in range(head + g - 1, head, -1):
            summed = pipe.add(gpu, gpu - 1, _chain(paths), summed)
        ready.append(summed)
    brought = pipe.over_nodes(paths, tree, heads, ready) if paths.nodes > 1 else ready
    for head, result in zip(heads, brought, strict=True):
        last = result
        for gpu in range(head, head + g - 1):
            last = pipe.add(gpu, gpu + 1, _chain(paths), last)
    return pipe


def _chain(paths: Paths) -> Link:
    """A GPU's link serves both trees, up and down."""
    return _part(paths.inside, 4)


@lru_cache(maxsize=64)
def _switches(paths: Paths) -> tuple[_Pipeline, ...]:
    """GPUs send to their node's switch, which sums and sends back: about 2 a + M b.

    Over several nodes the sums go up and down two trees of nodes (NVLS tree).
    """
    return tuple(_switched(paths, tree) for tree in (0, 1))


def _switched(paths: Paths, tree: int) -> _Pipeline:
    if paths.switch is None:
        raise ValueError("NVLS needs a switch that reduces")
    pipe, n, g = _Pipeline(), paths.ranks, paths.gpus_per_node
    link = _part(replace(paths.switch, latency_s=paths.switch.latency_s / 2), 2)
    heads = range(n, n + paths.nodes)
    ready = [
        [
            place
            for gpu in range(node * g, (node + 1) * g)
            for place in pipe.add(gpu, head, link, ())
        ]
        for node, head in enumerate(heads)
    ]
    brought = pipe.over_nodes(paths, tree, heads, ready) if paths.nodes > 1 else ready
    for node, head in enumerate(heads):
        for gpu in range(node * g, (node + 1) * g):
            pipe.add(head, gpu, link, brought[node])
    return pipe


def _flows(trees: Sequence[Sequence[int]]) -> list[int]:
    """How many edges leave each node, up and down, in all trees."""
    leaving = [0] * len(trees[0])
    for parent in trees:
        for node, up in enumerate(parent):
            if up >= 0:
                leaving[node] += 1
                leaving[up] += 1
    return leaving


def _leaves_first(parent: Sequence[int]) -> list[int]:
    """Nodes in an order in which each precedes its parent; the root is the last."""

    def depth(node: int) -> int:
        return 0 if parent[node] < 0 else 1 + depth(parent[node])

    return sorted(range(len(parent)), key=lambda node: (-depth(node), node))


@lru_cache(maxsize=64)
def _two_trees(nodes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Parents in each tree, -1 at its root: the second is the first mirrored (even) or shifted."""
    first = [_parent(node, nodes) for node in range(nodes)]
    second = [-1] * nodes
    for node, up in enumerate(first):
        if up < 0:
            continue
        if nodes % 2 == 0:
            second[nodes - 1 - node] = nodes - 1 - up
        else:
            second[(node + 1) % nodes] = (up + 1) % nodes
    return tuple(first), tuple(second)


def _parent(node: int, nodes: int) -> int:
    """In the binary tree whose leaves are the odd nodes (nccl src/graph/trees.cc)."""
    if node == 0:
        return -1
    bit = node & -node
    up = (node ^ bit) | (bit << 1)
    return up if up < nodes else node ^ bit


# --- parameter server ----------------------------------------------------------------------------


def _server_schedule(paths: Paths, size_bytes: int) -> Schedule:
    """Every rank sends each server its shard of the gradients; sums come back as they went.

    A server's link takes one message after another: it carries n M / servers each way.
    """
    out, n, link = Scheduler(dict(paths.weak)), paths.ranks, _server_link(paths)
    shard = ceil(size_bytes / paths.servers)
    for server in range(n, n + paths.servers):
        pushed: list[int] = []
        for rank in range(n):
            pushed.append(out.send(rank, server, shard, link, behind=pushed[-1:]))
        behind: list[int] = []
        for rank in range(n):
            behind = [out.send(server, rank, shard, link, after=pushed, behind=behind)]
    return out.schedule(n)


def _server_link(paths: Paths) -> Link:
    return paths.network if paths.nodes > 1 else paths.inside


def _server_ns(paths: Paths, size_bytes: int) -> int:
    """2 (a + n M / servers b): it grows with the ranks."""
    link, shard = _server_link(paths), ceil(size_bytes / paths.servers)
    return 2 * ((paths.ranks - 1) * _leaving_ns(link, shard) + _step_ns(link, shard))


ALGORITHMS: dict[str, Algorithm] = {
    "ring": Algorithm(_ring_schedule, _ring_ns, _around),
    "gloo_ring": Algorithm(_gloo_schedule, _gloo_ns, _around),
    "tree": Algorithm(*_halves(_trees), _around),
    "halving_doubling": Algorithm(_halving_doubling_schedule, _halving_doubling_ns, _folded),
    "hierarchical": Algorithm(_hierarchical_schedule, _hierarchical_ns, _around),
    "direct": Algorithm(_direct_schedule, _direct_ns, _around),
    "nvls": Algorithm(*_halves(_switches), _once),
    "parameter_server": Algorithm(_server_schedule, _server_ns, _once),
}
