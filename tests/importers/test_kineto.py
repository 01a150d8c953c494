"""Traces of PyTorch's profiler, read: known times come back, real ones say what they say.

Traces written here are SYNTHETIC. With DDPSIM_REFERENCE_DATA naming a folder of published traces
(`kineto/*.json.gz`), those are read too.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kineto_writer import ACCUMULATE, ENGINE, MAIN, NODE, CpuStep, Step, Writer

import ddpsim
from ddpsim.errors import ImportFailedError, ScenarioError
from ddpsim.importers.intervals import Intervals
from ddpsim.importers.kineto import file
from ddpsim.importers.kineto.events import TraceEvents
from ddpsim.importers.kineto.step import read_step
from ddpsim.importers.kineto.trace import KinetoTrace, Piece, read_trace
from ddpsim.planning.trace import trace as simulated_trace
from ddpsim.prediction.resolve import resolve
from ddpsim.scenario.quantity import SourceFile

REFERENCE = os.environ.get("DDPSIM_REFERENCE_DATA")
needs_reference = pytest.mark.skipif(
    REFERENCE is None, reason="DDPSIM_REFERENCE_DATA names no folder of traces"
)
RESNET50_BUCKETS = [2049000, 7875584, 6563840, 6637568, 2431040]

STEP = Step(
    forward=[300.0, 200.0, 100.0],
    backward=[[400.0, 50.0], [150.0], [], [300.0]],
    optimizer=[80.0, 20.0],
    shapes=[(10,), (10, 20), (20,), (20, 5)],
)
ON_CPU = CpuStep(forward=300.0, backward=[200.0, 100.0, 300.0], optimizers=[50.0])
MANY = replace(STEP, forward=[10.0] * 20, launch_us=99.0)  # launches: the host is slower


def read(path: Path) -> KinetoTrace:
    return read_trace(SourceFile(path.name, path))


def written(tmp_path: Path, *steps: Step, **how: Any) -> Path:
    writer = Writer(**how)
    for step in steps:
        writer.step(step)
    return writer.save(tmp_path / "trace.json.gz")


def written_on_cpu(tmp_path: Path, *steps: CpuStep) -> Path:
    writer = Writer()
    for step in steps:
        writer.cpu_step(step)
    return writer.save(tmp_path / "cpu.json")


def scenario(
    path: Path, *settings: str, gpus: int = 1, device: str = "v100-sxm-32gb", **workload: Any
) -> ddpsim.Scenario:
    return ddpsim.load_scenario(
        {
            "schema": "ddpsim/1",
            "workload": {"trace": str(path), "batch_per_rank": 32, **workload},
            "cluster": {"nodes": 1, "gpus_per_node": gpus, "device": device},
        },
        settings,
    )


def device_us(pieces: Sequence[Piece]) -> list[float]:
    return [piece.device_s * 1e6 for piece in pieces]


def refusal(path: Path, *settings: str, **workload: Any) -> str:
    with pytest.raises(ScenarioError) as caught:
        resolve(scenario(path, *settings, **workload))
    (problem,) = caught.value.problems
    assert problem.key == "workload.trace"
    assert str(path) in problem.message
    return problem.message.replace(f"{path}: ", "")


# --- known times ------------------------------------------------------------------------------


@pytest.mark.parametrize("old", [False, True])
def test_known_times_come_back(tmp_path: Path, *, old: bool) -> None:
    trace = read(written(tmp_path, *[STEP] * 4, old=old))
    step = trace.typical
    assert (len(trace.steps), trace.left_out, trace.on_gpu) == (3, 1, True)
    assert device_us(step.forward)[:-1] == pytest.approx(STEP.forward)
    assert device_us(step.backward) == pytest.approx([450, 150, 0, 300, 0])
    assert step.optimizer.device_s == pytest.approx(100e-6)
    assert [gradient.shape for gradient in step.gradients] == STEP.shapes
    assert step.collectives == ()


def test_the_old_key_of_the_devices_is_read(tmp_path: Path) -> None:
    path = written(tmp_path, STEP)
    text = gzip.decompress(path.read_bytes()).replace(b"deviceProperties", b"computeProperties")
    path.write_bytes(text)
    assert read(path).device == "Tesla V100-SXM2-32GB"


def test_what_ddp_adds_is_left_out(tmp_path: Path) -> None:
    ddp = replace(
        STEP,
        reduced={1: 210, 3: 120},
        copies=True,
        loader_us=700.0,
    )
    trace = read(written(tmp_path, ddp, ddp, world_size=2))
    step = trace.typical
    assert sum(device_us(step.forward)) == pytest.approx(600)
    assert device_us(step.backward) == pytest.approx([450, 150, 0, 300, 0])
    assert step.loader_s == pytest.approx(700e-6)
    assert step.bucket_elements == (210, 120)
    assert [(c.operation, c.dtype) for c in step.collectives] == [("all_reduce", "float32")] * 2
    assert [c.duration_s for c in step.collectives] == pytest.approx([40e-6] * 2)
    assert 0 < step.beside_comm_s <= 80e-6


@pytest.mark.parametrize("marked", [False, True])
def test_known_times_of_a_cpu_come_back(tmp_path: Path, *, marked: bool) -> None:
    """With two optimizers, of which the second ends the step."""
    told = replace(ON_CPU, optimizers=[50.0, 30.0], marked=marked)
    trace = read(written_on_cpu(tmp_path, *[told] * 4))
    assert (len(trace.steps), trace.on_gpu) == (3, False)
    assert device_us(trace.typical.forward) == pytest.approx([300])
    assert device_us(trace.typical.backward) == pytest.approx([200.5, 100.5, 300.5, 0])
    assert trace.typical.optimizer.device_s == pytest.approx(80e-6)
    assert trace.typical.beside_comm_s == 0


def test_a_collective_of_the_loops_own_neither_takes_from_the_optimizer_nor_adds(
    tmp_path: Path,
) -> None:
    """A metric's all-reduce after the optimizer, for which the main thread waits."""
    own = replace(ON_CPU, gloo_us=30.0, own_us=400.0)
    step = read(written_on_cpu(tmp_path, *[own] * 3)).typical
    assert step.optimizer.device_s == pytest.approx(50e-6)
    assert [c.of_gradients for c in step.collectives] == [True, True, True, False]


