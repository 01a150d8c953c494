"""A cluster profile in a scenario: its times, interference and jitter reach the prediction."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ddpsim
from ddpsim.cluster.fitted import extrapolation
from ddpsim.cluster.fitted.extrapolation import reaching
from ddpsim.cluster.fitted.laws import all_reduce_s
from ddpsim.cluster.fitted.network import network_from_profile
from ddpsim.cluster.interference import InterferingCost, Kept
from ddpsim.cluster.network import Network
from ddpsim.cluster.transfers import duration_ns
from ddpsim.errors import ScenarioError
from ddpsim.importers.profiles.cluster import (
    ClusterProfile,
    CopyIn,
    Fitted,
    Interference,
    NcclRegime,
    NcclRegimes,
    Overheads,
)
from ddpsim.prediction.resolve import resolve
from ddpsim.scenario.ddp import Ddp
from ddpsim.scenario.device import Device
from ddpsim.scenario.schema import Scenario
from ddpsim.strategies.ddp.costs import DdpCosts
from ddpsim.workload.model import Parameter


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

    def run(
        changes: dict[str, Any],
        *,
        comm_hook: str = "none",
        bucket_cap_mb: float | list[float] = 5,
        **cluster: Any,
    ) -> ddpsim.Result:
        path = tmp_path / "cluster.json"
        path.write_text(json.dumps(profile(**changes)), "utf-8")
        scenario = {
            "schema": "ddpsim/1",
            "workload": {"model": "resnet18", "batch_per_rank": 8, "step_time": "800 ms"},
            "ddp": {
                "backend": "gloo",
                "bucket_cap_mb": bucket_cap_mb,
                "broadcast_buffers": False,
                "comm_hook": comm_hook,
            },
            "cluster": {"nodes": 2, "gpus_per_node": 1, "device": "cpu-core"}
            | {"profile": str(path)}
            | cluster,
            "run": {"iterations": 4},
        }
        return ddpsim.simulate(ddpsim.load_scenario(scenario))

    return run


GBIT = {"bandwidth": "1 Gbit/s", "latency": "0 s"}
FAST = {"bandwidth": "100 Gbit/s", "latency": "0 s"}


def kept(per_byte: float) -> list[dict[str, Any]]:
    """A byte sent a second takes so much of the processor."""
    return [{"sent_bytes_per_s": 1e8, "share": fitted(1 - 1e8 * per_byte)}]


def both(compute: float, comm: float, per_byte: float = 0.0, **more: Any) -> dict[str, Any]:
    return {
        "interference": {
            "compute_slowdown": fitted(compute, 0.01),
            "compute_kept": kept(per_byte),
            "comm_slowdown": fitted(comm, 0.01),
        }
        | more
    }


def test_bytes_take_their_time_on_the_wire(predict: Any) -> None:
    last = predict({}).buckets[-1]
    on_the_wire_s = last.size_bytes / (0.94 * 125e6)
    assert last.end_s - last.start_s >= on_the_wire_s * 0.999


@pytest.mark.parametrize("gbit_per_s", [1, 0.2])
def test_what_a_rested_link_lets_through_at_once_shortens_a_step_once(
    predict: Any, gbit_per_s: float
) -> None:
    """Between steps nothing is sent for longer than it takes; after that the link is busy."""
    link = GBIT | {"bandwidth": f"{gbit_per_s} Gbit/s"}
    law = profile()["all_reduce"]
    more = {"rested_burst_bytes": fitted(131_072.0), "rested_delay_s": fitted(2.5e-4)}
    plain, rested = (
        predict({"all_reduce": law | figures}, inter_node=link) for figures in ({}, more)
    )
    saved_s = plain.iteration_time_s.mean - rested.iteration_time_s.mean
    assert saved_s == pytest.approx(131_072 / (gbit_per_s * 125e6) - 2.5e-4, abs=2e-9)


def test_a_stated_link_takes_the_place_of_the_measured_one(predict: Any) -> None:
    fast = predict({}, inter_node={"bandwidth": "2 Gbit/s", "latency": "0 s"})
    assert fast.iteration_time_s.mean < predict({}).iteration_time_s.mean
    beyond = predict({}, inter_node={"bandwidth": "20 Gbit/s", "latency": "0 s"})
    assert "was measured on links of 62.50 MB/s to 375.0 MB/s" in beyond.warnings[0]


def test_ranks_of_one_node_take_no_link_between_nodes(predict: Any) -> None:
    """`plan` keeps what a scenario states of links beyond the node."""
    inside = {"valid": profile()["valid"] | {"layouts": [[1, 2]], "line_rates_bytes_per_s": []}}
    ranks = {"nodes": 1, "gpus_per_node": 2}
    silent = predict(inside, **ranks)
    stated = predict(inside, **ranks, inter_node={"bandwidth": "1 Mbit/s", "latency": "0 s"})
    assert stated.iteration_time_s == silent.iteration_time_s
    assert "cluster.inter_node" not in {entry.input for entry in stated.provenance}


def test_all_reduces_larger_than_any_that_was_measured_are_named(predict: Any) -> None:
    (said,) = predict(
        {"valid": profile()["valid"] | {"size_bytes": [2**20, 2**22]}}, inter_node=GBIT
    ).warnings
    assert "lie outside those that the profile was fitted to (1.049 MB to 4.194 MB)" in said
    assert said.endswith("their times are extrapolated")
    assert not predict({}, inter_node=GBIT).warnings


def test_links_that_nobody_stated_are_named(predict: Any) -> None:
    silent = predict({})
    said = "was measured on 2 kinds of links, of which those of 125.0 MB/s are taken"
    assert said in silent.warnings[0]
    (links,) = (entry for entry in silent.provenance if entry.input == "cluster.inter_node")
    assert (links.source, links.trust) == ("125.0 MB/s, as in profile two hosts", "assumed")
    stated = predict({}, inter_node={"bandwidth": "1 Gbit/s", "latency": "0 s"})
    assert not stated.warnings
    assert stated.iteration_time_s == silent.iteration_time_s


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

    assert doubts(steps[1])["the model's interference exponent"] > 0
    exactly = predicted_from_profiles(
        tmp_path, interference_exponent=1, interference_exponent_stderr=0
    )
    not_at_all = predicted_from_profiles(
        tmp_path, interference_exponent=0, interference_exponent_stderr=0.05
    )
    assert not_at_all.iteration_time_s.mean < steps[0.5].iteration_time_s.mean
    for result in (plain, exactly, not_at_all):
        assert "the model's interference exponent" not in doubts(result)
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
    root = Path(__file__).resolve().parent.parent.parent
    known = (root / "scenarios" / "testbed" / "transformer-500mbit.json").read_text("utf-8")
    (tmp_path / "model.json").write_text(json.dumps(json.loads(known) | model), "utf-8")
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


def test_float16_is_added_at_its_own_rate(predict: Any) -> None:
    law = profile()["all_reduce"]
    slow = {"all_reduce": law | {"reduce_half_bytes_per_s": fitted(2e7)}}
    assert predict(slow) == predict({})
    dear, cheap = (predict(made, comm_hook="fp16_compress") for made in (slow, {}))
    assert dear.iteration_time_s.mean > cheap.iteration_time_s.mean


def test_an_idle_link_that_nobody_uses_lengthens_the_step(predict: Any) -> None:
    law = {"all_reduce": profile()["all_reduce"] | {"queue_s": fitted(5e-3)}}
    slow = {"bandwidth": "0.3 Gbit/s", "latency": "0 s"}  # so that buckets queue
    hidden, lost = (
        predict(law | both(1.0, 1.0, idle_link_use=fitted(use)), inter_node=slow)
        for use in (1.0, 0.0)
    )
    hidden, lost = hidden.iteration_time_s.mean, lost.iteration_time_s.mean
    assert lost > hidden


def test_jitter_of_the_profile_is_used(predict: Any) -> None:
    jitter = {"jitter": {"iteration_sigma": 0.05, "rank_sigma": 0.0, "autocorrelation": 0.1}}
    times = predict(jitter).iteration_time_s
    assert times.p90 > times.p10
    assert "unequal ranks" in str(predict({}).prediction_interval_s)
    assert "unequal ranks" not in str(predict(jitter).prediction_interval_s)


def test_measured_hooks_take_the_place_of_published_ones(predict: Any) -> None:
    slow = predict({"overheads": {"hook_s": fitted(1e-3)}})
    assert slow.iteration_time_s.mean > predict({}).iteration_time_s.mean + 0.05
    assert ("DDP's hooks and copies", "measured") in {(p.input, p.trust) for p in slow.provenance}


def test_copies_into_buckets_have_a_rate_of_their_own(predict: Any) -> None:
    copies = {"hook_s": fitted(0.0), "copy_bytes_per_s": fitted(1e12)}
    slow = copies | {"copy_in": [{"gradient_bytes": 2**20, "bytes_per_s": fitted(2e9)}]}
    longer, plain = (predict({"overheads": known}, inter_node=FAST) for known in (slow, copies))
    moved_bytes = 2 * sum(bucket.size_bytes for bucket in plain.buckets)
    added_s = longer.iteration_time_s.mean - plain.iteration_time_s.mean
    assert added_s == pytest.approx(moved_bytes / 2e9 - moved_bytes / 1e12, rel=0.01)
    earlier = copies | {"copy_in_bytes_per_s": fitted(2e9)}  # as profiles held it once
    assert (
        predict({"overheads": earlier}, inter_node=FAST).iteration_time_s == longer.iteration_time_s
    )


def _cpu_costs(overheads: Overheads, **options: Any) -> DdpCosts:
    cluster = {"nodes": 1, "gpus_per_node": 1, "device": "cpu-core"}
    workload = {"model": "resnet18", "batch_per_rank": 8}
    ddp = {"backend": "gloo"} | options
    scenario = ddpsim.load_scenario(
        {"schema": "ddpsim/1", "workload": workload, "cluster": cluster, "ddp": ddp}
    )
    return DdpCosts(scenario.cluster.device, scenario.ddp, overheads)


@pytest.mark.parametrize("hook_us", [0, 3, 40, 9000])
def test_a_hook_that_was_measured_takes_so_long(hook_us: float) -> None:
    """With torch's default options; what others save or cost comes on top, and no copy's price."""
    known = Overheads.model_validate({"hook_s": fitted(1e-5), "copy_back_s": fitted(4e-6)})
    gradient = Parameter("weight", 2**19, "float32", ddp_hook_s=hook_us * 1e-6)
    costs, static = _cpu_costs(known), _cpu_costs(known, static_graph=True)
    whole_s = costs.parameter_hook_s + costs.copy_in(gradient).device_s
    assert whole_s == pytest.approx(max(hook_us, 6) * 1e-6)
    assert static.copy_in(gradient) == costs.copy_in(gradient)
    assert static.parameter_hook_s == pytest.approx(1e-5 * 5.8 / 5 - 4e-6)
    on_gpu = replace(costs, device=costs.device.model_copy(update={"kind": "gpu"}))
    assert on_gpu.copy_in(gradient) == on_gpu.copy_in(gradient._replace(ddp_hook_s=None))


def test_a_hook_s_copies_back_come_after_the_all_reduces(predict: Any) -> None:
    """A fast link hides nothing, so nothing changes but where; the view does without them."""
    known = {"hook_s": fitted(1e-4), "copy_back_s": fitted(6e-5)}
    costs = _cpu_costs(Overheads.model_validate(known))
    gradient = Parameter("weight", 2**19, "float32")
    assert costs.parameter_hook_s == pytest.approx(4e-5)
    plain = _cpu_costs(Overheads(hook_s=Fitted(value=1e-4))).copy_back([gradient] * 3)
    assert costs.copy_back([gradient] * 3).device_s == pytest.approx(plain.device_s + 3 * 6e-5)
    view = _cpu_costs(Overheads.model_validate(known), gradient_as_bucket_view=True)
    assert view.parameter_hook_s == pytest.approx(0.86e-4)
    assert view.copy_back([gradient]).device_s == 0
    before, after = (
        predict({"overheads": each}, inter_node=FAST) for each in ({"hook_s": fitted(1e-4)}, known)
    )
    assert after.iteration_time_s.mean == pytest.approx(before.iteration_time_s.mean)
    moved_s = sum(bucket.num_params for bucket in after.buckets) * 6e-5
    earlier_s = before.buckets[-1].ready_s - after.buckets[-1].ready_s
    assert earlier_s == pytest.approx(moved_s, rel=0.01)


def test_copies_that_vary_widen_the_interval(predict: Any) -> None:
    known = {"hook_s": fitted(1e-4), "copy_bytes_per_s": fitted(1e9)}
    sources = [
        {
            source.input: source
            for source in predict(
                {"overheads": each}, inter_node=FAST
            ).prediction_interval_s.sources
        }
        for each in (known, known | {"sigma": 0.2})
    ]
    assert "DDP's hooks and copies" not in sources[0]
    found = sources[1]["DDP's hooks and copies"]
    assert found.high_s > found.low_s > 0
    assert "from record to record" in found.basis


@given(factor=st.floats(0.2, 5))
def test_stretched_overheads_take_so_many_times_as_long(factor: float) -> None:
    known = Overheads(
        hook_s=Fitted(value=4e-6, stderr=1e-7),
        copy_back_s=Fitted(value=1e-6),
        copy_bytes_per_s=Fitted(value=2e10),
        copy_in=(CopyIn(gradient_bytes=2**20, bytes_per_s=Fitted(value=6e10)),),
        compress_bytes_per_s=Fitted(value=1e10),
        sigma=0.1,
    )
    longer = known.stretched(factor)
    assert longer.decompress_bytes_per_s is None
    plain, slow = _cpu_costs(known), _cpu_costs(longer)
    gradient = Parameter("weight", 2**19, "float32")
    for cost in (
        lambda costs: costs.parameter_hook_s,
        lambda costs: costs.copy_in(gradient).device_s,
        lambda costs: costs.copy_back([gradient]).device_s,
    ):
        assert cost(slow) == pytest.approx(factor * cost(plain))


@pytest.mark.parametrize(
    ("mib", "byte_s"), [(0.25, 1e-10), (1, 1e-10), (4, 2e-10), (16, 3e-10), (64, 3e-10)]
)
def test_copies_of_gradients_between_two_sizes_are_interpolated(mib: float, byte_s: float) -> None:
    overheads = Overheads(
        copy_in=(
            CopyIn(gradient_bytes=2**24, bytes_per_s=Fitted(value=1 / 3e-10)),
            CopyIn(gradient_bytes=2**20, bytes_per_s=Fitted(value=1 / 1e-10)),
        )
    )
    gradient = Parameter("weight", round(mib * 2**18), "float32")
    copy = _cpu_costs(overheads).copy_in(gradient)
    assert copy.device_s == pytest.approx(2 * gradient.size_bytes * byte_s)


def test_casts_of_a_tiny_bucket_take_their_kernels_least_time() -> None:
    device = Device.model_validate(
        {
            "peak_flops": {"fp32": "10 TFLOP/s"},
            "memory": "16 GiB",
            "memory_bandwidth": "900 GB/s",
            "kernel_floor": "3 us",
        }
    )
    overheads = Overheads(
        compress_bytes_per_s=Fitted(value=1e12), decompress_bytes_per_s=Fitted(value=1e12)
    )
    costs = DdpCosts(device, Ddp(comm_hook="fp16_compress"), overheads)
    tiny, large = costs.hook(1000), costs.hook(10**9)
    floor_s = device.kernel_floor_s
    assert (tiny.before.device_s, tiny.after.device_s) == (2 * floor_s, floor_s)
    assert large.before.device_s == large.after.device_s == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("gbit_per_s", "sigma"),
    [
        (0.1, 0.01),  # as at the nearest
        (1, 0.01),
        (2, 0.05),  # halfway in logarithms
        (4, 0.09),
        (16, 0.055),  # halfway to 0.02, which is assumed of what was measured once
    ],
)
def test_the_network_is_as_uncertain_as_its_line_rate(gbit_per_s: float, sigma: float) -> None:
    known = [(500e6, 0.09, 0.01), (125e6, 0.004, 0.01), (8e9, 0.001, None)]
    measured = [
        {"line_rate_bytes_per_s": rate, "left_out": left_out, "repeated": repeated}
        for rate, left_out, repeated in known
    ]
    calibrated = ClusterProfile.model_validate(profile(measured_sigma=measured))
    link = {"bandwidth": f"{gbit_per_s} Gbit/s", "latency": "0 s"}
    scenario = {
        "schema": "ddpsim/1",
        "workload": {"model": "resnet18", "batch_per_rank": 8},
        "ddp": {"backend": "gloo"},
        "cluster": {"nodes": 2, "gpus_per_node": 1, "device": "cpu-core", "inter_node": link},
    }
    network = network_from_profile(ddpsim.load_scenario(scenario), calibrated)
    assert network.uncertainty.sigma == pytest.approx(sigma)
    assert "left out in turn or made twice" in network.uncertainty.basis


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


def test_broadcasts_take_what_was_measured_on_these_ranks() -> None:
    """Between sizes as the law goes on; of other ranks the law alone tells."""
    sizes = {2**16: 4e-5, 2**20: 9e-5}
    measured = [
        {"nodes": 1, "gpus_per_node": 8, "size_bytes": size, "time_s": time_s}
        for size, time_s in sizes.items()
    ]
    layouts = [[1, 8], [2, 8]]
    here, plain = (
        nccl_network(1, layouts, **changes) for changes in ({"measured_broadcasts": measured}, {})
    )
    for size, time_s in sizes.items():
        found_ns = duration_ns(here.cost.transfer("broadcast", size))
        assert found_ns == pytest.approx(1e9 * time_s, abs=2)
    between_ns = duration_ns(here.cost.transfer("broadcast", 2**18))
    assert 4e4 < between_ns < 9e4
    assert here.cost.transfer("all_reduce", 2**20) == plain.cost.transfer("all_reduce", 2**20)
    told = [entry.trust for entry in here.provenance if entry.input == "broadcast time"]
    assert told == ["measured"]
    both = [
        nccl_network(2, layouts, **changes) for changes in ({"measured_broadcasts": measured}, {})
    ]
    assert both[0].cost.transfer("broadcast", 2**20) == both[1].cost.transfer("broadcast", 2**20)
    assert not [entry for entry in both[0].provenance if entry.input == "broadcast time"]


def nccl_network(
    nodes: int, layouts: list[list[int]], hop_bytes: float = 0.0, **changes: Any
) -> Network:
    """NCCL on 8 GPUs a node: one regime, inside a node and over those that were measured."""
    over = any(measured > 1 for measured, _ in layouts)
    regime = {
        "shape": "ring",
        "base_s": fitted(1e-5),
        "intra_hop_s": fitted(1e-6),
        "inter_hop_s": fitted(1e-5 if over else 0.0),
        "hop_bytes": fitted(hop_bytes),
        "intra_bandwidth_bytes_per_s": fitted(2e11),
        "inter_bandwidth_bytes_per_s": fitted(2e10) if over else None,
    }
    calibrated = ClusterProfile.model_validate(
        profile(
            backend="nccl",
            all_reduce={"kind": "fastest-of", "regimes": [regime]},
            valid={"size_bytes": [1024, 2**30], "layouts": layouts, "line_rates_bytes_per_s": []},
            **changes,
        )
    )
    scenario = {
        "schema": "ddpsim/1",
        "workload": {"model": "resnet18", "batch_per_rank": 8},
        "cluster": {
            "nodes": nodes,
            "gpus_per_node": 8,
            "device": "a100-sxm-40gb",
            "inter_node": {"bandwidth": "100 Gbit/s", "latency": "5 us"},
        },
    }
    return network_from_profile(ddpsim.load_scenario(scenario), calibrated)


def test_one_node_says_little_of_the_network_beyond() -> None:
    """As doubtful as published sweeps over known NICs; and where its figures are from is told."""
    beyond, more = nccl_network(2, [[1, 8]]), nccl_network(4, [[1, 8], [2, 8]])
    assert beyond.uncertainty is not None
    assert more.uncertainty is not None
    assert beyond.uncertainty.sigma == pytest.approx(math.hypot(0.37, 0.03))
    assert more.uncertainty.sigma == pytest.approx(math.hypot(0.15, 0.03))
    stated = [entry for entry in beyond.provenance if entry.input == "cluster.inter_node"]
    assert [entry.trust for entry in stated] == ["stated"]


def test_bytes_that_ride_with_a_hop_inside_a_node_are_fewer_over_a_slower_network() -> None:
    """100 kB a rank's share at 200 GB/s: 16 x 6.25 kB at 12.5 GB/s, and not 1.6 MB of 64."""
    without, riding = (nccl_network(2, [[1, 8]], hop_bytes=h) for h in (0.0, 1e5))
    less = without.cost.transfer("all_reduce", 64_000_000)
    more = riding.cost.transfer("all_reduce", 64_000_000)
    saved_s = 2 * 15 / 16 * 16 * 6_250 / 12.5e9
    assert duration_ns(less) - duration_ns(more) == pytest.approx(saved_s * 1e9, rel=1e-3)


