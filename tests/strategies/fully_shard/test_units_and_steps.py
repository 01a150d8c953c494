"""fully_shard: what theory says of its bytes, memory and overlap, and which units there are."""

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
from ddpsim.planning.compare import compare, each_strategy
from ddpsim.prediction.api import load_scenario
from ddpsim.prediction.fitting import ways_to_fit
from ddpsim.prediction.program import compile_program
from ddpsim.prediction.resolve import resolve
from ddpsim.result.metrics import Step, steps_of
from ddpsim.scenario.document import load
from ddpsim.scenario.options.fully_shard import AS_AUTOCAST, FullyShard
from ddpsim.scenario.schema import Scenario
from ddpsim.strategies.fully_shard.units import forward_pieces, plan_units
from ddpsim.strategies.instructions import Communicate
from ddpsim.strategies.zero.zero_redundancy import partition
from ddpsim.units import format_bytes, format_duration
from ddpsim.workload.model import Model, Parameter, Work

ROWS = 960  # a multiple of all numbers of ranks here
GPT2_XL = "scenarios/gpt2-xl-fully-shard.yaml"


def blocks(count: int = 4, *, root: bool = False, device_s: float = 1e-3) -> Model:
    """Blocks of two parameters of 4 bytes an element, which take as long forwards as backwards."""
    names = [f"layers.{i // 2}.p{i % 2}" for i in range(2 * count)] + ["head.weight"] * root
    return Model(
        parameters=tuple(
            Parameter(name, 1000 * ROWS, "float32", shape=(ROWS, 1000)) for name in names
        ),
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


def scenario_of(ranks: int = 4, **options: Any) -> Scenario:
    ddp = {"strategy": "fully_shard"} | options
    cluster = {"nodes": 1, "gpus_per_node": ranks, "device": "a100-sxm-80gb"}
    workload = {"model": "resnet18", "batch_per_rank": 1, "precision": "amp-bf16"}
    keys = {"schema": "ddpsim/1", "workload": workload, "ddp": ddp, "cluster": cluster}
    return Scenario.model_validate(keys | {"run": {"iterations": 2}})


def sent_bytes(scenario: Scenario, model: Model, ranks: int) -> float:
    """What a rank sends in a steady step: its part of every turn around the ring."""
    step = compile_program(scenario, model).steady_step
    launched = [i for i in step if isinstance(i, Communicate)]
    return sum(TURNS[i.operation] * (ranks - 1) / ranks * i.size_bytes for i in launched)


def kept(**options: Any) -> dict[str, Any]:
    return {"fully_shard": {"reshard_after_forward": False}} | options


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_bytes_are_those_of_zero(ranks: int) -> None:
    """ZeRO (Rajbhandari 2020): DDP and ZeRO-2 send 2 (N-1)/N M, ZeRO-3 half as much again."""
    model = blocks()
    ddp = sent_bytes(scenario_of(ranks, strategy="ddp"), model, ranks)
    assert ddp == pytest.approx(2 * (ranks - 1) / ranks * model.gradient_bytes)
    assert sent_bytes(scenario_of(ranks, **kept()), model, ranks) == pytest.approx(ddp)
    assert sent_bytes(scenario_of(ranks), model, ranks) == pytest.approx(1.5 * ddp)


def test_zero1_sends_as_much_and_optimizes_a_part() -> None:
    """DDP's all-reduces, and each parameter once from its owner: another (N-1)/N M, or half.

    A ring's broadcast passes each byte on: its root sends M, as all but the last do.
    """
    model = blocks()
    zero1, ddp = scenario_of(strategy="zero1"), scenario_of(strategy="ddp")
    step = compile_program(zero1, model).steady_step
    sent = [i for i in step if isinstance(i, Communicate) and i.operation == "broadcast"]
    assert sum(launched.size_bytes for launched in sent) == model.gradient_bytes
    states = 2 * model.gradient_bytes
    held, whole = (
        compile_program(each, model).strategy.resident_bytes(model, states) for each in (zero1, ddp)
    )
    assert held == whole._replace(optimizer=states // 4)
    alone = compile_program(scenario_of(1, strategy="zero1"), model).steady_step
    assert alone == compile_program(scenario_of(1, strategy="ddp"), model).steady_step


def test_half_precision_halves_what_is_gathered() -> None:
    mixed = {"mixed_precision": {"param": "bfloat16", "reduce": "float32"}}
    scenario = load_scenario(GPT2_XL, ["ddp.accumulation_steps=1"])
    plain = scenario.model_copy(update={"ddp": scenario_of().ddp})
    halved = scenario.model_copy(update={"ddp": scenario_of(fully_shard=mixed).ddp})
    model = resolve(scenario).model

    def of(scenario: Scenario, operation: str) -> int:
        step = compile_program(scenario, model).steady_step
        sent = (i for i in step if isinstance(i, Communicate) and i.operation == operation)
        return sum(launched.size_bytes for launched in sent)

    assert 2 * of(halved, "all_gather") == of(plain, "all_gather")
    assert of(halved, "reduce_scatter") == of(plain, "reduce_scatter")


def test_one_rank_sends_nothing_and_holds_all() -> None:
    model, alone = blocks(), scenario_of(1)
    assert not sent_bytes(alone, model, 1)
    strategy, ddp = (
        compile_program(each, model).strategy for each in (alone, scenario_of(1, strategy="ddp"))
    )
    held, whole = (each.resident_bytes(model, 8 * 10**6) for each in (strategy, ddp))
    assert (held.parameters, held.gradients) == (whole.parameters, whole.gradients)
    assert held.optimizer == whole.optimizer == 8 * 10**6


@settings(max_examples=25)
@given(models(), st.integers(1, 5))
def test_parts_of_the_optimizer_are_even(model: Model, ranks: int) -> None:
    """Each parameter has one owner, and no rank has more than another by more than a parameter."""
    parts = partition(model.parameters, ranks)
    assert sorted(i for part in parts for i in part) == list(range(len(model.parameters)))
    elements = [sum(model.parameters[i].numel for i in part) for part in parts]
    largest = max(parameter.numel for parameter in model.parameters)
    assert max(elements) - min(elements) <= largest


@settings(max_examples=25)
@given(models(), st.integers(2, 4), st.booleans())
def test_a_free_network_costs_nothing(model: Model, ranks: int, reshards: bool) -> None:
    """The step of N ranks is that of their own work: nothing is waited for."""
    options = {"reshard_after_forward": reshards, "units": "blocks"}
    program = compile_program(scenario_of(ranks, fully_shard=options), model)
    free = LinkCost((Link(0.0, 1e18),), ranks)
    done = run(Request(program, free, ranks))
    copied_ns = [i.before_ns for i in program.steady_step if isinstance(i, Communicate)]
    after_ns = [i.after_ns for i in program.steady_step if isinstance(i, Communicate)]
    for step in steps_of(done.timeline.slowest):
        assert step.comm_ns() == 0
        waits_ns = sum(s.end_ns - s.start_ns for s in step.compute if s.kind == "comm_wait")
        assert waits_ns <= sum(copied_ns) + sum(after_ns)  # copies on the collectives' streams


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_sixteen_bytes_a_parameter_are_shared(ranks: int) -> None:
    """Parameters, gradients and Adam's two moments in float32; a block's two, whole, beside them.

    At most: a block's parameters and those of the next one as gathered, and copied out or not;
    its gradients; what is being reduced of the block before it.
    """
    model = blocks()
    memory = compile_program(scenario_of(ranks), model).strategy.resident_bytes(
        model, 2 * model.gradient_bytes
    )
    resident = memory.parameters + memory.gradients + memory.optimizer
    assert resident == 4 * model.gradient_bytes / ranks  # 16 bytes of 4 each
    block = 2 * 1000 * ROWS * 4
    assert 3 * block <= memory.buckets <= 5 * block


def test_parameters_that_stay_are_all_there_at_once() -> None:
    model = blocks(6)
    whole, freed = (
        compile_program(scenario_of(4, **options), model).strategy.resident_bytes(model, 0)
        for options in (kept(), {})
    )
    assert whole.buckets > model.gradient_bytes > freed.buckets


def test_gradients_of_quiet_micro_batches_stay_whole() -> None:
    model = blocks(6)
    quiet, synced = (
        compile_program(scenario_of(4, accumulation_steps=2, no_sync=no_sync), model)
        for no_sync in (True, False)
    )
    assert quiet.strategy.resident_bytes(model, 0).buckets > model.gradient_bytes
    assert synced.strategy.resident_bytes(model, 0).buckets < model.gradient_bytes


def step_of(model: Model, bytes_per_s: float, **options: Any) -> Step:
    program = compile_program(scenario_of(2, **options), model)
    done = run(Request(program, LinkCost((Link(0.0, bytes_per_s),), 2), 2))
    return steps_of(done.timeline.slowest)[-1]


def test_a_block_is_gathered_under_the_work_of_the_one_before_it() -> None:
    """Of four blocks the first is waited for, and the others not; nor are reduce-scatters."""
    model = blocks(4, device_s=5e-3)
    step = step_of(model, 2e9)
    gathers = [span for span in step.comm if span.operation == "all_gather"]
    assert len(gathers) == 8
    one_ns = gathers[0].end_ns - gathers[0].joined_ns
    assert one_ns < 5_000_000
    waits_ns = [s.end_ns - s.start_ns for s in step.compute if s.kind == "comm_wait"]
    # the first gather, the last block's again at the backward's start, the last reduction
    assert sum(waits_ns) < 4 * one_ns
    assert step.exposed_ns(gathers[1:4]) == 0


def test_no_more_than_two_all_gathers_are_ahead_of_the_forward() -> None:
    """A gather waits until the one before the last is copied out."""
    step = step_of(blocks(6, device_s=5e-3), 1e12)
    gathers = [span for span in step.comm if span.operation == "all_gather"][:6]
    copies = [span.end_ns for span in step.compute if span.kind == "unshard"]
    for gather, copied_ns in zip(gathers[2:], copies, strict=False):
        assert gather.joined_ns >= copied_ns
    works = [span for span in step.compute if span.kind == "forward"]
    assert gathers[2].end_ns < works[1].start_ns  # two blocks ahead, under the first one's work


def test_a_reduction_waits_for_the_one_before_it() -> None:
    """On a slow network the copy of a block's gradients comes after the last reduce-scatter."""
    step = step_of(blocks(4), 5e8, **kept())
    scatters = [span for span in step.comm if span.operation == "reduce_scatter"]
    copies = [span.start_ns for span in step.compute if span.kind == "bucket_copy"]
    assert len(scatters) == len(copies) == 4
    for scatter, copy_ns in zip(scatters, copies[1:], strict=False):
        assert copy_ns >= scatter.end_ns


# --- units --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "units", "first", "root"),
    [
        ("gpt2", 12, "transformer.h.0", 4),
        ("llama-1b", 16, "model.layers.0", 2),
        ("bert-base", 12, "bert.encoder.layer.0", 14),
        ("vit-b-16", 12, "encoder.layers.encoder_layer_0", 8),
        ("resnet50", 16, "layer1.0", 5),
        ("convnext_tiny", 8, "features.0", 4),
    ],
)
def test_blocks_of_known_models_are_those_of_their_lists(
    model: str, units: int, first: str, root: int
) -> None:
    """And the forward goes through each of them once, as its modules are named."""
    workload = {"model": model, "batch_per_rank": 1}
    cluster = {"machine": "dgx-a100", "nodes": 1}
    keys = {"schema": "ddpsim/1", "workload": workload, "cluster": cluster}
    found = resolve(load_scenario(keys)).model
    planned = plan_units(found, FullyShard().units)
    assert [unit.name for unit in planned][:2] == ["", first]
    assert (len(planned) - 1, len(planned[0].parameters)) == (units, root)
    entered = [piece.chain[-1] for piece in forward_pieces(found, planned)]
    runs = [unit for i, unit in enumerate(entered) if unit and entered[i - 1 : i] != [unit]]
    assert runs == list(range(1, units + 1))


def test_a_forward_without_names_mirrors_the_backward() -> None:
    """Each unit has the share of the forward that it has of the backward."""
    model = blocks(2, root=True)
    pieces = forward_pieces(model, plan_units(model, FullyShard().units))
    assert [piece.chain[-1] for piece in pieces] == [0, 1, 2, 0]
    assert [round(piece.work.device_s * 1e3) for piece in pieces] == [0, 2, 2, 1]


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        (["ddp.fully_shard.units=[transformer.x]"], "'transformer.x' holds no parameter: name a"),
        (["ddp.fully_shard.units=[transformer.h.0, transformer.h.0]"], "is listed twice"),
        (["ddp.fully_shard.units=layers"], "is no choice of units; write blocks"),
        (["workload.precision=fp32"], "write workload.precision: amp-bf16"),
        (["ddp.bucket_cap_mb=25"], "is an option of DDP, and strategy: fully_shard has none"),
        (
            ["ddp.strategy=ddp"],
            "is an option of strategy fully_shard or hsdp, and strategy is ddp; remove it",
        ),
        (["ddp.torch='1.4'"], "torch 1.4 is modelled without it"),
    ],
)
def test_what_does_not_fit_is_said(settings_: list[str], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        load_scenario(GPT2_XL, settings_)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("fully_shard", "unit 1 has parameters of bfloat16 and float32"),
        ("zero1", "wants parameters of one dtype, not bfloat16 and float32"),
    ],
)
def test_two_dtypes_are_refused_where_torch_does(
    tmp_path: Any, strategy: str, message: str
) -> None:
    """torch: "FSDP expects uniform original parameter dtype", and "same dense type"."""
    listed = tmp_path / "parameters.csv"
    listed.write_text("name,shape,dtype\n1.a.weight,8x8,float32\n1.b.bias,8,bfloat16\n")
    keys = {
        "schema": "ddpsim/1",
        "workload": {"parameters": str(listed), "batch_per_rank": 1, "step_time": "10 ms"},
        "ddp": {"strategy": strategy},
        "cluster": {"machine": "dgx-a100", "nodes": 1},
    }
    with pytest.raises(ScenarioError, match=message):
        load_scenario(keys)


