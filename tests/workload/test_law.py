"""What an operator takes by a device's rates: its tiles, and what of its FLOPs is computed."""

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
    return Law(used, device, arithmetic_of(precision, device), 1.0)


def test_many_tiles_fill_a_device_and_few_do_not() -> None:
    """By hand: 4096 x 4096 outputs are 2048 tiles of 128 x 64, 18.96 waves of 108."""
    product = Operator("product", 1, 4096, 4096, 4096, flops=2 * 4096**3, item_bytes=4)
    filled, ideal = law("tf32").work(product), law("tf32", multiprocessors=None).work(product)
    assert ideal.device_s / filled.device_s == pytest.approx(2048 / (2048 + 108))
    few = Operator("product", 1, 128, 64, 64, flops=FLOPS, item_bytes=4)
    filled, ideal = law("tf32").work(few), law("tf32", multiprocessors=None).work(few)
    assert ideal.device_s / filled.device_s == pytest.approx(1 / (1 + 108))


@pytest.mark.parametrize(
    ("channels", "kernel", "precision", "times"),
    [
        # Winograd's convolutions, of dense 3 x 3 in float32
        (64, 9, "fp32", 1 / 2.25),
        (64, 9, "tf32", 1),
        (3, 49, "fp32", 1),
        (4, 9, "fp32", 1),  # grouped
        # tensor cores pad channels to 64 bytes: of images inputs alone, of groups their outputs too
        (3, 49, "tf32", 16 / 3),
        (3, 49, "bf16", 32 / 3),
        (4, 9, "amp-fp16", 8 * 8),
        (64, 9, "bf16", 1),
    ],
)
def test_what_is_computed_of_a_convolution(
    channels: int, kernel: int, precision: Any, times: float
) -> None:
    rates = {"fp32": 1e12, "tf32": 1e12, "bf16": 1e12, "fp16": 1e12}
    if precision == "fp32":
        del rates["tf32"]
    figures = {
        "peak_flops_per_s": rates,
        "convolution_efficiency": dict.fromkeys(rates, 1.0),
        "multiprocessors": None,
    }
    item_bytes = 4 if precision in ("fp32", "tf32") else 2
    one = Operator(
        "convolution", 1, 64, 64, channels * kernel, kernel, flops=FLOPS, item_bytes=item_bytes
    )
    assert law(precision, **figures).work(one).device_s == pytest.approx(FLOPS / 1e12 * times)
    core = law(precision, **figures, kind="cpu").work(one)
    assert core.device_s == pytest.approx(FLOPS / 1e12)


def test_autocast_leaves_some_products_in_float32() -> None:
    rates = {"fp32": 1e12, "bf16": 2e12}
    figures = {"peak_flops_per_s": rates, "matmul_efficiency": dict.fromkeys(rates, 1.0)}
    amp = law("amp-bf16", **figures, multiprocessors=None)
    product = Operator("product", 1, 64, 64, 64, flops=FLOPS)
    assert amp.work(product._replace(item_bytes=4)).device_s == pytest.approx(FLOPS / 1e12)
    assert amp.work(product._replace(item_bytes=2)).device_s == pytest.approx(FLOPS / 2e12)


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
