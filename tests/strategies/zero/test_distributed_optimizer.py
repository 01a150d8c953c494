"""Megatron's distributed optimizer: its buckets, order, bytes and memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddpsim.cluster.transfers import TURNS
from ddpsim.errors import InputError
from ddpsim.prediction.program import compile_program
from ddpsim.scenario.ddp import Ddp
from ddpsim.scenario.options.loops import DistributedOptimizer as Options
from ddpsim.scenario.schema import Scenario
from ddpsim.strategies.instructions import Await, Communicate, Compute
from ddpsim.strategies.zero.distributed_optimizer import bucketed
from ddpsim.workload.model import Model, Parameter, Work
from ddpsim.workload.numerics import keeps_numerics, other_numerics

NUMEL = 1280  # a multiple of what buckets and parameters are padded to


def model(count: int = 6, dtype: str = "float32", names: bool = True) -> Model:
    """As many modules, each of one parameter that takes as long forwards as backwards."""
    modules = [f"layers.{i}" for i in range(count)]
    return Model(
        parameters=tuple(Parameter(f"{name}.weight", NUMEL, dtype) for name in modules),
        ready_order=tuple(reversed(range(count))),
        buffers=(),
        forward=(Work(1e-3),) * count if names else (Work(1e-3 * count),),
        backward=(*[Work(1e-3)] * count, Work(0.0)),
        optimizer=Work(1e-3),
        launch_s=0.0,
        activation_bytes=0,
        basis="measured",
        provenance=(),
        forward_modules=tuple(modules) if names else (),
    )


def scenario_of(ranks: int = 4, steps: int = 1, **options: Any) -> Scenario:
    ddp = {"strategy": "distributed_optimizer", "accumulation_steps": steps}
    cluster = {"nodes": 1, "gpus_per_node": ranks, "device": "a100-sxm-80gb"}
    workload = {"model": "resnet18", "batch_per_rank": 1, "precision": "amp-bf16"}
    keys = {"schema": "ddpsim/1", "workload": workload, "cluster": cluster}
    return Scenario.model_validate(keys | {"ddp": ddp | {"distributed_optimizer": options}})


BY_PAIRS = {"overlap_grad_reduce": True, "bucket_size": 2 * NUMEL}


def told(scenario: Scenario, of: Model) -> list[str]:
    """Collectives and waits of a step, between the works of the model."""
    said = []
    step = compile_program(scenario, of).steady_step
    launched = {i.number: i for i in step if isinstance(i, Communicate)}
    for each in step:
        if isinstance(each, Communicate):
            said.append(each.cause)
        elif isinstance(each, Await):
            said.append(f"await {launched[each.number].cause}")
        elif isinstance(each, Compute) and each.kind in ("forward", "backward"):
            said.append(each.kind)
    return said


def test_buckets_close_in_reverse_order_at_their_least_size() -> None:
    """Padded to a multiple of the ranks and of 128 elements (param_and_grad_buffer.py)."""
    odd = replace(model(), parameters=tuple(p._replace(numel=1000) for p in model().parameters))
    options = Options.model_validate({"overlap_grad_reduce": True, "bucket_size": 2000})
    # 1000 is padded to 1024 before the next parameter: 2024, and then to 3 x 128 x 6
    assert bucketed(odd, options, 3) == [((5, 4), 2304), ((3, 2), 2304), ((1, 0), 2304)]
    assert [members for members, _ in bucketed(odd, Options(), 3)] == [(5, 4, 3, 2, 1, 0)]
    usual = Options.model_validate({"overlap_grad_reduce": True})
    large = replace(odd, parameters=tuple(p._replace(numel=30_000_000) for p in odd.parameters))
    assert [len(members) for members, _ in bucketed(large, usual, 8)] == [2, 2, 2]
    assert [len(members) for members, _ in bucketed(large, usual, 100)] == [4, 2]


def test_a_bucket_is_reduced_once_its_gradients_are_there() -> None:
    gathers = [f"{word}parameters of bucket {i}" for i in range(3) for word in ("", "await ")]
    assert told(scenario_of(**BY_PAIRS), model()) == [
        *["forward"] * 6,
        *["backward", "backward", "gradients of bucket 0"],
        *["backward", "backward", "gradients of bucket 1"],
        *["backward", "backward", "gradients of bucket 2", "backward"],
        *(f"await gradients of bucket {i}" for i in range(3)),
        *gathers,
    ]


def test_nothing_is_hidden_by_default() -> None:
    one = ["gradients of bucket 0", "await gradients of bucket 0"]
    gather = ["parameters of bucket 0", "await parameters of bucket 0"]
    expected = [*["forward"] * 6, *["backward"] * 7, *one, *gather]
    assert told(scenario_of(), model()) == expected
    works = [*["forward"] * 6, *["backward"] * 7]
    assert told(scenario_of(steps=2), model()) == [*works, *expected]
    assert told(scenario_of(1), model()) == works


@pytest.mark.parametrize("names", [True, False])
def test_parameters_are_gathered_one_bucket_ahead_of_the_forward(*, names: bool) -> None:
    """A wait for the bucket of a module, and then the launch of the next one."""
    said = told(scenario_of(**BY_PAIRS, overlap_param_gather=True), model(names=names))
    each = 2 if names else 1
    assert said[: said.index("backward")] == [
        *["parameters of bucket 2", "await parameters of bucket 2", "parameters of bucket 1"],
        *["forward"] * each,
        *["await parameters of bucket 1", "parameters of bucket 0", *["forward"] * each],
        *["await parameters of bucket 0", *["forward"] * each],
    ]
    assert not any(cause.startswith("parameters") for cause in said[said.index("backward") :])


@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_a_rank_sends_as_much_as_under_ddp(ranks: int) -> None:
    """2 (N-1)/N M; parameters in 16 bits are half of the second turn."""
    of, total = model(), 6 * NUMEL * 4

    def sent(**options: Any) -> float:
        step = compile_program(scenario_of(ranks, **options), of).steady_step
        launched = [i for i in step if isinstance(i, Communicate)]
        return sum(TURNS[i.operation] * (ranks - 1) / ranks * i.size_bytes for i in launched)

    assert sent() == sent(**BY_PAIRS) == pytest.approx(2 * (ranks - 1) / ranks * total)
    assert sent(params="bfloat16") == pytest.approx(1.5 * (ranks - 1) / ranks * total)
    half = sent(params="bfloat16", grad_reduce_in_bf16=True)
    assert half == pytest.approx((ranks - 1) / ranks * total)


@pytest.mark.parametrize(
    ("options", "whole", "parted"),
    [
        ({}, 8, 8),
        ({"params": "bfloat16"}, 6, 12),
        ({"params": "bfloat16", "grad_reduce_in_bf16": True}, 4, 16),
    ],
)
def test_memory_is_that_of_megatron(options: dict[str, Any], whole: int, parted: int) -> None:
    """Bytes a parameter by Megatron's docs (dist_optimizer), in fp32, in bf16, in 16 bits alone."""
    of = model()
    strategy = compile_program(scenario_of(8, **options), of).strategy
    held = strategy.resident_bytes(of, 2 * of.gradient_bytes)
    assert sum(held) == 6 * NUMEL * (whole + parted / 8)


