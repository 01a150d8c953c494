"""Traces of several ranks: transfer apart from waiting, and the slow rank named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from jobs.faulty_jobs import ONE_NODE, RESNET, Job
from logs.kineto_writer import Step, Writer

import ddpsim
from ddpsim.errors import ImportFailedError
from ddpsim.importers.kineto.ranks import RankTraces, read_rank_traces
from ddpsim.scenario.quantity import SourceFile

RANKS = 4
TRANSFER_US = 120.0
STEP = Step(
    forward=[4000.0, 2000.0],
    backward=[[3000.0], [3000.0], [3000.0]],
    optimizer=[500.0],
    reduced={0: 1_000_000, 2: 2_000_000},
    loader_us=200.0,
    waits=True,
)


def save(folder: Path, rank: int, step: Step, count: int = 3, world_size: int = RANKS) -> Path:
    writer = Writer(world_size=world_size, rank=rank)
    for _ in range(count):
        writer.step(step)
    return writer.save(folder / f"rank{rank}.pt.trace.json")


def slowed(times: float) -> Step:
    """A rank whose kernels take so many times as long; it waits for nobody."""
    backward = [[times * kernel for kernel in kernels] for kernels in STEP.backward]
    forward = [times * kernel for kernel in STEP.forward]
    return replace(STEP, forward=forward, backward=backward, reduce_us=TRANSFER_US)


def read(path: Path) -> RankTraces:
    return read_rank_traces(SourceFile(str(path), path))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of four ranks the third computes half as long again, and the others wait for it."""
    for rank in range(RANKS):
        waiting = replace(STEP, reduce_us=TRANSFER_US + 7500.0 - 10 * rank)
        save(tmp_path, rank, slowed(1.5) if rank == 2 else waiting)
    return tmp_path


def test_the_rank_that_waits_least_tells_the_transfer(folder: Path) -> None:
    found = read(folder)
    assert found.world_size == RANKS
    assert found.data_wait_s == pytest.approx(200e-6)
    assert [size for size, _ in found.all_reduces] == [4_000_000, 8_000_000]
    assert all(s == pytest.approx(TRANSFER_US * 1e-6) for _, s in found.all_reduces)
    usual_s = found.compute_s[0]
    assert found.compute_s == {
        rank: pytest.approx(usual_s + (7.5e-3 if rank == 2 else 0.0), rel=0.02)
        for rank in range(RANKS)
    }
    assert found.exposed_s
    assert found.exposed_s > 5e-3


def job() -> ddpsim.Scenario:
    workload = {**RESNET, "step_time": "15.5 ms"}
    return Job("traced", "", workload, {**ONE_NODE, "gpus_per_node": RANKS}).scenario()


def test_the_slow_rank_is_the_cause(folder: Path) -> None:
    found = ddpsim.diagnose(job(), traces=folder)
    assert found.causes[0].key == "slow_rank"
    assert found.causes[0].probability > 0.8
    assert [(fact.name, fact.expected, fact.seen) for fact in found.facts] == [
        ("all-reduces of gradients", "several", "several"),
        ("the first all-reduce", "before the last gradient", "before the last gradient"),
        ("values that the host waits for", "none", "none"),
        ("work of a rank", "as predicted", "longer"),
        ("ranks", "alike", "one slower"),
    ]
    quantities = [each.measurement.quantity for each in found.measured]
    assert quantities == ["step", "data_wait", "exposed", "all_reduce", "all_reduce"]
    without_step = ddpsim.diagnose(job(), "23 ms", traces=folder).measured
    assert [m.measurement.seconds for m in without_step if m.measurement.quantity == "step"] == [
        0.023
    ]


def test_some_ranks_alone_do_not_say_that_all_are_alike(folder: Path) -> None:
    """The slow one may be one of those that were not recorded."""
    (folder / "rank2.pt.trace.json").unlink()
    facts = ddpsim.diagnose(job(), traces=folder).facts
    assert [fact.name for fact in facts] == [
        "all-reduces of gradients",
        "the first all-reduce",
        "values that the host waits for",
    ]
    one = ddpsim.diagnose(job(), traces=folder / "rank0.pt.trace.json")
    assert not [m for m in one.measured if m.measurement.quantity == "all_reduce"]


USUAL = replace(STEP, reduce_us=TRANSFER_US)  # what is added to a step are copies and hooks
MANY = replace(
    STEP,
    backward=[[900.0] for _ in range(10)],
    reduced=dict.fromkeys(range(10), 300000),
    reduce_us=100.0,
)


@pytest.mark.parametrize(
    ("step", "measured", "cause"),
    [
        (USUAL, "17.1 ms", "healthy"),
        (replace(USUAL, reads=True), "17.4 ms", "loss_read"),
        (MANY, "17.3 ms", "small_buckets"),
    ],
    ids=["healthy", "loss_read", "small_buckets"],
)
def test_one_trace_tells_what_times_hide(
    tmp_path: Path, step: Step, measured: str, cause: str
) -> None:
    """Of one rank."""
    found = ddpsim.diagnose(job(), measured, traces=save(tmp_path, 0, step))
    assert found.causes[0].key == cause
    assert found.causes[0].probability > 0.4


def test_what_is_no_folder_of_one_job_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ImportFailedError, match="is of 4 ranks, but the scenario has 8; record"):
        ddpsim.diagnose(Job("other", "", RESNET, ONE_NODE).scenario(), traces=folder)
    save(folder, 1, STEP).rename(folder / "again.json")
    save(folder, 1, STEP)
    with pytest.raises(ImportFailedError, match=r"is of rank 1, as .*again\.json is"):
        read(folder)
    (folder / "again.json").unlink()
    save(folder, 1, replace(STEP, reduced={2: 3_000_000}))
    with pytest.raises(ImportFailedError, match="1 to 2 all-reduces of gradients"):
        read(folder)
    save(folder, 1, STEP, world_size=8)
    with pytest.raises(ImportFailedError, match="of jobs of different sizes"):
        read(folder)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ImportFailedError, match="holds no trace"):
        read(empty)
    with pytest.raises(ImportFailedError, match="cannot be read"):
        read(tmp_path / "nothing")
