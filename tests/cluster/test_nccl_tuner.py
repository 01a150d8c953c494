"""NCCL's choice of algorithm, protocol and channels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
from clusters.collectives import MIB, WORKLOAD, cluster
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpsim.cluster.nccl.graph import Graph
from ddpsim.cluster.nccl.tuner import choose, estimates, time_us
from ddpsim.cluster.transfers import Operation, duration_ns
from ddpsim.cluster.wires import Wires
from ddpsim.errors import ScenarioError
from ddpsim.prediction.api import load_scenario
from ddpsim.prediction.collective_times import load_cluster
from ddpsim.prediction.resolve import resolve

A100 = Graph("ampere", 1, 8, 240.0)


H100 = Graph("hopper", 1, 8, 370.8, reduces=True)
B200 = Graph("blackwell", 2, 8, 721.8, 8, 50.0)


@pytest.mark.parametrize(
    ("graph", "channels"),
    [
        (A100, (12, 20.0)),
        (H100, (12, 30.0)),
        (Graph("blackwell", 1, 8, 721.8), (16, 45.0)),
        (Graph("volta", 1, 8, 120.0), (6, 20.0)),
        (Graph("hopper", 4, 8, 370.8, 8, 50.0), (8, 48)),
        (Graph("hopper", 2, 2, 370.8, 2, 50.0), (4, 24)),
        (Graph("hopper", 1, 8, 288.4), (7, 40)),
    ],
)
def test_channels_are_those_of_nccl(graph: Graph, channels: tuple[int, float]) -> None:
    """NCCL's search on DGX machines (12 x 20, 12 x 30 and 8 x 48 seen, 16 x 45 derived).

    4 x 24: two GPUs a node, each with a NIC (NVIDIA/nccl issue 1189); the last is derived.
    """
    assert graph.channels == channels


@pytest.mark.parametrize(
    ("graph", "size", "choice", "us"),
    [
        (A100, MIB, "ring LL", 36),
        (A100, 25 * MIB, "ring Simple", 247),
        (A100, 1024 * MIB, "ring Simple", 7890),
        (H100, MIB, "ring LL", 28),
        (H100, 25 * MIB, "nvls Simple", 121),
        (H100, 1024 * MIB, "nvls Simple", 3970),
    ],
)
def test_choices_and_estimates_are_those_of_the_tuner(
    graph: Graph, size: int, choice: str, us: float
) -> None:
    """Values of another implementation of the same formulas."""
    found = choose(graph, size)
    assert f"{found.algorithm} {found.protocol}" == choice
    assert found.time_us == pytest.approx(us, rel=0.01)


@pytest.mark.parametrize(
    ("minor", "one_node", "two_nodes"),
    [(17, 270.0, None), (18, 266.7, 224.0), (19, 266.7, 266.7), (27, 266.7, 266.7), (28, 272, 246)],
)
def test_nvls_has_the_part_of_the_links_that_each_version_says(
    minor: int, one_node: float, two_nodes: float | None
) -> None:
    """8 links of 40 GB/s: 3/4 of a ring's, then 5/6 whatever the ranks; 2.28 counts as rings do.

    Trees of switches on two nodes: 0.7 in 2.18. Source: nccl src/graph/tuning.cc, "ratio".
    """
    for nodes, wanted in ((1, one_node), (2, two_nodes)):
        graph = Graph("hopper", nodes, 8, 370.8, 8, 50.0, reduces=True, minor=minor)
        found = [row.bandwidth_gb_per_s for row in estimates(graph) if row.algorithm == "nvls"]
        assert found == ([] if wanted is None else [pytest.approx(wanted, rel=1e-3)])


def test_nvls_of_2_18_crosses_a_chain_of_nodes() -> None:
    """Its latency: 23 us, and 19 there and back for each other node."""
    graph = Graph("hopper", 4, 8, 370.8, 8, 50.0, reduces=True, minor=18)
    assert [row.latency_us for row in estimates(graph) if row.algorithm == "nvls"] == [137]


@pytest.mark.parametrize("minor", range(17, 31))
def test_large_messages_take_nvls_in_a_node_of_h100(minor: int) -> None:
    """On two nodes too: measured with NCCL 2.26, 1 GiB takes 4.5 ms; a ring would take 5.9."""
    for nodes in (1, 2) if minor > 17 else (1,):
        graph = Graph("hopper", nodes, 8, 370.8, 8, 50.0, reduces=True, minor=minor)
        assert choose(graph, 1024 * MIB).algorithm == "nvls"


def _bandwidth(graph: Graph, kind: str, operation: Operation = "all_reduce") -> float:
    rows = estimates(graph, operation)
    found = {f"{row.algorithm} {row.protocol}": row.bandwidth_gb_per_s for row in rows}
    return found[kind]


@pytest.mark.parametrize(
    ("minor", "nodes", "part"),
    [(6, 1, 1 / 4), (7, 1, 1 / 3), (20, 1, 1 / 3), (20, 2, 1 / 4), (21, 1, 1 / 2), (21, 2, 1 / 2)],
)
def test_ll_of_shards_has_a_larger_part_in_one_node(minor: int, nodes: int, part: float) -> None:
    """A third of the ring's bus, where all-reduces have a quarter, from NCCL 2.7 to 2.20."""
    graph = Graph("volta", nodes, 8, 60.0, 4, 12.5, minor=minor)
    for operation in ("all_gather", "reduce_scatter"):
        simple, slow = (_bandwidth(graph, f"ring {p}", operation) for p in ("Simple", "LL"))
        assert slow == pytest.approx(part * simple)


