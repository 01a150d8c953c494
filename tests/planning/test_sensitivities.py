"""One input changed at a time, and what the step's length hangs on."""

from __future__ import annotations

from fractions import Fraction

import pytest
from changed_documents import document

from ddpsim.cluster.cost import LinkCost
from ddpsim.cluster.network import Network, Traffic
from ddpsim.cluster.topology.paths import Link
from ddpsim.cluster.transfers import duration_ns
from ddpsim.cluster.what_if_links import quickened, widened
from ddpsim.planning.explain import explain_step, sensitivities
from ddpsim.prediction.job import Job
from ddpsim.prediction.resolve import resolve
from ddpsim.scenario.document import load
from ddpsim.scenario.load import parse

BF16 = "workload.precision=amp-bf16"  # float16 has a GradScaler, which waits for the device
LINKS = LinkCost((Link(20e-6, 3e9), Link(5e-6, 100e9)), ranks=16)


@pytest.mark.parametrize("factor", [0.5, 1.1, 4.0])
def test_bandwidth_and_latency_change_alone(factor: float) -> None:
    """A ring of unlike links, as their definition has it."""
    size = 16_000_000
    by_hand = LinkCost(
        tuple(Link(link.latency_s, link.bandwidth_bytes_per_s * factor) for link in LINKS.links),
        ranks=16,
    )
    network = Network(LINKS, None, "", (), traffic=Traffic(other_share=Fraction(1, 2)))
    wider = widened(network, factor)
    assert wider
    assert wider.cost.transfer("all_reduce", size) == by_hand.transfer("all_reduce", size)
    assert wider.traffic.other_share == Fraction(1, 2) / Fraction(str(factor))
    lower = quickened(network, factor)
    assert lower
    assert lower.traffic == network.traffic
    slower = LinkCost(
        tuple(Link(link.latency_s * factor, link.bandwidth_bytes_per_s) for link in LINKS.links),
        ranks=16,
    )
    found, expected = (cost.transfer("all_reduce", size) for cost in (lower.cost, slower))
    assert abs(duration_ns(found) - duration_ns(expected)) <= 30  # ticks: one a step


@pytest.mark.parametrize(
    "traffic",
    [
        "cluster.background={rate: 1.5 GB/s}",
        "workload.data={rate: 320 samples/s, sample_size: 4 MB}",
    ],
)
def test_wider_links_are_wider_for_others_too(traffic: str) -> None:
    """As the scenario with wider links says: what others send stays as it is."""
    links = "cluster.inter_node={{bandwidth: {} GB/s, latency: 5 us, transport: rdma}}"
    base, wider = (
        document("resnet50-2x8-25gbit", traffic, links.format(rate), "cluster.algorithm=ring")
        for rate in ("3", "3.3")
    )
    found = {each.what: each.change for each in sensitivities(resolve(parse(base)))}
    before_s, after_s = (resolve(parse(each)).step_s() for each in (base, wider))
    said = found["10 % more bandwidth on every link"]
    assert said == pytest.approx(after_s / before_s - 1, abs=2e-3)
    assert said < -0.07


def test_a_step_that_waits_for_its_host_hangs_on_it() -> None:
    """And on nothing else; what `run` tries first there is among what helps."""
    small = ("workload.batch_per_rank=4", "cluster.device=h100-sxm-80gb")
    found = explain_step(document("resnet50-8xa100", *small))
    hangs_on = {each.what: each.change for each in found.sensitivities if each.change < -1e-6}
    assert list(hangs_on) == ["a host that launches 10 % faster"]
    assert -0.1 < hangs_on["a host that launches 10 % faster"] < -0.07
    assert found.result.next_steps[0].settings == found.helps[0].settings
    assert found.helps[0].settings == ("workload.compile=true",)
    large = explain_step(document("resnet50-8xa100", BF16))
    assert not any("host" in each.what for each in large.sensitivities)
    assert not any("workload.compile=true" in each.settings for each in large.helps)


EVERY = ["resnet50-2x8-25gbit", "machines-64xh100", "gloo-cpu", "slow-network", "shared-network"]


@pytest.mark.parametrize("name", EVERY)
def test_a_better_input_never_lengthens_the_step(name: str) -> None:
    base = document(name, "run.iterations=1")
    found = {each.what: each for each in sensitivities(resolve(parse(base)))}
    assert all(each.change_s <= 1e-9 for each in found.values())
    endless = found["a network that takes no time, nor slows compute"].change_s
    assert all(
        endless <= found[what].change_s + 1e-9
        for what in found
        if "bandwidth" in what or "latency" in what or "all-reduces" in what
    )


def test_compute_is_a_tenth_faster_and_what_ddp_adds_stays() -> None:
    alone = {"nodes": 1, "gpus_per_node": 1, "device": "v100-sxm-32gb"}
    workload = {"model": "resnet18", "batch_per_rank": 8, "step_time": "50 ms"}
    job = resolve(parse(load({"schema": "ddpsim/1", "workload": workload, "cluster": alone})))
    (found,) = sensitivities(job)
    assert found.what == "compute 10 % faster"
    assert found.change_s == pytest.approx(0.05 / 1.1 - 0.05, abs=1e-7)
    assert found.change == pytest.approx(found.change_s / job.step_s())


@pytest.mark.parametrize("gbit_per_s", [1, 100])
def test_what_a_step_hangs_on_is_what_run_says_of_such_links(gbit_per_s: float) -> None:
    cluster = {"nodes": 4, "gpus_per_node": 1, "device": "v100-sxm-32gb", "algorithm": "ring"}
    workload = {"model": "resnet18", "batch_per_rank": 8, "step_time": "50 ms"}

    def job(rate: float, latency_ms: float) -> Job:
        link = {"bandwidth": f"{rate} Gbit/s", "latency": f"{latency_ms} ms"}
        link["message_overhead"] = "0 us"  # more bandwidth has more channels, which send more
        here = {"workload": workload, "cluster": cluster | {"inter_node": link}}
        return resolve(parse(load({"schema": "ddpsim/1", **here})))

    whole_s = job(gbit_per_s, 5).step_s()
    found = {each.what: each.change_s for each in sensitivities(job(gbit_per_s, 5))}
    for what, changed in (
        ("10 % more bandwidth on every link", job(1.1 * gbit_per_s, 5)),
        ("half the latency", job(gbit_per_s, 2.5)),
        ("endless bandwidth: latency alone", job(8e6, 5)),
        ("all-reduces 10 % faster", job(1.1 * gbit_per_s, 5 / 1.1)),
        ("a network that takes no time, nor slows compute", job(8e6, 0)),
    ):
        # of hops of milliseconds NCCL's own protocols and messages are microseconds
        assert found[what] == pytest.approx(changed.step_s() - whole_s, abs=5e-4), what


def test_a_log_does_not_say_what_is_latency() -> None:
    found = [s.what for s in sensitivities(resolve(parse(document("resnet50-nccl-log"))))]
    assert found == [
        "compute 10 % faster",
        "all-reduces 10 % faster",
        "a network that takes no time, nor slows compute",
    ]
