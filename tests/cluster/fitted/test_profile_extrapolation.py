"""A profile of NCCL predicts ranks that it was not measured on."""

from __future__ import annotations

import math
from typing import Any

import pytest
from clusters.profiles import fitted, profile
from hypothesis import given, settings
from hypothesis import strategies as st

import ddpsim
from ddpsim.cluster.fitted import extrapolation
from ddpsim.cluster.fitted.carried import CarriedCost
from ddpsim.cluster.fitted.extrapolation import reaching
from ddpsim.cluster.fitted.laws import all_reduce_s
from ddpsim.cluster.fitted.network import network_from_profile
from ddpsim.cluster.network import Network
from ddpsim.cluster.transfers import duration_ns
from ddpsim.importers.profiles.cluster import (
    ClusterProfile,
    Fitted,
    NcclRegime,
    NcclRegimes,
)
from ddpsim.scenario.schema import Scenario


def test_broadcasts_take_what_was_measured_on_these_ranks() -> None:
    """Between sizes as the law goes on; of other ranks the law alone tells."""
    sizes = {2**16: 4e-5, 2**20: 9e-5}
    measured = [
        {"nodes": 1, "gpus_per_node": 8, "size_bytes": size, "time_s": time_s}
        for size, time_s in sizes.items()
    ]
    layouts = [[1, 8], [2, 8]]
    here, plain = (
        nccl_network(1, layouts, **changes) for changes in ({"measured_broadcasts": measured}, {})
    )
    for size, time_s in sizes.items():
        found_ns = duration_ns(here.cost.transfer("broadcast", size))
        assert found_ns == pytest.approx(1e9 * time_s, abs=2)
    between_ns = duration_ns(here.cost.transfer("broadcast", 2**18))
    assert 4e4 < between_ns < 9e4
    assert here.cost.transfer("all_reduce", 2**20) == plain.cost.transfer("all_reduce", 2**20)
    told = [entry.trust for entry in here.provenance if entry.input == "broadcast time"]
    assert told == ["measured"]
    both = [
        nccl_network(2, layouts, **changes) for changes in ({"measured_broadcasts": measured}, {})
    ]
    assert both[0].cost.transfer("broadcast", 2**20) == both[1].cost.transfer("broadcast", 2**20)
    assert not [entry for entry in both[0].provenance if entry.input == "broadcast time"]


def test_shards_take_what_was_measured_on_these_ranks() -> None:
    """Where one of the two was, the other is still corrected as all-reduces are."""
    measured = [{"nodes": 1, "gpus_per_node": 8, "size_bytes": 2**20, "time_s": 9e-5}]
    here, plain = (
        nccl_network(1, [[1, 8]], **changes) for changes in ({"measured_all_gathers": measured}, {})
    )
    assert duration_ns(here.cost.transfer("all_gather", 2**20)) == pytest.approx(9e4, abs=2)
    scatters = [each.cost.transfer("reduce_scatter", 2**20) for each in (here, plain)]
    assert scatters[0] == scatters[1]
    told = {entry.input: entry.trust for entry in here.provenance}
    assert told["all-gather time"] == "measured"
    assert "reduce-scatter time" not in told


def nccl_network(
    nodes: int, layouts: list[list[int]], hop_bytes: float = 0.0, **changes: Any
) -> Network:
    """NCCL on 8 GPUs a node: one regime, inside a node and over those that were measured."""
    over = any(measured > 1 for measured, _ in layouts)
    regime = {
        "shape": "ring",
        "base_s": fitted(1e-5),
        "intra_hop_s": fitted(1e-6),
        "inter_hop_s": fitted(1e-5 if over else 0.0),
        "hop_bytes": fitted(hop_bytes),
        "intra_bandwidth_bytes_per_s": fitted(2e11),
        "inter_bandwidth_bytes_per_s": fitted(2e10) if over else None,
    }
    calibrated = ClusterProfile.model_validate(
        profile(
            backend="nccl",
            all_reduce={"kind": "fastest-of", "regimes": [regime]},
            valid={"size_bytes": [1024, 2**30], "layouts": layouts, "line_rates_bytes_per_s": []},
            **changes,
        )
    )
    scenario = {
        "schema": "ddpsim/1",
        "workload": {"model": "resnet18", "batch_per_rank": 8},
        "cluster": {
            "nodes": nodes,
            "gpus_per_node": 8,
            "device": "a100-sxm-40gb",
            "inter_node": {"bandwidth": "100 Gbit/s", "latency": "5 us"},
        },
    }
    return network_from_profile(ddpsim.load_scenario(scenario), calibrated)


