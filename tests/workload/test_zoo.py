"""The zoo tables: their form, published figures, and that the script still makes them."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import json
import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ddpsim.scenario.catalog import model_names, model_table, zoo_document
from ddpsim.scenario.options.model_file import read_model_file, table_of
from ddpsim.workload.zoo.step import step_of

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "ddpsim" / "data" / "zoo"

# Trained parameters, which for all but these are all: Whisper's positions of the encoder and DiT's
# are fixed. torchvision: num_params of the model pages, docs.pytorch.org/vision/stable/models.html.
# GPT-2: github.com/openai/gpt-2 says 124M, 355M, 774M and 1558M; Llama 3.2 1B: its model card says
# 1.23B, those of 3.2 3B 3.21B, of 3.1 8B 8.03B and of 3.1 70B 70.6B, and Llama 2 13.0B; the exact
# figures are the sums over their shapes. GPT-NeoX-20B: Black et al. 2022, table of its sizes. ViT-g
# (Zhai et al. 2021: 1011M) with torchvision's head of 1000 classes. BERT: see test_bert_parameters.
# Model cards: Qwen 2.5 0.49B and 7.61B, Qwen 3 8.2B, Mistral v0.3 7.25B, Mixtral 46.7B, NeMo's
# FastConformer large 115M. T5: 220M and 770M, Raffel et al. 2020, 3.4. Whisper: 244M and 1550M,
# Radford et al. 2022, table 1. Stable Diffusion's UNets: 860M, v1's README, and 2.6B, Podell et al.
# 2023, table 1. DiT-XL/2: 675M, Peebles and Xie 2022, table 4. DLRM: summed over MLPerf's layers.
PARAMETERS = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "resnext50_32x4d": 25_028_904,
    "resnext101_32x8d": 88_791_336,
    "vgg16": 138_357_544,
    "vit_b_16": 86_567_656,
    "vit_l_16": 304_326_632,
    "bert-base": 110_106_428,
    "bert-large": 336_226_108,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-1b": 1_235_814_400,
    "llama-3b": 3_212_749_824,
    "llama-8b": 8_030_261_248,
    "llama-13b": 13_015_864_320,
    "llama-70b": 70_553_706_496,
    "gpt-neox-20b": 20_554_567_680,
    "vit_g_14": 1_012_611_432,
    "convnext_tiny": 28_589_128,
    "convnext_base": 88_591_464,
    "swin_t": 28_288_354,
    "swin_b": 87_768_224,
    "maxvit_t": 30_919_624,
    "efficientnet_b0": 5_288_548,
    "efficientnet_b4": 19_341_616,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "mistral-7b": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "whisper-small": 241_734_912 - 1500 * 768,
    "whisper-large-v3": 1_543_490_560 - 1500 * 1280,
    "fastconformer-large": 115_600_385,
    "sd15-unet": 859_520_964,
    "sdxl-unet": 2_567_463_684,
    "dit-xl-2": 675_129_632 - 256 * 1152,
    "dlrm-dense": 2_368_897,
}

# torchvision's "GFLOPS" of the model pages: 1e9 multiply-adds of one 224 x 224 image.
GIGA_MACS = {
    "resnet18": 1.814,
    "resnet34": 3.664,
    "resnet50": 4.089,
    "resnet101": 7.801,
    "resnet152": 11.514,
    "resnext50_32x4d": 4.23,
    "resnext101_32x8d": 16.414,
    "vgg16": 15.47,
    "vit_b_16": 17.564,
    "vit_l_16": 61.555,
    "convnext_tiny": 4.456,
    "convnext_base": 15.355,
    "swin_t": 4.491,
    "swin_b": 15.431,
    "maxvit_t": 5.558,
    "efficientnet_b0": 0.386,
}


def load(name: str) -> dict[str, Any]:
    """The table of a model."""
    return model_table(name)


def total(name: str, phase: str, batch: int, *, attention: bool = True) -> float:
    """FLOPs summed over all rows of a phase, at the default size; with attention's or without."""
    table = load(name)
    size = table["size"] or {"default": 1, "variable": "none"}
    x = size["default"] ** 2 if size["variable"] == "pixels" else size["default"]
    rows = getattr(step_of(table, "fp32", batch, x), phase)
    operators = (one for row in rows for one in row)
    return sum(one.flops for one in operators if attention or not one.kind.startswith("attention"))


def test_every_model_has_a_table() -> None:
    assert set(model_names()) == set(PARAMETERS)


