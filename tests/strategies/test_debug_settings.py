"""Debug settings: torch itself does as often what the model adds, and both engines agree."""

from __future__ import annotations

from typing import Any

import pytest
from jobs.engine_runs import MODES, slowest_steps
from jobs.simulated_jobs import simulated_program
from shipped_scenarios import load

import ddpsim
from ddpsim.prediction.resolve import resolve
from ddpsim.strategies.instructions import Communicate, Compute, Synchronize

ANOMALY, OFF = "workload.debug.detect_anomaly=true", "workload.debug.distributed_detail=false"


def step_of(*settings: str) -> list[Any]:
    return list(resolve(load("debug-settings", *settings)).program.steady_step)


def test_torch_records_a_stack_per_operator_and_reads_each_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    stacks: list[int] = []
    monkeypatch.setattr("torch.fx.traceback.format_stack", lambda: stacks.append(1) or [])
    seen: list[str] = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    layers = [torch.nn.ReLU() for _ in range(5)]
    batch = torch.ones(4, requires_grad=True)
    with torch.autograd.set_detect_anomaly(True), Watching():
        loss = torch.nn.Sequential(*layers)(batch).sum()
        assert len(stacks) == 6 + 1  # one more for what accumulates the input's gradient
        seen.clear()
        loss.backward()
    for check in ("isnan", "_is_any_true", "_local_scalar_dense"):
        assert seen.count(check) == 6


def test_torch_checks_each_collective_over_gloo(tmp_path: Any) -> None:
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        dist.init_process_group("gloo", f"file://{tmp_path}/store", world_size=1, rank=0)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            dist.all_reduce(torch.zeros(4))
        dist.destroy_process_group()
    finally:
        dist.set_debug_level(level)
    names = [event.name for event in profiler.events()]
    assert names.count("gloo:all_gather") == 2
    assert names.count("gloo:all_reduce") == 1


def test_anomaly_mode_lets_the_host_wait_in_the_backward() -> None:
    quiet, watched = step_of("workload.debug=null"), step_of("workload.debug=null", ANOMALY)
    backward = sum(isinstance(each, Compute) and each.kind == "backward" for each in quiet)
    waits = sum(isinstance(each, Synchronize) for each in watched)
    assert waits >= backward
    assert not any(isinstance(each, Synchronize) for each in quiet)


def test_each_collective_waits_for_the_ranks_and_the_log() -> None:
    """Eight ranks: 1 ms for the fingerprint, 20 us for the line."""
    quiet, checked = step_of("workload.debug=null"), step_of()
    pairs = [
        (plain.host_ns, later.host_ns)
        for plain, later in zip(quiet, checked, strict=True)
        if isinstance(plain, Communicate)
    ]
    assert pairs
    assert {later - plain for plain, later in pairs} == {1_020_000}


def test_both_engines_agree() -> None:
    scenario = load("debug-settings", ANOMALY, "cluster.gpus_per_node=2", "run.iterations=2")
    program = resolve(scenario).program
    fast, plain = (simulated_program(scenario, program, mode) for mode in MODES)
    lengths = [[step.length_ns for step in slowest_steps(each)] for each in (fast, plain)]
    assert lengths[0] == lengths[1]


def test_a_single_device_has_no_collective_to_check() -> None:
    alone = "cluster.gpus_per_node=1", "workload.debug.nccl_line=null"
    scenarios = (load("debug-settings", *alone, *more) for more in ((), (OFF,)))
    checked, quiet = (ddpsim.simulate(each).iteration_time_s.mean for each in scenarios)
    assert checked == quiet
