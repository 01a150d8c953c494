"""NCCL's choice, machines nobody measured, published sweeps, and the commands about collectives."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from statistics import median
from typing import Any

import nccl_sweeps
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nccl_log_writer import nccl_log

from ddpsim.cluster.build import LOG, OTHER_GPUS, build_network, with_sent_sizes
from ddpsim.cluster.nccl.tuner import Graph, choose, estimates, time_us
from ddpsim.cluster.network import Network
from ddpsim.cluster.topology.link import Link
from ddpsim.cluster.topology.paths import Paths
from ddpsim.cluster.transfers import duration_ns
from ddpsim.cluster.wires import Wires
from ddpsim.errors import InputError, ScenarioError
from ddpsim.planning.options import parse_sizes
from ddpsim.prediction.api import load_scenario, simulate
from ddpsim.prediction.collective_times import collective_table, load_cluster
from ddpsim.prediction.resolve import resolve
from ddpsim.prediction.uncertainty import uncertainties
from ddpsim.result.model import Result
from ddpsim.scenario.catalog import device_table, machine_names, machine_table

MIB = 2**20
WORKLOAD = {"model": "resnet50", "batch_per_rank": 64}
A100 = Graph("ampere", 1, 8, 240.0)
H100 = Graph("hopper", 1, 8, 370.8, reduces=True)
needs_reference = pytest.mark.skipif(
    not os.environ.get("DDPSIM_REFERENCE_DATA"),
    reason="DDPSIM_REFERENCE_DATA is not set: no published sweeps",
)


# --- the tuner ----------------------------------------------------------------------------------


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
@settings(max_examples=200, deadline=None)
def test_the_choice_is_the_least_of_its_table(graph: Graph, size: int) -> None:
    rows = estimates(graph)
    assert all(row.bandwidth_gb_per_s > 0 and row.latency_us >= 0 for row in rows)
    assert choose(graph, size).time_us == min(time_us(graph, row, size) for row in rows)


# --- published sweeps ---------------------------------------------------------------------------


@needs_reference
@pytest.mark.parametrize("name", ["superbench-1x8-A100", "dgxc-1x8-H100"])
def test_presets_reach_the_bandwidth_of_large_messages(name: str) -> None:
    points = nccl_sweeps.within(nccl_sweeps.from_presets(name), nccl_sweeps.HUGE)
    assert len(points) >= 6
    assert all(abs(point.bandwidth_error) <= 0.15 for point in points)


@needs_reference
@pytest.mark.parametrize("name", ["abci-A-1x4", "abci-A-1x8", "abci-V-1x4"])
def test_presets_are_near_at_4_to_32_mib(name: str) -> None:
    points = nccl_sweeps.within(nccl_sweeps.from_presets(name), nccl_sweeps.LARGE)
    assert len(points) == 4
    assert all(abs(point.bandwidth_error) <= 0.30 for point in points)


@needs_reference
def test_a_fit_of_half_the_rows_predicts_the_others() -> None:
    """All 15 sweeps pooled: 5 % median asked, 2 % reached."""
    points = nccl_sweeps.pooled_odd_rows()
    assert len(points) >= 200
    assert median(abs(point.error) for point in points) <= 0.02


@needs_reference
@pytest.mark.parametrize(("said", "measured", "asked"), nccl_sweeps.ELSEWHERE)
def test_some_ranks_predict_others(said: str, measured: tuple[str, ...], asked: str) -> None:
    """Median error from 64 KiB up: 6 % from few nodes to four times as many; from one node 20 %."""
    points = nccl_sweeps.elsewhere(measured, asked)
    limit = 0.2 if "NICs" in said else 0.06
    assert median(abs(point.error) for point in points) <= limit


@needs_reference
def test_steps_of_four_times_the_ranks_are_predicted_from_two_nodes() -> None:
    """Within 6 %, however much of a step is communication."""
    assert all(abs(error) <= 0.06 for error in nccl_sweeps.steps_elsewhere().values())


@needs_reference
def test_three_numbers_of_nodes_predict_a_fourth() -> None:
    """Their hops are fitted, and none is assumed."""
    points = nccl_sweeps.elsewhere(("abci-V-1x4", "abci-V-2x4", "abci-V-4x4"), "abci-V-8x4")
    assert median(abs(point.error) for point in points) <= 0.03


# --- machines -----------------------------------------------------------------------------------


def cluster(**keys: Any) -> dict[str, Any]:
    return {"cluster": {"nodes": 1} | keys}


@pytest.mark.parametrize("name", machine_names())
def test_every_machine_can_be_asked(name: str) -> None:
    table = machine_table(name)
    assert set(table["sources"]) == {"inter_node", "cpu_vendor"}
    backend = {"ddp": {"backend": "gloo"}} if table["device"] == "cpu-core" else {}
    for nodes in (1, 2, 5):
        if nodes * table["gpus_per_node"] == 1:
            continue
        scenario = load_cluster(cluster(machine=name, nodes=nodes) | backend)
        assert scenario.cluster.gpus_per_node == table["gpus_per_node"]
        rows = collective_table(scenario, "all_reduce", [4, 25 * MIB]).rows
        assert all(row.time_s > 0 for row in rows)


def test_a_machine_leaves_what_the_scenario_says() -> None:
    scenario = load_cluster(cluster(machine="dgx-a100", gpus_per_node=4, device="a100-sxm-40gb"))
    assert scenario.cluster.gpus_per_node == 4
    assert scenario.cluster.device.name == "a100-sxm-40gb"


def test_an_unknown_machine_is_named_with_its_nearest() -> None:
    with pytest.raises(ScenarioError) as refused:
        load_cluster(cluster(machine="dgx-h10"))
    (problem,) = refused.value.problems
    assert problem.key == "cluster.machine"
    assert "Did you mean 'dgx-h100'?" in problem.message


def test_a_leaf_switch_spares_the_spine() -> None:
    inter = {"bandwidth": "100 Gbit/s", "nics_per_node": 8, "oversubscription": 4}
    spine = time_of(machine="dgx-a100", nodes=4, inter_node=inter)
    leaf = time_of(machine="dgx-a100", nodes=4, inter_node=inter | {"nodes_per_leaf": 4})
    assert spine > 3 * leaf
    assert time_of(machine="dgx-a100", nodes=8, inter_node=inter | {"nodes_per_leaf": 4}) > 3 * leaf


def test_collisions_are_drawn_with_the_seed() -> None:
    inter = {"bandwidth": "100 Gbit/s", "nics_per_node": 8, "uplinks": 8}
    asked = cluster(machine="dgx-a100", nodes=8, inter_node=inter)
    times = set()
    for seed in range(5):
        scenario = load_cluster(asked | {"run": {"seed": seed}})
        assert time_in(scenario) == time_in(scenario)
        times.add(time_in(scenario))
    assert len(times) > 1
    alone = time_of(machine="dgx-a100", nodes=8, inter_node=inter | {"uplinks": 10_000})
    assert min(times) > alone


def time_of(size: int = 256 * MIB, **keys: Any) -> float:
    return time_in(load_cluster(cluster(**keys)), size)


def time_in(scenario: Any, size: int = 256 * MIB) -> float:
    return collective_table(scenario, "all_reduce", [size]).rows[0].time_s


# --- stragglers, traffic, other ways ------------------------------------------------------------

BASE = {
    "schema": "ddpsim/1",
    "workload": {"model": "resnet50", "batch_per_rank": 32},
    "cluster": {"machine": "dgx-1-v100", "nodes": 2, "gpus_per_node": 2},
    "run": {"iterations": 5},
}


def predict(*settings_: str) -> Result:
    return simulate(load_scenario(BASE, settings_))


def test_each_straggler_has_its_price() -> None:
    plain = predict()
    assert plain.stragglers == ()
    both = predict("cluster.stragglers={factors: {1: 1.2}}", "cluster.weak_links={2: 0.01}")
    kinds = {straggler.kind: straggler for straggler in both.stragglers}
    assert "rank 1, whose compute takes 1.20 x" in kinds["rank"].text
    assert "the link to rank 2, with 1% of its bandwidth" in kinds["link"].text
    assert all(straggler.cost_s > 0 for straggler in both.stragglers)
    assert [s.cost_s for s in both.stragglers] == sorted(
        (s.cost_s for s in both.stragglers), reverse=True
    )
    alone = predict("cluster.stragglers={factors: {1: 1.2}}")
    (rank,) = alone.stragglers
    gone = alone.iteration_time_s.mean - plain.iteration_time_s.mean
    assert rank.cost_s == pytest.approx(gone, rel=1e-6)


def test_a_node_unlike_the_others_has_its_price() -> None:
    plain = predict()
    old = predict("cluster.other_nodes={1: {device: t4, inter_node: {bandwidth: 1 Gbit/s}}}")
    kinds = {straggler.kind: straggler for straggler in old.stragglers}
    assert kinds["rank"].text == "node 1's t4"
    assert kinds["link"].text == "node 1's links"
    assert all(straggler.cost_s > 0 for straggler in old.stragglers)
    assert old.iteration_time_s.mean > 1.5 * plain.iteration_time_s.mean
    assert old.memory_bytes_per_gpu.device < plain.memory_bytes_per_gpu.device
    alike = predict("cluster.other_nodes={1: {device: v100-sxm-32gb}}")
    assert alike.iteration_time_s.mean == plain.iteration_time_s.mean


def test_every_algorithm_waits_for_a_slow_nodes_network() -> None:
    """S at least enters each node; node 3 has 8 NICs of 1 Gbit/s. NVLS saw its GPUs alone."""
    slow = {3: {"inter_node": {"bandwidth": "1 Gbit/s"}}}
    for algorithm in ("auto", "ring", "tree", "nvls", "hierarchical", "direct", "parameter_server"):
        asked = {"machine": "dgx-h100", "nodes": 4, "other_nodes": slow, "algorithm": algorithm}
        assert time_of(392 * MIB, **asked) > 392 * MIB / 1e9


PCIE = {
    "device": "rtx-4090",
    "gpus_per_node": 4,
    "nodes": 3,
    "intra_node": {"bandwidth": "12 GB/s"},
    "inter_node": {"bandwidth": "200 Gbit/s", "nics_per_node": 2},
}


@pytest.mark.parametrize("algorithm", ["auto", "ring", "tree", "hierarchical", "direct"])
def test_one_slow_node_costs_no_more_than_all_slow(algorithm: str) -> None:
    """Its NICs together, 12.5 GB/s, are still faster than a GPU's slot: no hop is slower for it."""
    slow = {1: {"inter_node": {"bandwidth": "50 Gbit/s"}}}
    networks = [
        {"other_nodes": slow},
        {"other_nodes": slow, "inter_node": {"bandwidth": "400 Gbit/s", "nics_per_node": 2}},
        {"inter_node": {"bandwidth": "50 Gbit/s", "nics_per_node": 2}},
    ]
    one, faster, every = (time_of(**PCIE | {"algorithm": algorithm} | net) for net in networks)
    assert faster <= one <= every


