"""Presets of machines against published all-reduces that set no figure of theirs."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from statistics import median

import pytest
from nccl_sweeps import PRESETS
from validation.presets import sweeps

from ddpsim.scenario.catalog import machine_names, machine_table

SWEEPS = sweeps()


@pytest.mark.parametrize("name", SWEEPS)
def test_a_preset_of_a_machine_is_near_what_was_published(name: str) -> None:
    """Half of the rows within 40 %, and all within a factor of 2.2."""
    errors = [abs(error) for error in SWEEPS[name].errors().values()]
    assert median(errors) < math.log(1 / 0.6)
    assert max(errors) < math.log(2.2)


def test_nccl_2_4_sends_as_its_thresholds_say() -> None:
    """Two p3dn with the EFA of 2020: trees for all sizes, each row within 15 %."""
    errors = SWEEPS["aws-p3dn-2020-2x8"].errors().values()
    assert max(map(abs, errors)) < math.log(1.15)


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
