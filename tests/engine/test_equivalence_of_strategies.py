"""Shortcuts equal the plain model to the nanosecond under every strategy of data parallelism."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jobs.engine_runs import MODES, all_steps
from jobs.random_jobs import ddp_options, models, scenarios
from jobs.simulated_jobs import request_of, simulated

from ddpsim.engine.run import Simulated, run
from ddpsim.errors import InputError
from ddpsim.prediction.program import compile_program
from ddpsim.result.metrics import Step
from ddpsim.result.timeline import CommSpan
from ddpsim.scenario.ddp import Ddp
from ddpsim.scenario.options.fsdp1 import HYBRID
from ddpsim.scenario.schema import Scenario
from ddpsim.workload.model import Model

MICRO_BATCHES = st.fixed_dictionaries({"accumulation_steps": st.integers(1, 3)})
SYNCED = st.fixed_dictionaries(
    {"accumulation_steps": st.integers(2, 3), "no_sync": st.just(value=False)}
)
PRECISIONS = [None, {"param": "bfloat16", "reduce": "float32"}, {"param": "float16"}]
SHARDED = st.fixed_dictionaries(
    {
        "fully_shard": st.fixed_dictionaries(
            {
                "units": st.sampled_from(["blocks", ["m.0"], ["m", "m.0"], ["m"]]),
                "reshard_after_forward": st.sampled_from([True, False, 2, 2, 4]),
                "offload_policy": st.sampled_from([None, None, "CPUOffloadPolicy"]),
                "mixed_precision": st.sampled_from(PRECISIONS),
                "reshard_after_backward": st.booleans(),
                "set_is_last_backward": st.booleans(),
            }
        ),
        "accumulation_steps": st.integers(1, 2),
        "no_sync": st.booleans(),
    }
)
LAST_ONLY = {"offload_policy": None, "all_reduce_last_only": True}
REPLICATED = SHARDED | st.builds(
    lambda own, steps: {
        "fully_shard": own["fully_shard"] | LAST_ONLY,
        "accumulation_steps": steps,
        "no_sync": False,
    },
    SHARDED,
    st.integers(2, 3),
)
FLAT = st.fixed_dictionaries(
    {
        "fsdp1": st.fixed_dictionaries(
            {
                "units": st.sampled_from(["blocks", ["m.0"], ["m", "m.0"], ["m"]]),
                "sharding_strategy": st.sampled_from(
                    ["FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", *HYBRID]
                ),
                "backward_prefetch": st.sampled_from(["BACKWARD_PRE", "BACKWARD_POST", None]),
                "forward_prefetch": st.booleans(),
                "limit_all_gathers": st.booleans(),
                "use_orig_params": st.booleans(),
                "cpu_offload": st.booleans(),
                "mixed_precision": st.sampled_from(PRECISIONS),
            }
        ),
        "accumulation_steps": st.integers(1, 2),
        "no_sync": st.booleans(),
    }
)
POST_LOCAL = st.builds(
    lambda own, period: (
        own | {"comm_hook": "post_localSGD", "post_local_sgd": {"period": period}, "join": None}
    ),
    ddp_options(),
    st.integers(1, 3),
)
MIXED = st.builds(
    lambda own, synced, types: own | synced | types,
    ddp_options(),
    SYNCED,
    st.fixed_dictionaries(
        {
            "mixed_precision": st.builds(
                lambda reduce: {"param": "bfloat16", "reduce": reduce, "buffer": "bfloat16"},
                st.sampled_from(["float32", None]),
            ),
            "comm_hook": st.just("none"),
            "find_unused_parameters": st.just(value=False),
            "gradient_as_bucket_view": st.just(value=False),
            "join": st.none(),
        }
    ),
)
OVERLAPPED = st.builds(
    lambda own, hook, sharded: (
        own
        | {"join": None, "find_unused_parameters": False}
        | {"zero1": {"overlap_with_ddp": True, "hook": hook, "shard_buckets": sharded}}
    ),
    ddp_options(),
    st.sampled_from(["hook_with_zero_step", "hook_with_zero_step_interleaved"]),
    st.sampled_from([False, False, True]),
)
OPTIONS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "naive": MICRO_BATCHES,
    "naive_flat": MICRO_BATCHES,
    "per_parameter": st.builds(
        lambda own, waits: own | {"per_parameter": {"async_op": not waits}},
        MICRO_BATCHES | SYNCED,
        st.booleans(),
    ),
    "parameter_server": st.builds(
        lambda servers: {"parameter_server": {"servers": servers}}, st.integers(1, 2)
    ),
    "local_sgd": st.builds(
        lambda every: {"local_sgd": {"every": every}, "accumulation_steps": 1}, st.integers(1, 3)
    ),
    "fully_shard": SHARDED,
    "hsdp": REPLICATED,
    "fsdp1": FLAT,
    "zero1": ddp_options().map(lambda own: own | {"join": None}),
    "zero1, overlapped": OVERLAPPED,
    "distributed_optimizer": st.builds(
        lambda steps, own: {"accumulation_steps": steps, "distributed_optimizer": own},
        st.integers(1, 2),
        st.sampled_from(
            [
                {},
                {"overlap_grad_reduce": True, "bucket_size": 2000},
                {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 5000},
            ]
        ),
    ),
    "deepspeed": st.builds(
        lambda steps, own, size: {
            "accumulation_steps": steps,
            "deepspeed": own | {"reduce_bucket_size": size},
        },
        st.integers(1, 2),
        st.fixed_dictionaries(
            {
                "stage": st.sampled_from([1, 2]),
                "overlap_comm": st.booleans(),
                "reduce_scatter": st.booleans(),
                "use_multi_rank_bucket_allreduce": st.booleans(),
            }
        ),
        st.sampled_from([500, 5000, 500_000_000]),
    ),
    "ddp": st.builds(lambda own, synced: own | synced, ddp_options(), SYNCED) | MIXED,
    "ddp, post-local": POST_LOCAL,
}


def with_flat(scenario: Scenario, asked: dict[str, Any]) -> Scenario:
    """Of FSDP1's options what can be had: see Scenario and Fsdp1."""
    flat = dict(asked["fsdp1"])
    if scenario.cluster.gpus_per_node == 1 and flat["sharding_strategy"] in HYBRID:
        flat["sharding_strategy"] = "FULL_SHARD"
    freed = flat["sharding_strategy"] in ("FULL_SHARD", "HYBRID_SHARD")
    if not (freed and asked["no_sync"] and asked["backend"] == "nccl"):
        flat["cpu_offload"] = False
    ddp = Ddp.model_validate(asked | {"fsdp1": flat})
    return scenario.model_copy(update={"ddp": ddp})


