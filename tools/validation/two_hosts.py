"""Real gloo DDP of a transformer on two shaped hosts: whole iterations and their backward."""

from __future__ import annotations

import json
from functools import cache
from statistics import median

from validation.folders import DATA, ROOT
from validation.rows import Row, job_of, step_s

TESTBED = ROOT / "scenarios" / "testbed"


@cache
def testbed_rows() -> tuple[tuple[Row, Row], ...]:
    """Per rate and cap the whole iteration and its backward, real gloo DDP on 2 hosts."""
    return tuple(
        _testbed_row(rate, cap)
        for rate, caps in (("500mbit", (1, 5, 25, 100)), ("2gbit", (1, 5, 10, 25, 100)))
        for cap in caps
    )


def _testbed_row(rate: str, cap: int) -> tuple[Row, Row]:
    scenario = {
        "workload": {"profile": str(TESTBED / f"transformer-{rate}.json"), "batch_per_rank": 4},
        "ddp": {"backend": "gloo", "bucket_cap_mb": cap},
        "cluster": {
            "nodes": 2,
            "gpus_per_node": 1,
            "device": "cpu-core",
            "all_reduce": str(TESTBED / f"all-reduce-{rate}.csv"),
        },
        "run": {"iterations": 1, "allow_extrapolation": True},
    }
    job = job_of(scenario)
    predicted_s, naive = step_s(job), job.baselines()
    # no buffers here: what is neither forward nor optimizer counts as backward in the rounds
    beside_s = sum(w.device_s for w in (*job.model.forward, job.model.optimizer))
    measured = _measured(rate, cap)
    predictions = (predicted_s, naive.compute_only, naive.no_overlap, naive.perfect_overlap)
    ours, compute, serial, hidden = predictions
    step = Row(rate, f"{cap}", measured[0], ours, ours, compute, serial, hidden)
    ours, compute, serial, hidden = (seconds - beside_s for seconds in predictions)
    return step, Row(rate, f"{cap}", measured[2], ours, ours, compute, serial, hidden)


def _measured(rate: str, cap: int) -> list[float]:
    """Medians of iteration, forward, backward and optimizer, each on the slower rank."""
    ranks = [
        json.loads(
            (DATA / "testbed" / f"transformer-2ranks-{rate}-rank{r}.json").read_text("utf-8")
        )
        for r in (0, 1)
    ]
    rounds = [rank["iterations_s_by_bucket_cap_mb"][f"{cap}.0"] for rank in ranks]
    return [max(median(row[column] for row in rows) for rows in rounds) for column in range(4)]
