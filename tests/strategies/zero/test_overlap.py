"""ZeroRedundancyOptimizer within DDP's hooks: who updates what, what is sent when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs.engine_runs import OneTransfer, all_steps
from two_ranks import observed_of

import ddpsim
from ddpsim.cluster.build import build_network
from ddpsim.engine.request import Request
from ddpsim.engine.run import run
from ddpsim.errors import InputError
from ddpsim.prediction.one_device import as_measured
from ddpsim.prediction.program import compile_program
from ddpsim.result.metrics import Step
from ddpsim.scenario.schema import Scenario
from ddpsim.strategies.instructions import Communicate, Synchronize
from ddpsim.strategies.zero.overlapping import assigned
from ddpsim.workload.model import Model, Parameter, Work

HOOKS = ["hook_with_zero_step", "hook_with_zero_step_interleaved"]
STOPS = "All indices are disallowed"


def of_torch(buckets: list[list[int]], ranks: int, *, shard_buckets: bool) -> Any:
    """What torch assigns to each rank: parameters of a bucket, from where to where."""
    import torch
    from torch.distributed.optim import zero_redundancy_optimizer as torchs

    zero = torchs.ZeroRedundancyOptimizer.__new__(torchs.ZeroRedundancyOptimizer)
    zero._overlap_with_ddp, zero.world_size, zero.global_rank = True, ranks, 0
    zero._bucket_assignments_per_rank_cache = []
    zero._overlap_info = info = torchs._OverlapInfo(ranks)
    info.status = torchs._OverlapStatus.INITIALIZED
    info.shard_buckets, info.total_size = shard_buckets, sum(map(sum, buckets))
    info.params_per_bucket = [[torch.empty(n, device="meta") for n in each] for each in buckets]
    found: list[list[tuple[int, int, int]]] = [[] for _ in buckets]
    for rank, own in enumerate(zero._bucket_assignments_per_rank):
        for bucket, piece in own.items():
            found[bucket].append((rank, piece.offset, piece.offset + len(piece.parameters)))
    return found


def ours(buckets: list[list[int]], ranks: int, *, shard_buckets: bool) -> Any:
    found = assigned(buckets, ranks, shard_buckets=shard_buckets)
    return [list(map(tuple, pieces)) for pieces in found]


def or_stops(assign: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What is assigned, or that a bucket has more pieces than there are ranks."""
    try:
        return assign(*args, **options)
    except (AssertionError, InputError) as error:
        return STOPS in str(error)


@settings(max_examples=150)
@given(
    st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=6), min_size=1, max_size=6),
    st.integers(1, 9),
    st.booleans(),
)
def test_pieces_are_those_of_torch(
    buckets: list[list[int]], ranks: int, shard_buckets: bool
) -> None:
    pytest.importorskip("torch", reason="torch is the oracle of the assignment")
    asked = {"buckets": buckets, "ranks": ranks, "shard_buckets": shard_buckets}
    assert or_stops(ours, **asked) == or_stops(of_torch, **asked) is not False


def model_of(listed: list[Any], ready_order: Any, optimizer_s: float = 0.01) -> Model:
    """A backward long enough for its host to run ahead."""
    order = tuple(ready_order)
    return Model(
        parameters=tuple(Parameter(*each) for each in listed),
        ready_order=order,
        buffers=(),
        forward=(Work(1e-2),),
        backward=(*(Work(1e-3),) * len(order), Work(0.0)),
        optimizer=Work(optimizer_s),
        launch_s=0.0,
        activation_bytes=0,
        basis="measured",
        provenance=(),
    )


def layers(*numels: int, optimizer_s: float = 0.01) -> Model:
    """Gradients come from the last to the first."""
    listed = [(f"layers.{i}.weight", numel, "float32") for i, numel in enumerate(numels)]
    return model_of(listed, range(len(listed))[::-1], optimizer_s)


