"""The recorded campaigns: their reports, and their rounds predicted anew."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import campaigns

from calibrate.validate.report import Figures, Sweep, Validation, figures_of
from calibrate.validate.validate import validate

EPYC = campaigns.unpacked() / "testbed"
XEON = campaigns.unpacked() / "testbed-xeon"
FAST_XEON = campaigns.unpacked() / "testbed-fast-xeon"  # calls itself the same
SLOW_EPYC = campaigns.unpacked() / "testbed-slow-epyc"
CALM_EPYC = campaigns.unpacked() / "testbed-calm-epyc"  # of the same kind
STRATEGIES = campaigns.unpacked() / "testbed-strategies"  # no bucket caps: every strategy
SHARDED = campaigns.unpacked() / "testbed-sharded"  # the sharded ones alone, on another EPYC
UNSEEN = campaigns.unpacked() / "testbed-unseen"  # with FSDP1, of models that set nothing
BLIND = campaigns.unpacked() / "testbed-blind"  # of models that came after all of the model
# of FAST_XEON the runs that were measured as `calibrate rounds` does now, as a campaign of its own
LATER_RUNS = {0.2: (2, 3), 0.8: (2, 3), 2: (3, 4), 5: (3, 4)}  # by Gbit/s
LATER = FAST_XEON.with_name("fast-xeon-later-runs.json")
CAMPAIGNS = {  # by the machine that was the testbed
    EPYC: "AMD EPYC",
    XEON: "Intel Xeon",
    FAST_XEON: "faster Xeon",
    SLOW_EPYC: "slower EPYC, restless",
    CALM_EPYC: "slower EPYC, calm",
}


@cache
def campaign(folder: Path) -> Validation:
    """A recorded campaign, as its report says."""
    return Validation.model_validate_json(report_of(folder).read_bytes())


def predicted(folder: Path, rounds: str = "rounds-*.json") -> Validation:
    """A recorded campaign, predicted anew from its profile, on all cores; or these rounds of it."""
    return _predicted(folder, rounds_of(folder, rounds))


def later() -> Validation:
    """The later runs of the faster Intel's campaign alone, as their report says."""
    return Validation.model_validate_json(LATER.read_bytes())


def later_predicted() -> Validation:
    """The same, predicted anew."""
    files = [
        path
        for rate, runs in LATER_RUNS.items()
        for run in runs
        for path in sorted(FAST_XEON.glob(f"rounds-*-{rate:g}gbit-2hosts.run{run}.json"))
    ]
    return _predicted(FAST_XEON, files)


def _predicted(folder: Path, files: list[Path]) -> Validation:
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        return validate(files, folder / "cluster.json", pool.map)


def rounds_of(folder: Path, rounds: str = "rounds-*.json") -> list[Path]:
    """The files of a campaign's rounds."""
    return sorted(folder.glob(rounds))


def report_of(folder: Path) -> Path:
    """Where a campaign's report is kept."""
    return folder.with_suffix(".json")


def by_rate(sweeps: Sequence[Sweep]) -> dict[float, list[Sweep]]:
    """The sweeps of each line rate (bytes per second), from the slowest."""
    found: dict[float, list[Sweep]] = {}
    for sweep in sorted(sweeps, key=lambda sweep: sweep.line_rate_bytes_per_s or 0.0):
        found.setdefault(sweep.line_rate_bytes_per_s or math.nan, []).append(sweep)
    return found


def figures_of_sweeps(sweeps: Sequence[Sweep]) -> Figures:
    """The figures of sweeps; raises ValueError where there is none."""
    figures = figures_of(sweeps)
    if figures is None:
        raise ValueError("no sweep")
    return figures


def own_cores(folder: Path) -> list[Sweep]:
    """The sweeps whose ranks have cores of their own."""
    return [sweep for sweep in campaign(folder).sweeps if not sweep.oversubscribed]
