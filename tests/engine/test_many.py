"""Many scenarios at once give what each gives alone."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ddpsim
from ddpsim.engine.run import run
from ddpsim.prediction import api
from ddpsim.prediction.parts import Parts
from ddpsim.prediction.resolve import resolve
from ddpsim.result.model import Brief, Result
from ddpsim.scenario.schema import Scenario

BASE = {
    "schema": "ddpsim/1",
    "workload": {"model": "resnet18", "batch_per_rank": 64},
    "cluster": {"nodes": 2, "gpus_per_node": 2, "device": "a100-sxm-40gb"},
}


def scenario(**sections: Any) -> Scenario:
    return Scenario.model_validate(BASE | {k: BASE.get(k, {}) | v for k, v in sections.items()})


def links(gigabits: int, latency_us: int) -> dict[str, Any]:
    return {"bandwidth": f"{gigabits} Gbit/s", "latency": f"{latency_us} us"}


@st.composite
def variants(draw: st.DrawFn) -> Scenario:
    """Scenarios of few kinds that differ in batch numbers."""
    cluster: dict[str, Any] = {
        "nodes": draw(st.sampled_from([1, 2, 3])),
        "algorithm": draw(st.sampled_from(["auto", "ring", "hierarchical"])),
        "inter_node": links(draw(st.integers(1, 400)), draw(st.integers(0, 40))),
    }
    if draw(st.booleans()):
        cluster["stragglers"] = {"distribution": "lognormal", "sigma": 0.1}
    run: dict[str, Any] = {"iterations": 3, "seed": draw(st.integers(0, 3))}
    if draw(st.booleans()):
        run["jitter"] = {"sigma": 0.05}
    if draw(st.integers(0, 4)) == 0:
        run["stalls"] = {"probability": 0.3, "duration": "2 ms"}
    workload: dict[str, Any] = {"batch_per_rank": draw(st.sampled_from([8, 16]))}
    if draw(st.integers(0, 3)) == 0:
        workload["data"] = {"rate": "900 samples/s"}
    ddp = {"bucket_cap_mb": draw(st.sampled_from([5, 25]))}
    if draw(st.integers(0, 5)) == 0:
        ddp["backend"], cluster["algorithm"] = "gloo", "auto"
        cluster |= {"device": "cpu-core", "intra_node": links(10, 20)}
    return scenario(cluster=cluster, run=run, workload=workload, ddp=ddp)


def figures_alone(asked: Scenario) -> Result:
    """`simulate` without what a Brief has not: the interval, the stragglers and the next steps."""
    job = resolve(asked)
    return api.summed_up(job, run(job.request()), "auto")


@settings(max_examples=20)
@given(st.lists(variants(), max_size=12))
def test_each_is_as_it_is_alone(scenarios: list[Scenario]) -> None:
    """To the last digit."""
    briefs = ddpsim.simulate_many(scenarios)
    assert len(briefs) == len(scenarios)
    for brief, asked in zip(briefs, scenarios, strict=True):
        result = figures_alone(asked)
        for field in fields(Brief):
            assert getattr(brief, field.name) == getattr(result, field.name), field.name


def test_those_that_settle_late_are_as_alone_too() -> None:
    """Hosts that are slower than their device, but ahead of it for some steps, or none."""
    asked = [
        ddpsim.load_scenario(
            {
                "schema": "ddpsim/1",
                "workload": {"model": "resnet50", "batch_per_rank": batch, "precision": "amp-bf16"},
                "ddp": {"static_graph": True},
                "cluster": {
                    "machine": "dgx-h100",
                    "nodes": 2,
                    "gpus_per_node": 2,
                    "inter_node": {"bandwidth": f"{gigabits} Gbit/s"},
                },
                "run": {"iterations": iterations},
            }
        )
        for iterations in (1, 3)
        for batch in (8, 16, 17)
        for gigabits in (5, 10, 25, 200)
    ]
    for brief, each in zip(ddpsim.simulate_many(asked), asked, strict=True):
        result = ddpsim.simulate(each)
        for field in fields(Brief):
            assert getattr(brief, field.name) == getattr(result, field.name), field.name


@pytest.mark.parametrize("rate", [1100, 1200, 1210])
def test_a_step_that_settles_late_leaves_nothing_of_those_before(rate: int) -> None:
    """A loader that is ahead of the first steps alone."""
    path = Path(__file__).parent.parent.parent / "scenarios" / "resnet50-2x8-25gbit.yaml"
    asked = ddpsim.load_scenario(path, [f"workload.data.rate={rate} samples/s"])
    (brief,), result = ddpsim.simulate_many([asked]), ddpsim.simulate(asked)
    for field in fields(Brief):
        assert getattr(brief, field.name) == getattr(result, field.name), field.name


def test_a_warm_up_is_made_longer_once() -> None:
    """Noise beside a loader over the network, whose steps no shortcut simulates."""
    noisy = scenario(
        workload={"step_time": "60 ms", "data": {"rate": "300 samples/s", "sample_size": "1 MB"}},
        cluster={
            "nodes": 2,
            "gpus_per_node": 1,
            "inter_node": links(16, 5),
            "background": {"rate": "1.5 GB/s", "busy": "20 ms", "every": "75 ms"},
        },
        run={"iterations": 3, "jitter": {"sigma": 0.2}},
    )
    (brief,) = ddpsim.simulate_many([noisy])
    assert brief.iteration_time_s == ddpsim.simulate(noisy).iteration_time_s


def test_seeds_are_trials_of_one_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred seeds of stragglers: one simulation, and each seed its own answer."""
    from ddpsim.engine.fast import lanes

    sizes = []

    class Counted(lanes.Lanes):
        def __init__(self, trials: Any, ranks: int, **options: Any) -> None:
            sizes.append((len(trials), ranks))
            super().__init__(trials, ranks, **options)

    monkeypatch.setattr(lanes, "Lanes", Counted)
    slow = {"stragglers": {"distribution": "lognormal", "sigma": 0.05}}
    seeds = [scenario(cluster=slow, run={"seed": seed, "iterations": 2}) for seed in range(100)]
    steps = [brief.iteration_time_s.mean for brief in ddpsim.simulate_many(seeds)]
    assert sizes == [(100, 4)]
    assert len(set(steps)) > 90


