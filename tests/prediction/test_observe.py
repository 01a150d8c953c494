"""The lanes of ranks that observe returns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from shipped_scenarios import load

import ddpsim
from ddpsim.prediction.api import predict, predict_and_observe
from ddpsim.prediction.resolve import resolve
from ddpsim.result.timeline import MessageSpan
from ddpsim.scenario import document
from ddpsim.scenario.load import parse

ROOT = Path(__file__).resolve().parent.parent.parent
SCENARIOS = sorted((ROOT / "scenarios").glob("*.yaml"))
SMALL = [path for path in SCENARIOS if parse(document.load(path)).cluster.world_size <= 8]


@pytest.mark.parametrize("path", SMALL, ids=lambda path: path.stem)
def test_lanes_of_every_rank_are_those_of_the_plain_model(path: Path) -> None:
    scenario = ddpsim.load_scenario(path, ["run.iterations=1"])
    messages: list[MessageSpan] = []
    ranks = range(scenario.cluster.world_size)
    plain, found = ddpsim.observe(scenario, ranks, messages.append), ddpsim.observe(scenario, ranks)
    assert [message.end_ns for message in messages] == sorted(m.end_ns for m in messages)
    assert list(found.ranks) == list(plain.ranks) == list(ranks)
    for rank in ranks:
        ours, theirs = found.ranks[rank], plain.ranks[rank]
        steps = len(ours.step_ends_ns)
        assert steps + found.repeats == len(theirs.step_ends_ns)
        for lane in ("host", "compute", "comm", "step_ends_ns", "backward_starts_ns"):
            known = getattr(ours, lane)
            assert known == getattr(theirs, lane)[: len(known)]
        assert all((ours.compute, ours.comm, ours.step_ends_ns))


def test_lanes_of_a_node_are_those_of_every_node() -> None:
    """Unlike links in a node, alike in each: eight ranks stand for 64."""
    scenario = load("resnet50-2x8-25gbit", "cluster.nodes=8", "cluster.algorithm=ring")
    every = ddpsim.observe(scenario, range(64))
    assert len({id(lanes) for lanes in every.ranks.values()}) == 8
    some = ddpsim.observe(scenario, [3, 59])
    assert some.ranks[59].comm == every.ranks[3].comm == every.ranks[59].comm
    assert every.ranks[0].comm != every.ranks[3].comm


def test_a_rank_that_does_not_exist_has_no_lanes() -> None:
    with pytest.raises(ValueError, match="there is no rank 16: choose 0 to 15"):
        ddpsim.observe(load("resnet50-2x8-25gbit"), [0, 16])


@pytest.mark.parametrize("name", ["straggler", "resnet50-2x8-25gbit", "gloo-cpu"])
def test_one_run_gives_both_the_result_and_the_lanes(name: str) -> None:
    scenario = load(name)
    result, timeline = predict_and_observe(resolve(scenario), [1])
    alone = predict(scenario)
    assert replace(result, engine=alone.engine) == alone
    assert timeline == ddpsim.observe(scenario, [1])
    with pytest.raises(ValueError, match="there is no rank -1"):
        predict_and_observe(resolve(scenario), [-1])
