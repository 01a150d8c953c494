"""Known times of a profiler trace come back."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logs.kineto_scenarios import STEP, device_us, read, scenario, written
from logs.kineto_writer import ACCUMULATE, ENGINE, MAIN, NODE, Step, Writer

import ddpsim
from ddpsim.importers.kineto import events as file
from ddpsim.importers.kineto.events import Intervals, TraceEvents
from ddpsim.importers.kineto.step import read_step
from ddpsim.planning.trace import trace as simulated_trace
from ddpsim.prediction.resolve import resolve
from ddpsim.scenario.quantity import SourceFile

MANY = replace(STEP, forward=[10.0] * 20, launch_us=99.0)  # launches: the host is slower


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
@settings(max_examples=60)
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
