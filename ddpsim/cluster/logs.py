"""Logs of a cluster's own collectives: read, held against its ranks, and taken for their times."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

from ddpsim.cluster.cost import CollectiveCost, SingleRankCost, StretchedCost, interpolated_s
from ddpsim.cluster.interference import InterferingCost
from ddpsim.cluster.network import Network
from ddpsim.cluster.transfers import Operation, Transfer, WholeTransfer, duration_ns
from ddpsim.errors import InputError, blamed_on
from ddpsim.provenance import Provenance, Uncertainty
from ddpsim.scenario.catalog import are_other_devices
from ddpsim.scenario.cluster import Cluster
from ddpsim.scenario.run import Run
from ddpsim.scenario.schema import Scenario
from ddpsim.units import format_bytes

if TYPE_CHECKING:
    from ddpsim.importers.all_reduce import AllReduceLog

LOG = Uncertainty(0.05, "assumed: a log interpolated between its sizes, another day's network")
EXTRAPOLATED_LOG = Uncertainty(0.20, "assumed: a log of other ranks or sizes")
OTHER_GPUS = Uncertainty(0.20, "assumed: a log of other GPUs")

Logged = Literal["all_reduce", "reduce_scatter", "all_gather"]
LOGS: tuple[Logged, ...] = get_args(Logged)  # keys of a cluster


@dataclass(frozen=True)
class CheckedLog:
    """A log of a cluster's ranks, or of others where allowed, and how sure its times are."""

    log: AllReduceLog
    uncertainty: Uncertainty
    warnings: tuple[str, ...]

    @property
    def source(self) -> str:
        """The file, its sizes, and how far its two times of a size vary."""
        log = self.log
        words = f"{log.source} ({log.kind}), {log.range_in_words}"
        if log.spread and log.spread > LOG.sigma:
            words += f"; in place and out of place vary by {100 * log.spread:.0f} %"
        return words


def checked_log(scenario: Scenario, operation: Logged) -> CheckedLog | None:
    """The log that a scenario names for a collective; raises InputError, ImportFailedError."""
    cluster, key = scenario.cluster, f"cluster.{operation}"
    source = getattr(cluster, operation)
    if source is None:
        return None
    from ddpsim.importers.all_reduce import read_all_reduce  # noqa: PLC0415 -- few name a log

    with blamed_on(key):
        layout = cluster.nodes, cluster.gpus_per_node
        log = read_all_reduce(source, layout=layout, operation=operation)
    if cluster.world_size == 1:
        return CheckedLog(log, LOG, ())
    other_ranks = _check_ranks(log, key, cluster, scenario.run)
    other_gpus = _check_devices(log, cluster)
    doubt = EXTRAPOLATED_LOG if other_ranks else OTHER_GPUS if other_gpus else LOG
    warnings = (*log.warnings, *_assumed_ranks(log), *other_ranks, *other_gpus)
    return CheckedLog(log, at_least(doubt, log), warnings)


def at_least(assumed: Uncertainty, log: AllReduceLog) -> Uncertainty:
    """The uncertainty assumed of a log, or the spread of its two times of a size if larger."""
    if log.spread is None or log.spread <= assumed.sigma:
        return assumed
    return Uncertainty(log.spread, f"in-place and out-of-place times in {log.source}")


def _assumed_ranks(log: AllReduceLog) -> tuple[str, ...]:
    if log.ranks_listed:
        return ()
    problem = f"{log.source} does not say on which nodes and GPUs it was measured"
    return (f"{problem}: its times are taken for this cluster's {_layout(log)}",)


def _check_ranks(log: AllReduceLog, key: str, cluster: Cluster, run: Run) -> tuple[str, ...]:
    """The log must be of these very ranks; another layout is an error or a warning.

    Inside one node no network was measured, so there is nothing to extrapolate from.
    """
    if (log.nodes, log.gpus_per_node) == (cluster.nodes, cluster.gpus_per_node):
        return ()
    differs = f"{log.source} was measured on {_layout(log)}, but the cluster has {_layout(cluster)}"
    if log.nodes == 1 < cluster.nodes:
        raise InputError(
            key,
            f"{differs}: it says nothing of the network between nodes; measure these ranks, drop "
            "the log, or with NCCL carry it there over inter_node: ddpsim calibrate import "
            "nccl-tests LOG -o cluster.json, and set cluster.profile",
        )
    if run.allow_extrapolation:
        return (f"{differs}: its times are used as they are",)
    raise InputError(
        key, f"{differs}; measure these ranks, drop the log, or set run.allow_extrapolation: true"
    )