def test_tables_are_small() -> None:
    sizes = [path.stat().st_size for path in FOLDER.iterdir()]
    assert sum(sizes) < 4000 * len(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_parameter_count(name: str) -> None:
    table = load(name)
    assert table["parameter_count"] == PARAMETERS[name]
    assert sum(map(math.prod, table["parameters"]["shape"])) == PARAMETERS[name]


@pytest.mark.parametrize("name", GIGA_MACS)
def test_published_forward_flops(name: str) -> None:
    flops = total(name, "forward", 1)
    assert flops == pytest.approx(2e9 * GIGA_MACS[name], rel=0.01)


@pytest.mark.parametrize(
    ("name", "hidden", "layers", "count"),
    [("bert-base", 768, 12, 110_106_428), ("bert-large", 1024, 24, 336_226_108)],
)
def test_bert_parameters(name: str, hidden: int, layers: int, count: int) -> None:
    """Counted from Devlin et al. 2019 (arXiv:1810.04805) and the uncased vocabulary of 30522."""
    dense = hidden * hidden + hidden
    feed_forward = 2 * hidden * 4 * hidden + 5 * hidden
    layer = 4 * dense + feed_forward + 2 * 2 * hidden
    embeddings = (30522 + 512 + 2) * hidden + 2 * hidden
    heads = dense + 2 * hidden + 30522 + 2 * hidden + 2
    assert embeddings + layers * layer + dense + heads == count
    assert load(name)["parameter_count"] == count


@pytest.mark.parametrize(
    ("name", "width", "inner", "layers", "kept"),
    [
        ("llama-3b", 3072, 8192, 28, 1 / 3),
        ("llama-8b", 4096, 14336, 32, 1 / 4),
        ("llama-13b", 5120, 13824, 40, 1.0),
        ("llama-70b", 8192, 28672, 80, 1 / 8),
    ],
)
def test_llama_blocks(name: str, width: int, inner: int, layers: int, kept: float) -> None:
    """Touvron et al. 2023: four projections, of keys and values a part, a gated MLP, two norms."""
    parameters = load(name)["parameters"]
    blocks: Counter[str] = Counter()
    for called, shape in zip(parameters["name"], parameters["shape"], strict=True):
        blocks[".".join(called.split(".")[:3])] += math.prod(shape)
    block = round((2 + 2 * kept) * width * width) + 3 * width * inner + 2 * width
    sizes = [size for called, size in blocks.items() if called.startswith("model.layers.")]
    assert sizes == [block] * layers


def test_vit_g_flops() -> None:
    """Zhai et al. 2021, table 2: 533.1 GFLOPs forward at 224 x 224."""
    flops = total("vit_g_14", "forward", 1)
    assert flops == pytest.approx(533.1e9, rel=0.01)


def test_gpt2_forward_flops() -> None:
    """Two per weight and token (the position table multiplies nothing) plus full attention."""
    tokens, width, layers = 1024, 768, 12
    matrices = 12 * width * width * layers + 50257 * width
    attention = 4 * tokens * tokens * width * layers
    flops = total("gpt2", "forward", 3)
    assert flops == 3 * (2 * matrices * tokens + attention)


@pytest.mark.parametrize("name", PARAMETERS)
def test_backward_is_twice_forward(name: str) -> None:
    """Gradients of inputs and of weights, but a stem has no input; attention has five for two."""
    backward, forward = (total(name, one, 1, attention=False) for one in ("backward", "forward"))
    assert 1.9 < backward / forward <= 2


@pytest.mark.parametrize("name", PARAMETERS)
def test_ready_order_is_a_permutation(name: str) -> None:
    table = load(name)
    assert sorted(table["ready_order"]) == list(range(len(table["parameters"]["name"])))


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_table_is_a_captured_model(name: str, tmp_path: Path) -> None:
    """It passes the checks of a user's own file, and keeps its parameters in float32."""
    path = tmp_path / "model.json"
    path.write_text(json.dumps(zoo_document(name)), encoding="utf-8")
    assert read_model_file(name, path).parameters.dtype == "float32"


@pytest.mark.parametrize(
    ("name", "embedding"),
    [
        ("gpt2", "transformer.wte.weight"),
        ("bert-base", "bert.embeddings.word_embeddings.weight"),
        ("llama-1b", "model.embed_tokens.weight"),
    ],
)
def test_tied_embedding_is_ready_last(name: str, embedding: str) -> None:
    table = load(name)
    last = table["parameters"]["name"][table["ready_order"][-1]]
    assert last == embedding


@pytest.mark.parametrize("name", ["resnet50", "resnext50_32x4d"])
def test_batch_norm_buffers(name: str) -> None:
    """Running mean, running variance and an int64 counter of each of 53 BatchNorm2d."""
    buffers = load(name)["buffers"]
    assert buffers["dtype"] == ["float32", "float32", "int64"] * 53


def reference_order(name: str) -> list[str]:
    """Parameter names in the order of measured ready times."""
    folder = os.environ.get("DDPSIM_REFERENCE_DATA")
    if not folder:
        pytest.skip("DDPSIM_REFERENCE_DATA is not set")
    path = Path(folder) / "ready-times" / f"{name}_ready_times.csv"
    with path.open(newline="", encoding="utf-8") as file:
        return [row["param_name"] for row in csv.DictReader(file)]


def ready_names(name: str) -> list[str]:
    """Parameter names in the table's ready order."""
    table = load(name)
    return [table["parameters"]["name"][index] for index in table["ready_order"]]


@pytest.mark.parametrize("name", ["resnet50", "resnet101", "gpt2"])
def test_measured_ready_order(name: str) -> None:
    assert ready_names(name) == reference_order(name)


def test_measured_ready_order_vgg16() -> None:
    """The measurement, on an older torch, has a convolution's bias before its weight.

    torch 2.13 has the weight first, on the CPU as on the meta device; both come out of one
    operator, so that their times are equal.
    """
    ours, theirs = ready_names("vgg16"), reference_order("vgg16")
    assert [name for name in ours if name.startswith("classifier.")] == theirs[:6]
    assert [name.rpartition(".")[0] for name in ours] == [n.rpartition(".")[0] for n in theirs]


@pytest.mark.parametrize(
    ("name", "library"), [("resnet18", "torchvision"), ("gpt2", "transformers")]
)
def test_script_makes_the_same_table(
    name: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="the zoo is captured with torch")
    from calibrate.capture.capture import capture, render

    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{name} is made by {library}, which is not installed")
    monkeypatch.syspath_prepend(ROOT / "tools")
    models = importlib.import_module("zoo.models")
    document = table_of(json.loads(render(capture(models.ZOO[name]()))))
    committed = load(name)
    if document["source"] != committed["source"]:
        pytest.skip(f"made by {committed['source']}, here is {document['source']}")
    assert document == committed
