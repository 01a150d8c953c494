"""Compute and communication slow each other as a profile measured it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from clusters.profiles import both, fitted, kept, profile

import ddpsim
from ddpsim.cluster.fitted.laws import FittedCost
from ddpsim.cluster.fitted.network import network_from_profile
from ddpsim.cluster.interference import InterferingCost, Kept
from ddpsim.cluster.network import Network
from ddpsim.cluster.transfers import WholeTransfer
from ddpsim.importers.profiles.cluster import (
    ClusterProfile,
    GlooRing,
    Interference,
)


def test_interference_lengthens_the_step_and_is_no_longer_called_missing(predict: Any) -> None:
    calm, slowed = predict({}), predict(both(1.3, 1.2))
    assert slowed.iteration_time_s.mean > calm.iteration_time_s.mean
    assert "uncalibrated interference" in str(calm.prediction_interval_s)
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


def test_a_delay_lengthens_the_step_bucket_by_bucket(predict: Any) -> None:
    """At 1 Gbit/s the link is never idle: every bucket that begins under compute adds 3 ms."""
    calm, delayed = predict(both(1.0, 1.0)), predict(both(1.0, 1.0, comm_delay_s=fitted(3e-3)))
    added = delayed.iteration_time_s.mean - calm.iteration_time_s.mean
    count = len(calm.buckets)
    assert 3e-3 < added < 3e-3 * count
    assert added == pytest.approx(3e-3 * round(added / 3e-3), abs=1e-6)


def test_ranks_fare_unevenly_where_steps_vary_at_all(predict: Any) -> None:
    even, uneven = both(1.0, 1.0, 4e-9), both(1.0, 1.0, 4e-9)
    uneven["interference"]["compute_kept"][0]["spread"] = 0.2
    assert predict(uneven) == predict(even)
    jitter = {"jitter": {"iteration_sigma": 1e-6, "rank_sigma": 0.0, "autocorrelation": 0.0}}
    varied, alike = (predict(made | jitter).iteration_time_s for made in (uneven, even))
    assert alike.p90 < 1.001 * alike.p10
    assert varied.p90 > 1.05 * varied.p10


def test_compute_keeps_more_beside_one_all_reduce_than_beside_two(predict: Any) -> None:
    """Two of many small buckets are in flight; the second of two is sent after the backward."""
    crowded, mixed, alone = both(1.0, 1.0, 4e-9), both(1.0, 1.0, 4e-9), both(1.0, 1.0, 1e-9)
    mixed["interference"]["compute_kept"][0]["beside_one"] = fitted(0.9)
    for caps, differ in ((1, True), ([30, 1000], False)):
        two, some, one = (
            predict(made, bucket_cap_mb=caps).breakdown_s.backward_compute
            for made in (crowded, mixed, alone)
        )
        assert one < two
        assert one < some < two if differ else one == some


def test_a_model_suffers_as_it_was_measured_to(tmp_path: Path) -> None:
    """More than layers, as they do, or less; how well that is known widens the interval."""
    steps = {
        power: predicted_from_profiles(
            tmp_path, interference_exponent=power, interference_exponent_stderr=0.05
        )
        for power in (0.5, 1, 2)
    }
    plain = predicted_from_profiles(tmp_path)
    assert steps[0.5].iteration_time_s.mean < plain.iteration_time_s.mean
    assert steps[1].iteration_time_s == plain.iteration_time_s
    assert steps[2].iteration_time_s.mean > plain.iteration_time_s.mean
    (entry,) = (p for p in steps[2].provenance if p.input == "interference with this model")
    assert entry.trust == "measured"
    assert "what usual layers do, to the power 2.00" in entry.source

    def doubts(result: ddpsim.Result) -> dict[str, float]:
        interval = result.prediction_interval_s
        assert interval
        return {source.input: source.high_s for source in interval.sources}

    assert doubts(steps[1])["interference exponent"] > 0
    exactly = predicted_from_profiles(
        tmp_path, interference_exponent=1, interference_exponent_stderr=0
    )
    not_at_all = predicted_from_profiles(
        tmp_path, interference_exponent=0, interference_exponent_stderr=0.05
    )
    assert not_at_all.iteration_time_s.mean < steps[0.5].iteration_time_s.mean
    for result in (plain, exactly, not_at_all):
        assert "interference exponent" not in doubts(result)
    scaled = predicted_from_profiles(tmp_path, interference_exponent=2, scaled_to="cpu-core")
    assert scaled.iteration_time_s.mean == pytest.approx(plain.iteration_time_s.mean, rel=1e-3)


def test_iterations_that_a_model_profile_holds_are_drawn(tmp_path: Path) -> None:
    """Each of four once, in four steps: the compute's own median, 10 % more twice, 10 % less."""
    found = predicted_from_profiles(tmp_path, iterations_s=[[1.0], [1.1], [1.1], [0.9]])
    assert found.iteration_time_s.p90 > 1.05 * found.iteration_time_s.p10
    (drawn,) = (entry for entry in found.provenance if entry.input == "jitter")
    assert (drawn.source, drawn.trust) == ("4 iterations of workload.profile", "measured")


