"""FSDP1: what theory says of its bytes, memory and overlap, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs.random_jobs import models

from ddpsim.cluster.cost import LinkCost
from ddpsim.cluster.topology.paths import Link
from ddpsim.cluster.transfers import TURNS
from ddpsim.engine.request import Request
from ddpsim.engine.run import run
from ddpsim.errors import ScenarioError
from ddpsim.planning.compare import compare, option
from ddpsim.planning.shardings import shardings, strategy_name
from ddpsim.prediction.program import compile_program
from ddpsim.prediction.resolve import resolve
from ddpsim.result.metrics import Step, steps_of
from ddpsim.scenario.document import load
from ddpsim.scenario.load import parse
from ddpsim.scenario.schema import Scenario
from ddpsim.scenario.set_aside import as_ddp
from ddpsim.strategies.instructions import Communicate
from ddpsim.workload.model import Model, Parameter, Work

ELEMENTS = 960_000
LLAMA = "scenarios/llama-8b-fsdp1.yaml"


def blocks(count: int = 4, device_s: float = 1e-3) -> Model:
    """Blocks of two parameters of 4 bytes an element, which take as long forwards as backwards."""
    names = [f"layers.{i // 2}.p{i % 2}" for i in range(2 * count)]
    return Model(
        parameters=tuple(Parameter(name, ELEMENTS, "float32") for name in names),
        ready_order=tuple(reversed(range(len(names)))),
        buffers=(),
        forward=(Work(device_s * len(names)),),
        backward=(*[Work(device_s)] * len(names), Work(0.0)),
        optimizer=Work(1e-3),
        launch_s=0.0,
        activation_bytes=0,
        basis="measured",
        provenance=(),
    )


def scenario_of(ranks: int = 4, strategy: str = "fsdp1", **flat: Any) -> Scenario:
    ddp = {"strategy": strategy} | ({"fsdp1": flat} if flat else {})
    cluster = {"nodes": 1, "gpus_per_node": ranks, "device": "a100-sxm-80gb"}
    workload = {"model": "resnet18", "batch_per_rank": 1, "precision": "amp-bf16"}
    keys = {"schema": "ddpsim/1", "workload": workload, "ddp": ddp, "cluster": cluster}
    return Scenario.model_validate(keys | {"run": {"iterations": 2}})


def sent_bytes(scenario: Scenario, model: Model, ranks: int) -> float:
    """What a rank sends in a steady step: its part of every turn around the ring."""
    step = compile_program(scenario, model).steady_step
    launched = [i for i in step if isinstance(i, Communicate)]
    return sum(TURNS[i.operation] * (ranks - 1) / ranks * i.size_bytes for i in launched)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bytes_and_memory_are_those_of_zero(ranks: int) -> None:
    """ZeRO (Rajbhandari 2020): ZeRO-2 sends what DDP sends, ZeRO-3 half as much again."""
    model = blocks()
    ddp = sent_bytes(scenario_of(ranks, strategy="ddp"), model, ranks)
    for strategy, times in (("FULL_SHARD", 1.5), ("SHARD_GRAD_OP", 1), ("NO_SHARD", 1)):
        scenario = scenario_of(ranks, sharding_strategy=strategy)
        assert sent_bytes(scenario, model, ranks) == pytest.approx(times * ddp)
    held = compile_program(scenario_of(ranks), model).strategy.resident_bytes(
        model, 2 * model.gradient_bytes
    )
    assert held.parameters + held.gradients + held.optimizer == 4 * model.gradient_bytes / ranks


def test_one_rank_shards_nothing() -> None:
    """torch takes one rank for NO_SHARD, and so do the steps."""
    alone, whole = (
        compile_program(scenario_of(1, sharding_strategy=strategy), blocks())
        for strategy in ("FULL_SHARD", "NO_SHARD")
    )
    assert alone.steady_step == whole.steady_step
    assert not [i for i in alone.steady_step if isinstance(i, Communicate)]


@settings(max_examples=20)
@given(models(), st.integers(2, 4), st.sampled_from(["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]))
def test_a_free_network_costs_nothing(model: Model, ranks: int, strategy: str) -> None:
    """The step of N ranks is that of their own work, and of copies on the collectives' streams."""
    program = compile_program(scenario_of(ranks, sharding_strategy=strategy), model)
    done = run(Request(program, LinkCost((Link(0.0, 1e18),), ranks), ranks))
    sent = [i for i in program.steady_step if isinstance(i, Communicate)]
    for step in steps_of(done.timeline.slowest):
        assert step.comm_ns() == 0
        waits_ns = sum(s.end_ns - s.start_ns for s in step.compute if s.kind == "comm_wait")
        assert waits_ns <= sum(i.before_ns + i.after_ns for i in sent)


