"""Published traces say what they say.

With DDPSIM_REFERENCE_DATA naming a folder of them (`kineto/*.json.gz`).
"""

from __future__ import annotations

import os
from itertools import accumulate
from pathlib import Path

import pytest
from logs.kineto_scenarios import read, refusal, scenario

import ddpsim
from ddpsim.prediction.resolve import resolve

REFERENCE = os.environ.get("DDPSIM_REFERENCE_DATA")


needs_reference = pytest.mark.skipif(
    REFERENCE is None, reason="DDPSIM_REFERENCE_DATA names no folder of traces"
)


RESNET50_BUCKETS = [2049000, 7875584, 6563840, 6637568, 2431040]


def reference(name: str) -> Path:
    return Path(str(REFERENCE)) / "kineto" / f"{name}.json.gz"


@needs_reference
def test_the_buckets_of_a_real_trace() -> None:
    path = reference("resnet50-ddp-2xA100-rank0")
    step = read(path).typical
    assert step.bucket_elements == tuple(RESNET50_BUCKETS)
    asked = scenario(path, device="a100-sxm-40gb", gpus=2, model="resnet50")
    result, model = ddpsim.simulate(asked), resolve(asked).model
    assert [bucket.size_bytes // 4 for bucket in result.buckets] == RESNET50_BUCKETS
    ready = [model.parameters[i].numel for i in model.ready_order]
    assert set(accumulate(RESNET50_BUCKETS)) <= set(accumulate(ready))
    assert any("bound by the host" in warning for warning in result.warnings)


@needs_reference
def test_a_real_step_of_one_gpu_is_simulated_to_its_length() -> None:
    """DDP's copies are left out of the trace and come back from the model of them."""
    path = reference("resnet50-ddp-world1-V100")
    measured_s = [step.length_s for step in read(path).steps[1:]]
    assert all(0.0955 < length_s < 0.0958 for length_s in measured_s)
    result = ddpsim.simulate(scenario(path, model="resnet50"))
    assert result.iteration_time_s.mean == pytest.approx(0.0956, rel=0.01)
    assert [bucket.size_bytes // 4 for bucket in result.buckets] == RESNET50_BUCKETS
    assert result.warnings == ()


@needs_reference
def test_two_loaders_of_one_model_agree_on_compute() -> None:
    steps = [read(reference(f"resnet50-single-V100-loader{n}")).typical for n in (0, 4)]
    backward_s = [sum(piece.device_s for piece in step.backward) for step in steps]
    assert backward_s[0] == pytest.approx(backward_s[1], rel=0.01)
    assert steps[0].device_s == pytest.approx(steps[1].device_s, rel=0.02)
    assert steps[0].optimizer.device_s == pytest.approx(steps[1].optimizer.device_s, rel=0.01)
    assert steps[0].loader_s > 0.04 > 0.002 > steps[1].loader_s


@needs_reference
def test_a_real_trace_without_communication_says_so() -> None:
    path = reference("resnet18-single-MI300X-no-comm")
    trace = read(path)
    assert trace.typical.collectives == ()
    model = resolve(scenario(path, model="resnet18")).model
    assert any("holds no communication" in warning for warning in model.warnings)
    assert {parameter.dtype for parameter in model.parameters} == {"bfloat16"}


@needs_reference
def test_a_real_trace_of_gloo() -> None:
    trace = read(reference("gloo-ddp-cpu-rank34-of-300"))
    assert (trace.on_gpu, trace.world_size) == (False, 300)
    step = trace.typical
    assert step.bucket_elements == (321271, 2082411)
    assert sum(gradient.numel or 0 for gradient in step.gradients) == 321271 + 2082411
    assert 0.02 < step.device_s < 0.06 < step.length_s  # the wait for 299 others is no compute


@needs_reference
def test_a_real_trace_of_another_model_is_refused() -> None:
    message = refusal(reference("dynamo-2xV100-rank1-404-allreduces"), model="resnet50")
    assert message.startswith("a step makes 404 gradients (AccumulateGrad), but the model beside")
