"""The files of a trace say what simulate says, and are well formed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from jobs.random_jobs import models, scenarios
from jobs.simulated_jobs import simulated
from trace_reading import Read, Slice, both, covered, read

import ddpsim
from ddpsim.cluster.build import build_network
from ddpsim.engine.request import Request
from ddpsim.engine.run import run, run_settled
from ddpsim.planning.trace import trace
from ddpsim.prediction.api import predict_and_observe
from ddpsim.prediction.program import compile_program
from ddpsim.prediction.resolve import resolve
from ddpsim.report.trace import Traced
from ddpsim.scenario.schema import Scenario
from ddpsim.units import NS_PER_S
from ddpsim.workload.model import Model, Parameter, Work

ROOT = Path(__file__).resolve().parent.parent.parent
SCENARIOS = sorted((ROOT / "scenarios").glob("*.yaml"))
FEW = ("run.iterations=2",)
# what their ranks do is in the files of others: fully_shard on more GPUs, DDP on other links
AS_OTHERS = {"gpt2-xl-fully-shard", "bert-large-4x8-ib", "machines-64xh100", "rtx4090-box"}
AS_OTHERS |= {"slingshot"}
CASES = [
    *[pytest.param(path, FEW, id=path.stem) for path in SCENARIOS if path.stem not in AS_OTHERS],
    pytest.param(
        ROOT / "scenarios/resnet50-8xa100.yaml",
        (*FEW, "workload.batch_per_rank=2"),
        id="bound by the host",
    ),
    pytest.param(
        ROOT / "scenarios/resnet50-8xa100.yaml",
        (*FEW, "workload.data={rate: 1500 samples/s}", "run.jitter={sigma: 0.02}"),
        id="bound by data",
    ),
    pytest.param(
        ROOT / "scenarios/resnet50-2x8-25gbit.yaml",
        (
            "run.iterations=2",
            "run.stalls={probability: 0.5, duration: 10 ms}",
            "ddp.find_unused_parameters=true",
        ),
        id="stalls",
    ),
]


def assert_says_what(result: ddpsim.Result, rank: Read, steps: int) -> None:
    """Every figure of the result that a timeline holds, from one rank's file."""

    def mean_s(ticks: int) -> float:
        return ticks / steps / NS_PER_S

    comm, waits = rank.communication(), rank.of("wait for communication")
    exposed_ns, parts = both(waits, comm), result.breakdown_s
    assert mean_s(covered(comm)) == result.comm_time_s
    assert mean_s(exposed_ns) == result.exposed_comm_s == parts.exposed_comm
    assert mean_s(rank.ticks("forward")) == parts.forward
    assert mean_s(rank.ticks("backward", "gradient to bucket")) == parts.backward_compute
    around = ("gradients unscaled and checked", "gradients' norm and scaling", "value to the host")
    around = (*around, "gradients filled with zeros")
    assert mean_s(rank.ticks("optimizer", *around)) == parts.optimizer
    assert mean_s(rank.ticks("wait for a batch")) == parts.data_wait
    others = rank.ticks("bucket to gradients", "buffers to and from their broadcast")
    others += rank.ticks("gathered parameters, copied out", "inputs to the device")
    others += rank.ticks("parameters to and from their average")
    others += rank.ticks("stall", "wait for the host") + covered(waits) - exposed_ns
    assert mean_s(others) == parts.other
    if result.overlap_fraction is not None:
        assert 1 - mean_s(exposed_ns) / mean_s(covered(comm)) == result.overlap_fraction


@pytest.mark.parametrize(("path", "sets"), CASES)
def test_files_say_what_simulate_says(path: Path, sets: tuple[str, ...]) -> None:
    scenario = ddpsim.load_scenario(path, sets)
    result, timeline = predict_and_observe(resolve(scenario), [0])
    slowest = timeline.slowest_rank
    traced = trace(scenario, [slowest], "all")
    local = scenario.ddp.post_local_sgd
    steps = local.period if local else 2  # whole periods
    assert len(traced.steps) == steps
    rank, merged = read(traced.of_rank(slowest)), read(traced.merged())
    assert_says_what(result, rank, steps)
    step_tracks = [t for t, name in merged.names.items() if name == "steps"]
    shown = [s for track in step_tracks for s in merged.tracks[track]]
    lengths_ns = [s.end_ns - s.start_ns for s in shown]
    assert sum(lengths_ns) / steps / NS_PER_S == result.iteration_time_s.mean
    assert_well_formed(traced)
    assert_overlap(traced, slowest)
    assert traced.overlap(slowest).fraction == pytest.approx(result.overlap_fraction, rel=1e-12)


def test_no_arrow_leads_back_from_a_bucket_to_the_copies_of_another(tmp_path: Path) -> None:
    """Reduced again, a bucket is a view, and its first copies lie before its second all-reduce."""
    (tmp_path / "one.csv").write_text("name,shape,dtype\nweight,1x1,float32\n", "utf-8")
    one = {"parameters": str(tmp_path / "one.csv"), "step_time": "20 us", "batch_per_rank": 1}
    ddp = {"reduced_again": "hooks", "gradient_as_bucket_view": True}
    cluster = {"machine": "dgx-a100", "nodes": 1, "gpus_per_node": 2}
    document = {"schema": "ddpsim/1", "workload": one, "ddp": ddp, "cluster": cluster}
    assert_well_formed(trace(ddpsim.load_scenario(document), [0], "all"))


