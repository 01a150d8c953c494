"""Reduce-scatter and all-gather: the two turns of a ring's all-reduce, and what has no price."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from clusters.collectives import MIB, cluster
from clusters.profiles import both, profile
from hypothesis import example, given, settings
from hypothesis import strategies as st
from logs.nccl_log_writer import nccl_log
from measured.made_measurements import TWO_HDR, nccl_model

from ddpsim.cluster.build import build_network, with_sent_sizes
from ddpsim.cluster.cost import ScheduledCost
from ddpsim.cluster.fitted.network import network_from_profile
from ddpsim.cluster.logs import LOG
from ddpsim.cluster.nccl.cost import _SHARD_HOPS, NcclCost
from ddpsim.cluster.nccl.graph import Graph
from ddpsim.cluster.nccl.tuner import choose, estimates
from ddpsim.cluster.topology.paths import Link, Paths
from ddpsim.cluster.transfers import Operation, RingTransfer, duration_ns
from ddpsim.cluster.what_if_links import widened
from ddpsim.errors import InputError, ScenarioError
from ddpsim.importers.profiles.cluster import ClusterProfile
from ddpsim.prediction.collective_times import collective_table, load_cluster
from ddpsim.scenario.options.fully_shard import FullyShard, MixedPrecision

HALVES: tuple[Operation, ...] = ("reduce_scatter", "all_gather")
RING: dict[str, Any] = {"device": "a100-sxm-80gb", "gpus_per_node": 8}
NVLS: dict[str, Any] = {"device": "h100-sxm-80gb", "gpus_per_node": 8}
DEVICES = {"nccl": "a100-sxm-80gb", "gloo": "cpu-core"}
CORES: dict[str, Any] = {"device": "cpu-core", "gpus_per_node": 8}


def cost_of(backend: str = "nccl", **keys: Any) -> Any:
    scenario = load_cluster(cluster(**keys) | {"ddp": {"backend": backend}})
    return build_network(scenario).plain_cost


def fitted_cost(nodes: int, gpus: int, **changes: Any) -> Any:
    """What a profile says of so many ranks."""
    changes["valid"] = profile()["valid"] | {"layouts": [[nodes, gpus]]}
    read = ClusterProfile.model_validate(profile(**changes))
    scenario = load_cluster(
        cluster(device=DEVICES[read.backend], nodes=nodes, gpus_per_node=gpus)
        | {"ddp": {"backend": read.backend}}
    )
    return network_from_profile(scenario, read).cost


def times_ns(cost: Any, size: int = 64 * MIB) -> Iterator[int]:
    for operation in ("all_reduce", *HALVES):
        yield duration_ns(cost.transfer(operation, size))


@settings(max_examples=40)
@example(2, 4, 311_745)  # cut as a larger message is
@given(st.integers(1, 4), st.sampled_from([2, 4, 8]), st.integers(1, 2**30))
def test_nccl_sends_one_turn_around_the_all_reduces_ring(nodes: int, gpus: int, size: int) -> None:
    """In the protocol that its tuner takes for the operation, whatever the all-reduce takes.

    Steps inside nodes are longer where there are several, as sweeps show.
    """
    cost = cost_of(**RING | {"nodes": nodes, "gpus_per_node": gpus})
    assert isinstance(cost, NcclCost)
    for operation in HALVES:
        choice, sent_bytes, cuts = cost.search(operation).as_sent(size)
        half = cost.transfer(operation, size)
        whole = cost.sent(choice, sent_bytes, cuts=cuts)
        assert choice.algorithm == "ring"
        assert isinstance(half, RingTransfer)
        assert isinstance(whole, RingTransfer)
        assert half.busy_ns == whole.busy_ns
        many = _SHARD_HOPS[choice.protocol] if nodes > 1 else 1.0
        for i, (longer, own) in enumerate(zip(half.latency_ns, whole.latency_ns, strict=True)):
            is_inside = i % gpus > 0 or nodes == 1
            assert longer == pytest.approx((many if is_inside else 1.0) * own, abs=2)
        assert (half.steps, half.ranks) == (nodes * gpus - 1, whole.ranks)


ALONE: dict[str, Any] = RING | {"gpus_per_node": 1, "inter_node": {"bandwidth": "100 Gbit/s"}}


def test_nodes_of_one_gpu_have_pat() -> None:
    """8 us, log2 N hops of 14 us / 3.5 and 2.8 us a rank (nccl v2.30 src/graph/tuning.cc)."""
    cost = cost_of(**ALONE | {"nodes": 64, "inter_node": {"bandwidth": "100 Gbit/s"}})
    row = next(row for row in estimates(cost.graph, "all_gather") if row.algorithm == "pat")
    assert (row.protocol, row.latency_us) == ("Simple", pytest.approx(8 + 6 * 14 / 3.5 + 64 * 2.8))
    for operation in HALVES:
        assert cost.choice(MIB, operation).algorithm == "pat"
        assert cost.choice(1024 * MIB, operation).algorithm == "ring"
    rate = cost.paths.least_network.bandwidth_bytes_per_s
    expected_s = row.latency_us * 1e-6 + MIB / (0.75 * rate)
    assert duration_ns(cost.transfer("all_gather", MIB)) == pytest.approx(expected_s * 1e9, abs=2)
    slower = cost.stretched(2.0).transfer("all_gather", MIB)
    assert duration_ns(slower) == pytest.approx(2e9 * expected_s, abs=2)


@pytest.mark.parametrize(
    "changes",
    [
        {"nccl": "2.22"},
        {"nccl_env": {"NCCL_PAT_ENABLE": 0}},
        {"nccl_env": {"NCCL_ALGO": "^pat"}},
        {"algorithm": "ring"},
        {"gpus_per_node": 2},
    ],
)
def test_without_pat_rings_are_taken(changes: dict[str, Any]) -> None:
    cost = cost_of(**ALONE | {"nodes": 64} | changes)
    assert {cost.choice(MIB, operation).algorithm for operation in HALVES} == {"ring"}


def test_averages_go_round_rings_alone() -> None:
    """updateCollCostTable: trees of reduce-scatters, and switches, do not scale."""
    scenario = load_cluster(cluster(**ALONE | {"nodes": 64}) | {"ddp": {"strategy": "fully_shard"}})
    cost: Any = build_network(scenario).plain_cost
    assert cost.choice(MIB, "reduce_scatter").algorithm == "ring"
    assert cost.choice(MIB, "all_gather").algorithm == "pat"
    half = {"fully_shard": FullyShard(mixed_precision=MixedPrecision(param="float16"))}
    summed = scenario.model_copy(update={"ddp": scenario.ddp.model_copy(update=half)})
    apart: Any = build_network(summed).plain_cost
    assert apart.choice(MIB, "reduce_scatter").algorithm == "pat"


@pytest.mark.parametrize(
    ("version", "part"),
    [("2.22", 5 / 6), ("2.26", 1.0), ("2.27", 7 / 8), ("2.30", 0.85 * (7 / 8) ** 2)],
)
def test_a_switch_gathers_in_one_node(version: str, part: float) -> None:
    """8 channels of 40 GB/s, of which each version's tuner counts another part."""
    cost = cost_of(**NVLS | {"nccl": version, "algorithm": "nvls"})
    row = next(row for row in estimates(cost.graph, "all_gather") if row.algorithm == "nvls")
    assert row.bandwidth_gb_per_s == pytest.approx(8 * 40 * part)
    choice = cost.choice(MIB, "all_gather")
    assert choice.algorithm == "nvls"
    rate = cost.paths.switch.bandwidth_bytes_per_s
    times_s = [duration_ns(cost.transfer("all_gather", n * MIB)) * 1e-9 for n in (1, 2)]
    assert times_s[1] - times_s[0] == pytest.approx(7 / 8 * MIB / rate, rel=1e-3)


