"""Published collectives by presets, each machine left out of NCCL's figures.

The figures of a transport (`ddpsim.cluster.nccl.figures`) are fitted anew to the sweeps of all
other machines, and price the one that is left out.

python -m held_out.nccl_presets (in tools) prints the table of docs/validation.md, section 4
"""

from __future__ import annotations

import csv
import itertools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from math import expm1, log
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from nccl_sweeps import LARGEST, PRESETS, preset_of

from calibrate.fit.nccl_posterior import Row, pooled_figures
from calibrate.fit.samples import Sample
from ddpsim.cluster.from_links import network_from_links
from ddpsim.cluster.nccl.cost import NcclCost
from ddpsim.cluster.nccl.figures import PRIORS, Figures
from ddpsim.cluster.transfers import Operation, duration_ns
from ddpsim.prediction.collective_times import load_cluster
from ddpsim.scenario.links import InterNode
from ddpsim.units import NS_PER_S

_LEAST_BYTES, _MOST_BYTES = 32 * 1024, 2**30
_ROWS_A_MACHINE = 3.0  # as many independent rows as a machine counts for in others' figures
OPERATIONS: tuple[Operation, ...] = ("all_reduce", "all_gather", "reduce_scatter")
_FILES = ("all_reduce", "all_reduce_network", "alps_all_reduce", "collectives_2026")
# sweeps of collectives_2026.csv by the beginning of their names; TCP of Polaris is env1 and env2
_MACHINES: dict[str, dict[str, Any]] = {
    "sophia": {"machine": "dgx-a100"},
    "vultr": {"machine": "dgx-b200"},
    "dell": {"machine": "dgx-h100", "nccl": "2.26"},
    "xxrjun": {"machine": "dgx-h100", "nccl": "2.29"},
    "shahizat": {"machine": "dgx-h100"},
}
_POLARIS = {"bandwidth": "200 Gbit/s", "nics_per_node": 2}
_GROUPS = {
    "rdma": "InfiniBand and RoCE",
    "efa": "EFA",
    "slingshot": "Slingshot",
    "tcp": "TCP",
    "tcpx": "GPUDirect-TCPX",
}


class Sweep(NamedTuple):
    """One operation on one layout: seconds by size, and the model's cost for it."""

    name: str
    operation: Operation
    times_s: dict[int, float]
    keys: dict[str, Any]

    @property
    def machine(self) -> str:
        """What is left out at once: all sweeps of one machine by one publisher."""
        start = self.name.split("-")[0]
        if start == "aws":
            return "aws p5" if "p5" in self.name else "aws p4d"
        return self.name[:6] if start == "abci" else start


class Judged(NamedTuple):
    """One time without its machine's part in the figures."""

    size_bytes: int
    error: float  # of the time's logarithm
    is_held: bool  # by the 80 % range


@cache
def sweeps() -> tuple[Sweep, ...]:
    """All that a preset or a stated network describes; in-place times."""
    folder = os.environ.get("DDPSIM_REFERENCE_DATA")
    if not folder:
        raise ValueError("DDPSIM_REFERENCE_DATA is not set")
    times: dict[tuple[str, Operation], dict[int, float]] = {}
    nodes: dict[str, tuple[int, int]] = {}
    for name in _FILES:
        with (Path(folder) / "nccl" / f"{name}.csv").open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                operation: Any = row.get("op", "all_reduce")
                time_us = float(row["time_us_in_place"] or row["time_us_out_of_place"])
                size, sweep = int(row["size_bytes"]), (row["id"], operation)
                if _LEAST_BYTES <= size <= _MOST_BYTES:
                    times.setdefault(sweep, {})[size] = time_us * 1e-6
                nodes[row["id"]] = int(row["nodes"]), int(row["gpus_per_node"])
    return tuple(
        Sweep(*key, found, keys)
        for key, found in times.items()
        if (keys := _keys(key[0], *nodes[key[0]]))
    )


def _keys(name: str, nodes: int, gpus: int) -> dict[str, Any]:
    """The cluster's keys; empty: no preset describes it."""
    layout = {"nodes": nodes, "gpus_per_node": gpus}
    if name in PRESETS or name in LARGEST or name.startswith("alps"):
        return layout | preset_of(name)
    if name.startswith("polaris"):
        transport = "tcp" if "env1" in name or "env2" in name else "slingshot"
        link = _POLARIS | {"transport": transport}
        return layout | {"device": "a100-sxm-40gb", "nccl": "2.21", "inter_node": link}
    found = _MACHINES.get(name.split("-", maxsplit=1)[0])
    return layout | found if found else {}


