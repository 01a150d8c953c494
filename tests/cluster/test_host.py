"""GPUs without NVLink: which way NCCL takes, what they share, and what users get of it."""

from __future__ import annotations

import os
from statistics import median
from typing import Any

import pytest
from clusters.collectives import MIB, cluster, time_of
from held_out.box_rates import box_rates, judged_rates, judged_steps, priors
from hypothesis import given
from hypothesis import strategies as st

from ddpsim.cluster.build import build_network
from ddpsim.cluster.from_links import network_from_links
from ddpsim.cluster.topology import host
from ddpsim.cluster.topology.host import HOST_MEMORY, PEER_TO_PEER, SERVER_OF_PCIE_5, Way
from ddpsim.cluster.wires import Wires
from ddpsim.errors import ScenarioError
from ddpsim.prediction.api import load_scenario
from ddpsim.prediction.collective_times import load_cluster

needs_reference = pytest.mark.skipif(
    "DDPSIM_REFERENCE_DATA" not in os.environ, reason="DDPSIM_REFERENCE_DATA is not set"
)


def way(device: str = "rtx-a6000", gpus: int = 4, **keys: Any) -> Way:
    asked = cluster(device=device, gpus_per_node=gpus, **keys)
    found = Wires.of(load_cluster(asked).cluster).way
    assert found
    return found


def test_the_figures_are_those_that_public_boxes_set() -> None:
    for name, prior in priors(box_rates()).items():
        own = getattr(host, name)
        assert own.bytes_per_s == pytest.approx(prior.bytes_per_s, rel=0.01)
        assert own.sigma == pytest.approx(prior.sigma, abs=0.01)


@pytest.mark.parametrize(
    ("keys", "transport"),
    [
        ({}, "SHM"),  # intel, as nobody says
        ({"host": {"cpu": "amd"}}, "SHM"),
        ({"host": {"cpu": "amd"}, "gpus": 2}, "P2P"),
        ({"host": {"cpu": "amd"}, "nccl": "2.22"}, "P2P"),
        ({"host": {"cpu": "intel"}, "nccl": "2.8"}, "P2P"),
        ({"host": {"cpu": "intel", "sockets": 2}, "nccl": "2.8"}, "SHM"),
        ({"nccl_env": {"NCCL_P2P_LEVEL": "PHB"}}, "P2P"),
        ({"nccl_env": {"NCCL_P2P_LEVEL": 3}}, "P2P"),
        ({"nccl_env": {"NCCL_P2P_LEVEL": "PHB"}, "host": {"sockets": 2}}, "SHM"),
        ({"nccl_env": {"NCCL_P2P_LEVEL": "SYS"}, "host": {"sockets": 2}}, "P2P"),
        ({"nccl_env": {"NCCL_P2P_LEVEL": "SYS", "NCCL_P2P_DISABLE": 1}}, "SHM"),
        ({"nccl_env": {"NCCL_P2P_DISABLE": 1, "NCCL_SHM_DISABLE": 1}}, "NET"),
        ({"host": {"switches": "1x8"}}, "PXB"),
        ({"host": {"switches": "1x8"}, "nccl_env": {"NCCL_P2P_LEVEL": "NVL"}}, "SHM"),
        ({"host": {"bridge": "nvlink"}, "gpus": 2}, "NVL"),
        ({"host": {"bridge": "nvlink"}, "gpus": 2, "nccl_env": {"NCCL_P2P_DISABLE": 1}}, "SHM"),
        ({"device": "rtx-3090", "host": {"bridge": "nvlink"}, "gpus": 2}, "NVL"),
        ({"device": "rtx-4090", "nccl_env": {"NCCL_P2P_LEVEL": "SYS"}}, "SHM"),
        ({"device": "rtx-4090", "host": {"peer_to_peer": True}}, "P2P"),
        ({"device": "rtx-a5000", "host": {"bridge": "nvlink"}, "gpus": 2}, "NVL"),
        ({"device": "titan-rtx", "host": {"bridge": "nvlink"}, "gpus": 2}, "NVL"),
        ({"device": "titan-rtx", "host": {"switches": "1x4"}}, "SHM"),
        ({"device": "gtx-1080ti", "host": {"switches": "1x4"}}, "PXB"),
        ({"device": "rtx-5090", "host": {"switches": "1x4"}}, "SHM"),
        ({"device": "rtx-pro-6000", "host": {"switches": "1x4"}}, "PXB"),
        ({"host": {"peer_to_peer": False, "switches": "1x8"}}, "SHM"),
    ],
)
def test_gpus_meet_where_nccl_and_the_driver_let_them(keys: dict[str, Any], transport: str) -> None:
    """nccl v2.6 to v2.30 src/graph/paths.cc, ncclTopoCheckP2p."""
    assert way(**keys).transport == transport


