"""The optimizer in DDP's hook: what is sent stays, its time is hidden, gradients are freed."""

from __future__ import annotations

from ddpsim import load_scenario
from ddpsim.prediction.resolve import resolve

FEW = ["run.iterations=1"]
SCENARIO = "scenarios/optimizer-in-backward.yaml"


def test_a_buckets_parameters_are_updated_after_it() -> None:
    found, plain = (
        resolve(load_scenario(SCENARIO, [f"ddp.optimizer_in_backward={value}", *FEW]))
        for value in ("true", "false")
    )
    steady = found.program.strategy.buckets(1)
    assert [b.wire_bytes for b in steady] == [
        b.wire_bytes for b in plain.program.strategy.buckets(1)
    ]
    after_s = sum(bucket.stages[0].after.device_ns for bucket in steady) / 1e9
    assert after_s >= plain.model.optimizer.device_s
    assert all(not bucket.copy_back.device_ns for bucket in steady)
    last_s = steady[-1].stages[0].after.device_ns / 1e9
    assert last_s < after_s / 2


def test_gradients_are_freed_bucket_by_bucket() -> None:
    whole = resolve(load_scenario(SCENARIO, ["ddp.optimizer_in_backward=false", *FEW])).memory()
    found = resolve(load_scenario(SCENARIO, FEW))
    largest = max(bucket.size_bytes for bucket in found.program.strategy.buckets(1))
    assert found.memory().gradients == largest < whole.gradients / 10
    assert found.memory().buckets == whole.buckets
    kept = resolve(load_scenario(SCENARIO, ["ddp.accumulation_steps=2", *FEW])).memory()
    assert kept.gradients == whole.gradients