def test_a_switch_gathers_since_2_19_and_over_no_network() -> None:
    for changes in ({"nccl": "2.18"}, {"nodes": 2}):
        cost = cost_of(**NVLS | {"algorithm": "nvls"} | changes)
        assert cost.choice(MIB, "all_gather").algorithm == "ring"


def test_the_tuner_counts_one_turn_and_no_trees() -> None:
    """7 steps of 3.4 us after 8.4 us (NCCL's table), and n / (n-1) of the bus bandwidth."""
    graph = Graph("ampere", 1, 8, 240.0)
    of_all = {row[:2]: row for row in estimates(graph)}
    for operation in HALVES:
        rows = estimates(graph, operation)
        assert {row.algorithm for row in rows} == {"ring"}
        simple = rows[-1]
        assert simple.protocol == "Simple"
        assert simple.latency_us == pytest.approx(8.4 + 7 * 3.4)
        assert simple.bandwidth_gb_per_s == pytest.approx(240 * 8 / 7)
        twice = of_all["ring", "Simple"]
        assert simple.bandwidth_gb_per_s == pytest.approx(2 * twice.bandwidth_gb_per_s)
        assert choose(graph, 2**30, operation=operation).protocol == "Simple"


def test_an_algorithm_that_is_asked_for_is_that_of_all_reduces() -> None:
    """NCCL has no tree for the others."""
    cost = cost_of(**RING | {"nodes": 2, "algorithm": "tree"})
    assert cost.choice(64 * MIB).algorithm == "tree"
    assert isinstance(cost.transfer("all_gather", 64 * MIB), RingTransfer)


