"""Published trainings of weeks, predicted from inputs that do not come from them.

How often a cluster fails is predicted from the other published clusters alone. Effective time is
simulated from a run's own failures, and from inputs that nobody published, which are named.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from functools import cache
from math import exp, log, sqrt
from pathlib import Path
from statistics import fmean, median, stdev

from ddpsim.provenance import Z_80
from ddpsim.reliability.many_runs import Draws, Runs, simulate_runs
from ddpsim.reliability.operation import Operation, best_interval_s
from ddpsim.scenario.catalog import failures_of
from ddpsim.units import format_number

__all__ = ["CLUSTERS", "FailureRow", "RunRow", "failure_rows", "failures_summary"]
__all__ += ["failures_table", "run_rows", "runs_table", "sigma_of_another", "usual_gpu_hours"]

_DATA = Path(__file__).resolve().parents[2] / "tests" / "data" / "published-runs.csv"
_HOUR, _DAY = 3600.0, 86400.0
_GPUS_OF_A_NODE = 8
_RUNS = 500
CLUSTERS = ("meta-rsc-1", "meta-rsc-2", "llama-3", "opt-175b", "bloom")
_EXPOSED = {  # GPUs and days over which a cluster's failures are counted
    "meta-rsc-1": ("1,000 node-days", 8, 1000.0),
    "meta-rsc-2": ("1,000 node-days", 8, 1000.0),
    "llama-3": ("16,384 GPUs, 54 days", 16_384, 54.0),
    "opt-175b": ("992 GPUs, 60 days", 992, 60.0),
    "bloom": ("384 GPUs, a week", 384, 7.0),
}


@cache
def published(run: str, quantity: str) -> float:
    """A published figure by its run and its quantity, in the unit of the table."""
    with _DATA.open(encoding="utf-8", newline="") as file:
        rows = {(row["run"], row["quantity"]): row for row in csv.DictReader(file)}
    return float(rows[run, quantity]["published"])


def gpu_hours(cluster: str) -> float:
    """Mean time between failures of one GPU."""
    known = failures_of(cluster)
    seconds = known.get("gpu_mtbf_s") or _GPUS_OF_A_NODE * known["node_mtbf_s"]
    return float(seconds) / _HOUR


def _logs(but: str = "") -> list[float]:
    return [log(gpu_hours(cluster)) for cluster in CLUSTERS if cluster != but]


def usual_gpu_hours(but: str = "") -> float:
    """The geometric mean over clusters, of which one may be left out."""
    return exp(fmean(_logs(but)))


def sigma_of_another(but: str = "") -> float:
    """The standard deviation of the logarithm for one more cluster."""
    known = _logs(but)
    return stdev(known) * sqrt(1 + 1 / len(known))


@dataclass(frozen=True)
class FailureRow:
    """A cluster's failures, as the others predict them, with 80 % edges."""

    cluster: str
    over: str
    predicted: float
    low: float
    high: float
    measured: float

    @property
    def holds(self) -> bool:
        """Whether the interval has the published figure."""
        return self.low <= self.measured <= self.high


def failure_rows() -> list[FailureRow]:
    """Each cluster from the four others."""
    rows = []
    for cluster, (over, gpus, days) in _EXPOSED.items():
        hours = gpus * days * 24
        predicted = hours / usual_gpu_hours(cluster)
        factor = exp(Z_80 * sigma_of_another(cluster))
        measured = hours / gpu_hours(cluster)
        row = (cluster, over, predicted, predicted / factor, predicted * factor, measured)
        rows.append(FailureRow(*row))
    return rows


@dataclass(frozen=True)
class RunRow:
    """One figure of a published run beside the simulated one."""

    run: str
    quantity: str
    stated: str
    assumed: str
    predicted: str
    measured: str


def _run(mtbf_s: float, interval_s: float | None, save_s: float, **others: float) -> Runs:
    """Runs of 30 days of steps that fail so often; no interval: the best one."""
    usual = Operation(work_s=30 * _DAY, crash_per_s=1 / mtbf_s, checkpoint_s=save_s)
    defaults = {"detect_s": 600.0, "replace_s": 300.0, "init_s": 60.0}
    asked = replace(usual, **(defaults | others))  # type: ignore[arg-type] -- all are seconds
    saved = asked.with_interval(interval_s or best_interval_s(save_s, mtbf_s))
    return simulate_runs([saved] * _RUNS, Draws(0, _RUNS))