def _layout(of: AllReduceLog | Cluster) -> str:
    nodes = "1 node" if of.nodes == 1 else f"{of.nodes} nodes"
    return f"{of.world_size} ranks ({nodes} x {of.gpus_per_node})"


def _check_devices(log: AllReduceLog, cluster: Cluster) -> tuple[str, ...]:
    """Warn of a log that names other GPUs than the cluster's."""
    used = cluster.device.name
    others = [name for name in dict.fromkeys(log.gpus) if are_other_devices(name, used)]
    return tuple(
        f"{log.source} was measured on {name}, and its times are taken for {used}'s"
        for name in others[:1]
    )


@dataclass(frozen=True)
class ShardLogCost(StretchedCost):
    """Reduce-scatters or all-gathers of the sizes in their log; `others` prices all else.

    Times are interpolated in the logarithms of size and time. A size outside the log that `others`
    cannot price is an error.
    """

    operation: Operation
    log: AllReduceLog
    others: CollectiveCost

    @property
    def operations(self) -> frozenset[Operation]:
        """See CollectiveCost."""
        return self.others.operations | {self.operation}

    def transfer(self, operation: Operation, size_bytes: int) -> Transfer:
        """See CollectiveCost."""
        if self.covers(operation, size_bytes):
            return WholeTransfer(0, self._ns(interpolated_s(self.log.samples, size_bytes)))
        if operation in self.others.operations:
            return self.others.transfer(operation, size_bytes)
        raise InputError(
            f"cluster.{operation}",
            f"{format_bytes(size_bytes)} lies outside the sizes measured in {self.log.source} "
            f"({self.log.range_in_words}), and nothing else tells of it; measure "
            "that size, or state intra_node and inter_node links for it",
        )

    def stretched(self, factor: float) -> ShardLogCost:
        """See CollectiveCost."""
        return replace(super().stretched(factor), others=self.others.stretched(factor))

    def covers(self, operation: Operation, size_bytes: int) -> bool:
        """Whether a message lies within the measured sizes."""
        return operation == self.operation and self.log.covers(size_bytes)


def with_shard_logs(network: Network, scenario: Scenario) -> Network:
    """Add the logs of reduce-scatters and all-gathers to a network; raises InputError."""
    for operation in LOGS[1:]:
        checked = checked_log(scenario, operation)
        if checked is None or isinstance(network.cost, SingleRankCost):
            continue
        entry = Provenance(f"{operation.replace('_', '-')} time", checked.source, "imported")
        network = replace(
            network,
            cost=_over(network.cost, operation, checked.log),
            provenance=(*network.provenance, entry),
            warnings=(*network.warnings, *checked.warnings),
            measured=network.measured | {operation},
            shard_logs=checked.uncertainty,
        )
    return network


def _over(cost: CollectiveCost, operation: Operation, log: AllReduceLog) -> CollectiveCost:
    if isinstance(cost, InterferingCost):
        return replace(cost, cost=ShardLogCost(operation, log, cost.cost))
    return ShardLogCost(operation, log, cost)


def without_shard_logs(cost: CollectiveCost) -> CollectiveCost:
    """The cost model behind logs of reduce-scatters and all-gathers."""
    return without_shard_logs(cost.others) if isinstance(cost, ShardLogCost) else cost


def is_logged(cost: CollectiveCost, operation: Operation, size_bytes: int) -> bool:
    """Whether a log of reduce-scatters or all-gathers holds a message."""
    while isinstance(cost, ShardLogCost):
        if cost.covers(operation, size_bytes):
            return True
        cost = cost.others
    return False


def not_in_shard_logs(
    cost: CollectiveCost, sent: Collection[tuple[Operation, int]]
) -> tuple[list[tuple[Operation, int]], bool]:
    """Collectives that no such log holds, and whether they take most of the time."""
    rest = [each for each in sent if not is_logged(cost, *each)]
    taken_ns = sum(duration_ns(cost.transfer(*each)) for each in rest)
    return rest, 2 * taken_ns > sum(duration_ns(cost.transfer(*each)) for each in sent)
