"""Which modules `units: blocks` shards on their own, by the names and sizes of parameters."""

from __future__ import annotations

from math import prod

import pytest
from torch import nn

from ddpsim.scenario.catalog import model_names, zoo_document
from ddpsim.strategies.fully_shard.blocks import block_names, names_numbers


def blocks_of(model: nn.Module) -> tuple[str, ...]:
    return block_names([(name, each.numel()) for name, each in model.named_parameters()])


def convolutions() -> nn.Sequential:
    """A small CNN as many are written: each layer is a numbered child."""
    widths = [(3, 8), (8, 16), (16, 16), (16, 32)]
    layers = [
        each
        for inputs, outputs in widths
        for each in (nn.Conv2d(inputs, outputs, 3), nn.BatchNorm2d(outputs), nn.ReLU())
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def twice(inputs: int, outputs: int) -> nn.Sequential:
    """The double convolution of a U-Net."""
    first = (nn.Conv2d(inputs, outputs, 3, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())
    again = (nn.Conv2d(outputs, outputs, 3, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())
    return nn.Sequential(*first, *again)


class Attending(nn.Module):
    """A decoder's parts: blocks in a list, among layers that are none."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(3))
        self.head = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


class ListedUnet(nn.Module):
    """A U-Net whose levels are lists; the up-convolutions are single layers."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([twice(3, 4), twice(4, 8), twice(8, 16)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(16, 8, 2), nn.ConvTranspose2d(8, 4, 2)])
        self.merge = nn.ModuleList([twice(16, 8), twice(8, 4)])
        self.head = nn.Conv2d(4, 2, 1)


class NamedUnet(nn.Module):
    """A U-Net whose levels have names."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder1, self.encoder2 = twice(3, 4), twice(4, 8)
        self.up = nn.ConvTranspose2d(8, 4, 2)
        self.decoder = twice(8, 4)
        self.head = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))


def mixed() -> nn.Sequential:
    """A list of blocks within a sequence of layers."""
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(16, 8), encoder, nn.LayerNorm(8), nn.Linear(8, 16))


def residual() -> nn.Sequential:
    """Stages of blocks, of which the first has a projection more."""
    stage = nn.Sequential(nn.ModuleDict({"a": twice(4, 8), "p": nn.Conv2d(4, 8, 1)}), twice(8, 8))
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(stage), nn.Linear(8, 2))


@pytest.mark.parametrize(
    ("model", "blocks"),
    [
        (convolutions(), ()),
        (Attending(), ("layers.0", "layers.1", "layers.2")),
        (ListedUnet(), ("down.0", "down.1", "down.2", "merge.0", "merge.1")),
        (NamedUnet(), ("encoder1", "encoder2", "decoder")),
        (mixed(), ("1.layers.0", "1.layers.1")),
        (residual(), ("1.0",)),
        (nn.ModuleDict({"cells": nn.ModuleList([nn.LSTM(4, 4)])}), ("cells.0",)),
        (nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}), ()),
    ],
    ids=["convolutions", "decoder", "unet", "named unet", "mixed", "residual", "lstm", "none"],
)
def test_blocks_are_what_scripts_wrap(model: nn.Module, blocks: tuple[str, ...]) -> None:
    assert blocks_of(model) == blocks


def test_experts_stay_in_their_block() -> None:
    """Mixtures of experts number modules within blocks."""
    names = [
        f"layers.{i}.{part}"
        for i in range(2)
        for part in ("norm.weight", *(f"experts.{e}.{n}.weight" for e in range(2) for n in (0, 2)))
    ]
    assert block_names([(name, 8) for name in names]) == ("layers.0", "layers.1")


def test_a_list_of_one_block_is_a_block() -> None:
    assert block_names([("layers.0.a.weight", 8), ("layers.0.b.weight", 8)]) == ("layers.0",)


def test_names_tell_whether_modules_are_numbered() -> None:
    assert names_numbers(["head.weight", "features.0.weight"])
    assert not names_numbers(["head.weight", "3"])


@pytest.mark.parametrize("name", model_names())
def test_a_captured_model_has_the_blocks_that_units_are(name: str) -> None:
    """Checkpoints and units take the same modules; the zoo's tables hold what captures call."""
    document = zoo_document(name)
    parameters = document["parameters"]
    sizes = [
        (each, prod(shape))
        for each, shape in zip(parameters["name"], parameters["shape"], strict=True)
    ]
    assert {*document["captured"]["blocks"]} == {*block_names(sizes)}
