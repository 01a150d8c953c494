"""Fits of nccl-tests sweeps that others published.

With DDPSIM_REFERENCE_DATA naming a folder that holds them: `nccl/all_reduce.csv` and
`nccl/logs/ID.txt`.
"""

from __future__ import annotations

import csv
import os
from collections import defaultdict
from pathlib import Path
from statistics import median

import pytest
from measured.refits import assert_same_times, relative_errors, rounded_otherwise

from calibrate.fit.profile import NOT_STATED, fit_all_reduce, fit_logs, samples_of_logs
from calibrate.fit.samples import FitError, Sample
from ddpsim.importers.all_reduce import AllReduceLog, read_all_reduce
from ddpsim.scenario.quantity import SourceFile


def test_logs_of_two_clusters_or_one_log_twice_are_refused() -> None:
    def log(source: str, times: float, *gpus: str) -> AllReduceLog:
        rows = tuple((2**i, times * (1e-5 + 2**i / 1e10)) for i in range(12, 26))
        return AllReduceLog(source, "nccl-tests log", 1, 4, rows, gpus)

    a, other = log("a.txt", 1.0, "V100"), log("b.txt", 1.1, "A100")
    with pytest.raises(FitError, match=r"a\.txt is of V100, but b\.txt of A100: fit one profile"):
        fit_logs([a, other], "m")
    with pytest.raises(
        FitError, match=r"a\.txt and c\.txt hold the same measurements, which would"
    ):
        fit_logs([a, log("c.txt", 1.0)], "m")
    of_one = fit_logs([a, log("d.txt", 1.1)], "m")  # of GPUs that are not told
    assert of_one.provenance.machine == "V100"
    untold, mixed = log("e.txt", 1.2), log("f.txt", 1.2, "A100", "V100")
    for one in (untold, mixed):
        assert fit_logs([one], "m").provenance.machine == NOT_STATED


REFERENCE = os.environ.get("DDPSIM_REFERENCE_DATA")


needs_reference = pytest.mark.skipif(
    REFERENCE is None, reason="DDPSIM_REFERENCE_DATA names no folder of nccl-tests sweeps"
)


def _sweeps() -> dict[str, list[Sample]]:
    sweeps = defaultdict(list)
    with (Path(REFERENCE or "") / "nccl" / "all_reduce.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            sweeps[row["id"]].append(
                Sample(
                    int(row["nodes"]),
                    int(row["gpus_per_node"]),
                    int(row["size_bytes"]),
                    float(row["time_us_in_place"]) * 1e-6,
                )
            )
    return dict(sweeps)


def _abci_log(layout: str) -> AllReduceLog:
    path = Path(REFERENCE or "") / "nccl" / "logs" / f"abci-V-{layout}.txt"
    return read_all_reduce(SourceFile(path.name, path))


@needs_reference
@pytest.mark.parametrize(
    ("fitted", "held_out", "limit"),
    [(("1x4", "2x4", "4x4"), "8x4", 0.06), (("2x4", "8x4"), "4x4", 0.10)],
)
def test_a_layout_that_was_not_fitted(fitted: tuple[str, ...], held_out: str, limit: float) -> None:
    """Median error over sizes of 64 KiB or more; wanted: 15 %."""
    profile = fit_logs([_abci_log(layout) for layout in fitted], "ABCI V100")
    samples = [s for s in samples_of_logs([_abci_log(held_out)]) if s.size_bytes >= 65536]
    assert median(relative_errors(profile.all_reduce, samples)) < limit


@needs_reference
@pytest.mark.parametrize("name", ["lambda-2x8", "abci-A-2x8", "abci-V-4x4", "dgxc-1x8-H100"])
def test_rounding_does_not_choose_the_fit_of_half_a_sweep(name: str) -> None:
    """Its rows are about as many as the figures of the regimes that they tell."""
    every = _sweeps()[name]
    samples = every[::2]
    models = [fit_all_reduce(s, "nccl").model for s in (samples, rounded_otherwise(samples))]
    assert_same_times(*models, at=every)
