"""Chunks that flow over the edges of a tree, one behind the other: message by message, and exactly.

Sources: nccl src/device/all_reduce.h (what a tree and NVLS send), src/graph/trees.cc (which trees);
Sanders, Speck, Traff 2009 (two trees).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import cycle, pairwise
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

from ddpsim.cluster.algorithms.schedule import Message, Schedule, Scheduler
from ddpsim.cluster.topology.paths import Ends, Link, Paths, leaving_ns, step_ns

if TYPE_CHECKING:
    from ddpsim.cluster.algorithms.max_plus import Ticks

# assumed sizes of a pipeline's chunks where no others are known: up to 16 as small as the first,
# then as large as the second
LEAST_CHUNK_BYTES, LARGEST_CHUNK_BYTES, USUAL_CHUNKS = 65_536, 8 * 2**20, 16


class _Edge(NamedTuple):
    """One hop that every chunk takes; `after` are the edges that bring its sender what it sends.

    `flows`: so many flows take turns on its nodes' network; 0: it is inside a node.
    """

    source: int
    target: int
    flows: int
    after: tuple[int, ...]


class Pipeline:
    """Edges over which one half of the bytes flows in chunks: up to a root, and down again.

    `nodes`: each one's chains, equally long, that begin at its head (a GPU, or a switch); `tree`:
    the first or the second of those over all heads. `inside`: the link of edges inside a node,
    these or usual ones. `returns`: the result comes down to all.
    """

    def __init__(
        self,
        inside: Callable[[Paths, Ends | None], Link],
        nodes: Sequence[Sequence[Sequence[int]]],
        tree: int = 0,
        *,
        returns: bool = True,
    ) -> None:
        both = two_trees(len(nodes))
        leaving = edges_by_node(both)  # the edges of both trees take turns on a node's network
        self._inside, self._nodes, self._returns = inside, nodes, returns
        self._heads = [chains[0][0] for chains in nodes]
        self._parent, self._climb = both[tree], leaves_first(both[tree])
        self._flows = [max(leaving[node], leaving[up]) for node, up in enumerate(self._parent)]

    def _edges(self) -> list[_Edge]:
        """All edges, each after those that it waits for."""
        edges: list[_Edge] = []

        def add(source: int, target: int, after: Sequence[int], flows: int = 0) -> list[int]:
            edges.append(_Edge(source, target, flows, tuple(after)))
            return [len(edges) - 1]

        brought: list[list[int]] = [[] for _ in self._nodes]  # to each head
        for chains, come in zip(self._nodes, brought, strict=True):
            for chain in chains:
                summed: list[int] = []
                for target, source in reversed(list(pairwise(chain))):
                    summed = add(source, target, summed)
                come.extend(summed)
        heads, parent, flows = self._heads, self._parent, self._flows
        for node in self._climb[:-1]:
            up = parent[node]
            brought[up] += add(heads[node], heads[up], brought[node], flows[node])
        for node in reversed(self._climb[:-1]):
            up = parent[node]
            brought[node] = add(heads[up], heads[node], brought[up], flows[node])
        for chains, last in zip(self._nodes, brought, strict=True):
            for chain in chains if self._returns else ():
                passed = last
                for source, target in pairwise(chain):
                    passed = add(source, target, passed)
        return edges

    def merged(self, touched: frozenset[int]) -> Merged:
        """Edges of one kind with the same followers as one; links at `touched` are unlike others.

        From the last edges to the first: those that lead down, then those that lead up.
        """
        merged, heads, parent = Merged(touched), self._heads, self._parent
        shown = None if touched else 1  # chains of a node whose edges are like those of the others
        followers: list[list[int]] = [[] for _ in heads]  # of all that comes to a head
        for node in self._climb:
            for chain in self._nodes[node][:shown] if self._returns else ():
                followers[node] += merged.along(chain, (), down=True)[-1:]
            if (up := parent[node]) >= 0:
                ends = heads[up], heads[node]
                followers[up].append(merged.place(self._flows[node], ends, followers[node]))
        for node in reversed(self._climb):
            if (up := parent[node]) >= 0:
                ends = heads[up], heads[node]
                followers[node] = [merged.place(self._flows[node], ends[::-1], followers[up])]
                merged.leading_up.append(([ends], [followers[node]]))
            chains = self._nodes[node]
            places = [merged.along(chain, followers[node]) for chain in chains[:shown]]
            merged.leading_up.append((chains, places))
        return merged

    def _link(self, paths: Paths, flows: int, ends: Ends | None = None) -> Link:
        return paths.between(ends)._replace(flows=flows) if flows else self._inside(paths, ends)

    def schedule(self, paths: Paths, size_bytes: int) -> Schedule:
        """Each chunk goes over all edges; on an edge chunks follow each other."""
        out, chunks, edges = Scheduler(), Chunks.of(paths, size_bytes), self._edges()
        links = [self._link(paths, edge.flows, edge[:2]) for edge in edges]
        for number in range(chunks.number):
            is_last = number == chunks.number - 1
            chunk = chunks.last_bytes if is_last else chunks.size_bytes
            base = number * len(edges)
            for edge, link in zip(edges, links, strict=True):
                behind = [len(out.messages) - len(edges)] if number else []
                after = [base + i for i in edge.after]
                out.send(edge.source, edge.target, chunk, link, after=after, behind=behind)
        return out.schedule(paths.ranks)

    def duration_ns(self, paths: Paths, size_bytes: int) -> int:
        """When the last chunk has come over the last edge, if all join at once over usual links."""
        return max(self._ways_of_edges_ns(paths, size_bytes, _merged(self, frozenset())))

    def ways_ns(self, paths: Paths, size_bytes: int) -> Ticks:
        """From the joining of each rank to the end of what waits for it, [ranks]: the longest way.

        Each chunk's times are the latest of sums, so that what a rank's joining adds to is the same
        whenever it joins. What leads down to a rank follows what leads up from it, which tells. A
        rank that no edge touches has none, -inf.
        """
        import numpy as np  # noqa: PLC0415 -- slow to import, and closed forms do without

        merged = _merged(self, paths.touched)
        of_each_ns = self._ways_of_edges_ns(paths, size_bytes, merged)
        sources, targets, places = map(np.array, merged.up)
        of_edges_ns = np.array(of_each_ns, dtype=np.float64)[places]
        ways_ns = np.full(1 + max(paths.ranks, *self._heads), -np.inf)
        for ends in (sources, targets):
            np.maximum.at(ways_ns, ends, of_edges_ns)
        return ways_ns[: paths.ranks]

    def _ways_of_edges_ns(self, paths: Paths, size_bytes: int, merged: Merged) -> list[int]:
        """From when a merged edge could begin to the end of all that waits for it.

        Exact, without following each chunk. Of equal chunks, chunk j leaves an edge at the latest
        of end + j x pace over the ways to it. A way begins at a rank's joining; its pace is that of
        its slowest edge. By induction: the wait for chunk i and the edge's own pace from there on
        are linear in i, so that only the first chunk and the last count. Of the ways from an edge
        only the longest of each pace matters, and there are as many paces as kinds of edge. The
        last chunk, which may be smaller, leaves an edge once it has come and the one before it has
        left. Edges are gone through from the last to the first.
        """
        chunks = Chunks.of(paths, size_bytes)
        times = [chunks.times_ns(self._link(paths, *kind)) for kind in merged.kinds]
        last_ns: list[int] = []  # from the end of the last chunk on an edge
        for kind, later in merged.edges:
            waiting_ns = max([last_ns[i] for i in later]) if later else 0
            last_ns.append(waiting_ns + times[kind].takes_last)
        if chunks.number == 1:
            return last_ns
        paces = sorted({hop.leaves for hop in times})
        own_pace = [paces.index(hop.leaves) for hop in times]
        more_ns = [(chunks.number - 2) * pace for pace in paces]
        # from the end of the first chunk, by the pace of its way
        first_ns: list[list[int]] = []
        for (kind, later), come_last_ns in zip(merged.edges, last_ns, strict=True):
            hop, ahead = times[kind], own_pace[kind]
            behind_ns = come_last_ns + hop.leaves
            after_ns = [behind_ns + more for more in more_ns[ahead:]]
            for i in later:
                after_ns = [
                    max(way_ns, first + hop.takes)
                    for way_ns, first in zip(after_ns, first_ns[i][ahead:], strict=True)
                ]
            first_ns.append(after_ns[:1] * ahead + after_ns)
        return [max(last, first[0]) for last, first in zip(last_ns, first_ns, strict=True)]


class Merged:
    """Edges alike in their link and in all that waits for them, as one.

    `kinds`: flows, and the ends of an edge whose link is unlike the others. `edges`: of each its
    kind, and those that wait for it, which come before it. `leading_up`: chains that begin where
    they lead, with the places of their edges among the merged ones, or with those of one of them.
    """

    def __init__(self, touched: frozenset[int]) -> None:
        self.kinds: dict[tuple[int, Ends | None], int] = {}
        self.edges: dict[tuple[int, frozenset[int]], int] = {}
        self.leading_up: list[tuple[Sequence[Sequence[int]], list[list[int]]]] = []
        self._touched = touched
        self._usual: dict[tuple[int, tuple[int, ...]], list[int]] = {}  # chains by their length

    def place(self, flows: int, ends: Ends, followers: Sequence[int]) -> int:
        """Gives the place among the merged edges of one with all that waits for it."""
        unlike = None if self._touched.isdisjoint(ends) else ends
        kind = self.kinds.setdefault((flows, unlike), len(self.kinds))
        return self.edges.setdefault((kind, frozenset(followers)), len(self.edges))

    def along(
        self, chain: Sequence[int], followers: Sequence[int], *, down: bool = False
    ) -> list[int]:
        """Places of a chain's edges to where it begins, or of those `down` it, the last first."""
        usual = (len(chain), tuple(followers)) if self._touched.isdisjoint(chain) else None
        if usual in self._usual:
            return self._usual[usual]
        places: list[int] = []
        for ends in reversed(list(pairwise(chain))) if down else pairwise(chain):
            places.append(self.place(0, ends if down else ends[::-1], followers))
            followers = places[-1:]
        if usual:
            self._usual[usual] = places
        return places

    @cached_property
    def up(self) -> tuple[array[int], array[int], array[int]]:
        """Sources and targets of all edges that lead up, and their places."""
        sources, targets, places = array("l"), array("l"), array("l")
        for chains, each in self.leading_up:
            for chain, of_chain in zip(chains, cycle(each), strict=False):
                sources.extend(chain[1:])
                targets.extend(chain[:-1])
                places.extend(of_chain)
        return sources, targets, places


