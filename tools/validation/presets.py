"""Presets of devices and machines beside published all-reduces, TCP rates and steps over TCP."""

from __future__ import annotations

import csv
import math
import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from held_out.predicted import Predicted, predicted_s

import ddpsim
from ddpsim.cluster import transports
from ddpsim.cluster.from_links import TCP_NETWORK
from ddpsim.cluster.transfers import duration_ns
from ddpsim.prediction.api import predict
from ddpsim.prediction.collective_times import collective_table, load_cluster
from ddpsim.provenance import Z_80
from ddpsim.scenario.catalog import machine_table
from ddpsim.units import MIB, NS_PER_S
from validation.markdown import markdown
from validation.rows import job_of

# nccl-tests all_reduce_perf, 32 MiB in place: sweep, device, nodes, GPUs a node, microseconds
SWEEPS = (
    ("ABCI V", "v100-sxm-16gb", 1, 4, 447.7),
    ("ABCI A", "a100-sxm-40gb", 1, 4, 279.2),
    ("ABCI A", "a100-sxm-40gb", 1, 8, 358.5),
    ("SuperBench", "a100-sxm-40gb", 1, 8, 372.8),
    ("NVIDIA dgxc-benchmarking", "h100-sxm-80gb", 1, 8, 198.9),
    ("ABCI V", "v100-sxm-16gb", 2, 4, 2969.8),
    ("ABCI V", "v100-sxm-16gb", 4, 4, 3157.7),
    ("ABCI V", "v100-sxm-16gb", 8, 4, 3318.2),
    ("ABCI A", "a100-sxm-40gb", 2, 8, 1885.6),
    ("AWS p4de, EFA", "a100-sxm-80gb", 2, 8, 1540.7),
    ("AWS p5, EFA", "h100-sxm-80gb", 2, 8, 417.7),
    ("dstack, Nebius", "h100-sxm-80gb", 2, 8, 276.45),
    ("dstack, Lambda", "b200", 2, 8, 253.88),
)

PUBLISHED = Path(__file__).parents[2] / "tests" / "data" / "published-collectives.csv"
_OVER_TCP = Path(__file__).parents[2] / "tests" / "data" / "published-tcp.csv"
# what one thread of NCCL's copies each way, GB/s, by site (`PROXY_BYTES_PER_S` is their median)
_PROXY_GB_PER_S = {"Polaris": 1.55, "Google": 1.9, "aws-do-eks": 2.0, "DDP on V100": 2.6}

# EFA of June 2019 took twice as long as that of 2020 from 256 KiB on
NCCL: dict[str, dict[str, Any]] = {
    "aws-p3dn-2x8": {"nccl": "2.4", "nccl_env": {"NCCL_TREE_THRESHOLD": 0}},
    "aws-p3dn-2020-2x8": {"nccl": "2.4"},
}
_SET_BY = ("4", "8")  # batches whose steps set the rate of a connection


@cache
def preset_errors() -> tuple[float, ...]:
    """Presets over measured all-reduce times, minus 1, for every entry of SWEEPS."""
    return tuple(_preset_s(*sweep[1:4]) / (sweep[4] * 1e-6) - 1 for sweep in SWEEPS)


def _preset_s(device: str, nodes: int, gpus: int) -> float:
    cluster = {"nodes": nodes, "gpus_per_node": gpus, "device": device}
    job = job_of({"workload": {"model": "resnet50", "batch_per_rank": 1}, "cluster": cluster})
    return duration_ns(job.network.cost.transfer("all_reduce", 32 * MIB)) / NS_PER_S


def preset_sigma(*, several_nodes: bool) -> float:
    """Root mean square of the logarithmic errors, on one node or on several."""
    chosen = zip(SWEEPS, preset_errors(), strict=True)
    errors = [error for sweep, error in chosen if (sweep[2] > 1) == several_nodes]
    return math.sqrt(fmean(math.log1p(error) ** 2 for error in errors))


def preset_table() -> str:
    """An all-reduce of 32 MiB on each preset: measured, and the error."""
    rows = (
        (name, device, f"{nodes} x {gpus}", f"{time_us:.0f} us", f"{error:+.0%}")
        for (name, device, nodes, gpus, time_us), error in zip(SWEEPS, preset_errors(), strict=True)
    )
    return markdown(["sweep", "device", "nodes x GPUs", "measured", "error"], rows)


class Sweep(NamedTuple):
    """Times in seconds by size in bytes of one machine in one number."""

    name: str
    machine: str
    nodes: int
    times_s: dict[int, float]

    def errors(self) -> dict[int, float]:
        """Logarithm of predicted over measured, by size."""
        keys = {"machine": self.machine, "nodes": self.nodes} | NCCL.get(self.name, {})
        scenario = load_cluster({"cluster": keys})
        rows = collective_table(scenario, "all_reduce", list(self.times_s)).rows
        return {row.size_bytes: math.log(row.time_s / self.times_s[row.size_bytes]) for row in rows}


@cache
def sweeps() -> dict[str, Sweep]:
    """Of machines whose presets they did not set."""
    lines = PUBLISHED.read_text("utf-8").splitlines()
    found: dict[str, list[dict[str, str]]] = defaultdict(list)
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        found[row["id"]].append(row)
    return {name: _sweep(name, rows) for name, rows in found.items()}


