"""Activation checkpointing against torch's own: what runs twice, in which order, and bytes."""

from __future__ import annotations

import importlib
from collections import Counter
from itertools import chain
from typing import Any

import pytest

import ddpsim
from ddpsim.scenario.options.model_file import table_of
from ddpsim.scenario.workload import Workload
from ddpsim.workload.checkpointing import KeptBytes, checkpointed, reruns_of
from ddpsim.workload.model import Model
from ddpsim.workload.operators import Operator
from ddpsim.workload.roofline import zoo_model
from ddpsim.workload.zoo.step import step_of

BATCH, TOKENS = 3, 40
ALL = ("blocks.0", "blocks.1", "blocks.2", "blocks.3")


@pytest.fixture(scope="module")
def oracle() -> Any:
    pytest.importorskip("torch")
    return importlib.import_module("helpers.oracles.checkpointed_blocks")


def captured(oracle: Any, *kinds: Any) -> dict[str, Any]:
    """The oracle's model as a capture records it."""
    import torch

    from calibrate.capture.capture import capture
    from calibrate.capture.sources import Sizes, Source
    from calibrate.measure.model.training import Made

    with torch.device("meta"):
        model = oracle.Model(kinds) if kinds else oracle.Model()

    def make(batch: int, size: int | None) -> Made:
        tokens = torch.empty(batch, size or TOKENS, dtype=torch.long, device="meta")
        return Made(model, tokens, lambda loss: loss)

    sizes = (Sizes("seq_len", TOKENS, (8, 16, 512), 32),)
    source = Source("small", "small", "language", "torch", make, BATCH, TOKENS, sizes)
    return table_of(capture(source))


@pytest.fixture(scope="module")
def table(oracle: Any) -> dict[str, Any]:
    return captured(oracle)


def modelled(table: dict[str, Any], **workload: Any) -> Model:
    device = ddpsim.load_scenario(
        {
            "schema": "ddpsim/1",
            "workload": {"model": "gpt2", "batch_per_rank": 1},
            "cluster": {"nodes": 1, "gpus_per_node": 1, "device": "a100-sxm-80gb"},
        }
    ).cluster.device
    return zoo_model(table, Workload(batch_per_rank=BATCH, model="gpt2", **workload), device)


@pytest.mark.parametrize("names", [ALL, ("blocks.1", "blocks.2"), ("blocks.3",)])
def test_torch_runs_the_same_layers_twice_and_keeps_as_much(
    table: dict[str, Any], oracle: Any, names: tuple[str, ...]
) -> None:
    seen = oracle.observe(names, BATCH, TOKENS)
    parameters = table["parameters"]["name"]
    wanted: list[str] = []
    begun: set[str] = set()
    for index in table["ready_order"]:
        block = next((name for name in names if parameters[index].startswith(f"{name}.")), None)
        if block and block not in begun:
            begun.add(block)
            wanted += [row for row in table["forward_modules"] if row.startswith(f"{block}.")]
        wanted.append(parameters[index])
    assert seen["events"] == wanted
    model = modelled(table, checkpointing=names)
    plain = modelled(table)
    slower = [a.device_s > b.device_s for a, b in zip(model.backward, plain.backward, strict=True)]
    assert sum(slower) == len(names)
    loss_bytes = step_of(table, "fp32", BATCH, TOKENS).first_gradients_bytes
    assert model.activation_bytes == max(seen["end_bytes"] + loss_bytes, seen["most_bytes"])


def test_nothing_is_run_twice_without(table: dict[str, Any], oracle: Any) -> None:
    seen = oracle.observe((), BATCH, TOKENS)
    loss_bytes = step_of(table, "fp32", BATCH, TOKENS).first_gradients_bytes
    assert loss_bytes > 0
    assert modelled(table).activation_bytes == seen["end_bytes"] + loss_bytes
    assert table["blocks"] == list(ALL)


def test_the_rerun_stops_at_the_last_saved_tensor(table: dict[str, Any], oracle: Any) -> None:
    """All operators of a real checkpointed step, less those of a plain one, are the reruns'."""
    import torch

    from calibrate.capture.record import record

    tokens = torch.empty(BATCH, TOKENS, dtype=torch.long, device="meta")
    ran = {}
    for names in ((), ALL):
        with torch.device("meta"):
            model = oracle.Model()
        model.checkpointed = names
        step = record(model, lambda model=model: model(tokens), "fp32")
        ran[names] = Counter(one for row in (*step.forward, *step.backward) for one in row)
    step_here = step_of(table, "fp32", BATCH, TOKENS)
    reruns: Counter[Operator] = Counter()
    for block, (last, partly) in zip(ALL, step_here.reruns, strict=True):
        modules = enumerate(table["forward_modules"])
        first = next(row for row, module in modules if module.startswith(f"{block}."))
        reruns += Counter([*chain(*step_here.forward[first:last]), *partly])
    assert ran[ALL] - ran[()] == reruns
    assert not ran[()] - ran[ALL]


ATTENTION = {"keep": ("attention",)}
PRODUCTS = {"keep": ("attention", "product")}


@pytest.mark.parametrize(
    "kinds", [("Gated", "Gated"), ("Residual", "Gated"), ("Activated",) * 2, ("Residual",) * 3]
)
def test_a_policy_keeps_and_runs_again_what_torch_does(oracle: Any, kinds: tuple[str, ...]) -> None:
    """Bytes are those of real storages; FLOPs those that torch.utils.flop_counter counts."""
    own = captured(oracle, *(getattr(oracle, kind) for kind in kinds))
    names = tuple(own["blocks"])
    plain = oracle.counted_flops(oracle.Model([getattr(oracle, k) for k in kinds]), BATCH, TOKENS)
    step = step_of(own, "fp32", BATCH, TOKENS)
    for policy in ("full", "selective", ATTENTION, PRODUCTS, {"every": 2}):
        asked = Workload(batch_per_rank=BATCH, model="gpt2", checkpointing=policy).checkpointing
        chosen = checkpointed(asked, "small", names)
        model = oracle.Model([getattr(oracle, kind) for kind in kinds])
        model.keep = asked.keep
        seen = oracle.observe(chosen, BATCH, TOKENS, model)
        held = KeptBytes(own, step, [0.0] * len(step.forward))
        blocks = [block for block in held.blocks if block.name in chosen]
        reruns = reruns_of(asked, step.forward, blocks, compiled=False)
        assert held.at_most(reruns) == pytest.approx(
            max(seen["end_bytes"], seen["most_bytes"]), rel=0.03
        ), policy
        again = sum(one.flops for rerun in reruns.values() for one in rerun.operators)
        assert oracle.counted_flops(model, BATCH, TOKENS) - plain == again, policy
