"""NCCL's version and its environment variables change what it chooses and sends."""

from __future__ import annotations

from typing import Any

import pytest
from clusters.collectives import cluster

from ddpsim.cluster.build import build_network
from ddpsim.cluster.describe import describe_cluster
from ddpsim.cluster.nccl.environment import read_environment
from ddpsim.cluster.nccl.graph import Graph
from ddpsim.cluster.nccl.tuner import choose
from ddpsim.cluster.topology.host import HOST_MEMORY
from ddpsim.cluster.wires import Wires
from ddpsim.errors import ScenarioError
from ddpsim.prediction.collective_times import collective_table, load_cluster

MIB = 2**20
DGX_H100_2 = {"nodes": 2, "gpus_per_node": 8, "intra_gb_per_s": 370.8, "nics": 8}


def rows(sizes: list[int], **keys: Any) -> list[Any]:
    return list(collective_table(load_cluster(cluster(**keys)), "all_reduce", sizes).rows)


def wires(**keys: Any) -> Wires:
    return Wires.of(load_cluster(cluster(**keys)).cluster)


@pytest.mark.parametrize(
    ("minor", "size", "choice"),
    [
        (17, 4 * MIB, "tree LL128"),
        (22, MIB, "nvls Simple"),
        (30, MIB, "tree LL128"),
        (30, 4 * MIB, "nvls Simple"),
    ],
)
def test_versions_choose_otherwise(minor: int, size: int, choice: str) -> None:
    """Two DGX H100: trees of switches come with 2.18, and leave small messages again in 2.28."""
    graph = Graph("hopper", **DGX_H100_2, nic_gb_per_s=50.0, reduces=True, minor=minor)
    found = choose(graph, size)
    assert f"{found.algorithm} {found.protocol}" == choice


def test_what_a_plugin_declares_keeps_nccl_to_trees() -> None:
    """EFA: 75 us a hop, and twice that for Simple."""
    graph = Graph("hopper", **DGX_H100_2, nic_gb_per_s=50.0, reduces=True)
    declared = Graph("hopper", **DGX_H100_2, nic_gb_per_s=50.0, reduces=True, net_latency_us=75.0)
    assert choose(graph, 8 * MIB).algorithm == "nvls"
    assert choose(declared, 8 * MIB).algorithm == "tree"