@pytest.mark.parametrize(("minor", "part"), [(17, 1.0), (18, 0.85), (30, 0.85)])
def test_trees_between_nodes_of_one_gpu_have_another_pattern(minor: int, part: float) -> None:
    """Source: nccl src/graph/tuning.cc, NCCL_TOPO_PATTERN_TREE."""
    graph = Graph("ampere", 4, 1, 0.0, 1, 12.5, minor=minor)
    assert _bandwidth(graph, "tree Simple") == pytest.approx(part * 0.92 * 12 / 2)


@pytest.mark.parametrize("minor", range(17, 31))
def test_two_gpus_have_no_nvls_from_2_18_to_2_27(minor: int) -> None:
    """2.28.9 and later give it to them again (transport/nvls.cc, gpuCount)."""
    graph = Graph("hopper", 1, 2, 370.8, reduces=True, minor=minor)
    has = any(row.algorithm == "nvls" for row in estimates(graph))
    assert has == (minor == 17 or minor >= 28)
    assert any(row.algorithm == "nvls" for row in estimates(replace(graph, gpus_per_node=3)))


@pytest.mark.parametrize(
    ("minor", "cpu_vendor", "part"), [(28, "amd", 1), (29, "amd", 0.6), (29, "other", 1)]
)
def test_trees_of_switches_of_blackwell_have_a_trees_factors(
    minor: int, cpu_vendor: Literal["amd", "other"], part: float
) -> None:
    """From NCCL 2.29 on, beside a CPU of x86: at 2 MiB 0.6 of the bandwidth."""
    graph = replace(B200, minor=minor, cpu_vendor=cpu_vendor, reduces=True)
    (row,) = (row for row in estimates(graph) if row.algorithm == "nvls")
    moved_us = time_us(graph, row, 2 * MIB) - row.latency_us
    assert moved_us == pytest.approx(2 * MIB / (1000 * part * row.bandwidth_gb_per_s))


def test_ll128_is_not_for_blackwell_before_2_25() -> None:
    for minor in (24, 25):
        rows = estimates(replace(B200, minor=minor))
        assert any(row.protocol == "LL128" for row in rows) == (minor == 25)


