"""Traced steps simulated again are as long as they were."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import astuple, replace
from functools import cache
from pathlib import Path
from statistics import median

import pytest
from logs.kineto_writer import Step, Writer
from outcome import Outcome
from traced_ranks import traces_of

import ddpsim
from ddpsim.engine.reference.recorded import RecordedRank, RecordedSteps, simulate_recorded
from ddpsim.engine.run import run
from ddpsim.errors import ImportFailedError, ScenarioError
from ddpsim.importers.kineto.ranks import read_rank_traces, read_trace
from ddpsim.prediction.resolve import resolve
from ddpsim.recorded.replay import replay
from ddpsim.result.replay import Replay
from ddpsim.scenario.quantity import SourceFile

REFERENCE = os.environ.get("DDPSIM_REFERENCE_DATA")
Cli = Callable[..., Outcome]

needs_reference = pytest.mark.skipif(
    REFERENCE is None, reason="DDPSIM_REFERENCE_DATA names no folder of traces"
)
FAULTS = Path(__file__).parents[1] / "data" / "faults"
REPLAYED = FAULTS.parent / "replayed"  # tests/helpers/oracles/traced_ranks.py made them
ON_A100, RESNET50 = "resnet50-ddp-2xA100-rank0", ("workload.model=resnet50",)


@cache
def replayed(path: Path, *settings: str) -> Replay:
    return replay(path, settings)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, warm_python: None) -> Path:
    """Traces of real gloo DDP of two ranks."""
    folder = tmp_path_factory.mktemp("real")
    traces_of(folder, 2)
    return folder / "2"


RECORDED = (
    *("healthy", "competing", "slow_link", "slow_loader", "stale_buckets"),
    *("accumulating", "every_micro_batch", "unused_parameters"),
)


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_steps_are_simulated_to_their_length(name: str) -> None:
    """Real jobs of two hosts, each with cores of its own; some of four micro-batches."""
    most = 0.025 if name == "stale_buckets" else 0.005
    assert replayed(FAULTS / name).error < most


@pytest.mark.parametrize("name", sorted({*RECORDED} - {"slow_loader"}))
def test_the_written_scenario_is_as_long_as_the_traced_steps(name: str) -> None:
    """Ranks whose work differs from step to step by up to 1.7 x: a step's parts do not alike."""
    found = replayed(FAULTS / name)
    most = 0.075 if name == "unused_parameters" else 0.065
    assert found.predicted_s == pytest.approx(found.traced_s, rel=most)


def test_a_map_of_used_parameters_is_replayed() -> None:
    """DDP reduces it after the gradients, and a step without it is shorter."""
    found = replayed(FAULTS / "unused_parameters")
    assert found.document["ddp"]["find_unused_parameters"] is True
    last = found.collectives[-1]
    assert (last.operation, last.size_bytes) == ("all_reduce", 8 * 4)
    off = {**found.document, "ddp": {**found.document["ddp"], "find_unused_parameters": False}}
    without_s = ddpsim.simulate(ddpsim.load_scenario(off)).iteration_time_s.mean
    assert without_s < 0.99 * found.predicted_s


def test_real_steps_are_simulated_to_their_length(real: Path, tmp_path: Path) -> None:
    """Ranks must run at once, and share two cores with other tests: one of three jobs does."""
    folders = [real, tmp_path / "second" / "2", tmp_path / "third" / "2"]
    for folder in folders:
        if not folder.exists():
            folder.parent.mkdir()
            traces_of(folder.parent, 2)
        error = median(abs(step.error) for step in replayed(folder).steps)
        if error < 0.05:
            return
    pytest.fail(f"the last of three jobs is simulated {error:.1%} off")


