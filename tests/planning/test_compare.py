"""What another scenario would bring, against what run says of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from changed_documents import alone, document

import ddpsim
from ddpsim.planning.compare import Option, compare, each_flag, option
from ddpsim.planning.explain import explain_step
from ddpsim.planning.sweeps.grid import Grid
from ddpsim.planning.sweeps.sweep import sweep
from ddpsim.prediction.interval import HOST, ROOFLINE
from ddpsim.prediction.resolve import resolve
from ddpsim.prediction.uncertainty import uncertainties
from ddpsim.report.changes import render_comparison, render_explanation, verdict
from ddpsim.result.changes import Change, Comparison, Explanation, Phase
from ddpsim.scenario.document import load
from ddpsim.scenario.load import parse
from ddpsim.scenario.schema import Scenario

ROOT = Path(__file__).resolve().parent.parent.parent
PLANNING = (ROOT / "docs" / "how-to" / "bucket-size.md").read_text("utf-8")


def flags(name: str, *settings: str) -> dict[str, Change]:
    found = document(name, *settings)
    return {change.title: change for change in compare(parse(found), each_flag(found)).changes}


@pytest.fixture(scope="module")
def compared() -> Comparison:
    """One scenario with each flag that it has not."""
    found = document("resnet50-2x8-25gbit")
    return compare(parse(found), each_flag(found))


@pytest.fixture(scope="module")
def resnet(compared: Comparison) -> dict[str, Change]:
    return {change.title: change for change in compared.changes}


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
        ("compute", ROOFLINE["convolutional"]),
        ("host", HOST),
        ("network", first.network.uncertainty),
    ):
        moves = [
            other.step_s(**{term: factor}) - first.step_s(**{term: factor}) - still_s
            for factor in uncertainty.edges
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
    terms = (("compute", False), ("host", False), ("network", True), ("interference", True))
    for term, alike_in_both in terms:
        ours, theirs = (
            [
                job.step_s(**{term: f}) - job.step_s()
                for f in (uncertainties(job)[term].edges if term in uncertainties(job) else (1, 1))
            ]
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
            [job.step_s(**{term: f}) - job.step_s() for f in doubt.edges] for job in jobs
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
    why = "ddp.static_graph: torch 1.4 is modelled without it; take a newer one"
    assert found["ddp.static_graph=true"].problem == why
    shown = render_comparison(Comparison("x", 8, 8, 1.0, None, tuple(found.values())))
    assert f"impossible  ddp.gradient_as_bucket_view=true: {why[:4]}" in shown
    assert "step        1.00 s   no interval can be had   8 samples" in shown


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


# Published effects of options (docs/how-to/bucket-size.md has the figures): their sign, here
SIGNS = [
    # gradient_as_bucket_view: RoBERTa 0.982 -> 0.91 s, nothing on ResNet (pytorch#41954)
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
        assert change.is_sure or name == "resnet50-2x8-25gbit"  # whose host may set the pace
    else:
        assert abs(change.change) < 0.02  # 0.00 s of 0.x s, as printed there
    key = setting.partition("=")[0].removeprefix("ddp.")
    (row,) = [line for line in PLANNING.splitlines() if line.startswith(f"| `{key}`")]
    assert f"`{name}` {100 * change.change:+.1f} %" in row


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
    assert "batch_per_rank=4096; workload.batch_per_rank=8192: needs about" in text


def test_names_are_whole_on_narrow_screens(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a row has no room for stands above it; the baseline has a name like the others."""
    lows = {
        "zero1": 0.1,
        "fully_shard, reshard_after_forward=false": -0.02,
        "some/folder/" * 12 + "a.yaml": 1e-6,
    }
    changes = [Change(name, (), 1.2, 0.2, 0.2, low, 0.3) for name, low in lows.items()]
    compared = Comparison("a", 8, 64, 1.0, None, tuple(changes), baseline="a.yaml under ddp")
    for columns in (80, 100):
        monkeypatch.setattr("ddpsim.report.lines.screen_width", lambda: columns)  # noqa: B023
        text = render_comparison(compared)
        assert all(f"  {name}" in text for name in (*lows, "  a.yaml under ddp"))
        rows = [row for row in text.splitlines() if "slower" in row]
        assert max(map(len, rows)) <= columns
    assert [" ".join(row.split()[-6:-2]) for row in rows] == [
        "+100 to +300 ms",
        "-20.0 to +300 ms",
        "0 to +300 ms",
    ]


