"""From scenario file to answer: every shipped scenario, its figures, and the same bytes again."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ddpsim
from ddpsim.prediction.api import simulate_and_observe
from ddpsim.prediction.interval import prediction_interval, together
from ddpsim.prediction.resolve import resolve
from ddpsim.prediction.uncertainty import uncertainties
from ddpsim.provenance import Uncertainty
from ddpsim.report.text import render
from ddpsim.result.model import IntervalSource
from ddpsim.result.timeline import MessageSpan

ROOT = Path(__file__).resolve().parent.parent.parent
SCENARIOS = sorted((ROOT / "scenarios").glob("*.yaml"))
GOLDEN = Path(__file__).parent.parent / "golden"


def load(name: str, *overrides: str) -> ddpsim.Scenario:
    return ddpsim.load_scenario(ROOT / "scenarios" / f"{name}.yaml", overrides)


def predict(name: str, *overrides: str) -> ddpsim.Result:
    return ddpsim.simulate(load(name, *overrides))


def mean_ms(name: str, *overrides: str) -> float:
    return predict(name, *overrides).iteration_time_s.mean * 1e3


def test_there_are_scenarios_that_matter() -> None:
    assert len(SCENARIOS) >= 8


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenarios_answer_soundly(path: Path) -> None:
    result = ddpsim.simulate(ddpsim.load_scenario(path))
    parts = result.to_dict()["breakdown_s"].values()
    assert math.isclose(sum(parts), result.iteration_time_s.mean, abs_tol=1e-10)
    assert min(parts) >= 0
    interval = result.prediction_interval_s
    assert interval is not None
    assert interval.low < result.iteration_time_s.mean < interval.high
    assert 0 < result.scaling_efficiency <= 1.001
    assert result.exposed_comm_s <= result.comm_time_s
    assert result.overlap_fraction is None or 0 <= result.overlap_fraction <= 1
    assert [bucket.index for bucket in result.buckets] == list(range(len(result.buckets)))
    assert all(b.ready_s <= b.start_s <= b.end_s for b in result.buckets)
    assert all(math.isfinite(number) for number in numbers(result.to_dict()))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenarios_say_what_they_show(path: Path) -> None:
    lines = path.read_text("utf-8").splitlines()
    comment = "\n".join(line for line in lines if line.startswith("#"))
    assert "Shows:" in comment
    assert "Expect:" in comment or "Try:" in comment


@pytest.mark.parametrize("name", ["resnet50-2x8-25gbit", "straggler", "gloo-cpu"])
def test_the_screen_is_as_recorded(name: str, golden: Any) -> None:
    scenario = load(name)
    result = ddpsim.simulate(scenario)
    verdict = ddpsim.judge(scenario, result, 0.5)
    golden(render(result, f"{name}.yaml", verdict) + "\n", GOLDEN / f"{name}.txt")


def test_the_screen_is_one_screen() -> None:
    for path in SCENARIOS:
        lines = render(ddpsim.simulate(ddpsim.load_scenario(path)), path.name).splitlines()
        assert len(lines) <= 50, path.name
        assert max(len(line) for line in lines) <= 100, path.name


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [n for item in value.values() for n in numbers(item)]
    if isinstance(value, list):
        return [n for item in value for n in numbers(item)]
    return [value] if isinstance(value, (int, float)) else []


def test_the_same_bytes_whatever_the_hash_seed() -> None:
    outputs = {
        subprocess.run(
            [sys.executable, "-m", "ddpsim", "run", "scenarios/straggler.yaml", "--json"],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(outputs) == 1
    assert json.loads(outputs.pop())["schema"] == "ddpsim.result/1"


def test_expectations_of_the_scenarios() -> None:
    """What the comments promise."""
    assert predict("resnet50-8xa100").bottleneck.kind == "compute"
    assert predict("resnet50-8xa100").scaling_efficiency > 0.9
    slow = predict("resnet50-2x8-25gbit")
    assert slow.bottleneck.kind == "communication"
    assert 0.6 < slow.scaling_efficiency < 0.72
    ring = predict("resnet50-2x8-25gbit", "cluster.algorithm=ring")
    assert ring.exposed_comm_s > 2 * slow.exposed_comm_s
    assert predict("straggler").bottleneck.kind == "stragglers"
    ratio = mean_ms("straggler") / mean_ms("straggler", "cluster.stragglers=null")
    assert 1.15 < ratio < 1.22
    assert mean_ms("accumulation") < 2 * mean_ms("accumulation", "ddp.accumulation_steps=1")
    nothing_hidden = predict("slow-network")
    assert nothing_hidden.overlap_fraction is not None
    assert nothing_hidden.overlap_fraction < 0.1
    assert (
        nothing_hidden.throughput_samples_per_s < 1 / nothing_hidden.baselines_s.compute_only * 32
    )
    caps = [mean_ms("gpt2-bucket-choice", f"ddp.bucket_cap_mb={cap}") for cap in (25, 100, 500)]
    assert caps == sorted(caps)


def test_a_hook_halves_the_bytes() -> None:
    half = predict("resnet50-2x8-25gbit", "ddp.comm_hook=bf16_compress")
    full = predict("resnet50-2x8-25gbit")
    assert 0.45 < half.comm_time_s / full.comm_time_s < 0.55


def test_noise_spreads_the_iterations_and_lengthens_the_mean() -> None:
    noisy = predict("straggler", "cluster.stragglers=null").iteration_time_s
    quiet = predict("straggler", "cluster.stragglers=null", "run.jitter=null").iteration_time_s
    assert quiet.p10 == quiet.p90
    assert noisy.p10 < noisy.p50 < noisy.p90
    assert noisy.mean > quiet.mean


def test_the_seed_matters_and_repeats() -> None:
    first, again, other = (mean_ms("straggler", f"run.seed={seed}") for seed in (1, 1, 2))
    assert first == again != other


def test_reference_engine_agrees() -> None:
    for name in ("resnet50-8xa100", "straggler"):
        scenario = ddpsim.load_scenario(ROOT / "scenarios" / f"{name}.yaml", ["run.iterations=2"])
        fast, plain = ddpsim.simulate(scenario), ddpsim.simulate(scenario, "reference")
        assert fast.iteration_time_s == plain.iteration_time_s
        assert fast.breakdown_s == plain.breakdown_s
        assert fast.buckets == plain.buckets
        assert "ring:steps" in plain.engine.paths


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("ddp.find_unused_parameters=true", "buckets never rebuilt"),
        ("ddp.torch='1.4'", "buckets never rebuilt"),
        ("ddp.static_graph=true", "before the bucket rebuild"),
    ],
)
def test_warm_up_says_whether_buckets_are_rebuilt(setting: str, words: str) -> None:
    result = predict("resnet50-8xa100", setting)
    assert words in render(result, "x.yaml")
    assert (result.buckets_rebuilt_at is None) == (words == "buckets never rebuilt")


@pytest.mark.parametrize(("backend", "says"), [("gloo", "gathers"), ("nccl", "refuses")])
def test_sparse_gradients_are_warned_of(tmp_path: Path, backend: str, says: str) -> None:
    profile = json.loads((ROOT / "scenarios" / "testbed" / "transformer-500mbit.json").read_text())
    profile["parameters"][0]["sparse"] = True
    (tmp_path / "sparse.json").write_text(json.dumps(profile))
    scenario = {
        "schema": "ddpsim/1",
        "workload": {"profile": str(tmp_path / "sparse.json"), "batch_per_rank": 4},
        "ddp": {"backend": backend},
        "cluster": {
            "nodes": 2,
            "gpus_per_node": 1,
            "device": "cpu-core" if backend == "gloo" else "a100",
        },
    }
    (warning,) = ddpsim.simulate(ddpsim.load_scenario(scenario)).warnings
    assert warning.startswith("sparse gradients (1; first: ")
    assert says in warning


TRANSFORMER = json.loads(
    (ROOT / "scenarios" / "testbed" / "transformer-500mbit.json").read_text("utf-8")
)


def on_one_core(
    tmp_path: Path, profile: dict[str, Any], workload: dict[str, Any]
) -> ddpsim.Scenario:
    """A model profile on one rank, with more keys of its workload."""
    (tmp_path / "model.json").write_text(json.dumps(profile))
    known = {"profile": str(tmp_path / "model.json"), "batch_per_rank": 4}
    return ddpsim.load_scenario(
        {
            "schema": "ddpsim/1",
            "workload": known | workload,
            "ddp": {"backend": "gloo"},
            "cluster": {"nodes": 1, "gpus_per_node": 1, "device": "cpu-core"},
        }
    )


@pytest.mark.parametrize(
    ("stated", "workload", "sigma"),
    [
        ({}, {}, 0.02),  # assumed
        ({"sigma": 0.004}, {}, 0.004),
        ({"sigma": 0.004, "scaled_to": "a100-sxm-40gb"}, {}, 0.2),
        ({"sigma": 0.004}, {"step_time": "500 ms"}, 0.02),  # of another step
    ],
)
def test_a_profile_says_how_far_its_times_may_be_off(
    tmp_path: Path, stated: dict[str, Any], workload: dict[str, Any], sigma: float
) -> None:
    job = resolve(on_one_core(tmp_path, TRANSFORMER | stated, workload))
    assert uncertainties(job)["compute"].sigma == sigma


def test_a_file_name_is_no_scenario() -> None:
    for call in (ddpsim.simulate, ddpsim.observe):
        with pytest.raises(TypeError, match=r"'job.yaml' is no Scenario: give what load_scenario"):
            call("job.yaml")  # type: ignore[operator]


def test_an_engine_that_does_not_exist() -> None:
    scenario = ddpsim.load_scenario(ROOT / "scenarios" / "gloo-cpu.yaml")
    with pytest.raises(ValueError, match="'fast'; wanted one of auto, reference"):
        ddpsim.simulate(scenario, "fast")  # type: ignore[arg-type]


@pytest.mark.parametrize("package", ["ddpsim", "calibrate"])
def test_packages_say_that_they_are_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()


CALM = ("cluster.gpus_per_node=1", "cluster.stragglers=null", "run.jitter=null")


def test_step_time_anchors_one_device() -> None:
    """One device without DDP takes the stated time; DDP on one rank adds its own cost."""
    alone = predict("straggler", *CALM)
    assert math.isclose(alone.baselines_s.compute_only, 0.162, rel_tol=1e-6)
    assert 1.005 < alone.iteration_time_s.mean / 0.162 < 1.05
    assert alone.overlap_fraction is None
    assert alone.comm_time_s == 0


@pytest.mark.parametrize("with_ddp_ms", [162.5, 164, 171, 200])
def test_ddp_on_one_device_takes_the_step_that_was_measured(with_ddp_ms: float) -> None:
    stated = f"workload.step_time={{total: 162 ms, with_ddp: {with_ddp_ms} ms}}"
    alone = predict("straggler", *CALM, stated)
    # every copy is rounded to a nanosecond
    assert math.isclose(alone.iteration_time_s.mean, with_ddp_ms / 1e3, abs_tol=1e-6)
    assert math.isclose(alone.baselines_s.compute_only, 0.162, rel_tol=1e-6)
    (known,) = (p for p in alone.provenance if p.input == "workload.step_time.with_ddp")
    assert known.trust == "stated"
    reference = ddpsim.simulate(load("straggler", *CALM, stated), "reference")
    assert reference.iteration_time_s == alone.iteration_time_s


def test_less_than_launching_the_collectives_takes_is_warned_of() -> None:
    cluster = ["cluster.nodes=1", "cluster.gpus_per_node=1"]
    steps = [f"workload.step_time={{total: 1 ms, with_ddp: {ms} ms}}" for ms in (1.05, 10)]
    less, more = (predict("resnet50-8xa100", *cluster, "cluster.all_reduce=null", s) for s in steps)
    (warning,) = (said for said in less.warnings if "with_ddp" in said)
    assert "launching DDP's collectives is priced longer" in warning
    assert less.iteration_time_s.mean > 1.05e-3
    assert not [said for said in more.warnings if "with_ddp" in said]


def test_a_profile_may_hold_the_step_with_ddp(tmp_path: Path) -> None:
    """It counts as measured, unless another step is stated, or the times are of another device."""
    bare_s = sum(TRANSFORMER[part] for part in ("forward_s", "backward_s", "optimizer_s"))

    def predicted(workload: dict[str, Any], **more: Any) -> ddpsim.Result:
        return ddpsim.simulate(on_one_core(tmp_path, TRANSFORMER | more, workload))

    with_ddp = predicted({}, with_ddp_s=1.1 * bare_s)
    assert math.isclose(with_ddp.iteration_time_s.mean, 1.1 * bare_s, rel_tol=1e-6)
    trust = {p.input: p.trust for p in with_ddp.provenance}
    assert trust["workload.profile.with_ddp_s"] == "measured"
    plain = predicted({})
    assert plain.iteration_time_s.mean < 1.07 * bare_s
    for other in (
        predicted({}, with_ddp_s=None),
        predicted({"step_time": f"{bare_s!r} s"}, with_ddp_s=1.1 * bare_s),
        predicted({}, with_ddp_s=1.1 * bare_s, scaled_to="cpu-core"),
    ):
        assert math.isclose(other.iteration_time_s.mean, plain.iteration_time_s.mean, rel_tol=1e-3)
    least = predicted({}, with_ddp_s=bare_s + 1e-6)  # less than launching collectives takes
    assert bare_s < least.iteration_time_s.mean < plain.iteration_time_s.mean


def test_ddp_on_a_core_takes_the_step_that_was_measured() -> None:
    stated = "workload.step_time={forward: 100 ms, backward: 200 ms, with_ddp: 330 ms}"
    one = ("cluster.nodes=1", "cluster.gpus_per_node=1", "run.jitter=null")
    assert math.isclose(
        mean_ms("gloo-cpu", *one, stated, "ddp.bucket_cap_mb=default"), 330, abs_tol=1e-4
    )


def test_a_step_with_ddp_is_one_of_torchs_default_options() -> None:
    """What other options save or cost comes on top of it, and is not taken for DDP's own work."""
    stated = "workload.step_time={total: 162 ms, with_ddp: 171 ms}"

    def step_ms(*options: str) -> float:
        return mean_ms("straggler", *CALM, stated, *options)

    assert step_ms("ddp.gradient_as_bucket_view=true") < 171 - 1
    assert step_ms("ddp.comm_hook=fp16_compress") > 171 + 0.1
    assert math.isclose(step_ms("ddp.bucket_cap_mb=1"), 171, abs_tol=0.1)
    assert math.isclose(step_ms("ddp.accumulation_steps=2"), 171 + 162, abs_tol=2)
    assert step_ms("cluster.gpus_per_node=4", "cluster.algorithm=data_parallel") != step_ms()


