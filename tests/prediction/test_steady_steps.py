"""The steps that count keep nothing of the start."""

from __future__ import annotations

import pytest
from shipped_scenarios import LEADS, predict

import ddpsim
from ddpsim.prediction import api


@pytest.mark.parametrize(
    "extra",
    [
        [],
        ["cluster.stragglers={factors: {3: 1.1}}"],
        ["workload.data={rate: 2100 samples/s}"],
        ["workload.data={rate: 2500 samples/s, workers: 4}"],
        ["ddp.accumulation_steps=2"],
    ],
)
def test_steady_steps_keep_nothing_of_the_start(extra: list[str]) -> None:
    """However many are simulated, and however: nothing varies, so nothing is spread."""
    few, *more = (
        ddpsim.load_scenario(LEADS, [*extra, f"run.iterations={count}"])
        for count in (3, 1, 2, 20, 300)
    )
    found = [ddpsim.simulate(few, "reference"), *map(api.predict, more)]
    times = {result.iteration_time_s for result in found}
    assert len(times) == 1
    (time,) = times
    assert time.p10 == time.p50 == time.p90
    assert {result.bottleneck for result in found} == {found[0].bottleneck}


@pytest.mark.parametrize(
    ("settings", "step_s"),
    [
        (["workload.data={rate: 60 samples/s}"], 8 / 60),
        (["workload.data={rate: 65 samples/s}"], 8 / 65),
        (["workload.data={rate: 65 samples/s, workers: 2}", "ddp.accumulation_steps=2"], 16 / 65),
    ],
)
def test_steady_steps_on_cpus_keep_no_batches_of_the_start(
    settings: list[str], step_s: float
) -> None:
    """The first steps take longer than their batches, which are then ahead for a while."""
    asked = {
        "schema": "ddpsim/1",
        "workload": {"model": "resnet18", "batch_per_rank": 8, "step_time": "100 ms"},
        "ddp": {"backend": "gloo"},
        "cluster": {
            "nodes": 2,
            "gpus_per_node": 1,
            "device": "cpu-core",
            "inter_node": {"bandwidth": "10 Gbit/s", "latency": "10 us"},
        },
    }
    for count in (1, 20):
        scenario = ddpsim.load_scenario(asked, [*settings, f"run.iterations={count}"])
        (brief,) = ddpsim.simulate_many([scenario])
        assert brief.iteration_time_s.mean == pytest.approx(step_s, rel=1e-6)


@pytest.mark.parametrize("extra", [[], ["workload.data={rate: 2100 samples/s}"]])
def test_steady_steps_beside_traffic_keep_nothing_of_the_start(extra: list[str]) -> None:
    """Traffic that takes next to nothing changes next to nothing."""
    hint = "cluster.background={rate: 1 kbit/s, busy: 1 us, every: 1000 h}"
    alone = ddpsim.simulate(ddpsim.load_scenario(LEADS, extra)).iteration_time_s.mean
    for count in (1, 20):
        scenario = ddpsim.load_scenario(LEADS, [*extra, hint, f"run.iterations={count}"])
        (brief,) = ddpsim.simulate_many([scenario])
        assert brief.iteration_time_s.mean == pytest.approx(alone, rel=1e-4)


def test_noise_begins_when_the_steps_are_steady() -> None:
    """Of one step it is the same, however long the way there: a flag changes no draw."""
    jitter = ["run.jitter={sigma: 0.3}", "run.stalls={probability: 0.05, duration: 20 ms}"]
    usual, static = (
        predict("resnet50-2x8-25gbit", *jitter, f"ddp.static_graph={flag}")
        for flag in ("false", "true")
    )
    assert static.iteration_time_s.mean == pytest.approx(usual.iteration_time_s.mean, rel=1e-3)


def test_a_run_too_short_for_its_stalls_or_bursts_says_so() -> None:
    rare = predict("resnet50-2x8-25gbit", "run.stalls={probability: 0.001, duration: 1 s}")
    assert "expected to hold 0.32 stalls" in rare.warnings[0]
    assert "set run.iterations to 1,250 or more" in rare.warnings[0]
    often = predict("resnet50-2x8-25gbit", "run.stalls={probability: 0.1, duration: 1 ms}")
    assert not often.warnings
    bursts = "cluster.background={rate: 25 Gbit/s, busy: 2 s, every: 10 s}"
    short = predict("resnet50-2x8-25gbit", bursts)
    assert "mean depends on where it stands in that" in short.warnings[0]
    always = predict("resnet50-2x8-25gbit", "cluster.background={rate: 12.5 Gbit/s}")
    assert not always.warnings
    assert always.is_disturbed
