"""DDP's own mixed precision: bytes and casts of a bucket, copies before a forward, memory."""

from __future__ import annotations

from ddpsim import load_scenario
from ddpsim.prediction.job import Job
from ddpsim.prediction.resolve import resolve
from ddpsim.strategies.instructions import Compute

SCENARIO = "scenarios/ddp-mixed-precision.yaml"


def job(*settings: str) -> Job:
    return resolve(load_scenario(SCENARIO, [*settings, "run.iterations=1"]))


def test_buckets_hold_the_same_parameters_and_half_the_bytes() -> None:
    found, plain = (
        each.program.strategy.buckets(1) for each in (job(), job("ddp.mixed_precision=null"))
    )
    assert [bucket.parameters for bucket in found] == [bucket.parameters for bucket in plain]
    assert [2 * bucket.wire_bytes for bucket in found] == [b.wire_bytes for b in plain]
    assert [bool(bucket.copy_back.device_ns) for bucket in found] == [
        bucket is found[-1] for bucket in found
    ]
    assert not any(bucket.stages[0].before.device_ns for bucket in found)  # nothing is cast


def test_gradients_are_cast_before_and_kept_where_they_are_sent_in_another_type() -> None:
    found = job("ddp.mixed_precision.reduce=float32")
    buckets = found.program.strategy.buckets(1)
    assert all(bucket.stages[0].before.device_ns for bucket in buckets)
    assert sum(bucket.wire_bytes for bucket in buckets) == found.model.gradient_bytes
    assert found.memory().buckets == 1.5 * found.model.gradient_bytes
    assert job().memory().buckets == found.model.gradient_bytes / 2
    assert found.memory().parameters == 1.5 * found.model.gradient_bytes


def test_first_steps_reduce_no_gradients() -> None:
    (found,) = job().warnings(1.0)
    assert "in the first backward, until the buckets are rebuilt" in found
    assert any("first two backwards" in each for each in job("ddp.static_graph=true").warnings(1.0))


def copies(*settings: str) -> list[Compute]:
    """What the host does before each forward of a step, for 161 parameters."""
    step = job(*settings).program.strategy.steps[1]
    works = [each for each in step if isinstance(each, Compute) and each.kind == "forward"]
    return [work for work in works if work.host_ns >= 161 * 60_000]


def test_gradients_that_wait_for_more_are_cast_with_the_parameters() -> None:
    (once,) = copies()
    first, second = copies("ddp.accumulation_steps=2", "ddp.no_sync=false")
    assert first == once
    assert second.host_ns > first.host_ns
    (stay,) = copies("workload.set_to_none=false", "workload.step_time=null")
    assert stay == second
