"""Traces that tell too little, or were damaged."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logs.kineto_scenarios import ON_CPU, STEP, read, refusal, scenario, written, written_on_cpu
from logs.kineto_writer import MAIN, Writer

import ddpsim
from ddpsim.errors import ImportFailedError, ScenarioError
from ddpsim.importers.kineto import events as file
from ddpsim.planning.trace import trace as simulated_trace
from ddpsim.prediction.resolve import resolve


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
        "kernels whose launch is not recorded are left out: 2, which take 40.0 us (0.8 % of the "
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
    monkeypatch.setattr(file, "_LARGEST", 1000)
    with pytest.raises(ImportFailedError, match=r"more than \d GiB of JSON; record fewer steps"):
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
@settings(max_examples=120)
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


def test_steps_that_overlap_are_refused(tmp_path: Path) -> None:
    writer = Writer()
    for _ in range(3):
        writer.step(STEP)
    step = next(event for event in writer.events if event["name"].startswith("ProfilerStep#"))
    writer.events += [step | {"name": f"ProfilerStep#{number}"} for number in range(10, 20)]
    with pytest.raises(ImportFailedError, match=r"its steps \(ProfilerStep\) overlap"):
        read(writer.save(tmp_path / "trace.json"))


def test_a_backward_on_many_threads_is_refused(tmp_path: Path) -> None:
    writer = Writer()
    writer.step(STEP)
    ready = next(event for event in writer.events if event["name"].endswith("::AccumulateGrad"))
    writer.events += [ready | {"tid": thread} for thread in range(1000, 1065)]
    with pytest.raises(ImportFailedError, match="on too many threads"):
        read(writer.save(tmp_path / "trace.json"))
