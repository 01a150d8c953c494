"""Slow ranks, weak links and nodes unlike the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from clusters.collectives import BASE, MIB, simulated, time_of

from ddpsim.cluster.network import Network
from ddpsim.errors import ScenarioError
from ddpsim.prediction.api import load_scenario, simulate
from ddpsim.prediction.resolve import resolve
from ddpsim.prediction.uncertainty import uncertainties
from ddpsim.scenario.catalog import device_table


def test_each_straggler_has_its_price() -> None:
    plain = simulated()
    assert plain.stragglers == ()
    both = simulated("cluster.stragglers={factors: {1: 1.2}}", "cluster.weak_links={2: 0.01}")
    kinds = {straggler.kind: straggler for straggler in both.stragglers}
    assert "rank 1, whose compute takes 1.20 x" in kinds["rank"].text
    assert "the link to rank 2, with 1% of its bandwidth" in kinds["link"].text
    assert all(straggler.cost_s > 0 for straggler in both.stragglers)
    assert [s.cost_s for s in both.stragglers] == sorted(
        (s.cost_s for s in both.stragglers), reverse=True
    )
    alone = simulated("cluster.stragglers={factors: {1: 1.2}}")
    (rank,) = alone.stragglers
    gone = alone.iteration_time_s.mean - plain.iteration_time_s.mean
    assert rank.cost_s == pytest.approx(gone, rel=1e-6)


def test_ranks_drawn_unequal_have_a_price_together() -> None:
    """The slowest alone costs what it is slower than the next one."""
    drawn = simulated("cluster.stragglers={distribution: lognormal, sigma: 0.1}")
    together, slowest = drawn.stragglers
    assert together.text.startswith("ranks of unequal speed (rank ")
    assert slowest.text.split(",")[0] in together.text
    gone = drawn.iteration_time_s.mean - simulated().iteration_time_s.mean
    assert together.cost_s == pytest.approx(gone, rel=1e-6)
    assert together.cost_s > slowest.cost_s > 0


def test_a_node_unlike_the_others_has_its_price() -> None:
    plain = simulated()
    old = simulated("cluster.other_nodes={1: {device: t4, inter_node: {bandwidth: 1 Gbit/s}}}")
    kinds = {straggler.kind: straggler for straggler in old.stragglers}
    assert kinds["rank"].text == "node 1's t4"
    assert kinds["link"].text == "node 1's links"
    assert all(straggler.cost_s > 0 for straggler in old.stragglers)
    assert old.iteration_time_s.mean > 1.5 * plain.iteration_time_s.mean
    assert old.memory_bytes_per_gpu.device < plain.memory_bytes_per_gpu.device
    alike = simulated("cluster.other_nodes={1: {device: v100-sxm-32gb}}")
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


FOUR_AND_TWO = {
    "device": "v100-sxm-16gb",
    "nodes": 2,
    "gpus_per_node": 4,
    "other_nodes": {1: {"gpus_per_node": 2}},
    "inter_node": {"bandwidth": "625 Mbit/s", "latency": "50 us"},
}


def test_a_node_may_have_fewer_gpus() -> None:
    """Six ranks: 2(n-1)/n of the message passes each NIC of a ring, and in a tree all of it."""
    size, rate = 100 * MIB, 625e6 / 8
    asked = FOUR_AND_TWO | {"protocol": "Simple"}
    times = {name: time_of(size, **asked, algorithm=name) for name in ("ring", "tree")}
    tcp_rate = times["ring"] / (2 * 5 / 6 * size / rate)
    assert 1 < tcp_rate < 1.08  # what TCP leaves of the line
    assert times["tree"] == pytest.approx(tcp_rate * size / rate, rel=0.03)
    changes = [f"cluster={FOUR_AND_TWO}", "run.jitter={sigma: 0.05}"]
    result = simulated(*changes, "cluster.stragglers={factors: {5: 1.3}}")
    assert (result.world_size, result.gpus_by_node) == (6, (4, 2))
    assert result.stragglers[0].text.startswith("rank 5, whose compute takes 1.30 x")


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_both_engines_agree_where_a_node_has_fewer_gpus(backend: str) -> None:
    changes = [f"cluster={FOUR_AND_TWO}", "run.jitter={sigma: 0.05}"]
    if backend == "gloo":
        inside = {"bandwidth": "5 GB/s", "latency": "5 us"}
        asked = FOUR_AND_TWO | {"device": "cpu-core", "intra_node": inside}
        changes = [f"cluster={asked}", "ddp.backend=gloo", "run.jitter={sigma: 0.05}"]
    asked = load_scenario(BASE, changes)
    plain, fast = simulate(asked, engine="reference"), simulate(asked)
    assert plain.iteration_time_s == fast.iteration_time_s
    assert plain.collectives == fast.collectives


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("cluster.algorithm=direct", "direct needs nodes with as many GPUs each"),
        ("cluster.other_nodes={1: {gpus_per_node: 8}}", "8 is more than cluster.gpus_per_node"),
        ("cluster.gpus_per_node=3", None),
        ("cluster.other_nodes={0: {gpus_per_node: 2}, 1: {gpus_per_node: 2}}", "no node has so"),
        ("cluster.weak_links={6: 0.5}", "rank 6 does not exist: 2 nodes of 4 \\+ 2 GPUs"),
    ],
)
def test_what_unequal_nodes_cannot_have(change: str, message: str | None) -> None:
    asked = [f"cluster={FOUR_AND_TWO}", change]
    if message is None:
        assert simulated(*asked).world_size == 5
        return
    with pytest.raises(ScenarioError, match=message):
        simulated(*asked)