@pytest.mark.parametrize(
    ("measured_s", "words"), [(0.048, "normal"), (0.2, "network"), (0.03, "network")]
)
def test_verdicts(measured_s: float, words: str) -> None:
    scenario = load("resnet50-2x8-25gbit")
    verdict = ddpsim.judge(scenario, ddpsim.simulate(scenario), measured_s)
    assert words in verdict.text + " ".join(verdict.explanations)
    assert verdict.normal == (measured_s == 0.048)


LEADS = {  # the host is the slower one, but has a head start after the first iterations
    "schema": "ddpsim/1",
    "workload": {"model": "resnet50", "batch_per_rank": 16, "precision": "amp-bf16"},
    "ddp": {"static_graph": True},
    "cluster": {
        "machine": "dgx-h100",
        "nodes": 2,
        "gpus_per_node": 2,
        "inter_node": {"bandwidth": "25 Gbit/s"},
    },
}


@pytest.mark.parametrize(
    "extra",
    [
        [],
        ["cluster.stragglers={factors: {3: 1.1}}"],
        ["workload.data={rate: 2100 samples/s}"],
        ["workload.data={rate: 2500 samples/s, workers: 4}"],
        ["ddp.accumulation_steps=2"],
    ],
)
def test_steady_steps_keep_nothing_of_the_start(extra: list[str]) -> None:
    """However many are simulated, and however: nothing varies, so nothing is spread."""
    found = [
        ddpsim.simulate(ddpsim.load_scenario(LEADS, [*extra, f"run.iterations={count}"]), mode)
        for count, mode in [(1, "auto"), (2, "auto"), (20, "auto"), (300, "auto"), (3, "reference")]
    ]
    times = {result.iteration_time_s for result in found}
    assert len(times) == 1
    (time,) = times
    assert time.p10 == time.p50 == time.p90
    assert {result.bottleneck for result in found} == {found[0].bottleneck}


