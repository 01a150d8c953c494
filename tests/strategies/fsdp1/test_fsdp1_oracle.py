"""Collectives equal those of torch's FullyShardedDataParallel: their kind, size and order."""

from __future__ import annotations

from typing import Any

import pytest
from jobs.timeless_model import timeless_model
from two_ranks import observed_of

from ddpsim.cluster.process_groups import Mesh
from ddpsim.prediction.program import compile_program
from ddpsim.scenario.schema import Scenario
from ddpsim.strategies.fsdp1.strategy import FullyShardedDataParallel
from ddpsim.strategies.fully_shard.groups import divisors
from ddpsim.strategies.instructions import Communicate


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory, warm_python: None) -> list[dict[str, Any]]:
    pytest.importorskip("torch", reason="torch's FullyShardedDataParallel is the oracle of ours")
    return observed_of("fsdp/fsdp1_oracle.py", tmp_path_factory.mktemp("fsdp1"), ranks=4)


def strategy_of(
    case: dict[str, Any], device: str, backend: str, **cluster: int
) -> FullyShardedDataParallel:
    workload = {"model": "resnet18", "batch_per_rank": 1, "precision": "bf16"}
    clips = {"clip_grad_norm": {}} if case.get("clips") else {}
    scenario = Scenario.model_validate(
        {
            "schema": "ddpsim/1",
            "workload": workload | clips,
            "ddp": {**case["options"], "backend": backend},
            "cluster": {"nodes": 1, "gpus_per_node": 2, "device": device} | cluster,
        }
    )
    strategy = compile_program(scenario, timeless_model(case)).strategy
    assert isinstance(strategy, FullyShardedDataParallel)
    return strategy


def predicted(case: dict[str, Any], *on: str, **cluster: int) -> list[tuple[Any, ...]]:
    """Operation, bytes and ranks of what every step sends from rank 0, in order."""
    nodes, gpus = cluster["nodes"], cluster["gpus_per_node"]
    mesh = Mesh(nodes * gpus, gpus, 1)
    step = strategy_of(case, *on, **cluster).steps[0]
    return [
        (i.operation, i.size_bytes, list(mesh.members(i.group, 0)))
        for i in step
        if isinstance(i, Communicate)
    ]


def test_collectives_equal_those_of_torch(observed: list[dict[str, Any]]) -> None:
    """Steps after the first, on a CPU and on a GPU, whose hosts wait at other places.

    So many units as torch has freed, and no all-gather has waited for, are left from step to step.
    """
    cases = [case for case in observed if "steps" in case]
    kinds = set()
    for case in cases:
        on = {"nodes": case["nodes"], "gpus_per_node": 2}
        cpu = predicted(case, "cpu-core", "gloo", **on)
        gpu = predicted(case, "a100-sxm-80gb", "nccl", **on)
        strategy = strategy_of(case, "a100-sxm-80gb", "nccl", **on)
        assert len(strategy.begun().freed) == case["freed"], case["options"]
        for step in case["steps"][1:]:
            called = [(kind, count * width, ranks) for kind, count, width, ranks in step]
            assert cpu == gpu == called, case["options"]
        name = case["options"]["fsdp1"]["sharding_strategy"]
        kinds |= {(name, kind, *ranks) for kind, _, _, ranks in case["steps"][1]}
    assert {
        ("FULL_SHARD", "reduce_scatter", 0, 1, 2, 3),
        ("NO_SHARD", "all_reduce", 0, 1),
        ("HYBRID_SHARD", "all_gather", 0, 1),
        ("_HYBRID_SHARD_ZERO2", "all_reduce", 0, 2),
    } <= kinds


def test_divisors_of_gradients_are_torchs(observed: list[dict[str, Any]]) -> None:
    (found,) = (case["divisors"] for case in observed if "divisors" in case)
    assert [divisors(ranks)[0] for ranks, _ in found] == [before for _, before in found]


def test_memory_is_what_storages_hold(observed: list[dict[str, Any]]) -> None:
    """Within 1 %: activations are counted too, which are small in these models."""
    peaks = [case for case in observed if "peak_bytes" in case]
    assert len(peaks) == 9
    for case in peaks:
        held = strategy_of(case, "cpu-core", "gloo").resident_bytes(timeless_model(case), 0)
        assert sum(held) == pytest.approx(case["peak_bytes"], rel=0.01), case["options"]
