"""The host's time of sharded steps: hooks of units, and the optimizer over DTensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from ddpsim.scenario.ddp import Ddp
from ddpsim.scenario.schema import Scenario
from ddpsim.scenario.workload import Optimizer
from ddpsim.strategies.ddp.costs import DdpCosts
from ddpsim.strategies.fully_shard.groups import dispatch_s, on_shards, operators
from ddpsim.workload.model import Work

US = 1e-6
KINDS: list[dict[str, Any]] = [
    {"name": "sgd"},
    {"name": "sgd", "weight_decay": 0.1},
    {"name": "sgd", "momentum": 0.9},
    {"name": "sgd", "momentum": 0.9, "weight_decay": 0.1},
    {"name": "adam"},
    {"name": "adam", "weight_decay": 0.1},
    {"name": "adamw"},
    {"name": "adamw", "weight_decay": 0.1},
]


def _costs(device: str, **figures: Any) -> DdpCosts:
    cluster = {"nodes": 1, "gpus_per_node": 2, "device": {"preset": device} | figures}
    keys = {
        "schema": "ddpsim/1",
        "workload": {"model": "resnet18", "batch_per_rank": 1},
        "ddp": {"backend": "gloo" if device == "cpu-core" else "nccl"},
        "cluster": cluster,
    }
    return DdpCosts(Scenario.model_validate(keys).cluster.device, Ddp())


CPU = _costs("cpu-core")


class _Counted(TorchDispatchMode):
    """Operators on parameters of 3 elements: with tensors alone, and with a number."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors = self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(args[0], Tensor) and args[0].numel() == 3:
            others = [each for each in args[1:] if isinstance(each, Tensor) and each.numel() == 3]
            alone = not others and len(args) > 1
            self.numbers += alone
            self.tensors += not alone
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("keys", KINDS, ids=str)
def test_operators_are_those_of_torch(keys: dict[str, Any]) -> None:
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    options = {"weight_decay": 0.0} | {k: v for k, v in keys.items() if k != "name"}
    parameter = nn.Parameter(torch.ones(3))
    made: Any = kinds[keys["name"]]([parameter], lr=0.1, foreach=False, **options)
    for _ in range(2):  # the first step makes the state
        parameter.grad = torch.ones(3)
        with _Counted() as counted:
            made.step()
    assert (counted.tensors, counted.numbers) == operators(Optimizer.model_validate(keys))


def test_dispatch_costs_most_on_a_cpu_where_numbers_are_arguments() -> None:
    """torch goes from parameter to parameter on a CPU, and takes all at once on a GPU."""
    sgd, adamw = Optimizer(), Optimizer(name="adamw", weight_decay=0.1)
    fused = Optimizer(name="adamw", fused=True)
    assert dispatch_s(sgd, "cpu") == pytest.approx(7.2 * US)
    assert 90 * US < dispatch_s(adamw, "cpu") < 130 * US
    assert dispatch_s(adamw, "gpu") == pytest.approx(8 * 1.7 * US)
    assert dispatch_s(sgd, "gpu") < dispatch_s(adamw, "gpu") < dispatch_s(fused, "gpu")


def test_the_loop_of_a_cpu_does_not_shrink_with_the_shards() -> None:
    """What a measured optimizer takes beside its bytes stays; the rest is divided."""
    whole, sgd = Work(10e-3), Optimizer()
    alone, halves, many = (on_shards(whole, sgd, 1000, ranks, CPU) for ranks in (1, 2, 10**6))
    loop_s = 1000 * 3.15 * US
    assert alone.device_s == pytest.approx(10e-3 + 7.2e-3)
    assert halves.device_s == pytest.approx(loop_s + (10e-3 - loop_s) / 2 + 7.2e-3)
    assert many.device_s == pytest.approx(loop_s + 7.2e-3, rel=1e-4)
    none = on_shards(Work(1e-6), sgd, 1000, 2, CPU)
    assert none.device_s == pytest.approx(1e-6 + 7.2e-3)


def test_torch_has_no_fused_sgd_over_dtensors() -> None:
    """So no time of it is known: fully_shard with it stops in torch 2.13."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        parameter = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Shard(0)]))
        parameter.grad = torch.ones_like(parameter)
        with pytest.raises(NotImplementedError, match="_fused_sgd_"):
            torch.optim.SGD([parameter], lr=0.1, fused=True).step()
        torch.optim.AdamW([parameter], lr=0.1, fused=True).step()
    finally:
        dist.destroy_process_group()


def test_hooks_are_as_much_slower_as_operators() -> None:
    """A stated host is that of hooks too; kernels of a CPU take their caches."""
    assert _costs("h100-sxm-80gb", operator="21 us").unit_hook_times == pytest.approx(1)
    assert _costs("h100-sxm-80gb", operator="42 us").unit_hook_times == pytest.approx(2)
    assert _costs("h100-sxm-80gb").unit_hook_times == 1
    assert _costs("cpu-core").unit_hook_times == pytest.approx(3)
