"""What to try next, and what could explain a measurement: each claim is simulated again."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from math import exp, hypot
from pathlib import Path
from types import SimpleNamespace

import pytest
from outcome import Outcome

import ddpsim
from ddpsim.planning.explain import explain_step, sensitivities
from ddpsim.prediction.program import compile_program
from ddpsim.prediction.resolve import resolve
from ddpsim.report.text import render
from ddpsim.result.metrics import BreakdownNs, Step
from ddpsim.result.model import Bottleneck, Stretch
from ddpsim.result.summary import _bottleneck, awaited
from ddpsim.result.timeline import CommSpan, Span
from ddpsim.scenario import document
from ddpsim.strategies.instructions import Communicate, Compute
from ddpsim.units import format_duration

SCENARIOS = Path(__file__).resolve().parent.parent.parent / "scenarios"
Cli = Callable[..., Outcome]
ALONE = ("cluster.gpus_per_node=1", "cluster.nodes=1", "cluster.stragglers=null", "run.jitter=null")

WAITS_FOR_BUFFERS = ("cluster={machine: dgx-h100, nodes: 128}", "workload.batch_per_rank=96")


def load(name: str, *settings: str) -> ddpsim.Scenario:
    return ddpsim.load_scenario(SCENARIOS / f"{name}.yaml", settings)


def suggested(name: str, *settings: str) -> list[str]:
    steps = ddpsim.simulate(load(name, *settings)).next_steps
    return [setting for step in steps for setting in step.settings]


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
        ("straggler", ("cluster.stragglers=null", "run.jitter={sigma: 0.1}")),
        ("straggler", ALONE),
        ("resnet50-8xa100", WAITS_FOR_BUFFERS),
    ],
    ids=str,
)
def test_the_first_suggestion_helps(name: str, settings: tuple[str, ...]) -> None:
    before = ddpsim.simulate(load(name, *settings))
    (setting,) = before.next_steps[0].settings
    after = ddpsim.simulate(load(name, *settings, setting))
    assert after.throughput_samples_per_s > 1.009 * before.throughput_samples_per_s


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


def test_the_buffers_broadcast_is_named_where_the_step_waits_for_it() -> None:
    """Of 1,024 ranks, most of it latency, though the last of the buckets ends late too."""
    asked = ("resnet50-8xa100", *WAITS_FOR_BUFFERS)
    result = ddpsim.simulate(load(*asked))
    assert "the latency of the hops among 1,024 ranks" in result.bottleneck.text
    assert "mostly the buffers' broadcast before the forward" in result.bottleneck.text
    known = {one.what: one.change_s for one in sensitivities(resolve(load(*asked)))}
    assert known["half the latency"] < 2 * known["10 % more bandwidth on every link"]
    (own,) = [step for step in result.next_steps if "broadcast_buffers" in str(step.settings)]
    assert own.settings == ("ddp.broadcast_buffers=false",)
    assert "then differ between ranks" in own.why
    without = suggested(*asked, "ddp.broadcast_buffers=false")
    assert "broadcast_buffers" not in " ".join(without)


@pytest.mark.parametrize(
    ("broadcast", "bucket", "unused", "words"),
    [
        (30, 10, 0, "mostly what is sent before the forward"),
        (10, 30, 0, "its one bucket ends after the backward"),
        (10, 0, 30, "mostly the all-reduce that tells which parameters are unused"),
    ],
)
def test_the_longest_wait_is_named(broadcast: int, bucket: int, unused: int, words: str) -> None:
    """A forward of 5 after the broadcast, a backward of 5 before what it leaves to wait for."""
    forward, backward = broadcast + 5, broadcast + 10
    late, end = backward + bucket, backward + bucket + unused
    compute = (
        Span("comm_wait", 0, broadcast),
        Span("forward", broadcast, forward),
        Span("backward", forward, backward),
        Span("comm_wait", backward, end),
    )
    comm = (
        CommSpan("broadcast", -1, 8, 0, 0, 0, 0, broadcast),
        CommSpan("all_reduce", 0, 8, 1, backward, backward, backward, late),
        CommSpan("all_reduce", -1, 4, 1, late, late, late, end),
    )
    longest, said = awaited(Step(0, end, forward, (), compute, comm), "what is sent")
    assert said == words
    assert longest.end_ns - longest.joined_ns == 30


def bottleneck(
    *each: dict[str, int], late_peers_ns: Sequence[int] = (0, 0), batches_us: float = 0.0
) -> Bottleneck:
    """Of rank 0, the slowest, in steps of 1 ms, of such parts in us each, the rest forward."""
    steps = []
    for start_ns, parts in zip((0, 1_000_000), each, strict=True):
        now, host, comm = start_ns, [], []
        compute: list[Span] = []
        kinds = {"data_wait": host, "host": [], "comm_wait": compute}
        for kind, lasts_us in parts.items():
            end_ns = now + 1000 * lasts_us
            kinds.get(kind, compute).append(Span(kind, now, end_ns))  # type: ignore[arg-type]
            if kind == "comm_wait":
                comm.append(CommSpan("all_reduce", 0, 8, 1, now, now, now, end_ns))
            now = end_ns
        compute.append(Span("forward", now, start_ns + 1_000_000))
        lanes = tuple(host), tuple(compute), tuple(comm)
        steps.append(Step(start_ns, start_ns + 1_000_000, start_ns, *lanes))
    whole = sum((step.breakdown() for step in steps), BreakdownNs())
    context = SimpleNamespace(
        network=lambda _: "links", broadcast="what is sent", batches_s=batches_us * 1e-6
    )
    return _bottleneck(whole, 0, late_peers_ns, steps, context)  # type: ignore[arg-type]


IN_TURNS = "ranks are late in turns: each waits for others 60.00 us a step (6.0%)"


@pytest.mark.parametrize(
    ("parts", "late_us", "batches_us", "kind", "text"),
    [
        ({"comm_wait": 29}, (0, 0), 0, "compute", "compute takes 97.1% of the step"),
        (
            {"comm_wait": 30, "host": 29},
            (0, 0),
            0,
            "communication",
            "links: its one bucket ends after the backward, 30.00 us a step (3.0%)",
        ),
        (
            {"host": 31, "comm_wait": 30},
            (0, 0),
            0,
            "host",
            "the host launches too slowly: the device idles 31.00 us a step (3.1%)",
        ),
        # the slowest waits for 10 of its 50; the others for 10, 80 and 90: the median for 70 more
        (
            {"comm_wait": 50},
            (10, 90, 80, 10),
            0,
            "stragglers",
            "rank 0 is last: the median rank waits 70.00 us a step (7.0%)",
        ),
        ({"comm_wait": 100}, (60, 100), 0, "stragglers", IN_TURNS),
        (
            {"data_wait": 40, "comm_wait": 30},
            (0, 0),
            0,
            "data",
            "the data loader: no batch is ready for 40.00 us a step (4.0%)",
        ),
        # a loader that every step waits for sets the pace, however short the waits are
        (
            {"data_wait": 20, "comm_wait": 300},
            (0, 0),
            900,
            "data",
            "the data loader: no batch is ready for 20.00 us a step (2.0%)",
        ),
        # and one whose batches take as long as a step, though nobody waits for them
        (
            {"comm_wait": 300},
            (0, 0),
            1000,
            "data",
            "the data loader: the batches of a step take 1.000 ms",
        ),
        (
            {"comm_wait": 300},
            (0, 0),
            999.8,
            "communication",
            "links: its one bucket ends after the backward, 300.0 us a step (30.0%)",
        ),
    ],
)
def test_the_bottleneck_by_hand(
    parts: dict[str, int], late_us: tuple[int, ...], batches_us: float, kind: str, text: str
) -> None:
    late_ns = [2 * 1000 * each for each in late_us]  # over both steps
    found = bottleneck(parts, parts, late_peers_ns=late_ns, batches_us=batches_us)
    assert (found.kind, found.text) == (kind, text)


def test_a_loader_that_one_step_did_not_wait_for_sets_no_pace() -> None:
    """20 us of one of two steps of 1 ms are data's, 300 of both communication's."""
    found = bottleneck({"data_wait": 20, "comm_wait": 300}, {"comm_wait": 300}, batches_us=900)
    assert found.kind == "communication"


@pytest.mark.parametrize(
    ("backward", "words"),
    [
        (5, "all 3 buckets end after the backward"),
        (10, "the last 2 of 3 buckets end after the backward"),
        (30, "the last of 3 buckets ends after the backward"),
    ],
)
def test_buckets_that_end_after_the_backward_are_counted(backward: int, words: str) -> None:
    compute = Span("backward", 0, backward), Span("comm_wait", backward, 40)
    optimizer = Span("optimizer", 40, 50)
    comm = [
        CommSpan("all_reduce", bucket, 8, 1, end_ns - 5, end_ns - 5, end_ns - 5, end_ns)
        for bucket, end_ns in enumerate((10, 30, 40))
    ]
    step = Step(0, 50, 0, (), (*compute, optimizer), tuple(comm))
    assert awaited(step, "what is sent")[1] == words


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
    noise = ("cluster.stragglers=null", "run.jitter={sigma: 0.1}")
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
    said = f"{widest} widens the interval by up to {format_duration(width_s)}: measure one micro"
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
    text = cli("run", path, *given).out
    pasted = [shlex.split(line) for line in text.replace(" \\\n", " ").splitlines() if path in line]
    eased, measured = pasted
    assert eased[:5] == ["ddpsim", "run", path, "--set", "name=two words"]
    assert eased[5:] == ["--set", "ddp.comm_hook=bf16_compress"]
    assert cli(*eased[1:]).code == 0
    outcome = cli(*measured[1:])
    assert outcome.code == 2
    assert "no such file: 'NCCL-TESTS-LOG.txt'" in outcome.err


def test_the_placeholder_of_a_time_is_refused_clearly(cli: Cli) -> None:
    setting = suggested("resnet50-8xa100")[-1]
    assert setting == "workload.step_time=MEASURED ms"
    outcome = cli("run", str(SCENARIOS / "resnet50-8xa100.yaml"), "--set", setting)
    assert "'MEASURED ms' is not a quantity; write a time such as" in outcome.err


def stretches(name: str, measured_s: float, *settings: str) -> dict[str, Stretch]:
    scenario = load(name, *settings)
    verdict = ddpsim.judge(scenario, ddpsim.simulate(scenario), measured_s)
    assert verdict.normal is False
    assert all(0.2 <= stretch.factor <= 20 for stretch in verdict.stretches)
    return {stretch.term: stretch for stretch in verdict.stretches}


@pytest.mark.parametrize("measured_s", [0.043, 0.2])
def test_a_network_so_much_slower_gives_the_measured_step(measured_s: float) -> None:
    network = stretches("resnet50-2x8-25gbit", measured_s)["network"]
    assert network.suffices
    links = (
        f"{{bandwidth: {25 / network.factor} Gbit/s, latency: {20 * network.factor} us}}",
        f"{{bandwidth: {235 / network.factor} GB/s, latency: {6.5 * network.factor} us}}",
    )
    keys = ("cluster.inter_node", "cluster.intra_node")
    slower = load(
        "resnet50-2x8-25gbit", *(f"{key}={link}" for key, link in zip(keys, links, strict=True))
    )
    step_s = ddpsim.simulate(slower).iteration_time_s.mean
    assert step_s == pytest.approx(measured_s, rel=0.01)
    assert network.step_s == pytest.approx(measured_s, rel=0.01)


def test_compute_so_much_slower_gives_the_measured_step() -> None:
    compute = stretches("straggler", 0.3)["compute"]
    assert compute.suffices
    slower = ddpsim.simulate(load("straggler", f"workload.step_time={162 * compute.factor} ms"))
    assert slower.iteration_time_s.mean == pytest.approx(0.3, rel=0.01)


def test_what_cannot_explain_a_measurement_is_said_to() -> None:
    """The network is hidden, or far too small a part; nothing is more than 100 % faster."""
    slow, fast = (stretches("straggler", seconds)["network"] for seconds in (0.4, 0.15))
    assert (slow.factor, slow.suffices) == (20, False)
    assert (fast.factor, fast.suffices) == (0.2, False)
    assert slow.step_s < 0.4
    assert fast.step_s > 0.15
    assert not stretches("resnet50-2x8-25gbit", 0.03)["compute"].suffices


def test_a_host_so_much_slower_gives_the_measured_step() -> None:
    """Compute, hidden behind it, would have to take far longer to do so."""
    small = ("workload.batch_per_rank=4", "cluster.device=h100-sxm-80gb")
    found = stretches("resnet50-8xa100", 0.06, *small)
    assert found["host"].suffices
    slower_s = resolve(load("resnet50-8xa100", *small)).step_s(host=found["host"].factor)
    assert slower_s == pytest.approx(0.06, rel=0.01)
    assert found["compute"].factor > 5 * found["host"].factor
    faster = stretches("resnet50-8xa100", 0.01, *small)
    assert faster["host"].suffices
    assert not faster["compute"].suffices
    measured = (*small, "workload.step_time=21 ms")
    assert "host" not in stretches("resnet50-8xa100", 0.06, *measured)


def test_explanations_are_those_of_the_stretches() -> None:
    scenario = load("straggler")
    result = ddpsim.simulate(scenario)
    verdict = ddpsim.judge(scenario, result, 0.15)
    shown = " ".join(render(result, "x.yaml", verdict).split())
    assert all(explanation in shown for explanation in verdict.explanations)
    network = next(stretch for stretch in verdict.stretches if stretch.term == "network")
    assert not network.suffices
    assert any(text.startswith("not network alone: 0.2 x") for text in verdict.explanations)


def test_another_algorithm_is_named_where_it_is_faster() -> None:
    """NCCL's tuner goes by its own estimates."""
    large = ("cluster.nodes=64",)
    before = ddpsim.simulate(load("resnet50-2x8-25gbit", *large))
    step = next(s for s in before.next_steps if "NCCL_ALGO" in s.why)
    assert step.settings == ("cluster.algorithm=tree",)
    after = ddpsim.simulate(load("resnet50-2x8-25gbit", *large, *step.settings))
    assert after.throughput_samples_per_s > 1.009 * before.throughput_samples_per_s