@pytest.mark.parametrize(
    ("settings", "step_s"),
    [
        (["workload.data={rate: 60 samples/s}"], 8 / 60),
        (["workload.data={rate: 65 samples/s}"], 8 / 65),
        (["workload.data={rate: 65 samples/s, workers: 2}", "ddp.accumulation_steps=2"], 16 / 65),
    ],
)
def test_steady_steps_on_cpus_keep_no_batches_of_the_start(
    settings: list[str], step_s: float
) -> None:
    """The first steps take longer than their batches, which are then ahead for a while."""
    asked = {
        "schema": "ddpsim/1",
        "workload": {"model": "resnet18", "batch_per_rank": 8, "step_time": "100 ms"},
        "ddp": {"backend": "gloo"},
        "cluster": {
            "nodes": 2,
            "gpus_per_node": 1,
            "device": "cpu-core",
            "inter_node": {"bandwidth": "10 Gbit/s", "latency": "10 us"},
        },
    }
    for count in (1, 20):
        scenario = ddpsim.load_scenario(asked, [*settings, f"run.iterations={count}"])
        (brief,) = ddpsim.simulate_many([scenario])
        assert brief.iteration_time_s.mean == pytest.approx(step_s, rel=1e-6)


@pytest.mark.parametrize("extra", [[], ["workload.data={rate: 2100 samples/s}"]])
def test_steady_steps_beside_traffic_keep_nothing_of_the_start(extra: list[str]) -> None:
    """Traffic that takes next to nothing changes next to nothing."""
    hint = "cluster.background={rate: 1 kbit/s, busy: 1 us, every: 1000 h}"
    alone = ddpsim.simulate(ddpsim.load_scenario(LEADS, extra)).iteration_time_s.mean
    for count in (1, 20):
        scenario = ddpsim.load_scenario(LEADS, [*extra, hint, f"run.iterations={count}"])
        (brief,) = ddpsim.simulate_many([scenario])
        assert brief.iteration_time_s.mean == pytest.approx(alone, rel=1e-4)