def test_where_no_call_is_told_time_tells_the_loops_own_all_reduces(tmp_path: Path) -> None:
    """An all-reduce that begins when all gradients are reduced is none of theirs."""
    writer = Writer()
    for _ in range(3):
        writer.cpu_step(replace(ON_CPU, gloo_us=30.0, own_us=400.0))
    writer.events = [event for event in writer.events if event["name"] != "c10d::allreduce_"]
    step = read(writer.save(tmp_path / "cpu.json")).typical
    assert [c.of_gradients for c in step.collectives] == [True, True, True, False]


def test_a_cpus_wait_for_its_loader_is_no_part_of_the_forward(tmp_path: Path) -> None:
    """700 us before a forward of 300, both on the main thread."""
    writer = Writer()
    for number in range(3):
        began = writer.now
        writer.now += 700.0
        writer.op("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", began, MAIN)
        writer.cpu_step(replace(ON_CPU, marked=False))
        writer.op(f"ProfilerStep#{number}", began, MAIN)
    step = read(writer.save(tmp_path / "cpu.json")).typical
    assert step.loader_s == pytest.approx(700e-6)
    assert device_us(step.forward) == pytest.approx([300])


def test_work_beside_a_collective_of_the_loops_own_is_work(tmp_path: Path) -> None:
    """Asked for before the second of two optimizers, and waited for after 10 us of metrics."""
    writer = Writer()
    for _ in range(2):
        began = writer.now
        writer.cpu_step(replace(ON_CPU, marked=False))
        writer.gloo(200.0)
        for name, lasts_us in {"Optimizer.step#SGD.step": 60.0, "aten::mean": 10.0}.items():
            at = writer.now
            writer.now += lasts_us
            writer.op(name, at, MAIN)
        writer.now += 130.0
        writer.op("ProfilerStep#1", began, MAIN)
    step = read(writer.save(tmp_path / "cpu.json")).typical
    assert step.optimizer.device_s == pytest.approx(120e-6)


def reduced_by_gloo(tmp_path: Path, *inputs: tuple[int, str]) -> tuple[Path, str]:
    """A trace and the list of its three parameters, of 3, 2 and 1 elements.

    Each step's all-reduces take `inputs`, elements and types: three by hooks, one of its own.
    """
    writer = Writer()
    for _ in range(3):
        writer.cpu_step(replace(ON_CPU, gloo_us=30.0, own_us=40.0))
    gloo = [event for event in writer.events if event["name"] == "gloo:all_reduce"]
    for event, (elements, dtype) in zip(gloo, inputs * 3, strict=True):
        event["args"] = {"Input Dims": [[elements]], "Input type": [dtype]}
    return writer.save(tmp_path / "cpu.json"), parameters(tmp_path, 3, 2, 1)


def test_what_gloo_reduces_beside_gradients_is_none_of_theirs(tmp_path: Path) -> None:
    """DDP's map of used parameters has an int for each; a metric of one is the loop's own."""
    inputs = ((1, "float"), (5, "float"), (3, "int"), (1, "float"))
    path, listed = reduced_by_gloo(tmp_path, *inputs)
    assert read(path).typical.bucket_elements == (1, 5)
    asked = scenario(path, "ddp.backend=gloo", device="cpu-core", parameters=listed)
    assert not any("do not end where" in warning for warning in resolve(asked).model.warnings)


