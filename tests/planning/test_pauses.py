"""Evaluations and checkpoints between steps: what they take, against steps counted by hand."""

from __future__ import annotations

from math import ceil
from typing import Any

import pytest

import ddpsim
from ddpsim.prediction.program import compile_program, pauses_of
from ddpsim.prediction.resolve import resolve
from ddpsim.report.text import render
from ddpsim.result.training import Pause
from ddpsim.strategies.instructions import Communicate, Compute
from ddpsim.workload.model import total_s

EVALUATION = {"every": 1000, "samples": 50_000}
WRITE = {"every": 500, "bandwidth": "2 GB/s"}


def scenario_of(ddp: dict[str, Any] | None = None, **workload: Any) -> ddpsim.Scenario:
    usual = {"model": "resnet50", "batch_per_rank": 64, "step_time": "60 ms"}
    document = {
        "schema": "ddpsim/1",
        "workload": usual | workload,
        "ddp": ddp or {},
        "cluster": {"machine": "dgx-a100", "nodes": 2},
    }
    return ddpsim.load_scenario(document)


def pauses(scenario: ddpsim.Scenario) -> tuple[Pause, ...]:
    return pauses_of(resolve(scenario))


def sent(scenario: ddpsim.Scenario) -> list[str]:
    program = compile_program(scenario, resolve(scenario).model, evaluates=True)
    return [i.operation for i in program.steady_step if isinstance(i, Communicate)]


def test_an_evaluation_is_the_forward_of_every_batch() -> None:
    scenario = scenario_of(evaluation=EVALUATION)
    (pause,) = pauses(scenario)
    batches = ceil(ceil(50_000 / 16) / 64)
    forward_s = total_s(resolve(scenario).model.forward)
    assert (pause.what, pause.every, pause.batches) == ("evaluation", 1000, batches)
    assert pause.time_s == pytest.approx(batches * forward_s, rel=1e-3)


@pytest.mark.parametrize(
    ("ddp", "workload", "expected"),
    [
        ({"join": True}, {}, []),
        ({"accumulation_steps": 3}, {"sync_batch_norm": True}, []),
        ({"strategy": "naive"}, {}, []),
        ({"strategy": "fully_shard"}, {}, None),
    ],
)
def test_forwards_alone_send(ddp: Any, workload: Any, expected: list[str] | None) -> None:
    """Parameters that are sharded, and nothing else."""
    found = sent(scenario_of(ddp, **workload))
    assert set(found) == {"all_gather"} if expected is None else found == expected


def test_torch_broadcasts_no_more_buffers_for_an_evaluation() -> None:
    """Its first forward does, and the training's next one does not."""
    torch = pytest.importorskip("torch", reason="torch is the oracle of evaluations")
    from operators_of_torch import broadcasts_of_evaluation

    sent = broadcasts_of_evaluation(torch.nn.BatchNorm1d(4))
    assert sent == [2, 0, 0, 0, 2]


def test_nothing_but_the_forward_is_done() -> None:
    scenario = scenario_of({"accumulation_steps": 2}, read_loss_every=1, clip_grad_norm=True)
    program = compile_program(scenario, resolve(scenario).model, evaluates=True)
    kinds = {i.kind for i in program.steady_step if isinstance(i, Compute)}
    assert kinds == {"forward"}


def test_a_checkpoint_is_copied_and_written() -> None:
    adam = {"name": "adamw"}
    (pause,) = pauses(scenario_of(checkpoint_write=WRITE, optimizer=adam))
    buffers = sum(each.size_bytes for each in resolve(scenario_of()).model.buffers)
    assert pause.size_bytes == 3 * 4 * 25_557_032 + buffers
    assert pause.time_s == pytest.approx(pause.size_bytes / 2e9 + pause.size_bytes / 10e9)
    sharded = scenario_of({"strategy": "fully_shard"}, checkpoint_write=WRITE, optimizer=adam)
    assert pauses(sharded)[0].size_bytes == round(3 * 4 * 25_557_032 / 16) + buffers
    (stated,) = pauses(scenario_of(checkpoint_write=WRITE | {"size": "4 GB"}))
    assert stated.time_s == pytest.approx(2.4)


def test_epochs_and_plans_count_their_share() -> None:
    """A step stays as it is."""
    dataset = {"samples": 1024 * 1000}
    plain = ddpsim.simulate(scenario_of(dataset=dataset))
    paused = scenario_of(dataset=dataset, evaluation=EVALUATION, checkpoint_write=WRITE)
    result = ddpsim.simulate(paused)
    assert result.iteration_time_s == plain.iteration_time_s
    assert result.training
    assert plain.training
    evaluated, written = result.training.pauses
    assert result.training.epoch
    assert plain.training.epoch
    longer_s = result.training.epoch.time_s - plain.training.epoch.time_s
    assert longer_s == pytest.approx(evaluated.time_s + 2 * written.time_s)
    said = " ".join(render(result, "f.yaml").split())
    assert f"evaluation of {evaluated.batches} batches a rank" in said
    (source,) = [p for p in resolve(paused).provenance() if p.input == "workload.checkpoint_write"]
    assert source.trust == "assumed"
    answer = ddpsim.plan_capacity(paused, "1.024M samples", max_gpus=8).answer
    one_node = paused.cluster.model_copy(update={"nodes": 1})
    evaluated, written = pauses(paused.model_copy(update={"cluster": one_node}))
    share_s = evaluated.time_s / 2000 + written.time_s / 1000  # half the samples a step
    assert answer.time_s == pytest.approx(answer.steps * (answer.step_s + share_s))


def test_more_than_the_peak_is_warned_of() -> None:
    scenario = scenario_of(step_time="1 ms", precision="amp-bf16")
    (warned,) = [said for said in ddpsim.simulate(scenario).warnings if said.startswith("MFU")]
    assert "more than its peak; look at step_time" in warned
    plain = scenario_of(step_time="1 ms", precision="fp32")  # whose convolutions may take TF32
    (said,) = [said for said in ddpsim.simulate(plain).warnings if said.startswith("MFU")]
    assert said.endswith("is of the fp32 peak; convolutions run in TF32 above it")
