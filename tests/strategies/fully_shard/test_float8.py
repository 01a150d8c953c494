"""Float8 linear layers: what is gathered and reduced of them, and what their products take.

The collectives are those that torchao 0.18 launched under fully_shard on a fake process group.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from jobs.timeless_model import timeless_model

import ddpsim
from ddpsim.prediction.program import compile_program
from ddpsim.scenario.schema import Scenario
from ddpsim.strategies.instructions import Communicate

WIDTH, WORDS, FLOAT8 = 64, 96, {"all_gather": True}
LAYER = [
    ("n.weight", 64, 64),
    ("n.bias", 64, 64),
    ("a.weight", 16384, 256),
    ("b.weight", 16384, 64),
]
PARAMETERS = [
    ("e.weight", WORDS * WIDTH, WORDS),
    *((f"layers.{i}.{name}", numel, rows) for i in range(2) for name, numel, rows in LAYER),
    ("h.weight", WORDS * WIDTH, WORDS),
]
ROOT, GATHERED = ("all_gather", 24576), ("all_gather", 33024)
SCALED, REDUCED = ("all_reduce", 4), ("reduce_scatter", 131584)


def sent(**float8: Any) -> list[tuple[str, int]]:
    scenario = Scenario.model_validate(
        {
            "schema": "ddpsim/1",
            "workload": {
                "model": "llama-1b",
                "batch_per_rank": 1,
                "precision": "amp-bf16",
                "float8": FLOAT8 | float8,
            },
            "ddp": {
                "strategy": "fully_shard",
                "fully_shard": {"mixed_precision": {"param": "bfloat16", "reduce": "float32"}},
            },
            "cluster": {"nodes": 1, "gpus_per_node": 2, "device": "h100-sxm-80gb"},
        }
    )
    model = timeless_model({"parameters": PARAMETERS, "ready_order": [*reversed(range(10))]})
    model = replace(model, float8_gathered=frozenset({3, 4, 7, 8}))
    step = compile_program(scenario, model).strategy.steps[0]
    return [(one.operation, one.size_bytes) for one in step if isinstance(one, Communicate)]


def test_weights_are_gathered_in_one_byte_after_their_largest_values() -> None:
    block = [SCALED, SCALED, GATHERED]
    gathers = [one for one in sent() if one[0] != "reduce_scatter"]
    assert gathers == [ROOT, *block * 4]
    assert sent().count(REDUCED) == 2


def test_scales_computed_ahead_are_reduced_at_once() -> None:
    found = sent(precompute_scales=True)
    assert found[-1] == ("all_reduce", 4 * 4)
    assert [one for one in found[:-1] if one[0] != "reduce_scatter"] == [ROOT, *[GATHERED] * 4]


def step_s(**workload: Any) -> float:
    scenario = {
        "schema": "ddpsim/1",
        "workload": {"model": "llama-1b", "batch_per_rank": 4, "precision": "bf16", **workload},
        "cluster": {"nodes": 1, "gpus_per_node": 1, "device": "h100-sxm-80gb"},
    }
    return ddpsim.simulate(ddpsim.load_scenario(scenario)).iteration_time_s.mean


def test_casts_cost_more_than_products_gain_where_nothing_fuses_them() -> None:
    """As torchao says: float8 wants torch.compile."""
    skip = {"recipe": "tensorwise", "skip": ["lm_head"]}
    assert step_s(float8=skip) > step_s()
    assert step_s(float8=skip, compile="blocks") < step_s(compile="blocks")


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_products_have_as_many_flops_and_one_byte(recipe: str) -> None:
    from ddpsim.scenario.catalog import model_table
    from ddpsim.scenario.options.linear_layers import Float8
    from ddpsim.workload.float8 import Float8Linears
    from ddpsim.workload.zoo.step import step_of

    table = model_table("llama-1b")
    options = Float8.model_validate({"recipe": recipe, "skip": ["lm_head"]})
    step = step_of(table, "bf16", 1, 512)
    linears = Float8Linears.of(table, options, compiled=True, left=1.0)
    new = linears.converted(step, table["forward_modules"])
    of_plain, of_new = (
        [one for row in each.rows for one in row if one.kind == "product"] for each in (step, new)
    )
    assert [one.flops for one in of_plain] == [one.flops for one in of_new]
    converted = [one for one in of_new if one.item_bytes == 1]
    assert len(of_new) - len(converted) == 3  # those of lm_head
