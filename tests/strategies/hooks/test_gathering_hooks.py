"""Hooks that gather in place of an all-reduce: their operators, what they send, what it costs."""

from __future__ import annotations

from typing import Any

import pytest

import ddpsim
from ddpsim.prediction.resolve import resolve
from ddpsim.result.model import Result
from ddpsim.scenario.schema import Scenario
from ddpsim.strategies.ddp.costs import Prices
from ddpsim.strategies.ddp.gathering_hooks import GatheringHook
from ddpsim.strategies.strategy import Bucket
from ddpsim.strategies.ticks import Ticks

_OF_A_GPU = 4  # copies to the device, and N that NCCL makes into a list


def scenario_of(hook: str, rate: str = "3 Gbit/s", nodes: int = 4, **ddp: Any) -> Scenario:
    return ddpsim.load_scenario(
        {
            "schema": "ddpsim/1",
            "workload": {
                "model": "resnet50",
                "batch_per_rank": 64,
                "precision": "amp-bf16",
                "step_time": "40 ms",
            },
            "ddp": {"comm_hook": hook, "broadcast_buffers": False, **ddp},
            "cluster": {
                "nodes": nodes,
                "gpus_per_node": 1,
                "device": "a100-sxm-80gb",
                "inter_node": {"bandwidth": rate, "latency": "50 us"},
            },
        }
    )


def simulated(hook: str, rate: str = "3 Gbit/s", nodes: int = 4, **ddp: Any) -> Result:
    return ddpsim.simulate(scenario_of(hook, rate, nodes, **ddp))


@pytest.mark.parametrize(("elements", "ranks"), [(1000, 2), (5120, 3)])
@pytest.mark.parametrize("name", ["pertensor", "perchannel"])
def test_operators_are_those_of_torchs_hook(name: str, elements: int, ranks: int) -> None:
    pytest.importorskip("torch", reason="torch's hooks are the oracle of their operators")
    from quantised_operators import operators_of_hook

    scenario = scenario_of(f"quantization_{name}")
    device = scenario.cluster.device
    prices = Prices(device, scenario.ddp, ticks=Ticks(device.launch_s))
    hook = GatheringHook(prices, ranks)
    staged = hook.staged(Bucket((0,), 4 * elements, 4 * elements), "float32")
    host_ns = sum(stage.before.host_ns + stage.after.host_ns for stage in staged.stages)
    operators = host_ns / (1e9 * (device.operator_s + device.launch_s))
    assert round(operators, 3) == operators_of_hook(name, elements, ranks) + _OF_A_GPU + ranks


def test_quantised_gradients_grow_with_the_ranks() -> None:
    """An all-gather of a byte an element from each rank is more than an all-reduce beyond 8."""
    few, many = (simulated("quantization_pertensor", nodes=nodes) for nodes in (2, 16))
    plain = [simulated("none", nodes=nodes).iteration_time_s.mean for nodes in (2, 16)]
    assert few.iteration_time_s.mean < plain[0]
    assert many.iteration_time_s.mean > plain[1]
    assert many.bottleneck.kind == "communication"
    assert "in its hook" not in many.bottleneck.text


def test_channels_take_the_host_longer_than_any_link() -> None:
    slow, fast = (simulated("quantization_perchannel", rate) for rate in ("3 Gbit/s", "1 Tbit/s"))
    assert fast.iteration_time_s.mean > 20
    assert slow.iteration_time_s.mean < 1.1 * fast.iteration_time_s.mean


def test_top_k_sends_a_fraction_and_keeps_the_rest() -> None:
    sparse = simulated("top_k", top_k={"fraction": 0.02, "error_feedback": False})
    model = resolve(scenario_of("none")).model
    elements = model.gradient_bytes // 4
    sent_bytes = sum(each.size_bytes for each in sparse.collectives)
    assert sent_bytes == pytest.approx(4 * 0.02 * elements * (4 + 8), rel=1e-4)
    kept = simulated("top_k", top_k={"fraction": 0.02}).memory_bytes_per_gpu.buckets
    assert kept == sparse.memory_bytes_per_gpu.buckets + model.gradient_bytes
    assert sparse.iteration_time_s.mean < simulated("none").iteration_time_s.mean / 4
