"""One term so many times as long gives the measured step."""

from __future__ import annotations

import pytest
from shipped_scenarios import load, predict, simulated

import ddpsim
from ddpsim.prediction import stretches as module
from ddpsim.prediction.resolve import resolve
from ddpsim.report.text import render
from ddpsim.result.model import Stretch


def stretches(name: str, measured_s: float, *settings: str) -> dict[str, Stretch]:
    """By the term that would have to be so many times as long."""
    job, result = resolve(load(name, *settings)), simulated(name, *settings)
    found = module.stretches(job, result, measured_s)
    assert all(0.2 <= stretch.factor <= 1000 for stretch in found)
    return {stretch.term: stretch for stretch in found}


@pytest.mark.parametrize("measured_s", [0.0455, 0.2])
def test_a_network_so_much_slower_gives_the_measured_step(measured_s: float) -> None:
    network = stretches("resnet50-2x8-25gbit", measured_s)["network"]
    assert network.suffices
    latency = f"transport: rdma, latency: {20 * network.factor} us"
    message = f"message_overhead: {2.5 * network.factor} us"
    links = (
        f"{{bandwidth: {25 / network.factor} Gbit/s, {latency}, {message}}}",
        f"{{bandwidth: {235 / network.factor} GB/s, latency: {6.5 * network.factor} us}}",
    )
    keys = ("cluster.inter_node", "cluster.intra_node")
    slower = (f"{key}={link}" for key, link in zip(keys, links, strict=True))
    step_s = predict("resnet50-2x8-25gbit", *slower).iteration_time_s.mean
    # over links so much slower NCCL chooses otherwise
    assert step_s == pytest.approx(measured_s, rel=0.1)
    assert network.step_s == pytest.approx(measured_s, rel=0.01)


def test_compute_so_much_slower_gives_the_measured_step() -> None:
    compute = stretches("straggler", 0.3)["compute"]
    assert compute.suffices
    slower = predict("straggler", f"workload.step_time={162 * compute.factor} ms")
    assert slower.iteration_time_s.mean == pytest.approx(0.3, rel=0.01)


def test_what_cannot_explain_a_measurement_is_said_to() -> None:
    """The network is hidden, or far too small a part; nothing is more than 100 % faster."""
    slow, fast = (stretches("straggler", seconds)["network"] for seconds in (0.4, 0.15))
    assert slow.suffices
    assert 30 < slow.factor < 300
    assert (fast.factor, fast.suffices) == (0.2, False)
    assert fast.step_s > 0.15
    assert not stretches("resnet50-2x8-25gbit", 0.03)["compute"].suffices


def test_a_host_so_much_slower_gives_the_measured_step() -> None:
    """Compute, hidden behind it, would have to take far longer to do so."""
    small = ("workload.batch_per_rank=4", "cluster.device=h100-sxm-80gb")
    found = stretches("resnet50-8xa100", 0.06, *small)
    assert found["host"].suffices
    slower_s = resolve(load("resnet50-8xa100", *small)).step_s(host=found["host"].factor)
    assert slower_s == pytest.approx(0.06, rel=0.01)
    assert found["compute"].factor > 4 * found["host"].factor
    faster = stretches("resnet50-8xa100", 0.01, *small)
    assert faster["host"].suffices
    assert not faster["compute"].suffices
    measured = (*small, "workload.step_time=21 ms")
    assert "host" not in stretches("resnet50-8xa100", 0.06, *measured)


def test_a_verdict_has_them_and_explanations_by_causes() -> None:
    scenario, result = load("straggler"), simulated("straggler")
    verdict = ddpsim.judge(scenario, result, 0.4)
    assert verdict.normal is False
    assert {stretch.term: stretch for stretch in verdict.stretches} == stretches("straggler", 0.4)
    shown = " ".join(render(result, "x.yaml", verdict).split())
    assert verdict.explanations
    assert all(explanation in shown for explanation in verdict.explanations)
    assert "ddpsim diagnose x.yaml --measured '400 ms'" in shown
    found = ddpsim.diagnose(scenario, "400 ms").causes
    assert [cause.key for cause in verdict.causes] == [cause.key for cause in found]