def test_one_node_says_little_of_the_network_beyond() -> None:
    """As doubtful as published sweeps over known NICs; and where its figures are from is told."""
    beyond, more = nccl_network(2, [[1, 8]]), nccl_network(4, [[1, 8], [2, 8]])
    assert beyond.uncertainty is not None
    assert more.uncertainty is not None
    assert beyond.uncertainty.sigma == pytest.approx(math.hypot(0.37, 0.03))
    assert more.uncertainty.sigma == pytest.approx(math.hypot(0.12, 0.03))
    far = nccl_network(16, [[1, 8], [2, 8]])
    assert far.uncertainty is not None
    assert far.uncertainty.sigma == pytest.approx(math.hypot(3 * 0.12, 0.03))
    stated = [entry for entry in beyond.provenance if entry.input == "cluster.inter_node"]
    assert [entry.trust for entry in stated] == ["stated"]


def test_bytes_that_ride_with_a_hop_inside_a_node_are_fewer_over_a_slower_network() -> None:
    """100 kB a rank's share at 200 GB/s: 16 x 6.25 kB at 12.5 GB/s, and not 1.6 MB of 64."""
    without, riding = (nccl_network(2, [[1, 8]], hop_bytes=h) for h in (0.0, 1e5))
    less = without.cost.transfer("all_reduce", 64_000_000)
    more = riding.cost.transfer("all_reduce", 64_000_000)
    saved_s = 2 * 15 / 16 * 16 * 6_250 / 12.5e9
    assert duration_ns(less) - duration_ns(more) == pytest.approx(saved_s * 1e9, rel=1e-3)


@pytest.mark.parametrize(("inside", "slowest"), [(200e9, 12.5e9), (2e9, 2e9)])
def test_beyond_one_node_the_slower_of_its_links_and_the_stated_network_counts(
    inside: float, slowest: float
) -> None:
    """28 hops inside nodes of 1 us, 2 between them of 5 us, and 2 x 15 / 16 of the message."""
    regime = NcclRegime(
        shape="ring",
        base_s=Fitted(value=1e-5),
        intra_hop_s=Fitted(value=1e-6),
        inter_hop_s=Fitted(value=0),
        intra_bandwidth_bytes_per_s=Fitted(value=inside),
        inter_bandwidth_bytes_per_s=None,
    )
    law = reaching(NcclRegimes(regimes=(regime,)), [(1, 8)], on_nodes(2, 8))
    expected_s = 1e-5 + 28 * 1e-6 + 2 * 5e-6 + 2 * 15 / 16 * 2**30 / slowest
    assert all_reduce_s(law, 2**30, 2, 8) == pytest.approx(expected_s)