def step_of(model: Model, bytes_per_s: float, **flat: Any) -> Step:
    program = compile_program(scenario_of(2, **flat), model)
    done = run(Request(program, LinkCost((Link(0.0, bytes_per_s),), 2), 2))
    return steps_of(done.timeline.slowest)[-1]


def test_three_units_at_most_are_ahead_of_the_forward() -> None:
    """A gather waits until the unit three before it is done; without the limit for nothing.

    torch's limit is two, and a backward whose last unit gathers nothing ahead leaves one more.
    """
    limited, free = (
        step_of(blocks(6, 5e-3), 1e12, limit_all_gathers=limit) for limit in (True, False)
    )
    for step, waits in ((limited, True), (free, False)):
        gathers = [span for span in step.comm if span.operation == "all_gather"][:6]
        works = [span for span in step.compute if span.kind == "forward"]
        assert all(
            (g.joined_ns >= w.end_ns) == waits for g, w in zip(gathers[3:], works, strict=False)
        )


def test_prefetches_hide_the_next_unit() -> None:
    """Under a unit's work: the host is ahead of it, also behind its launch (BACKWARD_POST)."""
    pre, post, none = (
        step_of(blocks(6, 5e-3), 2e9, backward_prefetch=prefetch).length_ns
        for prefetch in ("BACKWARD_PRE", "BACKWARD_POST", None)
    )
    assert pre == post < none


def test_reductions_are_not_waited_for_in_the_backward() -> None:
    """Unlike fully_shard: on a slow network they end after it, one after the other."""
    step = step_of(blocks(), 5e8, sharding_strategy="SHARD_GRAD_OP")
    scatters = [span for span in step.comm if span.operation == "reduce_scatter"]
    works = [span for span in step.compute if span.kind == "backward"]
    assert scatters[1].end_ns > works[-1].end_ns


def test_what_is_held_falls_with_what_is_freed() -> None:
    """Quiet micro-batches hold all gradients, and without the limit all units may be whole."""
    model = blocks(16)

    def held_bytes(quiet: bool = False, **flat: Any) -> int:
        scenario = scenario_of(8, **flat)
        ddp = scenario.ddp.model_copy(update={"accumulation_steps": 1 + quiet})
        program = compile_program(scenario.model_copy(update={"ddp": ddp}), model)
        return sum(program.strategy.resident_bytes(model, 0))

    usual = held_bytes()
    assert held_bytes(backward_prefetch="BACKWARD_POST") < usual < model.gradient_bytes
    for more in ({"limit_all_gathers": False}, {"sharding_strategy": "SHARD_GRAD_OP"}):
        assert held_bytes(**more) > model.gradient_bytes
    assert held_bytes(quiet=True) > model.gradient_bytes


def test_it_is_ranked_beside_other_strategies() -> None:
    """With its units and precision, and only where a scenario has it."""
    document = load(
        LLAMA,
        [
            "run.iterations=1",
            "workload.model=gpt2",
            "workload.seq_len=64",
            "cluster.gpus_per_node=2",
        ],
    )
    ways = {strategy_name(settings): settings for settings in shardings(parse(document))}
    assert "fsdp1" not in [strategy_name(s) for s in shardings(scenario_of(strategy="ddp"))]
    named = [option(document, *ways[name], title=name) for name in ("fully_shard", "fsdp1")]
    plain = parse(document.changed(as_ddp(parse(document).ddp)))
    newer, own = compare(plain, named).changes
    assert newer.memory_bytes < own.memory_bytes < 0
    assert parse(document.changed(named[0].settings)).ddp.gathers_half


def test_norms_in_units_of_their_own_are_refused() -> None:
    mixed = {"mixed_precision": {"param": "bfloat16"}}
    with pytest.raises(ScenarioError, match="wraps each of this model's 20 batch norms"):
        resolve(scenario_of(**mixed))
    assert resolve(scenario_of(units=[], **mixed))