def test_noise_begins_when_the_steps_are_steady() -> None:
    """Of one step it is the same, however long the way there: a flag changes no draw."""
    jitter = ["run.jitter={sigma: 0.3}", "run.stalls={probability: 0.05, duration: 20 ms}"]
    usual, static = (
        predict("resnet50-2x8-25gbit", *jitter, f"ddp.static_graph={flag}")
        for flag in ("false", "true")
    )
    assert static.iteration_time_s.mean == pytest.approx(usual.iteration_time_s.mean, rel=1e-3)


@pytest.mark.parametrize("rate", [900, 1000, 1130])
def test_a_loader_that_every_step_waits_for_is_the_bottleneck(rate: int) -> None:
    """Though more communication is exposed: a faster network would bring nothing."""
    data = f"workload.data={{rate: {rate} samples/s}}"
    result = predict("resnet50-2x8-25gbit", data)
    assert result.bottleneck.kind == "data"
    assert result.throughput_per_gpu == pytest.approx(rate)
    faster = predict("resnet50-2x8-25gbit", data, "cluster.inter_node.bandwidth=10000 Gbit/s")
    assert faster.iteration_time_s == result.iteration_time_s


def test_a_loader_is_the_bottleneck_too_where_it_keeps_the_host_from_launching() -> None:
    result = ddpsim.simulate(ddpsim.load_scenario(LEADS, ["workload.data={rate: 702 samples/s}"]))
    assert result.iteration_time_s.mean == pytest.approx(16 / 702)
    assert result.bottleneck.text == "the data loader: the batches of a step take 22.79 ms"