@pytest.mark.parametrize("protocol", ["LL", "LL128", "Simple"])
@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_a_protocols_limit_is_no_part_of_a_slow_node(algorithm: str, protocol: str) -> None:
    """LL moves no more than 19 GB/s, which a network of half the bandwidth still does."""
    chosen = {"algorithm": algorithm, "protocol": protocol}
    asked = {"machine": "dgx-a100", "nodes": 4} | chosen
    half = {"bandwidth": "100 Gbit/s"}
    every = time_of(**asked, inter_node=half)
    one = time_of(**asked, other_nodes={2: {"inter_node": half}})
    assert time_of(**asked) <= one <= every * (1 + 1e-9)
    if (algorithm, protocol) == ("ring", "LL"):
        assert one == time_of(**asked)


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


@pytest.mark.parametrize("algorithm", ["direct", "halving_doubling"])
def test_messages_inside_a_node_take_its_own_links(algorithm: str) -> None:
    """Of 8 GPUs' 100 MB 8 x 50 MB leave a node of 3.125 GB/s each way, twice: 256 ms."""
    asked = {
        "device": "a100",
        "nodes": 2,
        "gpus_per_node": 8,
        "intra_node": {"bandwidth": "240 GB/s", "latency": "3 us"},
        "inter_node": {"bandwidth": "25 Gbit/s", "latency": "5 us"},
        "algorithm": algorithm,
    }
    assert time_of(10**8, **asked) == pytest.approx(0.256, rel=0.01)
    slots = {"intra_node": {"bandwidth": "6 GB/s", "latency": "10 us"}}
    wide = {"inter_node": {"bandwidth": "400 Gbit/s", "latency": "5 us", "nics_per_node": 4}}
    through_slots_s = 2 * 15 / 16 * 1e9 / 6e9
    assert time_of(10**9, **asked | slots | wide) == pytest.approx(through_slots_s, rel=0.01)