def _effective(runs: Runs) -> str:
    return f"{runs.spent_s['steps'].sum() / runs.time_s.sum():.1%}"


def run_rows() -> list[RunRow]:
    """Meta's research cluster, Llama 3, OPT-175B, BLOOM and MegaScale."""
    eight_h = 24 * published("meta-rsc-1", "MTTF of 8 GPUs")
    of_nodes_h = failures_of("meta-rsc-1")["node_mtbf_s"] / _HOUR
    measured = f"{published('meta-rsc-1', 'MTTF of 1,024 GPUs'):g} h"
    llama = _run(54 * _DAY / published("llama-3", "stops"), None, 4, init_s=60 + 0.02 * 16_384)
    opt = _run(60 * _DAY / published("opt-175b", "failures"), None, 60, init_s=80, load_s=60)
    bloom = _run(7 * _DAY / published("bloom", "failures in a week"), 3 * _HOUR, 60, load_s=60)
    lost_h = bloom.spent_s["lost_work"].sum() / bloom.interruptions.sum() / _HOUR
    scale_mtbf_s = gpu_hours("llama-3") * _HOUR / 12_288
    scale = _run(scale_mtbf_s, 1740, 1, init_s=30, replace_s=0)
    usual = "detection 10 min, a spare node 5 min, init 60 s and 20 ms a rank"
    return [
        RunRow(
            "Meta, 1,024 A100",
            "MTTF",
            "MTTF of 8 GPUs, 47.7 days",
            "none",
            f"{eight_h * 8 / 1024:.3g} h",
            measured,
        ),
        RunRow(
            "Meta, 1,024 A100",
            "MTTF",
            "6.50 failures in 1,000 node-days",
            "none",
            f"{of_nodes_h / 128:.3g} h",
            measured,
        ),
        RunRow(
            "Llama 3, 16,384 H100",
            "effective time",
            "466 stops in 54 days",
            f"{usual}; 4 s a checkpoint, the best interval",
            _effective(llama),
            "> 90 %",
        ),
        RunRow(
            "OPT-175B, 992 A100",
            "effective time",
            "105 restarts in 60 days",
            f"{usual}; 60 s a checkpoint, the best interval",
            _effective(opt),
            f"{published('opt-175b', 'effective time'):.0%}",
        ),
        RunRow(
            "BLOOM, 384 A100",
            "lost work of a failure",
            "1.5 failures a week, a checkpoint every 3 h",
            "none that counts",
            f"{lost_h:.2f} h",
            f"{published('bloom', 'lost work of a failure'):g} h",
        ),
        RunRow(
            "MegaScale, 12,288 GPUs",
            "effective time",
            "detection 10 min, start 30 s, 15 min back to where it was",
            "fails as Llama 3 did; a checkpoint every 29 min",
            _effective(scale),
            "> 90 %",
        ),
    ]


def failures_table() -> str:
    """How often clusters fail, each as the others predict it."""
    lines = ["| cluster | over | predicted | 80 % interval | published | error | holds |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for row in failure_rows():
        error = row.predicted / row.measured - 1
        lines.append(
            f"| {row.cluster} | {row.over} | {format_number(row.predicted)} "
            f"| {format_number(row.low)} to {format_number(row.high)} "
            f"| {format_number(row.measured)} | {error:+.0%} | {'yes' if row.holds else 'no'} |"
        )
    return "\n".join(lines)


def failures_summary() -> str:
    """Median error and coverage of the table."""
    rows = failure_rows()
    errors = [row.predicted / row.measured - 1 for row in rows]
    held = sum(row.holds for row in rows)
    return (
        f"Median error {median(map(abs, errors)):.0%}; the 80 % interval holds in {held} of "
        f"{len(rows)} cases."
    )


def runs_table() -> str:
    """Published figures of whole runs beside simulated ones."""
    lines = ["| run | figure | stated inputs | assumed inputs | predicted | published |"]
    lines += ["|---|---|---|---|---|---|"]
    lines += [
        f"| {row.run} | {row.quantity} | {row.stated} | {row.assumed} | {row.predicted} "
        f"| {row.measured} |"
        for row in run_rows()
    ]
    return "\n".join(lines)