@pytest.mark.parametrize(("inside", "slowest"), [(200e9, 12.5e9), (2e9, 2e9)])
def test_beyond_one_node_the_slower_of_its_links_and_the_stated_network_counts(
    inside: float, slowest: float
) -> None:
    """28 hops inside nodes of 1 us, 2 between them of 5 us, and 2 x 15 / 16 of the message."""
    regime = NcclRegime(
        shape="ring",
        base_s=Fitted(value=1e-5),
        intra_hop_s=Fitted(value=1e-6),
        inter_hop_s=Fitted(value=0),
        intra_bandwidth_bytes_per_s=Fitted(value=inside),
        inter_bandwidth_bytes_per_s=None,
    )
    law = reaching(NcclRegimes(regimes=(regime,)), [(1, 8)], _on_nodes(2, 8))
    expected_s = 1e-5 + 28 * 1e-6 + 2 * 5e-6 + 2 * 15 / 16 * 2**30 / slowest
    assert all_reduce_s(law, 2**30, 2, 8) == pytest.approx(expected_s)


def test_of_one_node_all_regimes_are_rings_whose_hops_inside_come_again() -> None:
    """On 8 GPUs 14 hops of 2 us after LL's 6.6; on two such nodes 28, and 2 of the stated 5 us."""
    none = Fitted(value=0)
    rings = [
        NcclRegime(
            shape="ring",
            base_s=Fitted(value=base_us * 1e-6),
            intra_hop_s=none,
            inter_hop_s=none,
            intra_bandwidth_bytes_per_s=Fitted(value=bandwidth),
            inter_bandwidth_bytes_per_s=None,
        )
        for base_us, bandwidth in ((6.6 + 14 * 2, 1e9), (8.4 + 14 * 7, 100e9))
    ]
    law = reaching(NcclRegimes(regimes=tuple(rings)), [(1, 8)], _on_nodes(2, 8))
    small_s = (6.6 + 28 * 2 + 2 * 5) * 1e-6 + 2 * 15 / 16 * 4 / 1e9
    large_s = (8.4 + 28 * 7 + 2 * 5) * 1e-6 + 2 * 15 / 16 * 2**30 / 12.5e9
    assert all_reduce_s(law, 4, 2, 8) == pytest.approx(small_s)
    assert all_reduce_s(law, 2**30, 2, 8) == pytest.approx(large_s)


