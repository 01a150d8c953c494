"""The drawn step is the simulated one, rank by rank."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs.random_jobs import models, scenarios
from page_reading import (
    Page,
)

import ddpsim
from ddpsim.cluster.build import build_network
from ddpsim.engine.noise import draw_slowdowns
from ddpsim.engine.request import Request
from ddpsim.engine.run import run
from ddpsim.planning.storyboard import storyboard
from ddpsim.prediction.program import compile_program
from ddpsim.report.page.page import page
from ddpsim.report.page.tables import bucket_rows
from ddpsim.report.page.timeline import timeline
from ddpsim.report.page.words import caption, notes
from ddpsim.result.metrics import union_ns
from ddpsim.result.storyboard import DrawnRank, Storyboard, block_of, drawn_step
from ddpsim.result.timeline import MessageSpan
from ddpsim.scenario.schema import Scenario
from ddpsim.workload.model import Model


def exposed_ns(rank: DrawnRank) -> int:
    return union_ns(piece for comm in rank.collectives for piece in comm.exposed)


def in_flight_ns(rank: DrawnRank) -> int:
    return union_ns((comm.span.joined_ns, comm.span.end_ns) for comm in rank.collectives)


@pytest.mark.parametrize("name", ["board", "gloo", "measured"])
def test_hidden_and_exposed_are_the_results_own(name: str, request: pytest.FixtureRequest) -> None:
    for choice in request.getfixturevalue(name).choices:
        slowest = choice.step.ranks[0]
        assert slowest.is_slowest
        assert slowest.left_out == 0
        assert exposed_ns(slowest) == slowest.exposed_ns
        assert slowest.exposed_ns / 1e9 == pytest.approx(choice.result.exposed_comm_s, rel=1e-15)
        whole_ns = slowest.hidden_ns + slowest.exposed_ns
        assert in_flight_ns(slowest) == whole_ns
        assert whole_ns / 1e9 == pytest.approx(choice.result.comm_time_s, rel=1e-15)


def test_of_steps_that_vary_the_median_one_is_drawn(noisy: Storyboard) -> None:
    for choice in noisy.choices:
        assert choice.step.length_ns / 1e9 == choice.result.iteration_time_s.p50
        for rank in choice.step.ranks:
            assert exposed_ns(rank) == rank.exposed_ns
        ranks = [rank.ranks for rank in choice.step.ranks]
        assert ranks == [(3,), (0,), (7,)]
    waits = [rank.exposed_ns for rank in noisy.choices[0].step.ranks]
    assert waits[1] > 100 * waits[0]  # who waits is not who is slow


@settings(max_examples=60)
@given(scenarios(noisy=True), models(), st.integers(0, 8))
def test_a_drawn_step_loses_nothing(scenario: Scenario, model: Model, rank: int) -> None:
    program = compile_program(scenario, model)
    slowdowns = draw_slowdowns(scenario.cluster, scenario.run, program.warmup + program.iterations)
    size = scenario.cluster.world_size
    request = Request(program, build_network(scenario).cost, size, slowdowns)
    timeline = run(request, "reference").timeline
    drawn = drawn_step(timeline, [rank % size], lambda _: None)
    for lanes in drawn.ranks:
        assert exposed_ns(lanes) == lanes.exposed_ns
        assert in_flight_ns(lanes) == lanes.exposed_ns + lanes.hidden_ns
        spans = lanes.compute
        assert all(a.end_ns <= b.start_ns for a, b in pairwise(spans))
        for lane in {comm.lane for comm in lanes.collectives}:
            own = sorted(
                (c.span.joined_ns, c.span.end_ns) for c in lanes.collectives if c.lane == lane
            )
            assert all(a[1] <= b[0] for a, b in pairwise(own))
    assert {rank % size, timeline.slowest_rank} == {n for r in drawn.ranks for n in r.ranks}


def test_bars_are_of_blocks_and_say_so() -> None:
    source = {
        "schema": "ddpsim/1",
        "workload": {"model": "gpt2", "batch_per_rank": 8, "precision": "amp-bf16"},
        "cluster": {"nodes": 1, "gpus_per_node": 4, "device": "a100-sxm-40gb"},
        "ddp": {"strategy": "naive_flat"},
    }
    drawn = storyboard(source).choices[0].step.ranks[0]
    bars = [span.names for span in drawn.compute if span.kind == "backward"]
    blocks = list(dict.fromkeys(block_of(name) for names in bars for name in names))
    assert [block for block in blocks if ".h." in block] == [
        f"transformer.h.{number}" for number in reversed(range(12))
    ]
    within = [names for names in bars if "transformer.h.6" in map(block_of, names)]
    assert within == [("transformer.h.6.mlp.c_proj.bias", "transformer.h.6.ln_1.weight")]


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("layer4.2.bn3.bias", "layer4.2"),
        ("layer1.0.downsample.0.weight", "layer1.0"),
        ("transformer.h.11.attn.c_attn.weight", "transformer.h.11"),
        ("transformer.wte.weight", "transformer.wte"),
        ("conv1", "conv1"),
        ("conv1.weight", "conv1"),
        ("", ""),
    ],
)
def test_a_block_is_what_its_number_ends(name: str, block: str) -> None:
    assert block_of(name) == block


def test_ring_steps_are_the_plain_models(tmp_path: Path) -> None:
    """Ranks that join together over equal links: the equal parts are the messages themselves."""
    source = {
        "schema": "ddpsim/1",
        "workload": {"model": "resnet18", "batch_per_rank": 8, "precision": "amp-bf16"},
        "cluster": {
            "nodes": 1,
            "gpus_per_node": 4,
            "device": "a100-sxm-40gb",
            "algorithm": "ring",
        },
        "run": {"iterations": 1},
    }
    scenario = ddpsim.load_scenario(source)
    messages: list[MessageSpan] = []
    timeline = ddpsim.observe(scenario, [0], messages.append)
    start_ns = timeline.slowest.step_ends_ns[-2]
    ends = [m.end_ns - start_ns for m in messages if m.target == 0 and m.end_ns > start_ns]
    step = storyboard(source).choices[0].step
    drawn = [
        comm.ring_start_ns + (comm.span.end_ns - comm.ring_start_ns) * (i + 1) / comm.ring_steps
        for comm in step.ranks[0].collectives
        if comm.span.bucket >= 0
        for i in range(comm.ring_steps)
    ]
    assert drawn
    assert {comm.ring_steps for comm in step.ranks[0].collectives if comm.span.bucket >= 0} == {6}
    nearest = [min(abs(end - at) for end in ends) for at in drawn]
    assert max(nearest) < 1


def test_every_bucket_is_in_the_page(board: Storyboard) -> None:
    data = Page(page(board)).data["timeline"]
    assert [choice["cap"] for choice in data["choices"]] == [
        "default", "1", "5", "10", "25", "50", "100",
    ]  # fmt: skip
    for drawn, choice in zip(data["choices"], board.choices, strict=True):
        origin_ns = choice.step.backward_start_ns
        found = {c["bucket"]: c for c in drawn["ranks"][0]["collectives"] if c["bucket"] >= 0}
        assert len(found) == len(choice.result.buckets)
        for bucket in choice.result.buckets:
            comm = found[bucket.index]
            assert (comm["size_bytes"], comm["num_params"]) == (
                bucket.size_bytes,
                bucket.num_params,
            )
            times = [(comm[key] - origin_ns) / 1e9 for key in ("ready_ns", "met_ns", "end_ns")]
            assert times == [bucket.ready_s, bucket.start_s, bucket.end_s]


def test_a_bucket_of_several_collectives_counts_once(board: Storyboard) -> None:
    choice = board.choices[0]
    twice = [replace(rank, collectives=2 * rank.collectives) for rank in choice.step.ranks]
    other = replace(choice, step=replace(choice.step, ranks=tuple(twice)))
    assert list(caption(other)) == list(caption(choice))
    for once, both in zip(bucket_rows(choice), bucket_rows(other), strict=True):
        assert both.exposed_s == pytest.approx(2 * once.exposed_s)


def test_a_rival_is_drawn_below_every_choice() -> None:
    """On the same axis: the naive loop's step is the longest of all that are drawn."""
    document = {
        "schema": "ddpsim/1",
        "workload": {"model": "resnet18", "batch_per_rank": 8, "step_time": "20 ms"},
        "cluster": {"nodes": 2, "gpus_per_node": 1, "device": "t4"},
        "run": {"iterations": 1},
    }
    document["cluster"] |= {"inter_node": {"bandwidth": "10 Gbit/s"}}
    setting = "ddp.strategy=naive"
    found = storyboard(document, against=[setting, "ddp.strategy=local_sgd"])
    (rival,) = found.rivals
    assert rival.result.strategy == "naive"
    assert any("local_sgd needs" in each.reason for each in found.left_out)
    data = timeline(found)
    assert all(choice["ranks"][-1]["label"].startswith(setting) for choice in data["choices"])
    last_ns = max(comm["end_ns"] for comm in data["choices"][0]["ranks"][-1]["collectives"])
    assert last_ns <= data["choices"][0]["span_ns"][1]
    assert last_ns > max(choice.step.length_ns for choice in found.choices)
    assert any(note.startswith(f"The rows of {setting}") for note in notes(found))


def test_a_strategy_without_buckets_is_on_a_ladder_of_strategies() -> None:
    cluster = {"nodes": 1, "gpus_per_node": 2, "device": "t4"}
    document = {"schema": "ddpsim/1", "workload": {"model": "resnet18", "batch_per_rank": 8}}
    found = storyboard(document | {"cluster": cluster, "ddp": {"strategy": "per_parameter"}})
    strategies = ["per_parameter", "naive", "naive_flat", "ddp"]
    assert [choice.cap for choice in found.choices] == strategies
    assert [choice.result.strategy for choice in found.choices] == strategies
    assert found.current == 0