@pytest.mark.parametrize(
    ("written", "allowed"),
    [
        ("Ring,Tree", ("ring", "tree")),
        ("^tree", ("ring", "nvls", "pat")),
        ("allreduce:ring;broadcast:tree", ("ring",)),
        ("ring;allreduce:tree,nvlstree", ("tree", "nvls")),
        ("broadcast:ring", ()),
    ],
)
def test_algorithms_are_written_as_nccl_reads_them(written: str, allowed: tuple[str, ...]) -> None:
    assert read_environment({"NCCL_ALGO": written}).algorithms == allowed


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"NCCL_FOO": 1}, "NCCL_FOO is not modelled"),
        ({"NCCL_ALGO": "rings"}, "'rings' is not known; write some of ring, tree"),
        ({"NCCL_PROTO": "^LL,LL128,Simple"}, "leaves nothing"),
        ({"NCCL_BUFFSIZE": "4M"}, "must be a whole number"),
        ({"NCCL_MIN_NCHANNELS": -1}, "must not be negative"),
    ],
)
def test_wrong_variables_are_refused(variables: dict[str, str | int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_environment(variables)


def test_a_scenarios_variables_go_before_the_machines() -> None:
    machine = {"machine": "a3-mega", "nodes": 2}
    (usual,) = rows([64 * MIB], **machine)
    (own,) = rows([64 * MIB], **machine, nccl_env={"NCCL_ALGO": "Ring"})
    assert (usual.choice, own.choice) == ("tree Simple", "ring Simple")


def test_smaller_buffers_cut_a_tree_of_simple_into_more_chunks() -> None:
    """16 MiB of a3-mega are not pipelined with 8 MiB of buffer, and are with 1."""
    machine = {"machine": "a3-mega", "nodes": 2, "algorithm": "tree"}
    (usual,) = rows([16 * MIB], **machine)
    (cut,) = rows([16 * MIB], **machine, nccl_env={"NCCL_BUFFSIZE": 2**20})
    assert cut.time_s < 0.7 * usual.time_s


def test_few_channels_carry_what_their_blocks_do() -> None:
    """A block of Simple moves 24 GB/s on A100 (perChMaxTreeBws, nccl v2.30 src/graph/tuning.cc)."""
    for most, reached in ((1, 24e9), (2, 48e9), (64, 221e9)):
        one = {"machine": "dgx-a100", "nccl_env": {"NCCL_MAX_NCHANNELS": most}}
        (row,) = rows([1024 * MIB], **one)
        assert row.busbw_bytes_per_s == pytest.approx(reached, rel=0.1)


def test_gpus_without_peer_access_meet_in_host_memory() -> None:
    (usual,) = rows([64 * MIB], machine="dgx-a100")
    (slow,) = rows([64 * MIB], machine="dgx-a100", nccl_env={"NCCL_P2P_DISABLE": 1})
    assert slow.busbw_bytes_per_s == pytest.approx(HOST_MEMORY.bytes_per_s / 8, rel=0.1)
    assert usual.busbw_bytes_per_s > 10 * slow.busbw_bytes_per_s


def test_without_infiniband_nccl_takes_sockets() -> None:
    asked = {"machine": "dgx-a100", "nodes": 4, "algorithm": "ring"}
    (usual,) = rows([1024 * MIB], **asked)
    (slow,) = rows([1024 * MIB], **asked, nccl_env={"NCCL_IB_DISABLE": 1})
    assert slow.busbw_bytes_per_s == pytest.approx(8 * 1.95e9, rel=0.1)
    assert usual.time_s < slow.time_s


def test_links_that_variables_change_are_named() -> None:
    """The figures of the preset above them are not those that count."""
    variables = {"NCCL_P2P_DISABLE": 1, "NCCL_IB_DISABLE": 1}
    asked = {"machine": "dgx-a100", "nodes": 4}
    found = wires(**asked, nccl_env=variables)
    said = {entry.source for entry in found.provenance}
    assert said == {"NCCL_IB_DISABLE: TCP, 1.95 GB/s a NIC, 45.0 us a hop"}
    assert found.way
    assert found.way.transport == "SHM"
    assert not (wires(**asked).provenance)
    assert not (wires(**asked).way)


@pytest.mark.parametrize(("gbit_per_s", "reached"), [(10, 0.94), (25, 0.62), (100, 0.156)])
def test_sockets_fill_slow_lines_alone(gbit_per_s: int, reached: float) -> None:
    """One thread of NCCL's copies what all connections carry, 1.95 GB/s."""
    network = {"bandwidth": f"{gbit_per_s} Gbit/s", "transport": "tcp"}
    asked = {"device": "v100-sxm-16gb", "gpus_per_node": 1, "nodes": 4, "inter_node": network}
    (row,) = rows([256 * MIB], **asked)
    assert row.busbw_bytes_per_s == pytest.approx(reached * gbit_per_s / 8 * 1e9, rel=0.06)


def nic_rate(network: dict[str, Any], **env: int) -> float:
    """GB/s of two nodes with one V100 each, over sockets of a line of 100 Gbit/s."""
    stated = {"bandwidth": "100 Gbit/s", "transport": "tcp", **network}
    asked = {"device": "v100-sxm-16gb", "gpus_per_node": 1, "nodes": 2, "inter_node": stated}
    return wires(**asked, nccl_env=env).sockets_rate / 1e9


def test_limits_of_a_flow_count_for_each_connection() -> None:
    """NCCL's source: two channels, each with as many sockets as its variables say."""
    limit = {"flow_bandwidth": "5 Gbit/s"}
    assert nic_rate({}) == 1.95
    assert nic_rate(limit) == 2 * 0.625
    assert nic_rate(limit | {"connections": 1}) == 0.625
    aws = {"NCCL_SOCKET_NTHREADS": 2, "NCCL_NSOCKS_PERTHREAD": 8}
    assert nic_rate(limit, **aws) == 5.0  # 32 flows, two threads a channel
    assert nic_rate(limit | {"connections": 1}, NCCL_SOCKET_NTHREADS=2) == 1.25


@pytest.mark.parametrize("machine", ["g5.48xlarge", "g4dn.12xlarge", "p3.16xlarge"])
def test_one_rate_of_sockets_is_used_and_shown(machine: str) -> None:
    """By the drawing, the bottleneck, the inputs, and the times."""
    asked = load_cluster(cluster(machine=machine, nodes=2, algorithm="ring"))
    network = build_network(asked, None)
    (row,) = rows([1024 * MIB], machine=machine, nodes=2, algorithm="ring")
    assert row.busbw_bytes_per_s == pytest.approx(0.625e9, rel=0.02)
    drawn = describe_cluster(asked)
    assert "625 MB/s of it usable" in drawn
    assert "a ring of all ranks runs at 625 MB/s" in drawn
    assert network.bottleneck == "the inter-node network (625 MB/s a node)"
    assert any("625 MB/s of it by NCCL's sockets" in each.source for each in network.provenance)
    stated = {"flow_bandwidth": "5 Gbit/s"}  # the documented default changes nothing
    same = load_cluster(cluster(machine=machine, nodes=2, inter_node=stated, algorithm="ring"))
    assert build_network(same, None).cost == network.cost


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"nccl_env": {"NCCL_PROTO": "LL128"}}, "cluster.nccl_env: NCCL_PROTO=LL128 is not to be"),
        ({"nccl_env": {"NCCL_ALGO": "nvls"}}, "cluster.nccl_env: NCCL_ALGO=nvls is not to be had"),
        ({"protocol": "LL128"}, "cluster.protocol: LL128 is not to be had"),
        ({"inter_node": {"transport": "tcp", "gpu_direct": False}}, "gpu_direct: belongs to"),
    ],
)
def test_what_is_not_to_be_had_is_blamed_on_the_key_that_asks(
    asked: dict[str, Any], says: str
) -> None:
    """Two p3dn, whose NICs do not reach GPUs and whose switch does not sum."""
    with pytest.raises(ScenarioError, match=says):
        wires(machine="p3dn.24xlarge", nodes=2, **asked)


