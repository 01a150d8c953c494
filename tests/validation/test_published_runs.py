"""Published clusters and trainings of weeks, as docs/validation.md tables them."""

from __future__ import annotations

from statistics import median

import pytest
from held_out.published_runs import (
    CLUSTERS,
    failure_rows,
    gpu_hours,
    published,
    run_rows,
    sigma_of_another,
    usual_gpu_hours,
)

from ddpsim.scenario.catalog import failures_of


def test_presets_are_what_was_published() -> None:
    for cluster in ("meta-rsc-1", "meta-rsc-2"):
        failures = published(cluster, "failures in 1000 node-days")
        assert gpu_hours(cluster) == pytest.approx(8 * 24 * 1000 / failures)
    by_failures = {"llama-3": (16_384, 54), "opt-175b": (992, 60)}
    for cluster, (gpus, days) in by_failures.items():
        assert gpu_hours(cluster) == pytest.approx(
            gpus * days * 24 / published(cluster, "failures")
        )
    assert gpu_hours("bloom") == pytest.approx(384 * 168 / published("bloom", "failures in a week"))
    usual = failures_of("usual")
    assert usual["gpu_mtbf_s"] / 3600 == pytest.approx(usual_gpu_hours(), abs=50)
    assert usual["sigma"] == pytest.approx(sigma_of_another(), abs=0.005)


def test_a_cluster_is_predicted_by_the_others() -> None:
    """Within 1.5 times in the median; the 80 % interval has three of five."""
    rows = failure_rows()
    assert [row.cluster for row in rows] == list(CLUSTERS)
    assert median(abs(row.predicted / row.measured - 1) for row in rows) <= 0.5
    assert sum(row.holds for row in rows) == 3


def test_runs_are_predicted_from_what_they_state() -> None:
    said = [(row.predicted, row.measured) for row in run_rows()]
    (of_jobs, measured), (of_nodes, _), (llama, _), (opt, _), (bloom, _), (scale, _) = said
    assert float(of_jobs.split()[0]) == pytest.approx(float(measured.split()[0]), rel=0.15)
    assert float(of_nodes.split()[0]) > 3 * float(measured.split()[0])
    assert 0.84 < float(llama.rstrip("%")) / 100 < 0.9
    assert float(scale.rstrip("%")) > 90
    assert float(opt.rstrip("%")) > 90
    assert bloom == "1.50 h"
