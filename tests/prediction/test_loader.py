"""A data loader as the bottleneck of a step."""

from __future__ import annotations

import pytest
from shipped_scenarios import LEADS, load, predict

import ddpsim
from ddpsim.prediction.resolve import resolve


@pytest.mark.parametrize("rate", [900, 1000, 1100])
def test_a_loader_that_every_step_waits_for_is_the_bottleneck(rate: int) -> None:
    """Though more communication is exposed: a faster network would bring nothing."""
    own = "cluster.device={preset: a100-sxm-80gb, operator: 12 us}"
    data = (f"workload.data={{rate: {rate} samples/s}}", own)
    result = predict("resnet50-2x8-25gbit", *data)
    assert result.bottleneck.kind == "data"
    assert result.throughput_per_gpu == pytest.approx(rate)
    faster = predict("resnet50-2x8-25gbit", *data, "cluster.inter_node.bandwidth=10000 Gbit/s")
    assert faster.iteration_time_s == result.iteration_time_s


def test_a_loader_is_the_bottleneck_too_where_it_keeps_the_host_from_launching() -> None:
    result = ddpsim.simulate(ddpsim.load_scenario(LEADS, ["workload.data={rate: 700 samples/s}"]))
    assert result.iteration_time_s.mean == pytest.approx(16 / 700)
    assert result.bottleneck.text == "the data loader: the batches of a step take 22.9 ms"


def test_how_fast_a_loader_is_does_not_change_what_it_reads() -> None:
    """Samples over the network are there, whether the loader waits or not."""
    data = "workload.data={rate: 1000000 samples/s, sample_size: 300 KB}"
    job = resolve(load("resnet50-2x8-25gbit", data))
    assert job.step_s(data=1e-9) == pytest.approx(job.step_s(), rel=1e-3)