def test_names_of_a_parameter_list_are_prefixes(tmp_path: Any) -> None:
    """A scalar-wide bias is padded to one row a rank."""
    listed = tmp_path / "parameters.csv"
    listed.write_text("name,shape,dtype\nbody.0.weight,9x4,float32\nbody.0.bias,9,float32\n")
    keys = {
        "schema": "ddpsim/1",
        "workload": {"parameters": str(listed), "batch_per_rank": 1, "step_time": "10 ms"},
        "ddp": {"strategy": "fully_shard", "fully_shard": {"units": ["body"]}},
        "cluster": {"machine": "dgx-a100", "nodes": 1},
    }
    step = resolve(load_scenario(keys)).program.steady_step
    sizes = {i.size_bytes for i in step if isinstance(i, Communicate)}
    assert sizes == {4 * (16 * 4 + 16)}


# --- decisions ----------------------------------------------------------------------------------

AS_DDP = ("ddp.strategy=ddp", "ddp.fully_shard=null")


def test_what_does_not_fit_under_ddp_is_offered_sharded() -> None:
    """The suggestion's figures are those of the scenario that it names."""
    job = resolve(load_scenario(GPT2_XL, AS_DDP))
    as_autocast = ("ddp.strategy=fully_shard", AS_AUTOCAST)
    (offered,) = [way for way in ways_to_fit(job) if way.settings == as_autocast]
    sharded = resolve(load_scenario(GPT2_XL, [*AS_DDP[1:], *offered.settings]))
    assert sharded.memory().fits
    assert sharded.model.activation_bytes <= job.model.activation_bytes
    needed, step = format_bytes(sharded.memory().total), format_duration(sharded.step_s())
    assert offered.why == f"fits with fully_shard: {needed}, {step} a step"
    larger = [*AS_DDP, "cluster.device=a100-sxm-80gb"]
    assert ways_to_fit(resolve(load_scenario(GPT2_XL, larger))) == ()


