"""Collectives equal those that real training loops call: their kind, size and order."""

from __future__ import annotations

from typing import Any

import pytest
from two_ranks import observed_of

from ddpsim.prediction.program import compile_program
from ddpsim.scenario.schema import Scenario
from ddpsim.strategies.instructions import Communicate
from ddpsim.workload.model import BatchNorm, Buffer, Model, Parameter, Work

FAIL_ON_GLOO = ("powerSGD", "quantization_pertensor", "quantization_perchannel")

ON_GPUS = {"optimizer_in_backward", "mixed_precision"}


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory, warm_python: None) -> list[dict[str, Any]]:
    pytest.importorskip("torch", reason="real training loops are the oracle of strategies")
    return observed_of("strategy_oracle.py", tmp_path_factory.mktemp("strategies"))


def _parameter(listed: list[Any]) -> Parameter:
    name, numel, dtype, *others, rows = listed
    shape = (rows, numel // rows) if rows else ()
    return Parameter(name, numel, dtype, *others, shape=shape)


def model_of(case: dict[str, Any]) -> Model:
    order = tuple(case["ready_order"])
    nothing = Work(0.0)
    return Model(
        parameters=tuple(map(_parameter, case["parameters"])),
        ready_order=order,
        buffers=tuple(Buffer(*each) for each in case["buffers"]),
        forward=(nothing,) * max(1, len(case["batch_norms"])),
        backward=(nothing,) * (len(order) + 1),
        optimizer=nothing,
        launch_s=0.0,
        activation_bytes=None,
        basis="measured",
        provenance=(),
        batch_norms=batch_norms_of(case),
    )


def batch_norms_of(case: dict[str, Any]) -> tuple[BatchNorm, ...]:
    """With a row of the forward each, in the backward in that of their weight."""
    owners = [case["parameters"][index][0].rpartition(".")[0] for index in case["ready_order"]]
    return tuple(
        BatchNorm(name, channels, row, owners.index(name))
        for row, (name, channels) in enumerate(case["batch_norms"])
    )


def predicted(case: dict[str, Any], options: dict[str, Any]) -> list[list[list[Any]]]:
    """What the loop sends in each of the steps that were observed."""
    synced = bool(case["batch_norms"])  # of CPU tensors, where torch would refuse them
    on_gpus = options.get("comm_hook", "none") in FAIL_ON_GLOO or not ON_GPUS.isdisjoint(options)
    overlaps = options.get("zero1", {}).get("overlap_with_ddp")
    as_on_gpu = synced or on_gpus or overlaps
    backend, device = ("nccl", "a100-sxm-40gb") if as_on_gpu else ("gloo", "cpu-core")
    ddp = {"backend": backend, "torch": "2.13", "accumulation_steps": case["micro_batches"]}
    workload = {"model": "resnet18", "batch_per_rank": 1, "sync_batch_norm": synced}
    workload["barrier_every"] = (options := dict(options)).pop("barrier_every", None)
    if "mixed_precision" in options:
        workload["precision"] = "amp-bf16"
    scenario = Scenario.model_validate(
        {
            "schema": "ddpsim/1",
            "workload": workload,
            "ddp": ddp | options,
            "cluster": {"nodes": 1, "gpus_per_node": 2, "device": device},
        }
    )
    program = compile_program(scenario, model_of(case))
    steps = [program.step(number) for number in range(len(case["steps"]))]
    return [
        [[i.operation, i.size_bytes] for i in step if isinstance(i, Communicate)] for step in steps
    ]


def test_collectives_equal_those_of_real_loops(observed: list[dict[str, Any]]) -> None:
    from strategy_oracle import LOOPS

    assert {case["loop"] for case in observed} == set(LOOPS)
    for case in observed:
        label = f"{case['loop']} of {case['model']}, {case['micro_batches']} micro-batches"
        assert predicted(case, LOOPS[case["loop"]][1]) == case["steps"], label


def test_the_oracle_sends_what_the_loops_are_about(observed: list[dict[str, Any]]) -> None:
    """Without no_sync three times as much; local SGD in every third step, from the first on."""
    sent = {
        (case["model"], case["loop"]): [len(step) for step in case["steps"]]
        for case in observed
        if case["micro_batches"] == 3
    }
    assert sent["dense", "naive"] == [8] * 3
    assert sent["dense", "per_parameter synced"] == [24] * 3
    assert sent["mixed", "naive_flat"] == [2] * 3
    assert sent["tied", "local_sgd"] == [1, 0, 0, 1, 0, 0, 1]
    assert sent["synced", "naive"] == [3 * 2 * 2 + 10] * 3  # an exchange each way and layer
    assert sent["dense", "ddp synced"][-1] == 3 * sent["dense", "ddp"][-1]