def _of_one_layout(*regimes: tuple[float, float, float]) -> NcclRegimes:
    """Over nodes, as fitted to one layout: base in us, bytes of a hop, bus bandwidth in GB/s."""
    none = Fitted(value=0)
    return NcclRegimes(
        regimes=tuple(
            NcclRegime(
                shape="ring",
                base_s=Fitted(value=base_us * 1e-6),
                intra_hop_s=none,
                inter_hop_s=none,
                hop_bytes=Fitted(value=hop_bytes),
                intra_bandwidth_bytes_per_s=None,
                inter_bandwidth_bytes_per_s=Fitted(value=gb_per_s * 1e9),
            )
            for base_us, hop_bytes, gb_per_s in regimes
        )
    )


FITTED_REGIMES = st.lists(
    st.tuples(st.floats(1, 500), st.floats(0, 1e6), st.floats(0.1, 400)), min_size=1, max_size=4
)


def _on_nodes(nodes: int, gpus_per_node: int = 4) -> Scenario:
    link = {"bandwidth": "100 Gbit/s", "latency": "5 us"}
    cluster = {"nodes": nodes, "gpus_per_node": gpus_per_node, "device": "v100-sxm-32gb"}
    return ddpsim.load_scenario(
        {
            "schema": "ddpsim/1",
            "workload": {"model": "resnet18", "batch_per_rank": 8},
            "cluster": cluster | {"inter_node": link},
        }
    )


