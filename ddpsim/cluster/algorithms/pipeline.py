"""Chunks that flow over the edges of a tree, one behind the other: message by message, and exactly.

Sources: nccl src/device/all_reduce.h (what a tree and NVLS send).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

from ddpsim.cluster.algorithms.node_trees import edges_by_node, leaves_first, two_trees
from ddpsim.cluster.algorithms.schedule import Message, Schedule, Scheduler
from ddpsim.cluster.topology.link import Link
from ddpsim.cluster.topology.paths import Ends, Paths, leaving_ns, step_ns

if TYPE_CHECKING:
    from numpy import int64
    from numpy.typing import NDArray

    from ddpsim.cluster.algorithms.max_plus import Ticks

__all__ = ["Chunks", "Pipeline", "duration_ns", "ends_ns", "side_by_side"]

# assumed sizes of a pipeline's chunks where no others are known: up to 16 as small as the first,
# then as large as the second
LEAST_CHUNK_BYTES, LARGEST_CHUNK_BYTES, USUAL_CHUNKS = 65_536, 8 * 2**20, 16
_MOST_EDGES = 512  # beyond them arrays are faster


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
        self.edges: list[_Edge] = []
        self._inside = inside

    def add(self, source: int, target: int, after: Sequence[int], flows: int = 0) -> list[int]:
        """An edge; returns its place, as what later edges wait for."""
        self.edges.append(_Edge(source, target, flows, tuple(after)))
        return [len(self.edges) - 1]

    def _links(self, paths: Paths) -> dict[int, Link]:
        """Of edges of each kind."""
        return {flows: self._link(paths, flows) for flows in self._kinds}

    def _link(self, paths: Paths, flows: int, ends: Ends | None = None) -> Link:
        return replace(paths.between(ends), flows=flows) if flows else self._inside(paths, ends)

    @cached_property
    def _kinds(self) -> frozenset[int]:
        return frozenset(edge.flows for edge in self.edges)

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
        links = [self._link(paths, edge.flows, edge[:2]) for edge in self.edges]
        for number in range(chunks.number):
            is_last = number == chunks.number - 1
            chunk = chunks.last_bytes if is_last else chunks.size_bytes
            base = number * len(self.edges)
            for edge, link in zip(self.edges, links, strict=True):
                behind = [len(out.messages) - len(self.edges)] if number else []
                after = [base + i for i in edge.after]
                out.send(edge.source, edge.target, chunk, link, after=after, behind=behind)
        return out.schedule(paths.ranks)

    def duration_ns(self, paths: Paths, size_bytes: int) -> int:
        """When the last chunk has come over the last edge, if all join at once over usual links.

        As `ways_ns`, with a number in place of each array, from the first edge to the last.
        """
        if len(self.edges) > _MOST_EDGES:
            usual = replace(paths, weak=(), unlike=())
            return int(self.ways_ns(usual, size_bytes).max())
        chunks = Chunks.of(paths, size_bytes)
        times = {flows: chunks.times_ns(link) for flows, link in self._links(paths).items()}
        first: list[dict[int, int]] = []  # by edge: of the latest way of each pace
        last: list[int] = []
        for edge in self.edges:
            hop = times[edge.flows]
            come = [(0, 0), *(way for i in edge.after for way in first[i].items())]
            ends: dict[int, int] = {}
            for pace, end_ns in come:
                slowest = max(pace, hop.leaves)
                ends[slowest] = max(ends.get(slowest, 0), end_ns + hop.takes)
            first.append(ends)
            last_ns = max((last[i] for i in edge.after), default=0)
            if chunks.number > 1:
                behind = max(end + (chunks.number - 2) * pace for pace, end in ends.items())
                last_ns = max(last_ns, behind - hop.takes + hop.leaves)
            last.append(last_ns + hop.takes_last)
        return max(last)

    def ends_ns(self, paths: Paths, size_bytes: int, joined_ns: Ticks) -> Ticks:
        """When the last chunk has come over the last edge: [..., ranks] to [...].

        Each chunk's times are the latest of sums, so that what a rank's joining adds to is the same
        whenever it joins (`ways_ns`).
        """
        return _latest_ns(joined_ns, self.ways_ns(paths, size_bytes))

    def ways_ns(self, paths: Paths, size_bytes: int) -> Ticks:
        """From the joining of each rank to the end of what waits for it, [ranks]: the longest way.

        Exact, without following each chunk. Of equal chunks, chunk j leaves an edge at the latest
        of end + j x pace over the ways to it. A way begins at a rank's joining; its pace is that of
        its slowest edge. By induction: the wait for chunk i and the edge's own pace from there on
        are linear in i, so that only the first chunk and the last count. Of the ways from an edge
        only the longest of each pace matters, and there are as many paces as kinds of edge. The
        last chunk, which may be smaller, leaves an edge once it has come and the one before it has
        left. Edges are gone through from the last to the first.
        """
        import numpy as np  # noqa: PLC0415 -- slow to import, and closed forms do without

        chunks = Chunks.of(paths, size_bytes)
        takes_ns, leaves_ns, takes_last_ns = self._times(paths, chunks)
        paces_ns = np.unique(np.append(leaves_ns, 0.0))[:, np.newaxis]
        pace = np.searchsorted(paces_ns[:, 0], leaves_ns)
        kinds = np.arange(len(paces_ns))[:, np.newaxis]
        # from the end of the first chunk on an edge, by the pace of its way; from that of the last
        first_ns = np.full((len(paces_ns), len(self.edges) + 1), -np.inf)
        last_ns = np.full(len(self.edges) + 1, 0.0)  # the last edge is none
        ways_ns = np.full(1 + self._layers.outside, -np.inf)
        for edges, before, source, target in reversed(self._layers.each):
            come_last_ns = last_ns[edges] + takes_last_ns[edges]
            after_ns = first_ns[:, edges] + takes_ns[edges]
            if chunks.number > 1:
                behind_ns = come_last_ns + leaves_ns[edges]
                after_ns = np.maximum(after_ns, behind_ns + (chunks.number - 2) * paces_ns)
            own = pace[edges]
            slowed_ns = after_ns[own, np.arange(len(edges))]
            come_ns = np.where(kinds <= own, slowed_ns, after_ns)
            begun_ns = np.maximum(come_last_ns, come_ns[0])
            for ends in (source, target):
                np.maximum.at(ways_ns, ends, begun_ns)
            each = before.ravel()
            for known_ns, more_ns in zip(
                (*first_ns, last_ns), (*come_ns, come_last_ns), strict=True
            ):
                np.maximum.at(known_ns, each, np.repeat(more_ns, before.shape[1]))
        return ways_ns[: paths.ranks]

    def _times(self, paths: Paths, chunks: Chunks) -> tuple[Ticks, Ticks, Ticks]:
        """Of each edge, as `Chunks.times_ns` has them."""
        import numpy as np  # noqa: PLC0415 -- see above

        layers = self._layers
        links = self._links(paths)
        times = np.zeros((max(links) + 1, 3))
        for flows, link in links.items():
            times[flows] = chunks.times_ns(link)
        of_edges = times[layers.flows]
        unlike: Iterable[int] = ()
        if paths.touched:
            unlike = np.flatnonzero(np.isin(layers.ends, list(paths.touched)).any(axis=1))
        for i in unlike:
            edge = self.edges[i]
            of_edges[i] = chunks.times_ns(self._link(paths, edge.flows, edge[:2]))
        takes_ns, leaves_ns, takes_last_ns = of_edges.T
        return takes_ns, leaves_ns, takes_last_ns

    @cached_property
    def _layers(self) -> _Layers:
        return _Layers.of(self.edges)


@dataclass(frozen=True)
class _Layers:
    """Edges in an order in which all of a layer come after those of the layers before it.

    `each`: edges, those that come before each (as a table; -1: none), sources, targets. `outside`:
    how many endpoints are no ranks; they have joined before all time. `flows` and `ends`: of all
    edges.
    """

    each: tuple[tuple[NDArray[int64], ...], ...]
    outside: int
    flows: NDArray[int64]
    ends: NDArray[int64]

    @classmethod
    def of(cls, edges: Sequence[_Edge]) -> _Layers:
        """Those of a pipeline, whose edges each follow what they wait for."""
        import numpy as np  # noqa: PLC0415 -- see above

        depth: list[int] = []
        of_depth: dict[int, list[int]] = defaultdict(list)
        for i, edge in enumerate(edges):
            layer = 1 + max([depth[known] for known in edge.after], default=-1)
            depth.append(layer)
            of_depth[layer].append(i)
        sources, targets, flows = (np.array([edge[kind] for edge in edges]) for kind in range(3))
        each = []
        for _, places in sorted(of_depth.items()):
            after = [edges[i].after for i in places]
            widest = max(1, *map(len, after))
            before = [known + (-1,) * (widest - len(known)) for known in after]
            here = np.array(places)
            each.append((here, np.array(before), sources[here], targets[here]))
        all_ends = np.stack([sources, targets], axis=1)
        return cls(tuple(each), 1 + int(all_ends.max()), flows, all_ends)


class HopTimes(NamedTuple):
    """Of one edge, in ticks: until a chunk has arrived, until the next one may leave.

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
        """As the paths say; where they do not, into a usual number."""
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
    """When the last of two pipelines ends, each with half of the bytes."""
    return _latest_ns(joined_ns, _ways_ns(pipelines, paths, ceil(size_bytes / 2)))


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
    """Two pipelines, each carrying half of the bytes."""
    half = ceil(size_bytes / 2)
    first, second = (pipeline.schedule(paths, half).messages for pipeline in pipelines)
    return Schedule(paths.ranks, (*first, *(_moved(message, len(first)) for message in second)))


def _moved(message: Message, places: int) -> Message:
    return replace(
        message,
        after=tuple(places + i for i in message.after),
        behind=tuple(places + i for i in message.behind),
    )


def duration_ns(pipelines: Sequence[Pipeline], paths: Paths, size_bytes: int) -> int:
    """How long both take if all join at once over usual links, each with half of the bytes."""
    half = ceil(size_bytes / 2)
    return max(pipeline.duration_ns(paths, half) for pipeline in pipelines)