def test_shards_on_two_nodes_of_b200_change_protocol_where_measured() -> None:
    """A sweep whose CPU and NCCL nobody names jumps at 256 KiB and at 64 MiB.

    So does the tuner of NCCL 2.28 beside a CPU of AMD, by LL's limit between nodes, the CPU's
    overhead of each step, and LL128's limit of that version; beside one of Intel at 1 and 32 MiB.
    """
    for cpu_vendor, ends in (("amd", (256, 64 * 1024)), ("intel", (1024, 32 * 1024))):
        graph = replace(B200, minor=28, cpu_vendor=cpu_vendor)
        sizes = [1024 * 2**power for power in range(20)]
        chosen = [choose(graph, size, operation="all_gather").protocol for size in sizes]
        assert chosen == sorted(chosen, key=("LL", "LL128", "Simple").index)
        starts = [sizes[chosen.index(name)] // 1024 for name in ("LL128", "Simple")]
        assert tuple(starts) == ends


def test_two_nodes_take_a_tree_where_it_sends_half_as_much() -> None:
    """Seen on p4de: more bus bandwidth than its NICs have, which no ring can reach."""
    two = Graph("ampere", 2, 8, 240.0, 4, 12.5)
    assert choose(two, 1024 * MIB).algorithm == "tree"
    assert choose(Graph("ampere", 4, 8, 240.0, 4, 12.5), 1024 * MIB).algorithm == "ring"


def test_a_slot_slower_than_the_nic_holds_the_channels_back() -> None:
    assert Graph("ampere", 2, 8, 12.0, 1, 25.0, "pcie").channels == (1, 12)
    assert Graph("ampere", 2, 1, 0.0, 1, 25.0, "pcie").channels == (1, 24)


def test_ll128_is_not_for_gpus_that_meet_over_pcie() -> None:
    for nodes, per_node, known in ((1, 8, False), (2, 8, False), (2, 1, True)):
        rows = estimates(Graph("ampere", nodes, per_node, 24.0, 1, 12.5, "pcie"))
        assert any(row.protocol == "LL128" for row in rows) == known


def test_overrides_restrict_the_choice() -> None:
    assert choose(H100, 1024 * MIB, ("tree",)).algorithm == "tree"
    assert choose(H100, 1024 * MIB, (), ("LL",)).protocol == "LL"
    with pytest.raises(ValueError, match="no such algorithm"):
        choose(A100, MIB, ("nvls",))


@given(
    graph=st.builds(
        Graph,
        st.sampled_from(["volta", "ampere", "hopper", "blackwell"]),
        st.integers(1, 64),
        st.integers(2, 16),
        st.floats(1, 900),
        st.integers(1, 32),
        st.floats(0.1, 100),
        st.sampled_from(["nvlink", "pcie"]),
        reduces=st.booleans(),
        cpu_vendor=st.sampled_from(["intel", "amd", "other"]),
    ),
    size=st.integers(1, 2**34),
)
@settings(max_examples=200)
def test_the_choice_is_the_least_of_its_table(graph: Graph, size: int) -> None:
    rows = estimates(graph)
    assert all(row.bandwidth_gb_per_s > 0 and row.latency_us >= 0 for row in rows)
    assert choose(graph, size).time_us == min(time_us(graph, row, size) for row in rows)


def test_nccl_chooses_for_the_slowest_node() -> None:
    """It takes the least of all ranks' graphs (init.cc); what makes a link weak it does not see."""

    def chosen(**keys: Any) -> Any:
        scenario = load_cluster(cluster(machine="dgx-h100", nodes=4, **keys))
        return Wires.of(scenario.cluster).graph(scenario.cluster)

    slow = {"bandwidth": "10 Gbit/s", "nics_per_node": 2}
    one = chosen(other_nodes={1: {"inter_node": slow}})
    assert one == chosen(inter_node=slow)
    assert one != chosen()
    inside = {"bandwidth": "12 GB/s"}
    assert chosen(other_nodes={1: {"intra_node": inside}}).intra_gb_per_s < chosen().intra_gb_per_s
    assert chosen(weak_links={3: 0.1}) == chosen()
    faster = {"inter_node": {"bandwidth": "800 Gbit/s"}, "intra_node": {"bandwidth": "900 GB/s"}}
    assert chosen(other_nodes={1: faster}) == chosen()


@pytest.mark.parametrize(
    ("machine", "algorithm", "protocol", "says"),
    [
        ("g4dn.12xlarge", "auto", "LL128", "cluster.protocol: LL128 .* needs NVLink"),
        ("g4dn.12xlarge", "tree", "LL128", "cluster.protocol: LL128 .* needs NVLink"),
        ("g4dn.12xlarge", "nvls", "auto", "cluster.algorithm: nvls .* needs a switch that sums"),
        ("g4dn.12xlarge", "nvls", "LL", "cluster.algorithm: nvls .* needs a switch that sums"),
        ("dgx-h100", "nvls", "LL", "cluster.protocol: nvls is sent with Simple alone"),
    ],
)
def test_what_is_not_to_be_had_is_named(
    machine: str, algorithm: str, protocol: str, says: str
) -> None:
    plain = cluster(machine=machine, nodes=2, algorithm=algorithm, protocol=protocol)
    with pytest.raises(ScenarioError, match=says):
        load_scenario({"schema": "ddpsim/1", "workload": WORKLOAD, **plain})


@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_a_protocols_flags_take_their_part_of_links_with_a_stated_latency(algorithm: str) -> None:
    """LL sends as many bytes of flags as of data: no message is faster than its wire."""

    def large_s(protocol: str, **latency: str) -> float:
        cluster = {
            "nodes": 2,
            "gpus_per_node": 8,
            "device": "a100-sxm-80gb",
            "inter_node": {"bandwidth": "25 Gbit/s", **latency},
            "algorithm": algorithm,
            "protocol": protocol,
        }
        scenario = {"schema": "ddpsim/1", "workload": WORKLOAD, "cluster": cluster}
        cost = resolve(load_scenario(scenario)).network.cost
        return duration_ns(cost.transfer("all_reduce", 256 * MIB)) / 1e9

    for latency in ({}, {"latency": "20 us"}):
        wire_s = 256 * MIB / (25e9 / 8)
        assert large_s("LL", **latency) > 2 * wire_s
        assert large_s("LL128", **latency) > wire_s / 0.92
        assert large_s("LL", **latency) > 1.5 * large_s("Simple", **latency)


def test_ll128_needs_nics_that_read_gpus() -> None:
    near = Graph("volta", 4, 4, 120.0, nics=2, nic_gb_per_s=12.5)
    protocols = {row.protocol for row in estimates(replace(near, gpu_direct=False))}
    assert protocols == {"LL", "Simple"}
    assert "LL128" in {row.protocol for row in estimates(near)}
    alone = replace(near, nodes=1, nics=0, gpu_direct=False)
    assert "LL128" in {row.protocol for row in estimates(alone)}
