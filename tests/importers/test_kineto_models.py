"""The parameters of a traced model, and what is told of its trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from logs.kineto_scenarios import STEP, parameters, refusal, scenario, written
from logs.kineto_writer import ACCUMULATE, ENGINE, Step, Writer

import ddpsim
from ddpsim.prediction.resolve import resolve


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
        "80.0 us of the device's work was done beside communication",
        "700 us a step of waiting for a batch",
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
