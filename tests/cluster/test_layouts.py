"""NVLink domains and replicas: the same cluster, written as the ranks that send to each other."""

from __future__ import annotations

from typing import Any

import pytest
from clusters.collectives import MIB
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ddpsim.cluster.build import build_network
from ddpsim.cluster.describe import describe_cluster
from ddpsim.cluster.layouts import joined, with_replicas
from ddpsim.cluster.process_groups import cost_of
from ddpsim.cluster.transfers import duration_ns
from ddpsim.errors import ScenarioError
from ddpsim.planning.capacity_plan.plan import plan_capacity
from ddpsim.prediction.api import load_scenario, predict
from ddpsim.scenario.options.replica import Replica
from ddpsim.scenario.schema import Scenario

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
SIZES = (4, 64 * 1024, 25 * MIB, 1024 * MIB)


@pytest.fixture
def part(tmp_path: Any) -> dict[str, Any]:
    """What one GPU of a replica does."""
    rows = "name,shape,dtype\nblock.weight,4096x4096,float32\nhead.weight,4096x8192,float32\n"
    (tmp_path / "part.csv").write_text(rows)
    step = {"parameters": str(tmp_path / "part.csv"), "step_time": "90 ms", "batch_per_rank": 2}
    return {"schema": "ddpsim/1", "workload": step}


def asked(strategy: str = "ddp", **cluster: Any) -> Scenario:
    workload = {"model": "resnet18", "batch_per_rank": 8}
    ddp = {"strategy": strategy}
    return load_scenario(
        {"schema": "ddpsim/1", "workload": workload, "ddp": ddp, "cluster": cluster}
    )


def times_ns(scenario: Scenario, group: Any = "world") -> list[int]:
    cost = cost_of(build_network(scenario).cost, group)
    return [duration_ns(cost.transfer(op, size)) for op in OPERATIONS for size in SIZES]


def test_a_rack_is_one_node_to_nccl() -> None:
    """On a published rack of 72 GB200: 758 to 847 GB/s from 2 GiB on; on 2 x 4 of it 811."""
    rack = {"machine": "gb200-nvl72", "nodes": 18}
    alone = {"device": "gb200", "nodes": 1, "gpus_per_node": 72}
    assert times_ns(asked(**rack)) == times_ns(asked(**alone))
    for nodes, size, low, high in (
        (18, 2**31, 758, 774),
        (18, 2**33, 835, 847),
        (2, 2**33, 811, 811),
    ):
        scenario = asked(**rack | {"nodes": nodes, "nccl": "2.25"})
        ranks, time_ns = scenario.cluster.world_size, times_ns_of(scenario, size)
        busbw = 2 * (ranks - 1) / ranks * size / time_ns
        assert 0.95 * low <= busbw <= 1.05 * high


def times_ns_of(scenario: Scenario, size: int) -> int:
    return duration_ns(build_network(scenario).plain_cost.transfer("all_reduce", size))


@settings(max_examples=10)
@given(st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 2, 4]), st.sampled_from([1, 4]))
def test_a_domain_is_a_node_with_the_nics_of_its_nodes(
    domains: int, each: int, gpus: int, nics: int
) -> None:
    inter = {"bandwidth": "50 GB/s", "nics_per_node": nics, "transport": "rdma"}
    wide = inter | {"nics_per_node": each * nics}
    own = {"device": "b200", "inter_node": inter}
    stated = asked(**own, nodes=domains * each, gpus_per_node=gpus, nvlink_domain=each * gpus)
    merged = asked(device="b200", inter_node=wide, nodes=domains, gpus_per_node=each * gpus)
    if domains * each * gpus > 1:
        assert times_ns(stated) == times_ns(merged)


def test_the_last_domain_has_what_is_left() -> None:
    cluster = joined(asked(machine="gb300-nvl72", nodes=20))
    assert cluster.gpus_by_node == (72, 8)
    assert times_ns_of(asked(machine="gb300-nvl72", nodes=20), 2**30) > times_ns_of(
        asked(machine="gb300-nvl72", nodes=36), 2**30
    )


@pytest.mark.parametrize("keys", [{"nccl": "2.19"}, {"nccl_env": {"NCCL_MNNVL_ENABLE": 0}}])
def test_nodes_are_not_joined_where_nccl_does_not(keys: dict[str, Any]) -> None:
    scenario = asked(machine="gb200-nvl72", nodes=4, **keys)
    assert joined(scenario) is scenario.cluster
    assert times_ns_of(scenario, 2**30) > times_ns_of(asked(machine="gb200-nvl72", nodes=4), 2**30)


