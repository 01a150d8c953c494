"""LoRA and frozen layers made of a captured model are what a capture of the fine-tuned one is."""

from __future__ import annotations

from collections import Counter
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="a capture runs torch")

import torch
from torch import nn

import ddpsim
from calibrate.capture.capture import capture
from calibrate.capture.shapes import building
from calibrate.capture.sources import Source
from calibrate.measure.model.training import Made, checked
from calibrate.measure.zoo.models import Llama
from ddpsim.errors import ScenarioError
from ddpsim.scenario.options.linear_layers import Lora
from ddpsim.scenario.options.model_file import table_of as joined
from ddpsim.workload.fine_tuning import fine_tuned
from ddpsim.workload.operators import MULTIPLYING
from ddpsim.workload.zoo.step import Row, step_of

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LAYERS, FROZEN = 2, ("model.embed_tokens", "model.layers.0")


class Adapted(nn.Module):
    """A linear layer with adapters, as peft writes it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.weight, self.bias = base.weight, base.bias
        pairs = {"lora_A": (base.in_features, rank), "lora_B": (rank, base.out_features)}
        for name, (inputs, outputs) in pairs.items():
            layer = nn.Linear(inputs, outputs, bias=False)
            self.add_module(name, nn.ModuleDict({"default": layer}))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = nn.functional.linear(x, self.weight, self.bias)
        return base + self.lora_B["default"](self.lora_A["default"](x)) * 2.0


def model_of(lora: tuple[str, ...], frozen: tuple[str, ...]) -> nn.Module:
    model = Llama(64, LAYERS, 4)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not lora and not name.startswith(frozen or ("none",)))
    for layer in model.model["layers"] if lora else ():
        for part in (layer.self_attn, layer.mlp):
            for name in set(lora) & set(part):
                part[name] = Adapted(part[name], 8)
    return model


@cache
def table_of(lora: tuple[str, ...], frozen: tuple[str, ...]) -> dict[str, Any]:
    def make(batch: int, _: int | None) -> Made:
        with building():
            model, tokens = model_of(lora, frozen), torch.randint(0, 50, (batch, 64))
            return checked("llama", (model, tokens, lambda loss: loss))

    return joined(capture(Source("llama", "llama", "language", "", make, 2)))


def products(rows: tuple[Row, ...]) -> list[Counter[Any]]:
    return [
        Counter((o.kind, o.count, *sorted((o.m, o.n)), o.k) for o in row if o.kind in MULTIPLYING)
        for row in rows
    ]


def moved(rows: tuple[Row, ...]) -> float:
    return sum(one.bytes_read + one.bytes_written for row in rows for one in row)


@pytest.mark.parametrize("precision", ["bf16", "amp-bf16"])
@pytest.mark.parametrize(("lora", "frozen"), [(ALL, ()), (("q_proj", "v_proj"), ()), ((), FROZEN)])
def test_it_is_what_a_capture_of_it_is(
    precision: Any, lora: tuple[str, ...], frozen: tuple[str, ...]
) -> None:
    plain, real = table_of((), ()), table_of(lora, frozen)
    options = Lora(rank=8, modules=lora) if lora else None
    workload: Any = SimpleNamespace(lora=options, frozen=frozen, precision=precision)
    table, step = fine_tuned(plain, step_of(plain, precision, 2, 1), workload)
    wanted = step_of(real, precision, 2, 1)
    assert table["ready_order"] == real["ready_order"]
    assert {key: table["frozen"][key] for key in ("name", "shape", "place")} == {
        key: real["frozen"][key] for key in ("name", "shape", "place")
    }
    for key in ("name", "shape"):
        assert table["parameters"][key] == real["parameters"][key]
    assert sum(products(step.forward), Counter()) == sum(products(wanted.forward), Counter())
    assert products(step.backward) == products(wanted.backward)
    assert moved(step.forward) == moved(wanted.forward)
    assert moved(step.backward) == pytest.approx(moved(wanted.backward), rel=0.001)
    assert wanted.own_bytes[-1] <= step.own_bytes[-1] < 1.09 * wanted.own_bytes[-1]


def simulated(**workload: Any) -> ddpsim.Result:
    given = {"model": "llama-1b", "batch_per_rank": 8, "precision": "bf16"}
    return ddpsim.simulate(
        ddpsim.load_scenario(
            {
                "schema": "ddpsim/1",
                "workload": given | {"optimizer": "adamw"} | workload,
                "cluster": {"nodes": 1, "gpus_per_node": 2, "device": "h100-sxm-80gb"},
            }
        )
    )


def test_adapters_alone_have_gradients_and_state_and_a_small_base_takes_time() -> None:
    whole, small, quantized = (
        simulated(**given) for given in ({}, {"lora": 8}, {"lora": {"rank": 8, "base": "nf4"}})
    )
    adapters = 2 * 16 * 8 * 44032  # bytes, layers, rank, and inputs and outputs of seven layers
    assert small.memory_bytes_per_gpu.optimizer == 2 * adapters
    assert small.memory_bytes_per_gpu.gradients == adapters
    base = whole.memory_bytes_per_gpu.parameters
    assert small.memory_bytes_per_gpu.parameters == base + adapters
    assert quantized.memory_bytes_per_gpu.parameters < 0.5 * base
    times = [each.iteration_time_s.mean for each in (small, quantized, whole)]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("workload", "told"),
    [
        ({"lora": {"modules": ["nothing"]}}, "no linear layer of llama-1b has a name that ends"),
        ({"lora": 8, "frozen": ["model.norm"]}, "lora freezes all but its adapters"),
        ({"lora": {"base": "nf4"}, "precision": "amp-bf16"}, "write workload.precision: bf16"),
        ({"lora": 8, "float8": "rowwise"}, "is not modelled beside float8 layers"),
        ({"lora": 8, "model": "resnet18", "seq_len": None}, "has no linear layers to adapt"),
        ({"frozen": ["nothing"]}, "holds no trained parameter of llama-1b"),
        ({"frozen": ["model"]}, "leaves nothing that is trained"),
    ],
)
def test_what_cannot_be_is_told(workload: dict[str, Any], told: str) -> None:
    with pytest.raises(ScenarioError, match=told):
        simulated(**workload)
