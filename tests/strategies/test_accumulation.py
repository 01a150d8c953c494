"""The type in which gradients of micro-batches are added up, and its bytes, against torch's own."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jobs.timeless_model import timeless_model
from oracles.two_ranks import observed_of

from ddpsim.prediction.program import compile_program
from ddpsim.scenario.schema import Scenario
from ddpsim.strategies.ddp.costs import DdpCosts
from ddpsim.strategies.fully_shard.strategy import FullyShard
from ddpsim.workload.model import ITEM_BYTES, Model, Parameter

WIDTHS = (64, 96, 32)
_LAYERS = list(itertools.pairwise(WIDTHS))
TYPES = ("bfloat16", "float32")


def model(dtype: str = "float32") -> Model:
    parameters = [(f"{i}.weight", a * b, b) for i, (a, b) in enumerate(_LAYERS)]
    of = timeless_model({"parameters": parameters, "ready_order": [1, 0]})
    return replace(of, parameters=tuple(p._replace(dtype=dtype) for p in of.parameters))


def scenario_of(**ddp: Any) -> Scenario:
    return Scenario.model_validate(
        {
            "schema": "ddpsim/1",
            "workload": {"model": "llama-1b", "batch_per_rank": 1, "precision": "amp-bf16"},
            "ddp": {"accumulation_steps": 3} | ddp,
            "cluster": {"nodes": 1, "gpus_per_node": 2, "device": "a100-sxm-80gb"},
        }
    )


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory, warm_python: None) -> list[dict[str, Any]]:
    pytest.importorskip("torch", reason="its gradients are the oracle")
    folder: Path = tmp_path_factory.mktemp("accumulation")
    return observed_of("accumulation_oracle.py", folder)


def test_under_ddp_gradients_are_added_in_their_parameters_type(
    observed: list[dict[str, Any]],
) -> None:
    (case,) = (each for each in observed if each["strategy"] == "ddp")
    of, scenario = model("bfloat16"), scenario_of()
    size_bytes = ITEM_BYTES["bfloat16"] * case["elements"]
    assert case["held"] == case["sent"] == {"bfloat16": size_bytes}
    strategy = compile_program(scenario, of).strategy
    assert strategy.resident_bytes(of, 0).gradients == size_bytes
    sent = sum(bucket.size_bytes for bucket in strategy.buckets(strategy.kind(5)))
    assert sent == size_bytes
    costs = DdpCosts(scenario.cluster.device, scenario.ddp)
    half, full = (costs.accumulated(Parameter("w", 2**26, dtype)) for dtype in TYPES)
    assert full.device_s == pytest.approx(2 * half.device_s)


def test_fully_shard_adds_up_in_the_type_that_is_reduced(observed: list[dict[str, Any]]) -> None:
    """Whole gradients under no_sync; reduced ones are of the parameters' type."""
    cases = [each for each in observed if each["strategy"] == "fully_shard"]
    assert {tuple(each["held"]) for each in cases} == {("bfloat16",), ("float32",)}
    for case in cases:
        types = {"param": "bfloat16", "reduce": case["reduce"]}
        sharding = {"mixed_precision": types, "units": ["0", "1"]}
        of = model()
        strategy = compile_program(
            scenario_of(strategy="fully_shard", fully_shard=sharding), of
        ).strategy
        assert isinstance(strategy, FullyShard)
        step = strategy.begun()
        for number, work in enumerate((strategy.first, strategy.later)):
            list(step.forward(work))
            list(step.backward(work, strategy.ends(number)))
        assert step.held.gradients == sum(case["held"].values()), case
        list(step.forward(strategy.later))
        list(step.backward(strategy.later, strategy.ends(2)))
        assert case["sharded"] == {"float32": step.held.gradients}
