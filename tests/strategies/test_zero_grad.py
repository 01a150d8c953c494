"""Gradients that are filled with zeros, against torch's own operators."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from operators_of_torch import operators

from ddpsim.prediction.program import compile_program
from ddpsim.prediction.resolve import resolve
from ddpsim.scenario.schema import Scenario
from ddpsim.strategies.ddp.strategy import DistributedDataParallel
from ddpsim.strategies.instructions import Compute
from ddpsim.workload.build import build_model
from ddpsim.workload.model import Work

PARAMETERS = 6


def scenario_of(ddp: dict[str, Any] | None = None, **workload: Any) -> Scenario:
    return Scenario.model_validate(
        {
            "schema": "ddpsim/1",
            "workload": {"model": "resnet18", "batch_per_rank": 8} | workload,
            "ddp": ddp or {},
            "cluster": {"nodes": 1, "gpus_per_node": 2, "device": "a100-sxm-40gb"},
        }
    )


def kernels(scenario: Scenario, kind: str) -> int:
    """Launched in a step for a model of a few parameters that computes nothing, at 1 s each."""
    model = build_model(scenario)
    few = replace(
        model,
        parameters=model.parameters[:PARAMETERS],
        ready_order=tuple(range(PARAMETERS)),
        forward=(Work(0.0),),
        backward=(Work(0.0),) * (PARAMETERS + 1),
        launch_s=1.0,
    )
    step = compile_program(scenario, few).steady_step
    launched = [i for i in step if isinstance(i, Compute) and i.kind == kind]
    return sum(i.host_ns // 10**9 for i in launched)


@pytest.fixture(scope="module")
def found() -> dict[tuple[bool, bool, bool], dict[str, list[str]]]:
    """What torch calls in a step, by set_to_none, fused, and gradient_as_bucket_view."""
    pytest.importorskip("torch", reason="torch is the oracle of operators")
    return {
        (none, fused, view): operators(none=none, fused=fused, view=view)
        for none in (True, False)
        for fused, view in ((False, False), (True, True))
    }


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("none", [False, True])
def test_operators_are_those_of_torch(found: Any, none: bool, fused: bool) -> None:
    """Of zero_grad, of the additions in the backward, and of DDP's copies into buckets."""
    called = found[none, fused, fused]
    options = {"set_to_none": none, "optimizer": {"fused": fused}}
    scenario = scenario_of({"gradient_as_bucket_view": fused}, **options)
    assert kernels(scenario, "zero_grad") == len(called["zero_grad"])
    added = [name for name in called["backward"] if name.startswith("aten.add_")]
    assert kernels(scenario, "backward") == len(added)
    divided = [name for name in called["backward"] if name in ("aten.mul.out", "aten.div_.Scalar")]
    assert kernels(scenario, "bucket_copy") == len(divided) == PARAMETERS


def test_a_measured_step_holds_it() -> None:
    """Work is added to an estimated step alone; later micro-batches are as the first one."""
    accumulated = {"accumulation_steps": 2, "gradient_as_bucket_view": True}
    stated = scenario_of(accumulated, step_time="50 ms", set_to_none=False)
    assert kernels(stated, "zero_grad") == kernels(stated, "backward") == 0
    estimated = scenario_of(accumulated, set_to_none=False)
    assert kernels(estimated, "backward") == 2 * PARAMETERS


def test_views_stay_in_the_buckets() -> None:
    """Accumulated gradients are tensors of their own only where each step makes them anew."""
    accumulated = {"accumulation_steps": 2, "gradient_as_bucket_view": True}
    kept, anew = (resolve(scenario_of(accumulated, set_to_none=n)) for n in (False, True))
    assert isinstance(kept.program.strategy, DistributedDataParallel)
    assert kept.memory().gradients == 0 < anew.memory().gradients