def scenario_of(ranks: int = 4, *, cap_mb: float = 1, **options: Any) -> Scenario:
    """Without options of zero1: plain DDP under the hook that is modified."""
    static_graph = options.pop("static_graph", False)
    optimizer = options.pop("optimizer", {})
    ddp = {"comm_hook": "allreduce", "gradient_as_bucket_view": True, "bucket_cap_mb": cap_mb}
    if options:
        ddp |= {"strategy": "zero1", "zero1": {"overlap_with_ddp": True} | options}
    keys = {
        "schema": "ddpsim/1",
        "workload": {"model": "resnet18", "batch_per_rank": 1, "optimizer": optimizer},
        "ddp": ddp | {"static_graph": static_graph, "torch": "2.13"},
        "cluster": {"nodes": 1, "gpus_per_node": ranks, "device": "a100-sxm-80gb"},
    }
    return Scenario.model_validate(keys)


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory, warm_python: None) -> list[dict[str, Any]]:
    pytest.importorskip("torch", reason="torch's own hooks are the oracle")
    return observed_of("overlap_oracle.py", tmp_path_factory.mktemp("overlap"), ranks=4)


def test_random_models_send_what_torch_sends(observed: list[dict[str, Any]]) -> None:
    """Also which steps update nothing, and what the rank with the most holds."""
    assert {case["options"]["hook"] for case in observed} == set(HOOKS)
    for case in observed:
        scenario = scenario_of(**case["options"])
        model = model_of(case["parameters"], case["ready_order"])
        if "stops" in case:
            assert case["stops"] == STOPS
            with pytest.raises(InputError, match=STOPS):
                compile_program(scenario, model)
            continue
        program = compile_program(scenario, model)
        sent = [
            [[i.operation, i.size_bytes] for i in program.step(n) if isinstance(i, Communicate)]
            for n in range(len(case["steps"]))
        ]
        assert sent == case["steps"], case["options"]
        first = program.strategy.steady_from
        assert case["updated"] == [n >= first for n in range(len(sent))]
        elements = sum(case["held"])
        held = program.strategy.resident_bytes(model, 8 * elements).optimizer
        assert held == pytest.approx(8 * max(case["held"]), abs=1)
    assert any("stops" in case for case in observed)


def last_step(scenario: Scenario, model: Model, cost: Any = None) -> Step:
    """A steady one."""
    program = compile_program(scenario, model)
    cost = cost or build_network(scenario).cost
    return all_steps(run(Request(program, cost, scenario.cluster.world_size)), 0)[-1]


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_parameter_is_sent_once(hook: str, ranks: int) -> None:
    """DDP's all-reduces, and each parameter once from its owner; one rank is DDP."""
    model, ddp = layers(3 * 10**5, 10**6, 3 * 10**5), scenario_of(ranks)
    overlapped = scenario_of(ranks, hook=hook, shard_buckets=False)
    step = compile_program(overlapped, model).steady_step
    sent = [i.size_bytes for i in step if isinstance(i, Communicate) and i.operation == "broadcast"]
    assert sum(sent) == (model.gradient_bytes if ranks > 1 else 0)
    held, whole = (
        compile_program(each, model).strategy.resident_bytes(model, 8 * 16 * 10**5)
        for each in (overlapped, ddp)
    )
    most = {1: 16, 2: 10, 4: 10}[ranks]
    assert held == whole._replace(optimizer=8 * most * 10**5)


@pytest.mark.parametrize(("hook", "exposed"), [(HOOKS[0], 3), (HOOKS[1], 1)])
def test_on_a_free_network_the_step_is_compute(hook: str, exposed: int) -> None:
    """DDP's without optimizer, and the optimizer of the rank with most, or of the last bucket.

    Five buckets on two ranks: three are of the first. Each takes a fifth of four milliseconds.
    """
    model, free = layers(*[3 * 10**5] * 5, optimizer_s=4e-3), OneTransfer(0, 0)
    plain = last_step(scenario_of(2), replace(model, optimizer=Work(0.0)), free)
    step = last_step(scenario_of(2, hook=hook), model, free)
    assert step.length_ns - plain.length_ns == exposed * 800_000