def test_other_devices_take_as_long_as_the_roofline_says() -> None:
    """Not by their best matmul rate: in fp32 an A100's lead over a V100 is not that of fp16."""
    mixed = {
        "schema": "ddpsim/1",
        "workload": {"model": "bert-base", "batch_per_rank": 8},
        "cluster": {
            "nodes": 2,
            "gpus_per_node": 1,
            "device": "a100-sxm-80gb",
            "other_nodes": {1: {"device": "v100-sxm-32gb"}},
        },
    }
    job = resolve(load_scenario(mixed))
    one = ["cluster.nodes=1", "cluster.other_nodes=null"]
    usual_s, other_s = (
        resolve(load_scenario(mixed, [*one, f"cluster.device={name}"])).compute_only_s()
        for name in ("a100-sxm-80gb", "v100-sxm-32gb")
    )
    assert job.node_times == {1: pytest.approx(other_s / usual_s, rel=0.01)}
    source = next(p for p in job.provenance() if p.input == "compute on v100-sxm-32gb")
    times = f"{job.node_times[1]:.2f} x a100-sxm-80gb's"
    assert source.source == f"{times}, by roofline of bert-base on both"
    assert uncertainties(job)["compute"].sigma == 0.20
    with pytest.raises(ScenarioError, match="node 1: v100-sxm-32gb has no bf16 matmul rate"):
        load_scenario(mixed, ["workload.precision=bf16"])