def test_each_strategy_has_it() -> None:
    few = [*AS_DDP, "run.iterations=2", "workload.model=gpt2", "ddp.accumulation_steps=1"]
    own = {"fully_shard": {"units": ["transformer.h.0"], "mixed_precision": {"param": "bfloat16"}}}
    options = [each for each in each_strategy(load(GPT2_XL, few), own) if "fully" in each.title]
    named = [each.scenario.ddp.sharding for each in options if isinstance(each.scenario, Scenario)]
    assert {(*each.units, each.mixed_precision.param) for each in named} == {
        ("transformer.h.0", "bfloat16")
    }
    changes = compare(load_scenario(GPT2_XL, few), options).changes
    assert [each.title for each in changes] == [
        "fully_shard",
        "fully_shard, reshard_after_forward=false",
        "fully_shard, reshard_after_forward=4",
    ]
    assert all(change.fits and not change.problem for change in changes)


@pytest.mark.parametrize("strategy", ["fully_shard", "hsdp"])
def test_all_wait_for_a_slow_first_rank(strategy: str) -> None:
    """Twice as slow, as one that also writes logs, where compute hides all communication."""
    settings_ = ["workload.model=gpt2", "run.iterations=1", f"ddp.strategy={strategy}"]
    settings_ += ["workload.batch_per_rank=16"]
    settings_ += ["cluster.intra_node.bandwidth=900 GB/s", "cluster.nodes=1"]
    plain, slow = (
        resolve(load_scenario(GPT2_XL, [*settings_, *more])).step_s()
        for more in ([], ["cluster.stragglers={factors: {0: 2}}"])
    )
    assert 1.8 < slow / plain < 2.0
