"""What if all links had more bandwidth, or less latency?"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ddpsim.cluster.cost import (
    AllReduceLogCost,
    ChangedCost,
    CollectiveCost,
    LinkCost,
    ScheduledCost,
)
from ddpsim.cluster.interference import InterferingCost
from ddpsim.cluster.logs import ShardLogCost
from ddpsim.cluster.nccl.cost import NcclCost
from ddpsim.cluster.network import Network
from ddpsim.cluster.process_groups import GroupedCost
from ddpsim.cluster.transfers import Operation, Transfer, WholeTransfer, duration_ns


def widened(network: Network, factor: float) -> Network | None:
    """A network whose links have `factor` times the bandwidth; NCCL's choices stay.

    What else it carries stays too, and is a smaller part of it. None for a log, which does not say
    what part of its times is latency.
    """
    cost = _widened(network.cost, factor)
    if cost is None:
        return None
    return replace(network, cost=cost, traffic=network.traffic.on_wider_links(factor))


def quickened(network: Network, factor: float) -> Network | None:
    """A network with `factor` times the latency and the same bandwidth; None as `widened`.

    latency x f + bytes / bandwidth is f x (latency + bytes / (f x bandwidth)).
    """
    wider = _widened(network.cost, factor)
    return None if wider is None else replace(network, cost=wider.stretched(factor))


def _widened(cost: CollectiveCost, factor: float) -> CollectiveCost | None:
    if isinstance(cost, GroupedCost):
        return cost.changed(lambda each: _widened(each, factor) or each)  # links alone have groups
    if isinstance(cost, InterferingCost):
        inner = _widened(cost.cost, factor)
        return None if inner is None else replace(cost, cost=inner)
    if isinstance(cost, LinkCost):
        return replace(cost, links=tuple(link.widened(factor) for link in cost.links))
    if isinstance(cost, (NcclCost, ScheduledCost)):
        return replace(cost, paths=cost.paths.changed(lambda link: link.widened(factor)))
    if isinstance(cost, (AllReduceLogCost, ShardLogCost)):
        return None
    return _Widened(cost, factor)


def waits_for_latency(network: Network, operation: Operation, size_bytes: int) -> bool:
    """Whether half the latency shortens a message more than twice the bandwidth; no for a log."""
    quicker, wider = quickened(network, 0.5), widened(network, 2)
    if quicker is None or wider is None:
        return False
    quicker_ns, wider_ns = (
        duration_ns(changed.cost.transfer(operation, size_bytes)) for changed in (quicker, wider)
    )
    return quicker_ns < wider_ns


@dataclass(frozen=True)
class _Widened(ChangedCost):
    """A model that says itself what is latency."""

    factor: float

    def transfer(self, operation: Operation, size_bytes: int) -> Transfer:
        """See CollectiveCost."""
        transfer = self.cost.transfer(operation, size_bytes)
        if not isinstance(transfer, WholeTransfer):
            return transfer
        return replace(transfer, transfer_ns=round(transfer.transfer_ns / self.factor))
