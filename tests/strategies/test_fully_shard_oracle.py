"""Collectives equal those that torch's fully_shard launches: their kind, size and order."""

from __future__ import annotations

from typing import Any

import pytest
from two_ranks import observed_of

from ddpsim.prediction.program import compile_program
from ddpsim.scenario.schema import Scenario
from ddpsim.strategies.instructions import Communicate
from ddpsim.strategies.strategy import Strategy
from ddpsim.workload.model import Model, Parameter, Work


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    pytest.importorskip("torch", reason="torch's fully_shard is the oracle of ours")
    return observed_of("fully_shard_oracle.py", tmp_path_factory.mktemp("fully_shard"))


def model_of(case: dict[str, Any]) -> Model:
    """Without times: the forward goes through the units in the reverse of the backward's order."""
    nothing = Work(0.0)
    return Model(
        parameters=tuple(
            Parameter(name, numel, "float32", rows=rows) for name, numel, rows in case["parameters"]
        ),
        ready_order=tuple(case["ready_order"]),
        buffers=(),
        forward=(nothing,),
        backward=(nothing,) * (len(case["ready_order"]) + 1),
        optimizer=nothing,
        launch_s=0.0,
        activation_bytes=None,
        basis="measured",
        provenance=(),
    )


def strategy_of(case: dict[str, Any], **device: Any) -> Strategy:
    scenario = Scenario.model_validate(
        {
            "schema": "ddpsim/1",
            "workload": {"model": "resnet18", "batch_per_rank": 1, "precision": "bf16"},
            "ddp": {"strategy": "fully_shard", **case["options"], **device.pop("ddp")},
            "cluster": {"nodes": 1, "gpus_per_node": 2, **device},
        }
    )
    return compile_program(scenario, model_of(case)).strategy


def predicted(case: dict[str, Any], **device: Any) -> list[list[Any]]:
    """Operation and bytes of what every step sends, in order."""
    step = strategy_of(case, **device).steps[0]
    return [[i.operation, i.size_bytes] for i in step if isinstance(i, Communicate)]


def called(observed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [case for case in observed if "steps" in case]


def test_memory_is_what_torchs_tracker_finds(observed: list[dict[str, Any]]) -> None:
    """Within 1 %: it counts activations too, which are small in these models."""
    peaks = [case for case in observed if "peak_bytes" in case]
    assert len(peaks) == 3
    for case in peaks:
        model = model_of(case)
        strategy = strategy_of(case, device="a100-sxm-80gb", ddp={"backend": "nccl"})
        held = strategy.resident_bytes(model, 0)
        assert sum(held) == pytest.approx(case["peak_bytes"], rel=0.01)


def test_collectives_equal_those_of_fully_shard(observed: list[dict[str, Any]]) -> None:
    """Of both steps, on a CPU and on a GPU, whose hosts wait at other places."""
    for case in called(observed):
        expected = [[kind, count * width] for kind, count, width in case["steps"][0]]
        for step in case["steps"]:
            assert [[kind, count * width] for kind, count, width in step] == expected
        cpu = predicted(case, device="cpu-core", ddp={"backend": "gloo"})
        gpu = predicted(case, device="a100-sxm-80gb", ddp={"backend": "nccl"})
        assert cpu == gpu == expected, case["case"]


def test_the_oracle_tells_cases_apart(observed: list[dict[str, Any]]) -> None:
    """Parameters kept are not gathered again, and unsynchronised micro-batches reduce nothing."""
    cases = called(observed)
    for place in range(0, len(cases), 4):
        usual, kept, quiet, synced = (
            [call[0] for call in case["steps"][0]] for case in cases[place : place + 4]
        )
        gathered, reduced = usual.count("all_gather"), usual.count("reduce_scatter")
        assert gathered > kept.count("all_gather") == reduced > 1
        assert quiet.count("all_gather") == 2 * gathered
        assert quiet.count("reduce_scatter") == reduced
        assert synced.count("all_gather") == synced.count("reduce_scatter") == 2 * reduced