def test_recorded_steps_of_a_busy_machine_are_simulated_to_their_length() -> None:
    """Three jobs of 2 ranks and three of 4, on two cores for which ten processes asked."""
    found = [replayed(folder) for folder in sorted(REPLAYED.iterdir())]
    assert len(found) == 6
    assert all(each.error < 0.05 for each in found)
    assert median(abs(step.error) for each in found for step in each.steps) < 0.02


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_replay_accounts_for_all_of_real_steps(real: Path, ranks: int) -> None:
    found = replayed(real if ranks == 2 else REPLAYED / "4-ranks-0")
    assert (found.ranks, found.world_size, len(found.steps)) == (ranks, ranks, 3)
    assert sum(astuple(found.traced)) == pytest.approx(found.traced_s, rel=1e-6)
    assert sum(astuple(found.simulated)) == pytest.approx(found.simulated_s, rel=1e-6)
    reduced = [each for each in found.collectives if each.operation == "all_reduce"]
    assert sum(each.size_bytes * each.count for each in reduced) == 4 * (768 * 768 + 3 * 768) * 4
    assert found.document["workload"]["optimizer"] == {"name": "sgd"}
    assert {each.operation for each in found.collectives} == {"all_reduce", "broadcast"}


def test_a_transfer_is_no_longer_than_on_any_rank(real: Path) -> None:
    both = read_rank_traces(SourceFile("2", real))
    assert sorted(both.compute_s) == [0, 1]
    for (size, alone_s), _ in zip(both.all_reduces, both.transfers[0], strict=False):
        own = [
            c.duration_s
            for steps in both.steps.values()
            for step in steps
            for c in step.collectives
            if c.of_gradients and c.size_bytes == size
        ]
        assert 0 < alone_s <= median(own)


def test_a_clock_of_its_own_changes_nothing(real: Path, tmp_path: Path) -> None:
    """Rank 1's clock is 1000 s ahead."""
    for rank in (0, 1):
        trace = json.loads((real / f"rank{rank}.json").read_text())
        for event in trace["traceEvents"]:
            if "ts" in event:
                event["ts"] += 1e9 * rank
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(trace))
    usual, shifted = replayed(real), replay(tmp_path)
    assert shifted.simulated_s == pytest.approx(usual.simulated_s, rel=1e-3)


def test_the_scenario_of_a_replay_can_be_changed(cli: Cli, real: Path, tmp_path: Path) -> None:
    """What-ifs on that very job: one bucket a parameter sends more, and smaller ones."""
    scenario = tmp_path / "scenario.yaml"
    told = cli("replay", str(real), "-o", str(scenario))
    assert (told.code, told.err) == (0, "")
    assert "2 ranks, 3 steps" in told.out
    loaded = ddpsim.load_scenario(scenario)
    result = ddpsim.simulate(loaded)
    traced = replayed(real)
    assert result.iteration_time_s.mean == pytest.approx(traced.predicted_s)
    sent = [bucket.size_bytes for bucket in result.buckets]
    recorded = [each.size_bytes for each in traced.collectives if each.operation == "all_reduce"]
    assert sorted(sent) == sorted(recorded)
    smaller = ddpsim.simulate(ddpsim.load_scenario(scenario, ["ddp.bucket_cap_mb=0.001"]))
    assert len(smaller.buckets) > len(sent)
    assert json.loads(json.dumps(traced.to_dict()))["schema"] == "ddpsim.replay/1"


STEP = Step(
    forward=[4000.0, 2000.0],
    backward=[[3000.0], [3000.0], [3000.0]],
    optimizer=[500.0],
    reduced={0: 1_000_000, 2: 2_000_000},
    shapes=[(1000, 1000), (1000, 1000), (1000, 1000)],
    loader_us=200.0,
    waits=True,
)
TRANSFER_US = 120.0


@pytest.fixture
def four(tmp_path: Path) -> Path:
    """Of four ranks the third computes half as long again, and the others wait for it."""
    for rank in range(4):
        late_us = 4500.0 if rank == 2 else 0.0
        waiting = replace(STEP, reduce_us=TRANSFER_US + 7500.0 - 10 * rank)
        slow = replace(
            STEP,
            forward=[6000.0, 3000.0],
            backward=[[4500.0], [4500.0], [4500.0]],
            reduce_us=TRANSFER_US,
        )
        writer = Writer(world_size=4, rank=rank)
        for _ in range(4):
            writer.step(slow if late_us else waiting)
        writer.save(tmp_path / f"rank{rank}.pt.trace.json")
    return tmp_path


