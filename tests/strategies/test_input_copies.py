"""Copies of the inputs: what they take, and where the host waits for them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import ddpsim
from ddpsim.prediction.program import compile_program
from ddpsim.scenario.schema import Scenario
from ddpsim.strategies.instructions import Compute, Synchronize
from ddpsim.workload.build import build_model

BATCH_BYTES = 64 * 3 * 224 * 224 * 4


def scenario_of(copy: dict[str, Any] | None, **sections: Any) -> Scenario:
    workload = {"model": "resnet50", "batch_per_rank": 64, "step_time": "40 ms"}
    cluster = {"nodes": 1, "gpus_per_node": 2, "device": "a100-sxm-40gb"}
    return Scenario.model_validate(
        {
            "schema": "ddpsim/1",
            "workload": workload | {"input_copy": copy},
            "ddp": sections.get("ddp", {}),
            "cluster": cluster | sections.get("cluster", {}),
        }
    )


def copies(scenario: Scenario) -> list[tuple[Compute, bool]]:
    """Each copy of a step, and whether the host waits right after it."""
    step = compile_program(scenario, build_model(scenario)).steady_step
    return [
        (each, isinstance(after, Synchronize))
        for each, after in pairwise(step)
        if isinstance(each, Compute) and each.kind == "input_copy"
    ]


def step_s(copy: dict[str, Any] | None) -> float:
    return ddpsim.simulate(scenario_of(copy)).iteration_time_s.mean


def test_one_copy_a_micro_batch() -> None:
    (copied, waits), *others = copies(scenario_of({}, ddp={"accumulation_steps": 3}))
    assert others == 2 * [(copied, waits)]
    assert waits
    assert copied.device_ns == round(1e9 * BATCH_BYTES / 24e9)


def test_pinned_memory_spares_the_host_a_copy_and_non_blocking_the_wait() -> None:
    ((plain, _),) = copies(scenario_of({}))
    ((pinned, waits),) = copies(scenario_of({"pinned": True, "non_blocking": True}))
    assert not waits
    assert plain.host_ns - pinned.host_ns == round(1e9 * BATCH_BYTES / 10e9)
    assert plain.device_ns == pinned.device_ns


def test_stated_sizes_and_rates_come_first() -> None:
    stated = {"sample_size": "1 MB", "bandwidth": "64 GB/s"}
    ((copied, _),) = copies(scenario_of(stated))
    assert copied.device_ns == 1_000_000


def test_data_parallel_copies_the_batches_of_all_gpus() -> None:
    ((copied, _),) = copies(scenario_of({}, cluster={"algorithm": "data_parallel"}))
    assert copied.device_ns == round(1e9 * 2 * BATCH_BYTES / 24e9)


def test_a_device_that_is_the_slower_one_waits_for_the_copy_alone() -> None:
    """A host that runs ahead hides its own copy; one that waits has to launch anew after it."""
    without_s, ahead_s = step_s(None), step_s({"pinned": True, "non_blocking": True})
    assert round(ahead_s - without_s, 9) == round(BATCH_BYTES / 24e9, 9)
    assert step_s({"non_blocking": True}) == ahead_s < step_s({"pinned": True}) == step_s({})
