"""Activation checkpointing against torch's own: what runs twice, in which order, and bytes."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

import ddpsim
from ddpsim.scenario.workload import Workload
from ddpsim.workload.model import Model
from ddpsim.workload.roofline import zoo_model

TOOLS = Path(__file__).resolve().parents[2] / "tools"
BATCH, TOKENS = 3, 40
ALL = ("blocks.0", "blocks.1", "blocks.2", "blocks.3")


@pytest.fixture(scope="module")
def oracle() -> Any:
    pytest.importorskip("torch")
    return importlib.import_module("helpers.oracles.checkpointed_blocks")


@pytest.fixture(scope="module")
def zoo(oracle: Any) -> Any:
    sys.path.insert(0, str(TOOLS))
    yield importlib.import_module("zoo.tables"), importlib.import_module("zoo.models")
    sys.path.remove(str(TOOLS))


@pytest.fixture(scope="module")
def table(oracle: Any, zoo: Any) -> dict[str, Any]:
    """The oracle's model as tools/make_zoo.py measures it."""
    tables, models = zoo

    def loss(model: Any, batch: int, size: int) -> Any:
        import torch

        tokens = torch.empty(batch, size, dtype=torch.long, device="meta")
        return lambda: model(tokens)

    entry = models.Size(models.entry("seq_len", TOKENS, "seq_len", 1, (8, 512)), (8, 16, 24), 32)
    named = ("small", "small", "language", "torch", "Model()", oracle.Model, loss, entry)
    content: dict[str, Any] = tables.make_table(models.Spec(*named)).content
    return content


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
            wanted += [row for row in table["forward"]["module"] if row.startswith(f"{block}.")]
        wanted.append(parameters[index])
    assert seen["events"] == wanted
    model = modelled(table, checkpointing=names)
    plain = modelled(table)
    slower = [a.device_s > b.device_s for a, b in zip(model.backward, plain.backward, strict=True)]
    assert sum(slower) == len(names)
    assert model.activation_bytes == max(seen["end_bytes"], seen["most_bytes"])


def test_nothing_is_run_twice_without(table: dict[str, Any], oracle: Any) -> None:
    seen = oracle.observe((), BATCH, TOKENS)
    assert modelled(table).activation_bytes == seen["end_bytes"]
    assert table["blocks"]["name"] == list(ALL)


def test_the_rerun_stops_at_the_last_saved_tensor(
    table: dict[str, Any], oracle: Any, zoo: Any
) -> None:
    """All costs of a real checkpointed step, less those of a plain one, are those of the reruns."""
    import torch

    recording = importlib.import_module("zoo.recording")
    tokens = torch.empty(BATCH, TOKENS, dtype=torch.long, device="meta")
    totals = {}
    for names in ((), ALL):
        with torch.device("meta"):
            model = oracle.Model()
        model.checkpointed = names
        recorder = recording.Recorder()
        with torch.device("meta"), recording.cuda_kernels(), recorder:
            model(tokens).backward()
        totals[names] = vars(recorder.cut())
    extra = {key: totals[ALL][key] - totals[()][key] for key in totals[()]}
    assert extra == {key: _rerun(table, key) for key in extra}


def _rerun(table: dict[str, Any], key: str) -> float:
    """A cost of all reruns: the rows of each block but its last, and what of that is run again."""
    modules = table["forward"]["module"]
    blocks = [[i for i, row in enumerate(modules) if row.startswith(f"{b}.")] for b in ALL]
    whole = [row for rows in blocks for row in rows[:-1]]
    forward, rerun = table["forward"][key], table["blocks"]["rerun"][key]
    if key == "kernels":
        return sum(forward[row] for row in whole) + sum(rerun)
    factors = {"fixed": 1, "c0": BATCH, "c1": BATCH * TOKENS, "c2": BATCH * TOKENS**2}
    inside = sum(factors[name] * values[row] for name, values in forward.items() for row in whole)
    return float(inside + sum(factors[name] * sum(values) for name, values in rerun.items()))
