"""What options bring, how sure that is, and why a step is as long as it is."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

import ddpsim
from ddpsim.cluster.cost import LinkCost
from ddpsim.cluster.network import Network, Traffic
from ddpsim.cluster.topology.link import Link
from ddpsim.cluster.transfers import duration_ns
from ddpsim.cluster.what_if_links import quickened, widened
from ddpsim.planning import explain
from ddpsim.planning.compare import Option, compare, each_flag, option
from ddpsim.planning.explain import explain_step, sensitivities
from ddpsim.planning.grid import Grid
from ddpsim.planning.sweep import sweep
from ddpsim.prediction.interval import ROOFLINE, edges
from ddpsim.prediction.job import Job
from ddpsim.prediction.resolve import resolve
from ddpsim.prediction.uncertainty import uncertainties
from ddpsim.report.changes import render_comparison, render_explanation, verdict
from ddpsim.result.changes import Change, Comparison, Explanation, Phase
from ddpsim.result.model import CriticalPart
from ddpsim.scenario.document import Document, load
from ddpsim.scenario.load import parse

ROOT = Path(__file__).resolve().parent.parent.parent
PLANNING = (ROOT / "docs" / "planning.md").read_text("utf-8")


def document(name: str, *settings: str) -> Document:
    return load(ROOT / "scenarios" / f"{name}.yaml", settings)


def flags(name: str, *settings: str) -> dict[str, Change]:
    found = document(name, *settings)
    return {change.title: change for change in compare(parse(found), each_flag(found)).changes}


def alone(name: str, *settings: str) -> ddpsim.Result:
    return ddpsim.simulate(parse(document(name, *settings)))


@pytest.fixture(scope="module")
def resnet() -> dict[str, Change]:
    return flags("resnet50-2x8-25gbit")


def test_each_flag_is_what_run_says_with_it(resnet: dict[str, Change]) -> None:
    first = alone("resnet50-2x8-25gbit")
    assert len(resnet) == 15
    for setting, change in resnet.items():
        assert change.settings == (setting,)
        result = alone("resnet50-2x8-25gbit", setting)
        per_sample = result.iteration_time_s.mean / result.throughput_samples_per_s
        assert change.step_s == result.iteration_time_s.mean
        samples = first.throughput_samples_per_s * first.iteration_time_s.mean
        expected_s = samples / result.throughput_samples_per_s - first.iteration_time_s.mean
        assert math.isclose(change.change_s, expected_s, rel_tol=1e-9, abs_tol=1e-12)
        assert change.change == change.change_s / first.iteration_time_s.mean
        more = result.memory_bytes_per_gpu.total - first.memory_bytes_per_gpu.total
        assert change.memory_bytes == more
        assert per_sample > 0


def test_the_interval_is_of_inputs_wrong_in_both(resnet: dict[str, Change]) -> None:
    """By hand: compute and network at their edges, in both scenarios at once."""
    name, setting = "resnet50-2x8-25gbit", "ddp.bucket_cap_mb=1"
    first, other = (resolve(parse(document(name, *s))) for s in ([], [setting]))
    assert first.network.uncertainty
    still_s = other.step_s() - first.step_s()
    below, above = 0.0, 0.0
    for term, uncertainty in (
        ("compute", ROOFLINE),
        ("network", first.network.uncertainty),
    ):
        moves = [
            other.step_s(**{term: factor}) - first.step_s(**{term: factor}) - still_s
            for factor in edges(uncertainty)
        ]
        below = math.hypot(below, max(0, -min(moves)))
        above = math.hypot(above, max(0, *moves))
    change = resnet[setting]
    assert math.isclose(change.low_s, change.change_s - below, rel_tol=1e-9)
    assert math.isclose(change.high_s, change.change_s + above, rel_tol=1e-9)
    assert change.is_sure
    alone_s = alone(name, setting).prediction_interval_s
    assert alone_s
    assert change.high_s - change.low_s < (alone_s.high - alone_s.low) / 4


def test_what_is_known_from_other_sources_is_wrong_on_its_own() -> None:
    measured = document("resnet50-2x8-25gbit", "workload.step_time=25 ms")
    base = parse(document("resnet50-2x8-25gbit"))
    apart = compare(base, [Option("measured", parse(measured))]).changes[0]
    alike = compare(base, [option(document("resnet50-2x8-25gbit"), title="itself")]).changes[0]
    assert (alike.change_s, alike.low_s, alike.high_s) == (0, 0, 0)
    assert apart.low_s < apart.change_s < apart.high_s
    first, other = resolve(base), resolve(parse(measured))
    moves_s: list[list[float]] = []
    for term, alike_in_both in (("compute", False), ("network", True), ("interference", True)):
        ours, theirs = (
            [job.step_s(**{term: f}) - job.step_s() for f in edges(uncertainties(job)[term])]
            for job in (first, other)
        )
        both = [theirs[i] - ours[i] for i in range(2)]
        moves_s += [both] if alike_in_both else [[-move for move in ours], theirs]
    below_s = math.hypot(*(max(0, -min(moves)) for moves in moves_s))
    above_s = math.hypot(*(max(0, *moves) for moves in moves_s))
    assert math.isclose(apart.low_s, apart.change_s - below_s, rel_tol=1e-9)
    assert math.isclose(apart.high_s, apart.change_s + above_s, rel_tol=1e-9)


@pytest.mark.parametrize("caps", [("5", "1"), ("1", "5")])
def test_hidden_communication_that_slows_nothing_known_widens_a_difference(
    caps: tuple[str, str],
) -> None:
    """Nobody calibrated gloo beside compute: 22 % of what one hides more lengthens that one."""
    cap, other_cap = (f"ddp.bucket_cap_mb={cap}" for cap in caps)
    first, other = (alone("gloo-cpu", each) for each in (cap, other_cap))
    asked = document("gloo-cpu", cap)
    (change,) = compare(parse(asked), [option(asked, other_cap)]).changes
    jobs = [resolve(parse(document("gloo-cpu", each))) for each in (cap, other_cap)]
    below_s, above_s = [0.0], [0.0]
    for term, doubt in uncertainties(jobs[0]).items():
        ours, theirs = (
            [job.step_s(**{term: f}) - job.step_s() for f in edges(doubt)] for job in jobs
        )
        moves = [theirs[i] - ours[i] for i in range(2)]
        below_s.append(max(0, -min(moves)))
        above_s.append(max(0, *moves))
    hidden_s = [each.comm_time_s - each.exposed_comm_s for each in (first, other)]
    more_s = 0.22 * (hidden_s[1] - hidden_s[0])
    assert abs(more_s) > 1e-3
    assert change.low_s == pytest.approx(change.change_s - math.hypot(*below_s) + min(0, more_s))
    assert change.high_s == pytest.approx(change.change_s + math.hypot(*above_s) + max(0, more_s))


def test_an_option_that_cannot_be_had_says_why() -> None:
    found = flags("own-model", "ddp.torch='1.4'")
    why = "ddp.static_graph: torch 1.4 had no such option; choose a newer ddp.torch"
    assert found["ddp.static_graph=true"].problem == why
    shown = render_comparison(Comparison("x", 8, 8, 1.0, None, tuple(found.values())))
    assert f"impossible  ddp.gradient_as_bucket_view=true: {why[:4]}" in shown
    assert "step        1.000 s   no interval can be had   8 samples" in shown


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (Change("a", change_s=-1, change=-0.1, low_s=-2, high_s=-0.5), "faster"),
        (Change("a", change_s=-1, change=-0.1, low_s=-2, high_s=0.5), "faster?"),
        (Change("a", change_s=1, change=0.1, low_s=0.1, high_s=3), "slower"),
        (Change("a", change_s=1, change=0.1, low_s=-0.1, high_s=3), "slower?"),
        (Change("a", change_s=1, change=0.001, low_s=0.1, high_s=3), "same"),
    ],
)
def test_verdicts(change: Change, word: str) -> None:
    assert verdict(change) == word


# Published effects of options (docs/planning.md has the figures): their sign, here
SIGNS = [
    # gradient_as_bucket_view: RoBERTa 0.982 -> 0.909 s, nothing on ResNet (pytorch#41954)
    ("bert-large-4x8-ib", "ddp.gradient_as_bucket_view=true", -1),
    ("resnet50-8xa100", "ddp.gradient_as_bucket_view=true", 0),
    # no_sync: 2.00 -> 0.91 s over 2 nodes, 0.50 -> 0.41 s in one (accelerate#1153)
    ("resnet50-2x8-25gbit", "ddp.accumulation_steps=2", -1),
    ("resnet50-8xa100", "ddp.accumulation_steps=2", -1),
    ("bert-large-4x8-ib", "ddp.accumulation_steps=2", -1),
    ("gpt2-bucket-choice", "ddp.accumulation_steps=2", -1),
    # fp16 hook: 17 -> 11 h on 10 GbE (wenet#791)
    ("slow-network", "ddp.comm_hook=fp16_compress", -1),
    ("resnet50-2x8-25gbit", "ddp.comm_hook=fp16_compress", -1),
    ("gpt2-bucket-choice", "ddp.comm_hook=fp16_compress", -1),
    # find_unused_parameters costs (swav#63: "noticeable improvement if False")
    ("resnet50-2x8-25gbit", "ddp.find_unused_parameters=true", 0),  # the network sets its pace
    ("resnet50-8xa100", "ddp.find_unused_parameters=true", 0),  # its host runs ahead of the GPU
    ("gpt2-bucket-choice", "ddp.find_unused_parameters=true", 1),
]


@pytest.mark.parametrize(("name", "setting", "sign"), SIGNS)
def test_options_agree_in_sign_with_what_was_published(name: str, setting: str, sign: int) -> None:
    base = document(name)
    (change,) = compare(parse(base), [option(base, setting)]).changes
    if sign:
        assert change.change_s * sign > 0
        assert change.is_sure
    else:
        assert abs(change.change) < 0.02  # 0.000 s of 0.x s, as printed there
    key = setting.partition("=")[0].removeprefix("ddp.")
    (row,) = [line for line in PLANNING.splitlines() if line.startswith(f"| `{key}`")]
    assert f"`{name}` {100 * change.change:+.1f} %" in row


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
    links = "cluster.inter_node={{bandwidth: {} GB/s, latency: 5 us}}"
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
    large = explain_step(document("resnet50-8xa100"))
    assert not any("host" in each.what for each in large.sensitivities)
    assert not any("workload.compile=true" in each.settings for each in large.helps)


EVERY = ["resnet50-2x8-25gbit", "machines-64xh100", "gloo-cpu", "slow-network", "shared-network"]


@pytest.mark.parametrize("name", EVERY)
def test_a_better_input_never_lengthens_the_step(name: str) -> None:
    base = document(name, "run.iterations=1")
    found = {each.what: each for each in sensitivities(resolve(parse(base)))}
    assert all(each.change_s <= 1e-9 for each in found.values())
    endless = found["a network that takes no time"].change_s
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
        here = {"workload": workload, "cluster": cluster | {"inter_node": link}}
        return resolve(parse(load({"schema": "ddpsim/1", **here})))

    whole_s = job(gbit_per_s, 5).step_s()
    found = {each.what: each.change_s for each in sensitivities(job(gbit_per_s, 5))}
    for what, changed in (
        ("10 % more bandwidth on every link", job(1.1 * gbit_per_s, 5)),
        ("half the latency", job(gbit_per_s, 2.5)),
        ("endless bandwidth: latency alone", job(8e6, 5)),
        ("all-reduces 10 % faster", job(1.1 * gbit_per_s, 5 / 1.1)),
        ("a network that takes no time", job(8e6, 0)),
    ):
        assert found[what] == pytest.approx(changed.step_s() - whole_s, abs=5e-6), what


@pytest.mark.parametrize(
    ("name", "setting", "helps"),
    [
        ("resnet50-2x8-25gbit", "run.seed=0", "cluster.inter_node.bandwidth=50 Gbit/s"),
        (
            "resnet50-8xa100",
            "workload.data={rate: 1000 samples/s}",
            "workload.data.rate=2000 samples/s",
        ),
    ],
)
def test_twice_as_much_of_what_holds_the_step_up_helps(name: str, setting: str, helps: str) -> None:
    found = explain_step(document(name, "run.iterations=1", setting)).helps
    assert (helps,) in [change.settings for change in found]


def test_what_disturbs_a_job_is_an_input_too() -> None:
    job = resolve(parse(document("shared-network", "run.iterations=1")))
    hangs = {each.what: each.change for each in sensitivities(job)}
    assert hangs["no weak links"] < -0.4
    assert hangs["no other traffic"] <= 0


BURSTS: dict[str, Any] = {
    "schema": "ddpsim/1",
    "workload": {"model": "resnet18", "batch_per_rank": 32},
    "cluster": {
        "nodes": 2,
        "gpus_per_node": 1,
        "device": "a100-sxm-40gb",
        "inter_node": {"bandwidth": "10 Gbit/s", "latency": "5 us"},
        "background": {"rate": "5 Gbit/s", "busy": "1 s", "every": "2 s"},
    },
    "run": {"iterations": 1},
}


def test_what_run_warns_of_is_said_by_all() -> None:
    """Of the step with those very options, as the text depends on how long that is."""
    base, cap = load(BURSTS), "ddp.bucket_cap_mb=100"
    result = ddpsim.simulate(parse(base))
    of_cap = ddpsim.simulate(parse(base.changed([cap]))).warnings
    assert len(result.warnings) == len(of_cap) == 1
    assert of_cap != result.warnings
    comparison = compare(parse(base), [option(base, cap)])
    assert (comparison.warnings, comparison.changes[0].warnings) == (result.warnings, of_cap)
    assert comparison.to_dict()["warnings"] == list(result.warnings)
    swept = sweep(BURSTS, Grid.of([cap]))
    assert swept.warnings == of_cap
    explanation = Explanation(result, (Phase("forward", 1.0),), (), ())
    assert explanation.to_dict()["warnings"] == list(result.warnings)
    for text in (render_comparison(comparison), render_explanation(explanation, "a.yaml")):
        assert text.count("WARNING") == 1
        assert result.warnings[0] in " ".join(text.split())


def test_what_only_an_option_warns_of_is_said_with_its_name() -> None:
    """Once for all whose warnings differ in figures alone."""
    base = document("resnet50-2x8-25gbit", "run.iterations=1")
    options = [option(base, f"workload.batch_per_rank={batch}") for batch in (64, 4096, 8192)]
    text = " ".join(render_comparison(compare(parse(base), options)).split())
    assert text.count("WARNING") == 1
    assert "batch_per_rank=4096, workload.batch_per_rank=8192: needs about" in text


def test_a_weak_link_is_advised_against() -> None:
    weak = document("resnet50-2x8-25gbit", "cluster.weak_links={3: 0.02}")
    helps = explain_step(weak).helps
    assert ("cluster.weak_links=null",) in [help_.settings for help_ in helps]


def test_no_link_is_advised_where_a_log_says_the_times() -> None:
    found = explain_step(document("gloo-cpu"))
    assert not any("bandwidth" in setting for help_ in found.helps for setting in help_.settings)


def test_data_parallel_has_none_of_ddps_options() -> None:
    base = document("data-parallel")
    assert [each.title for each in each_flag(base)] == ["workload.optimizer.fused=true"]
    words = [phase.text for phase in explain_step(base).phases]
    assert "gradients reduced to GPU 0" in words
    assert not any("all-reduce" in each for each in words)


def test_another_question_is_said_to_be_one() -> None:
    base = parse(document("resnet50-2x8-25gbit"))
    (change,) = compare(base, [option(document("gloo-cpu"), title="b.yaml")]).changes
    assert change.note == "another model, another precision, another device, other GPUs"
    same = option(document("resnet50-2x8-25gbit"), "ddp.bucket_cap_mb=50", title="c.yaml")
    assert compare(base, [same]).changes[0].note == ""


def test_a_measured_step_is_not_compared_at_another_batch() -> None:
    base = document("straggler")
    another = option(base, "workload.batch_per_rank=64")
    (change,) = compare(parse(base), [another]).changes
    assert "workload.step_time was measured with another" in change.problem
    both = option(base, "workload.batch_per_rank=64", "workload.step_time=300 ms")
    assert compare(parse(base), [both]).changes[0].step_s


def test_nor_another_file_with_settings_that_it_was_not_measured_with() -> None:
    base = document("resnet50-2x8-25gbit", "workload.batch_per_rank=128")
    measured = document("straggler", "workload.batch_per_rank=128")
    (change,) = compare(parse(base), [option(measured, title="b.yaml")]).changes
    assert "workload.step_time was measured with another" in change.problem


FUSED = "workload.optimizer.fused=true"


@pytest.mark.parametrize("stated", ["300 ms", "{total: 300 ms, optimizer: 9 ms}"])
def test_a_measured_optimizer_is_not_compared_with_another(stated: str) -> None:
    base = document("straggler", f"workload.step_time={stated}")
    (change,) = compare(parse(base), [option(base, FUSED)]).changes
    assert "workload.step_time was measured with another" in change.problem
    assert change.step_s is None


def test_an_optimizer_that_was_not_measured_is() -> None:
    base = document("straggler", "workload.step_time={forward: 100 ms, backward: 200 ms}")
    (change,) = compare(parse(base), [option(base, FUSED)]).changes
    assert change.change_s is not None
    assert change.change_s < 0


def test_a_log_does_not_say_what_is_latency() -> None:
    found = [s.what for s in sensitivities(resolve(parse(document("resnet50-nccl-log"))))]
    assert found == [
        "compute 10 % faster", "all-reduces 10 % faster", "a network that takes no time"
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["resnet50-2x8-25gbit", "accumulation", "gloo-cpu"])
def test_phases_add_up_to_the_median_step(name: str) -> None:
    found = explain_step(document(name))
    path = found.result.critical_path
    total_s = sum(phase.length_s for phase in found.phases)
    assert math.isclose(total_s, path[-1].end_s - path[0].start_s)
    assert math.isclose(total_s, found.result.iteration_time_s.p50, rel_tol=0.02)
    assert len(found.phases) < 12
    assert all(change.change <= -0.01 and change.is_sure for change in found.helps)
    assert len({change.settings[0].partition("=")[0] for change in found.helps}) == len(found.helps)
    shown = render_explanation(found, "my scenario.yaml", ["run.seed=1"])
    for change in found.helps:
        flat = shown.replace(" \\\n                ", " ")
        assert "ddpsim run 'my scenario.yaml' --set run.seed=1 --set " in flat
        assert change.settings[0].partition("=")[0] in flat
    assert max(map(len, shown.splitlines())) <= 100


def test_phases_are_told_in_words_and_take_what_is_very_short_with_them() -> None:
    """Of a step of 1 s what takes less than 1 ms is the part's before it, but for the first."""
    ends_ms = {
        "host": 0.5,
        "forward": 200,
        "data_wait": 200.5,  # the forward's
        "backward": 500,
        "bucket_copy": 510,
        "all_reduce of bucket 3": 700,
        "comm_hook": 700.8,  # the all-reduce's
        "all_reduce of bucket 4": 900,
        "late peer": 950,
        "copy_back": 951.5,
        "all_reduce of bucket 5": 960,
        "optimizer": 1000,
    }
    begins_ms = [0, *ends_ms.values()]
    path = [
        CriticalPart(kind, begin / 1e3, end / 1e3)
        for (kind, end), begin in zip(ends_ms.items(), begins_ms, strict=False)
    ]
    phases = explain._phases(path, explain._WORDS)
    found = [(each.text, round(1e3 * each.length_s, 6)) for each in phases]
    assert found == [
        ("waiting for the host", 0.5),
        ("forward", 200),
        ("backward, with the gradients' copies into buckets", 309.5),
        ("all-reduces of buckets 3 to 4, one after another", 390),
        ("late peer", 50),
        ("copies from buckets back to gradients", 1.5),
        ("all-reduce of bucket 5", 8.5),
        ("optimizer", 40),
    ]


def test_json_holds_every_figure(resnet: dict[str, Change]) -> None:
    found = document("resnet50-2x8-25gbit")
    plain: Any = json.loads(json.dumps(explain_step(found).to_dict(), allow_nan=False))
    assert plain["schema"] == "ddpsim.explanation/1"
    assert [set(each) for each in plain["phases"]] == [{"text", "length_s"}] * len(plain["phases"])
    comparison = compare(parse(found), each_flag(found)).to_dict()
    plain = json.loads(json.dumps(comparison, allow_nan=False))
    assert plain["schema"] == "ddpsim.comparison/1"
    assert {each["title"] for each in plain["changes"]} == set(resnet)
    assert all(isinstance(each["is_sure"], bool) for each in plain["changes"])