def test_of_one_node_all_regimes_are_rings_whose_hops_inside_come_again() -> None:
    """On 8 GPUs 14 hops of 2 us after LL's 6.6; on two such nodes 28, and 2 of the stated 5 us."""
    none = Fitted(value=0)
    rings = [
        NcclRegime(
            shape="ring",
            base_s=Fitted(value=base_us * 1e-6),
            intra_hop_s=none,
            inter_hop_s=none,
            intra_bandwidth_bytes_per_s=Fitted(value=bandwidth),
            inter_bandwidth_bytes_per_s=None,
        )
        for base_us, bandwidth in ((6.6 + 14 * 2, 1e9), (8.4 + 14 * 7, 100e9))
    ]
    law = reaching(NcclRegimes(regimes=tuple(rings)), [(1, 8)], on_nodes(2, 8))
    small_s = (6.6 + 28 * 2 + 2 * 5) * 1e-6 + 2 * 15 / 16 * 4 / 1e9
    large_s = (8.4 + 28 * 7 + 2 * 5) * 1e-6 + 2 * 15 / 16 * 2**30 / 12.5e9
    assert all_reduce_s(law, 4, 2, 8) == pytest.approx(small_s)
    assert all_reduce_s(law, 2**30, 2, 8) == pytest.approx(large_s)


def of_one_layout(*regimes: tuple[float, float, float]) -> NcclRegimes:
    """Over nodes, as fitted to one layout: base in us, bytes of a hop, bus bandwidth in GB/s."""
    none = Fitted(value=0)
    return NcclRegimes(
        regimes=tuple(
            NcclRegime(
                shape="ring",
                base_s=Fitted(value=base_us * 1e-6),
                intra_hop_s=none,
                inter_hop_s=none,
                hop_bytes=Fitted(value=hop_bytes),
                intra_bandwidth_bytes_per_s=None,
                inter_bandwidth_bytes_per_s=Fitted(value=gb_per_s * 1e9),
            )
            for base_us, hop_bytes, gb_per_s in regimes
        )
    )


FITTED_REGIMES = st.lists(
    st.tuples(st.floats(1, 500), st.floats(0, 1e6), st.floats(0.1, 400)), min_size=1, max_size=4
)


def on_nodes(nodes: int, gpus_per_node: int = 4) -> Scenario:
    link = {"bandwidth": "100 Gbit/s", "latency": "5 us"}
    cluster = {"nodes": nodes, "gpus_per_node": gpus_per_node, "device": "v100-sxm-32gb"}
    return ddpsim.load_scenario(
        {
            "schema": "ddpsim/1",
            "workload": {"model": "resnet18", "batch_per_rank": 8},
            "cluster": cluster | {"inter_node": link},
        }
    )


def test_of_one_layout_the_latency_beyond_nccls_start_comes_again_with_every_hop() -> None:
    """LL's tree: 6.8 us, 6 short hops of 0.18 and 2 of 1.5; Simple's ring: 8.4 us, 14 hops of 7."""
    regimes = (6.8 + 6 * 0.18 + 2 * 1.5, 0, 0.5), (8.4 + 14 * 7, 0, 20)
    for known in (of_one_layout(*regimes), of_one_layout(*regimes[::-1])):
        law = reaching(known, [(1, 4), (2, 4)], on_nodes(8))
        small_s, large_s = (all_reduce_s(law, size, 8, 4) for size in (4, 2**30))
        assert small_s == pytest.approx((6.8 + 6 * 0.18 + 6 * 1.5) * 1e-6 + 2 * 31 / 32 * 4 / 0.5e9)
        assert large_s == pytest.approx((8.4 + 62 * 7) * 1e-6 + 2 * 31 / 32 * 2**30 / 20e9)


@given(
    regimes=FITTED_REGIMES,
    size_bytes=st.integers(4, 2**32),
    nodes=st.integers(2, 16),
    gpus=st.integers(1, 8),
)
def test_what_is_assumed_of_hops_leaves_the_layout_that_was_measured_as_it_is(
    regimes: list[tuple[float, float, float]], size_bytes: int, nodes: int, gpus: int
) -> None:
    known = of_one_layout(*regimes)
    law = extrapolation._in_steps(known, (nodes, gpus))
    here = size_bytes, nodes, gpus
    assert all_reduce_s(law, *here) == pytest.approx(all_reduce_s(known, *here), rel=1e-9)


