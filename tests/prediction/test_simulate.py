"""What simulate takes and refuses, and what its answer depends on."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from shipped_scenarios import load, mean_ms, predict

import ddpsim
from ddpsim.prediction.resolve import resolve
from ddpsim.report.text import render

ROOT = Path(__file__).resolve().parent.parent.parent
SCENARIOS = sorted((ROOT / "scenarios").glob("*.yaml"))


def test_a_hook_halves_the_bytes() -> None:
    half = predict("resnet50-2x8-25gbit", "ddp.comm_hook=bf16_compress")
    full = predict("resnet50-2x8-25gbit")
    assert 0.45 < half.comm_time_s / full.comm_time_s < 0.55


@pytest.mark.parametrize("strategy", ["zero1", "deepspeed", "fully_shard", "fsdp1"])
def test_naive_answers_shard_the_optimizer_too(strategy: str) -> None:
    """Of 20 ms each of 8 ranks has 2.5, and one with the largest layer a little more."""
    step_time = "workload.step_time={forward: 10 ms, backward: 10 ms, optimizer: 20 ms}"
    keys = ("cluster.nodes=1", "workload.model=resnet18", f"ddp.strategy={strategy}", step_time)
    result = predict(
        "resnet50-2x8-25gbit", "workload.batch_per_rank=32", "workload.precision=bf16", *keys
    )
    assert 22.4e-3 < result.baselines_s.compute_only < 24.1e-3
    assert result.scaling_efficiency < 1


@pytest.mark.parametrize(
    "strategy", ["ddp", "naive", "parameter_server", "fully_shard", "hsdp", "zero1"]
)
def test_a_step_is_between_its_naive_answers(strategy: str) -> None:
    """A host that is behind catches up while the device waits for communication.

    Where nothing overlaps, a step has its strategy's own copies and launches besides.
    """
    keys = (f"ddp.strategy={strategy}", "cluster.inter_node.bandwidth=10 Gbit/s")
    for model in ("resnet18", "gpt2"):
        job = resolve(
            load(
                "resnet50-2x8-25gbit", f"workload.model={model}", "workload.batch_per_rank=1", *keys
            )
        )
        assert job.host_share > 1 or model == "gpt2"
        naive = job.baselines()
        assert naive.perfect_overlap <= job.step_s() <= 1.02 * naive.no_overlap


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
    assert words in render(result, "x.yaml", verbose=True)
    assert (result.buckets_rebuilt_at is None) == (words == "buckets never rebuilt")


@pytest.mark.parametrize(("backend", "says"), [("gloo", "gathers"), ("nccl", "refuses")])
def test_sparse_gradients_are_warned_of(tmp_path: Path, backend: str, says: str) -> None:
    profile = json.loads((ROOT / "scenarios" / "testbed" / "transformer-500mbit.json").read_text())
    profile["parameters"]["sparse"] = [0]
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


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (("cluster={machine: dgx-a100, nodes: 1, device: h100}",), "its links are taken for h100"),
        (("cluster.inter_node={bandwidth: 200 Gbit/s, transport: rdma}",), "state nics_per_node"),
        (
            ("cluster.device=h100", "cluster.inter_node={bandwidth: 100 Gbit/s}"),
            "one NIC of 12.5 GB/s serves all 8 GPUs of a node; machines with h100-sxm-80gb have 8",
        ),
        (
            ("workload.precision=fp32", "workload.memory_format=channels_last", "cluster.nodes=1"),
            "of the fp32 peak; convolutions run in TF32 above it",
        ),
    ],
)
def test_what_does_not_go_with_a_device_is_warned_of(settings: tuple[str, ...], says: str) -> None:
    (warning,) = predict("resnet50-2x8-25gbit", *settings).warnings
    assert says in warning


def test_a_number_is_no_scenario() -> None:
    for call in (ddpsim.simulate, ddpsim.observe):
        with pytest.raises(TypeError, match=r"5 is no Scenario: give what load_scenario"):
            call(5)  # type: ignore[operator]


def test_an_engine_that_does_not_exist() -> None:
    scenario = ddpsim.load_scenario(ROOT / "scenarios" / "gloo-cpu.yaml")
    with pytest.raises(ValueError, match="'fast'; wanted one of auto, reference"):
        ddpsim.simulate(scenario, "fast")  # type: ignore[arg-type]


@pytest.mark.parametrize("package", ["ddpsim", "calibrate"])
def test_packages_say_that_they_are_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()


def test_the_median_rank_is_one_that_waits_where_half_are_slow() -> None:
    one_is_slow = predict("resnet50-8xa100", "cluster.stragglers={factors: {0: 1.5}}")
    half = "cluster.stragglers={factors: {0: 1.5, 1: 1.5, 2: 1.5, 3: 1.5}}"
    bottlenecks = [predict("resnet50-8xa100", half).bottleneck, one_is_slow.bottleneck]
    assert bottlenecks[0].kind == bottlenecks[1].kind
    waits = [float(found.text.split("waits ")[1].split(" ms")[0]) for found in bottlenecks]
    assert waits[0] == pytest.approx(waits[1], rel=1e-3)  # a hop's latency apart


def test_a_free_network_and_one_rank_agree() -> None:
    free = (
        "cluster.intra_node={bandwidth: 1000 TB/s, latency: 0 s}",
        "cluster.device=a100-sxm-80gb",
        "cluster.protocol=Simple",  # LL has a limit of its own
    )
    one = mean_ms("resnet50-8xa100", "cluster.gpus_per_node=1")
    assert math.isclose(mean_ms("resnet50-8xa100", *free), one, rel_tol=1e-5)


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