def test_more_that_hooks_reduce_than_gradients_is_refused(tmp_path: Path) -> None:
    """Floats are no map of used parameters, and three hooks asked for them."""
    inputs = ((1, "float"), (5, "float"), (3, "float"), (1, "float"))
    path, listed = reduced_by_gloo(tmp_path, *inputs)
    asked = {"device": "cpu-core", "parameters": listed}
    assert refusal(path, "ddp.backend=gloo", **asked) == (
        "the all-reduces of its backward take 9 elements a step, but the gradients have 6; give "
        "the model that was traced, or, if the loop reduces something else during the backward, "
        "record steps without it"
    )


def test_a_map_of_used_parameters_on_a_gpu_is_none_of_the_gradients(tmp_path: Path) -> None:
    writer = Writer(world_size=2)
    for _ in range(2):
        writer.step(replace(STEP, reduced={1: 210, 2: 120, 3: 4}))
    for event in writer.events:
        if event["args"].get("In msg nelems") == 4:
            event["args"]["dtype"] = "Int"
    path = writer.save(tmp_path / "trace.json")
    assert read(path).typical.bucket_elements == (210, 120)
    assert resolve(scenario(path, gpus=2)).model.basis == "measured"


def test_work_beside_gloo_is_told(tmp_path: Path) -> None:
    """The first all-reduce is beside 80 us of the second gradient, the second of the third."""
    path = written_on_cpu(tmp_path, *[replace(ON_CPU, gloo_us=80.0)] * 3)
    trace = read(path)
    assert trace.typical.beside_comm_s == pytest.approx(160e-6)
    assert device_us(trace.typical.backward) == pytest.approx([200.5, 100.5, 300.5, 0])
    listed = tmp_path / "list.csv"
    listed.write_text("name,shape,dtype\na,3,float32\nb,2,float32\nc,1,float32\n")
    asked = scenario(path, "ddp.backend=gloo", device="cpu-core", parameters=str(listed))
    model = resolve(asked).model
    (said,) = (warning for warning in model.warnings if "beside communication" in warning)
    assert "160.0 us of the device's work was done" in said
    assert said.endswith("a trace of one process has none")


def test_a_broadcast_of_buffers_is_left_out(tmp_path: Path) -> None:
    writer = Writer()
    for _ in range(2):
        for name in ("aten::flatten_dense_tensors", "aten::unflatten_dense_tensors", "aten::copy_"):
            at = writer.now
            writer.kernel(30.0, MAIN, 1.0)
            writer.op(name, at, MAIN)
        writer.step(STEP)
    events = [e for e in writer.events if not e["name"].startswith("ProfilerStep")]
    writer.events = events  # so that steps are told by the optimizer alone
    trace = read(writer.save(tmp_path / "trace.json"))
    assert sum(device_us(trace.typical.forward)) == pytest.approx(600)
    assert trace.typical.name == "step 2"


def test_queued_pauses_are_the_devices_and_waits_are_not(tmp_path: Path) -> None:
    writer = Writer()
    for pause_us in (4.0, 500.0):
        writer.kernel(100.0, MAIN, 1.0)
        writer.kernel(100.0, MAIN, 1.0)
        second = next(e for e in reversed(writer.events) if e["cat"] == "kernel")
        second["ts"] += pause_us
        writer.free_us[7] += pause_us
        writer.step(STEP)
    for event in writer.events:  # the step begins before the kernels written above
        if event["name"].startswith("ProfilerStep"):
            event["ts"], event["dur"] = event["ts"] - 2, event["dur"] + 2
    path = writer.save(tmp_path / "trace.json")
    trace = kineto_sums(path)
    assert trace == pytest.approx([604 + 200, 600 + 200])


def kineto_sums(path: Path) -> list[float]:
    """The forwards of all steps, the first one too: microseconds."""
    trace = TraceEvents(file.read_trace_file(SourceFile(path.name, path)))
    steps = [read_step(trace, window) for window in trace.windows]
    return [sum(device_us(step.forward)) for step in steps if step]


_LENGTHS = st.lists(st.integers(1, 5000).map(float), min_size=1, max_size=4)


