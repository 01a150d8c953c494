"""A profile on ranks that were not measured, where NCCL sends by trees there.

A law tells how the hops of a ring repeat. It does not tell what a tree takes where rings were
measured, nor from few layouts which regimes are trees. There the links and NCCL's own choice
(`ddpsim.cluster.nccl`) say how many times longer a message takes than on the measured ranks.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from math import log

from ddpsim.cluster.fitted.residuals import CorrectedCost
from ddpsim.cluster.from_links import network_from_links
from ddpsim.cluster.nccl.cost import NcclCost
from ddpsim.cluster.transfers import REPLICATED, SHARDED, Operation, WholeTransfer, duration_ns
from ddpsim.errors import InputError
from ddpsim.scenario.schema import Scenario

__all__ = ["CarriedCost", "nccl_on", "nearest"]

Layout = tuple[int, int]  # nodes, GPUs a node


@dataclass(frozen=True)
class CarriedCost:
    """The law's times, and where NCCL takes no ring `measured` times by the links' ratio.

    `measured`: the profile's on the nearest layout that was measured; `there`: NCCL's by links on
    that one, `here` on the ranks asked for. A CollectiveCost.
    """

    operations = REPLICATED | SHARDED
    law: CorrectedCost
    measured: CorrectedCost
    here: NcclCost
    there: NcclCost

    def transfer(self, operation: Operation, size_bytes: int) -> WholeTransfer:
        """See CollectiveCost; raises InputError where the law has no figures."""
        is_ring = operation != "all_reduce" or self.here.choice(size_bytes).algorithm == "ring"
        if is_ring:
            return self.law.transfer(operation, size_bytes)
        longer = self._ns(self.here, size_bytes) / self._ns(self.there, size_bytes)
        known = self.measured.transfer(operation, size_bytes)
        return replace(
            known,
            latency_ns=round(longer * known.latency_ns),
            transfer_ns=round(longer * known.transfer_ns),
        )

    def stretched(self, factor: float) -> CarriedCost:
        """See CollectiveCost."""
        longer = self.law.stretched(factor), self.measured.stretched(factor)
        return replace(self, law=longer[0], measured=longer[1])

    def _ns(self, cost: NcclCost, size_bytes: int) -> int:
        return max(1, duration_ns(cost.transfer("all_reduce", size_bytes)))


def nearest(measured: Collection[Layout], layout: Layout) -> Layout | None:
    """Of those over nodes the one with the most similar number of ranks; None: there is none."""
    ranks = layout[0] * layout[1]
    over_nodes = [known for known in measured if known[0] > 1]
    return min(over_nodes, key=lambda known: abs(log(known[0] * known[1] / ranks)), default=None)


def nccl_on(scenario: Scenario, layout: Layout) -> NcclCost | None:
    """NCCL's times by the links of these machines in another number; None: they are not known."""
    cluster = scenario.cluster
    if cluster.inter_node is None and cluster.machine is None:
        return None
    try:
        resized = cluster
        if layout != (cluster.nodes, cluster.gpus_per_node):
            resized = cluster.resized(*layout)
        plain = resized.model_copy(update={"algorithm": "auto", "profile": None})
        cost = network_from_links(scenario.model_copy(update={"cluster": plain})).cost
    except InputError:
        return None
    return cost if isinstance(cost, NcclCost) else None
