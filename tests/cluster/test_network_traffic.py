"""Stalls, and traffic of others and of data loaders on the network."""

from __future__ import annotations

from typing import Any

import pytest
from clusters.collectives import BASE, simulated

from ddpsim.cluster.topology.paths import Link, Paths
from ddpsim.prediction.api import load_scenario, simulate
from ddpsim.prediction.resolve import resolve


def test_stalls_cost_what_they_take() -> None:
    """Every rank in every iteration: exactly their duration."""
    plain, stalled = simulated(), simulated("run.stalls={probability: 1, duration: 7 ms}")
    longer = stalled.iteration_time_s.mean - plain.iteration_time_s.mean
    assert longer == pytest.approx(7e-3, abs=1e-6)
    (stalls,) = stalled.stragglers
    assert stalls.kind == "stalls"
    assert stalls.cost_s == pytest.approx(7e-3, abs=1e-6)
    assert stalled.breakdown_s.other > plain.breakdown_s.other + 6.9e-3


def test_rare_stalls_come_with_the_seed() -> None:
    rare = "run.stalls={probability: 0.2, duration: 50 ms}"
    assert simulated(rare) == simulated(rare)
    times = {simulated(rare, f"run.seed={seed}").iteration_time_s.mean for seed in range(4)}
    assert len(times) > 1


def test_traffic_of_others_and_of_loaders_slows_the_network() -> None:
    slow = "cluster.inter_node={bandwidth: 10 Gbit/s, nics_per_node: 1}"
    plain = simulated(slow)
    busy = simulated(slow, "cluster.background={rate: 10 Gbit/s}")
    bursts = simulated(slow, "cluster.background={rate: 10 Gbit/s, busy: 5 ms, every: 50 ms}")
    assert plain.iteration_time_s.mean < bursts.iteration_time_s.mean < busy.iteration_time_s.mean
    assert busy.comm_time_s == pytest.approx(2 * plain.comm_time_s, rel=0.05)
    loader = "workload.data={rate: 300 samples/s, sample_size: 1 MB}"
    reading = simulated(slow, loader)
    assert reading.exposed_comm_s > plain.exposed_comm_s
    assert "traffic" in {straggler.kind for straggler in busy.stragglers}


GLOO = {
    "schema": "ddpsim/1",
    "workload": {"model": "resnet18", "batch_per_rank": 8, "step_time": "50 ms"},
    "ddp": {"backend": "gloo", "bucket_cap_mb": 10},
    "cluster": {
        "nodes": 3,
        "gpus_per_node": 1,
        "device": "cpu-core",
        "inter_node": {"bandwidth": "1 GB/s", "latency": "20 us"},
    },
    "run": {"iterations": 1},
}


SLOW_NODES = (
    ("cluster.weak_links={2: 0.1}",),
    ("cluster.other_nodes={1: {inter_node: {bandwidth: 100 MB/s}}}",),
    ("cluster.inter_node.bandwidth=100 MB/s",),
)


@pytest.mark.parametrize(
    "slow",
    [
        *SLOW_NODES[:2],
        ("cluster.gpus_per_node=2", "cluster.intra_node={bandwidth: 0.2 GB/s, latency: 5 us}"),
    ],
)
def test_a_little_traffic_costs_little_and_brings_nothing(slow: tuple[str, ...]) -> None:
    """Transfers in flight share the slow hop that makes them need little of the network."""
    alone, beside = (
        resolve(load_scenario(GLOO, (*slow, *traffic))).step_s()
        for traffic in ((), ("cluster.background={rate: 1 kbit/s}",))
    )
    assert alone <= beside <= 1.003 * alone


@pytest.mark.parametrize(
    "traffic",
    [
        "cluster.background={rate: 90 MB/s}",
        "workload.data={rate: 16 samples/s, sample_size: 5 MB, workers: 1, prefetch: 1}",
    ],
)
def test_traffic_counts_on_the_node_with_the_least_left(traffic: str) -> None:
    """As much beside one slow node, or a weak link to one, as where all are as slow."""
    weak_s, one_s, all_s = (
        resolve(load_scenario(GLOO, (*slow, traffic))).step_s() for slow in SLOW_NODES
    )
    assert weak_s == one_s == all_s
    assert all_s > 1.3 * resolve(load_scenario(GLOO, SLOW_NODES[0])).step_s()


def test_the_least_network_is_that_of_nodes_there_are() -> None:
    """A usual node that the cluster has none of counts for nothing."""
    usual = Link(1e-6, 8e9)

    def least(**unlike: Any) -> float:
        return Paths(2, 4, usual, usual, **unlike).least_network.bandwidth_bytes_per_s

    assert least() == 8e9
    assert least(unlike=((1, 1.0, 4.0),)) == 8e9
    assert least(unlike=((0, 1.0, 2.0), (1, 1.0, 4.0))) == 16e9
    assert least(unlike=((0, 1.0, 0.5),), weak=((3, 0.1, 0.1),)) == 4e9
    assert least(weak=((4, 0.1, 0.1),)) == 0.8e9


@pytest.mark.parametrize(
    "traffic",
    [
        "cluster.background={rate: 5 Gbit/s}",
        "cluster.background={rate: 5 Gbit/s, busy: 3 ms, every: 11 ms}",
        "workload.data={rate: 600 samples/s, sample_size: 600 kB}",
    ],
)
def test_folded_ranks_share_the_network_as_all_do(traffic: str) -> None:
    scenario = load_scenario(
        BASE, (traffic, "cluster.inter_node={bandwidth: 10 Gbit/s, nics_per_node: 1}")
    )
    folded, plain = simulate(scenario), simulate(scenario, "reference")
    assert folded.engine.ranks_simulated < plain.engine.ranks_simulated
    assert folded.iteration_time_s == plain.iteration_time_s


def test_batches_over_the_network_cost_the_same_in_every_step() -> None:
    """However many steps are simulated; bytes of both fit into the step on one link."""
    asked = (
        "cluster.inter_node={bandwidth: 10 Gbit/s, nics_per_node: 1}",
        "workload.batch_per_rank=4",
        "workload.data={rate: 5000 samples/s, sample_size: 5 MB}",
    )
    few, many = (simulated(*asked, f"run.iterations={n}").iteration_time_s for n in (3, 30))
    assert few.mean == pytest.approx(many.mean, rel=1e-6)
    assert many.mean >= 2 * 4 * 5e6 / 1.25e9 + simulated(*asked[:2]).comm_time_s * 0.99
