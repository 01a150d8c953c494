"""What a loop does around the optimizer, against torch's own operators and its own arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from ddpsim.prediction.program import compile_program
from ddpsim.scenario.schema import Scenario
from ddpsim.strategies.instructions import Compute, Instruction, Synchronize
from ddpsim.units import NS_PER_S
from ddpsim.workload.build import build_model
from ddpsim.workload.model import Model

LOOPS: list[dict[str, Any]] = [
    {"precision": "amp-fp16", "clip_grad_norm": clip, "optimizer": {"fused": fused}}
    for clip in (None, True, {"error_if_nonfinite": True})
    for fused in (False, True)
]
LOOPS += [{"clip_grad_norm": True}, {"clip_grad_norm": {"error_if_nonfinite": True}}, {}]
PARAMETERS = 5


def scenario_of(**workload: Any) -> Scenario:
    return Scenario.model_validate(
        {
            "schema": "ddpsim/1",
            "workload": {"model": "resnet50", "batch_per_rank": 8} | workload,
            "cluster": {"nodes": 1, "gpus_per_node": 2, "device": "a100-sxm-40gb"},
        }
    )


def around_optimizer(scenario: Scenario, model: Model) -> list[Instruction]:
    """From the last wait for a bucket to the step's end, without the optimizer itself."""
    kinds = ("unscale", "clip", "item")
    return [
        i
        for i in compile_program(scenario, model).steady_step
        if isinstance(i, Synchronize) or (isinstance(i, Compute) and i.kind in kinds)
    ]


def few(model: Model) -> Model:
    """Its first parameters alone, of which one launch takes all."""
    from dataclasses import replace

    order = tuple(i for i in model.ready_order if i < PARAMETERS)
    works = model.backward[: len(order) + 1]
    return replace(
        model, parameters=model.parameters[:PARAMETERS], ready_order=order, backward=works
    )


def operators_of_torch(workload: dict[str, Any]) -> list[str]:
    """Those of a real loop around the optimizer, as torch dispatches them."""
    torch = pytest.importorskip("torch", reason="torch is the oracle of operators")
    from torch.utils._python_dispatch import TorchDispatchMode

    called: list[str] = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(  # type: ignore[no-untyped-def] # torch's own are untyped
            self, operator, types, args=(), kwargs=None
        ):
            called.append(str(operator))
            return operator(*args, **(kwargs or {}))

    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(PARAMETERS)]
    fused = workload.get("optimizer", {}).get("fused", False)
    clip = workload.get("clip_grad_norm")
    optimizer = torch.optim.SGD(parameters, lr=0.1, fused=fused, foreach=None if fused else True)
    scaler = torch.amp.GradScaler("cpu", enabled="precision" in workload)
    scaler.scale(sum(parameter.sum() for parameter in parameters)).backward()
    with Log():
        if clip:
            scaler.unscale_(optimizer)
            options = clip if isinstance(clip, dict) else {}
            torch.nn.utils.clip_grad_norm_(parameters, 1.0, **options)
        scaler.step(optimizer)
        scaler.update()
    own = ("aten._foreach_add_", "aten._fused_sgd_", "profiler.")
    return [operator for operator in called if not operator.startswith(own)]


@pytest.mark.parametrize("workload", LOOPS, ids=str)
def test_operators_and_waits_are_those_of_torch(workload: dict[str, Any]) -> None:
    """In number and order; reading a value is one of them, and the host waits right after it."""
    scenario = scenario_of(**workload)
    device = scenario.cluster.device
    model = few(build_model(scenario))
    ours = []
    for instruction in around_optimizer(scenario, model):
        if isinstance(instruction, Synchronize):
            ours[-1] = (ours[-1][0], True)
            continue
        host_s = instruction.host_ns / NS_PER_S
        ours.append((host_s // (device.operator_s + device.launch_s), False))
    operators = operators_of_torch(workload)
    assert sum(count for count, _ in ours) == len(operators)
    waits = [sum(int(count) for count, _ in ours[: i + 1]) for i, (_, w) in enumerate(ours) if w]
    read = [i for i, operator in enumerate(operators, 1) if "_local_scalar_dense" in operator]
    assert waits == read


def moved_s(instructions: Sequence[Instruction], kind: str) -> float:
    works = [i for i in instructions if isinstance(i, Compute) and i.kind == kind]
    return sum(i.device_ns for i in works) / NS_PER_S


def test_passes_move_every_gradient() -> None:
    """Unscaling reads and writes, the norm reads, clipping reads and writes: 5 passes in all."""
    scenario = scenario_of(model="bert-large", precision="amp-fp16", clip_grad_norm=True)
    device, model = scenario.cluster.device, build_model(scenario)
    found = around_optimizer(scenario, model)
    pass_s = model.gradient_bytes / (device.memory_bandwidth_bytes_per_s * device.memory_efficiency)
    assert moved_s(found, "unscale") == pytest.approx(2 * pass_s, rel=0.02)
    assert moved_s(found, "clip") == pytest.approx(3 * pass_s, rel=0.02)


def test_a_measured_step_holds_its_work_but_not_its_waits() -> None:
    clip = {"error_if_nonfinite": True}
    scenario = scenario_of(precision="amp-fp16", clip_grad_norm=clip, step_time="50 ms")
    found = around_optimizer(scenario, build_model(scenario))
    assert [i.kind if isinstance(i, Compute) else "wait" for i in found] == 2 * ["item", "wait"]


@pytest.mark.parametrize("strategy", ["naive", "naive_flat", "per_parameter", "ddp", "local_sgd"])
def test_every_strategy_does_it_after_its_last_all_reduce(strategy: str) -> None:
    scenario = scenario_of(precision="amp-fp16", clip_grad_norm=True)
    local = {"local_sgd": {"every": 2}} if strategy == "local_sgd" else {}
    ddp = scenario.ddp.model_validate({"strategy": strategy, **local})
    changed = scenario.model_copy(update={"ddp": ddp})
    step = compile_program(changed, build_model(scenario)).steady_step
    kinds = [i.kind if isinstance(i, Compute) else type(i).__name__ for i in step]
    assert kinds.index("optimizer") == len(kinds) - 1 - kinds[::-1].index("optimizer")
    before = kinds[: kinds.index("optimizer")]
    assert before[-5:] == ["unscale", "clip", "clip", "item", "Synchronize"]
    assert before[-6] in ("copy_back", "backward")