def test_a_run_too_short_for_its_stalls_or_bursts_says_so() -> None:
    rare = predict("resnet50-2x8-25gbit", "run.stalls={probability: 0.001, duration: 1 s}")
    assert "expected to hold 0.32 stalls" in rare.warnings[0]
    assert "set run.iterations to 1,250 or more" in rare.warnings[0]
    often = predict("resnet50-2x8-25gbit", "run.stalls={probability: 0.1, duration: 1 ms}")
    assert not often.warnings
    bursts = "cluster.background={rate: 25 Gbit/s, busy: 2 s, every: 10 s}"
    short = predict("resnet50-2x8-25gbit", bursts)
    assert "mean depends on where it stands in that" in short.warnings[0]
    always = predict("resnet50-2x8-25gbit", "cluster.background={rate: 12.5 Gbit/s}")
    assert not always.warnings
    assert always.is_disturbed


def test_a_measured_step_is_explained_by_the_slowest_rank() -> None:
    """Of ranks that differ already it is the slowest one that takes longer still."""
    scenario = load("straggler")
    verdict = ddpsim.judge(scenario, ddpsim.simulate(scenario), 0.3)
    (text,) = [text for text in verdict.explanations if text.startswith("a straggler")]
    factor = float(text.split("computing ")[1].split(" x")[0])
    slower = predict("straggler", f"cluster.stragglers.factors.3={1.2 * factor}")
    assert slower.iteration_time_s.mean == pytest.approx(0.3, rel=0.01)