def test_gloo_reduces_all_of_what_it_scatters_and_gathers_in_halves() -> None:
    """An all-gather of 4 ranks: six half shards of 1 ms, two in flight, and the latency once."""
    cost = ScheduledCost("gloo_ring", Paths(4, 1, None, Link(50e-6, 1e9)))
    whole_ns, scattered_ns, gathered_ns = times_ns(cost, 8_000_000)
    assert scattered_ns == whole_ns
    assert gathered_ns == 6 * 1_000_000 + 50_000


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_hierarchical_all_reduce_is_its_two_halves(backend: str) -> None:
    """Of equal links each is half of it: a ring in each node, and one over the nodes."""
    links = {"intra_node": {"bandwidth": "10 GB/s", "latency": "5 us"}}
    links |= {"inter_node": {"bandwidth": "1 GB/s", "latency": "20 us"}}
    device = RING if backend == "nccl" else CORES
    cost = cost_of(backend, **device | links | {"nodes": 4, "algorithm": "hierarchical"})
    whole_ns, scattered_ns, gathered_ns = times_ns(cost)
    assert 2 * scattered_ns == 2 * gathered_ns == whole_ns


def test_other_algorithms_have_no_price() -> None:
    links = {"intra_node": {"bandwidth": "10 GB/s", "latency": "5 us"}}
    cost = cost_of("gloo", **CORES | links | {"algorithm": "halving_doubling"})
    assert cost.operations == {"all_reduce", "broadcast", "reduce"}
    scenario = load_cluster(cluster(**RING | {"algorithm": "direct"}))
    with pytest.raises(InputError, match="all_gather has no price here; leave algorithm out"):
        collective_table(scenario, "all_gather", [MIB])


def test_a_calibrated_ring_is_two_turns() -> None:
    """NCCL gathers and scatters round the same ring; an all-reduce goes round twice."""
    law = nccl_model(TWO_HDR).model_dump()
    whole_ns, *halves_ns = times_ns(fitted_cost(4, 4, backend="nccl", all_reduce=law))
    assert halves_ns[0] == halves_ns[1]
    assert 0.45 < halves_ns[0] / whole_ns < 0.65


def test_a_fitted_gloo_gathers_for_half_of_what_it_reduces() -> None:
    """Without latency: (n-1)/n of the bytes on the wire, twice for an all-reduce."""
    whole_ns, scattered_ns, gathered_ns = times_ns(fitted_cost(4, 1))
    assert scattered_ns == whole_ns == pytest.approx(2 * gathered_ns, rel=1e-5)
    assert gathered_ns == pytest.approx(64 * MIB * 3 / 4 / (0.94 * 125e6) * 1e9, rel=1e-6)


