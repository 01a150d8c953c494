"""Real gloo DDP with faults that were injected: each found from step times and one rank's trace.

tools/record_faults.py recorded them on two hosts of the testbed (1 Gbit/s), on two shared cores.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ddpsim
from ddpsim.diagnosis.case import Case
from ddpsim.diagnosis.diagnose import diagnose

FAULTS = Path(__file__).parents[1] / "data" / "faults"
STEPS: dict[str, dict[str, float]] = json.loads((FAULTS / "steps.json").read_text("utf-8"))
ACCUMULATING = ("accumulating", "every_micro_batch")
# the fault, the rank whose trace is given, and the cause
CASES = (
    ("healthy", 0, "healthy"),
    ("slow_link", 0, "weak_link"),
    ("competing", 1, "slow_rank"),
    ("slow_loader", 0, "slow_loader"),
    ("unused_parameters", 0, "unused_parameters"),
    ("every_micro_batch", 0, "without_no_sync"),
    ("stale_buckets", 0, "stale_buckets"),
)


@pytest.fixture(scope="module")
def parameters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of four layers of 1024 x 1024, as tests/helpers/jobs/faulty_ranks.py trains."""
    listed = tmp_path_factory.mktemp("model") / "parameters.csv"
    rows = [f"{i}.weight,1024x1024,float32\n{i}.bias,1024,float32" for i in range(4)]
    listed.write_text("\n".join(["name,shape,dtype", *rows]))
    return listed


def job(fault: str, parameters: Path) -> ddpsim.Scenario:
    """What the owner of such a job knows."""
    return ddpsim.load_scenario(
        {
            "schema": "ddpsim/1",
            "workload": {
                "parameters": str(parameters),
                "batch_per_rank": 256,
                "step_time": f"{STEPS[fault]['alone_s']} s",
            },
            "ddp": {
                "backend": "gloo",
                "bucket_cap_mb": 4,
                "accumulation_steps": 4 if fault in ACCUMULATING else 1,
            },
            "cluster": {
                "device": "cpu-core",
                "nodes": 2,
                "gpus_per_node": 1,
                "inter_node": {"bandwidth": "1 Gbit/s", "latency": "100 us"},
            },
        }
    )


@pytest.mark.parametrize(("fault", "rank", "cause"), CASES, ids=[case[0] for case in CASES])
def test_a_real_fault_is_found(fault: str, rank: int, cause: str, parameters: Path) -> None:
    """By one trace, and by those of both ranks."""
    step, case = f"{STEPS[fault]['step_s']} s", Case.of(job(fault, parameters))
    one = diagnose(case, step, traces=FAULTS / fault / f"rank{rank}.json.gz")
    assert one.causes[0].key == cause
    both = diagnose(case, step, traces=FAULTS / fault)
    assert both.causes[0].key == cause


def test_accumulation_under_no_sync_is_seen_as_such(parameters: Path) -> None:
    fault = "accumulating"
    step = f"{STEPS[fault]['step_s']} s"
    found = ddpsim.diagnose(job(fault, parameters), step, traces=FAULTS / fault)
    facts = {fact.name: fact.seen for fact in found.facts}
    assert facts["micro-batches that reduce"] == "the last"
    assert facts["ranks"] == "alike"  # other processes slow one now and the other then
    assert found.causes[0].key == "healthy"
    assert found.causes[0].probability > 0.7
