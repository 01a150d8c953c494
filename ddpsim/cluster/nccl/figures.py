"""The physical figures behind NCCL's times, each as a multiple of its usual value.

The usual values stand where they are used (`ddpsim.cluster.nccl.cost`), with their sources. What a
transport differs in from them is its prior (`PRIORS`); what a cluster differs in is calibrated
(`calibrate.fit.nccl`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ddpsim.cluster.nccl.tuner import Choice


class Figures(NamedTuple):
    """Multiples of the usual figures; `MEANINGS` says what each is."""

    start: float = 1.0
    intra_hop_ll: float = 1.0
    intra_hop_ll128: float = 1.0
    intra_hop_simple: float = 1.0
    tree_hop_ll: float = 1.0
    tree_hop_ll128: float = 1.0
    tree_hop_simple: float = 1.0
    ring_hop_ll: float = 1.0
    ring_hop_ll128: float = 1.0
    ring_hop_simple: float = 1.0
    message: float = 1.0
    intra_rate: float = 1.0
    switch_rate: float = 1.0
    net_rate: float = 1.0
    ll_rate: float = 1.0

    def intra_hop(self, choice: Choice) -> float:
        """A step inside a node."""
        return float(getattr(self, f"intra_hop_{choice.protocol.lower()}"))

    def net_hop(self, choice: Choice) -> float:
        """A step to another node."""
        return float(getattr(self, f"{_kind(choice)}_hop_{choice.protocol.lower()}"))


USUAL = Figures()

MEANINGS = {
    "start": "launch and first step of a kernel",
    "intra_hop_ll": "step inside a node, LL",
    "intra_hop_ll128": "step inside a node, LL128",
    "intra_hop_simple": "step inside a node, Simple",
    "tree_hop_ll": "step between nodes, tree LL",
    "tree_hop_ll128": "step between nodes, tree LL128",
    "tree_hop_simple": "step between nodes, tree Simple",
    "ring_hop_ll": "step between nodes, ring LL",
    "ring_hop_ll128": "step between nodes, ring LL128",
    "ring_hop_simple": "step between nodes, ring Simple",
    "message": "cost of a message at the NIC",
    "intra_rate": "bandwidth inside a node",
    "switch_rate": "bandwidth of the switch that sums",
    "net_rate": "bandwidth of a node's NICs",
    "ll_rate": "bandwidth of LL between nodes",
}


class Prior(NamedTuple):
    """Log-normal: the median of each figure, and the standard deviation of its logarithm."""

    medians: Figures
    sigmas: Figures


_USUAL_SIGMAS = Figures(*[0.4] * len(Figures._fields))._replace(
    message=0.5, intra_rate=0.15, switch_rate=0.15, net_rate=0.1
)
# assumed: how far clusters of one transport differ; of Slingshot as Alps and Polaris do, whose
# plugin's settings make rings of Simple up to 20 times as slow
PRIORS = {
    "rdma": Prior(USUAL, _USUAL_SIGMAS),
    "efa": Prior(USUAL, _USUAL_SIGMAS),
    "tcpx": Prior(USUAL, _USUAL_SIGMAS),
    "tcp": Prior(USUAL, _USUAL_SIGMAS._replace(net_rate=0.4)),
    "slingshot": Prior(
        Figures(
            tree_hop_ll=2.8,
            tree_hop_simple=3.6,
            ring_hop_ll=10.0,
            ring_hop_simple=9.0,
            net_rate=0.83,
            ll_rate=0.25,
        ),
        _USUAL_SIGMAS._replace(
            tree_hop_ll=0.8,
            tree_hop_simple=0.8,
            ring_hop_ll=0.8,
            ring_hop_simple=1.2,
            net_rate=0.15,
            ll_rate=1.2,
        ),
    ),
}


def counting(choice: Choice, nodes: int, gpus_per_node: int) -> Iterator[str]:
    """The figures that a collective's time depends on, by name."""
    protocol = choice.protocol.lower()
    yield "start"
    if gpus_per_node > 1:
        yield f"intra_hop_{protocol}"
        yield "switch_rate" if choice.algorithm == "nvls" else "intra_rate"
    if nodes > 1:
        yield f"{_kind(choice)}_hop_{protocol}"
        yield "message"
        yield "net_rate"
        if protocol == "ll":
            yield "ll_rate"


def _kind(choice: Choice) -> str:
    """NVLS goes over nodes by trees."""
    return "ring" if choice.algorithm == "ring" else "tree"