def jobs(strategy: str, *, noisy: bool = False) -> st.SearchStrategy[Scenario]:
    """Scenarios of a strategy."""

    def with_strategy(scenario: Scenario, options: dict[str, Any]) -> Scenario:
        asked = {"strategy": strategy.partition(",")[0], "backend": scenario.ddp.backend} | options
        if scenario.ddp.backend == "gloo":  # see Ddp
            for key in ("mixed_precision", "zero1"):
                asked.pop(key, None)
        if "fsdp1" in options:
            return with_flat(scenario, asked)
        chosen = scenario.model_copy(update={"ddp": Ddp.model_validate(asked)})
        if "fully_shard" not in options:
            return chosen
        sharded = dict(options["fully_shard"])
        if chosen.sharding_ranks % chosen.keeping_ranks:  # torch wants a divisor
            sharded["reshard_after_forward"] = True
        if chosen.ddp.backend == "gloo" or not chosen.ddp.no_sync:  # see Scenario
            sharded["offload_policy"] = None
        ddp = Ddp.model_validate(asked | {"fully_shard": sharded})
        return scenario.model_copy(update={"ddp": ddp})

    return st.builds(with_strategy, scenarios(max_nodes=2, noisy=noisy), OPTIONS[strategy])


def runs(scenario: Scenario, model: Model) -> bool:
    """Whether torch takes the options.

    Megatron's buckets wait for every gradient; FSDP1 has norms in units of their own; a bucket is
    parted among no more ranks than there are.
    """
    ddp = scenario.ddp
    if ddp.strategy == "fsdp1" and ddp.gathers_half and model.batch_norms:
        return False
    if ddp.zero1 and ddp.zero1.shard_buckets:
        with suppress(InputError):
            return bool(compile_program(scenario, model))
        return False
    return not (model.unused and ddp.shards.overlap_grad_reduce)


def launched(step: Step) -> list[CommSpan]:
    """Two groups' collectives may be joined at one moment."""
    return sorted(step.comm, key=lambda span: span.number)


def seen(done: Simulated, rank: int) -> list[tuple[Any, ...]]:
    """All that happens on a rank's device, step by step, from each step's start on."""
    return [
        (
            step.length_ns,
            [(s.kind, s.start_ns - step.start_ns, s.end_ns - step.start_ns) for s in step.compute],
            [(*s[:4], *(ns - step.start_ns for ns in s[4:8]), *s[8:]) for s in launched(step)],
            step.breakdown(),
        )
        for step in all_steps(done, rank)
    ]


@pytest.mark.parametrize("strategy", OPTIONS)
@settings(max_examples=14)
@given(data=st.data(), model=models())
def test_folded_ranks_equal_the_plain_model(
    strategy: str, data: st.DataObject, model: Model
) -> None:
    scenario = data.draw(jobs(strategy))
    assume(runs(scenario, model))
    request = request_of(scenario, compile_program(scenario, model))
    period = request.plan.period
    fast, plain = (run(request, mode, observed=range(period)) for mode in MODES)
    for rank in range(request.world_size):
        assert seen(fast, rank % period) == seen(plain, rank)


@pytest.mark.parametrize("strategy", OPTIONS)
@settings(max_examples=14)
@given(data=st.data(), model=models())
def test_noisy_ranks_equal_the_plain_model(
    strategy: str, data: st.DataObject, model: Model
) -> None:
    """Stragglers and jitter: every rank, span by span."""
    scenario = data.draw(jobs(strategy, noisy=True))
    assume(runs(scenario, model))
    fast, plain = (simulated(scenario, model, mode) for mode in MODES)
    assert fast.timeline.slowest_rank == plain.timeline.slowest_rank
    assert fast.timeline.late_peers_ns == plain.timeline.late_peers_ns
    for rank in plain.timeline.ranks:
        assert seen(fast, rank) == seen(plain, rank)


@settings(max_examples=6)
@given(data=st.data(), model=models())
def test_ranks_too_many_to_remember_are_simulated_again(data: st.DataObject, model: Model) -> None:
    """For the lanes of those that are observed: the same ones."""
    scenario = data.draw(jobs(data.draw(st.sampled_from(["hsdp", "fully_shard"])), noisy=True))
    request = request_of(scenario, compile_program(scenario, model))
    known = run(request, observed=[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ddpsim.engine.fast.collectives._MOST_REMEMBERED", 3)
        assert run(request, observed=[0]) == known