def test_of_one_layout_the_latency_beyond_nccls_start_comes_again_with_every_hop() -> None:
    """LL's tree: 6.8 us, 6 short hops of 0.18 and 2 of 1.5; Simple's ring: 8.4 us, 14 hops of 7."""
    regimes = (6.8 + 6 * 0.18 + 2 * 1.5, 0, 0.5), (8.4 + 14 * 7, 0, 20)
    for known in (_of_one_layout(*regimes), _of_one_layout(*regimes[::-1])):
        law = reaching(known, [(1, 4), (2, 4)], _on_nodes(8))
        small_s, large_s = (all_reduce_s(law, size, 8, 4) for size in (4, 2**30))
        assert small_s == pytest.approx((6.8 + 6 * 0.18 + 6 * 1.5) * 1e-6 + 2 * 31 / 32 * 4 / 0.5e9)
        assert large_s == pytest.approx((8.4 + 62 * 7) * 1e-6 + 2 * 31 / 32 * 2**30 / 20e9)


@given(
    regimes=FITTED_REGIMES,
    size_bytes=st.integers(4, 2**32),
    nodes=st.integers(2, 16),
    gpus=st.integers(1, 8),
)
def test_what_is_assumed_of_hops_leaves_the_layout_that_was_measured_as_it_is(
    regimes: list[tuple[float, float, float]], size_bytes: int, nodes: int, gpus: int
) -> None:
    known = _of_one_layout(*regimes)
    law = extrapolation._in_steps(known, (nodes, gpus))
    here = size_bytes, nodes, gpus
    assert all_reduce_s(law, *here) == pytest.approx(all_reduce_s(known, *here), rel=1e-9)