def predicted_from_profiles(tmp_path: Path, **model: Any) -> ddpsim.Result:
    """A measured transformer, with more keys of its profile, where a byte costs the processor."""
    root = Path(__file__).resolve().parents[3]
    path = root / "scenarios" / "testbed" / "transformer-500mbit.json"
    known = json.loads(path.read_text("utf-8"))
    known["measured"] |= model
    (tmp_path / "model.json").write_text(json.dumps(known), "utf-8")
    cluster = profile(**both(1, 1, per_byte=2e-9))
    (tmp_path / "cluster.json").write_text(json.dumps(cluster), "utf-8")
    scenario = {
        "schema": "ddpsim/1",
        "workload": {"profile": str(tmp_path / "model.json"), "batch_per_rank": 4},
        "ddp": {"backend": "gloo", "bucket_cap_mb": 5},
        "cluster": {"nodes": 2, "gpus_per_node": 1, "device": "cpu-core"}
        | {"profile": str(tmp_path / "cluster.json")}
        | {"inter_node": {"bandwidth": "3 Gbit/s", "latency": "0 s"}},
        "run": {"iterations": 4},
    }
    return ddpsim.simulate(ddpsim.load_scenario(scenario))


def test_float16_costs_compute_more_a_byte(predict: Any) -> None:
    slow = both(1.0, 1.0, 1e-9, half_compute_kept=kept(4e-9))
    alike = both(1.0, 1.0, 1e-9)
    for hook, differs in (("none", False), ("fp16_compress", True), ("bf16_compress", True)):
        dear, cheap = (
            predict(made, comm_hook=hook).breakdown_s.backward_compute for made in (slow, alike)
        )
        assert (dear > cheap) == differs


def test_beside_less_float16_than_was_measured_compute_lacks_as_many_times_as_much() -> None:
    found = Interference.model_validate(
        {
            "compute_slowdown": fitted(1.0),
            "comm_slowdown": fitted(1.0),
            "compute_kept": [
                point(50e6, 0.9, beside_one=fitted(0.95)), point(1e8, 0.8), point(4e8, 0.4),
            ],
            "half_compute_kept": [point(3e8, 0.4), point(4e8, 0.2)],
        }
    )  # fmt: skip
    # float32 keeps 0.8 - 2/3 x 0.4 at 3e8: there float16's compute lacks 0.6 / (7/15) times as much
    times = 0.6 / (7 / 15)
    kept = [(p.sent_bytes_per_s, p.share.value) for p in found.kept(half=True)]
    assert kept == [
        (50e6, pytest.approx(1 - 0.1 * times)), (1e8, pytest.approx(1 - 0.2 * times)),
        (3e8, 0.4), (4e8, 0.2),
    ]  # fmt: skip
    one = found.kept(half=True)[0].beside_one
    assert one
    assert one.value == pytest.approx(1 - 0.05 * times)
    assert found.kept(half=False) == found.compute_kept


def point(sent_bytes_per_s: float, share: float, **more: Any) -> dict[str, Any]:
    return {"sent_bytes_per_s": sent_bytes_per_s, "share": fitted(share), **more}


def test_an_idle_link_that_nobody_uses_lengthens_the_step(predict: Any) -> None:
    law = {"all_reduce": profile()["all_reduce"] | {"queue_s": fitted(5e-3)}}
    slow = {"bandwidth": "0.3 Gbit/s", "latency": "0 s"}  # so that buckets queue
    hidden, lost = (
        predict(law | both(1.0, 1.0, idle_link_use=fitted(use)), inter_node=slow)
        for use in (1.0, 0.0)
    )
    hidden, lost = hidden.iteration_time_s.mean, lost.iteration_time_s.mean
    assert lost > hidden


