"""Published all_reduce_perf sweeps beside presets, and beside fits of half of their rows.

python tools/nccl_sweeps.py        prints the tables of docs/validation.md, section 4
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from calibrate.fit.profile import fit_logs
from ddpsim.cluster.fitted.laws import FittedCost
from ddpsim.cluster.fitted.residuals import CorrectedCost, Correction
from ddpsim.cluster.transfers import duration_ns
from ddpsim.importers.all_reduce import AllReduceLog
from ddpsim.prediction.collective_times import collective_table, load_cluster
from ddpsim.units import NS_PER_S

MIB = 2**20
SMALL, MIDDLE, LARGE, HUGE = (
    (1, 256 * 1024),
    (256 * 1024 + 1, 2 * MIB),
    (4 * MIB, 32 * MIB),
    (
        256_000_000,
        2**40,
    ),
)
BANDS = {"to 256 KiB": SMALL, "to 2 MiB": MIDDLE, "4-32 MiB": LARGE, ">= 256 MB": HUGE}

_GPUS = {"alps": "gh200-96gb", "polaris": "a100-sxm-40gb", "abci-A": "a100-sxm-40gb"}
_GPUS["abci-V"] = "v100-sxm-16gb"
_EDR, _HDR = "100 Gbit/s", "200 Gbit/s"


def _abci(nodes: int, kind: str) -> dict[str, Any]:
    """Nodes with A100 or V100.

    Two NICs a node are inferred: its sweeps' slopes fit no other number. So is that NCCL has no
    LL128 between nodes of V100, whose rings show LL up to 64 KiB a rank.
    """
    common = {"nccl": "2.8", "nodes": nodes}
    if kind == "A":
        link: dict[str, Any] = {"bandwidth": _HDR, "nics_per_node": 2}
        return {"machine": "dgx-a100", "inter_node": link} | common
    link = {"bandwidth": _EDR, "nics_per_node": 2, "gpu_direct": False}
    return {"machine": "dgx-1-v100", "gpus_per_node": 4, "inter_node": link} | common


PRESETS: dict[str, dict[str, Any]] = {
    "superbench-1x8-A100": {"machine": "dgx-a100", "nccl": "2.10"},  # a log of 2021
    "abci-A-1x4": {"machine": "dgx-a100", "nccl": "2.8", "gpus_per_node": 4},
    "abci-A-1x8": {"machine": "dgx-a100", "nccl": "2.8"},
    "abci-V-1x4": {"machine": "dgx-1-v100", "nccl": "2.8", "gpus_per_node": 4},
    "dgxc-1x8-H100": {"machine": "dgx-h100"},
    **{f"abci-A-{nodes}x8": _abci(nodes, "A") for nodes in (2, 4)},
    **{f"abci-V-{nodes}x4": _abci(nodes, "V") for nodes in (2, 4, 8, 16)},
    "aws-p4de-2x8": {"machine": "p4d.24xlarge", "nodes": 2},
    "aws-efa-eks-p4d-2x8": {
        "machine": "p4d.24xlarge",
        "nodes": 2,
        "nccl_env": {"NCCL_ALGO": "RING"},
    },
    "aws-p5-2x8": {"machine": "p5.48xlarge", "nodes": 2},
    "aws-eks-p5-2x8": {"machine": "p5.48xlarge", "nodes": 2},
    "gcp-a3mega-2x8": {"machine": "a3-mega", "nodes": 2},
    "nebius-2x8": {"machine": "dgx-h100", "nodes": 2},
    "lambda-2x8": {"machine": "dgx-b200", "nodes": 2},
    "aws-tcp-socket-2x1": {
        "machine": "g4dn.12xlarge",
        "gpus_per_node": 1,
        "nodes": 2,
        "inter_node": {"flow_bandwidth": "10 Gbit/s", "connections": 2},
    },
    "aws-eks-T4-2x1": {
        "machine": "g4dn.12xlarge",
        "gpus_per_node": 1,
        "nodes": 2,
        "inter_node": {"transport": "efa"},
    },
}
# sweeps that set no figure: read when the constants and all but two mechanisms stood
LARGEST = {
    "abci-A-8x8": _abci(8, "A"),
    "abci-A-16x8": _abci(16, "A"),
    "abci-V-32x4": _abci(32, "V"),
}
_LARGEST_FILE = Path(__file__).parents[1] / "tests" / "data" / "abci-held-out.csv"


@dataclass(frozen=True)
class Point:
    """One message of a sweep: seconds."""

    size_bytes: int
    measured_s: float
    predicted_s: float
    range_s: tuple[float, float] = (0.0, 0.0)  # 80 %

    @property
    def error(self) -> float:
        """Of the time."""
        return self.predicted_s / self.measured_s - 1

    @property
    def is_held(self) -> bool:
        """Within the 80 % range."""
        return self.range_s[0] <= self.measured_s <= self.range_s[1]

    @property
    def bandwidth_error(self) -> float:
        """Of the bus bandwidth."""
        return self.measured_s / self.predicted_s - 1


@cache
def sweeps() -> dict[str, AllReduceLog]:
    """The reference data's sweeps by name; in-place times."""
    folder = os.environ.get("DDPSIM_REFERENCE_DATA")
    if not folder:
        raise ValueError("DDPSIM_REFERENCE_DATA is not set")
    names = ("all_reduce", "all_reduce_network", "alps_all_reduce", "collectives_2026")
    files = (Path(folder) / "nccl" / f"{name}.csv" for name in names)
    return _logs(file.read_text("utf-8").splitlines() for file in files)


