"""The network that would make twice the GPUs worth it."""

from __future__ import annotations

from typing import Any

import pytest
from plan_scenarios import with_nodes
from shipped_scenarios import load as scenario

import ddpsim
from ddpsim.planning.capacity_plan.next_doubling import next_doubling, with_bandwidth
from ddpsim.planning.capacity_plan.plan import plan_capacity
from ddpsim.report.capacity.plan import render_plan
from ddpsim.result.capacity import KNEE_EFFICIENCY
from ddpsim.scenario.links import IntraNode
from ddpsim.scenario.schema import Scenario


def throughput(asked: Scenario) -> float:
    return ddpsim.simulate(asked).throughput_samples_per_s


@pytest.mark.parametrize(
    ("name", "nodes", "key"),
    [
        ("resnet50-2x8-25gbit", 2, "inter_node"),  # stated beside a device
        ("resnet50-8xa100", 2, "inter_node"),  # the device's preset
        ("resnet50-8xa100", 1, "intra_node"),
        ("machines-64xh100", 8, "inter_node"),  # stated beside a machine
        ("machines-64xh100", 8, "intra_node"),
    ],
)
def test_another_bandwidth_leaves_the_rest_as_it_is(name: str, nodes: int, key: Any) -> None:
    asked = with_nodes(scenario(name, "cluster.background=null"), nodes)
    link = asked.cluster.link(key)
    assert link
    assert link.bandwidth_bytes_per_s
    same = with_bandwidth(asked, key, link.bandwidth_bytes_per_s)
    assert ddpsim.simulate(same).iteration_time_s == ddpsim.simulate(asked).iteration_time_s
    half = with_bandwidth(asked, key, link.bandwidth_bytes_per_s / 50)
    assert throughput(half) < throughput(asked)


def test_what_a_switch_sums_goes_over_the_same_links() -> None:
    whole = scenario("machines-64xh100").cluster.link("intra_node")
    assert isinstance(whole, IntraNode)
    assert whole.bandwidth_bytes_per_s
    for own in (None, "100 GB/s"):
        link: dict[str, Any] = {"bandwidth": f"{whole.bandwidth_bytes_per_s / 4} B/s"}
        asked = scenario("machines-64xh100")
        stated = IntraNode.model_validate(link | ({"switch_bandwidth": own} if own else {}))
        cluster = asked.cluster.model_copy(update={"intra_node": stated})
        quarter = cluster.link("intra_node")
        assert isinstance(quarter, IntraNode)
        usual = whole.switch_bandwidth_bytes_per_s
        assert usual
        assert quarter.switch_bandwidth_bytes_per_s == (100e9 if own else usual / 4)


def test_the_needed_bandwidth_is_the_least_that_does() -> None:
    asked = scenario("resnet50-2x8-25gbit")
    one, two = with_nodes(asked, 1), with_nodes(asked, 2)
    found = next_doubling(one, two)
    assert found.efficiency == throughput(two) / (2 * throughput(one)) < KNEE_EFFICIENCY
    needed = found.needed_bandwidth_bytes_per_s
    assert needed
    enough = throughput(with_bandwidth(two, "inter_node", needed)) / (2 * throughput(one))
    short = throughput(with_bandwidth(two, "inter_node", 0.97 * needed)) / (2 * throughput(one))
    assert found.needed_efficiency == enough >= KNEE_EFFICIENCY > short
    assert found.unlimited_efficiency
    assert found.without_network_time >= found.unlimited_efficiency >= enough
    assert found.gain_without_doubling == 0  # one node has no network


def test_an_unlimited_network_is_the_bound() -> None:
    """The kernels' floor bounds so small a batch: no network makes it worth while."""
    plan = plan_capacity(scenario("resnet50-8xa100"), "1M samples", global_batch=256, max_gpus=64)
    found = plan.next_doubling
    assert found
    assert found.needed_bandwidth_bytes_per_s is None
    assert found.without_network_time < KNEE_EFFICIENCY
    assert found.limit
    text = " ".join(render_plan(plan, "f.yaml").split())
    assert "no network makes it worth while: one that takes no time at all gives" in text


def test_other_links_or_latency_may_bound() -> None:
    asked = scenario(
        "resnet50-2x8-25gbit",
        "cluster.inter_node={bandwidth: 25 Gbit/s, latency: 2 ms, transport: rdma}",
    )
    found = next_doubling(with_nodes(asked, 1), with_nodes(asked, 2))
    assert found.unlimited_efficiency
    assert found.unlimited_efficiency < KNEE_EFFICIENCY < found.without_network_time
    assert found.needed_bandwidth_bytes_per_s is None
    assert found.limit.startswith("latency: with every bandwidth unlimited it would be ")
    sockets = scenario("slow-network", "workload.batch_per_rank=16", "cluster.gpus_per_node=1")
    found = next_doubling(with_nodes(sockets, 1), with_nodes(sockets, 2))
    assert found.limit == (
        "NCCL's sockets: 1.95 GB/s a NIC, whatever its line (NCCL_SOCKET_NTHREADS=4 and "
        "NCCL_NSOCKS_PERTHREAD=4 or RDMA help)"
    )
    inside = scenario(
        "resnet50-2x8-25gbit",
        "cluster.intra_node={bandwidth: 1 GB/s, latency: 5 us}",
        "cluster.algorithm=ring",
    )
    found = next_doubling(with_nodes(inside, 1), with_nodes(inside, 2))
    assert found.efficiency >= KNEE_EFFICIENCY  # so slow inside that nodes add up
    faster = with_bandwidth(with_nodes(inside, 1), "intra_node", 100e9)
    found = next_doubling(faster, with_nodes(inside, 2))
    assert found.limit.startswith("communication: the intra-node links (1.00 GB/s a GPU,")


def test_times_of_a_log_are_divided() -> None:
    asked = scenario("gloo-cpu")  # it allows extrapolation
    found = next_doubling(with_nodes(asked, 1), with_nodes(asked, 2))
    assert (found.link, found.bandwidth_bytes_per_s) == ("all_reduce", None)
    assert found.needed_speedup
    assert found.needed_speedup > 1
    assert found.needed_efficiency == pytest.approx(KNEE_EFFICIENCY, abs=0.01)
