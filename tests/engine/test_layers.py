"""Layers whose ends are known by earlier ones: as if each were evaluated, to the nanosecond."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs.engine_runs import MODES, all_steps

from ddpsim.engine.fast.layers import Layered, layers_of
from ddpsim.engine.fast.trials import side_by_side
from ddpsim.engine.request import Request
from ddpsim.engine.run import run
from ddpsim.prediction.api import load_scenario
from ddpsim.prediction.resolve import resolve

STRAGGLERS = {"stragglers": {"distribution": "lognormal", "sigma": 0.03}}
CLUSTERS = st.fixed_dictionaries(
    {
        "device": st.sampled_from(["a100-sxm-40gb", "h100-sxm-80gb"]),
        "nodes": st.just(2),
        "gpus_per_node": st.sampled_from([2, 3]),
        "intra_node": st.just({"bandwidth": "200 GB/s"}),
        "inter_node": st.builds(
            lambda rate: {"bandwidth": rate}, st.sampled_from(["10 Gbit/s", "400 Gbit/s"])
        ),
    },
)
DOCUMENTS = st.fixed_dictionaries(
    {
        "schema": st.just("ddpsim/1"),
        "workload": st.fixed_dictionaries(
            {
                "model": st.just("gpt2"),
                "seq_len": st.just(256),
                "batch_per_rank": st.sampled_from([1, 16]),
                "precision": st.just("amp-bf16"),
            }
        ),
        "ddp": st.sampled_from(
            [
                {"strategy": "fully_shard"},
                {"strategy": "fully_shard", "fully_shard": {"reshard_after_forward": False}},
                {"strategy": "fully_shard", "accumulation_steps": 2},
                {"strategy": "hsdp"},
                {"strategy": "fsdp1"},
            ]
        ),
        "cluster": CLUSTERS | st.builds(lambda own: own | STRAGGLERS, CLUSTERS),
        "run": st.sampled_from([{"iterations": 1}, {"iterations": 2, "jitter": {"sigma": 0.02}}]),
    }
)


def request_of(document: dict[str, Any]) -> Request:
    return resolve(load_scenario(document)).request()


def without_layers(scripts: Any, most: int | None, blocks: bool, _: bool) -> Any:
    return side_by_side(scripts, most, blocks=blocks), ()


@settings(max_examples=30)
@given(document=DOCUMENTS)
def test_layers_end_as_if_each_were_evaluated(document: dict[str, Any]) -> None:
    request = request_of(document)
    ranks = range(request.plan.period)
    known = run(request, observed=ranks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ddpsim.engine.fast.lanes._parts_of", without_layers)
        assert run(request, observed=ranks) == known


@settings(max_examples=4)
@given(document=DOCUMENTS)
def test_layers_equal_the_plain_model(document: dict[str, Any]) -> None:
    request = request_of(document)
    fast, plain = (run(request, mode, observed=range(request.plan.period)) for mode in MODES)
    for rank in range(request.world_size):
        same = rank % request.plan.period
        for ours, theirs in zip(all_steps(fast, same), all_steps(plain, rank), strict=True):
            assert ours.length_ns == theirs.length_ns
            assert ours.breakdown() == theirs.breakdown()


def test_few_of_many_layers_are_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated: list[int] = []
    go_on = Layered._go_on

    def noted(self: Layered, layers: Any, number: int, *others: Any) -> None:
        evaluated.append(number + 1)
        go_on(self, layers, number, *others)

    monkeypatch.setattr(Layered, "_go_on", noted)
    workload = {"model": "gpt2-xl", "batch_per_rank": 1}
    asked = {"workload": workload, "cluster": {"machine": "dgx-a100", "nodes": 2}}
    run(request_of({"schema": "ddpsim/1", **asked, "ddp": {"strategy": "fully_shard"}}))
    assert evaluated
    assert max(evaluated) <= 6  # of 46


def test_layers_are_found_by_all_but_their_numbers() -> None:
    job = resolve(load_scenario("scenarios/llama-70b-fully-shard.yaml"))
    (step,) = job.program.kinds
    forward, backward = layers_of(side_by_side([step], None, blocks=False))
    assert (forward.times, forward.sent, forward.recorded) == (78, 1, 1)
    assert (backward.times, backward.sent, backward.recorded) == (78, 2, 1)
    assert backward.groups == {"world"}