def test_a_step_that_waits_for_its_host_says_so_and_how_sure_it_is() -> None:
    """Its doubt of the host is in the interval where the step could wait for it, and only there."""
    small = ddpsim.simulate(load("resnet50-8xa100", "workload.batch_per_rank=8"))
    assert small.bottleneck.kind == "host"
    (own,) = [s for s in small.prediction_interval_s.sources if s.input == "host time"]
    assert own.low_s > 0.3 * small.iteration_time_s.mean
    assert own.high_s > 0.8 * small.iteration_time_s.mean
    (first, *_) = small.next_steps
    assert first.settings in (("workload.compile=true",), ("workload.batch_per_rank=16",))
    (measure,) = [step for step in small.next_steps if "host time widens" in step.why]
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
        ((), 0.51, "assumed 30 us an operator", ("assumed", "30.00 us an operator")),
        (("workload.compile=true",), 0.51, "compiled code's", ("assumed", "5.000 us a kernel")),
        (
            (f"cluster.device={{{DEVICE}}}", *LINKS),
            0.51,
            "assumed 30 us an operator",
            ("assumed", "30.00 us an operator"),
        ),
        (
            (f"cluster.device={{{DEVICE}, operator: 12 us}}", *LINKS),
            0.1,
            "stated",
            ("stated", "17.00 us an operator"),
        ),
    ],
)
def test_the_hosts_doubt_is_of_who_says_its_times(
    settings: tuple[str, ...], sigma: float, basis: str, said: tuple[str, str]
) -> None:
    """There is always some: no step that waits for its host is known to the microsecond."""
    own = ("cluster.device=h100-sxm-80gb", "workload.batch_per_rank=4")
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
    result = ddpsim.simulate(load("resnet50-8xa100", "cluster.device=h100", tied))
    sources = {s.input: s.low_s for s in result.prediction_interval_s.sources}
    job = resolve(load("resnet50-8xa100", "cluster.device=h100", tied))
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
