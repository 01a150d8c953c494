"""Published BERT steps on T4 nodes over TCP, of which one half set the rate of a connection."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from statistics import median

import pytest

import ddpsim
from ddpsim.prediction.api import predict

needs_reference = pytest.mark.skipif(
    not os.environ.get("DDPSIM_REFERENCE_DATA"),
    reason="DDPSIM_REFERENCE_DATA is not set: no published steps",
)


@needs_reference
def test_steps_over_tcp_are_predicted_by_those_of_other_batches() -> None:
    """Batches of 6 and 11; those of 4 and 8 set the preset. Median 8 %, and nine in ten held."""
    folder = Path(os.environ["DDPSIM_REFERENCE_DATA"])
    text = (folder / "published" / "t4-tcp-bert-steps.csv").read_text("utf-8")
    rows = list(csv.DictReader(text.splitlines()))
    alone = {row["batch_per_rank"]: row["step_s"] for row in rows if row["placement"] == "1"}
    errors, held = [], []
    for row in rows:
        if row["nodes"] == "1" or row["batch_per_rank"] in ("4", "8"):
            continue
        batch, measured_s = row["batch_per_rank"], float(row["step_s"])
        layout = {"nodes": int(row["nodes"]), "gpus_per_node": int(row["gpus_per_node"])}
        step = {"step_time": f"{alone[batch]} s", "batch_per_rank": int(batch)}
        scenario = {
            "schema": "ddpsim/1",
            "workload": {"model": "bert-base", **step},
            "cluster": {"machine": "g4dn.12xlarge", "nccl": "2.7", **layout},
        }
        result = predict(ddpsim.load_scenario(scenario))
        interval = result.prediction_interval_s
        assert interval
        errors.append(result.iteration_time_s.mean / measured_s - 1)
        held.append(interval.low <= measured_s <= interval.high)
    assert len(errors) == 24
    assert median(map(abs, errors)) <= 0.08
    assert abs(median(errors)) <= 0.05
    assert sum(held) >= 0.9 * len(held)