def test_inputs_name_host_memory_on_the_way_and_networks_that_are_not_used() -> None:
    def said(**keys: Any) -> str:
        network = {"bandwidth": "100 Gbit/s", "gpu_direct": False}
        one = cluster(device="v100-sxm-32gb", gpus_per_node=8, inter_node=network, **keys)
        entries = build_network(load_cluster(one), None).provenance
        (figures,) = [each.source for each in entries if each.input == "cluster.inter_node"]
        return figures

    assert said(nodes=2).startswith("12.5 GB/s, no GPUDirect: through host memory")
    assert said(nodes=1) == "not used: all ranks are in one node"


NCCL_2_4 = {"architecture": "volta", "gpus_per_node": 8, "intra_gb_per_s": 120.0, "minor": 4}


@pytest.mark.parametrize(
    ("nodes", "nics", "size", "choice"),
    [
        (1, 0, 64, "ring LL"),
        (2, 1, 256 * 1024, "tree LL"),  # 2 channels x 256 threads x 512 bytes
        (2, 1, 256 * 1024 + 4, "tree Simple"),
        (2, 1, 2**34, "tree Simple"),  # of two nodes trees are taken to be faster for all sizes
        (4, 4, 15_360_000, "tree Simple"),  # 8 x 5 GB/s x 3 x (6 x 31 - 15 x 2 - 4 x 7) us
        (4, 4, 15_360_001, "ring Simple"),
    ],
)
def test_nccl_2_4_goes_by_thresholds(nodes: int, nics: int, size: int, choice: str) -> None:
    """It has no tuner (src/init.cc, src/enqueue.cc of v2.4.8), nor LL128."""
    graph = Graph(nodes=nodes, nics=nics, nic_gb_per_s=12.5, **NCCL_2_4)
    assert " ".join(choose(graph, size)[:2]) == choice
    without = Graph(nodes=nodes, nics=nics, nic_gb_per_s=12.5, tree_threshold=0, **NCCL_2_4)
    assert choose(without, size).algorithm == "ring"
    with pytest.raises(ValueError, match="no such algorithm and protocol"):
        choose(graph, size, (), ("LL128",))


@pytest.mark.parametrize(
    ("nccl", "name", "reads"),
    [
        ("2.4", "NCCL_ALGO", "NCCL 2.5 and later do"),
        ("2.5", "NCCL_TREE_THRESHOLD", "NCCL 2.4 does"),
        ("2.16", "NCCL_NVLS_ENABLE", "NCCL 2.17 and later do"),
        ("2.22", "NCCL_PAT_ENABLE", "NCCL 2.23 and later do"),
    ],
)
def test_a_variable_that_a_version_does_not_read_is_refused(
    nccl: str, name: str, reads: str
) -> None:
    with pytest.raises(ScenarioError, match=rf"{name} is not read by NCCL {nccl} \({reads}\)"):
        wires(machine="p3dn.24xlarge", nodes=2, nccl=nccl, nccl_env={name: 0})