@pytest.mark.parametrize(
    ("keys", "gb_per_s"),
    [
        ({"gpus": 2}, HOST_MEMORY.bytes_per_s / 2e9),
        ({"gpus": 8}, HOST_MEMORY.bytes_per_s / 8e9),
        ({"gpus": 2, "host": {"gpus": 8}}, HOST_MEMORY.bytes_per_s / 8e9),
        ({"gpus": 8, "host": {"bridge": "nvlink"}}, HOST_MEMORY.bytes_per_s / 4e9),
        ({"gpus": 8, "host": {"switches": "2x4"}}, HOST_MEMORY.bytes_per_s / 2e9),
        ({"gpus": 2, "host": {"lanes": 1}}, 0.73 * 24 / 16),
        ({"gpus": 2, "host": {"pcie": 3, "peer_to_peer": True}}, PEER_TO_PEER.bytes_per_s / 2e9),
        ({"gpus": 4, "host": {"switches": "1x8"}}, 0.8 * 24),
        ({"device": "h100-pcie", "gpus": 2}, 0.73 * 48),
        ({"device": "h100-pcie", "gpus": 8}, SERVER_OF_PCIE_5.bytes_per_s / 8e9),
        ({"device": "h100-pcie", "gpus": 2, "host": {"board": "desktop"}}, 4.65),
        ({"nccl_env": {"NCCL_P2P_DISABLE": 1, "NCCL_SHM_DISABLE": 1}, "gpus": 2}, 1.95),
        ({"device": "h100-pcie", "gpus": 8, "host": {"sockets": 2, "cpu": "other"}}, 9.6),
    ],
)
def test_the_least_of_what_a_rings_parts_carry(keys: dict[str, Any], gb_per_s: float) -> None:
    assert way(**keys).bytes_per_s / 1e9 == pytest.approx(gb_per_s, rel=1e-6)


def test_a_ring_takes_as_long_as_its_way_says() -> None:
    """256 MiB on two GPUs, each of which sends and gets as much."""
    assert time_of(device="rtx-3090", gpus_per_node=2) == pytest.approx(
        256 * MIB / way("rtx-3090", 2).bytes_per_s, rel=0.03
    )
    bridged = time_of(device="rtx-3090", gpus_per_node=2, host={"bridge": "nvlink"})
    assert bridged == pytest.approx(256 * MIB / 47.4e9, rel=0.05)


@given(gpus=st.integers(2, 16), more=st.integers(0, 16), is_bridged=st.booleans())
def test_more_gpus_never_get_more_each(gpus: int, more: int, is_bridged: bool) -> None:
    keys = {"host": {"bridge": "nvlink"}} if is_bridged else {}
    few, many = way(gpus=gpus, **keys), way(gpus=gpus + more, **keys)
    assert many.bytes_per_s <= few.bytes_per_s


def test_a_stated_rate_goes_before_the_host() -> None:
    links = {"intra_node": {"bandwidth": "3 GB/s"}}
    asked = cluster(device="rtx-4090", gpus_per_node=4, host={"lanes": 8}, **links)
    scenario = load_cluster(asked)
    assert Wires.of(scenario.cluster).way is None
    said = {entry.input: entry.source for entry in network_from_links(scenario).provenance}
    assert said["cluster.host"].startswith("not used")
    assert said["cluster.intra_node"].startswith("3.00 GB/s")


def test_groups_of_a_node_share_its_host() -> None:
    """Two groups of two send at once, and get what four GPUs get each."""
    ddp = {"strategy": "fully_shard", "fully_shard": {"reshard_after_forward": 2}}
    four = {"device": "rtx-4090", "nodes": 1, "gpus_per_node": 4}
    job = {"model": "gpt2", "batch_per_rank": 1}
    base = {"schema": "ddpsim/1", "workload": job, "ddp": ddp, "cluster": four}
    groups = dict(build_network(load_scenario(base)).groups)
    said = {entry.input: entry.source for entry in groups["kept"].provenance}
    assert "host memory, which 4 GPUs share" in said["cluster.host"]


@pytest.mark.parametrize(
    ("host_", "device", "says"),
    [
        ({"bridge": "nvlink"}, "rtx-4090", "takes no NVLink bridge"),
        ({"bridge": "nvlink"}, "rtx-a4000", "takes no NVLink bridge"),
        ({"pcie": 5}, "rtx-4090", "has PCIe 4"),
        ({"switches": "1x2"}, "l40s", "hold 2 GPUs, and a node has 4"),
        ({"switches": "two"}, "l40s", "must be none, or switches x GPUs under each"),
        ({"lanes": 3}, "l40s", "1, 2, 4, 8, 16"),
    ],
)
def test_hosts_that_cannot_be_are_refused(host_: dict[str, Any], device: str, says: str) -> None:
    with pytest.raises(ScenarioError) as refused:
        load_cluster(cluster(device=device, gpus_per_node=4, host=host_))
    (problem,) = refused.value.problems
    assert problem.key.startswith("cluster.host.")
    assert says in problem.message


@needs_reference
def test_users_rates_are_inside() -> None:
    """Each by other boxes; two of one A6000 owner are what no other box gets."""
    rates = judged_rates()
    assert len(rates) == 11
    assert [rate.name for rate in rates if not rate.is_covered] == ["r16", "r17"]


@needs_reference
def test_users_rates_are_inside_where_their_boxes_count_too() -> None:
    assert all(rate.is_covered for rate in judged_rates(without_source=False))


@needs_reference
def test_users_steps_through_the_host_are_predicted_by_other_boxes() -> None:
    """15 steps of three owners: 25 % median; the 80 % interval holds 12."""
    steps = [step for step in judged_steps() if "bridge" not in step.name]
    assert len(steps) == 15
    assert median(abs(step.error) for step in steps) <= 0.3
    assert 0.75 <= sum(step.is_covered for step in steps) / len(steps) <= 0.9


@needs_reference
def test_users_steps_over_a_bridge_are_predicted_within_a_few_per_cent() -> None:
    """Under torch 1.7, whose buckets hold a shared weight twice."""
    steps = [step for step in judged_steps() if "bridge" in step.name]
    assert len(steps) == 6
    assert all(abs(step.error) <= 0.05 and step.is_covered for step in steps)
