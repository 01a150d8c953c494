"""Megatron's and DeepSpeed's sharded optimizers: the order of gradients and collectives."""

from __future__ import annotations

from typing import Any

import pytest
from two_ranks import observed_of

from ddpsim.cluster.transfers import TURNS
from ddpsim.prediction.api import load_scenario, simulate
from ddpsim.prediction.program import compile_program
from ddpsim.scenario.options.deepspeed import DeepSpeed
from ddpsim.scenario.schema import Scenario
from ddpsim.strategies.ddp.costs import COUNTED_S
from ddpsim.strategies.instructions import Communicate, Compute
from ddpsim.strategies.zero.partition import Partition, bucketed
from ddpsim.workload.model import Model, Parameter, Work


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory, warm_python: None) -> list[dict[str, Any]]:
    pytest.importorskip("torch", reason="torch runs the loops that ours are held against")
    return observed_of("zero_oracle.py", tmp_path_factory.mktemp("zero"))


def model_of(case: dict[str, Any]) -> Model:
    """A work for each module that has parameters, in the order of registration."""
    named = [(name, numel) for name, numel, _ in case["parameters"]]
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name, _ in named))
    return Model(
        parameters=tuple(Parameter(name, numel, "float32") for name, numel in named),
        ready_order=tuple(case["ready_order"]),
        buffers=(),
        forward=(Work(1e-3),) * len(modules),
        backward=(Work(1e-3),) * (len(named) + 1),
        optimizer=Work(1e-3),
        launch_s=0.0,
        activation_bytes=0,
        basis="measured",
        provenance=(),
        forward_modules=tuple(modules),
    )