def test_how_fast_a_loader_is_does_not_change_what_it_reads() -> None:
    """Samples over the network are there, whether the loader waits or not."""
    data = "workload.data={rate: 1000000 samples/s, sample_size: 300 KB}"
    job = resolve(load("resnet50-2x8-25gbit", data))
    assert job.step_s(data=1e-9) == pytest.approx(job.step_s(), rel=1e-3)


def test_the_median_rank_is_one_that_waits_where_half_are_slow() -> None:
    one_is_slow = predict("resnet50-8xa100", "cluster.stragglers={factors: {0: 1.5}}")
    half = "cluster.stragglers={factors: {0: 1.5, 1: 1.5, 2: 1.5, 3: 1.5}}"
    assert predict("resnet50-8xa100", half).bottleneck == one_is_slow.bottleneck


def test_a_free_network_and_one_rank_agree() -> None:
    free = (
        "cluster.intra_node={bandwidth: 1000 TB/s, latency: 0 s}",
        "cluster.device=a100-sxm-80gb",
        "cluster.protocol=Simple",  # LL has a limit of its own
    )
    one = mean_ms("resnet50-8xa100", "cluster.gpus_per_node=1")
    assert math.isclose(mean_ms("resnet50-8xa100", *free), one, rel_tol=1e-5)


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
        calibrated=False,
        taken_as_equal=True,
        hidden_comm_s=1.5,
        spread_s=(8.5, 9.2),
    )
    z = 1.2815515655446004  # 80 % of a normal distribution lie within so many sigma
    slower = {"compute": 1.1 * 6 * math.expm1(z * 0.1), "network": 1.1 * 2 * math.expm1(z * 0.5)}
    faster = {"compute": -1.1 * 6 * math.expm1(-z * 0.1), "network": -1.1 * 2 * math.expm1(-z / 2)}
    by_input = {source.input: (source.low_s, source.high_s) for source in found.sources}
    assert by_input == {
        "compute time": pytest.approx((faster["compute"], slower["compute"])),
        "network time": pytest.approx((faster["network"], slower["network"])),
        "jitter": pytest.approx((0.3, 0.4)),
        "uncalibrated interference": pytest.approx((0, 0.22 * 1.5)),
        "unequal ranks": pytest.approx((0, 0.12 * 8.8)),
    }
    above_s = math.hypot(*slower.values(), 0.4) + 0.22 * 1.5 + 0.12 * 8.8
    assert found.low == pytest.approx(8.8 - math.hypot(*faster.values(), 0.3))
    assert found.high == pytest.approx(8.8 + above_s)
    assert found.sources[1].basis == "-47% +90% (b)"