def test_gradients_in_bfloat16_take_fewer_bytes_and_a_cast_of_the_shard() -> None:
    """Each is read and added in its own type; the optimizer's part is copied to float32."""
    of = model(dtype="bfloat16")
    step_of = {
        half: compile_program(
            scenario_of(params="bfloat16", grad_reduce_in_bf16=half), of
        ).steady_step
        for half in (False, True)
    }
    casts = {half: sum(_is_optimizers(each) for each in step) for half, step in step_of.items()}
    assert casts[True] == casts[False] + 1


def _is_optimizers(each: object) -> bool:
    return isinstance(each, Compute) and each.kind == "optimizer"


def test_what_megatron_refuses() -> None:
    mixed = replace(model(), parameters=(*model(5).parameters, Parameter("x", 9, "bfloat16")))
    with pytest.raises(InputError, match="is modelled for parameters of one dtype"):
        bucketed(mixed, Options(), 2)
    unused = replace(model(), ready_order=(5, 4), backward=(Work(1e-3),) * 3)
    bucketed(unused, Options(), 2)
    with pytest.raises(InputError, match="4 parameters get no gradient, for which Megatron would"):
        bucketed(unused, Options(overlap_grad_reduce=True), 2)


@pytest.mark.parametrize(("dtype", "kept"), [("float32", True), ("bfloat16", False)])
def test_ddp_has_its_masters_only_as_parameters(dtype: str, kept: bool) -> None:
    own = scenario_of(params="bfloat16")
    as_ddp = own.model_copy(update={"ddp": Ddp()})
    assert keeps_numerics(own, as_ddp, model(dtype=dtype)) is kept
    words = list(other_numerics((as_ddp, model(dtype=dtype)), (own, model(dtype=dtype))))
    assert words == ([] if kept else ["float32 master weights"])