@given(
    forward=_LENGTHS,
    backward=st.lists(_LENGTHS, min_size=1, max_size=8),
    optimizer=_LENGTHS,
    launch_us=st.sampled_from([1.0, 7.0, 60.0]),
    copies=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_any_times_come_back(
    tmp_path_factory: pytest.TempPathFactory,
    forward: list[float],
    backward: list[list[float]],
    optimizer: list[float],
    launch_us: float,
    *,
    copies: bool,
) -> None:
    step = Step(forward, backward, optimizer, copies=copies, launch_us=launch_us)
    trace = read(written(tmp_path_factory.getbasetemp(), step, step, step))
    found = trace.typical
    assert sum(device_us(found.forward)) == pytest.approx(sum(forward), abs=1e-4)
    assert device_us(found.backward)[:-1] == pytest.approx(list(map(sum, backward)), abs=1e-4)
    assert found.optimizer.device_s * 1e6 == pytest.approx(sum(optimizer), abs=1e-4)
    launches = len(forward) + sum(map(len, backward)) + len(optimizer)
    assert found.host_s * 1e6 == pytest.approx(launches * launch_us + 0.5 * len(backward), abs=1e-3)


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=12),
    st.tuples(st.integers(-5, 55), st.integers(-5, 55)),
)
def test_intervals_count_each_moment_once(
    pairs: list[tuple[int, int]], window: tuple[int, int]
) -> None:
    spans = [(min(pair), max(pair)) for pair in pairs]
    union = Intervals(spans)
    moments = {moment for start, end in spans for moment in range(start, end)}
    assert union.within(*window) == len(moments & set(range(*window)))
    for moment in range(-5, 55):
        assert (moment in union) == (moment in moments)


# --- a simulation, traced and read again --------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "batch"), [("resnet18", 64), ("resnet50", 64), ("bert-base", 32), ("gpt2", 8)]
)
def test_a_simulation_comes_back(model: str, batch: int, tmp_path: Path) -> None:
    asked = ddpsim.load_scenario(
        {
            "schema": "ddpsim/1",
            "workload": {"model": model, "batch_per_rank": batch},
            "cluster": {"nodes": 1, "gpus_per_node": 1, "device": "v100-sxm-32gb"},
            "run": {"iterations": 3},
        }
    )
    result = ddpsim.simulate(asked)
    path = tmp_path / "trace.json.gz"
    dressed(json.loads(simulated_trace(asked).of_rank(0)), len(result_order(asked))).save(path)
    step = read(path).typical
    parts = result.breakdown_s
    assert sum(device_us(step.forward)) == pytest.approx(parts.forward * 1e6, abs=0.01)
    copies = resolve(asked).program.strategy.reducer.copy_in
    copied = sum(copies[i].device_ns for i in result_order(asked)) / 1000
    backward_us = parts.backward_compute * 1e6 - copied
    assert sum(device_us(step.backward)) == pytest.approx(backward_us, abs=0.5)
    assert step.optimizer.device_s * 1e6 == pytest.approx(parts.optimizer * 1e6, abs=0.01)
    again = ddpsim.simulate(scenario(path, "run.iterations=3", model=model, batch_per_rank=batch))
    assert again.iteration_time_s.mean == pytest.approx(result.iteration_time_s.mean, rel=2e-4)
    for was, found in zip(result.buckets, again.buckets, strict=True):
        assert (found.size_bytes, found.num_params) == (was.size_bytes, was.num_params)
        assert found.ready_s == pytest.approx(was.ready_s, rel=2e-3, abs=2e-5)


def result_order(asked: ddpsim.Scenario) -> tuple[int, ...]:
    return resolve(asked).model.ready_order


def dressed(told: dict[str, Any], gradients: int) -> Writer:
    """Our own trace's kernels with a host beside them, which launches a thousand times faster."""
    kernels = sorted((e for e in told["traceEvents"] if e.get("cat") == "kernel"), key=_start)
    ends = [e["ts"] + e["dur"] for e in kernels if e["name"] == "optimizer"]
    writer, begin, ready = Writer(), kernels[0]["ts"], 0
    for number, event in enumerate(kernels, 1):
        start_us = begin + (event["ts"] - begin) / 1000
        end_us = start_us + event["dur"] / 2000
        event["args"] |= {"correlation": number}
        is_backward = event["name"] in ("backward", "gradient to bucket", "bucket to gradients")
        thread = ENGINE if is_backward else MAIN
        spans = {"cudaLaunchKernel": "cuda_runtime"}
        if event["name"] == "gradient to bucket":
            writer._add("cpu_op", ACCUMULATE, start_us, start_us, thread, {})
            ready += 1
        name = {
            "backward": NODE + "MmBackward0",
            "gradient to bucket": "torch::distributed::reducer::mul_out",
            "bucket to gradients": "torch.distributed.ddp.reducer::copy_bucket_to_grad",
            "buffers to and from their broadcast": "c10d::broadcast_",
            "optimizer": "Optimizer.step#SGD.step",
        }.get(event["name"])
        for span, kind in (spans | ({name: "cpu_op"} if name else {})).items():
            args = {"correlation": number} if kind == "cuda_runtime" else {}
            writer._add(kind, span, start_us, end_us, thread, args)
        writer.events.append(event)
        if event["ts"] + event["dur"] in ends:
            assert ready == gradients
            writer._add("user_annotation", "ProfilerStep#1", begin, end_us, MAIN, {})
            begin, ready = event["ts"] + event["dur"], 0
    return writer