@given(
    regimes=FITTED_REGIMES,
    size_bytes=st.integers(4, 2**32),
    nodes=st.integers(3, 64),
    gpus=st.integers(1, 8),
)
def test_other_ranks_are_no_faster_than_the_links_that_were_measured(
    regimes: list[tuple[float, float, float]], size_bytes: int, nodes: int, gpus: int
) -> None:
    """However many bytes rode with each rank's hops where it was measured."""
    law = reaching(_of_one_layout(*regimes), [(2, 4)], _on_nodes(nodes, gpus))
    ranks = nodes * gpus
    volume = 2 * (ranks - 1) / ranks * size_bytes
    fastest = max(gb_per_s for _, _, gb_per_s in regimes) * 1e9
    assert all_reduce_s(law, size_bytes, nodes, gpus) >= volume / fastest * (1 - 1e-9)


@pytest.mark.parametrize(
    ("nodes", "layouts", "keys", "trust"),
    [
        (2, [[1, 8], [2, 8]], ["cluster.inter_node"], "measured"),
        (4, [[1, 8], [2, 8]], ["cluster.inter_node"], "assumed"),
        (2, [[1, 8]], [], "assumed"),  # its figures are taken
    ],
)
def test_links_that_do_not_count_are_named_and_other_ranks_are_not_measured(
    nodes: int, layouts: list[list[int]], keys: list[str], trust: str
) -> None:
    network = nccl_network(nodes, layouts)
    said = [warning for warning in network.warnings if "not used" in warning]
    assert [warning.partition(" is not used: ")[0] for warning in said] == keys
    (entry,) = (entry for entry in network.provenance if entry.input == "all-reduce time")
    assert entry.trust == trust


