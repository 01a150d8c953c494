"""Chunks that flow over the edges of a tree, one behind the other: message by message, and exactly.

Sources: nccl src/device/all_reduce.h (what a tree and NVLS send), src/graph/trees.cc (which trees);
Sanders, Speck, Traff 2009 (two trees).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

from ddpsim.cluster.algorithms.schedule import Message, Schedule, Scheduler
from ddpsim.cluster.topology.paths import Ends, Link, Paths, leaving_ns, step_ns

if TYPE_CHECKING:
    from numpy import int64
    from numpy.typing import NDArray

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

    `inside`: the link of edges inside a node, these or usual ones.
    """

    def __init__(self, inside: Callable[[Paths, Ends | None], Link]) -> None:
        self._ends = array("l")  # source, target and flows of each edge
        self._after, self._until = array("l"), array("l", [0])  # and where those of each end
        self._inside = inside

    def add(self, source: int, target: int, after: Sequence[int], flows: int = 0) -> list[int]:
        """An edge; returns its place, as what later edges wait for."""
        self._ends.extend((source, target, flows))
        self._after.extend(after)
        self._until.append(len(self._after))
        return [self.count - 1]

    @property
    def count(self) -> int:
        """How many edges there are: of many ranks too many for an object each."""
        return len(self._until) - 1

    def edge(self, number: int) -> _Edge:
        """One of them, in the order in which they were added."""
        source, target, flows = self._ends[3 * number : 3 * number + 3]
        after = self._after[self._until[number] : self._until[number + 1]]
        return _Edge(source, target, flows, tuple(after))

    @property
    def ends(self) -> array[int]:
        """Source, target and flows of each edge, one after the other."""
        return self._ends

    def _link(self, paths: Paths, flows: int, ends: Ends | None = None) -> Link:
        return replace(paths.between(ends), flows=flows) if flows else self._inside(paths, ends)

    def over_nodes(
        self, nodes: int, tree: int, heads: Sequence[int], ready: Sequence[list[int]]
    ) -> list[list[int]]:
        """Up one of the two trees of nodes and down; `ready` and the result are by node.

        The edges of both trees take turns on a node's network.
        """
        both = two_trees(nodes)
        parent, flows = both[tree], edges_by_node(both)
        brought = [list(edges) for edges in ready]
        climb = leaves_first(parent)
        for node in climb[:-1]:
            up = parent[node]
            most = max(flows[node], flows[up])
            brought[up] += self.add(heads[node], heads[up], brought[node], most)
        for node in reversed(climb[:-1]):
            up = parent[node]
            most = max(flows[node], flows[up])
            brought[node] = self.add(heads[up], heads[node], brought[up], most)
        return brought

    def schedule(self, paths: Paths, size_bytes: int) -> Schedule:
        """Each chunk goes over all edges; on an edge chunks follow each other."""
        out, chunks = Scheduler(), Chunks.of(paths, size_bytes)
        edges = [self.edge(number) for number in range(self.count)]
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
        return max(self._ways_of_edges_ns(paths, size_bytes, frozenset()))

    def ways_ns(self, paths: Paths, size_bytes: int) -> Ticks:
        """From the joining of each rank to the end of what waits for it, [ranks]: the longest way.

        Each chunk's times are the latest of sums, so that what a rank's joining adds to is the same
        whenever it joins. A rank that no edge touches has none, -inf.
        """
        import numpy as np  # noqa: PLC0415 -- slow to import, and closed forms do without

        of_edge, ends = _as_arrays(self, paths.touched)
        of_each_ns = self._ways_of_edges_ns(paths, size_bytes, paths.touched)
        of_edges_ns = np.array(of_each_ns, dtype=np.float64)
        ways_ns = np.full(1 + max(paths.ranks, int(ends.max())), -np.inf)
        for each in ends:
            np.maximum.at(ways_ns, each, of_edges_ns[of_edge])
        return ways_ns[: paths.ranks]

    def _ways_of_edges_ns(
        self, paths: Paths, size_bytes: int, touched: frozenset[int]
    ) -> list[int]:
        """From when a merged edge could begin to the end of all that waits for it.

        Exact, without following each chunk. Of equal chunks, chunk j leaves an edge at the latest
        of end + j x pace over the ways to it. A way begins at a rank's joining; its pace is that of
        its slowest edge. By induction: the wait for chunk i and the edge's own pace from there on
        are linear in i, so that only the first chunk and the last count. Of the ways from an edge
        only the longest of each pace matters, and there are as many paces as kinds of edge. The
        last chunk, which may be smaller, leaves an edge once it has come and the one before it has
        left. Edges are gone through from the last to the first.
        """
        chunks, merged = Chunks.of(paths, size_bytes), _merged(self, touched)
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


class _Merged(NamedTuple):
    """Edges alike in their link and in all that waits for them, as one.

    `kinds`: flows, and the ends of an edge whose link is unlike the others. `edges`: of each its
    kind, and those that wait for it, which come before it. `of_edge`: where each of a pipeline's
    edges is among them.
    """

    kinds: tuple[tuple[int, Ends | None], ...]
    edges: tuple[tuple[int, frozenset[int]], ...]
    of_edge: tuple[int, ...]


@lru_cache(maxsize=16)
def _merged(pipeline: Pipeline, touched: frozenset[int]) -> _Merged:
    """Merge edges of one kind with the same followers; links at `touched` are unlike others."""
    kinds: dict[tuple[int, Ends | None], int] = {}
    places_of: dict[tuple[int, frozenset[int]], int] = {}
    waiting: dict[int, list[int]] = {}
    places = []
    for number in range(pipeline.count - 1, -1, -1):
        source, target, flows, after = pipeline.edge(number)
        unlike = (source, target) if source in touched or target in touched else None
        kind = kinds.setdefault((flows, unlike), len(kinds))
        place = places_of.setdefault((kind, frozenset(waiting.pop(number, ()))), len(places_of))
        places.append(place)
        for before in after:
            waiting.setdefault(before, []).append(place)
    return _Merged(tuple(kinds), tuple(places_of), tuple(reversed(places)))


@lru_cache(maxsize=16)
def _as_arrays(
    pipeline: Pipeline, touched: frozenset[int]
) -> tuple[NDArray[int64], NDArray[int64]]:
    """Each edge's place among the merged ones, [edges]; its source and target, [2, edges]."""
    import numpy as np  # noqa: PLC0415 -- see above

    ends = np.array(pipeline.ends).reshape(-1, 3).T[:2]
    return np.array(_merged(pipeline, touched).of_edge), ends


class AlikePipeline(Pipeline):
    """A pipeline that tells its duration alone, where all join at once over usual links.

    Edges of one kind that wait for the same edges are one: chunks take as long over each.
    """

    def __init__(self, inside: Callable[[Paths, Ends | None], Link]) -> None:
        super().__init__(inside)
        self._places: dict[tuple[int, frozenset[int]], list[int]] = {}

    def add(self, source: int, target: int, after: Sequence[int], flows: int = 0) -> list[int]:
        """An edge, or the place of the one that is like it."""
        kind = flows, frozenset(after)
        if kind not in self._places:
            self._places[kind] = super().add(source, target, tuple(kind[1]), flows)
        return self._places[kind]


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
    return list({_merged(each, frozenset())[:2]: each for each in pipelines}.values())


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