def test_an_interleaved_all_reduce_waits_for_the_optimizer_of_the_bucket_before() -> None:
    """NCCL's stream has the broadcast in between: five of 2 ms each, a millisecond after each."""
    model, free = layers(*[3 * 10**5] * 5, optimizer_s=10e-3), OneTransfer(0, 0)
    step = last_step(scenario_of(2, hook=HOOKS[1]), model, free)
    starts_ns = [span.joined_ns for span in step.comm if span.bucket >= 0]
    assert {after - before for before, after in pairwise(starts_ns)} == {2_000_000}


@settings(max_examples=40)
@given(
    st.lists(st.integers(3 * 10**5, 3 * 10**6), min_size=1, max_size=7),
    st.integers(1, 4),
    st.sampled_from([1e-4, 1e-3, 1e-2]),
    st.sampled_from([1, 100_000, 3_000_000]),
)
def test_the_step_is_that_of_ranks_with_updates_of_their_own(
    numels: list[int], ranks: int, optimizer_s: float, takes_ns: int
) -> None:
    """It is never shorter, and may be longer by less than a bucket's optimizer."""
    model, scenario = layers(*numels, optimizer_s=optimizer_s), scenario_of(ranks, hook=HOOKS[0])
    step = last_step(scenario, model, OneTransfer(0, takes_ns))
    reduced = [span for span in step.comm if span.bucket >= 0]
    updates_ns = [round(1e9 * optimizer_s * n / sum(numels)) for n in reversed(numels)]
    done_ns = [reduced[-1].ready_ns] * ranks
    sent_ns = reduced[-1].end_ns
    for bucket, (span, update_ns) in enumerate(zip(reduced, updates_ns, strict=True)):
        own = bucket % ranks
        done_ns[own] = max(done_ns[own], span.end_ns) + update_ns
        sent_ns = max(sent_ns, *done_ns) + (takes_ns if ranks > 1 else 0)
    late_ns = step.start_ns + step.length_ns - sent_ns
    assert -len(numels) <= late_ns < max(updates_ns)


def test_memory_is_asked_anew_where_a_cap_moves_parameters() -> None:
    """Of many scenarios at once as of each alone; the first two steps are said to be idle."""
    asked = [scenario_of(hook=HOOKS[0], cap_mb=cap, optimizer={"name": "adam"}) for cap in (1, 100)]
    alone = [ddpsim.simulate(each) for each in asked]
    held = [each.memory_bytes_per_gpu.optimizer for each in ddpsim.simulate_many(asked)]
    assert held == [each.memory_bytes_per_gpu.optimizer for each in alone]
    assert held[0] < held[1]
    assert "first two steps update no parameters" in alone[0].warnings[0]


def test_grad_scaler_reads_the_flag_of_a_wrapped_optimizer() -> None:
    """torch asks the wrapper, which has no _step_supports_amp_scaling."""
    scenario, model = scenario_of(), layers(10**6)
    optimizer = scenario.workload.optimizer.model_copy(update={"fused": True})
    changes = {"optimizer": optimizer, "precision": "amp-fp16"}
    workload = scenario.workload.model_copy(update=changes)
    for strategy, waits in (("ddp", 0), ("zero1", 1)):
        ddp = scenario.ddp.model_copy(update={"strategy": strategy})
        asked = scenario.model_copy(update={"workload": workload, "ddp": ddp})
        program = compile_program(asked, model)
        assert program.steady_step.count(Synchronize()) == waits
        assert program.strategy.rebuilt_from == 1


def test_a_measured_step_of_ddp_on_one_device_has_a_whole_optimizer() -> None:
    measured = as_measured(scenario_of(hook=HOOKS[0]).ddp)
    assert (measured.strategy, measured.zero1) == ("ddp", None)