def test_hops_that_were_fitted_stay_and_inside_a_node_none_is_assumed() -> None:
    known = _of_one_layout((50, 0, 20))
    assert reaching(known, [(2, 4), (4, 4)], _on_nodes(8)) == known
    assert reaching(known, [(2, 4)], _on_nodes(2)) == known
    assert reaching(known, [(1, 4)], _on_nodes(1, 8)) == known
    assert reaching(known, [(1, 4)], _on_nodes(1, 1)) == known


def test_the_network_between_nodes_is_no_surer_than_it_was_measured() -> None:
    """An NCCL record has no line rate inside a node, and one between nodes."""
    sigmas = [
        {"line_rate_bytes_per_s": rate, "left_out": left_out, "repeated": None}
        for rate, left_out in ((None, 0.001), (25e9, 0.2))
    ]
    network = nccl_network(2, [[1, 8], [2, 8]], measured_sigma=sigmas)
    assert network.uncertainty is not None
    assert network.uncertainty.sigma == 0.2


@pytest.mark.parametrize(
    ("dtype", "wire_bytes", "before_bytes", "after_bytes"),
    [
        ("float32", 500, 1500 + 1000, 1500),  # cast to half of it, divided there, and cast back
        ("float64", 250, 1250 + 500, 1250),
        ("bfloat16", 1000, 2000 + 2000, 2000),
        ("float16", 1000, 2000, 0),  # divided in place
    ],
)
def test_a_compressing_hook_sends_two_bytes_an_element(
    dtype: str, wire_bytes: int, before_bytes: int, after_bytes: int
) -> None:
    device = Device.model_validate(
        {
            "peak_flops": {"fp32": "1 TFLOP/s"},
            "memory": "1 GiB",
            "memory_bandwidth": "1 GB/s",
            "memory_efficiency": 1,
            "kernel_floor": "0 s",
        }
    )
    found = DdpCosts(device, Ddp(comm_hook="fp16_compress")).hook(1000, dtype)
    assert found.size_bytes == wire_bytes
    assert found.before.device_s == pytest.approx(before_bytes / 1e9)
    assert found.after.device_s == pytest.approx(after_bytes / 1e9)


