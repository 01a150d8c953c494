"""What an operator takes on a CPU core, and what an attention that is written out consists of."""

from __future__ import annotations

from typing import Any

import pytest

from ddpsim.prediction.api import load_scenario
from ddpsim.scenario.device import Device
from ddpsim.scenario.workload import Workload
from ddpsim.workload.arithmetic import arithmetic_of
from ddpsim.workload.operators import Operator
from ddpsim.workload.zoo.law import Law, written_out

FLOPS = 1e15  # so many that bytes and floors are nothing


def law(precision: Any, **figures: Any) -> Law:
    """On an A100, or one with other figures."""
    cluster = {"device": "a100-sxm-80gb", "nodes": 1, "gpus_per_node": 1}
    workload = {"model": "resnet50", "batch_per_rank": 2}
    job = load_scenario({"schema": "ddpsim/1", "workload": workload, "cluster": cluster})
    device: Device = job.cluster.device.model_copy(update=figures)
    used = Workload(batch_per_rank=2, model="resnet50", precision=precision)
    return Law.of(used, device, arithmetic_of(precision, device), 1.0)


def test_a_core_takes_flops_and_bytes_at_its_rates() -> None:
    core = law("fp32", kind="cpu", kernel_floor_s=0.0)
    rate = core.device.peak_flops_per_s["fp32"] * core.device.efficiency("fp32")
    bandwidth = core.device.memory_bandwidth_bytes_per_s * core.device.memory_efficiency
    product = Operator("product", 1, 3, 5, 7, flops=FLOPS, bytes_read=1000, bytes_written=24)
    assert core.work(product).device_s == pytest.approx(FLOPS / rate + 1024 / bandwidth)
    added = Operator("pointwise", bytes_read=1000, bytes_written=24)
    assert core.work(added).device_s == pytest.approx(1024 / bandwidth)


def test_the_steps_of_a_recurrence_follow_each_other() -> None:
    """Each takes as long as its product, and the host launches all their kernels."""
    gpu = law("fp32", kernel_floor_s=0.0)
    step = Operator("product", 1, 64, 4096, 1024, 1, 1, 2**29, 2**24, 2**20, 4)
    moved = {"bytes_read": 2**24 * 50, "bytes_written": 2**20 * 50}
    steps = step._replace(kind="recurrence", count=50, kernel=100, flops=50 * 2**29, **moved)
    found = gpu.work(steps)
    assert found.device_s == pytest.approx(50 * gpu.work(step).device_s)
    assert found.kernels == 100


@pytest.mark.parametrize("kind", ["attention", "attention_backward"])
def test_attention_that_is_written_out_has_its_products(kind: Any) -> None:
    """Backward four, as the scores are not computed anew."""
    passes = {"attention": 2, "attention_backward": 5}[kind]
    fused = Operator(kind, 6, 32, 32, 8, flops=passes * 2 * 6 * 32 * 32 * 8, item_bytes=2)
    parts = list(written_out(fused, 2))
    products = [part for part in parts if part.kind == "product"]
    assert len(products) == min(passes, 4)
    assert {part.flops for part in products} == {fused.flops / passes}
    assert [part.kind for part in parts].count("copy") == 0
    assert [part.kind for part in written_out(fused, 4)].count("copy") == 2


@pytest.mark.parametrize(
    ("item_bytes", "softmax_bytes", "forward_bytes", "backward_bytes"),
    [
        # passes of transformers' eager_attention_forward and back, and a byte of dropout's mask
        (4, 4, 10 * 4 + 1, 11 * 4 + 1),
        (2, 2, 10 * 2 + 1, 11 * 2 + 1),
        # the softmax, and dropout behind it, in four bytes; a cast of each to the other and back
        (2, 4, 6 * 2 + 4 * 4 + 2 * 6 + 1, 6 * 2 + 5 * 4 + 2 * 6 + 1),
    ],
)
def test_attention_that_is_written_out_moves_its_scores(
    item_bytes: int, softmax_bytes: int, forward_bytes: int, backward_bytes: int
) -> None:
    for kind, expected in (("attention", forward_bytes), ("attention_backward", backward_bytes)):
        fused = Operator(kind, 6, 32, 32, 8, item_bytes=item_bytes)  # type: ignore[arg-type]
        parts = written_out(fused, softmax_bytes)
        assert sum(p.bytes_read + p.bytes_written for p in parts) == 6 * 32 * 32 * expected