def test_where_all_is_known_only_inputs_are_uncertain_and_no_step_ends_before_it_began() -> None:
    found = prediction_interval(
        1.0,
        lambda data=1.0: data,
        {"data": Uncertainty(1.0, "c")},
        calibrated=True,
        taken_as_equal=False,
        hidden_comm_s=1.5,
        spread_s=(1.0, 1.0),
    )
    assert [source.input for source in found.sources] == ["data rate"]
    assert (found.level, found.low) == (0.8, pytest.approx(math.exp(-1.2815515655446004)))
    wide = (IntervalSource("a", 3.0, 4.0, ""), IntervalSource("b", 4.0, 3.0, ""))
    assert together(wide) == (5.0, 5.0)


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
    assert any("4.096 kB to 4.096 kB) lie outside" in warning for warning in result.warnings)
    assert result.prediction_interval_s is not None
    (network,) = (s for s in result.prediction_interval_s.sources if s.input == "network time")
    assert "interpolated between its sizes" in network.basis


def test_a_log_that_is_extrapolated_says_so_and_widens_the_interval(short_log: str) -> None:
    inside = predict("resnet50-nccl-log")
    outside = predict("resnet50-nccl-log", short_log, "run.allow_extrapolation=true")
    assert not inside.warnings
    assert "5 of 5 all-reduce sizes (8.196 MB to 31.50 MB) lie outside" in outside.warnings[0]
    assert "a log of other ranks or sizes" in str(outside.prediction_interval_s)


def test_links_that_answer_beyond_a_log_are_named_as_the_bottleneck(short_log: str) -> None:
    result = predict(
        "resnet50-nccl-log",
        short_log,
        "cluster.intra_node={bandwidth: 100 MB/s, latency: 5 us}",
    )
    assert "intra-node links (100.0 MB/s" in result.bottleneck.text
    assert "links stated in the scenario" in str(result.prediction_interval_s)


def test_links_send_the_broadcasts_that_a_log_does_not_cover(tmp_path: Path) -> None:
    """Its 212.5 kB of buffers lie beyond the log, as all buckets do."""
    path = tmp_path / "tiny.csv"
    path.write_text("size_bytes,time_us,nodes,gpus_per_node\n1024,20,1,8\n65536,30,1,8\n", "utf-8")
    links = "cluster.intra_node={bandwidth: 100 GB/s, latency: 5 us}"
    with_log = predict("resnet50-nccl-log", f"cluster.all_reduce={path}", links)
    by_links = predict("resnet50-nccl-log", "cluster.all_reduce=null", links)
    assert with_log.iteration_time_s.mean == pytest.approx(by_links.iteration_time_s.mean, rel=0.05)


def test_very_many_ranks_leave_the_ring_as_nccl_does() -> None:
    small = predict("resnet50-8xa100", "cluster.nodes=2")
    large = predict("resnet50-8xa100", "cluster.nodes=128")
    ring = predict("resnet50-8xa100", "cluster.nodes=128", "cluster.algorithm=ring")
    (chosen,) = [p.source for p in large.provenance if p.input == "all-reduce algorithm"]
    assert chosen.startswith("tree ")
    assert large.iteration_time_s.mean < 1.1 * small.iteration_time_s.mean
    assert ring.iteration_time_s.mean > 1.05 * large.iteration_time_s.mean


def test_gloo_knows_no_other_algorithm_than_its_ring() -> None:
    links = "cluster.inter_node={bandwidth: 10 Gbit/s, latency: 100 ms}"
    slow = predict("gloo-cpu", "cluster.all_reduce=null", links)
    assert not [warning for warning in slow.warnings if "NCCL" in warning]


@pytest.mark.parametrize("batch", [1, 64])
def test_hidden_communication_is_never_slower_than_the_step(batch: int) -> None:
    result = predict(
        "resnet50-8xa100", f"workload.batch_per_rank={batch}", "ddp.broadcast_buffers=false"
    )
    hidden = result.baselines_s.perfect_overlap
    assert hidden <= result.iteration_time_s.mean