@cache
def _network(place: int) -> tuple[str, Any]:
    """Transport ("" in one node) and network of a sweep, by its place."""
    scenario = load_cluster({"cluster": sweeps()[place].keys})
    link = scenario.cluster.link("inter_node")
    several = scenario.cluster.nodes > 1 and isinstance(link, InterNode)
    return link.transport if several else "", network_from_links(scenario)  # type: ignore[union-attr]


def group_of(place: int) -> str:
    """How a sweep's machine is joined, in words."""
    sweep, (transport, _) = sweeps()[place], _network(place)
    if not transport:
        return "inside one node"
    if transport == "rdma" and sweep.keys["gpus_per_node"] <= 2:
        return "part of a node's GPUs"
    return _GROUPS[transport]


def _rows(place: int) -> list[Row]:
    sweep = sweeps()[place]
    layout = sweep.keys["nodes"], sweep.keys["gpus_per_node"]
    return [
        Row(sweep.operation, Sample(*layout, size, time_s))
        for size, time_s in sweep.times_s.items()
    ]


@cache
def _without(machine: str, transport: str) -> Figures:
    """A transport's figures by all machines but one; each counts alike."""
    prior = PRIORS[transport or "rdma"]
    places = [
        place
        for place, sweep in enumerate(sweeps())
        if sweep.machine != machine and _network(place)[0] == transport
    ]
    counts = Counter[str]()
    for place in places:
        counts[sweeps()[place].machine] += len(sweeps()[place].times_s)
    rows, costs = [], []
    for place in places:
        weight = min(1.0, _ROWS_A_MACHINE / counts[sweeps()[place].machine])
        for row in _rows(place):
            rows.append(row._replace(sample=replace(row.sample, weight=weight)))
            costs.append(_network(place)[1].cost)
    return pooled_figures(prior, costs, rows) if rows else prior.medians


@cache
def judged(place: int) -> tuple[Judged, ...]:
    """A sweep's times by the figures of other machines."""
    sweep, (transport, network) = sweeps()[place], _network(place)
    cost: NcclCost = replace(network.cost, figures=_without(sweep.machine, transport))
    found = []
    for size, measured_s in sorted(sweep.times_s.items()):
        predicted_s = duration_ns(cost.transfer(sweep.operation, size)) / NS_PER_S
        error = log(predicted_s / measured_s)
        known = network.uncertainty_of(size, sweep.operation)
        found.append(Judged(size, error, abs(error) <= log(known.factor)))
    return tuple(found)


def grouped() -> list[tuple[str, Sweep]]:
    """All sweeps by how their machines are joined."""
    return [(group_of(place), sweep) for place, sweep in enumerate(sweeps())]


def points_of(group: str, operation: Operation) -> list[Judged]:
    """All times of an operation on machines that are joined alike, the smallest messages first."""
    wanted = [(of, sweep.operation) == (group, operation) for of, sweep in grouped()]
    return sorted(point for place, is_one in enumerate(wanted) if is_one for point in judged(place))


def groups() -> list[str]:
    """Groups of the table, in its order."""
    return ["inside one node", "part of a node's GPUs", *_GROUPS.values()]


def held(points: Sequence[Judged]) -> float:
    """The part that the 80 % range holds."""
    return fmean(point.is_held for point in points)


def quarters(points: Sequence[Judged]) -> list[Sequence[Judged]]:
    """Quarters of the message sizes."""
    edges = [len(points) * part // 4 for part in range(5)]
    return [points[low:high] for low, high in itertools.pairwise(edges)]


def table() -> Iterator[str]:
    """Errors and how often ranges hold, by group and operation."""
    yield (
        "| machines joined by | operation | rows | median | bias | 80 % range holds "
        "| by quarter of the sizes |"
    )
    yield "|---|---|---|---|---|---|---|"
    for group in groups():
        for operation in OPERATIONS:
            points = points_of(group, operation)
            if not points:
                continue
            errors = [expm1(point.error) for point in points]
            parts = " / ".join(f"{held(part):.0%}" for part in quarters(points))
            yield (
                f"| {group} | {operation.replace('_', '-')} | {len(points)} | "
                f"{median(map(abs, errors)):.0%} | {median(errors):+.0%} | {held(points):.0%} | "
                f"{parts} |"
            )


if __name__ == "__main__":
    print("\n".join(table()))
