"""A profile of NCCL predicts ranks that it was not measured on."""

from __future__ import annotations

import math
from typing import Any

import pytest
from clusters.profiles import profile
from measured.made_measurements import TWO_HDR, nccl_model

import ddpsim
from ddpsim.cluster.fitted.ensemble import curve_of, for_cluster
from ddpsim.cluster.fitted.network import PER_DOUBLING, UNLIKE, network_from_profile
from ddpsim.cluster.nccl.figures import PRIORS, Figures
from ddpsim.cluster.network import Network
from ddpsim.cluster.transfers import duration_ns
from ddpsim.importers.profiles.cluster import ClusterProfile
from ddpsim.importers.profiles.nccl import NcclModel
from ddpsim.scenario.schema import Scenario

FOUR_HDR = TWO_HDR.model_copy(update={"nics_per_node": 4})


def scenario_of(nodes: int, **cluster: Any) -> Scenario:
    keys = {"device": "a100-sxm-40gb", "nodes": nodes, "gpus_per_node": 8} | cluster
    return ddpsim.load_scenario(
        {
            "schema": "ddpsim/1",
            "workload": {"model": "resnet18", "batch_per_rank": 8},
            "cluster": keys,
        }
    )


def network_of(
    nodes: int, layouts: list[list[int]], model: NcclModel | None = None, **changes: Any
) -> Network:
    """NCCL on 8 GPUs a node, measured on these layouts."""
    known = model or nccl_model(TWO_HDR if any(n > 1 for n, _ in layouts) else None)
    calibrated = ClusterProfile.model_validate(
        profile(
            backend="nccl",
            all_reduce=known.model_dump(),
            valid={"size_bytes": [1024, 2**30], "layouts": layouts, "line_rates_bytes_per_s": []},
            **changes,
        )
    )
    inter_node = {"bandwidth": "100 Gbit/s", "nics_per_node": 4}
    return network_from_profile(scenario_of(nodes, inter_node=inter_node), calibrated)


def measured(nodes: int, times: dict[int, float]) -> list[dict[str, Any]]:
    return [
        {"nodes": nodes, "gpus_per_node": 8, "size_bytes": size, "time_s": time_s}
        for size, time_s in times.items()
    ]


def test_measured_times_stay_on_their_ranks_and_say_nothing_of_a_hump_elsewhere() -> None:
    """Two nodes take 900 us at 1 MiB, where NCCL keeps to LL for too long; eight need not."""
    times = {2**18: 3.0e-4, 2**20: 9.0e-4, 2**22: 2.0e-4}
    here, there = (
        network_of(nodes, [[1, 8], [2, 8]], measured=measured(2, times)) for nodes in (2, 8)
    )
    for size, time_s in times.items():
        assert duration_ns(here.cost.transfer("all_reduce", size)) == pytest.approx(
            1e9 * time_s, abs=2
        )
    plain = network_of(8, [[1, 8], [2, 8]])
    for size in times:
        assert there.cost.transfer("all_reduce", size) == plain.cost.transfer("all_reduce", size)


def test_broadcasts_take_what_was_measured_on_these_ranks() -> None:
    """Between sizes as the model goes on; of other ranks the model alone tells."""
    sizes, layouts = {2**16: 4e-5, 2**20: 9e-5}, [[1, 8], [2, 8]]
    changes = {"measured_broadcasts": measured(1, sizes)}
    here, plain = network_of(1, layouts, **changes), network_of(1, layouts)
    for size, time_s in sizes.items():
        found_ns = duration_ns(here.cost.transfer("broadcast", size))
        assert found_ns == pytest.approx(1e9 * time_s, abs=2)
    assert 4e4 < duration_ns(here.cost.transfer("broadcast", 2**18)) < 9e4
    assert here.cost.transfer("all_reduce", 2**20) == plain.cost.transfer("all_reduce", 2**20)
    told = [entry.trust for entry in here.provenance if entry.input == "broadcast time"]
    assert told == ["measured"]
    both = [network_of(2, layouts, **more) for more in (changes, {})]
    assert both[0].cost.transfer("broadcast", 2**20) == both[1].cost.transfer("broadcast", 2**20)
    assert not [entry for entry in both[0].provenance if entry.input == "broadcast time"]


