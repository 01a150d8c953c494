"""Jobs whose cause is known: it is found, from step times and one or two figures more.

Odds were set on the published jobs, on faults of links (`IN_NODES`, `BETWEEN_NODES`), on debug
settings, and on attention and SyncBatchNorm; they are judged on all others.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from jobs.faulty_boxes import BOXES
from jobs.faulty_jobs import COMPUTE, DATA, FAULTY, HEALTHY, OPTIONS, Job

import ddpsim
from ddpsim.diagnosis.case import Case
from ddpsim.diagnosis.diagnose import diagnose
from ddpsim.diagnosis.hypotheses import HYPOTHESES

JUDGED = tuple(
    job
    for job in (*HEALTHY, *COMPUTE, *DATA, *OPTIONS)
    if job.cause not in ("eager_attention", "sync_batch_norm")
)

needs_reference = pytest.mark.skipif(
    not os.environ.get("DDPSIM_REFERENCE_DATA"),
    reason="DDPSIM_REFERENCE_DATA is not set: no published steps",
)


def place_of(cause: str, diagnosis: ddpsim.Diagnosis) -> int:
    """Of a cause among all, the likeliest at 1; far behind where it is not among them."""
    places = {each.key: place for place, each in enumerate(diagnosis.causes, 1)}
    return places.get(cause, 100)


Places = dict[str, int]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    """The true cause's place by job, with noise that is drawn once for each.

    Jobs that are stated alike share their simulations.
    """
    folder, cases, found = tmp_path_factory.mktemp("logs"), dict[str, Case](), Places()
    for seed, job in enumerate((*HEALTHY, *FAULTY, *BOXES)):
        stated = f"{job.workload} {job.ddp} {job.cluster}"
        if stated not in cases:
            cases[stated] = Case.of(job.scenario())
        diagnosis = diagnose(cases[stated], **job.texts(seed), **job.saved_log(folder))
        found[job.name] = place_of(job.cause, diagnosis)
    return found


def share(places: Places, jobs: Sequence[Job], at_most: int) -> float:
    return sum(places[job.name] <= at_most for job in jobs) / len(jobs)


@pytest.mark.slow
def test_true_causes_come_first(places: Places) -> None:
    """Each cause of the table at least once; those that times hide are found in traces."""
    everything = (*HEALTHY, *FAULTY)
    assert {job.cause for job in (*everything, *BOXES)} == {each.key for each in HYPOTHESES}
    assert share(places, everything, 1) >= 0.8
    assert share(places, everything, 3) >= 0.95


def test_odds_hold_for_jobs_that_they_were_not_set_on(places: Places) -> None:
    assert share(places, JUDGED, 1) >= 0.8
    assert share(places, JUDGED, 3) >= 0.95


def test_causes_on_machines_without_nvlink_come_first(places: Places) -> None:
    """Slow paths through the host, told by steps at two accumulations or batches, and by logs."""
    assert len(BOXES) == 12
    assert share(places, BOXES, 1) >= 0.9
    assert share(places, BOXES, 2) == 1


def test_healthy_jobs_are_called_healthy(places: Places) -> None:
    assert share(places, HEALTHY, 1) == 1


def published(name: str) -> list[dict[str, str]]:
    path = Path(os.environ["DDPSIM_REFERENCE_DATA"]) / "published" / name
    lines = path.read_text("utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def bert(batch: int, alone_s: str, cluster: dict[str, Any]) -> ddpsim.Scenario:
    """The published job, whose step on one GPU is known."""
    workload = {
        "model": "bert-base",
        "batch_per_rank": batch,
        "seq_len": 384,
        "step_time": f"{alone_s} s",
        "optimizer": {"name": "adamw"},
    }
    return ddpsim.load_scenario({"schema": "ddpsim/1", "workload": workload, "cluster": cluster})


@needs_reference
def test_a_published_machine_without_nvlink() -> None:
    """One rate of host memory, shared by all GPUs, explains the steps on 1 to 8 of them."""
    rows = [row for row in published("v100-slow-all-reduce.csv") if row["gpus_per_node"] in "1248"]
    cluster = {"device": "v100-sxm-16gb", "nodes": 1, "gpus_per_node": 8}
    scenario = bert(4, rows[0]["step_s"], cluster)
    steps = ", ".join(f"{row['gpus_per_node']}: {row['step_s']} s" for row in rows)
    last = rows[-1]
    for texts in (
        {"measured": steps},
        {"measured": f"{last['step_s']} s", "exposed": f"{last['exposed_sync_s']} s"},
    ):
        found = ddpsim.diagnose(scenario, **texts)
        assert place_of("no_peer_to_peer", found) == 1
        assert found.causes[0].probability > 0.6
        assert found.causes[0].mended_s == pytest.approx(float(rows[0]["step_s"]), rel=0.1)
    alone = ddpsim.diagnose(scenario, f"{last['step_s']} s")
    assert place_of("no_peer_to_peer", alone) <= 3


def tiny_llama() -> str:
    """A parameter list: TinyLlama 1.1B's sizes, from its configuration."""
    shapes = {"q": "2048x2048", "k": "256x2048", "v": "256x2048", "o": "2048x2048"}
    shapes |= {"gate": "5632x2048", "up": "5632x2048", "down": "2048x5632"}
    rows = [
        f"layers.{i}.{name},{shape},float32" for i in range(22) for name, shape in shapes.items()
    ]
    ends = (f"{name},32000x2048,float32" for name in ("embed", "head"))
    return "\n".join(["name,shape,dtype", *rows, *ends])


