"""Muon over matrices that ranks share out: what torch's own computes and sends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from oracles.two_ranks import observed_of

import ddpsim
from ddpsim.prediction.resolve import resolve
from ddpsim.strategies.fully_shard.muon import LocalProduct, Mesh, newton_schulz
from ddpsim.strategies.instructions import Communicate


@pytest.mark.parametrize("ranks", [2, 4])
def test_products_are_shared_out_as_dtensor_does(
    ranks: int, tmp_path: Path, warm_python: None
) -> None:
    pytest.importorskip("torch", reason="its Muon on DTensors is the oracle")
    for case in observed_of("muon_oracle.py", tmp_path, ranks):
        norm, *called = case["called"]
        assert norm == ["all_reduce", 2]
        mesh = Mesh(ranks, case["per_node"])
        told: list[list[Any]] = []
        for one in newton_schulz(tuple(case["shape"]), 2, mesh):
            if isinstance(one, LocalProduct):
                told.append(["addmm" if one.adds else "mm", one.m, one.n, one.k])
            elif one.operation == "all_to_all":  # which CPUs gather instead
                told.append(["all_gather", one.size_bytes])
            else:
                parts = ranks if one.operation == "all_gather" else 1
                told.append([one.operation, one.size_bytes // parts])
        rows = case["shape"][0]
        assert called == told or rows % ranks, case  # uneven parts are padded
        assert [each[0] for each in called] == [each[0] for each in told]
        assert "in-place operations that require placement changes" in case["adafactor"]


def scenario_of(
    optimizer: Any, nodes: int = 1, rate: str = "25 GB/s", **ddp: Any
) -> ddpsim.Scenario:
    return ddpsim.load_scenario(
        {
            "schema": "ddpsim/1",
            "workload": {
                "model": "gpt2",
                "batch_per_rank": 1,
                "precision": "amp-bf16",
                "optimizer": optimizer,
            },
            "ddp": {"strategy": "fully_shard"} | ddp,
            "cluster": {"nodes": nodes, "gpus_per_node": 4, "device": "a100-sxm-80gb"}
            | ({"inter_node": {"bandwidth": rate, "latency": "5 us"}} if nodes > 1 else {}),
        }
    )


def muons(scenario: ddpsim.Scenario) -> list[Communicate]:
    steps = resolve(scenario).program.steady_period
    return [each for step in steps for each in step.sent if "Muon" in each.cause]


def test_a_step_sends_what_each_matrix_does() -> None:
    """GPT-2 has 48 hidden matrices; its embeddings, tied to the output layer, are AdamW's."""
    found = muons(scenario_of("muon"))
    norms = [each for each in found if each.size_bytes == 2]
    assert len(norms) == 48
    assert muons(scenario_of("adamw")) == []
    assert muons(scenario_of({"name": "muon", "adamw": ["transformer"]})) == []
    without = muons(scenario_of({"name": "muon", "ns_steps": 0}))
    assert [each.size_bytes for each in without] == [2] * 48


def test_each_product_costs_time() -> None:
    """More iterations take longer, and none costs about what AdamW does."""
    times = [
        ddpsim.simulate(scenario_of({"name": "muon", "ns_steps": steps})).iteration_time_s.mean
        for steps in (0, 2, 5)
    ]
    assert times == sorted(times)
    first, second = times[1] - times[0], times[2] - times[1]
    assert second == pytest.approx(1.5 * first, rel=0.1)


def test_states_are_shared_out() -> None:
    one, four = (
        ddpsim.simulate(scenario_of("muon", **ddp)).memory_bytes_per_gpu.optimizer
        for ddp in ({"strategy": "ddp"}, {})
    )
    assert four == pytest.approx(one / 4)


def test_what_takes_longest_in_all_is_named() -> None:
    """Many short collectives of matrices, beside fewer long gathers of parameters."""
    slow = ddpsim.simulate(scenario_of("muon", nodes=2, rate="1 GB/s"))
    assert "mostly Muon's matrices" in slow.bottleneck.text