@lru_cache(maxsize=32)
def _merged(pipeline: Pipeline, touched: frozenset[int]) -> Merged:
    return pipeline.merged(touched)


class HopTimes(NamedTuple):
    """Times of one edge, in ticks: until a chunk has arrived, until the next one may leave.

    `takes_last`: until the last chunk has arrived.
    """

    takes: int
    leaves: int
    takes_last: int


class Chunks(NamedTuple):
    """How a message is cut: the last chunk is what the others leave of it."""

    number: int
    size_bytes: int
    last_bytes: int

    @classmethod
    def of(cls, paths: Paths, size_bytes: int) -> Chunks:
        """Cut a message as the paths say; where they do not, into a usual number of chunks."""
        chunk = paths.chunk_bytes
        if chunk is None:
            usual = min(USUAL_CHUNKS, max(1, size_bytes // LEAST_CHUNK_BYTES))
            chunk = ceil(size_bytes / max(usual, ceil(size_bytes / LARGEST_CHUNK_BYTES)))
        chunk = max(1, min(chunk, size_bytes))
        count = max(1, ceil(size_bytes / chunk))
        return cls(count, chunk, size_bytes - (count - 1) * chunk)

    def times_ns(self, link: Link) -> HopTimes:
        """What they take over a link."""
        takes_ns, leaves_ns = step_ns(link, self.size_bytes), leaving_ns(link, self.size_bytes)
        return HopTimes(takes_ns, leaves_ns, step_ns(link, self.last_bytes))


def ends_ns(
    pipelines: tuple[Pipeline, ...], paths: Paths, size_bytes: int, joined_ns: Ticks
) -> Ticks:
    """When the last of several pipelines ends, each with an equal part of the bytes."""
    return _latest_ns(joined_ns, _ways_ns(pipelines, paths, ceil(size_bytes / len(pipelines))))


@lru_cache(maxsize=16)
def _ways_ns(pipelines: tuple[Pipeline, ...], paths: Paths, size_bytes: int) -> Ticks:
    """The longer way of each rank, [ranks]; steps ask for the same sizes again and again."""
    import numpy as np  # noqa: PLC0415 -- see above

    each_ns = [pipeline.ways_ns(paths, size_bytes) for pipeline in pipelines]
    return np.asarray(np.max(each_ns, axis=0))


def _latest_ns(joined_ns: Ticks, ways_ns: Ticks) -> Ticks:
    import numpy as np  # noqa: PLC0415 -- see above

    return np.asarray((joined_ns + ways_ns).max(axis=-1))


def side_by_side(pipelines: Sequence[Pipeline], paths: Paths, size_bytes: int) -> Schedule:
    """The messages of several pipelines, each with an equal part of the bytes."""
    part_bytes, messages = ceil(size_bytes / len(pipelines)), list[Message]()
    for pipeline in pipelines:
        places = len(messages)
        messages += [_moved(each, places) for each in pipeline.schedule(paths, part_bytes).messages]
    return Schedule(paths.ranks, tuple(messages))


def _moved(message: Message, places: int) -> Message:
    return replace(
        message,
        after=tuple(places + i for i in message.after),
        behind=tuple(places + i for i in message.behind),
    )


def duration_ns(pipelines: tuple[Pipeline, ...], paths: Paths, size_bytes: int) -> int:
    """How long all take if ranks join at once over usual links, each with its part of the bytes."""
    part_bytes = ceil(size_bytes / len(pipelines))
    return max(pipeline.duration_ns(paths, part_bytes) for pipeline in _distinct(pipelines))


@lru_cache(maxsize=64)
def _distinct(pipelines: tuple[Pipeline, ...]) -> list[Pipeline]:
    """One of those whose edges are alike: a tree and its mirror image take as long."""
    merged = [_merged(each, frozenset()) for each in pipelines]
    alike = [(tuple(each.kinds), tuple(each.edges)) for each in merged]
    return list(dict(zip(alike, pipelines, strict=True)).values())


def edges_by_node(parents: Sequence[Sequence[int]]) -> list[int]:
    """How many edges leave each node, up and down, in all trees."""
    leaving = [0] * len(parents[0])
    for parent in parents:
        for node, up in enumerate(parent):
            if up >= 0:
                leaving[node] += 1
                leaving[up] += 1
    return leaving


def leaves_first(parent: Sequence[int]) -> list[int]:
    """Nodes in an order in which each precedes its parent; the root is the last."""

    depth: dict[int, int] = {-1: -1}
    for node in range(len(parent)):
        way = [node]
        while way[-1] not in depth:
            way.append(parent[way[-1]])
        for below, up in zip(reversed(way[:-1]), reversed(way), strict=False):
            depth[below] = depth[up] + 1
    return sorted(range(len(parent)), key=lambda node: (-depth[node], node))


@lru_cache(maxsize=64)
def two_trees(nodes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
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