@needs_reference
def test_a_published_pair_of_cards_at_two_accumulations(tmp_path: Path) -> None:
    """Both steps hold one synchronisation of 4.6 s: 0.95 GB/s (whyNLP/tinyllama#1)."""
    rows = [r for r in published("user-boxes.csv") if r["id"] in ("b13", "b14")]
    listed = tmp_path / "parameters.csv"
    listed.write_text(tiny_llama())
    job = {
        "schema": "ddpsim/1",
        "workload": {
            "parameters": str(listed),
            "batch_per_rank": 3,
            "precision": "amp-bf16",
            "step_time": f"{rows[0]['one_gpu_ms']} ms",
            "optimizer": {"name": "adamw"},
        },
        "ddp": {"accumulation_steps": 4},
        "cluster": {"device": "rtx-4090", "nodes": 1, "gpus_per_node": 2},
    }
    steps = ", ".join(f"accumulation {row['accumulation']}: {row['step_ms']} ms" for row in rows)
    found = ddpsim.diagnose(ddpsim.load_scenario(job), steps)
    assert place_of("slow_host_path", found) == 1
    assert found.causes[0].probability > 0.5
    few = ddpsim.diagnose(ddpsim.load_scenario(job), f"{rows[0]['step_ms']} ms")
    assert few.causes[0].probability < found.causes[0].probability


G4DN = {"machine": "g4dn.12xlarge", "nccl": "2.7", "gpus_per_node": 4}


def t4(batch: str, largest: int) -> tuple[str, str]:
    """The step of one GPU, and those of up to so many nodes, all their GPUs used."""
    rows = [r for r in published("t4-tcp-bert-steps.csv") if r["batch_per_rank"] == batch]
    alone = next(row["step_s"] for row in rows if row["placement"] == "1")
    whole = [r for r in rows if r["gpus_per_node"] == "4" and int(r["nodes"]) <= largest]
    return alone, ", ".join(f"{row['nodes']}x4: {row['step_s']} s" for row in whole)


@needs_reference
@pytest.mark.parametrize("batch", ["6", "11"])
def test_published_nodes_whose_connections_are_limited(batch: str) -> None:
    """Their NICs have 50 Gbit/s, which is all that the owner of such a job knows."""
    alone, steps = t4(batch, 4)
    network = {"bandwidth": "50 Gbit/s", "flow_bandwidth": "10 Gbit/s", "connections": 2}
    scenario = bert(int(batch), alone, {**G4DN, "nodes": 4, "inter_node": network})
    assert place_of("tcp_stream_limit", ddpsim.diagnose(scenario, steps)) == 1


@needs_reference
def test_the_same_nodes_are_healthy_where_the_limit_is_known() -> None:
    """The preset has it, set on the batches of 4 and 8."""
    alone, steps = t4("6", 4)
    scenario = bert(6, alone, {**G4DN, "nodes": 4})
    assert place_of("healthy", ddpsim.diagnose(scenario, steps)) == 1
