"""A cluster profile in a scenario: its times, interference and jitter reach the prediction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ddpsim
from ddpsim.errors import ScenarioError


def fitted(value: float, stderr: float | None = 0.0) -> dict[str, Any]:
    return {"value": value, "stderr": stderr}


def profile(**changes: Any) -> dict[str, Any]:
    """gloo on two hosts at 1 Gbit/s: no latency, a payload of 94 % of the line rate."""
    return {
        "schema": "ddpsim.profile/1",
        "name": "two hosts",
        "backend": "gloo",
        "all_reduce": {
            "kind": "gloo-ring",
            "queue_s": fitted(0.0),
            "segment_s": fitted(0.0),
            "wire_bytes_per_byte": fitted(1 / 0.94),
            "reduce_bytes_per_s": fitted(1e12),
            "burst_bytes": fitted(0.0),
            "line_rate_bytes_per_s": 125e6,
        },
        "all_reduce_sigma": 0.03,
        "valid": {
            "size_bytes": [1024, 2**30],
            "layouts": [[2, 1]],
            "line_rates_bytes_per_s": [62.5e6, 375e6],
        },
        "interference": None,
        "overheads": {},
        "jitter": None,
        "provenance": {
            "created": "2026-11-21",
            "machine": "a test",
            "software": "torch",
            "sources": ["record.json"],
        },
    } | changes


@pytest.fixture
def predict(tmp_path: Path) -> Any:
    """A prediction of ResNet-18 on two CPU hosts from a profile."""

    def run(changes: dict[str, Any], **cluster: Any) -> ddpsim.Result:
        path = tmp_path / "cluster.json"
        path.write_text(json.dumps(profile(**changes)), "utf-8")
        scenario = {
            "schema": "ddpsim/1",
            "workload": {"model": "resnet18", "batch_per_rank": 8, "step_time": "800 ms"},
            "ddp": {"backend": "gloo", "bucket_cap_mb": 5, "broadcast_buffers": False},
            "cluster": {"nodes": 2, "gpus_per_node": 1, "device": "cpu-core"}
            | {"profile": str(path)}
            | cluster,
            "run": {"iterations": 4},
        }
        return ddpsim.simulate(ddpsim.load_scenario(scenario))

    return run


def both(compute: float, comm: float, per_byte: float = 0.0) -> dict[str, Any]:
    return {
        "interference": {
            "compute_slowdown": fitted(compute, 0.01),
            "compute_slowdown_s_per_byte": fitted(per_byte),
            "comm_slowdown": fitted(comm, 0.01),
        }
    }


def test_bytes_take_their_time_on_the_wire(predict: Any) -> None:
    last = predict({}).buckets[-1]
    on_the_wire_s = last.size_bytes / (0.94 * 125e6)
    assert last.end_s - last.start_s >= on_the_wire_s * 0.999


def test_a_stated_link_takes_the_place_of_the_measured_one(predict: Any) -> None:
    fast = predict({}, inter_node={"bandwidth": "2 Gbit/s", "latency": "0 s"})
    assert fast.iteration_time_s.mean < predict({}).iteration_time_s.mean
    beyond = predict({}, inter_node={"bandwidth": "20 Gbit/s", "latency": "0 s"})
    assert "was measured on links of 62.50 MB/s to 375.0 MB/s" in beyond.warnings[0]


def test_interference_lengthens_the_step_and_is_no_longer_called_missing(predict: Any) -> None:
    calm, slowed = predict({}), predict(both(1.3, 1.2))
    assert slowed.iteration_time_s.mean > calm.iteration_time_s.mean
    assert "not calibrated" in str(calm.prediction_interval_s)
    assert "the standard error of the calibration" in str(slowed.prediction_interval_s)


def test_interference_grows_with_the_bytes_that_move(predict: Any) -> None:
    grows = both(1.0, 1.0, 2e-9)
    slow, fast = (
        predict(grows, inter_node={"bandwidth": rate, "latency": "0 s"}).breakdown_s
        for rate in ("0.5 Gbit/s", "3 Gbit/s")
    )
    plain = predict({}).breakdown_s.backward_compute
    assert plain < slow.backward_compute
    assert plain < fast.backward_compute


def test_jitter_of_the_profile_is_used(predict: Any) -> None:
    jitter = {"jitter": {"iteration_sigma": 0.05, "rank_sigma": 0.0, "autocorrelation": 0.1}}
    times = predict(jitter).iteration_time_s
    assert times.p90 > times.p10


def test_measured_hooks_take_the_place_of_published_ones(predict: Any) -> None:
    slow = predict({"overheads": {"hook_s": fitted(1e-3)}})
    assert slow.iteration_time_s.mean > predict({}).iteration_time_s.mean + 0.05
    assert ("DDP's hooks and copies", "measured") in {(p.input, p.trust) for p in slow.provenance}


def test_ranks_that_were_not_measured_are_named(predict: Any) -> None:
    assert "4 x 1 is predicted from its hops" in predict({}, nodes=4).warnings[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": "nccl"}, "was measured with nccl, but ddp.backend is gloo"),
        ({"schema": "ddpsim.profile/2"}, "is no ddpsim.profile/1 cluster profile: schema"),
        ({"all_reduce_sigma": -1}, "is no ddpsim.profile/1 cluster profile: all_reduce_sigma"),
    ],
)
def test_a_profile_that_does_not_fit_is_an_error(
    predict: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ScenarioError) as caught:
        predict(changes)
    assert message in str(caught.value)