def test_shards_take_what_was_measured_on_these_ranks() -> None:
    """All-gathers were measured; reduce-scatters are still corrected as all-reduces are."""
    gathers = {"measured_all_gathers": measured(1, {2**20: 9e-5})}
    here, plain = network_of(1, [[1, 8]], **gathers), network_of(1, [[1, 8]])
    assert duration_ns(here.cost.transfer("all_gather", 2**20)) == pytest.approx(9e4, abs=2)
    scatters = [each.cost.transfer("reduce_scatter", 2**20) for each in (here, plain)]
    assert scatters[0] == scatters[1]
    told = {entry.input: entry.trust for entry in here.provenance}
    assert told["all-gather time"] == "measured"
    assert "reduce-scatter time" not in told


@pytest.mark.parametrize(("nodes", "doublings"), [(2, 0.0), (4, 1.0), (16, 3.0)])
def test_ranks_further_away_are_less_sure(nodes: int, doublings: float) -> None:
    network = network_of(nodes, [[1, 8], [2, 8]])
    known = network.uncertainty_of(2**20)
    assert known is not None
    expected = math.hypot(UNLIKE, PER_DOUBLING * math.sqrt(doublings)) if doublings else 0.03
    assert known.sigma == pytest.approx(expected)


def test_draws_that_differ_make_the_sizes_that_they_differ_in_unsure() -> None:
    one = nccl_model(TWO_HDR).hypotheses[0]
    slow = tuple(math.log(v) for v in Figures(tree_hop_ll=2.0))
    model = nccl_model(TWO_HDR).model_copy(
        update={"hypotheses": (one.model_copy(update={"draws": (*one.draws, slow)}),)}
    )
    network = network_of(16, [[1, 8], [2, 8]], model)
    small, large = (network.uncertainty_of(size) for size in (2**12, 2**28))
    assert small is not None
    assert large is not None
    assert small.sigma > large.sigma
    assert large.sigma == pytest.approx(math.hypot(UNLIKE, PER_DOUBLING * math.sqrt(3)), rel=1e-3)


def test_of_one_node_the_stated_network_is_taken_beyond_it() -> None:
    """4 x 100 Gbit/s carry 1 GiB in a ring of 16 in 2 x 15/16 GiB / (50 GB/s x 0.92)."""
    network = network_of(2, [[1, 8]])
    assert [entry.trust for entry in network.provenance if entry.input == "cluster.inter_node"] == [
        "stated"
    ]
    taken_s = duration_ns(network_of(4, [[1, 8]]).cost.transfer("all_reduce", 2**30)) / 1e9
    assert taken_s == pytest.approx(2 * 31 / 32 * 2**30 / (50e9 * 0.92), rel=0.1)


def test_of_one_node_slingshots_own_figures_are_taken_beyond_it() -> None:
    inter = {"bandwidth": "100 Gbit/s", "nics_per_node": 4, "transport": "slingshot"}
    model = for_cluster(nccl_model(), scenario_of(4, inter_node=inter).cluster)
    (hypothesis,) = model.hypotheses
    assert hypothesis.links.transport == "slingshot"
    found = Figures(*(math.exp(value) for value in hypothesis.draws[0]))
    assert found == pytest.approx(PRIORS["slingshot"].medians)


def two_networks() -> NcclModel:
    """An ensemble that cannot tell two NICs from four."""
    two, four = (nccl_model(links).hypotheses[0] for links in (TWO_HDR, FOUR_HDR))
    both = (two.model_copy(update={"weight": 0.7}), four.model_copy(update={"weight": 0.3}))
    return nccl_model().model_copy(update={"hypotheses": both})


