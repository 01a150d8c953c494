"""Traces of steps on CPUs, whose gradients gloo reduces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from logs.kineto_scenarios import (
    ON_CPU,
    device_us,
    parameters,
    read,
    refusal,
    scenario,
    written_on_cpu,
)
from logs.kineto_writer import MAIN, Writer

from ddpsim.prediction.resolve import resolve


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
    assert "160 us of the device's work was done" in said
    assert said.endswith("a trace of one process has none")
