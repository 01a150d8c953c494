"""Paths of collectives: links inside nodes, between them, and of switches that reduce.

Ranks are numbered node by node. Each algorithm takes the part of a link that its own messages leave
it, so that a schedule never promises more than the wire has.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import NamedTuple

from ddpsim.scenario.base import first_rank, ranks_by_node
from ddpsim.units import to_ns

Ends = tuple[int, int]  # source and target
_WHOLE = (1.0, 1.0)


@dataclass(frozen=True)
class Paths:
    """The links of an all-reduce: `intra` of one GPU in its node, `inter` of a node's network.

    `switch`: one GPU's link to a switch that reduces (NVLS), at the rate of the message itself.
    A layout of one node needs no `inter`, one GPU per node no `intra`. `servers` are those of a
    parameter server, each with a link like a node's (of one node: like a GPU's). `weak`: ranks with
    the parts of their bandwidths that the links to them have, inside the node and from outside.
    `unlike`: nodes with the parts that their own links have, in both directions. `smaller`: nodes
    with fewer ranks than `gpus_per_node`, and their ranks. `most`: bytes per second that no hop
    exceeds, however fast its link (LL).
    `chunk_bytes`: how much of a message a pipeline passes on at a time; None: a usual part of it.
    `streams`: GPUs of a node pass a chunk's words on before all of it has come.
    `copied_s`: what a byte takes in the sender's kernel, before the wire.
    """

    nodes: int
    gpus_per_node: int
    intra: Link | None
    inter: Link | None
    switch: Link | None = None
    servers: int = 1
    weak: tuple[tuple[int, float, float], ...] = ()
    unlike: tuple[tuple[int, float, float], ...] = ()
    smaller: tuple[tuple[int, int], ...] = ()
    most: float = inf
    chunk_bytes: int | None = None
    streams: bool = False
    copied_s: float = 0.0

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.first_of(self.nodes)

    @property
    def is_even(self) -> bool:
        """Whether all links of a kind are alike, and all nodes as large."""
        return not (self.weak or self.unlike or self.smaller)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ranks of each node."""
        return ranks_by_node(self.nodes, self.gpus_per_node, self.smaller)

    def first_of(self, node: int) -> int:
        """A node's first rank; beyond the last node the number of ranks."""
        return first_rank(node, self.gpus_per_node, self.smaller)

    def node_of(self, rank: int) -> int:
        """The node of a rank."""
        if not self.smaller:
            return rank // self.gpus_per_node
        return bisect_right(self._starts, rank) - 1

    def within(self, ends: Ends | None = None) -> Link:
        """The link between GPUs of one node, or of a usual one; ValueError if nodes have none."""
        if self.intra is None:
            raise ValueError("a node of several GPUs needs intra_node links")
        return self._left(self.intra, self._parts(ends)[0])

    def between(self, ends: Ends | None = None) -> Link:
        """The link from one of these ends' nodes to the other's, or from a usual node.

        Raises ValueError where nodes have none.
        """
        if self.inter is None:
            raise ValueError("several nodes need inter_node links")
        return self._left(self.inter, self._parts(ends)[1])

    def across(self, flows: int, ends: Ends | None = None) -> Link:
        """The link of one rank to one in another node, as one of so many flows of its node.

        Each GPU sends no faster than its own link lets it.
        """
        network = part(self.between(ends), flows)
        if self.intra is None:
            return network
        return network.at_most(self.within(ends).bandwidth_bytes_per_s)

    def direct(self, ends: Ends | None = None, *, inside: bool) -> Link:
        """The link of a message where all ranks send at once: inside a node each has its own."""
        return self.within(ends) if inside else self.across(self.gpus_per_node, ends)

    def to_switch(self, ends: Ends | None = None) -> Link:
        """Between a GPU and its node's switch; raises ValueError where it does not reduce."""
        if self.switch is None:
            raise ValueError("NVLS needs a switch that reduces")
        return self._left(self.switch, self._parts(ends)[0])

    def are_together(self, ends: Ends) -> bool:
        """Whether both are in one node."""
        return self._node(ends[0]) == self._node(ends[1])

    @property
    def slowest(self) -> Link:
        """What limits algorithms that do not know nodes."""
        step = self.gpus_per_node if self.nodes > 1 else 1
        held = [((rank + step) % self.ranks, rank) for rank in self.touched if rank < self.ranks]
        links = (self.direct(ends, inside=self.nodes == 1) for ends in (None, *held))
        return min(links, key=lambda link: link.bandwidth_bytes_per_s)

    @cached_property
    def _starts(self) -> list[int]:
        return [self.first_of(node) for node in range(self.nodes)]

    @property
    def least_network(self) -> Link:
        """The ring's hop between nodes that has the least left of a node's network.

        Raises ValueError where none is known.
        """
        of_nodes = {self.node_of(rank) for rank in self.touched if rank < self.ranks}
        unlike = {self.first_of(node) for node in of_nodes}
        hops = [((rank - 1) % self.ranks, rank) for rank in unlike]
        usual = [None] if len(unlike) < self.nodes else []
        links = (self.between(ends) for ends in (*usual, *hops))
        return min(links, key=lambda link: link.bandwidth_bytes_per_s)

    @cached_property
    def touched(self) -> frozenset[int]:
        """Ranks, and switches of nodes, that a link unlike the others leads to or from."""
        n = self.ranks
        weak = {end for rank, *_ in self.weak for end in (rank, n + self.node_of(rank))}
        nodes = [node for node, *_ in self.unlike]
        ranks = (range(self.first_of(node), self.first_of(node + 1)) for node in nodes)
        return frozenset(weak.union(*ranks, (n + node for node in nodes)))

    def stretched(self, factor: float) -> Paths:
        """Return it with everything `factor` times as slow."""
        if factor == 1:
            return self
        links = self.changed(lambda link: link.slower(factor))
        return replace(links, most=self.most / factor, copied_s=self.copied_s * factor)

    def changed(self, change: Callable[[Link], Link]) -> Paths:
        """Return it with a change of each of its links."""
        intra, inter, switch = (
            link and change(link) for link in (self.intra, self.inter, self.switch)
        )
        return replace(self, intra=intra, inter=inter, switch=switch)

    def _left(self, link: Link, part_left: float) -> Link:
        left = link if part_left == 1 else link.widened(part_left)
        return left.at_most(self.most).copied(self.copied_s)

    def _node(self, end: int) -> int:
        """The node of a rank, or of a node's switch; a server is in none of them: -1."""
        if end < self.ranks:
            return self.node_of(end)
        return end - self.ranks if self.switch else -1

    def _parts(self, ends: Ends | None) -> tuple[float, float]:
        """What such ends have of the bandwidths inside a node and between nodes.

        Of two nodes the slower sets the pace.
        """
        if ends is None or self.is_even:
            return _WHOLE
        source, target = (self._of_nodes.get(self._node(end), _WHOLE) for end in ends)
        inside, outside = self._into.get(ends[1], _WHOLE)
        return min(source[0], target[0]) * inside, min(source[1], target[1]) * outside

    @cached_property
    def _of_nodes(self) -> dict[int, tuple[float, float]]:
        return {node: (inside, outside) for node, inside, outside in self.unlike}

    @cached_property
    def _into(self) -> dict[int, tuple[float, float]]:
        """Parts that lead to ranks; to a switch what its slowest GPU has, as all have as much."""
        parts = {rank: (inside, outside) for rank, inside, outside in self.weak}
        for rank, (_, outside) in list(parts.items()):
            switch = self.ranks + self.node_of(rank)
            parts[switch] = (1.0, min(outside, parts.get(switch, _WHOLE)[1]))
        return parts