def test_a_static_graph_looks_for_unused_parameters_once() -> None:
    both, static = (Ddp(find_unused_parameters=find, static_graph=True) for find in (True, False))
    device = Device.model_validate(
        {"peak_flops": {"fp32": "1 TFLOP/s"}, "memory": "1 GiB", "memory_bandwidth": "1 GB/s"}
    )
    one, other = DdpCosts(device, both), DdpCosts(device, static)
    assert one.parameter_hook_s == other.parameter_hook_s
    assert one.forward_hook_s == other.forward_hook_s
    assert not both.finds_unused
    assert Ddp(find_unused_parameters=True).finds_unused


def test_ranks_under_one_leaf_have_the_whole_line_rate(predict: Any) -> None:
    """Four nodes of a leaf of four do not feel its oversubscription; of leaves of two they do."""
    slow = {**GBIT, "oversubscription": 4}
    inside, outside, plain = (
        predict({}, nodes=4, inter_node=link).iteration_time_s.mean
        for link in ({**slow, "nodes_per_leaf": 4}, {**slow, "nodes_per_leaf": 2}, GBIT)
    )
    assert inside == plain < outside


@pytest.mark.parametrize(
    ("option", "times"),
    [({}, 1.0), ({"find_unused_parameters": True}, 1.5), ({"static_graph": True}, 1.16)],
)
@pytest.mark.parametrize(("kind", "launches_s"), [("cpu", 0.0), ("gpu", 2 * 4e-6)])
def test_measured_hooks_are_of_the_default_options(
    option: dict[str, Any], times: float, kind: str, launches_s: float
) -> None:
    """On a GPU the launches of two copies are in them, which are priced with the copies."""
    device = Device.model_validate(
        {"peak_flops": {"fp32": "1 TFLOP/s"}, "memory": "1 GiB", "memory_bandwidth": "1 GB/s"}
        | {"kind": kind, "launch": "4 us"}
    )
    costs = DdpCosts(device, Ddp(**option), Overheads(hook_s=Fitted(value=1e-5 + launches_s)))
    assert costs.parameter_hook_s == pytest.approx(times * 1e-5)


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