def test_stated_links_of_two_gloo_ranks_gather_in_turn() -> None:
    """2.5 half shards of 2 ms; the word that it can receive takes the latency alone at best."""
    cost = ScheduledCost("gloo_ring", Paths(2, 1, None, Link(50e-6, 1e9)))
    *_, gathered_ns = times_ns(cost, 8_000_000)
    assert gathered_ns == 2 * 2_000_000 + 50_000 + (2_000_000 - 50_000) // 2
    *_, small_ns = times_ns(cost, 100_000)
    assert small_ns == 2 * 25_000 + 50_000


def test_two_ranks_of_gloo_gather_in_turn_half_of_the_time() -> None:
    """Three half shards one after the other, or two: 2.5 of them, and copies where known."""
    half_ns = 64 * MIB / 4 / (0.94 * 125e6) * 1e9
    whole_ns, scattered_ns, gathered_ns = times_ns(fitted_cost(2, 1))
    assert gathered_ns == pytest.approx(2.5 * half_ns, rel=1e-6)
    assert scattered_ns == whole_ns == pytest.approx(4 * half_ns, rel=1e-5)
    copies = {"overheads": {"copy_bytes_per_s": {"value": 10e9}}}
    copied_ns, *others_ns = times_ns(fitted_cost(2, 1, **copies))
    assert copied_ns == whole_ns
    assert others_ns == pytest.approx(
        [scattered_ns + 3 * 64 * MIB / 10, gathered_ns + 2 * 64 * MIB / 10], rel=1e-6
    )


def test_compute_suffers_by_the_bytes_that_a_rank_sends() -> None:
    """An all-gather sends half as much as an all-reduce in half of its time."""
    whole, scattered, gathered = (
        fitted_cost(4, 1, **both(1.0, 1.0, 5e-9)).transfer(operation, 64 * MIB).interference
        for operation in ("all_reduce", *HALVES)
    )
    assert whole.compute > 1
    assert whole.compute == scattered.compute == gathered.compute


@pytest.fixture
def log(tmp_path: Path) -> str:
    path = tmp_path / "log.csv"
    path.write_text("size_bytes,time_us,nodes,gpus_per_node\n1048576,80,1,8\n67108864,800,1,8\n")
    return str(path)


@pytest.mark.parametrize("base", [RING, NVLS])
def test_a_log_is_divided_as_nccl_would(base: dict[str, Any], log: str) -> None:
    """Rings, or a switch that sums: what the device's links tell of each collective, in parts."""
    links_ns, held_ns = (
        [*times_ns(cost_of(**base))],
        [*times_ns(cost_of(**base | {"all_reduce": log}))],
    )
    assert held_ns == pytest.approx([held_ns[0] * ns / links_ns[0] for ns in links_ns], rel=1e-6)
    assert held_ns[0] == 800_000


def test_a_log_of_gloo_gives_parts_of_its_times(log: str) -> None:
    whole_ns, *halves_ns = times_ns(cost_of("gloo", **CORES | {"all_reduce": log}))
    assert halves_ns == [whole_ns, whole_ns / 2]


def test_a_log_beyond_known_links_gives_half_of_its_times(log: str) -> None:
    device = {"peak_flops": {"fp32": "10 TFLOP/s"}, "memory": "16 GB", "memory_bandwidth": "1 TB/s"}
    whole_ns, *halves_ns = times_ns(cost_of(device=device, gpus_per_node=8, all_reduce=log))
    assert halves_ns == [whole_ns / 2] * 2


