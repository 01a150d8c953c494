"""What boxes without NVLink get of their host, and how well other boxes tell it.

`python -m held_out.box_rates` in tools/ prints the figures of ddpsim.cluster.topology.host that
tests/data/published-box-rates.csv sets. With DDPSIM_REFERENCE_DATA it also prints how users' rates
and steps compare, where each one's source is left out.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import exp, log, sqrt
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple
from unittest.mock import patch

from scipy.stats import t

import ddpsim
from ddpsim.cluster.topology import host
from ddpsim.cluster.topology.host import Prior
from ddpsim.cluster.wires import Wires
from ddpsim.prediction.collective_times import load_cluster
from ddpsim.provenance import Z_80
from held_out.predicted import Predicted, predicted_s
from held_out.user_jobs import document

__all__ = ["BoxRate", "Judged", "box_rates", "judged_rates", "judged_steps", "left_out", "priors"]

FILE = Path(__file__).resolve().parents[2] / "tests" / "data" / "published-box-rates.csv"
MIB = 2**20


class BoxRate(NamedTuple):
    """The bus rate of a large all-reduce on one public box, in GB/s."""

    source: str
    gpus: int
    pcie: int
    way: str
    gb_per_s: float


def box_rates(file: Path = FILE) -> list[BoxRate]:
    """All rows, in the file's order."""
    lines = (line for line in file.read_text("utf-8").splitlines() if not line.startswith("#"))
    rows = csv.DictReader(lines)
    return [
        BoxRate(r["source"], int(r["gpus"]), int(r["pcie"]), r["way"], float(r["busbw_GBps"]))
        for r in rows
    ]


def priors(rows: Sequence[BoxRate]) -> dict[str, Prior]:
    """The geometric mean over sources, and how a next source differs from it, by figure.

    The deviation is of the next source's value, by Student's t, so that 80 % of a normal
    distribution hold 80 % of it. Servers of PCIe 5 are too few for one of their own.
    """
    older = _by_source([r for r in rows if r.way == "shm" and r.pcie < 5], shared=True)
    newest = _by_source([r for r in rows if r.way == "shm" and r.pcie == 5], shared=True)
    peers = _by_source([r for r in rows if r.way == "p2p"], shared=False)
    sigma = _next_sigma(older)
    return {
        "HOST_MEMORY": Prior(_mean(older), sigma),
        "SERVER_OF_PCIE_5": Prior(_mean(newest), sigma),
        "PEER_TO_PEER": Prior(_mean(peers), _next_sigma(peers)),
    }


def _by_source(rows: Sequence[BoxRate], *, shared: bool) -> list[float]:
    """Logarithms of bytes per second, of all GPUs together where they share it: one a source."""
    return [
        fmean(log(1e9 * r.gb_per_s * (r.gpus if shared else 1)) for r in rows if r.source == each)
        for each in dict.fromkeys(r.source for r in rows)
    ]


def _mean(logs: Sequence[float]) -> float:
    return exp(fmean(logs))


def _next_sigma(logs: Sequence[float]) -> float:
    n = len(logs)
    return float(t.ppf(0.9, n - 1) * stdev(logs) * sqrt(1 + 1 / n) / Z_80)


@contextmanager
def left_out(source: str) -> Iterator[None]:
    """The model as all other sources set it."""
    rows = [row for row in box_rates() if row.source != source]
    with ExitStack() as stack:
        for name, prior in priors(rows).items():
            stack.enter_context(patch.object(host, name, prior))
        yield


@dataclass(frozen=True)
class Judged(Predicted):
    """A measured rate or step, predicted without its source."""

    name: str
    source: str