def test_kernels_tell_their_gradient_or_module() -> None:
    scenario = ddpsim.load_scenario(ROOT / "scenarios/resnet50-2x8-25gbit.yaml", FEW)
    model, traced = resolve(scenario).model, trace(scenario, [0], 1)
    gradients = [parameter.name for parameter in model.used]
    for file in (traced.of_rank(0), traced.merged()):
        told = read(file).slices
        backward = [piece.args["of"] for piece in told if piece.name == "backward"]
        assert backward[-1] == gradients[-1]
        assert backward == [name for name in gradients if name in backward], "as they come"
        forward = [piece.args["of"] for piece in told if piece.name == "forward"]
        assert forward == list(model.forward_modules)
        assert not any("of" in piece.args for piece in told if piece.name == "optimizer")


def assert_well_formed(traced: Traced) -> None:
    """Slices nest, arrows meet slices, the compute track tiles every step."""
    merged = read(traced.merged())
    files = [merged, *(read(traced.of_rank(rank)) for rank in traced.ranks)]
    for file in files:
        assert set(file.tracks) <= set(file.names), "every track has a name"
        for pieces in file.tracks.values():
            assert_nested(pieces)
    for rank, file in zip(traced.ranks, files[1:], strict=True):
        assert file.header["distributedInfo"]["rank"] == rank
        assert f'"rank": {rank},' in traced.of_rank(rank), "HTA wants a space there"
        for piece in file.slices:
            assert ("stream" in piece.args) == (piece.category == "kernel")
            if piece.name.startswith("wait") or piece.name == "stall":
                assert piece.category == "user_annotation"
            if piece.category != "kernel" or piece.args["stream"] < 20:
                assert not piece.name.startswith("nccl")
        assert "ProfilerStep" not in traced.of_rank(rank)
        tiles = merged.tracks[rank, 2]
        steps = merged.tracks[rank, 1]
        assert covered((s.start_ns, s.end_ns) for s in tiles) == sum(
            s.end_ns - s.start_ns for s in steps
        )
        assert sum(s.end_ns - s.start_ns for s in tiles) == sum(
            s.end_ns - s.start_ns for s in steps
        )
        assert [s.name for s in steps] == [f"step {number}" for number in traced.steps]
        assert merged.names[rank, 1] == "steps"
    assert_arrows(merged)


def assert_nested(pieces: list[Slice]) -> None:
    """In the file's order: each begins after or within those that are open."""
    open_until: list[int] = []
    for piece in pieces:
        while open_until and open_until[-1] <= piece.start_ns:
            open_until.pop()
        assert not open_until or piece.end_ns <= open_until[-1], piece
        open_until.append(piece.end_ns)
    assert [s.start_ns for s in pieces] == sorted(s.start_ns for s in pieces)


def assert_arrows(merged: Read) -> None:
    places = {
        (*track, piece.start_ns): piece
        for track, pieces in merged.tracks.items()
        for piece in pieces
        if piece.name != "waiting for late peers"
    }
    for flow in merged.flows.values():
        assert [event["ph"] for event in flow] in (["s", "f"], ["s", "t", "f"])
        assert flow[-1]["bp"] == "e"
        work, sent, *back = (places[e["pid"], e["tid"], e["at_ns"]] for e in flow)
        operation = sent.name.partition(" ")[0]
        assert operation in ("all_reduce", "reduce", "reduce_scatter", "all_gather")
        assert sent.name == f"{operation} {flow[0]['name']}" == f"{operation} bucket {_of(sent)}"
        assert work.end_ns <= sent.args["ready_us"] * 1000 <= sent.start_ns
        for copy in back:
            assert copy.name == "bucket to gradients"
            assert copy.start_ns >= sent.end_ns


def _of(sent: Slice) -> int:
    return int(sent.args["bucket"])


def assert_overlap(traced: Traced, rank: int) -> None:
    """The two overlaps by their definitions, from the rank's file."""
    file, said = read(traced.of_rank(rank)), traced.overlap(rank)
    comm, waits = file.communication(), file.of("wait for communication")
    work = [
        (s.start_ns, s.end_ns)
        for s in file.slices
        if s.category in ("kernel", "cpu_op") and not s.name.startswith(("nccl", "gloo"))
    ]
    assert said.comm_ns == covered(comm)
    assert said.exposed_ns == both(waits, comm)
    assert said.comm_ns - said.exposed_ns - said.idle_comm_ns == both(work, comm)
    if comm:
        assert said.fraction == 1 - both(waits, comm) / covered(comm)
        assert said.under_kernels == both(work, comm) / covered(comm)
    else:
        assert said.fraction is said.under_kernels is None


