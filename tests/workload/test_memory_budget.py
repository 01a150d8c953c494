"""Activation memory budgets of torch.compile, against torch's own partitioner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from oracles.partitioned_graphs import kept_bytes

from ddpsim import load_scenario
from ddpsim.scenario.catalog import model_table
from ddpsim.workload.build import build_model
from ddpsim.workload.checkpointing import budgeted
from ddpsim.workload.model import Model, total_s
from ddpsim.workload.zoo.step import Row, step_of

TOLERANCE = 0.1


def rows_of(name: str, batch: int, size: int) -> tuple[Row, ...]:
    """The forward in float32; torch counts no FLOPs of a CPU's fused attention."""
    step = step_of(model_table(name), "fp32", batch, size)
    return tuple(
        tuple(one._replace(flops=0) if one.kind == "attention" else one for one in row)
        for row in step.forward
    )


def first_block(name: str) -> tuple[int, int]:
    table = model_table(name)
    inner = f"{table['blocks'][0]}."
    rows = [i for i, module in enumerate(table["forward_modules"]) if module.startswith(inner)]
    return rows[0], rows[-1] + 1


def layers() -> dict[str, tuple[Callable[[], Any], list[tuple[int, ...]], int]]:
    """A layer of each, the shapes of its inputs, and the size that the zoo's table takes."""
    from calibrate.measure.zoo import models as transformers

    angles = (1, 1, 256, 64)
    return {
        "gpt2": (lambda: transformers._Gpt2Layer(768, 12), [(2, 256, 768)], 256),
        "vit_b_16": (lambda: transformers._VitLayer(768, 12), [(4, 197, 768)], 224**2),
        "llama-1b": (
            lambda: transformers._LlamaLayer(2048, 32),
            [(1, 256, 2048), angles, angles],
            256,
        ),
    }


@pytest.mark.parametrize("name", ["gpt2", "vit_b_16", "llama-1b"])
def test_a_block_keeps_what_the_partitioner_keeps(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without dropout, whose attention a CPU would write out."""
    pytest.importorskip("torch", reason="its partitioner is the oracle")
    from calibrate.measure.zoo import models as transformers

    monkeypatch.setattr(transformers, "_DROPOUT", 0.0)
    make, shapes, size = layers()[name]
    rows, block = rows_of(name, shapes[0][0], size), first_block(name)
    for budget in (1.0, 0.7, 0.4):
        told = budgeted(rows, [block], budget).kept_bytes
        assert told == pytest.approx(kept_bytes(make, shapes, budget), rel=TOLERANCE), budget


def test_a_convolutional_model_keeps_what_the_partitioner_keeps() -> None:
    pytest.importorskip("torch", reason="its partitioner is the oracle")
    from calibrate.measure.zoo.models import ResNet

    rows = rows_of("resnet18", 8, 224**2)
    for budget in (1.0, 0.4, 0.2):
        told = budgeted(rows, [(0, len(rows))], budget).kept_bytes
        real = kept_bytes(lambda: ResNet((2, 2, 2, 2), basic=True), [(8, 3, 224, 224)], budget)
        assert told == pytest.approx(real, rel=TOLERANCE), budget


def built(compiles: bool | str, checkpointing: Any) -> Model:
    workload = {
        "model": "gpt2",
        "batch_per_rank": 4,
        "precision": "amp-bf16",
        "compile": compiles,
        "checkpointing": checkpointing,
    }
    cluster = {"nodes": 1, "gpus_per_node": 1, "device": "a100-sxm-80gb"}
    told = {"schema": "ddpsim/1", "workload": workload, "cluster": cluster}
    return build_model(load_scenario(told))


@pytest.mark.parametrize("compiles", [True, "blocks"])
def test_a_smaller_budget_keeps_less_and_takes_longer(*, compiles: bool | str) -> None:
    models = [built(compiles, {"memory_budget": budget}) for budget in (1, 0.6, 0.3, 0)]
    kept = [model.activation_bytes or 0.0 for model in models]
    times = [total_s(model.backward) for model in models]
    assert descends(kept)
    assert descends([-seconds for seconds in times])
    assert kept[0] < (built(compiles, None).activation_bytes or 0.0)
    full = built(compiles, "full")
    assert times[-1] == pytest.approx(total_s(full.backward), rel=0.1)


def descends(values: Sequence[float]) -> bool:
    return list(values) == sorted(values, reverse=True)
