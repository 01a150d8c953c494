"""How far the host's launch time may be off, and when that matters."""

from __future__ import annotations

from math import exp, hypot

import pytest
from shipped_scenarios import load

import ddpsim
from ddpsim.prediction.program import compile_program
from ddpsim.prediction.resolve import resolve
from ddpsim.strategies.instructions import Communicate, Compute


def test_a_step_that_waits_for_its_host_says_so_and_how_sure_it_is() -> None:
    """Its doubt of the host is in the interval where the step could wait for it, and only there."""
    small = ddpsim.simulate(load("resnet50-8xa100", "workload.batch_per_rank=8"))
    assert small.bottleneck.kind == "host"
    (own,) = [s for s in small.prediction_interval_s.sources if s.input == "host time"]
    assert own.low_s > 0.25 * small.iteration_time_s.mean
    assert own.high_s > 0.65 * small.iteration_time_s.mean
    (first, *_) = small.next_steps
    assert first.settings in (("workload.compile=true",), ("workload.batch_per_rank=16",))
    (measure,) = [step for step in small.next_steps if "the host time adds" in step.why]
    assert measure.settings == ("workload.step_time=MEASURED ms",)
    large = ddpsim.simulate(load("resnet50-8xa100"))
    assert "host time" not in {s.input for s in large.prediction_interval_s.sources}
    measured = load("resnet50-8xa100", "workload.batch_per_rank=8", "workload.step_time=21 ms")
    known = ddpsim.simulate(measured)
    assert "host time" not in {s.input for s in known.prediction_interval_s.sources}
    assert known.bottleneck.kind == "compute"


DEVICE = "memory: 80 GB, memory_bandwidth: 3 TB/s, peak_flops: {fp32: 60 TFLOP/s, bf16: 1 PFLOP/s}"
LINKS = (
    "cluster.intra_node={bandwidth: 300 GB/s, latency: 5 us}",
    "cluster.inter_node={bandwidth: 400 Gbit/s, latency: 5 us}",
)


@pytest.mark.parametrize(
    ("settings", "sigma", "basis", "said"),
    [
        (
            (),
            0.41,
            "16 measured hosts",
            ("published", "30.0 us an operator"),
        ),
        (("workload.compile=true",), 0.50, "compiled code's", ("assumed", "5.00 us a kernel")),
        (
            (f"cluster.device={{{DEVICE}}}", *LINKS),
            0.41,
            "16 measured hosts",
            ("assumed", "30.0 us an operator"),
        ),
        (
            (f"cluster.device={{{DEVICE}, operator: 12 us}}", *LINKS),
            0.1,
            "stated",
            ("stated", "17.0 us an operator"),
        ),
    ],
)
def test_the_hosts_doubt_is_of_who_says_its_times(
    settings: tuple[str, ...], sigma: float, basis: str, said: tuple[str, str]
) -> None:
    """There is always some: no step that waits for its host is known to the microsecond."""
    own = (
        *("cluster.device=h100-sxm-80gb", "workload.batch_per_rank=4"),
        "workload.precision=amp-bf16",
    )
    result = ddpsim.simulate(load("resnet50-8xa100", *own, *settings))
    assert result.bottleneck.kind == "host"
    assert result.prediction_interval_s
    (host,) = [s for s in result.prediction_interval_s.sources if s.input == "host time"]
    assert basis in host.basis
    most = exp(1.2816 * sigma) - 1
    assert 0.8 * most < host.high_s / result.iteration_time_s.mean < 1.001 * most
    (given,) = [entry for entry in result.provenance if entry.input == "host time"]
    assert (given.trust, given.source.partition(" of")[0]) == said
    large = ddpsim.simulate(load("resnet50-8xa100"))
    assert "host time" not in {entry.input for entry in large.provenance}


def test_where_host_and_device_tie_the_interval_moves_both() -> None:
    """Neither shortens the step alone."""
    tied = "workload={model: bert-large, attention: eager, batch_per_rank: 8, precision: amp-bf16}"
    result = ddpsim.simulate(
        load("resnet50-8xa100", "cluster.device={preset: h100, operator: 24 us}", tied)
    )
    sources = {s.input: s.low_s for s in result.prediction_interval_s.sources}
    job = resolve(load("resnet50-8xa100", "cluster.device={preset: h100, operator: 24 us}", tied))
    alone_s = hypot(*(job.step_s() - job.step_s(**{term: 0.8}) for term in ("compute", "host")))
    both_s = job.step_s() - job.step_s(compute=0.8, host=0.8)
    assert both_s > 3 * alone_s
    lower_s = hypot(sources["compute time"], sources["host time"])
    assert lower_s > 0.07 * result.iteration_time_s.mean


def test_a_slower_host_takes_longer_for_all_that_it_does() -> None:
    """Hooks and the launch of collectives too; the device's work stays as it is."""
    job = resolve(load("resnet50-8xa100", "ddp.comm_hook=fp16_compress"))
    program = job.program
    slower = compile_program(job.scenario, job.model, host_factor=3)
    for number in range(program.warmup):
        for usual, longer in zip(program.step(number), slower.step(number), strict=True):
            if isinstance(usual, Compute | Communicate):
                assert longer == usual._replace(host_ns=3 * usual.host_ns)
            else:
                assert longer == usual
