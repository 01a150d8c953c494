"""What compute is estimated to take: torch's arithmetic on a device that nobody measured."""

from __future__ import annotations

from typing import Any

import pytest

from ddpsim import load_scenario
from ddpsim.scenario.catalog import model_table
from ddpsim.scenario.schema import Optimizer
from ddpsim.workload.model import Model, Parameter
from ddpsim.workload.optimizer import optimizer_work
from ddpsim.workload.roofline import zoo_model

CONVOLUTIONS = {"resnet50": 53, "vgg16": 13, "vit_b_16": 1}


def cluster_of_one(preset: str, name: str = "resnet50", precision: str = "fp32") -> dict[str, Any]:
    return {
        "schema": "ddpsim/1",
        "workload": {"model": name, "batch_per_rank": 32, "precision": precision},
        "cluster": {"nodes": 1, "gpus_per_node": 1, "device": preset},
    }


def modelled(
    name: str, precision: str, *, preset: str = "a100-sxm-80gb", tf32: bool = True
) -> Model:
    scenario = load_scenario(cluster_of_one(preset, name, precision))
    device = scenario.cluster.device
    if not tf32:
        rates = {rate: peak for rate, peak in device.peak_flops_per_s.items() if rate != "tf32"}
        device = device.model_copy(update={"peak_flops_per_s": rates})
    return zoo_model(model_table(name), scenario.workload, device)


def test_torch_leaves_convolutions_alone_to_tf32() -> None:
    torch = pytest.importorskip("torch", reason="its defaults are the oracle")
    assert torch.backends.cudnn.allow_tf32
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_fp32_leaves_convolutions_to_tf32(name: str) -> None:
    """Each row of work is that of TF32 or that of a GPU without it; so many as there are layers."""
    usual, tf32 = modelled(name, "fp32"), modelled(name, "tf32")
    plain = modelled(name, "fp32", tf32=False)
    for part in ("forward", "backward"):
        rows = list(zip(*(getattr(model, part) for model in (usual, tf32, plain)), strict=True))
        assert all(own in (fast, slow) for own, fast, slow in rows)
        faster = [own for own, fast, slow in rows if fast != slow and own == fast]
        assert len(faster) == CONVOLUTIONS[name]
    (said,) = (line.source for line in usual.provenance if line.input == "compute time")
    assert "19.5 TFLOP/s fp32, 156 TFLOP/s tf32 for convolutions, torch's default, 2039 " in said


@pytest.mark.parametrize(
    ("name", "preset"), [("bert-base", "a100-sxm-80gb"), ("resnet50", "v100-sxm-32gb")]
)
def test_without_convolutions_or_tf32_fp32_is_fp32(name: str, preset: str) -> None:
    usual = modelled(name, "fp32", preset=preset)
    plain = modelled(name, "fp32", preset=preset, tf32=False)
    assert (usual.forward, usual.backward) == (plain.forward, plain.backward)
    (said,) = (line.source for line in usual.provenance if line.input == "compute time")
    assert "tf32" not in said


@pytest.mark.parametrize(
    ("name", "weights", "kept"),
    [
        # fc and biases too; no norms, which stay in half
        ("resnet50", 25_503_912, 1 / 2),
        # what the head shares with the embedding, but no positions and norms, which are in fp32
        ("gpt2", 123_615_012, 3 / 4),
    ],
)
def test_autocast_keeps_half_copies_of_the_weights_it_multiplies(
    name: str, weights: int, kept: float
) -> None:
    whole, cast, half = (modelled(name, p).activation_bytes for p in ("fp32", "amp-fp16", "bf16"))
    assert whole is not None
    assert cast == pytest.approx(whole * kept + 2 * weights)
    assert half == pytest.approx(whole / 2)


def test_convolutions_reach_another_share_of_tf32_than_matrix_products() -> None:
    """fp32 leaves convolutions alone to TF32; a device without the figure has one for both."""
    device = load_scenario(cluster_of_one("a100-sxm-80gb")).cluster.device
    assert device.efficiency("tf32", convolution=True) < device.efficiency("tf32")
    assert device.efficiency("fp16", convolution=True) == device.efficiency("fp16")
    resnet, bert = (modelled(name, "tf32") for name in ("resnet50", "bert-base"))
    assert _reached(resnet).startswith("55% (convolutions 30%) of the FLOP rate")
    assert _reached(bert).startswith("55% of the FLOP rate")


def _reached(model: Model) -> str:
    return next(p.source for p in model.provenance if p.input == "compute efficiency")


@pytest.mark.parametrize(
    ("name", "moved"), [("adam", (72, 84)), ("adamw", (72, 80)), ("sgd", (12, 24))]
)
def test_weight_decay_moves_what_torch_adds(name: Any, moved: tuple[int, int]) -> None:
    """Bytes an element of fp32: Adam adds the parameters to its gradients, AdamW scales them."""
    scenario = load_scenario(cluster_of_one("a100-sxm-80gb"))
    device = scenario.cluster.device
    parameters = [Parameter("weight", 10**8, "float32")]
    rate = device.memory_bandwidth_bytes_per_s * device.memory_efficiency
    for decay, per_element in zip((0.0, 0.01), moved, strict=True):
        work = optimizer_work(Optimizer(name=name, weight_decay=decay), parameters, device)
        assert work.device_s == pytest.approx(per_element * 10**8 / rate)
