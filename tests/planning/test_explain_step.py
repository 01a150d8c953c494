"""The phases of a step, and the changes that would shorten it."""

from __future__ import annotations

import math

import pytest
from changed_documents import document

from ddpsim.planning import explain
from ddpsim.planning.explain import explain_step, sensitivities
from ddpsim.prediction.api import load_scenario
from ddpsim.prediction.resolve import resolve
from ddpsim.report.changes import render_explanation
from ddpsim.result.model import CriticalPart
from ddpsim.scenario.load import parse

FAST_HOST = "cluster.device={preset: a100-sxm-80gb, operator: 12 us}"


@pytest.mark.parametrize(
    ("name", "setting", "helps"),
    [
        ("resnet50-2x8-25gbit", "run.seed=0", "cluster.inter_node.bandwidth=50 Gbit/s"),
        (
            "resnet50-8xa100",
            "workload.data={rate: 1000 samples/s}",
            "workload.data.rate=2000 samples/s",
        ),
    ],
)
def test_twice_as_much_of_what_holds_the_step_up_helps(name: str, setting: str, helps: str) -> None:
    found = explain_step(document(name, FAST_HOST, "run.iterations=1", setting)).helps
    assert (helps,) in [change.settings for change in found]


def test_more_bandwidth_with_which_nccl_chooses_worse_says_so() -> None:
    """Its search finds other channels above 7.9 GB/s, and host memory binds with both."""
    scenario = {
        "schema": "ddpsim/1",
        "workload": {"model": "vit-b-16", "batch_per_rank": 1, "step_time": "6 ms"},
        "cluster": {
            "nodes": 2,
            "gpus_per_node": 6,
            "device": "rtx3090",
            "inter_node": {"bandwidth": "7.9 GB/s", "latency": "5 us"},
        },
    }
    slower = [e for e in sensitivities(resolve(load_scenario(scenario))) if "NCCL" in e.what]
    assert [each.what.partition(":")[0] for each in slower] == ["10 % more bandwidth between nodes"]
    assert slower[0].what.endswith("host memory, which 6 GPUs share (1.55 GB/s a GPU) binds")
    assert slower[0].change > 0.1


def test_what_disturbs_a_job_is_an_input_too() -> None:
    job = resolve(parse(document("shared-network", "run.iterations=1")))
    hangs = {each.what: each.change for each in sensitivities(job)}
    assert hangs["no weak links"] < -0.4
    assert hangs["no other traffic"] <= 0


def test_a_weak_link_is_advised_against() -> None:
    weak = document("resnet50-2x8-25gbit", FAST_HOST, "cluster.weak_links={3: 0.02}")
    helps = explain_step(weak).helps
    assert ("cluster.weak_links=null",) in [help_.settings for help_ in helps]


def test_no_link_is_advised_where_a_log_says_the_times() -> None:
    found = explain_step(document("gloo-cpu"))
    assert not any("bandwidth" in setting for help_ in found.helps for setting in help_.settings)


@pytest.mark.parametrize("name", ["resnet50-2x8-25gbit", "accumulation", "gloo-cpu"])
def test_phases_add_up_to_the_median_step(name: str) -> None:
    found = explain_step(document(name, FAST_HOST))
    path = found.result.critical_path
    total_s = sum(phase.length_s for phase in found.phases)
    assert math.isclose(total_s, path[-1].end_s - path[0].start_s)
    assert math.isclose(total_s, found.result.iteration_time_s.p50, rel_tol=0.02)
    assert len(found.phases) < 12
    assert all(change.change <= -0.01 and change.is_sure for change in found.helps)
    assert len({change.settings[0].partition("=")[0] for change in found.helps}) == len(found.helps)
    shown = render_explanation(found, "my scenario.yaml", ["run.seed=1"])
    for change in found.helps:
        flat = shown.replace(" \\\n                ", " ")
        assert "ddpsim run 'my scenario.yaml' --set run.seed=1 --set " in flat
        assert change.settings[0].partition("=")[0] in flat
    assert max(map(len, shown.splitlines())) <= 100


def test_phases_are_told_in_words_and_take_what_is_very_short_with_them() -> None:
    """Of a step of 1 s what takes less than 1 ms is the part's before it, but for the first."""
    ends_ms = {
        "host": 0.5,
        "forward": 200,
        "data_wait": 200.5,  # the forward's
        "backward": 500,
        "bucket_copy": 510,
        "all_reduce of bucket 3": 700,
        "comm_hook": 700.8,  # the all-reduce's
        "all_reduce of bucket 4": 900,
        "late peer": 950,
        "copy_back": 951.5,
        "all_reduce of bucket 5": 960,
        "optimizer": 1000,
    }
    begins_ms = [0, *ends_ms.values()]
    path = [
        CriticalPart(kind, begin / 1e3, end / 1e3)
        for (kind, end), begin in zip(ends_ms.items(), begins_ms, strict=False)
    ]
    phases = explain._phases(path, explain._WORDS)
    found = [(each.text, round(1e3 * each.length_s, 6)) for each in phases]
    assert found == [
        ("waiting for the host", 0.5),
        ("forward", 200),
        ("backward, with the gradients' copies into buckets", 309.5),
        ("all-reduces of buckets 3 to 4, one after another", 390),
        ("late peer", 50),
        ("copies from buckets back to gradients", 1.5),
        ("all-reduce of bucket 5", 8.5),
        ("optimizer", 40),
    ]
