"""One collective over message sizes: what a cluster's links, log or profile say of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddpsim.cluster.build import build_network
from ddpsim.cluster.cost import CollectiveCost
from ddpsim.cluster.fitted.residuals import CorrectedCost
from ddpsim.cluster.from_links import broadcast_way
from ddpsim.cluster.logs import is_logged, without_shard_logs
from ddpsim.cluster.nccl.cost import NcclCost
from ddpsim.cluster.network import Network
from ddpsim.cluster.transfers import TURNS, Operation, duration_ns
from ddpsim.errors import InputError, ScenarioError
from ddpsim.importers.all_reduce import read_all_reduce
from ddpsim.prediction.parts import cluster_profile
from ddpsim.result.collective import CollectiveRow, CollectiveTable
from ddpsim.scenario.catalog import device_table, machine_table, resolve
from ddpsim.scenario.cluster import Cluster
from ddpsim.scenario.document import Document, KeyPath, load
from ddpsim.scenario.load import parse
from ddpsim.scenario.quantity import SourceFile
from ddpsim.scenario.schema import Scenario
from ddpsim.units import NS_PER_S, format_bytes
from ddpsim.wording import counted

_PLACEHOLDER = {"model": "resnet50", "batch_per_rank": 1}


def load_cluster(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Scenario:
    """Load a scenario of which only the cluster counts; other sections may be left out.

    A file may also be the cluster section alone. Raises ScenarioError with all problems.
    """
    document = _with_cluster(load(source)).changed(overrides)
    document.data.setdefault("schema", "ddpsim/1")
    document.data.setdefault("workload", dict(_PLACEHOLDER))
    cluster = document.data.get("cluster")
    if isinstance(cluster, dict) and cluster.get("machine"):
        cluster.setdefault("nodes", 1)
    scenario = parse(_with_backend(document))
    try:
        build_network(scenario, cluster_profile(scenario))
    except InputError as error:
        raise ScenarioError([document.blame(error)]) from None
    return scenario


def _with_cluster(document: Document) -> Document:
    """Make a cluster section that stands alone that of a document; others stay as they are."""
    names = {field.alias or name for name, field in Cluster.model_fields.items()}
    if not document.data or not names.issuperset(document.data):
        return document

    def inside(places: Mapping[KeyPath, str]) -> dict[KeyPath, str]:
        return {path and ("cluster", *path): place for path, place in places.items()}

    return replace(
        document,
        data={"cluster": document.data},
        key_places=inside(document.key_places),
        value_places=inside(document.value_places),
    )


def _with_backend(document: Document) -> Document:
    """Set gloo for a machine of CPU cores, where the document has no `ddp`."""
    cluster = document.data.get("cluster")
    machine = cluster.get("machine") if isinstance(cluster, dict) else None
    if "ddp" not in document.data and isinstance(machine, str):
        with suppress(ValueError):
            device = machine_table(resolve("machine", machine))["device"]
            if device_table(device)["kind"] == "cpu":
                document.data["ddp"] = {"backend": "gloo"}
    return document


def collective_table(
    scenario: Scenario,
    operation: Operation,
    sizes_bytes: Sequence[int],
    against: Path | None = None,
) -> CollectiveTable:
    """Time and bandwidths of each size, when all ranks begin together and nothing else is sent.

    `against`: a log of the same ranks. Its times stand beside the predicted ones, at its sizes: at
    those in `sizes_bytes`, if any are given. Raises InputError where it does not fit.
    """
    cluster = scenario.cluster
    if cluster.world_size == 1:
        raise InputError("cluster", "one rank sends nothing; set nodes or gpus_per_node")
    if cluster.algorithm == "data_parallel":
        raise InputError(
            "cluster.algorithm", "data_parallel has no all-reduce: it gathers and sends; run a step"
        )
    network = build_network(scenario, cluster_profile(scenario))
    if operation not in network.cost.operations:
        raise InputError(
            "cluster",
            f"{operation} has no price here; leave algorithm out, and state intra_node and "
            "inter_node beside a log",
        )
    measured: dict[int, float] = {}
    if against is not None:
        layout = cluster.nodes, cluster.gpus_per_node
        log = read_all_reduce(SourceFile(str(against), against), layout=layout)
        if (log.nodes, log.gpus_per_node) != (cluster.nodes, cluster.gpus_per_node):
            raise InputError(
                "against",
                f"{against} was measured on {log.nodes} x {log.gpus_per_node} ranks, but the "
                f"cluster has {cluster.nodes} x {cluster.gpus_per_node}; measure these ranks, or "
                "set cluster.nodes and cluster.gpus_per_node",
            )
        measured = dict(log.samples)
    sizes = [s for s in measured if not sizes_bytes or s in sizes_bytes] or list(sizes_bytes)
    if measured and not measured.keys() & set(sizes):
        held = f"{format_bytes(min(measured))} to {format_bytes(max(measured))}"
        raise InputError("against", f"{against} holds none of the sizes asked for, but {held}")
    return CollectiveTable(
        operation,
        cluster.nodes,
        cluster.gpus_per_node,
        _summary(network, scenario),
        tuple(_row(network, operation, size, cluster, measured.get(size)) for size in sizes),
        against=None if against is None else str(against),
    )


def _summary(network: Network, scenario: Scenario) -> str:
    """Which links, in a line, and what is left out."""
    where = {"cluster.intra_node": "inside nodes", "cluster.inter_node": "between nodes"}
    links = [
        f"{where[entry.input]} {entry.source.split(';')[0]}"
        for entry in network.provenance
        if entry.input in where
    ]
    text = "links: " + "; ".join(links) if links else network.bottleneck
    if scenario.cluster.algorithm == "parameter_server":
        servers, ranks = scenario.cluster.servers or 1, scenario.cluster.world_size
        text += f"; {counted(servers, 'server')}, sending {ranks / servers:.3g} times the size each"
    busy = scenario.cluster.background or scenario.cluster.stragglers
    return text + ("; alone: no other traffic, no stragglers" if busy else "")


def _row(
    network: Network, operation: Operation, size: int, cluster: Cluster, measured_s: float | None
) -> CollectiveRow:
    cost, uncertainty = network.plain_cost, network.uncertainty_of(size, operation)
    if is_logged(cost, operation, size):
        uncertainty = network.shard_logs
    factors = uncertainty.edges if uncertainty else (1.0, 1.0)
    time_s = max(1, duration_ns(cost.transfer(operation, size))) / NS_PER_S
    ranks, turns = cluster.world_size, TURNS.get(operation)
    carried = turns * (ranks - 1) / ranks if turns else 1.0
    chosen = _choice(cost, operation, size)
    bandwidths = (size / time_s, carried * size / time_s)
    low_s, high_s = (time_s * factor for factor in factors)
    sent = 1.0 if cluster.algorithm == "parameter_server" else carried
    return CollectiveRow(size, time_s, low_s, high_s, *bandwidths, sent * size, chosen, measured_s)


def _choice(cost: CollectiveCost, operation: Operation, size: int) -> str:
    """Algorithm and protocol, or how a broadcast is sent; "" where a log or a profile says it."""
    if is_logged(cost, operation, size):
        return ""
    cost = without_shard_logs(cost)
    if isinstance(cost, NcclCost):
        choice = cost.choice(size, operation)
        return f"{choice.algorithm} {choice.protocol}"
    if operation != "broadcast" or isinstance(cost, CorrectedCost):
        return ""
    return broadcast_way(cost)


def tuner_of(scenario: Scenario) -> NcclCost:
    """The costs by which NCCL's tuner chooses; raises InputError where it does not."""
    cost = build_network(scenario, cluster_profile(scenario)).plain_cost
    if not isinstance(cost, NcclCost):
        raise InputError(
            "cluster",
            "NCCL's tuner chooses where neither a log nor a profile says the times, the backend "
            "is nccl, there are two ranks or more, and algorithm is auto, ring, tree or nvls",
        )
    return cost