def _start(event: dict[str, Any]) -> float:
    return float(event["ts"])


# --- what a model is made of --------------------------------------------------------------------


def test_shapes_alone_make_a_model(tmp_path: Path) -> None:
    model = resolve(scenario(written(tmp_path, STEP, STEP, STEP))).model
    assert [p.numel for p in model.parameters] == [100, 20, 200, 10]
    assert [model.parameters[i].numel for i in model.ready_order] == [10, 200, 20, 100]
    assert model.basis == "measured"
    assert model.provenance[0].source.endswith(
        "ProfilerStep#1, the median of 2 steps, the first left out on Tesla V100-SXM2-32GB"
    )


def test_a_list_gives_names_and_the_trace_the_order(tmp_path: Path) -> None:
    path = tmp_path / "parameters.csv"
    path.write_text("name,shape,dtype\na,10,float32\nb,20x5,float32\nc,20,float32\nd,10x20,float32")
    trace = written(tmp_path, STEP, STEP)
    model = resolve(scenario(trace, parameters=str(path))).model
    assert [model.parameters[i].name for i in model.ready_order] == ["a", "d", "c", "b"]
    assert sum(work.device_s for work in model.backward) == pytest.approx(900e-6)


CHECKPOINTED = replace(
    STEP,
    backward=[[400.0, 50.0], [150.0], [30.0], [], [300.0]],
    shapes=[(10,), (10, 20), (64, 20), (20,), (20, 5)],
)


def checkpointed(tmp_path: Path, step: Step = CHECKPOINTED) -> Path:
    """The step's second and third gradient are made in a reentrant checkpoint."""
    writer = Writer()
    for _ in range(3):
        writer.step(step)
        *_, first, last, _, _ = (e["ts"] for e in writer.events if e["name"] == ACCUMULATE)
        writer._add("cpu_op", "CheckpointFunctionBackward", first - 0.1, last + 0.3, ENGINE, {})
    return writer.save(tmp_path / "trace.json")


def parameters(tmp_path: Path, *elements: int) -> str:
    listed = tmp_path / "list.csv"
    rows = (f"p{number},{count},float32" for number, count in enumerate(elements))
    listed.write_text("\n".join(["name,shape,dtype", *rows]))
    return str(listed)


def test_the_gradient_of_a_checkpointed_activation_is_none_of_a_parameters(tmp_path: Path) -> None:
    listed = parameters(tmp_path, 10, 200, 20, 100)
    model = resolve(scenario(checkpointed(tmp_path), parameters=listed)).model
    assert [model.parameters[i].numel for i in model.ready_order] == [10, 200, 20, 100]
    assert [work.device_s for work in model.backward] == pytest.approx(
        [450e-6, 150e-6, 30e-6, 300e-6, 0]
    )


@pytest.mark.parametrize(
    "step",
    [
        replace(CHECKPOINTED, shapes=None),
        # the activation is as large as the parameter beside it
        replace(CHECKPOINTED, shapes=[(10,), (10, 20), (40, 5), (20,), (20, 5)]),
    ],
)
def test_activations_that_are_like_parameters_are_refused(tmp_path: Path, step: Step) -> None:
    listed = parameters(tmp_path, 10, 200, 20, 100)
    assert refusal(checkpointed(tmp_path, step), parameters=listed) == (
        "holds reentrant activation checkpointing (CheckpointFunctionBackward), which makes "
        "gradients of activations too: of 5 gradients a step makes 2 in checkpoints, and sizes do "
        "not tell which are those of the 4 parameters beside it; record with use_reentrant=False, "
        "or with record_shapes=True if shapes are missing"
    )


def test_activations_are_not_taken_for_parameters_without_a_model(tmp_path: Path) -> None:
    assert refusal(checkpointed(tmp_path)) == (
        "holds reentrant activation checkpointing (CheckpointFunctionBackward), which makes "
        "gradients of activations too, and nothing here tells them from those of parameters; "
        "record with use_reentrant=False, or give workload.model (a zoo name) or "
        "workload.parameters (a CSV) beside a trace with shapes (record_shapes=True)"
    )


