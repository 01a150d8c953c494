"""What a cluster profile says of links, ranks and jitter reaches the prediction."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from clusters.profiles import fitted, profile

import ddpsim
from ddpsim.cluster.fitted.network import network_from_profile
from ddpsim.cluster.transfers import duration_ns
from ddpsim.errors import ImportFailedError, ScenarioError
from ddpsim.importers.profiles.cluster import (
    NO_LIMIT,
    ClusterProfile,
    read_cluster_profile,
)
from ddpsim.prediction.resolve import resolve
from ddpsim.provenance import Z_80
from ddpsim.scenario.quantity import SourceFile

GBIT = {"bandwidth": "1 Gbit/s", "latency": "0 s"}


def test_bytes_take_their_time_on_the_wire(predict: Any) -> None:
    last = predict({}).buckets[-1]
    on_the_wire_s = last.size_bytes / (0.94 * 125e6)
    assert last.end_s - last.start_s >= on_the_wire_s * 0.999


@pytest.mark.parametrize("gbit_per_s", [1, 0.2])
def test_what_a_rested_link_lets_through_at_once_shortens_a_step_once(
    predict: Any, gbit_per_s: float
) -> None:
    """Between steps nothing is sent for longer than it takes; after that the link is busy."""
    link = GBIT | {"bandwidth": f"{gbit_per_s} Gbit/s"}
    law = profile()["all_reduce"]
    more = {"rested_burst_bytes": fitted(131_072.0), "rested_delay_s": fitted(2.5e-4)}
    plain, rested = (
        predict({"all_reduce": law | figures}, inter_node=link) for figures in ({}, more)
    )
    saved_s = plain.iteration_time_s.mean - rested.iteration_time_s.mean
    assert saved_s == pytest.approx(131_072 / (gbit_per_s * 125e6) - 2.5e-4, abs=2e-9)


def test_a_stated_link_takes_the_place_of_the_measured_one(predict: Any) -> None:
    fast = predict({}, inter_node={"bandwidth": "2 Gbit/s", "latency": "0 s"})
    assert fast.iteration_time_s.mean < predict({}).iteration_time_s.mean
    beyond = predict({}, inter_node={"bandwidth": "20 Gbit/s", "latency": "0 s"})
    assert "was measured on links of 62.5 MB/s to 375 MB/s" in beyond.warnings[0]


def test_ranks_of_one_node_take_no_link_between_nodes(predict: Any) -> None:
    """`plan` keeps what a scenario states of links beyond the node."""
    inside = {"valid": profile()["valid"] | {"layouts": [[1, 2]], "line_rates_bytes_per_s": []}}
    ranks = {"nodes": 1, "gpus_per_node": 2}
    silent = predict(inside, **ranks)
    stated = predict(inside, **ranks, inter_node={"bandwidth": "1 Mbit/s", "latency": "0 s"})
    assert stated.iteration_time_s == silent.iteration_time_s
    assert "cluster.inter_node" not in {entry.input for entry in stated.provenance}


def test_all_reduces_larger_than_any_that_was_measured_are_named(predict: Any) -> None:
    (said,) = predict(
        {"valid": profile()["valid"] | {"size_bytes": [2**20, 2**22]}}, inter_node=GBIT
    ).warnings
    assert "lie outside those that the profile was fitted to (1.00 MiB to 4.00 MiB)" in said
    assert said.endswith("their times are extrapolated")
    assert not predict({}, inter_node=GBIT).warnings


@pytest.mark.parametrize("layout", [(1, 2), (1, 8)])
def test_larger_messages_are_as_uncertain_as_their_line_rate(layout: tuple[int, int]) -> None:
    """Larger messages take up to as long a byte as the largest measured, if no rate showed."""
    largest, law = 2**17, profile()["all_reduce"]
    valid = {"layouts": [[1, 2]], "size_bytes": [4096, largest]}
    nodes, gpus_per_node = layout
    scenario = ddpsim.load_scenario(
        {
            "schema": "ddpsim/1",
            "workload": {"model": "resnet18", "batch_per_rank": 8},
            "ddp": {"backend": "gloo"},
            "cluster": {"nodes": nodes, "gpus_per_node": gpus_per_node, "device": "cpu-core"},
        }
    )
    for rate in (1e9, NO_LIMIT):
        figures = {"line_rate_bytes_per_s": rate, "segment_s": fitted(1e-3)}
        changed = profile(valid=valid, all_reduce=law | figures)
        network = network_from_profile(scenario, ClusterProfile.model_validate(changed))
        known = network.uncertainty_of(largest)
        assert known
        for size in (largest + 1, 3 * largest, 2**25, 2**27):
            larger = network.uncertainty_of(size)
            assert larger
            added = math.sqrt(larger.sigma**2 - known.sigma**2)
            if rate < NO_LIMIT:
                assert added == pytest.approx(0.2)
                continue
            took, takes = (network.cost.transfer("all_reduce", each) for each in (largest, size))
            most = duration_ns(took) / largest * size
            assert math.exp(Z_80 * added) * duration_ns(takes) >= 0.999 * most
            assert added > 1 or size < 2**25
            assert "between that of the largest message measured and no limit" in larger.basis


def test_links_that_nobody_stated_are_named(predict: Any) -> None:
    silent = predict({})
    said = "was measured on 2 kinds of links, of which those of 125 MB/s are taken"
    assert said in silent.warnings[0]
    (links,) = (entry for entry in silent.provenance if entry.input == "cluster.inter_node")
    assert (links.source, links.trust) == ("125 MB/s, as in profile two hosts", "assumed")
    stated = predict({}, inter_node={"bandwidth": "1 Gbit/s", "latency": "0 s"})
    assert not stated.warnings
    assert stated.iteration_time_s == silent.iteration_time_s


def test_float16_is_added_at_its_own_rate(predict: Any) -> None:
    law = profile()["all_reduce"]
    slow = {"all_reduce": law | {"reduce_half_bytes_per_s": fitted(2e7)}}
    assert predict(slow) == predict({})
    dear, cheap = (predict(made, comm_hook="fp16_compress") for made in (slow, {}))
    assert dear.iteration_time_s.mean > cheap.iteration_time_s.mean


def test_jitter_of_the_profile_is_used(predict: Any) -> None:
    jitter = {"jitter": {"iteration_sigma": 0.05, "rank_sigma": 0.0, "autocorrelation": 0.1}}
    times = predict(jitter).iteration_time_s
    assert times.p90 > times.p10
    assert "rank variation" in str(predict({}).prediction_interval_s)
    assert "rank variation" not in str(predict(jitter).prediction_interval_s)


@pytest.mark.parametrize(
    ("gbit_per_s", "sigma"),
    [
        (0.1, 0.01),  # as at the nearest
        (1, 0.01),
        (2, 0.05),  # halfway in logarithms
        (4, 0.09),
        (16, 0.055),  # halfway to 0.02, which is assumed of what was measured once
    ],
)
def test_the_network_is_as_uncertain_as_its_line_rate(gbit_per_s: float, sigma: float) -> None:
    known = [(500e6, 0.09, 0.01), (125e6, 0.004, 0.01), (8e9, 0.001, None)]
    measured = [
        {"line_rate_bytes_per_s": rate, "left_out": left_out, "repeated": repeated}
        for rate, left_out, repeated in known
    ]
    calibrated = ClusterProfile.model_validate(profile(measured_sigma=measured))
    link = {"bandwidth": f"{gbit_per_s} Gbit/s", "latency": "0 s"}
    scenario = {
        "schema": "ddpsim/1",
        "workload": {"model": "resnet18", "batch_per_rank": 8},
        "ddp": {"backend": "gloo"},
        "cluster": {"nodes": 2, "gpus_per_node": 1, "device": "cpu-core", "inter_node": link},
    }
    network = network_from_profile(ddpsim.load_scenario(scenario), calibrated)
    assert network.uncertainty.sigma == pytest.approx(sigma)
    assert "left out in turn or made twice" in network.uncertainty.basis


def test_ranks_under_one_leaf_have_the_whole_line_rate(predict: Any) -> None:
    """Four nodes of a leaf of four do not feel its oversubscription; of leaves of two they do."""
    slow = {**GBIT, "oversubscription": 4}
    inside, outside, plain = (
        predict({}, nodes=4, inter_node=link).iteration_time_s.mean
        for link in ({**slow, "nodes_per_leaf": 4}, {**slow, "nodes_per_leaf": 2}, GBIT)
    )
    assert inside == plain < outside


def test_ranks_that_were_not_measured_are_named(predict: Any) -> None:
    assert "4 x 1 is predicted from its figures" in predict({}, nodes=4).warnings[0]


def test_ranks_that_would_share_cores_are_told(predict: Any) -> None:
    """Four a core took five to twelve times as long as two ranks on two cores tell."""
    told, ranks = "would share the 2 cores of the machine", {"nodes": 1, "gpus_per_node": 8}
    valid = profile()["valid"] | {"layouts": [[1, 2]]}
    widths = []
    for cores in (None, 8, 2):
        changes = {"valid": valid, "provenance": profile()["provenance"] | {"cores": cores}}
        result = predict(changes, **ranks)
        assert any(told in warning for warning in result.warnings) is (cores == 2)
        interval = result.prediction_interval_s
        assert interval
        (found,) = (each for each in interval.sources if "network" in each.input)
        widths.append(found.high_s)
    assert widths[2] > 8 * widths[1] == 8 * widths[0]
    measured = predict(changes | {"valid": valid | {"layouts": [[1, 8]]}}, **ranks)
    assert not any(told in warning for warning in measured.warnings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": "nccl"}, "was measured with nccl, but ddp.backend is gloo"),
        ({"schema": "ddpsim.profile/2"}, "is no ddpsim.profile/1 cluster profile: schema"),
        ({"all_reduce_sigma": -1}, "is no ddpsim.profile/1 cluster profile: all_reduce_sigma"),
    ],
)
def test_a_profile_that_does_not_fit_is_an_error(
    predict: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ScenarioError) as caught:
        predict(changes)
    assert message in str(caught.value)


def test_one_line_tells_of_a_fit(predict: Any) -> None:
    """The first warning, and where the others are told."""
    (one,) = predict({"warnings": ["not enough data for queue"]}, inter_node=GBIT).warnings
    assert one == "profile two hosts: not enough data for queue"
    (more,) = predict({"warnings": ["a", "b", "c"]}, inter_node=GBIT).warnings
    assert re.search(r"a; its fit has 2 more warnings: python -m calibrate show .*json$", more)


def test_a_profile_must_name_its_schema(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({key: each for key, each in profile().items() if key != "schema"}))
    with pytest.raises(ImportFailedError, match=r"is no ddpsim.profile/1 .*: schema: is missing"):
        read_cluster_profile(SourceFile(str(path), path))


def test_a_network_stated_in_part_is_the_presets_beside_a_profile(predict: Any) -> None:
    """A CPU core's is 10 Gbit/s: half of that is left."""
    half = predict({}, inter_node={"oversubscription": 2})
    stated = predict({}, inter_node={"bandwidth": "5 Gbit/s"})
    assert half.iteration_time_s == stated.iteration_time_s


GOOD_MODEL = Path(__file__).parents[2] / "invalid" / "files" / "good-profile.json"


@pytest.mark.parametrize(
    ("precision", "more", "told"),
    [
        ("fp32", {}, False),
        ("bf16", {}, True),
        ("bf16", {"step_time": "10 ms"}, False),  # which is of that precision
    ],
)
def test_times_of_another_precision_are_told(
    precision: str, more: dict[str, Any], *, told: bool
) -> None:
    """Gradients of half the bytes, and times of float32."""
    scenario = {
        "schema": "ddpsim/1",
        "workload": {"profile": str(GOOD_MODEL), "batch_per_rank": 4, "precision": precision},
        "cluster": {"nodes": 1, "gpus_per_node": 2, "device": "a100-sxm-40gb"},
    }
    scenario["workload"] |= more
    model = resolve(ddpsim.load_scenario(scenario)).model
    said = "workload.precision bf16: the gradients are taken as bfloat16, but the times are those"
    assert any(warning.startswith(said) for warning in model.warnings) == told
    wanted = "bfloat16" if precision == "bf16" else "float32"
    assert {parameter.dtype for parameter in model.parameters} == {wanted}
