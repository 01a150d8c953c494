"""The zoo's modules of torch alone do what the tables say, which come from the libraries' own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

pytest.importorskip("torch", reason="the zoo's modules are torch's")

import torch

from calibrate.capture.record import record
from calibrate.measure.model.training import compute_threads
from calibrate.measure.zoo.models import BUILDERS, build, inputs_of, loss_of
from ddpsim.scenario.catalog import model_table
from ddpsim.workload.operators import Operator
from ddpsim.workload.zoo.step import step_of

# one of each kind of layer; the others of a family differ in depth and width alone
TRACED = ("resnet18", "resnext50_32x4d", "vgg16", "vit_b_16", "bert-base", "gpt2", "llama-1b")
BATCH = 2


@pytest.mark.parametrize("name", BUILDERS)
def test_parameters_are_those_of_the_table(name: str) -> None:
    columns = model_table(name)["parameters"]
    with torch.device("meta"):
        model = BUILDERS[name]()
    found = {key: list(tensor.shape) for key, tensor in model.named_parameters()}
    assert list(found.items()) == list(zip(columns["name"], columns["shape"], strict=True))


@pytest.mark.parametrize("name", TRACED)
def test_a_step_does_the_work_of_the_table(name: str) -> None:
    """The same modules in the same order, the same gradients, and as many FLOPs in each row.

    Elementwise work is the same but for details of the libraries; most in Llama, 3.6 %.
    """
    table = model_table(name)
    size = table["size"]["default"]
    x = size**2 if table["size"]["variable"] == "pixels" else size
    with torch.device("meta"):
        model = BUILDERS[name]().train()
        tokens = table["size"]["key"] == "seq_len"
        shape = (BATCH, size) if tokens else (BATCH, 3, size, size)
        inputs = torch.empty(shape, dtype=torch.long if tokens else torch.float32)
    step = record(model, lambda: loss_of(model(inputs)), "fp32")
    assert step.modules == table["forward_modules"]
    assert step.ready == table["ready_order"]
    known = step_of(table, "fp32", BATCH, x)
    assert [*map(_flops, step.forward)] == [*map(_flops, known.forward)]
    assert [*map(_flops, step.backward)] == [*map(_flops, known.backward)]
    moved, expected = (
        sum(one.bytes_read + one.bytes_written for row in rows for one in row if not one.flops)
        for rows in ((*step.forward, *step.backward), known.rows)
    )
    assert moved == pytest.approx(expected, rel=0.04)


def _flops(row: Sequence[Operator]) -> float:
    return sum(one.flops for one in row)


def test_a_built_model_trains() -> None:
    """Weights that all share a block of random numbers give a finite loss and gradients."""
    here = torch.device("cpu")
    with compute_threads(1):
        model = build("resnet18", here)
        loss = loss_of(model(inputs_of(model, 2, 64, here)))
        loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    assert all(p.grad is not None for p in model.parameters())