def test_the_host_makes_a_step_that_it_launches_slowly(tmp_path: Path) -> None:
    slow = replace(STEP, launch_us=1000.0)
    path = written(tmp_path, slow, slow, slow)
    asked = scenario(path)
    result = ddpsim.simulate(asked)
    # 9 launches, of which a runtime call counts for 100 us at most: the rest is a wait
    assert resolve(asked).model.host_s == pytest.approx(9 * 100e-6 + 4 * 0.5e-6)
    assert not any("bound by the host" in warning for warning in result.warnings)
    result = ddpsim.simulate(scenario(written(tmp_path, MANY, MANY)))
    assert any("bound by the host" in warning for warning in result.warnings)
    assert result.iteration_time_s.mean > 26 * 99e-6
    interval = result.prediction_interval_s
    assert interval is not None
    assert "whose launches the profiler slowed" in interval.sources[0].basis


def test_a_stated_step_time_sets_the_scale(tmp_path: Path) -> None:
    result = ddpsim.simulate(scenario(written(tmp_path, MANY, MANY), "workload.step_time=1 ms"))
    assert result.iteration_time_s.mean == pytest.approx(1e-3, rel=0.1)
    assert not any("bound by the host" in warning for warning in result.warnings)


def test_warnings_say_what_a_trace_does_not_tell(tmp_path: Path) -> None:
    ddp = replace(
        STEP,
        reduced={1: 200, 3: 130},
        loader_us=700.0,
    )
    warnings = resolve(scenario(written(tmp_path, ddp, world_size=2), gpus=2)).model.warnings
    expected = [
        "names no parameters and no buffers",
        "holds one step",
        "80.00 us of the device's work was done beside communication",
        "700.0 us a step of waiting for a batch",
        "its all-reduces (200, 130 elements) do not end where gradients do",
    ]
    assert len(warnings) == len(expected)
    for warning, words in zip(warnings, expected, strict=True):
        assert words in warning


@pytest.mark.parametrize(("precision", "told"), [("fp32", 0), ("bf16", 1)])
def test_a_precision_that_was_not_recorded_is_told(
    tmp_path: Path, precision: str, told: int
) -> None:
    path = written(tmp_path, STEP, STEP)
    model = resolve(scenario(path, precision=precision)).model
    said = (
        f"workload.precision bf16 changes nothing of {path}, whose gradients are float32 as "
        "recorded; record the model in bfloat16, or drop it here"
    )
    assert model.warnings.count(said) == told
    assert {parameter.dtype for parameter in model.parameters} == {"float32"}


def test_the_printed_schema_knows_the_key() -> None:
    workload = ddpsim.Scenario.model_json_schema(by_alias=True)["$defs"]["Workload"]
    assert {"type": "string"} in workload["properties"]["trace"]["anyOf"]


# --- what is refused ----------------------------------------------------------------------------


def test_numbers_that_do_not_fit_are_both_named(tmp_path: Path) -> None:
    other = replace(STEP, shapes=None, reduced={3: 331})
    path = written(tmp_path, other, other, world_size=2)
    assert "no shapes" in refusal(path)
    assert "4 gradients" in refusal(path, model="resnet50")
    assert "161 parameters" in refusal(path, model="resnet50")
    listed = tmp_path / "parameters.csv"
    listed.write_text("name,shape,dtype\n" + "\n".join(f"p{i},{i + 1},float32" for i in range(4)))
    assert refusal(path, parameters=str(listed)) == (
        "the all-reduces of its backward take 331 elements a step, but the gradients have 10; give "
        "the model that was traced, or, if the loop reduces something else during the backward, "
        "record steps without it"
    )


def _without_launches(path: Path, *numbers: int, steps: int = 3) -> Path:
    """As if the calls that launched so many of the file's kernels had been lost."""
    writer = Writer()
    for _ in range(steps):
        writer.step(STEP)
    calls = [event for event in writer.events if event["cat"] == "cuda_runtime"]
    for number in numbers:
        writer.events.remove(calls[number])
    return writer.save(path)


def test_kernels_without_a_launch_are_told_or_refused(tmp_path: Path) -> None:
    """A step has 9 of 1600 us; the optimizer's second takes 20."""
    trace = _without_launches(tmp_path / "trace.json", 8, 17)
    warnings = resolve(scenario(trace)).model.warnings
    expected = (
        "kernels whose launch is not recorded are left out: 2, which take 40.00 us (0.8 % of the "
        "kernels' time)"
    )
    assert f"{trace}: {expected}" in warnings
    assert refusal(_without_launches(tmp_path / "trace.json", 9, 18)).startswith(
        "the launch of 2 kernels, 12 % of the kernels' time, is not recorded, so where they "
        "belong is not known; record with ProfilerActivity.CPU too"
    )


def test_kernels_launched_before_the_recording_are_no_loss(tmp_path: Path) -> None:
    trace = _without_launches(tmp_path / "trace.json", 0, 1, 2, 3)
    assert read(trace).lost.kernels == 0