@pytest.mark.parametrize(
    ("stated", "nics"),
    [
        ({}, [2, 4]),
        ({"inter_node": {"bandwidth": "200 Gbit/s", "nics_per_node": 4}}, [4]),
        ({"inter_node": {"bandwidth": "200 Gbit/s", "nics_per_node": 8}}, [2, 4]),
        ({"machine": "dgx-a100"}, [2, 4]),
    ],
)
def test_what_a_scenario_states_chooses_among_hypotheses(
    stated: dict[str, Any], nics: list[int]
) -> None:
    narrowed = for_cluster(two_networks(), scenario_of(4, **stated).cluster)
    assert [h.links.nics_per_node for h in narrowed.hypotheses] == nics
    assert sum(h.weight for h in narrowed.hypotheses) == pytest.approx(1)


def test_a_stated_version_chooses_the_nearest_that_was_fitted() -> None:
    old, new = (nccl_model(TWO_HDR, version=v).hypotheses[0] for v in ("2.8", "2.23"))
    model = nccl_model().model_copy(update={"hypotheses": (old, new)})
    narrowed = for_cluster(model, scenario_of(4, nccl="2.21").cluster)
    assert [h.version for h in narrowed.hypotheses] == ["2.23"]


@pytest.mark.parametrize("direct", [True, False])
def test_nics_that_read_gpus_have_ll128(direct: bool) -> None:
    both = tuple(nccl_model(TWO_HDR, ll128=ll128).hypotheses[0] for ll128 in (True, False))
    model = nccl_model().model_copy(update={"hypotheses": both})
    inter = {"bandwidth": "200 Gbit/s", "nics_per_node": 2, "gpu_direct": direct}
    narrowed = for_cluster(model, scenario_of(4, inter_node=inter).cluster)
    assert [h.ll128 for h in narrowed.hypotheses] == [direct]


@pytest.mark.parametrize(
    ("nodes", "layouts", "keys", "trust"),
    [
        (2, [[1, 8], [2, 8]], ["cluster.inter_node"], "measured"),
        (4, [[1, 8], [2, 8]], ["cluster.inter_node"], "assumed"),
        (2, [[1, 8]], [], "assumed"),  # its figures are taken
    ],
)
def test_links_that_do_not_count_are_named_and_other_ranks_are_not_measured(
    nodes: int, layouts: list[list[int]], keys: list[str], trust: str
) -> None:
    network = network_of(nodes, layouts)
    said = [warning for warning in network.warnings if "not used" in warning]
    assert [warning.partition(" is not used: ")[0] for warning in said] == keys
    (entry,) = (entry for entry in network.provenance if entry.input == "all-reduce time")
    assert entry.trust == trust


def test_the_network_between_nodes_is_no_surer_than_it_was_measured() -> None:
    """An NCCL record has no line rate inside a node, and one between nodes."""
    sigmas = [
        {"line_rate_bytes_per_s": rate, "left_out": left_out, "repeated": None}
        for rate, left_out in ((None, 0.001), (25e9, 0.2))
    ]
    network = network_of(2, [[1, 8], [2, 8]], measured_sigma=sigmas)
    assert network.uncertainty is not None
    assert network.uncertainty.sigma == 0.2


def test_a_curve_goes_on_at_its_bandwidth_beyond_its_sizes() -> None:
    curve = curve_of(nccl_model(TWO_HDR), "all_reduce", 2, 8)
    assert curve.seconds(2**34) == pytest.approx(16 * curve.seconds(2**30))
    assert curve.seconds(1) == curve.seconds(2**10)


def test_a_draw_with_too_few_figures_is_refused() -> None:
    model = nccl_model(TWO_HDR).model_dump()
    model["hypotheses"][0]["draws"] = [[0.0]]
    with pytest.raises(ValueError, match="a draw has not as many figures as are named: 15"):
        NcclModel.model_validate(model)
