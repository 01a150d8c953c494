"""The prediction interval is as wide as what is uncertain about the inputs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from shipped_scenarios import predict, suggested

import ddpsim
from ddpsim.cluster.from_links import CHOSEN_NETWORK
from ddpsim.cluster.wires import Wires, rate_of
from ddpsim.prediction.interval import (
    RankVariation,
    lengthening,
    prediction_interval,
    ranks_differ,
    together,
    uncalibrated_interference,
)
from ddpsim.prediction.resolve import resolve
from ddpsim.provenance import Uncertainty
from ddpsim.report.text import render
from ddpsim.result.model import IntervalSource


@pytest.mark.parametrize(
    ("override", "kind"),
    [("workload.data={rate: 1500 samples/s}", "data"), ("workload.batch_per_rank=1", "host")],
)
def test_whatever_bounds_the_step_widens_the_interval(override: str, kind: str) -> None:
    result = predict("resnet50-8xa100", override)
    interval = result.prediction_interval_s
    assert result.bottleneck.kind == kind
    assert interval is not None
    assert interval.high - interval.low > 0.1 * result.iteration_time_s.mean


def width(result: ddpsim.Result) -> float:
    interval = result.prediction_interval_s
    assert interval is not None
    return interval.high - interval.low


def test_what_widens_the_interval_most_is_named_first() -> None:
    """The network moves both edges, a slow host the upper one alone, and that further."""
    settings = ("workload.batch_per_rank=4", "workload.precision=amp-bf16")
    slow = ("resnet50-2x8-25gbit", *settings)
    result = predict(*slow)
    assert result.prediction_interval_s
    known = {source.input: source for source in result.prediction_interval_s.sources}
    assert known["host time"].high_s > known["network model"].high_s
    assert known["host time"].width_s < known["network model"].width_s
    first, second = render(result, "slow.yaml").partition("\ntrust ")[2].split("\n")[:2]
    assert first.strip().startswith("network model ")
    assert second.strip().startswith("host time ")
    assert any("cluster.all_reduce=" in step for step in suggested(*slow))


@pytest.mark.parametrize(
    ("transport", "limit", "known"),
    [
        ("rdma", "host memory", "published: 1.16 GB/s a GPU through host memory (SHM)"),
        ("tcp", "the inter-node network", "stated: 625 MB/s"),
    ],
)
def test_trust_is_told_of_the_link_that_limits(transport: str, limit: str, known: str) -> None:
    """A box without NVLink in a network names the slower of the two, as the bottleneck does."""
    rate = "100 Gbit/s" if transport == "rdma" else "5 Gbit/s"
    link = {"bandwidth": rate, "transport": transport}
    scenario = {
        "schema": "ddpsim/1",
        "workload": {"model": "bert-large", "batch_per_rank": 4, "precision": "amp-bf16"},
        "cluster": {
            "device": "l40s",
            "nodes": 2,
            "gpus_per_node": 8 if transport == "rdma" else 4,
            "inter_node": link,
        },
    }
    result = ddpsim.run(scenario)
    assert limit in result.bottleneck.text
    trust = render(result, "box.yaml").partition("\ntrust ")[2].splitlines()[0]
    assert known in trust


@pytest.mark.parametrize("gpus", [4, 8])
def test_no_step_is_faster_than_the_other_links_allow(gpus: int) -> None:
    """GPUs may meet in host memory four times as fast, and still all bytes pass the NICs."""
    network = {"bandwidth": "10 Gbit/s", "transport": "tcp"}
    cluster = {"device": "l40s", "nodes": 8, "gpus_per_node": gpus, "inter_node": network}
    workload = {"model": "bert-base", "batch_per_rank": 16, "precision": "amp-fp16"}
    document = {"schema": "ddpsim/1", "workload": workload, "cluster": cluster}
    job = resolve(ddpsim.load_scenario(document))
    wires = Wires.of(job.scenario.cluster)
    share = min(1.0, rate_of(wires.intra) / wires.network_rate)  # of the time, on the NICs alone
    assert job.network.uncertainty
    low, high = job.network.uncertainty.edges
    assert low == pytest.approx(share / CHOSEN_NETWORK.usual.factor)
    assert (share < 1, high > 4) == (gpus == 8, True)


def test_a_straggler_is_as_uncertain_as_the_others() -> None:
    even = predict("resnet50-8xa100")
    slow = predict("resnet50-8xa100", "cluster.stragglers={factors: {0: 3}}")
    ratio = slow.iteration_time_s.mean / even.iteration_time_s.mean
    assert ratio > 2.5
    assert width(slow) > 0.7 * ratio * width(even)


def test_what_is_uncertain_adds_in_quadrature_but_for_what_always_lengthens() -> None:
    """A step of 6 s of compute and 2 of network, 1.1 times as long in the mean for its noise."""

    def step_s(compute: float = 1.0, network: float = 1.0) -> float:
        return 6 * compute + 2 * network

    known = {"compute": Uncertainty(0.1, "a"), "network": Uncertainty(0.5, "b")}
    found = prediction_interval(
        8.8,
        step_s,
        known,
        [
            uncalibrated_interference(1.5),
            lengthening("DeepSpeed's overlap", 1.5, 1.5, ""),
            ranks_differ(RankVariation(0.04, 0.12, "jobs"), 8.8),
        ],
        spread_s=(8.5, 9.2),
    )
    z = 1.2815515655446004  # 80 % of a normal distribution lie within so many sigma
    slower = {"compute": 1.1 * 6 * math.expm1(z * 0.1), "network": 1.1 * 2 * math.expm1(z * 0.5)}
    faster = {"compute": -1.1 * 6 * math.expm1(-z * 0.1), "network": -1.1 * 2 * math.expm1(-z / 2)}
    by_input = {source.input: (source.low_s, source.high_s) for source in found.sources}
    assert by_input == {
        "compute time": pytest.approx((faster["compute"], slower["compute"])),
        "network model": pytest.approx((faster["network"], slower["network"])),
        "jitter": pytest.approx((0.3, 0.4)),
        "uncalibrated interference": pytest.approx((0, 0.22 * 1.5)),
        "DeepSpeed's overlap": pytest.approx((0, 1.5)),
        "rank variation": pytest.approx((0, 0.12 * 8.8)),
    }
    rarely_s = 0.08 * 8.8
    above_s = math.hypot(*slower.values(), 0.4, rarely_s) + (1 + 0.22) * 1.5 + 0.04 * 8.8
    assert found.low == pytest.approx(8.8 - math.hypot(*faster.values(), 0.3))
    assert found.high == pytest.approx(8.8 + above_s)
    assert found.sources[1].basis == "input -47% / +90%: b"


def test_where_all_is_known_only_inputs_are_uncertain_and_no_step_ends_before_it_began() -> None:
    found = prediction_interval(
        1.0,
        lambda data=1.0: data,
        {"data": Uncertainty(1.0, "c")},
        [],
        spread_s=(1.0, 1.0),
    )
    assert [source.input for source in found.sources] == ["data rate"]
    assert (found.level, found.low) == (0.8, pytest.approx(math.exp(-1.2815515655446004)))
    wide = (IntervalSource("a", 3.0, 4.0, ""), IntervalSource("b", 4.0, 3.0, ""))
    assert together(wide) == (5.0, 5.0)


def test_short_messages_in_the_queue_of_gloo_can_only_lengthen() -> None:
    """The model has 49 parameters below 64 KiB."""
    zero1, ddp = (predict("gloo-cpu", f"ddp.strategy={name}") for name in ("zero1", "ddp"))
    (queue,) = (s for s in zero1.prediction_interval_s.sources if s.input == "gloo's queue")
    assert (queue.low_s, queue.usual_s) == (0.0, pytest.approx(49 * 0.28e-3))
    assert queue.high_s == pytest.approx(49 * 0.55e-3)
    assert all(source.input != "gloo's queue" for source in ddp.prediction_interval_s.sources)


@pytest.fixture
def short_log(tmp_path: Path) -> str:
    """An override that names a log of 8 ranks which ends at 1 MB."""
    path = tmp_path / "short.csv"
    rows = ["size_bytes,time_us,nodes,gpus_per_node", "100000,40,1,8", "1000000,60,1,8"]
    path.write_text("\n".join(rows) + "\n", "utf-8")
    return f"cluster.all_reduce={path}"


def test_a_tiny_bucket_outside_a_log_is_said_and_widens_nothing() -> None:
    """4 kB of 78 MB: no time to speak of."""
    result = predict("gloo-cpu", "ddp.bucket_cap_mb=1")
    assert any("4.00 KiB to 4.00 KiB) lie outside" in warning for warning in result.warnings)
    assert result.prediction_interval_s is not None
    (network,) = (s for s in result.prediction_interval_s.sources if s.input == "network model")
    assert "interpolated between its sizes" in network.basis


def test_a_log_that_is_extrapolated_says_so_and_widens_the_interval(short_log: str) -> None:
    inside = predict("resnet50-nccl-log")
    outside = predict("resnet50-nccl-log", short_log, "run.allow_extrapolation=true")
    assert not inside.warnings
    assert "5 of 5 all-reduce sizes (7.82 MiB to 30.0 MiB) lie outside" in outside.warnings[0]
    assert "a log of other ranks or sizes" in str(outside.prediction_interval_s)


def test_links_that_answer_beyond_a_log_are_named_as_the_bottleneck(short_log: str) -> None:
    result = predict(
        "resnet50-nccl-log",
        short_log,
        "cluster.intra_node={bandwidth: 100 MB/s, latency: 5 us}",
    )
    assert "intra-node links (100 MB/s" in result.bottleneck.text
    assert "links stated in the scenario" in str(result.prediction_interval_s)


def test_links_send_the_broadcasts_that_a_log_does_not_cover(tmp_path: Path) -> None:
    """Its 212 kB of buffers lie beyond the log, as all buckets do."""
    path = tmp_path / "tiny.csv"
    path.write_text("size_bytes,time_us,nodes,gpus_per_node\n1024,20,1,8\n65536,30,1,8\n", "utf-8")
    links = "cluster.intra_node={bandwidth: 100 GB/s, latency: 5 us}"
    with_log = predict("resnet50-nccl-log", f"cluster.all_reduce={path}", links)
    by_links = predict("resnet50-nccl-log", "cluster.all_reduce=null", links)
    assert with_log.iteration_time_s.mean == pytest.approx(by_links.iteration_time_s.mean, rel=0.05)