@cache
def largest() -> dict[str, AllReduceLog]:
    """The sweeps that set nothing."""
    lines = _LARGEST_FILE.read_text("utf-8").splitlines()
    return _logs([[line for line in lines if not line.startswith("#")]])


def _logs(files: Iterable[Sequence[str]]) -> dict[str, AllReduceLog]:
    found: dict[str, list[dict[str, str]]] = {}
    for row in (row for lines in files for row in csv.DictReader(lines)):
        if row.get("op", "all_reduce") == "all_reduce":
            found.setdefault(row["id"], []).append(row)
    return {name: _log(name, rows) for name, rows in found.items()}


def _log(name: str, rows: Sequence[dict[str, str]]) -> AllReduceLog:
    samples = {
        int(row["size_bytes"]): float(row["time_us_in_place"] or row["time_us_out_of_place"]) * 1e-6
        for row in rows
        if int(row["size_bytes"])
    }
    first = rows[0]
    layout = int(first["nodes"]), int(first["gpus_per_node"])
    gpu = first.get("gpu") or next(
        (gpu for start, gpu in _GPUS.items() if name.startswith(start)), ""
    )
    gpus = (gpu.split(" (")[0],) if gpu else ()
    return AllReduceLog(name, "nccl-tests", *layout, tuple(sorted(samples.items())), gpus)


def log_of(name: str) -> AllReduceLog:
    """A sweep, of either kind."""
    return largest()[name] if name in LARGEST else sweeps()[name]


def preset_of(name: str) -> dict[str, Any]:
    """The keys of its cluster."""
    if name.startswith("alps"):
        return {"machine": "alps-gh200", "nccl": "2.23"}
    return LARGEST[name] if name in LARGEST else PRESETS[name]


@cache
def from_presets(name: str) -> tuple[Point, ...]:
    """Every row of a sweep from presets alone."""
    log, keys = log_of(name), {"nodes": 1} | preset_of(name)
    scenario = load_cluster({"cluster": keys})
    table = collective_table(scenario, "all_reduce", [size for size, _ in log.samples])
    return tuple(
        Point(row.size_bytes, measured_s, row.time_s, (row.low_s, row.high_s))
        for row, (_, measured_s) in zip(table.rows, log.samples, strict=True)
    )


def within(points: Sequence[Point], band: tuple[int, int]) -> list[Point]:
    """Those of a band of sizes."""
    return [point for point in points if band[0] <= point.size_bytes <= band[1]]


@cache
def odd_rows(name: str) -> tuple[Point, ...]:
    """A sweep's odd rows, predicted by a fit of its even ones."""
    log = sweeps()[name]
    return _predicted(log, [_part(log, 0)], log.samples[1::2])


def _part(log: AllReduceLog, first: int) -> AllReduceLog:
    return AllReduceLog(log.source, log.kind, log.nodes, log.gpus_per_node, log.samples[first::2])


def _predicted(
    log: AllReduceLog, fitted: Sequence[AllReduceLog], wanted: Sequence[tuple[int, float]]
) -> tuple[Point, ...]:
    profile = fit_logs(fitted, "sweep")
    layout = log.nodes, log.gpus_per_node
    cost = CorrectedCost(
        FittedCost(profile.all_reduce, *layout, None),
        Correction.of(profile.all_reduce, profile.measured, *layout),
    )
    return tuple(
        Point(size, measured_s, duration_ns(cost.transfer("all_reduce", size)) / NS_PER_S)
        for size, measured_s in wanted
    )


def pooled_odd_rows() -> list[Point]:
    """Of all sweeps."""
    return [point for name in PRESETS for point in odd_rows(name)]


def typical(points: Sequence[Point], of: Callable[[Point], float] | None = None) -> str:
    """Median error with its sign, of the median magnitude beside it."""
    if not points:
        return ""
    errors = [(of or (lambda point: point.error))(point) for point in points]
    return f"{median(errors):+.0%} ({median(abs(error) for error in errors):.0%})"


def table() -> Iterator[str]:
    """Errors of the time from presets by band, and of the odd rows after a fit of the even."""
    yield "| sweep | preset | " + " | ".join(BANDS) + " | odd rows, fitted |"
    yield "|---|---|" + "---|" * (len(BANDS) + 1)
    for name in PRESETS:
        points = from_presets(name)
        bands = " | ".join(typical(within(points, band)) for band in BANDS.values())
        odd = f"{median(abs(point.error) for point in odd_rows(name)):.1%}"
        yield f"| {name} | {PRESETS[name]['machine']} | {bands} | {odd} |"


if __name__ == "__main__":
    print("\n".join(table()))