def test_after_a_pause_no_more_passes_at_once_than_waits_for_the_link() -> None:
    """4 KiB take 5 ms to be agreed on, of which no shaper's burst saves anything."""
    law = GlooRing.model_validate(
        profile()["all_reduce"] | {"queue_s": fitted(5e-3), "rested_burst_bytes": fitted(1e6)}
    )
    alone = FittedCost(law, 2, 1, 1e7)
    cost = InterferingCost(alone, idle_link_use=0.0)
    small, large = (cost.transfer("all_reduce", size) for size in (2**12, 2**22))
    assert isinstance(small, WholeTransfer)
    assert isinstance(large, WholeTransfer)
    assert small.latency_ns == large.latency_ns == 0
    assert small.at_once_ns == alone.transfer("all_reduce", 2**12).transfer_ns < 1e6
    assert large.at_once_ns == large.burst_ns == 1e8


def gloo_network(nodes: int, found: dict[str, Any], *, hook: str = "none") -> Network:
    """Of hosts whose interference was measured, on links of at most 3 Gbit/s."""
    calibrated = ClusterProfile.model_validate(profile(interference=found))
    scenario = {
        "schema": "ddpsim/1",
        "workload": {"model": "resnet18", "batch_per_rank": 8},
        "ddp": {"backend": "gloo", "comm_hook": hook},
        "cluster": {"nodes": nodes, "gpus_per_node": 1, "device": "cpu-core"},
    }
    return network_from_profile(ddpsim.load_scenario(scenario), calibrated)


MEASURED = {
    "compute_slowdown": fitted(1.2, 0.02),
    "compute_kept": [point(1e8, 0.7, beside_one=fitted(0.8), spread=0.1)],
    "half_compute_kept": [point(1e8, 0.5)],
    "comm_slowdown": fitted(1.1, None),
    "comm_slowdown_s2_per_byte2": fitted(1e-18, 1e-19),
    "comm_delay_s": fitted(1e-3, 2e-4),
    "idle_link_use": fitted(0.9),
    "crowded_slowdown_s_per_byte": fitted(1e-10, 1e-11),
}


@pytest.mark.parametrize(("nodes", "sent"), [(2, 1.0), (4, 1.5)])
def test_interference_goes_by_what_a_rank_sends_of_a_message(nodes: int, sent: float) -> None:
    """2 (n - 1) / n of its bytes; a message of the bytes that a rank sends is so much smaller."""
    cost = gloo_network(nodes, MEASURED).cost
    assert isinstance(cost, InterferingCost)
    assert cost.kept == (Kept(1e8 / sent, 0.7, 0.1, 0.8),)
    assert cost.kept_beside_single == ()
    assert cost.comm_s2_per_byte2 == pytest.approx(1e-18 * sent**2)
    assert cost.crowded_s_per_byte == pytest.approx(1e-10 * sent)
    assert (cost.compute, cost.comm, cost.comm_delay_s) == (1.2, 1.1, 1e-3)
    assert cost.idle_link_use == 0.9


def test_beside_float16_what_is_kept_beside_float32_is_known_too() -> None:
    cost = gloo_network(4, MEASURED, hook="fp16_compress").cost
    assert isinstance(cost, InterferingCost)
    assert [kept.share for kept in cost.kept] == [0.5]
    assert cost.kept_beside_single == (Kept(1e8 / 1.5, 0.7, 0.1, 0.8),)


def test_interference_is_as_uncertain_as_all_that_it_adds() -> None:
    """On the fastest link, to 16 MiB; half of what has no error is assumed, and 0 has no doubt."""
    rate = 375e6
    messages = rate / 2**24  # a second
    added = (0.2, 0.1, 1 - 0.7, 1e-18 * rate**2, 1e-3 * messages, 1e-10 * rate)
    errors = (0.02, 0.5 * 0.1, 0.03, 1e-19 * rate**2, 2e-4 * messages, 1e-11 * rate)
    told = MEASURED | {"compute_kept": [{"sent_bytes_per_s": 1e8, "share": fitted(0.7, 0.03)}]}
    known = gloo_network(2, told).interference
    assert known is not None
    assert known.sigma == pytest.approx(math.hypot(*errors) / sum(added))


@pytest.mark.parametrize(
    ("compute", "sigma"),
    [((1.0, 0.5), 0.0), ((1.2, 0.02), 0.1), ((1.01, 0.5), 1.0)],
    ids=["nothing", "compute alone", "in doubt"],
)
def test_interference_that_was_not_found_is_not_uncertain(
    compute: tuple[float, float], sigma: float
) -> None:
    """Of transfers none was found, however little that fit tells."""
    found = {"compute_slowdown": fitted(*compute), "comm_slowdown": fitted(1.0, 0.5)}
    known = gloo_network(2, found).interference
    assert known is not None
    assert known.sigma == pytest.approx(sigma)