def _published(name: str) -> list[dict[str, str]]:
    path = Path(os.environ["DDPSIM_REFERENCE_DATA"]) / "published" / name
    lines = path.read_text("utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


_CARDS = ("A40", "A6000", "A100", "RTX 4090", "H100 PCIe", "RTX 5090")


def _box(row: dict[str, str]) -> dict[str, Any]:
    """The cluster of a row of user-bus-rates.csv, as its owner would state it."""
    path, gpus = row["path"], int(row["gpus_per_node"])
    box: dict[str, Any] = {"nodes": 1, "gpus_per_node": gpus, "device": row["gpu"]}
    if "NCCL_P2P_DISABLE=1" in path or path == "P2P off":
        box["nccl_env"] = {"NCCL_P2P_DISABLE": 1}
    if "bridge" in path:
        box["host"] = {"bridge": "nvlink"}
    elif path.startswith("P2P") and path != "P2P off":
        box["host"] = {"peer_to_peer": True}
    return box


def judged_rates(*, without_source: bool = True) -> list[Judged]:
    """Rows of user-bus-rates.csv of one node without NVSwitch, each without its source or with."""
    found = []
    for row in _published("user-bus-rates.csv"):
        if row["gpu"] not in _CARDS or row["nodes"] != "1":
            continue
        with left_out(row["source"] if without_source else ""):
            wires = Wires.of(load_cluster({"cluster": _box(row)}).cluster)
        way, rate = wires.way, float(row["busbw_GBps"])
        if way is None:
            raise ValueError(f"{row['id']}: no way through the host")
        each, factor = way.bytes_per_s / 1e9, way.uncertainty.factor
        found.append(Judged(rate, each, each / factor, each * factor, row["id"], row["source"]))
    return found


def _job(row: dict[str, str]) -> dict[str, Any]:
    """A row of user-boxes.csv with the host that its owner could state."""
    found, path = document(row), row["path"]
    if "bridge" in path:
        found["cluster"]["host"] = {"bridge": "nvlink"}
    if "P2P_DISABLE" in path:
        found["cluster"]["nccl_env"] = {"NCCL_P2P_DISABLE": 1}
    if "EPYC" in path:
        found["cluster"]["host"] = {"board": "server", "cpu": "amd"}
    return found


def judged_steps() -> list[Judged]:
    """Rows of user-boxes.csv on GPUs without NVSwitch, in milliseconds, each without its source."""
    found = []
    for row in _published("user-boxes.csv"):
        if row["nodes"] != "1" or not row["step_ms"] or not row["gpu"].startswith("rtx-"):
            continue
        with left_out(row["source"]):
            result = ddpsim.simulate(ddpsim.load_scenario(_job(row)))
        found.append(
            Judged(
                float(row["step_ms"]),
                *(1e3 * each_s for each_s in predicted_s(result)),
                name=f"{row['id']} {row['path']}",
                source=row["source"],
            )
        )
    return found


def _show(title: str, rows: Sequence[Judged]) -> None:
    print(f"\n{title}")
    for row in rows:
        inside = "inside" if row.is_covered else "OUTSIDE"
        print(
            f"  {row.name:24} {row.published:9.1f} measured {row.predicted:9.1f} predicted "
            f"{row.error:+6.0%}  [{row.low:.1f}, {row.high:.1f}] {inside}"
        )
    errors = [abs(row.error) for row in rows]
    held = sum(row.is_covered for row in rows)
    print(f"  median error {median(errors):.0%}; the 80 % interval holds {held} of {len(rows)}")


def main() -> None:
    """Print what the rows set, and how users' rates and steps compare."""
    for name, prior in priors(box_rates()).items():
        print(f"{name:18} {prior.bytes_per_s / 1e9:6.1f} GB/s, sigma {prior.sigma:.2f}")
    if "DDPSIM_REFERENCE_DATA" not in os.environ:
        return
    _show("bus rates, GB/s, each source left out", judged_rates())
    steps = judged_steps()
    _show("steps over PCIe, ms", [row for row in steps if "bridge" not in row.name])
    _show("steps over an NVLink bridge, ms", [row for row in steps if "bridge" in row.name])


if __name__ == "__main__":
    main()