def test_a_straggler_is_named_and_the_others_wait(four: Path) -> None:
    found = replay(four)
    assert found.straggler == (2, pytest.approx(1.5, rel=0.1))
    reduced = [each for each in found.collectives if each.operation == "all_reduce"]
    assert [each.transfer_s for each in reduced] == pytest.approx(2 * [TRANSFER_US * 1e-6])
    scenario = ddpsim.load_scenario(found.document)
    assert any("rank 2 computes" in warning for warning in ddpsim.simulate(scenario).warnings)
    assert max(scenario.workload.trace.path.iterdir()).name == "rank3.pt.trace.json"


def reference(name: str) -> Path:
    return Path(str(REFERENCE)) / "kineto" / f"{name}.json.gz"


@needs_reference
@pytest.mark.parametrize(
    ("name", "settings", "step_s"),
    [
        (ON_A100, RESNET50, 0.222),
        ("gloo-ddp-cpu-rank34-of-300", (), 0.269),
    ],
)
def test_published_steps_are_simulated_to_their_length(
    name: str, settings: tuple[str, ...], step_s: float
) -> None:
    """The first is bound by its host, under the profiler; the last waits for 299 others."""
    found = replayed(reference(name), *settings)
    assert found.traced_s == pytest.approx(step_s, rel=0.01)
    assert found.error < 0.05


@needs_reference
def test_exposed_all_reduces_of_a_published_trace() -> None:
    """404 a step, all exposed: 59.6 ms in four of the five steps, 119.1 ms in the last."""
    name = "dynamo-2xV100-rank1-404-allreduces"
    trace = read_trace(SourceFile(name, reference(name)))
    under_way_ms = [1e3 * sum(c.duration_s for c in step.collectives) for step in trace.steps]
    assert under_way_ms == pytest.approx([59.6, 59.6, 59.6, 119.1], abs=0.2)
    assert [len(step.collectives) for step in trace.steps] == [404] * 4
    waited_ms = [1e3 * step.parts.exposed_comm for step in trace.steps]
    assert all(40 < ms < 60 for ms in waited_ms[:3])
    assert waited_ms[3] == pytest.approx(118.6, abs=1)


@needs_reference
def test_a_kernel_tells_what_nccl_chose() -> None:
    """544 threads a block: a ring's Simple, whatever the kernel's name says of LL."""
    found = replayed(reference(ON_A100), *RESNET50).kernels
    assert {(k.algorithms, k.protocol, k.channels) for k in found} == {(("ring",), "Simple", 8)}
    assert all(kernel.agrees for kernel in found)


def test_ranks_that_are_alike_take_the_ticks_of_the_plain_model() -> None:
    path = Path(__file__).parents[2] / "scenarios" / "resnet50-8xa100.yaml"
    job = resolve(ddpsim.load_scenario(path, ["cluster.gpus_per_node=4", "run.iterations=2"]))
    request = replace(job.request(), cost=job.network.plain_cost)
    plain = run(request, "reference").timeline.ranks
    program = request.program
    steps = tuple(program.step(i) for i in range(program.warmup + program.iterations))
    own = replace(program, strategy=RecordedSteps(steps))
    ranks = [RecordedRank(own, 0, [0] * len(steps)) for _ in range(4)]
    recorded = simulate_recorded(ranks, request.cost, {})
    assert [lane.step_ends_ns for lane in recorded] == [plain[r].step_ends_ns for r in range(4)]


def test_traces_that_tell_no_job_are_refused(four: Path, tmp_path: Path, cli: Cli) -> None:
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    with pytest.raises(ImportFailedError, match="holds no trace"):
        replay(nothing)
    with pytest.raises(ScenarioError, match="has 161 parameters; give the model that was traced"):
        replay(four, ["workload.model=resnet50"])
    missing = cli("replay", str(tmp_path / "missing.json"))
    assert (missing.code, "cannot be read" in missing.err) == (1, True)