@pytest.fixture
def shards(tmp_path: Path) -> dict[str, str]:
    """Logs of both, of 1 MiB and 64 MiB on 1 x 8 ranks, all-gathers in half of the time."""
    for operation, part in (("reduce_scatter", 1.0), ("all_gather", 0.5)):
        times = {MIB: 80.0 * part, 64 * MIB: 800.0 * part}
        text = nccl_log(root=True, nodes=1, gpus=8, times=times, operation=operation)
        (tmp_path / operation).write_text(text)
    return {operation: str(tmp_path / operation) for operation in HALVES}


@pytest.mark.parametrize("base", [RING, NVLS])
def test_logs_of_shards_come_first(
    base: dict[str, Any], shards: dict[str, str], log: str, tmp_path: Path
) -> None:
    """For the sizes that they hold; for others what answers without them, and then an error."""
    links, held = cost_of(**base), cost_of(**base | shards)
    assert [*times_ns(held)] == [next(times_ns(links)), 800_000, 400_000]
    (between,) = [duration_ns(held.transfer("all_gather", 8 * MIB))]
    assert between == pytest.approx(1e3 * (40 * 400) ** 0.5, rel=1e-6)
    for operation in HALVES:
        assert held.transfer(operation, 65 * MIB) == links.transfer(operation, 65 * MIB)
        slower = held.stretched(2.0).transfer(operation, 64 * MIB)
        assert duration_ns(slower) == 2 * duration_ns(held.transfer(operation, 64 * MIB))
    both = cost_of(**NVLS | {"all_reduce": log} | shards)
    assert [*times_ns(both)] == [800_000, 800_000, 400_000]
    with pytest.raises(InputError, match=r"64.0 MiB\); measure that size"):
        both.transfer("all_gather", 65 * MIB)


def test_a_step_says_which_shards_are_measured(shards: dict[str, str]) -> None:
    keys = cluster(**NVLS | shards) | {"ddp": {"strategy": "fully_shard"}}
    network = build_network(load_cluster(keys))
    few = [("all_gather", 64 * MIB), ("reduce_scatter", 64 * MIB)]
    told = with_sent_sizes(network, few, ())
    assert told.uncertainty == LOG
    inputs = [entry.input for entry in told.provenance]
    assert {"all-gather time", "reduce-scatter time"} <= {*inputs}
    assert "all-gather algorithm" not in inputs
    large = with_sent_sizes(network, [*few, ("all_gather", 1024 * MIB)], ())
    assert large.uncertainty != LOG
    assert "all-gather algorithm" in [entry.input for entry in large.provenance]
    with pytest.raises(ScenarioError, match="cluster has 16 ranks"):
        build_network(load_cluster(keys | {"cluster": keys["cluster"] | {"nodes": 2}}))
    with pytest.raises(ScenarioError, match="is of all ranks, and says nothing of the groups"):
        build_network(load_cluster(keys | {"ddp": {"strategy": "hsdp"}}))
    assert widened(network, 2.0) is None


def test_the_table_counts_the_bytes_of_one_turn(cli: Callable[..., Any]) -> None:
    """nccl-tests' PERFORMANCE.md: a bus bandwidth of (n-1)/n size over time."""
    for operation in HALVES:
        asked = ("--machine", "dgx-a100", "--op", operation, "--sizes", "64M")
        (row,) = json.loads(cli("collective", *asked, "--json").out)["rows"]
        assert row["choice"] == "ring Simple"
        assert row["busbw_bytes_per_s"] == pytest.approx(7 / 8 * row["algbw_bytes_per_s"])


@pytest.mark.parametrize("algorithm", ["auto", "ring", "parameter_server", "halving_doubling"])
def test_a_reduce_is_a_broadcast_backwards(algorithm: str) -> None:
    cost = cost_of(**RING | {"nodes": 2, "algorithm": algorithm})
    for size in (4, MIB, 256 * MIB):
        assert cost.transfer("reduce", size) == cost.transfer("broadcast", size)


def test_gloos_reduce_scatters_and_gathers_as_its_all_reduce_does() -> None:
    cost = ScheduledCost("gloo_ring", Paths(4, 1, None, Link(50e-6, 1e9)))
    assert cost.transfer("reduce", MIB) == cost.transfer("all_reduce", MIB)
