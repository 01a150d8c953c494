"""What DDP itself costs, with torch's own tensors and kernels as the oracle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from logs.measured_files import model_file

from ddpsim import load_scenario
from ddpsim.prediction.job import Job
from ddpsim.prediction.resolve import resolve
from ddpsim.scenario.ddp import Ddp
from ddpsim.scenario.workload import Optimizer
from ddpsim.strategies.ddp.costs import DdpCosts
from ddpsim.strategies.instructions import Compute, numbered
from ddpsim.units import MIB
from ddpsim.workload.model import Buffer, Parameter
from ddpsim.workload.optimizer import optimizer_work

USED, UNUSED = 3, 5
BYTES = 4 * MIB  # of each


def torch_or_skip() -> Any:
    return pytest.importorskip("torch", reason="torch is the oracle")


@pytest.fixture
def alone() -> Iterator[Any]:
    """Wraps a module in DDP of this process."""
    torch_or_skip()
    from torch.nn.parallel import DistributedDataParallel

    from calibrate.measure.ranks.job import process_group

    with process_group("gloo"):
        yield DistributedDataParallel


@pytest.fixture
def job(tmp_path: Path) -> Any:
    """Of a profile with unused parameters, which stand first."""
    gradients: list[tuple[str, int, float | None]] = [
        *((f"unused{i}", MIB, None) for i in range(UNUSED)),
        *((f"used{i}", MIB, 0.01 * (9 - i)) for i in range(USED)),
    ]
    times = {"batch_per_rank": 8, "forward_s": 0.05, "backward_s": 0.1, "optimizer_s": 0.01}
    profile = model_file(gradients, **times)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile), encoding="utf-8")

    def build(**ddp: Any) -> Job:
        workload = {"profile": str(path), "batch_per_rank": 8, "optimizer": {"name": "adamw"}}
        cluster = {"machine": "dgx-a100", "nodes": 1}
        options = {"find_unused_parameters": True, **ddp}
        document = {"schema": "ddpsim/1", "workload": workload, "ddp": options, "cluster": cluster}
        return resolve(load_scenario(document))

    return build


def branches(torch: Any) -> Any:
    """As many parameters that take part, and that do not."""

    class Branches(torch.nn.Module):  # type: ignore[misc] -- torch may be missing
        def __init__(self) -> None:
            super().__init__()
            make = torch.nn.Parameter
            self.idle = torch.nn.ParameterList(make(torch.zeros(8)) for _ in range(UNUSED))
            self.busy = torch.nn.ParameterList(make(torch.zeros(8)) for _ in range(USED))

        def forward(self, x: Any) -> Any:
            return sum(x * parameter for parameter in self.busy)

    return Branches()


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_what_gets_no_gradient_has_a_place_in_a_bucket_and_nothing_else(
    option: str, alone: Any, job: Any
) -> None:
    torch = torch_or_skip()
    module = branches(torch)
    ddp = alone(module, **{option: True})
    optimizer = torch.optim.AdamW(module.parameters())
    for _ in range(3):
        ddp(torch.ones(8)).sum().backward()
        gradients = [p for p in module.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    assert len(gradients) == len(optimizer.state) == USED

    found = job(**{"find_unused_parameters": False, option: True})
    memory = found.memory()
    assert memory.parameters == memory.buckets == (USED + UNUSED) * BYTES
    assert memory.gradients == USED * BYTES
    assert memory.optimizer == 2 * USED * BYTES
    alike = DdpCosts(found.scenario.cluster.device, found.scenario.ddp)
    parameter = found.model.parameters[0]
    back, zeros = alike.copy_back([parameter]), alike.zeroed(parameter)
    copied_ns = sum(bucket.copy_back.device_ns for bucket in found.program.steady_buckets)
    assert copied_ns == pytest.approx(USED * back.device_s * 1e9, abs=USED)
    in_ns = [copy.device_ns for copy in found.program.strategy.reducer.copy_in]
    assert in_ns[:UNUSED] == [pytest.approx(zeros.device_s * 1e9, abs=1)] * UNUSED
    assert min(in_ns[UNUSED:]) > max(in_ns[:UNUSED])


def test_adding_up_needs_gradients_beside_their_view(alone: Any, job: Any) -> None:
    """Under no_sync they are tensors of their own, which the last backward moves into buckets."""
    torch = torch_or_skip()
    module = torch.nn.Linear(64, 64)
    ddp = alone(module, gradient_as_bucket_view=True)

    def storages() -> set[int]:
        return {p.grad.untyped_storage().data_ptr() for p in module.parameters()}

    for _ in range(2):  # in the second buckets are rebuilt
        with ddp.no_sync():
            ddp(torch.ones(2, 64)).sum().backward()
        apart = storages()
        ddp(torch.ones(2, 64)).sum().backward()
        together = storages()
        module.zero_grad()
    assert (len(apart), len(together)) == (2, 1)
    assert not apart & together

    view, added = (job(gradient_as_bucket_view=True, accumulation_steps=n) for n in (1, 2))
    assert view.memory().gradients == 0
    assert added.memory().gradients == USED * BYTES


def test_ddp_prepares_for_the_last_backward_alone(job: Any) -> None:
    program = job(accumulation_steps=4).program
    hooks = [
        work
        for work in program.steady_step
        if isinstance(work, Compute) and work.host_ns == program.strategy.forward_hook_ns
    ]
    assert len(hooks) == 1


@pytest.mark.parametrize("steps", [3, 4, 7])
@pytest.mark.parametrize("options", [{}, {"no_sync": False}, {"static_graph": True}])
def test_micro_batches_between_the_first_and_the_last_are_alike(
    job: Any, steps: int, options: dict[str, Any]
) -> None:
    strategy = job(accumulation_steps=steps, **options).program.strategy
    each = tuple(tuple(numbered(strategy.step(kind))) for kind in range(strategy.kinds))
    assert strategy.steps == each


def test_torch_stops_where_a_static_graph_begins_without_sync(alone: Any, job: Any) -> None:
    torch = torch_or_skip()
    ddp = alone(torch.nn.Linear(4, 4), static_graph=True)
    with ddp.no_sync(), pytest.raises(RuntimeError, match="expect_autograd_hooks_"):
        ddp(torch.ones(1, 4)).sum().backward()
    (warning,) = job(static_graph=True, accumulation_steps=2).warnings(1.0)
    assert "take that step without no_sync" in warning
    assert not job(static_graph=True).warnings(1.0)


def test_large_buffers_are_broadcast_in_parts_as_torch_groups_them() -> None:
    torch = torch_or_skip()
    from torch import distributed as dist

    shapes = [(180, "float32"), (1, "int64"), (180, "float32"), (60, "float32"), (260, "int64")]
    tensors = [
        torch.empty(mib * MIB, dtype=torch.uint8, device="meta").view(getattr(torch, dtype))
        for mib, dtype in shapes
    ]
    groups, _ = dist._compute_bucket_assignment_by_size(tensors, [250 * MIB])
    scenario = load_scenario(
        {
            "schema": "ddpsim/1",
            "workload": {"model": "resnet50", "batch_per_rank": 1},
            "cluster": {"machine": "dgx-a100", "nodes": 1},
        }
    )
    buffers = [
        Buffer(dtype, tensor.numel()) for (_, dtype), tensor in zip(shapes, tensors, strict=True)
    ]
    found = DdpCosts(scenario.cluster.device, Ddp()).broadcasts(buffers)
    assert [b.size_bytes for b in found] == [
        sum(buffers[i].size_bytes for i in group) for group in groups
    ]
    assert len(found) == 3


def test_an_optimizer_moves_each_parameters_own_bytes() -> None:
    """One of a wide dtype among many narrow ones makes those no wider."""
    scenario = load_scenario(
        {
            "schema": "ddpsim/1",
            "workload": {"model": "resnet50", "batch_per_rank": 1},
            "cluster": {"machine": "dgx-a100", "nodes": 1},
        }
    )
    device, adamw = scenario.cluster.device, Optimizer(name="adamw")
    narrow = [Parameter(f"p{i}", 2**24, "bfloat16") for i in range(8)]
    wide = [Parameter("wide", 2**20, "float64")]
    narrow_s, wide_s, both_s = (
        optimizer_work(adamw, some, device).device_s for some in (narrow, wide, narrow + wide)
    )
    assert both_s == pytest.approx(narrow_s + wide_s)


def test_a_listed_convolutions_bias_is_ready_after_its_weight(tmp_path: Path) -> None:
    torch = torch_or_skip()
    nn = torch.nn
    model = nn.Sequential(
        nn.Conv1d(3, 4, 3), nn.ConvTranspose1d(4, 2, 2), nn.BatchNorm1d(2), nn.Linear(31, 5)
    )
    ready: list[str] = []
    lines = ["name,shape,dtype"]
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: ready.append(name))
        lines.append(f"{name},{'x'.join(map(str, parameter.shape))},float32")
    model(torch.rand(2, 3, 32)).sum().backward()
    path = tmp_path / "parameters.csv"
    path.write_text("\n".join(lines), encoding="utf-8")
    workload = {"parameters": str(path), "batch_per_rank": 2, "step_time": "1 ms"}
    cluster = {"machine": "dgx-a100", "nodes": 1}
    scenario = load_scenario({"schema": "ddpsim/1", "workload": workload, "cluster": cluster})
    assert [parameter.name for parameter in resolve(scenario).model.used] == ready
