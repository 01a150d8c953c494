"""Short measurements: a job of ranks on this machine, a plan of three copies, a model's profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from calibrate.measure.cluster.plan import Options, Slot, Task, Team
from calibrate.measure.cluster.session import measure
from calibrate.measure.model.profile import Document, ProfileOptions, profile
from calibrate.measure.ranks.launch import local, run
from calibrate.records.record import Record, load_record

# seconds, not minutes: few repetitions, and no room for the largest all-reduces
SMALL = {"most_repetitions": 2, "memory_budget_bytes": 160 * 2**20, "time_budget_s": 300.0}


def ranks(count: int, output: Path, **options: Any) -> Record:
    return recorded(count, asked(output, **options))


def recorded(count: int, options: Options) -> Record:
    run(measure, options, count)
    return load_record(options.output)


def two_ranks_shortly(output: Path, **options: Any) -> Record:
    """Every kind; see `measured.shortened`."""
    local(2, "measured.shortened", asked(output, **options))
    return load_record(output)


def asked(output: Path, **options: Any) -> Options:
    return Options.model_validate({"output": output, **SMALL, **options})


def small_plan() -> list[Task]:
    team = Team("none", 1, 1, (0,))
    slots = [Slot("device_copy", "alone", size) for size in (4096, 8192, 16384)]
    return [Task((slot,), team, (2, 3)) for slot in slots]


def profiled(name: str, **options: Any) -> Document:
    asked = {"model": f"measure_helpers:{name}", "output": Path("model.json"), "iterations": 3}
    return profile(ProfileOptions.model_validate(asked | {"device": "cpu"} | options))
