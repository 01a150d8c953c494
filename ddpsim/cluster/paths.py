"""Where a collective may run: links inside nodes, between them, and of switches that reduce.

Ranks are numbered node by node. Each algorithm takes the part of a link that its own messages leave
it, so that a schedule never promises more than the wire has.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ddpsim.cluster.topology import Link
from ddpsim.units import to_ns

__all__ = ["Paths", "leaving_ns", "part", "step_ns"]


@dataclass(frozen=True)
class Paths:
    """Where an all-reduce may run: `intra` of one GPU in its node, `inter` of a node's network.

    `switch`: one GPU's link to a switch that reduces (NVLS), at the rate of the message itself.
    A layout of one node needs no `inter`, one GPU per node no `intra`. `servers` are those of a
    parameter server, each with a link like a node's (of one node: like a GPU's). `weak`: ranks with
    the parts of their bandwidths that the links to them have, inside the node and from outside.
    `fine`: a hop passes on what has come (LL's flags), and does not wait for a whole chunk.
    """

    nodes: int
    gpus_per_node: int
    intra: Link | None
    inter: Link | None
    switch: Link | None = None
    servers: int = 1
    weak: tuple[tuple[int, float, float], ...] = ()
    fine: bool = False

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
        return part(self.network, self.gpus_per_node)

    def left(self, source: int, target: int) -> float:
        """The part of its bandwidth that a link to a rank has; others have all of it.

        What is no rank is the node's own switch, or without one a server elsewhere.
        """
        for rank, inside, outside in self.weak:
            if rank != target:
                continue
            if source >= self.ranks:
                return inside if self.switch or self.nodes == 1 else outside
            alike = source // self.gpus_per_node == rank // self.gpus_per_node
            return inside if alike else outside
        return 1.0

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


def part(link: Link, flows: float) -> Link:
    """What one of so many equal flows has of a link."""
    return replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / flows)


def step_ns(link: Link, size_bytes: int) -> int:
    """Ticks until a message has arrived."""
    return to_ns(link.latency_s + size_bytes / link.bandwidth_bytes_per_s)


def leaving_ns(link: Link, size_bytes: int) -> int:
    """Ticks until a message has left its sender."""
    return to_ns(size_bytes / link.bandwidth_bytes_per_s)