def _sweep(name: str, rows: list[dict[str, str]]) -> Sweep:
    times_s = {int(row["size_bytes"]): _time_s(row) for row in rows}
    return Sweep(name, rows[0]["machine"], int(rows[0]["nodes"]), times_s)


def _time_s(row: dict[str, str]) -> float:
    """As published, or of the bus bandwidth: 2 (n - 1) / n of the bytes at its rate."""
    if row["time_us"]:
        return float(row["time_us"]) / 1e6
    ranks = int(row["nodes"]) * machine_table(row["machine"])["gpus_per_node"]
    on_the_bus = int(row["size_bytes"]) * 2 * (ranks - 1) / ranks
    return float(on_the_bus / (float(row["bus_gb_per_s"]) * 1e9))


def machines_table() -> str:
    """Their errors; of messages from 1 MiB too."""
    return markdown(["sweep", "machine", "rows", "median", "bias", "worst"], _of_machines())


def _of_machines() -> Iterator[tuple[str, ...]]:
    for name, sweep in sweeps().items():
        errors = [math.expm1(error) for error in sweep.errors().values()]
        half, bias = median(map(abs, errors)), median(errors)
        worst = max(errors, key=abs)
        levels = f"{half:.0%}", f"{bias:+.0%}", f"{worst:+.0%}"
        yield name, sweep.machine, f"{len(errors)}", *levels


def _level(errors: list[float]) -> str:
    half, bias, worst = median(map(abs, errors)), median(errors), max(errors, key=abs)
    return f"median {half:.0%}, bias {bias:+.0%}, worst {worst:+.0%}"


@cache
def tcp_steps() -> tuple[Predicted, ...]:
    """On 2 to 4 nodes of 1 to 4 GPUs, of batches that did not set the rate of a connection."""
    file = Path(os.environ["DDPSIM_REFERENCE_DATA"]) / "published" / "t4-tcp-bert-steps.csv"
    rows = list(csv.DictReader(file.read_text("utf-8").splitlines()))
    alone = {row["batch_per_rank"]: row["step_s"] for row in rows if row["placement"] == "1"}
    asked = [row for row in rows if row["nodes"] != "1" and row["batch_per_rank"] not in _SET_BY]
    return tuple(_step(row, alone[row["batch_per_rank"]]) for row in asked)


def _step(row: dict[str, str], alone_s: str) -> Predicted:
    layout = {"nodes": int(row["nodes"]), "gpus_per_node": int(row["gpus_per_node"])}
    step = {"step_time": f"{alone_s} s", "batch_per_rank": int(row["batch_per_rank"])}
    scenario = {
        "schema": "ddpsim/1",
        "workload": {"model": "bert-base", **step},
        "cluster": {"machine": "g4dn.12xlarge", "nccl": "2.7", **layout},
    }
    result = predict(ddpsim.load_scenario(scenario))
    return Predicted(float(row["step_s"]), *predicted_s(result))


class Rate(NamedTuple):
    """A published bus bandwidth, and the prediction without its site; GB/s."""

    name: str
    site: str
    published: float
    predicted: float

    @property
    def error(self) -> float:
        """Error of the time, as a logarithm."""
        return math.log(self.published / self.predicted)

    @property
    def is_held(self) -> bool:
        """Within the 80 % range of a network over TCP."""
        return abs(self.error) <= Z_80 * TCP_NETWORK.sigma


@cache
def rates() -> tuple[Rate, ...]:
    """Every row of the file."""
    lines = _OVER_TCP.read_text("utf-8").splitlines()
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    return tuple(_rate(row) for row in rows)


def _rate(row: dict[str, str]) -> Rate:
    network = {"bandwidth": f"{row['gbit_per_s']} Gbit/s", "transport": "tcp"}
    keys: dict[str, Any] = {
        "device": row["device"],
        "nodes": int(row["nodes"]),
        "gpus_per_node": int(row["gpus_per_node"]),
        "inter_node": network | {"nics_per_node": int(row["nics"])},
        "nccl_env": dict(each.split("=") for each in row["env"].split()),
    }
    if row["nccl"]:
        keys["nccl"] = row["nccl"]
    others = [rate for site, rate in _PROXY_GB_PER_S.items() if site != row["site"]]
    with _proxy_of(1e9 * median(others)):
        table = collective_table(
            load_cluster({"cluster": keys}), "all_reduce", [int(row["size_bytes"])]
        )
    predicted = table.rows[0].busbw_bytes_per_s / 1e9
    return Rate(row["id"], row["site"], float(row["bus_gb_per_s"]), predicted)


@contextmanager
def _proxy_of(bytes_per_s: float) -> Iterator[None]:
    kept = transports.PROXY_BYTES_PER_S  # a site helped to set it
    transports.PROXY_BYTES_PER_S = bytes_per_s
    try:
        yield
    finally:
        transports.PROXY_BYTES_PER_S = kept


def tcp_table() -> str:
    """Steps, and rates of large messages."""
    steps = tcp_steps()
    errors = [step.error for step in steps]
    rows = [
        (
            "BERT steps on 2 to 4 g4dn.12xlarge",
            f"{len(steps)}",
            _level(errors) + f"; interval holds {sum(step.is_covered for step in steps)}",
        )
    ]
    found = [math.expm1(rate.error) for rate in rates()]
    said = f"{_level(found)}; interval holds {sum(rate.is_held for rate in rates())}"
    rows.append(("all-reduces over TCP of six sites, each left out", f"{len(found)}", said))
    return markdown(["what", "rows", "level"], rows)