def test_the_best_fits_trains_the_same_and_says_what_tokens_cost() -> None:
    changes = [
        Change("too large", (), change_s=-0.9, fits=False),
        Change("local_sgd", (), change_s=-0.8, note="another training"),
        Change("hsdp", (), change_s=-0.5, change=-0.5, low_s=-0.6, high_s=-0.4),
        Change("zero1", (), change_s=0.5),
    ]
    more = {"gpus": 16, "tokens_per_sample": 1000}
    compared = Comparison("a", 16, 64, 1.0, None, tuple(changes), **more)
    assert compared.best is changes[2]
    text = " ".join(render_comparison(compared).split())
    assert "best hsdp: 128,000 tokens/s, 1 billion tokens in 2.17 h, 34.7 GPU-hours" in text
    slower = Comparison("a", 16, 64, 1.0, None, tuple(changes[3:]), **more)
    assert slower.best is None
    assert "best" not in render_comparison(slower)


@pytest.mark.parametrize(
    ("low_s", "high_s", "is_told"), [(-0.6, -0.4, True), (-0.6, 0.1, False), (-0.6, 0.0, False)]
)
def test_the_best_says_whether_it_is_told_apart(low_s: float, high_s: float, is_told: bool) -> None:
    best = Change("hsdp", (), change_s=-0.5, change=-0.5, low_s=low_s, high_s=high_s)
    compared = Comparison("a", 16, 64, 1.0, None, (best,), baseline="a.yaml under ddp", gpus=16)
    text = " ".join(render_comparison(compared).split())
    assert compared.best is best
    assert ("best ? hsdp" in text) is not is_told
    said = "it fits, and trains the same; not told apart from a.yaml under ddp"
    assert (said in text) is not is_told


def test_a_best_that_is_the_same_is_not_told_apart() -> None:
    """Its interval leaves zero out, but nobody would measure it."""
    best = Change("hsdp", (), change_s=-0.001, change=-0.001, low_s=-0.0012, high_s=-0.0008)
    text = render_comparison(Comparison("a", 16, 64, 1.0, None, (best,), gpus=16))
    assert "not told apart from the baseline" in " ".join(text.split())


def test_data_parallel_has_none_of_ddps_options() -> None:
    base = document("data-parallel")
    assert [each.title for each in each_flag(base)] == ["workload.optimizer.fused=true"]
    words = [phase.text for phase in explain_step(base).phases]
    assert "gradients reduced to GPU 0" in words
    assert not any("all-reduce" in each for each in words)


def test_another_question_is_said_to_be_one() -> None:
    base = parse(document("resnet50-2x8-25gbit"))
    (change,) = compare(base, [option(document("gloo-cpu"), title="b.yaml")]).changes
    assert change.note == (
        "another model, another batch, another device, other GPUs, another rule of the optimizer, "
        "another precision"
    )
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


def test_json_holds_every_figure(compared: Comparison) -> None:
    found = document("resnet50-2x8-25gbit")
    plain: Any = json.loads(json.dumps(explain_step(found).to_dict(), allow_nan=False))
    assert plain["schema"] == "ddpsim.explanation/1"
    assert [set(each) for each in plain["phases"]] == [{"text", "length_s"}] * len(plain["phases"])
    plain = json.loads(json.dumps(compared.to_dict(), allow_nan=False))
    assert plain["schema"] == "ddpsim.comparison/1"
    titles = [change.title for change in compared.changes]
    assert [each["title"] for each in plain["changes"]] == titles
    assert all(isinstance(each["is_sure"], bool) for each in plain["changes"])


def test_other_options_of_zero1_are_compared() -> None:
    """Also from parameters_as_bucket_view, which goes with no overlap."""
    own = [each.title for each in each_flag(document("zero1-overlap"))]
    hook = "ddp.zero1.hook=hook_with_zero_step"
    assert own[:3] == ["ddp.zero1=null", hook, "ddp.zero1.shard_buckets=true"]
    in_one = document("zero1-overlap", "ddp.zero1={parameters_as_bucket_view: true}")
    view, *overlaps = list(each_flag(in_one))[:3]
    assert view.title == "ddp.zero1.parameters_as_bucket_view=false"
    found = [each.scenario for each in overlaps]
    assert [isinstance(each, Scenario) and each.ddp.overlaps_optimizer for each in found] == [
        True,
        True,
    ]


def test_adamw_is_a_row_of_an_optimizer_without_its_moments() -> None:
    muon = document("gpt2-xl-fully-shard").changed(["workload.optimizer=muon"])
    titles = {each.title for each in each_flag(muon)}
    assert "workload.optimizer=adamw" in titles
    assert "workload.optimizer.fused=true" in titles


def test_budgets_of_the_compiler_are_rows_where_it_compiles() -> None:
    def titles(*settings: str) -> set[str]:
        changed = document("checkpointing").changed(settings)
        return {each.title for each in each_flag(changed) if "memory_budget" in each.title}

    half, most = (f"workload.checkpointing={{memory_budget: {part}}}" for part in (0.5, 0.8))
    assert titles() == set()
    assert titles("workload.compile=true") == {half, most}
    assert titles("workload.compile=true", half) == {most}