def test_a_clock_too_long_for_arrays_does_not_fail() -> None:
    """A step of a month beside one of milliseconds."""
    slow = scenario(cluster={"inter_node": links(1, 0) | {"bandwidth": "1 kbit/s"}})
    month = slow.model_copy(
        update={"workload": slow.workload.model_copy(update={"model": "gpt2-xl"})}
    )
    for asked in ([scenario(), month], [month]):
        briefs = ddpsim.simulate_many(asked)
        assert [b.iteration_time_s for b in briefs] == [
            ddpsim.simulate(s).iteration_time_s for s in asked
        ]


def test_nothing_gives_nothing() -> None:
    assert ddpsim.simulate_many([]) == ()


def test_what_does_not_fit_is_an_error_as_alone() -> None:
    wrong = scenario(cluster={"algorithm": "nvls"})
    for simulate in (ddpsim.simulate, lambda s: ddpsim.simulate_many([scenario(), s])):
        with pytest.raises(ddpsim.ScenarioError, match="nvls"):
            simulate(wrong)


def test_parts_are_those_of_the_question() -> None:
    """What differs is built anew, whatever else is the same."""
    parts = Parts()
    first, same = (resolve(scenario(), parts=parts) for _ in range(2))
    assert same.model is first.model
    assert same.program is first.program
    for changed in (
        {"ddp": {"bucket_cap_mb": 5}},
        {"workload": {"batch_per_rank": 17}},
        {"workload": {"data": {"rate": "900 samples/s"}}},
        {"cluster": {"device": "v100-sxm-16gb"}},
        {"run": {"iterations": 3}},
    ):
        asked = scenario(**changed)
        assert resolve(asked, parts=parts).program == resolve(asked).program
        assert resolve(asked, parts=parts).program is not first.program
