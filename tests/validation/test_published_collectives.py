"""Presets of machines against published all-reduces that set no figure of theirs."""

from __future__ import annotations

import csv
import math
import re
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest
from nccl_sweeps import PRESETS

from ddpsim.prediction.collective_times import collective_table, load_cluster
from ddpsim.scenario.catalog import machine_names, machine_table

FILE = Path(__file__).parents[1] / "data" / "published-collectives.csv"


class Sweep(NamedTuple):
    """Times in seconds by size in bytes of one machine in one number."""

    name: str
    machine: str
    nodes: int
    times_s: dict[int, float]

    def errors(self) -> list[float]:
        """Logarithm of predicted over measured, by row."""
        keys = {"machine": self.machine, "nodes": self.nodes} | NCCL.get(self.name, {})
        scenario = load_cluster({"cluster": keys})
        rows = collective_table(scenario, "all_reduce", list(self.times_s)).rows
        measured = self.times_s.values()
        return [math.log(row.time_s / time_s) for row, time_s in zip(rows, measured, strict=True)]


def time_s(row: dict[str, str]) -> float:
    """As published, or of the bus bandwidth: 2 (n - 1) / n of the bytes at its rate."""
    if row["time_us"]:
        return float(row["time_us"]) / 1e6
    ranks = int(row["nodes"]) * machine_table(row["machine"])["gpus_per_node"]
    on_the_bus = int(row["size_bytes"]) * 2 * (ranks - 1) / ranks
    return float(on_the_bus / (float(row["bus_gb_per_s"]) * 1e9))


def sweeps() -> dict[str, Sweep]:
    lines = FILE.read_text("utf-8").splitlines()
    found: dict[str, list[dict[str, str]]] = defaultdict(list)
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        found[row["id"]].append(row)
    return {
        name: Sweep(
            name,
            rows[0]["machine"],
            int(rows[0]["nodes"]),
            {int(row["size_bytes"]): time_s(row) for row in rows},
        )
        for name, rows in found.items()
    }


SWEEPS = sweeps()
# EFA of June 2019 took twice as long as that of 2020 from 256 KiB on
NCCL: dict[str, dict[str, Any]] = {
    "aws-p3dn-2x8": {"nccl": "2.4", "nccl_env": {"NCCL_TREE_THRESHOLD": 0}},
    "aws-p3dn-2020-2x8": {"nccl": "2.4"},
}


@pytest.mark.parametrize("name", SWEEPS)
def test_a_preset_of_a_machine_is_near_what_was_published(name: str) -> None:
    """Half of the rows within 40 %, and all within a factor of 3.1."""
    errors = [abs(error) for error in SWEEPS[name].errors()]
    assert median(errors) < math.log(1 / 0.6)
    assert max(errors) < math.log(3.1)


def test_nccl_2_4_sends_as_its_thresholds_say() -> None:
    """Two p3dn with the EFA of 2020: trees for all sizes, each row within 15 %."""
    assert max(abs(error) for error in SWEEPS["aws-p3dn-2020-2x8"].errors()) < math.log(1.15)


def test_machines_name_the_sweeps_that_tested_them() -> None:
    tested: dict[str, set[str]] = defaultdict(set)
    for name, asked in PRESETS.items():
        if asked.get("nodes", 1) > 1:
            tested[asked["machine"]].add(name)
    for name, sweep in SWEEPS.items():
        if sweep.nodes > 1:
            tested[sweep.machine].add(name)
    tested["p4de.24xlarge"] = {"aws-p4de-2x8"}  # which the preset of p4d stands for in PRESETS
    for machine in machine_names():
        _, _, said = machine_table(machine)["sources"]["inter_node"].partition("; tested by ")
        assert set(re.findall(r"[\w-]+-\d+x\d+", said)) == tested[machine], machine