def part(link: Link, flows: float) -> Link:
    """What one of so many equal flows has of a link, all at once."""
    return link if flows == 1 else link.widened(1 / flows)


def step_ns(link: Link, size_bytes: int) -> int:
    """Ticks until a message has arrived."""
    return to_ns(link.latency_s + link.busy_s(size_bytes))


def leaving_ns(link: Link, size_bytes: int) -> int:
    """Ticks until the link is free for the sender's next message."""
    return to_ns(link.flows * link.busy_s(size_bytes))


class Link(NamedTuple):
    """One direction of one hop, by the LogGP model (Alexandrov et al. 1995).

    A message keeps the link busy for `overhead_s` and for its bytes, and arrives `latency_s` after
    that. `flows`: so many equal flows take turns: a message that finds the link idle has it whole,
    but the link is busy until those of all flows have left.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    overhead_s: float = 0.0
    flows: float = 1.0

    def widened(self, factor: float) -> Link:
        """With `factor` times the bandwidth, which may be less than 1."""
        return self._replace(bandwidth_bytes_per_s=self.bandwidth_bytes_per_s * factor)

    def at_most(self, bytes_per_s: float) -> Link:
        """With no more bandwidth than that."""
        if self.bandwidth_bytes_per_s <= bytes_per_s:
            return self
        return self._replace(bandwidth_bytes_per_s=bytes_per_s)

    def copied(self, s_per_byte: float) -> Link:
        """Return a link whose messages are copied first, at so many seconds a byte."""
        if not s_per_byte:
            return self
        bytes_per_s = 1 / (1 / self.bandwidth_bytes_per_s + s_per_byte)
        return self._replace(bandwidth_bytes_per_s=bytes_per_s)

    def later(self, factor: float) -> Link:
        """With `factor` times the latency."""
        return self._replace(latency_s=self.latency_s * factor)

    def slower(self, factor: float) -> Link:
        """Return it with everything `factor` times as slow."""
        return Link(
            self.latency_s * factor,
            self.bandwidth_bytes_per_s / factor,
            self.overhead_s * factor,
            self.flows,
        )

    def busy_s(self, size_bytes: int) -> float:
        """Until one message has left."""
        return self.overhead_s + size_bytes / self.bandwidth_bytes_per_s
