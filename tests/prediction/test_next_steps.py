"""What is suggested after a prediction helps, and can be pasted."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from outcome import Outcome
from shipped_scenarios import load, suggested

import ddpsim
from ddpsim.planning.explain import explain_step
from ddpsim.scenario import document
from ddpsim.units import format_duration

SCENARIOS = Path(__file__).resolve().parent.parent.parent / "scenarios"
Cli = Callable[..., Outcome]
ALONE = ("cluster.gpus_per_node=1", "cluster.nodes=1", "cluster.stragglers=null", "run.jitter=null")
WAITS_FOR_BUFFERS = ("cluster={machine: dgx-h100, nodes: 128}", "workload.batch_per_rank=64")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("slow-network", ()),
        ("slow-network", ("ddp.comm_hook=bf16_compress",)),
        ("gloo-cpu", ()),
        ("gpt2-bucket-choice", ("workload.model=gpt2-xl",)),  # beyond the memory as it is
        ("resnet50-8xa100", ("workload.precision=fp32",)),
        ("resnet50-8xa100", ("workload.data={rate: 1500 samples/s}",)),
        ("resnet50-8xa100", ("workload.batch_per_rank=1",)),
        ("resnet50-8xa100", ("cluster.gpus_per_node=1",)),
        ("straggler", ("run.jitter=null",)),
        ("straggler", ("cluster.stragglers=null", "run.jitter={sigma: 0.3}")),
        ("straggler", ALONE),
        ("resnet50-8xa100", WAITS_FOR_BUFFERS),
    ],
    ids=str,
)
def test_the_first_suggestion_helps(name: str, settings: tuple[str, ...]) -> None:
    before = ddpsim.simulate(load(name, *settings))
    (setting,) = next(s.settings for s in before.next_steps if not s.why.startswith("fits"))
    after = ddpsim.simulate(load(name, *settings, setting))
    assert after.throughput_samples_per_s > 1.009 * before.throughput_samples_per_s


@pytest.mark.parametrize(
    ("keys", "variables", "is_advised"),
    [
        ("transport: tcp", "{}", True),
        ("transport: rdma", "{}", False),
        ("transport: rdma", "{NCCL_IB_DISABLE: 1}", True),
        ("transport: tcp, flow_bandwidth: 1 Gbit/s", "{}", True),
    ],
)
def test_more_sockets_are_advised_where_they_carry_less_than_the_line(
    keys: str, variables: str, is_advised: bool
) -> None:
    network = f"cluster.inter_node={{bandwidth: 100 Gbit/s, latency: 30 us, {keys}}}"
    nodes = ("cluster.gpus_per_node=1", "cluster.nodes=8", network)
    asked = (*nodes, f"cluster.nccl_env={variables}")
    before = ddpsim.simulate(load("resnet50-8xa100", *asked))
    threads = "cluster.nccl_env.NCCL_SOCKET_NTHREADS=4"
    advised = [step.settings for step in before.next_steps if threads in step.settings]
    assert bool(advised) == is_advised
    for settings in advised:
        after = ddpsim.simulate(load("resnet50-8xa100", *asked, *settings))
        assert after.throughput_samples_per_s > 1.2 * before.throughput_samples_per_s
        assert not any(threads in step.settings for step in after.next_steps)


@pytest.mark.parametrize(
    ("network", "device"),
    [
        ("1 Gbit/s", "a100-sxm-40gb"),  # what helps is the same on all of them
        *(("800 Gbit/s", device) for device in ("t4", "v100-sxm-32gb", "a100-sxm-40gb")),
    ],
)
@pytest.mark.parametrize(
    "ddp",
    [
        "{strategy: deepspeed}",
        "{strategy: naive_flat, bucket_cap_mb: 25}",
        "{strategy: fully_shard, fully_shard: {offload_policy: CPUOffloadPolicy}}",
        "{strategy: hsdp, fully_shard: {reshard_after_forward: false}}",
        "{strategy: distributed_optimizer, distributed_optimizer: {overlap_grad_reduce: false}}",
        "{strategy: local_sgd, local_sgd: {every: 2}}",
        "{optimizer_in_backward: true}",
    ],
)
def test_what_is_suggested_can_be_set(ddp: str, network: str, device: str) -> None:
    """Also where an option of the strategy forbids what another strategy may do."""
    slow = f"{{bandwidth: {network}, latency: 20 us, transport: rdma}}"
    own = {
        "schema": "ddpsim/1",
        "workload": {"model": "bert-base", "batch_per_rank": 16, "precision": "fp32"},
        "cluster": {"nodes": 2, "gpus_per_node": 2, "device": device},
    }
    scenario = ddpsim.load_scenario(own, [f"ddp={ddp}", f"cluster.inter_node={slow}"])
    result = ddpsim.simulate(scenario)
    for step in result.next_steps:
        settings = [each for each in step.settings if "MEASURED" not in each and "LOG" not in each]
        after = ddpsim.simulate(ddpsim.load_scenario(scenario, settings))
        if "throughput" in step.why:
            assert after.throughput_samples_per_s > 1.009 * result.throughput_samples_per_s


def test_a_slow_network_is_what_to_change_and_to_measure() -> None:
    assert suggested("slow-network") == [
        "ddp.comm_hook=fp16_compress",
        "cluster.all_reduce=NCCL-TESTS-LOG.txt",
    ]


def test_better_buckets_come_before_what_changes_the_training() -> None:
    """The best of the caps that are tried, and the first other change beside it."""
    one_bucket = "ddp.bucket_cap_mb=1000"
    cap, hook = suggested("resnet50-2x8-25gbit", one_bucket)[:2]
    assert hook == "ddp.comm_hook=bf16_compress"
    key = cap.partition("=")[0]
    assert key == "ddp.bucket_cap_mb"
    times = {
        other: ddpsim.simulate(load("resnet50-2x8-25gbit", f"{key}={other}")).iteration_time_s.mean
        for other in (1, 5, 10, 25, 50, 100, 250)
    }
    assert cap == f"{key}={min(times, key=lambda other: times[other])}"


def test_the_largest_gain_comes_first() -> None:
    """A screen may have room for one: other buckets bring 2 %, half the bytes 65 %."""
    link = "cluster.inter_node={bandwidth: 100 Gbit/s}"
    hook, cap = suggested("bert-large-4x8-ib", link, "workload.batch_per_rank=8")[:2]
    assert hook == "ddp.comm_hook=bf16_compress"
    assert cap.startswith("ddp.bucket_cap_mb=")


@pytest.mark.parametrize("transport", ["", ", transport: rdma"])
def test_a_network_of_which_only_the_rate_is_stated_may_be_tcp(transport: str) -> None:
    """RDMA is taken of it, which Ethernet may not have."""
    link = f"cluster.inter_node={{bandwidth: 200 Gbit/s, nics_per_node: 4{transport}}}"
    settings = ("workload.model=vit_l_16", "workload.seq_len=null", "workload.batch_per_rank=64")
    found = ddpsim.simulate(load("bert-large-4x8-ib", link, *settings)).next_steps
    tcp = [step for step in found if step.settings == ("cluster.inter_node.transport=tcp",)]
    assert len(tcp) == (not transport)
    assert all("NCCL_DEBUG=INFO prints NET/Socket" in step.why for step in tcp)


def test_one_hook_is_recommended_everywhere() -> None:
    """bfloat16 where the device has it, float16 elsewhere: their times are the same."""
    for name, hook in (("gpt2-bucket-choice", "bf16_compress"), ("slow-network", "fp16_compress")):
        settings = f"ddp.comm_hook={hook}"
        explained = explain_step(document.load(SCENARIOS / f"{name}.yaml"))
        assert settings in suggested(name)
        assert settings in [setting for change in explained.helps for setting in change.settings]


def test_what_is_set_is_not_suggested() -> None:
    hook = "ddp.comm_hook=bf16_compress"
    assert "comm_hook" not in " ".join(suggested("resnet50-2x8-25gbit", hook))
    assert "all_reduce" not in " ".join(suggested("resnet50-nccl-log"))
    assert "step_time" not in " ".join(suggested("resnet50-8xa100", "workload.step_time=50 ms"))


def test_jitter_alone() -> None:
    noise = ("cluster.stragglers=null", "run.jitter={sigma: 0.3}")
    assert suggested("straggler", *noise)[0] == "run.jitter={sigma: 0}"


def test_a_loader_is_suggested_that_has_a_twentieth_to_spare() -> None:
    result = ddpsim.simulate(load("resnet50-8xa100", "workload.data={rate: 1500 samples/s}"))
    (setting,) = result.next_steps[0].settings
    rate = float(setting.removeprefix("workload.data.rate=").removesuffix(" samples/s"))
    busy_s = result.iteration_time_s.mean - result.breakdown_s.data_wait
    assert rate == pytest.approx(1.05 * 128 / busy_s, rel=0.005)  # of three digits


@pytest.mark.parametrize("own", [1, 2])
def test_four_times_as_many_micro_batches_are_suggested(own: int) -> None:
    settings = ("ddp.comm_hook=fp16_compress", f"ddp.accumulation_steps={own}")
    step = ddpsim.simulate(load("slow-network", *settings)).next_steps[0]
    assert step.settings == (f"ddp.accumulation_steps={4 * own}",)
    assert step.why.startswith(f"communication once in {4 * own} micro-batches (a larger global")


def test_what_to_measure_is_the_widest_input_and_told_by_its_wider_side() -> None:
    result = ddpsim.simulate(load("resnet50-8xa100"))
    assert result.prediction_interval_s
    sides = [(max(s.low_s, s.high_s), s.input) for s in result.prediction_interval_s.sources]
    width_s, widest = max(sides)
    said = f"the {widest} adds up to {format_duration(width_s)} to the interval: measure one micro"
    assert result.next_steps[-1].why.startswith(said)


def test_data_parallel_is_offered_only_what_it_can_do() -> None:
    """No hook, no accumulation and no second node."""
    assert suggested("data-parallel")[0] == "cluster.algorithm=auto"


@pytest.mark.parametrize("folder", ["plain", "with a space"])
def test_suggested_commands_can_be_pasted(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path)
    path = f"{folder}/scenario.yaml"
    Path(path).write_text((SCENARIOS / "resnet50-2x8-25gbit.yaml").read_text("utf-8"), "utf-8")
    given = ("--set", "name=two words", "--set", "ddp.comm_hook=none")
    text = cli("run", path, *given, "--verbose").out
    pasted = [shlex.split(line) for line in text.replace(" \\\n", " ").splitlines() if path in line]
    eased, measured = pasted
    assert eased[:5] == ["ddpsim", "run", path, "--set", "name=two words"]
    assert eased[5:] == ["--set", "ddp.comm_hook=bf16_compress"]
    assert cli(*eased[1:]).code == 0
    outcome = cli(*measured[1:])
    assert outcome.code == 2
    placeholder = measured[-1].partition("=")[2]
    assert placeholder.split()[0].isupper()
    assert placeholder in outcome.err


def test_the_placeholder_of_a_time_is_refused_clearly(cli: Cli) -> None:
    setting = suggested("resnet50-8xa100")[-1]
    assert setting == "workload.step_time=MEASURED ms"
    outcome = cli("run", str(SCENARIOS / "resnet50-8xa100.yaml"), "--set", setting)
    assert "'MEASURED ms' is not a quantity; write a time such as" in outcome.err


def test_another_algorithm_is_named_where_it_is_faster() -> None:
    """NCCL's tuner goes by its own estimates."""
    large = ("cluster.nodes=64",)
    before = ddpsim.simulate(load("resnet50-2x8-25gbit", *large))
    step = next(s for s in before.next_steps if "NCCL_ALGO" in s.why)
    assert step.settings == ("cluster.algorithm=tree",)
    after = ddpsim.simulate(load("resnet50-2x8-25gbit", *large, *step.settings))
    assert after.throughput_samples_per_s > 1.009 * before.throughput_samples_per_s


@pytest.mark.parametrize(
    ("stated", "doubts"),
    [
        ((), 1),
        (("cluster.inter_node.nics_per_node=8",), 0),
        (("workload.step_time=1 s",), 0),  # hidden either way
    ],
    ids=str,
)
def test_nics_that_may_not_be_used_are_told_with_the_line_that_tells(
    stated: tuple[str, ...], doubts: int
) -> None:
    cluster = "cluster={machine: dgx-a100, nodes: 4}"
    found = [
        step
        for step in ddpsim.simulate(
            load("gpt2-bucket-choice", cluster, "workload.step_time=20 ms", *stated)
        ).next_steps
        if "half of the NICs" in step.why
    ]
    assert len(found) == doubts
    for step in found:
        assert "NCCL_DEBUG=INFO" in step.why
        assert step.settings == ("cluster.inter_node.nics_per_node=4",)