def test_a_network_stated_in_part_is_the_presets_beside_a_profile(predict: Any) -> None:
    """A CPU core's is 10 Gbit/s: half of that is left."""
    half = predict({}, inter_node={"oversubscription": 2})
    stated = predict({}, inter_node={"bandwidth": "5 Gbit/s"})
    assert half.iteration_time_s == stated.iteration_time_s


GOOD_MODEL = Path(__file__).parent.parent / "invalid" / "files" / "good-profile.json"


@pytest.mark.parametrize(
    ("precision", "more", "told"),
    [
        ("fp32", {}, False),
        ("bf16", {}, True),
        ("bf16", {"step_time": "10 ms"}, False),  # which is of that precision
    ],
)
def test_times_of_another_precision_are_told(
    precision: str, more: dict[str, Any], *, told: bool
) -> None:
    """Gradients of half the bytes, and times of float32."""
    scenario = {
        "schema": "ddpsim/1",
        "workload": {"profile": str(GOOD_MODEL), "batch_per_rank": 4, "precision": precision},
        "cluster": {"nodes": 1, "gpus_per_node": 2, "device": "a100-sxm-40gb"},
    }
    scenario["workload"] |= more
    model = resolve(ddpsim.load_scenario(scenario)).model
    said = "workload.precision bf16: the gradients are taken as bfloat16, but the times are those"
    assert any(warning.startswith(said) for warning in model.warnings) == told
    wanted = "bfloat16" if precision == "bf16" else "float32"
    assert {parameter.dtype for parameter in model.parameters} == {wanted}