def of(scenario: Scenario, timeline: Any) -> Traced:
    """Every rank and step of a timeline, the warm-up's too."""
    steps = range(len(timeline.slowest.step_ends_ns) + timeline.repeats)
    size, backend = scenario.cluster.world_size, scenario.ddp.backend
    ranks = list(timeline.ranks)
    return Traced(
        timeline, ranks, steps, "all", "any", size, range(0, size, 2), "some device", backend
    )


@settings(max_examples=10)
@given(scenarios(noisy=True), models())
def test_any_job_gives_well_formed_files(scenario: Scenario, model: Model) -> None:
    traced = of(scenario, simulated(scenario, model).timeline)
    assert_well_formed(traced)
    for rank in traced.ranks:
        assert_overlap(traced, rank)


@settings(max_examples=30)
@given(scenarios(), models())
def test_steps_that_repeat_are_those_of_the_plain_model(scenario: Scenario, model: Model) -> None:
    # others settle as if none of their steps were steady
    assume(compile_program(scenario, model).is_uniform)
    assert_repeats_as_plain_model(scenario, model)


@pytest.mark.parametrize("rate", [147, 148, 149])
def test_a_loader_hardly_slower_than_the_steps_is_the_plain_models(rate: int) -> None:
    """The batches in store last longer than the longest warm-up: no step is like the one before."""
    scenario = Scenario.model_validate(
        {
            "schema": "ddpsim/1",
            "workload": {
                "model": "resnet18",
                "batch_per_rank": 1,
                "data": {"rate": f"{rate} samples/s"},
                "sync_batch_norm": True,
                "set_to_none": False,
                "read_loss_every": 1,
                "input_copy": {"sample_size": "40 MB"},
                "optimizer": {"fused": True},
            },
            "ddp": {"accumulation_steps": 3},
            "cluster": {"nodes": 1, "gpus_per_node": 1, "device": "a100-sxm-40gb"},
            "run": {"iterations": 2},
        }
    )
    model = Model(
        parameters=tuple(Parameter(f"p{i}", 1, "float32", shape=(1,)) for i in range(2)),
        ready_order=(0, 1),
        buffers=(),
        forward=(Work(61e-6, 0, 0.0),),
        backward=(Work(0.0, 0, 0.0), Work(1.05e-3, 0, 3e-5), Work(0.87e-3, 0, 3e-5)),
        optimizer=Work(1.02e-3, 0, 0.0),
        launch_s=5e-6,
        activation_bytes=None,
        basis="measured",
        provenance=(),
    )
    assert_repeats_as_plain_model(scenario, model)


def assert_repeats_as_plain_model(scenario: Scenario, model: Model) -> None:
    """Every event of the steps that stand for others, with as many steps of warm-up in both."""
    program, cost = compile_program(scenario, model), build_network(scenario).cost
    request = Request(program, cost, scenario.cluster.world_size)
    fast = run(request, observed=range(request.plan.period)).timeline
    # `run` would look for a longer warm-up once more
    as_long = request.longer(fast.warmup)
    plain = run_settled(as_long, "reference", observed=range(request.world_size)).timeline
    for rank in fast.ranks:
        short, long = (of(scenario, timeline).of_rank(rank) for timeline in (fast, plain))
        assert json.loads(short)["traceEvents"] == json.loads(long)["traceEvents"]


def test_every_bucket_has_its_arrow() -> None:
    scenario = ddpsim.load_scenario(ROOT / "scenarios/resnet50-2x8-25gbit.yaml")
    merged = read(trace(scenario, [3, 8]).merged())
    assert len(merged.flows) == 2 * 3 * 5  # ranks, steps, buckets
    assert all(len(flow) == 3 for flow in merged.flows.values())
    assert {flow[0]["pid"] for flow in merged.flows.values()} == {3, 8}


def test_late_peers_are_shown_within_a_collective() -> None:
    scenario = ddpsim.load_scenario(ROOT / "scenarios/straggler.yaml", FEW)
    traced = trace(scenario, [0, 3])
    merged = read(traced.merged())
    late = {rank: [s for s in merged.tracks[rank, 3] if "late" in s.name] for rank in (0, 3)}
    assert sum(s.end_ns - s.start_ns for s in late[0]) > 100 * sum(
        s.end_ns - s.start_ns for s in late[3]
    )
    for piece in merged.tracks[0, 3]:
        if piece.args:
            waits = piece.args["all_joined_us"] - piece.args["joined_us"]
            assert float(waits) == pytest.approx(float(piece.args["waiting_for_late_peers_us"]))


def test_gloo_threads_have_a_track_each() -> None:
    """Two collectives at once are on two tracks, and none of it is a kernel."""
    scenario = ddpsim.load_scenario(ROOT / "scenarios/gloo-cpu.yaml", ["ddp.bucket_cap_mb=1"])
    traced = trace(scenario)
    assert not traced.has_kernels
    assert sorted(set(read(traced.merged()).names.values())) == [
        "gloo thread 1",
        "gloo thread 2",
        "main thread",
        "steps",
    ]
    rank = read(traced.of_rank(1))
    assert {s.category for s in rank.slices} == {"cpu_op", "user_annotation"}
    assert rank.header["deviceProperties"] == []
