"""What DDP's hooks and copies cost, as a profile measured it or by default."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from clusters.profiles import fitted
from hypothesis import given
from hypothesis import strategies as st

import ddpsim
from ddpsim.importers.profiles.cluster import (
    CopyIn,
    Fitted,
    Overheads,
)
from ddpsim.scenario.ddp import Ddp
from ddpsim.scenario.device import Device
from ddpsim.strategies.ddp.costs import DdpCosts
from ddpsim.workload.model import Parameter

FAST = {"bandwidth": "100 Gbit/s", "latency": "0 s"}


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


def cpu_costs(overheads: Overheads, **options: Any) -> DdpCosts:
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
    costs, static = cpu_costs(known), cpu_costs(known, static_graph=True)
    whole_s = costs.parameter_hook_s + costs.copy_in(gradient).device_s
    assert whole_s == pytest.approx(max(hook_us, 6) * 1e-6)
    assert static.copy_in(gradient) == costs.copy_in(gradient)
    assert static.parameter_hook_s == pytest.approx(1e-5 * 5.8 / 5 - 4e-6)
    on_gpu = replace(costs, device=costs.device.model_copy(update={"kind": "gpu"}))
    assert on_gpu.copy_in(gradient) == on_gpu.copy_in(gradient._replace(ddp_hook_s=None))


def test_a_hook_s_copies_back_come_after_the_all_reduces(predict: Any) -> None:
    """A fast link hides nothing, so nothing changes but where; the view does without them."""
    known = {"hook_s": fitted(1e-4), "copy_back_s": fitted(6e-5)}
    costs = cpu_costs(Overheads.model_validate(known))
    gradient = Parameter("weight", 2**19, "float32")
    assert costs.parameter_hook_s == pytest.approx(4e-5)
    plain = cpu_costs(Overheads(hook_s=Fitted(value=1e-4))).copy_back([gradient] * 3)
    assert costs.copy_back([gradient] * 3).device_s == pytest.approx(plain.device_s + 3 * 6e-5)
    view = cpu_costs(Overheads.model_validate(known), gradient_as_bucket_view=True)
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
    plain, slow = cpu_costs(known), cpu_costs(longer)
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
    copy = cpu_costs(overheads).copy_in(gradient)
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