SMALL = [path for path in SCENARIOS if ddpsim.load_scenario(path).cluster.world_size <= 8]


@pytest.mark.parametrize("path", SMALL, ids=lambda path: path.stem)
def test_lanes_of_every_rank_are_those_of_the_plain_model(path: Path) -> None:
    scenario = ddpsim.load_scenario(path, ["run.iterations=1"])
    messages: list[MessageSpan] = []
    ranks = range(scenario.cluster.world_size)
    plain, found = ddpsim.observe(scenario, ranks, messages.append), ddpsim.observe(scenario, ranks)
    assert [message.end_ns for message in messages] == sorted(m.end_ns for m in messages)
    assert list(found.ranks) == list(plain.ranks) == list(ranks)
    for rank in ranks:
        ours, theirs = found.ranks[rank], plain.ranks[rank]
        steps = len(ours.step_ends_ns)
        assert steps + found.repeats == len(theirs.step_ends_ns)
        for lane in ("host", "compute", "comm", "step_ends_ns", "backward_starts_ns"):
            known = getattr(ours, lane)
            assert known == getattr(theirs, lane)[: len(known)]
        assert all((ours.compute, ours.comm, ours.step_ends_ns))


def test_lanes_of_a_node_are_those_of_every_node() -> None:
    """Unlike links in a node, alike in each: eight ranks stand for 64."""
    scenario = load("resnet50-2x8-25gbit", "cluster.nodes=8", "cluster.algorithm=ring")
    every = ddpsim.observe(scenario, range(64))
    assert len({id(lanes) for lanes in every.ranks.values()}) == 8
    some = ddpsim.observe(scenario, [3, 59])
    assert some.ranks[59].comm == every.ranks[3].comm == every.ranks[59].comm
    assert every.ranks[0].comm != every.ranks[3].comm


def test_a_rank_that_does_not_exist_has_no_lanes() -> None:
    with pytest.raises(ValueError, match="there is no rank 16: choose 0 to 15"):
        ddpsim.observe(load("resnet50-2x8-25gbit"), [0, 16])


@pytest.mark.parametrize("name", ["straggler", "resnet50-2x8-25gbit", "gloo-cpu"])
def test_one_run_gives_both_the_result_and_the_lanes(name: str) -> None:
    scenario = load(name)
    result, timeline = simulate_and_observe(scenario, [1])
    alone = ddpsim.simulate(scenario)
    assert replace(result, engine=alone.engine) == alone
    assert timeline == ddpsim.observe(scenario, [1])
    with pytest.raises(ValueError, match="there is no rank -1"):
        simulate_and_observe(scenario, [-1])


def test_what_is_of_another_kind_is_refused_with_what_is_wanted() -> None:
    scenario = load("straggler")
    other = ddpsim.simulate(load("resnet50-8xa100"))
    larger = ddpsim.load_scenario(SCENARIOS[0].parent / "straggler.yaml", ["cluster.nodes=3"])
    for wrong_s in (-1.0, 0.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="wanted seconds, above 0"):
            ddpsim.judge(scenario, other, wrong_s)
    with pytest.raises(ValueError, match="give what simulate returns for this very scenario"):
        ddpsim.judge(larger, other, 0.5)
    with pytest.raises(ValueError, match=r"there is no rank 1\.5"):
        ddpsim.observe(scenario, [1.5])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="is no setting; write text such as"):
        ddpsim.load_scenario({}, [("ddp.torch", "2.11")])  # type: ignore[list-item]
    for money in ({"price": 2}, {"price": "2 USD", "budget": 10}):
        with pytest.raises(TypeError, match="wanted text with a currency"):
            ddpsim.plan_capacity(scenario, "1000000 samples", **money)


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_a_scenario_is_written_and_read_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By any way to JSON, with the same answer: what was not said still is not."""
    monkeypatch.chdir(path.parent)
    scenario = ddpsim.load_scenario(path.name)
    written = scenario.model_dump(by_alias=True), json.loads(scenario.model_dump_json())
    for each in written:
        read = ddpsim.load_scenario(each)
        assert read == scenario
        assert resolve(read).network == resolve(scenario).network