def test_steps_that_differ_are_refused(tmp_path: Path) -> None:
    twice = replace(STEP, backward=[*STEP.backward, *STEP.backward], shapes=None)
    with pytest.raises(ImportFailedError, match="make 4 to 8 gradients"):
        read(written(tmp_path, STEP, STEP, twice))


def test_micro_batches_are_refused(tmp_path: Path) -> None:
    writer = Writer()
    for _ in range(2):
        began = writer.now
        writer.step(STEP)
        writer.step(STEP)
        writer.op("ProfilerStep#0", began, MAIN)
    names = {"Optimizer.step#SGD.step", "ProfilerStep#1", "ProfilerStep#2"}
    writer.events = [
        event
        for event in writer.events
        if (event["name"] not in names and event["dur"] != 0) or event["name"] == "ProfilerStep#0"
    ]
    with pytest.raises(ImportFailedError, match="runs several forwards and backwards; record"):
        read(writer.save(tmp_path / "trace.json"))


def test_micro_batches_on_a_cpu_are_refused(tmp_path: Path) -> None:
    """Autograd runs on the thread that trains: the second forward stands between its nodes."""
    twice = replace(ON_CPU, micro_batches=2)
    with pytest.raises(ImportFailedError, match="runs several forwards and backwards; record"):
        read(written_on_cpu(tmp_path, *[twice] * 3))


def test_steps_of_which_some_have_no_optimizer_are_refused(tmp_path: Path) -> None:
    """prof.step() after each micro-batch, and the optimizer after every second one."""
    first = replace(ON_CPU, optimizers=[])
    with pytest.raises(ImportFailedError) as caught:
        read(written_on_cpu(tmp_path, *[ON_CPU, first] * 3))
    assert (
        "3 of 5 steps, such as ProfilerStep#1, run no Optimizer.step, and the others do; record "
        "one optimizer step in each"
    ) in str(caught.value)


def test_a_trace_without_marks_says_what_writes_them(tmp_path: Path) -> None:
    path = written_on_cpu(tmp_path, *[replace(ON_CPU, optimizers=[], marked=False)] * 3)
    with pytest.raises(ImportFailedError, match=r"give the profiler a schedule \(torch\.profiler"):
        read(path)


def test_an_optimizer_that_is_given_a_closure_does_not_own_the_forward(tmp_path: Path) -> None:
    """Its step then holds forward and backward: as PyTorch Lightning calls it."""
    writer = Writer()
    for _ in range(3):
        writer.step(STEP)
    steps = [event for event in writer.events if event["name"].startswith("ProfilerStep")]
    optimizers = [event for event in writer.events if event["name"].startswith("Optimizer")]
    for step, optimizer in zip(steps, optimizers, strict=True):
        optimizer["dur"] += optimizer["ts"] - step["ts"]
        optimizer["ts"] = step["ts"]
    found = read(writer.save(tmp_path / "trace.json")).typical
    assert device_us(found.forward)[:-1] == pytest.approx(STEP.forward)
    assert device_us(found.backward) == pytest.approx([450, 150, 0, 300, 0])
    assert found.optimizer.device_s == pytest.approx(100e-6)


def test_steps_without_a_backward_are_refused(tmp_path: Path) -> None:
    """Profiled were two rounds of validation, and the training step outside of them."""
    writer = Writer()
    writer.step(STEP)
    training = [event for event in writer.events if not event["name"].startswith("ProfilerStep")]
    validation = replace(STEP, backward=[], optimizer=[], shapes=None)
    writer.events = training
    for _ in range(2):
        writer.step(validation)
    writer.events = [e for e in writer.events if not e["name"].startswith("Optimizer")]
    with pytest.raises(ImportFailedError, match="none of its steps holds a backward; record"):
        read(writer.save(tmp_path / "trace.json"))


@pytest.mark.parametrize("key", ["ts", "dur"])
@pytest.mark.parametrize("values", [[], [None], [10**400], ["soon"]])
def test_an_event_without_a_place_in_time_is_refused(
    tmp_path: Path, key: str, values: list[Any]
) -> None:
    writer = Writer()
    writer.step(STEP)
    event = next(event for event in writer.events if event["name"] == "sgemm")
    del event[key]
    event |= dict(zip([key], values, strict=False))
    with pytest.raises(ImportFailedError, match=r"sgemm.* has no place in time \(its ts, dur and"):
        read(writer.save(tmp_path / "trace.json"))


def test_a_file_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, STEP)
    monkeypatch.setattr(file, "_LARGEST_BYTES", 1000)
    with pytest.raises(ImportFailedError, match="more than 1 GiB of JSON; record fewer steps"):
        read(path)