def told(case: dict[str, Any]) -> list[list[Any]]:
    """Gradients by their parameter, and collectives by their elements."""
    cluster = {"nodes": 1, "gpus_per_node": 2, "device": "a100-sxm-80gb"}
    workload = {"model": "resnet18", "batch_per_rank": 1, "precision": "amp-bf16"}
    keys = {"schema": "ddpsim/1", "workload": workload, "cluster": cluster}
    scenario = Scenario.model_validate(keys | {"ddp": case["options"]})
    order, found = [*case["ready_order"], None], list[list[Any]]()
    gradients = 0
    for each in compile_program(scenario, model_of(case)).steady_step:
        if isinstance(each, Communicate):
            found.append([each.operation, each.size_bytes // 4])
        elif isinstance(each, Compute) and each.kind == "backward":
            if (parameter := order[gradients % len(order)]) is not None:
                found.append(["gradient", parameter])
            gradients += 1
    return found


def test_gradients_and_collectives_come_in_the_same_order(observed: list[dict[str, Any]]) -> None:
    """And the loops that are held against train as plain data parallelism does."""
    assert len(observed) == 21
    for case in observed:
        assert case["trained"], case["options"]
        assert told(case) == case["said"], case["options"]
    operations = {what for case in observed for what, _ in case["said"]}
    assert operations == {"gradient", "reduce_scatter", "all_gather", "all_reduce", "reduce"}


def test_deepspeeds_buckets_close_before_they_are_too_large() -> None:
    assert bucketed([3, 2, 1, 0], [10, 90, 20, 30], 60) == [(3, 2), (1,), (0,)]
    partition = Partition([10, 90, 20, 30], 3)
    assert partition.part == 50
    assert partition.slices([3, 2]) == [(2, 50)]
    assert partition.slices([1, 0]) == [(0, 40), (1, 50), (0, 10)]
    to_each = DeepSpeed(use_multi_rank_bucket_allreduce=False)
    assert partition.sent([1, 0], to_each) == [("reduce", 50, True), ("reduce", 50, False)]
    assert partition.sent([1, 0], DeepSpeed()) == [("all_reduce", 100, True)]
    in_place = DeepSpeed(reduce_scatter=False)
    assert partition.sent([1, 0], in_place) == [("all_reduce", 100, False)]


@pytest.mark.parametrize(
    ("stage", "ranks", "bytes_each"), [(1, 1, 20), (1, 4, 2 + 2 + 14 / 4), (2, 4, 2 + 18 / 4)]
)
def test_memory_is_that_of_zero(stage: int, ranks: int, bytes_each: float) -> None:
    """ZeRO (Rajbhandari 2020): 2 + 2 + 12/N and 2 + 14/N bytes a parameter, and two copies.

    Stage 1 copies a part of the gradients in the backward, both stages to float32 in the step:
    there is the most of stage 2. The buffers of buckets are small here.
    """
    ddp = {"strategy": "deepspeed"}
    options = {"stage": stage, "reduce_bucket_size": 1280, "params": "bfloat16"}
    cluster = {"nodes": 1, "gpus_per_node": ranks, "device": "a100-sxm-80gb"}
    workload = {"model": "resnet18", "batch_per_rank": 1, "precision": "amp-bf16"}
    keys = {"schema": "ddpsim/1", "workload": workload, "cluster": cluster}
    scenario = Scenario.model_validate(keys | {"ddp": ddp | {"deepspeed": options}})
    listed = [(f"layers.{i}.weight", 1280, 1) for i in range(100)]
    model = model_of({"parameters": listed, "ready_order": range(99, -1, -1)})
    held = compile_program(scenario, model).strategy.resident_bytes(model, 2 * 4 * 128_000)
    assert sum(held) == pytest.approx(128_000 * bytes_each, rel=0.03)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_deepspeed_sends_gradients_twice_and_parameters_once(ranks: int) -> None:
    """3 (N-1)/N M by a ring, in each micro-batch of stage 2; one rank sends nothing."""
    cluster = {"nodes": 1, "gpus_per_node": ranks, "device": "a100-sxm-80gb"}
    workload = {"model": "resnet18", "batch_per_rank": 1, "precision": "amp-bf16"}
    keys = {"schema": "ddpsim/1", "workload": workload, "cluster": cluster}
    listed = [(f"layers.{i}.weight", 1280, 1) for i in range(9)]
    model = model_of({"parameters": listed, "ready_order": range(8, -1, -1)})

    def sent(stage: int) -> float:
        options = {"stage": stage, "reduce_bucket_size": 4000}
        ddp = {"strategy": "deepspeed", "accumulation_steps": 2, "deepspeed": options}
        scenario = Scenario.model_validate(keys | {"ddp": ddp})
        step = compile_program(scenario, model).steady_step
        each = (i for i in step if isinstance(i, Communicate) and i.size_bytes > 4)
        return sum(TURNS[i.operation] * (ranks - 1) / ranks * i.size_bytes for i in each)

    whole = (ranks - 1) / ranks * 9 * 1280 * 4
    assert sent(1) == pytest.approx(3 * whole)
    assert sent(2) == pytest.approx(5 * whole)


@pytest.mark.parametrize("stage", [1, 2])
def test_hooks_of_deepspeed_0_18_5_count_all_parameters(stage: int) -> None:
    """In every micro-batch, on the host; run with DeepSpeed itself, it is n^2 times one count."""
    cluster = {"nodes": 1, "gpus_per_node": 2, "device": "a100-sxm-80gb"}
    workload = {"model": "resnet18", "batch_per_rank": 1, "precision": "amp-bf16"}
    keys = {"schema": "ddpsim/1", "workload": workload, "cluster": cluster}
    listed = [(f"layers.{i}.weight", 1280, 1) for i in range(9)]
    model = model_of({"parameters": listed, "ready_order": range(8, -1, -1)})

    def host_s(version: str) -> float:
        options = {"stage": stage, "version": version}
        ddp = {"strategy": "deepspeed", "accumulation_steps": 2, "deepspeed": options}
        scenario = Scenario.model_validate(keys | {"ddp": ddp})
        step = compile_program(scenario, model).steady_step
        return 1e-9 * sum(each.host_ns for each in step if isinstance(each, Compute))

    assert host_s("0.18.5") - host_s("0.19") == pytest.approx(2 * 9 * 9 * COUNTED_S)
    assert host_s("0.18") == host_s("0.19")


@pytest.mark.parametrize(("version", "widens"), [("0.18", True), ("0.19", False)])
def test_older_deepspeed_may_hide_nothing(version: str, *, widens: bool) -> None:
    options = {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 2e7, "version": version}
    scenario = {
        "schema": "ddpsim/1",
        "workload": {"model": "gpt2", "batch_per_rank": 4},
        "cluster": {"nodes": 1, "gpus_per_node": 2, "device": "rtx-3090"},
        "ddp": {"strategy": "deepspeed", "deepspeed": options},
    }
    result = simulate(load_scenario(scenario))
    assert result.prediction_interval_s is not None
    above_s = {each.input: each.high_s for each in result.prediction_interval_s.sources}
    hidden_s = result.comm_time_s - result.exposed_comm_s
    assert above_s.get("DeepSpeed's overlap") == (pytest.approx(hidden_s) if widens else None)
    assert hidden_s > 0