def test_groups_of_a_machine_share_its_nics_once() -> None:
    """Each GPU of a DGX H100 has a NIC of its own, however its links are written."""
    named, stated = (
        asked("hsdp", nodes=4, **keys)
        for keys in ({"machine": "dgx-h100"}, {"device": "h100", "gpus_per_node": 8})
    )
    assert times_ns(named, "across_nodes") == times_ns(stated, "across_nodes")
    rack = asked("hsdp", machine="gb200-nvl72", nodes=18)
    alone = asked("fully_shard", device="gb200", nodes=1, gpus_per_node=18)
    assert times_ns(rack, "across_nodes") == times_ns(alone)


def test_one_gpu_a_replica_is_no_replica(part: dict[str, Any]) -> None:
    cluster = {"machine": "dgx-a100", "nodes": 2}
    with_it, without = (
        predict(load_scenario(part | {"cluster": cluster | replica}))
        for replica in ({"replica": {"gpus": 1}}, {})
    )
    assert with_it == without


@settings(max_examples=12)
@example(3, (2, 4, 8, 1), False)
@given(
    st.integers(1, 4),
    st.sampled_from([(1, 8, 8, 1), (2, 4, 8, 1), (8, 1, 8, 1), (16, 1, 8, 2), (32, 1, 8, 4)]),
    st.booleans(),
)
def test_replicas_are_the_ranks_that_send_to_each_other(
    copies: int, layout: tuple[int, int, int, int], named: bool
) -> None:
    """8 NICs of 8 GPUs: a group has as many of them as it has ranks on a node."""
    gpus, ranks, per_node, spanned = layout
    own = {"machine": "dgx-h100"} if named else {"device": "h100", "gpus_per_node": per_node}
    scenario = asked(**own, nodes=copies * spanned)
    cluster = scenario.cluster.model_copy(update={"replica": Replica(gpus=gpus)})
    found = with_replicas(scenario.model_copy(update={"cluster": cluster}))
    plain = asked(machine="dgx-h100", nodes=copies, gpus_per_node=ranks)
    assert found.cluster.world_size == cluster.world_size
    assert (found.cluster.nodes, found.cluster.gpus_per_node) == (copies, ranks)
    if found.cluster.world_size > 1:
        assert times_ns(found) == times_ns(plain)


def test_replicas_across_nodes_have_whole_nics(part: dict[str, Any]) -> None:
    replica = {"gpus": 4, "placement": "across_nodes"}
    scenario = load_scenario(
        part | {"cluster": {"machine": "dgx-h100", "nodes": 8, "replica": replica}}
    )
    assert times_ns(scenario) == times_ns(asked(machine="dgx-h100", nodes=2))


def test_the_answer_says_what_is_inside_of_a_replica(part: dict[str, Any]) -> None:
    """And a plan counts all of its GPUs."""
    cluster = {"machine": "dgx-h100", "nodes": 4, "replica": {"gpus": 8}}
    scenario = load_scenario(part | {"cluster": cluster})
    result = predict(scenario)
    assert (result.world_size, result.gpus, result.training.global_batch) == (4, 32, 8)  # type: ignore[union-attr]
    assert "what its replica's GPUs send each other is not modelled" in result.warnings[0]
    assert result.to_dict()["gpus_per_rank"] == 8
    assert "4 replicas of 8 GPUs" in describe_cluster(scenario)
    plan = plan_capacity(scenario, "1M samples", max_gpus=32)
    assert {size.gpus: size.global_batch for size in plan.sizes} == {8: 2, 16: 4, 32: 8}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"replica": {"gpus": 3}}, "cluster.replica.gpus: 3 GPUs are neither a part of a node's 8"),
        (
            {"replica": {"gpus": 3, "placement": "across_nodes"}},
            "cluster.replica.gpus: 3 does not divide the 4 nodes",
        ),
        ({"replica": {"gpus": 8}, "weak_links": {1: 0.5}}, "cluster.weak_links: is of all ranks"),
        ({"replica": {"gpus": 8}}, "workload.model: is a step of the whole model"),
        (
            {"replica": {"gpus": 16}, "inter_node": {"nodes_per_leaf": 2}},
            "a replica on several nodes is not modelled with inter_node.nodes_per_leaf",
        ),
        ({"nvlink_domain": 12}, "cluster.nvlink_domain: 12 GPUs are no whole nodes of 8"),
        (
            {"nvlink_domain": 16, "other_nodes": {1: {"gpus_per_node": 4}}},
            "node 1 is in an NVLink domain of 2 nodes",
        ),
        (
            {"nvlink_domain": 16, "inter_node": {"nodes_per_leaf": 3}},
            "cluster.inter_node.nodes_per_leaf: 3 nodes are no whole NVLink domains of 2",
        ),
    ],
)
def test_what_cannot_be_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError) as refused:
        asked(machine="dgx-h100", nodes=4, **keys)
    assert message in str(refused.value)