def test_a_simulated_trace_is_not_taken_for_a_measured_one(tmp_path: Path) -> None:
    good = Path(__file__).parent.parent / "invalid" / "files" / "good.yaml"
    path = tmp_path / "rank.json"
    path.write_text(simulated_trace(ddpsim.load_scenario(good)).of_rank(0), encoding="utf-8")
    with pytest.raises(ImportFailedError, match="was simulated by ddpsim trace, not measured"):
        read(path)


_JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just([[1]])
)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 60),
            st.sampled_from(
                ["ts", "dur", "tid", "name", "cat", "args", "ph", "correlation", "Input Dims"]
            ),
            _JUNK,
        ),
        max_size=3,
    ),
    st.integers(0, 4000),
)
@settings(max_examples=120, deadline=None)
def test_a_mutated_trace_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, str, Any]], cut: int
) -> None:
    writer = Writer()
    for _ in range(2):
        writer.step(STEP)
    for index, key, value in changes:
        event = writer.events[index % len(writer.events)]
        in_args = key in ("correlation", "Input Dims") and isinstance(event["args"], dict)
        (event["args"] if in_args else event)[key] = value
    path = writer.save(tmp_path_factory.getbasetemp() / "mutated.json")
    if cut < 300:
        path.write_bytes(path.read_bytes()[: -cut - 1])
    with suppress(ScenarioError):
        assert ddpsim.simulate(scenario(path)).iteration_time_s.mean > 0


# --- real traces --------------------------------------------------------------------------------


def reference(name: str) -> Path:
    return Path(str(REFERENCE)) / "kineto" / f"{name}.json.gz"


@needs_reference
def test_the_buckets_of_a_real_trace() -> None:
    path = reference("resnet50-ddp-2xA100-rank0")
    step = read(path).typical
    assert step.bucket_elements == tuple(RESNET50_BUCKETS)
    asked = scenario(path, device="a100-sxm-40gb", gpus=2, model="resnet50")
    result, model = ddpsim.simulate(asked), resolve(asked).model
    assert [bucket.size_bytes // 4 for bucket in result.buckets] == RESNET50_BUCKETS
    ready = [model.parameters[i].numel for i in model.ready_order]
    assert set(accumulate(RESNET50_BUCKETS)) <= set(accumulate(ready))
    assert any("bound by the host" in warning for warning in result.warnings)


@needs_reference
def test_a_real_step_of_one_gpu_is_simulated_to_its_length() -> None:
    """DDP's copies are left out of the trace and come back from the model of them."""
    path = reference("resnet50-ddp-world1-V100")
    measured_s = [step.length_s for step in read(path).steps[1:]]
    assert all(0.0955 < length_s < 0.0958 for length_s in measured_s)
    result = ddpsim.simulate(scenario(path, model="resnet50"))
    assert result.iteration_time_s.mean == pytest.approx(0.0956, rel=0.01)
    assert [bucket.size_bytes // 4 for bucket in result.buckets] == RESNET50_BUCKETS
    assert result.warnings == ()


@needs_reference
def test_two_loaders_of_one_model_agree_on_compute() -> None:
    steps = [read(reference(f"resnet50-single-V100-loader{n}")).typical for n in (0, 4)]
    backward_s = [sum(piece.device_s for piece in step.backward) for step in steps]
    assert backward_s[0] == pytest.approx(backward_s[1], rel=0.01)
    assert steps[0].device_s == pytest.approx(steps[1].device_s, rel=0.02)
    assert steps[0].optimizer.device_s == pytest.approx(steps[1].optimizer.device_s, rel=0.01)
    assert steps[0].loader_s > 0.04 > 0.002 > steps[1].loader_s


@needs_reference
def test_a_real_trace_without_communication_says_so() -> None:
    path = reference("resnet18-single-MI300X-no-comm")
    trace = read(path)
    assert trace.typical.collectives == ()
    model = resolve(scenario(path, model="resnet18")).model
    assert any("holds no communication" in warning for warning in model.warnings)
    assert {parameter.dtype for parameter in model.parameters} == {"bfloat16"}


@needs_reference
def test_a_real_trace_of_gloo() -> None:
    trace = read(reference("gloo-ddp-cpu-rank34-of-300"))
    assert (trace.on_gpu, trace.world_size) == (False, 300)
    step = trace.typical
    assert step.bucket_elements == (321271, 2082411)
    assert sum(gradient.numel or 0 for gradient in step.gradients) == 321271 + 2082411
    assert 0.02 < step.device_s < 0.06 < step.length_s  # the wait for 299 others is no compute


@needs_reference
def test_a_real_trace_of_another_model_is_refused() -> None:
    message = refusal(reference("dynamo-2xV100-rank1-404-allreduces"), model="resnet50")
    assert message.startswith("a step makes 404 gradients (AccumulateGrad), but the model beside")