def test_other_devices_of_a_measured_step_take_as_long_as_matmuls_say() -> None:
    profile = str(
        Path(__file__).parent.parent.parent / "scenarios" / "testbed" / "transformer-2gbit.json"
    )
    measured = load_scenario(
        {
            "schema": "ddpsim/1",
            "workload": {"profile": profile, "batch_per_rank": 4},
            "cluster": {
                "nodes": 2,
                "gpus_per_node": 1,
                "device": "a100-sxm-80gb",
                "other_nodes": {1: {"device": "v100-sxm-32gb"}},
            },
        }
    )
    usual, other = (device_table(name) for name in ("a100-sxm-80gb", "v100-sxm-32gb"))
    rates = [d["peak_flops"]["fp16"] * d["matmul_efficiency"]["fp16"] for d in (usual, other)]
    job = resolve(measured)
    assert job.node_times == {1: pytest.approx(rates[0] / rates[1])}
    assert uncertainties(job)["compute"].sigma == 0.20


def test_a_log_may_stand_beside_another_device_but_not_another_link(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("size_bytes,time_us,nodes,gpus_per_node\n1024,80,2,1\n268435456,14000,2,1\n")

    def network(**other: Any) -> Network:
        return resolve(
            load_scenario(
                {
                    "schema": "ddpsim/1",
                    "workload": {"model": "resnet50", "batch_per_rank": 32},
                    "cluster": {
                        "nodes": 2,
                        "gpus_per_node": 1,
                        "device": "a100-sxm-80gb",
                        "all_reduce": str(log),
                        "other_nodes": {1: other},
                    },
                }
            )
        ).network

    assert network(device="v100-sxm-32gb").bottleneck
    with pytest.raises(ScenarioError, match="drop one of the two"):
        network(inter_node={"bandwidth": "1 Gbit/s"})


def test_stalls_cost_what_they_take() -> None:
    """Every rank in every iteration: exactly their duration."""
    plain, stalled = predict(), predict("run.stalls={probability: 1, duration: 7 ms}")
    longer = stalled.iteration_time_s.mean - plain.iteration_time_s.mean
    assert longer == pytest.approx(7e-3, abs=1e-6)
    (stalls,) = stalled.stragglers
    assert stalls.kind == "stalls"
    assert stalls.cost_s == pytest.approx(7e-3, abs=1e-6)
    assert stalled.breakdown_s.other > plain.breakdown_s.other + 6.9e-3


def test_rare_stalls_come_with_the_seed() -> None:
    rare = "run.stalls={probability: 0.2, duration: 50 ms}"
    assert predict(rare) == predict(rare)
    times = {predict(rare, f"run.seed={seed}").iteration_time_s.mean for seed in range(4)}
    assert len(times) > 1


def test_traffic_of_others_and_of_loaders_slows_the_network() -> None:
    slow = "cluster.inter_node={bandwidth: 10 Gbit/s, nics_per_node: 1}"
    plain = predict(slow)
    busy = predict(slow, "cluster.background={rate: 10 Gbit/s}")
    bursts = predict(slow, "cluster.background={rate: 10 Gbit/s, busy: 5 ms, every: 50 ms}")
    assert plain.iteration_time_s.mean < bursts.iteration_time_s.mean < busy.iteration_time_s.mean
    assert busy.comm_time_s == pytest.approx(2 * plain.comm_time_s, rel=0.05)
    loader = "workload.data={rate: 300 samples/s, sample_size: 1 MB}"
    reading = predict(slow, loader)
    assert reading.exposed_comm_s > plain.exposed_comm_s
    assert "traffic" in {straggler.kind for straggler in busy.stragglers}


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


@pytest.mark.parametrize("algorithm", ["auto", "ring", "direct"])
@pytest.mark.parametrize(
    "null",
    [
        "cluster.inter_node.bandwidth=null",
        "cluster.intra_node={bandwidth: null, latency: null, switch_bandwidth: null}",
        "cluster.other_nodes={0: {inter_node: {bandwidth: null, latency: null}}}",
        "cluster.other_nodes={0: {intra_node: {bandwidth: null}}, 1: {inter_node: null}}",
    ],
)
def test_null_states_nothing_of_a_link(null: str, algorithm: str) -> None:
    plain = cluster(machine="dgx-h100", nodes=2, algorithm=algorithm)
    base = {"schema": "ddpsim/1", "workload": WORKLOAD, **plain}
    stated = deepcopy(base)
    if null.startswith("cluster.inter_node"):
        stated["cluster"]["inter_node"] = {"bandwidth": "25 Gbit/s"}
    said, asked = load_scenario(stated, (null,)), load_scenario(base)
    assert Wires.of(said.cluster) == Wires.of(asked.cluster)
    assert resolve(said).network == resolve(asked).network


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


@pytest.mark.parametrize(
    "machine", ["g4dn.12xlarge", "dgx-1-v100", "workstation-2x4090", "dgx-h100"]
)
def test_data_parallel_is_slower_than_ddp(machine: str) -> None:
    """GPU 0's link and memory are named."""
    one = {"schema": "ddpsim/1", "workload": {"model": "vgg16", "batch_per_rank": 32}}
    asked = one | cluster(machine=machine)
    ddp = simulate(load_scenario(asked))
    single = simulate(load_scenario(asked, ("cluster.algorithm=data_parallel",)))
    assert single.iteration_time_s.mean > ddp.iteration_time_s.mean
    assert single.bottleneck.text.startswith("GPU 0's link")
    assert any("GPU 0 alone holds" in warning for warning in single.warnings)


def test_batches_over_the_network_cost_the_same_in_every_step() -> None:
    """However many steps are simulated; bytes of both fit into the step on one link."""
    asked = (
        "cluster.inter_node={bandwidth: 10 Gbit/s, nics_per_node: 1}",
        "workload.batch_per_rank=4",
        "workload.data={rate: 5000 samples/s, sample_size: 5 MB}",
    )
    few, many = (predict(*asked, f"run.iterations={n}").iteration_time_s for n in (3, 30))
    assert few.mean == pytest.approx(many.mean, rel=1e-6)
    assert many.mean >= 2 * 4 * 5e6 / 1.25e9 + predict(*asked[:2]).comm_time_s * 0.99


def test_a_parameter_servers_link_is_named() -> None:
    single = predict("cluster.algorithm=parameter_server", "cluster.inter_node={bandwidth: 1 GB/s}")
    assert single.bottleneck.text.startswith("the parameter server's link")
    many = predict(
        "cluster.algorithm=parameter_server",
        "cluster.servers=2",
        "cluster.inter_node={bandwidth: 1 GB/s}",
    )
    assert many.iteration_time_s.mean < single.iteration_time_s.mean


# --- commands -----------------------------------------------------------------------------------


def test_a_partly_stated_network_keeps_the_rest_of_the_machines() -> None:
    whole = cluster(machine="p4d.24xlarge", nodes=2)
    same = cluster(machine="p4d", nodes=2, inter_node={"bandwidth": "100 Gbit/s"})
    half = cluster(machine="p4d", nodes=2, inter_node={"oversubscription": 2})
    at = [time_in(load_cluster(asked), 2**30) for asked in (whole, same, half)]
    assert at[0] == at[1]
    assert at[2] == pytest.approx(2 * at[0], rel=0.1)
    alone = cluster(device="a100", gpus_per_node=8, nodes=2, inter_node={"bandwidth": "25 Gbit/s"})
    link = load_cluster(alone).cluster.link("inter_node")
    assert link is not None
    assert link.nics_per_node == 1  # type: ignore[union-attr]


def test_another_transport_needs_a_latency() -> None:
    with pytest.raises(ScenarioError, match="no preset says the latency of tcp here"):
        load_cluster(cluster(machine="dgx-h100", nodes=2, inter_node={"transport": "tcp"}))


MACHINES = ["dgx-a100", "dgx-h100", "dgx-1-v100", "p4d", "g4dn", "dgx-b200"]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("nodes", [1, 2, 4, 64])
def test_larger_messages_take_longer(machine: str, nodes: int) -> None:
    """But where the tuner changes its choice: there it may err, by less than half."""
    scenario = load_cluster(cluster(machine=machine, nodes=nodes))
    rows = collective_table(scenario, "all_reduce", parse_sizes("1K..1G")).rows
    for small, large in itertools.pairwise(rows):
        assert large.time_s > (0.999 if small.choice == large.choice else 0.6) * small.time_s


def test_sizes_are_read_as_nccl_tests_writes_them() -> None:
    assert parse_sizes("8..64") == (8, 16, 32, 64)
    assert parse_sizes("1M..5M") == (MIB, 2 * MIB, 4 * MIB)
    assert parse_sizes("25 MiB,1K,4 kB") == (1024, 4000, 25 * MIB)
    for wrong in ("", "8..4", "x", "1..2", "3 furlongs"):
        with pytest.raises(ValueError, match=r"\S"):
            parse_sizes(wrong)


def test_the_table_has_nccl_tests_columns(cli: Callable[..., Any]) -> None:
    shown = cli("collective", "--machine", "dgx-a100", "--sizes", "1M..4M").out.splitlines()
    assert shown[0] == "# all_reduce, 8 ranks (1 x 8), in place"
    assert shown[2].split()[:8] == ["#", "size", "count", "type", "redop", "time", "algbw", "busbw"]
    size, count, kind, redop, time_us, algbw, busbw, *choice = shown[4].split()
    assert (size, count, kind, redop) == ("1048576", "262144", "float", "sum")
    assert float(algbw) == pytest.approx(MIB / float(time_us) / 1e3, abs=0.01)
    assert float(busbw) == pytest.approx(1.75 * float(algbw), abs=0.02)
    assert choice == ["ring", "LL"]


def test_a_log_stands_beside_its_prediction(cli: Callable[..., Any], tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("size_bytes,time_us,nodes,gpus_per_node\n1048576,80,1,8\n4194304,140,1,8\n")
    table = json.loads(
        cli("collective", "--machine", "dgx-a100", "--against", str(log), "--json").out
    )
    assert table["schema"] == "ddpsim.collective/1"
    assert [row["measured_s"] for row in table["rows"]] == pytest.approx([80e-6, 140e-6])
    for row in table["rows"]:
        assert row["error"] == pytest.approx(row["time_s"] / row["measured_s"] - 1)
    shown = cli("collective", "--machine", "dgx-a100", "--against", str(log)).out
    assert "2 sizes, median error" in shown


def test_a_log_without_the_sizes_asked_for_is_refused(
    cli: Callable[..., Any], tmp_path: Path
) -> None:
    log = tmp_path / "log.csv"
    log.write_text("size_bytes,time_us,nodes,gpus_per_node\n1048576,80,1,8\n4194304,140,1,8\n")
    asked = ("collective", "--machine", "dgx-a100", "--against", str(log), "--sizes", "3M")
    outcome = cli(*asked)
    assert outcome.code == 2
    said = " ".join(outcome.err.split())
    assert "holds none of the sizes asked for, but 1.049 MB to 4.194 MB" in said


def test_a_log_of_other_ranks_is_refused(cli: Callable[..., Any], tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("size_bytes,time_us,nodes,gpus_per_node\n1048576,80,1,4\n")
    outcome = cli("collective", "--machine", "dgx-a100", "--against", str(log))
    assert outcome.code == 2
    assert "was measured on 1 x 4 ranks, but the cluster has 1 x 8" in " ".join(outcome.err.split())


def test_a_log_of_other_gpus_says_so(tmp_path: Path) -> None:
    """As a cluster profile of another device does; a log that names none may be of any."""
    log = tmp_path / "a100.txt"

    def network(gpu: str, device: str) -> Network:
        named = nccl_log(root=True, nodes=1, gpus=8).replace("] GPU", f"] {gpu}")
        log.write_text(named)
        asked = BASE | cluster(device=device, gpus_per_node=8, all_reduce=str(log))
        return resolve(load_scenario(asked | {"run": {"allow_extrapolation": True}})).network

    name = "NVIDIA A100-SXM4-80GB"
    (said,) = network(name, "h100-sxm-80gb").warnings
    assert said.endswith(f"was measured on {name}, and its times are taken for h100-sxm-80gb's")
    assert network(name, "h100-sxm-80gb").uncertainty == OTHER_GPUS
    for gpu, device in ((name, "a100-sxm-80gb"), ("GPU", "h100-sxm-80gb")):
        assert network(gpu, device).warnings == ()
        assert network(gpu, device).uncertainty == LOG


def test_a_row_of_a_log_that_is_left_out_is_told(tmp_path: Path) -> None:
    log = tmp_path / "cut.txt"
    text = nccl_log(root=True, nodes=1, gpus=8)
    log.write_text(text[: text.index("  67108864") + 40])
    asked = BASE | cluster(device="a100", gpus_per_node=8, all_reduce=str(log))
    found = resolve(load_scenario(asked | {"run": {"allow_extrapolation": True}})).network.warnings
    assert [
        said for said in found if said.endswith("1 row is left out, broken or cut off: line 17")
    ]


def test_fewer_gpus_than_the_machine_has_are_allowed() -> None:
    assert load_cluster(cluster(machine="dgx-h100", gpus_per_node=4)).cluster.world_size == 4
    with pytest.raises(ScenarioError, match="16 is more than the 8 GPUs that dgx-h100 has"):
        load_cluster(cluster(machine="dgx-h100", gpus_per_node=16))
    with pytest.raises(InputError, match="more than the 8 GPUs"):
        load_cluster(cluster(machine="dgx-h100")).cluster.resized(2, 9)


@pytest.mark.parametrize(
    "own", [{"bandwidth": "10 Gbit/s"}, {"nics_per_node": 2}, {"oversubscription": 4}]
)
def test_what_one_nodes_network_may_say_counts(own: dict[str, Any]) -> None:
    asked = {"machine": "dgx-h100", "nodes": 2, "algorithm": "ring"}
    assert time_of(**asked, other_nodes={1: {"inter_node": own}}) > 1.5 * time_of(**asked)


def test_an_oversubscribed_leaf_is_none_within_it() -> None:
    """Where no node leaves its leaf switch, none is slower for the uplinks."""
    leaf = {"nodes_per_leaf": 2, "oversubscription": 4}
    asked = {"machine": "dgx-h100", "nodes": 2, "algorithm": "ring", "inter_node": leaf}
    one = {1: {"inter_node": {"oversubscription": 8}}}
    assert time_of(**asked, other_nodes=one) == time_of(**asked)


def test_a_bare_cluster_file_is_enough(cli: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("cluster: {machine: dgx-h100, nodes: 2}\n")
    shown = cli("collective", "--cluster", str(file), "--sizes", "64M").out
    assert "nvls Simple" in shown
    drawn = cli("explain", "cluster", str(file)).out
    assert drawn.startswith("dgx-h100: 2 nodes x 8 h100-sxm-80gb\n")
    assert "node 1: ranks 8 9 10 11 12 13 14 15" in drawn
    assert "8 x 50.00 GB/s a node (rdma)" in drawn


def test_the_tuners_table_can_be_seen(cli: Callable[..., Any]) -> None:
    shown = cli("collective", "--machine", "dgx-h100", "--tuning", "--sizes", "1M,64M").out
    assert shown.splitlines()[0].split() == ["LL", "LL128", "Simple"]
    assert "nvls  Simple" in shown


def test_a_log_or_gloo_has_no_tuner(cli: Callable[..., Any]) -> None:
    outcome = cli("collective", "--cluster", "scenarios/gloo-cpu.yaml", "--tuning")
    assert outcome.code == 2
    assert "NCCL's tuner chooses where" in " ".join(outcome.err.split())


def test_an_all_reduce_is_priced_as_the_step_prices_it() -> None:
    scenario = load_scenario(BASE)
    job = resolve(scenario)
    sent = sorted(set(job.program.sent_bytes("all_reduce")))
    rows = collective_table(scenario, "all_reduce", sent).rows
    for size, row in zip(sent, rows, strict=True):
        transfer = job.network.cost.transfer("all_reduce", size)
        assert row.time_s == pytest.approx(duration_ns(transfer) * 1e-9)


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


def test_the_bottleneck_is_what_would_shorten_messages() -> None:
    """NVLS loads the links inside a node less than a ring does."""

    def of(**links: object) -> str:
        cluster = {"nodes": 16, "gpus_per_node": 8, "device": "h100-sxm-80gb", **links}
        scenario = {"schema": "ddpsim/1", "workload": WORKLOAD, "cluster": cluster}
        return resolve(load_scenario(scenario)).network.bottleneck

    network = {"bandwidth": "100 Gbit/s", "latency": "20 us"}
    assert "the inter-node network (400.0 GB/s a node" in of()
    assert "network (12.50 GB/s a node, 20.00 us a hop)" in of(inter_node=network)
    assert "the intra-node links (365.0 GB/s a GPU" in of(algorithm="ring")


def test_links_that_leave_out_a_switch_say_so() -> None:
    """The device's usual machine sums in its switch, and stated links are another machine's."""

    def said(intra: dict[str, str] | None) -> str:
        cluster = {"nodes": 1, "gpus_per_node": 8, "device": "h100-sxm-80gb", "intra_node": intra}
        scenario = {"schema": "ddpsim/1", "workload": WORKLOAD, "cluster": cluster}
        network = resolve(load_scenario(scenario)).network
        return next(p.source for p in network.provenance if p.input == "cluster.intra_node")

    assert "no NVLS without switch_bandwidth" in said({"bandwidth": "365 GB/s"})
    assert "no NVLS" not in said({"bandwidth": "365 GB/s", "switch_bandwidth": "480 GB/s"})
    assert "no NVLS" not in said(None)


def test_links_inside_nodes_alone_tell_nothing_of_several() -> None:
    """However slow they are: which links set the pace is as doubtful as the links."""

    def sigma(nodes: int, **keys: Any) -> float:
        scenario = {"schema": "ddpsim/1", "workload": WORKLOAD, "cluster": {"nodes": nodes, **keys}}
        network = resolve(load_scenario(scenario)).network
        assert network.uncertainty
        return network.uncertainty.sigma

    slow = {"device": "t4", "gpus_per_node": 4, "intra_node": {"bandwidth": "6 GB/s"}}
    stated = {"inter_node": {"bandwidth": "50 Gbit/s"}, "algorithm": "ring"}
    fast = {"device": "h100-sxm-80gb", "gpus_per_node": 8, **stated}
    assert [sigma(nodes, **slow) for nodes in (1, 2, 16)] == [0.10, 0.90, 0.90]
    assert [sigma(nodes, **slow, **stated) for nodes in (1, 2)] == [0.10, 0.10]
    assert [sigma(nodes, **fast) for nodes in (1, 2)] == [0.25, 0.25]
    assert [sigma(nodes, machine="dgx-h100") for nodes in (1, 2, 32, 128)] == [0.25, *[0.37] * 3]


@pytest.mark.parametrize("gpus", [2, 8])
def test_a_broadcast_passes_the_message_once_round_the_ring(gpus: int) -> None:
    """Of links under LL half is left for the message; nobody is told of more than a link has."""
    links = {"intra_node": {"bandwidth": "10 GB/s", "latency": "10 us"}, "gpus_per_node": gpus}

    def time_s(**keys: Any) -> float:
        asked = cluster(machine=None, device="v100-sxm-32gb", algorithm="ring", **links, **keys)
        return collective_table(load_cluster(asked), "broadcast", [100_000_000]).rows[0].time_s

    assert time_s(protocol="Simple") == pytest.approx((gpus - 1) * 10e-6 + 10e-3)
    assert time_s(protocol="LL") == pytest.approx((gpus - 1) * 10e-6 + 20e-3)


@pytest.mark.parametrize("nodes", [1, 2, 16])
@pytest.mark.parametrize(
    "algorithm", ["auto", "ring", "tree", "direct", "halving_doubling", "parameter_server"]
)
def test_no_broadcast_is_faster_than_its_slowest_link(algorithm: str, nodes: int) -> None:
    scenario = load_cluster(cluster(machine="dgx-1-v100", nodes=nodes, algorithm=algorithm))
    slowest = min(link.bandwidth_bytes_per_s for link in Wires.of(scenario.cluster).ring)
    (row,) = collective_table(scenario, "broadcast", [2**30]).rows
    assert row.busbw_bytes_per_s == row.algbw_bytes_per_s < slowest
    network = with_sent_sizes(build_network(scenario), [4], [2**30])
    (told,) = (entry for entry in network.provenance if entry.input == "broadcast time")
    assert ("once round a ring" in told.source) == (algorithm != "parameter_server")
    assert told.trust == "assumed"
    negligible = with_sent_sizes(build_network(scenario), [2**30], [4])
    assert not any(entry.input == "broadcast time" for entry in negligible.provenance)