@given(
    regimes=FITTED_REGIMES,
    size_bytes=st.integers(4, 2**32),
    nodes=st.integers(3, 64),
    gpus=st.integers(1, 8),
)
@settings(max_examples=40)
def test_other_ranks_are_no_faster_than_the_links_that_were_measured(
    regimes: list[tuple[float, float, float]], size_bytes: int, nodes: int, gpus: int
) -> None:
    """However many bytes rode with each rank's hops where it was measured."""
    law = reaching(of_one_layout(*regimes), [(2, 4)], on_nodes(nodes, gpus))
    ranks = nodes * gpus
    volume = 2 * (ranks - 1) / ranks * size_bytes
    fastest = max(gb_per_s for _, _, gb_per_s in regimes) * 1e9
    assert all_reduce_s(law, size_bytes, nodes, gpus) >= volume / fastest * (1 - 1e-9)


@pytest.mark.parametrize(
    ("nodes", "layouts", "keys", "trust"),
    [
        (2, [[1, 8], [2, 8]], ["cluster.inter_node"], "measured"),
        (4, [[1, 8], [2, 8]], [], "assumed"),  # trees are carried by their ratio
        (2, [[1, 8]], [], "assumed"),  # its figures are taken
    ],
)
def test_links_that_do_not_count_are_named_and_other_ranks_are_not_measured(
    nodes: int, layouts: list[list[int]], keys: list[str], trust: str
) -> None:
    network = nccl_network(nodes, layouts)
    said = [warning for warning in network.warnings if "not used" in warning]
    assert [warning.partition(" is not used: ")[0] for warning in said] == keys
    (entry,) = (entry for entry in network.provenance if entry.input == "all-reduce time")
    assert entry.trust == trust


def test_trees_are_carried_by_the_ratio_of_their_times_by_links() -> None:
    """16 nodes: to 4 MiB trees; a ring's hops, of which there are 8 times as many, do not count."""
    near, far = nccl_network(2, [[1, 8], [2, 8]]).cost, nccl_network(16, [[1, 8], [2, 8]]).cost
    assert isinstance(far, CarriedCost)
    for size in (2**16, 2**20):
        assert far.here.choice(size).algorithm == "tree"
        by_links = [
            duration_ns(cost.transfer("all_reduce", size)) for cost in (far.there, far.here)
        ]
        longer = duration_ns(far.transfer("all_reduce", size)) / duration_ns(
            near.transfer("all_reduce", size)
        )
        assert longer == pytest.approx(by_links[1] / by_links[0], rel=1e-4)
    ring = far.transfer("reduce_scatter", 2**20)
    assert ring == far.law.transfer("reduce_scatter", 2**20)
    twice = far.stretched(2.0).transfer("all_reduce", 2**20)
    once = far.transfer("all_reduce", 2**20)
    assert duration_ns(twice) == pytest.approx(2 * duration_ns(once), rel=1e-4)


def test_hops_that_were_fitted_stay_and_inside_a_node_none_is_assumed() -> None:
    known = of_one_layout((50, 0, 20))
    assert reaching(known, [(2, 4), (4, 4)], on_nodes(8)) == known
    assert reaching(known, [(2, 4)], on_nodes(2)) == known
    assert reaching(known, [(1, 4)], on_nodes(1, 8)) == known
    assert reaching(known, [(1, 4)], on_nodes(1, 1)) == known


def test_the_network_between_nodes_is_no_surer_than_it_was_measured() -> None:
    """An NCCL record has no line rate inside a node, and one between nodes."""
    sigmas = [
        {"line_rate_bytes_per_s": rate, "left_out": left_out, "repeated": None}
        for rate, left_out in ((None, 0.001), (25e9, 0.2))
    ]
    network = nccl_network(2, [[1, 8], [2, 8]], measured_sigma=sigmas)
    assert network.uncertainty is not None
    assert network.uncertainty.sigma == 0.2
