"""The options that tune picks are the best of what it tried, and within its limits."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean

import pytest
from campaigns import unpacked

import ddpsim
from calibrate.validate.report import Sweep, Validation
from ddpsim.engine import batch, least
from ddpsim.engine.request import Request
from ddpsim.engine.run import run
from ddpsim.planning.tune import Limits, TuneError, tune
from ddpsim.prediction.resolve import resolve
from ddpsim.report.changes import render_tuning
from ddpsim.result.summary import SteadyStep, mean_step_s
from ddpsim.result.sweep import FLAT
from ddpsim.scenario.document import Document, load
from ddpsim.scenario.load import parse

ROOT = Path(__file__).resolve().parent.parent.parent


def document(name: str, *settings: str) -> Document:
    return load(ROOT / "scenarios" / f"{name}.yaml", settings)


def sample_s(name: str, *settings: str) -> float:
    """Of a scenario's mean step, simulated on its own."""
    scenario = parse(document(name, *settings))
    per_rank = scenario.workload.batch_per_rank * scenario.ddp.accumulation_steps
    step_s = mean_step_s(run(resolve(scenario).request()).timeline)
    return step_s / (per_rank * scenario.cluster.world_size)


CAPS = ("default", *map(str, (1, 2, 5, 10, 15, 25, 35, 50, 75, 100, 150, 250, 500)))
LISTS = tuple(f"[{first}, {cap}]" for first in (1, 5) for cap in (5, 10, 50, 100, 250, 500))


FEW = "run.iterations=4"


@pytest.mark.parametrize("name", ["resnet50-2x8-25gbit", "gloo-cpu"])
def test_the_fastest_is_the_fastest_of_all(name: str) -> None:
    """Against every combination, simulated one by one."""
    found = tune(document(name, FEW))
    every = {
        (view, cap): sample_s(
            name, FEW, f"ddp.gradient_as_bucket_view={view}", f"ddp.bucket_cap_mb={cap}"
        )
        for view in ("false", "true")
        for cap in (*CAPS, *LISTS)
    }
    least = min(every.values())
    assert sample_s(name, FEW, *found.fastest.settings) == pytest.approx(least, rel=1e-12)
    picked = sample_s(name, FEW, *found.pick.settings)
    assert picked <= least * (1 + FLAT) * (1 + 1e-12)
    assert len(found.pick.settings) <= len(found.fastest.settings)
    assert found.own_regret == pytest.approx(sample_s(name, FEW) / least - 1, rel=1e-9)
    own = parse(document(name)).ddp.gradient_as_bucket_view
    views = [s for s in found.pick.settings if "view" in s]
    view = views[0].partition("=")[2] if views else str(own).lower()
    flat = [cap for cap in (*CAPS, *LISTS) if every[view, cap] <= least * (1 + FLAT)]
    assert list(found.flat_caps) == flat
    assert found.default_regret == pytest.approx(every[view, "default"] / least - 1, rel=1e-9)


def test_a_scenario_that_is_as_good_stays_as_it_is() -> None:
    found = tune(document("resnet50-8xa100", "ddp.gradient_as_bucket_view=true"))
    assert found.pick.settings == ()
    assert found.pick.title == "as it is"
    assert found.own_regret is not None
    assert found.own_regret <= FLAT
    shown = render_tuning(found, "a.yaml", ["run.seed=1"])
    assert "take        the options as they are:" in shown
    assert shown.endswith("ddpsim run a.yaml --set run.seed=1")


def test_a_global_batch_is_kept() -> None:
    small = ("workload.model=resnet18", "run.iterations=1")
    found = tune(document("resnet50-2x8-25gbit", *small), Limits(global_batch=256, may_round=True))
    assert found.own_regret is None
    for change in (found.pick, found.fastest):
        scenario = parse(document("resnet50-2x8-25gbit", *small, *change.settings))
        per_rank = scenario.workload.batch_per_rank * scenario.ddp.accumulation_steps
        assert per_rank * 16 == 256
    assert any("comm_hook=bf16_compress" in setting for setting in found.fastest.settings)
    assert "the scenario's own options do not keep to the limits" in render_tuning(found, "a")


def test_memory_is_kept() -> None:
    """A tenth of the gradients' copies: only the view fits."""
    name = "slow-network"
    need = ddpsim.simulate(parse(document(name))).memory_bytes_per_gpu.total
    found = tune(document(name), Limits(memory_bytes=need - 1))
    assert "ddp.gradient_as_bucket_view=true" in found.pick.settings
    assert found.unfit == found.tried / 2
    with pytest.raises(TuneError, match="none of 52 combinations fits into 954 MiB"):
        tune(document(name), Limits(memory_bytes=1e9))


def test_batches_that_cannot_be() -> None:
    with pytest.raises(TuneError) as raised:
        tune(document("resnet50-2x8-25gbit"), Limits(global_batch=1000))
    assert str(raised.value) == (
        "a global batch of 1,000 samples does not divide by 16 ranks; wanted for instance 992 or "
        "1,008"
    )
    own = parse(document("own-model")).workload.batch_per_rank
    with pytest.raises(TuneError) as raised:
        tune(document("own-model"), Limits(global_batch=16 * own + 16))
    assert str(raised.value).startswith(f"the scenario's times are those of batch_per_rank {own},")
    found = tune(document("own-model"), Limits(global_batch=2 * 16 * own))
    assert "ddp.accumulation_steps=2" in found.pick.settings


def test_a_sampler_finds_no_less_than_the_grid() -> None:
    pytest.importorskip("optuna", reason="needs the extra tune")
    base = document("resnet50-2x8-25gbit", "workload.model=resnet18", FEW)
    plain, found, again = (tune(base, Limits(trials=trials)) for trials in (0, 15, 15))
    assert found == again
    assert found.tried > plain.tried
    assert found.fastest.change_s <= plain.fastest.change_s


def test_an_old_torch_has_fewer_options() -> None:
    found = tune(document("resnet50-8xa100", "ddp.torch='1.4'"))
    assert not any("[" in cap for cap in found.flat_caps)
    assert not any("view" in setting for setting in found.fastest.settings)


def test_data_parallel_has_nothing_to_tune() -> None:
    with pytest.raises(TuneError, match="DataParallel has no buckets"):
        tune(document("data-parallel"))


def test_what_is_refused_is_told_with_its_reason() -> None:
    """Strategies by name, and options by what all refused combinations have."""
    found = tune(document("ddp-mixed-precision", FEW), Limits(each_strategy=True))
    refused = {name: reason.partition(":")[0] for name, reason in found.refused.items()}
    fused = dict.fromkeys(
        ("fully_shard", *(f"fully_shard, reshard_after_forward={kept}" for kept in ("false", "8"))),
        "workload.optimizer.fused",
    )
    assert refused == {
        "ddp.gradient_as_bucket_view=true": "ddp.mixed_precision",
        "zero1": "ddp.mixed_precision",
        **fused,
        **{
            name.replace("fully_shard", "hsdp"): why
            for name, why in fused.items()
            if "8" not in name
        },
    }
    text = render_tuning(found, "job.yaml")
    assert "impossible  ddp.gradient_as_bucket_view=true: ddp.mixed_precision: takes" in text
    assert "fully_shard; hsdp: workload.optimizer.fused: torch has no fused SGD" in text
    assert dict(tune(document("resnet50-8xa100", FEW)).refused) == {}


def test_a_choice_without_buckets_names_no_caps() -> None:
    settings = ("workload.model=gpt2", FEW, "cluster.nodes=1", "cluster.gpus_per_node=2")
    own = document("gpt2-xl-fully-shard", *settings)
    found = tune(own, Limits(each_strategy=True))
    assert parse(own.changed(found.pick.settings)).ddp.is_fully_sharded
    assert found.flat_caps == ()
    assert found.default_regret is None
    assert "caps" not in render_tuning(found, "job.yaml")


def test_the_options_that_are_taken_bring_their_warnings(tmp_path: Path) -> None:
    """Their buckets lie outside the log."""
    log = tmp_path / "short.csv"
    log.write_text("size_bytes,time_us,nodes,gpus_per_node\n100000,40,1,8\n1000000,60,1,8\n")
    beyond = [f"cluster.all_reduce={log}", "run.allow_extrapolation=true"]
    found = tune(document("resnet50-nccl-log", *beyond))
    taken = parse(document("resnet50-nccl-log", *beyond, *found.pick.settings))
    said = ddpsim.simulate(taken).warnings
    assert said
    assert found.warnings == said
    text = " ".join(render_tuning(found, "a").split())
    assert all(f"! {warning}" in text for warning in said)
    assert tune(document("resnet50-nccl-log")).warnings == ()


def test_json_holds_every_figure() -> None:
    found = tune(document("gpt2-bucket-choice"))
    plain = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert plain["schema"] == "ddpsim.tuning/1"
    assert plain["within"] == FLAT
    assert plain["pick"]["settings"] == list(found.pick.settings)


ACCURACY = (ROOT / "docs" / "explanation" / "accuracy.md").read_text("utf-8")


@cache
def recorded_sweeps() -> list[Sweep]:
    """Of all testbeds, those with a core a rank."""
    reports = sorted(unpacked().glob("testbed*.json"))
    records = [Validation.model_validate_json(report.read_bytes()) for report in reports]
    return [sweep for one in records for sweep in one.sweeps if not sweep.oversubscribed]


def test_what_jitter_hides_is_no_difference() -> None:
    """Twenty steps with 15 % of jitter tell 2 % apart; without it, the same caps differ."""
    name, jitter = "resnet50-2x8-25gbit", "run.jitter={distribution: lognormal, sigma: 0.15}"
    calm, noisy = (tune(document(name, *keys)) for keys in ((), (jitter,)))
    assert (calm.noise, calm.within) == (0, FLAT)
    assert 0.01 < noisy.noise == noisy.within < 0.04
    assert len(noisy.pick.settings) <= len(calm.pick.settings)
    assert len(calm.flat_caps) < len(noisy.flat_caps)
    said = " ".join(render_tuning(noisy, "a").split())
    assert f"differ by up to {noisy.noise:.1%} by chance" in said


def test_from_where_on_caps_differ_as_predicted() -> None:
    """Figures of docs/explanation/accuracy.md: below FLAT nobody can tell which is faster."""
    apart: list[tuple[float, float]] = []  # predicted, and measured in the direction predicted
    for sweep in recorded_sweeps():
        default, *others = (cases[0] for cases in sweep.choices)
        assert default.variant == "default"
        for case in others:
            predicted = case.predicted_s / default.predicted_s - 1
            measured = case.measured_s / default.measured_s - 1
            apart.append((abs(predicted), math.copysign(1, predicted) * measured))
    alike = [measured > 0 for predicted, measured in apart if predicted < FLAT]
    near = [both for both in apart if FLAT <= both[0] < 0.005]
    predicted, measured = (fmean(column) for column in zip(*near, strict=True))
    slower, right = (100 * fmean(each) for each in (alike, [both[1] > 0 for both in near]))
    assert f"| below {100 * FLAT:g} % | {len(alike)} | {slower:.0f} % were slower" in ACCURACY
    assert (
        f"| 0.2 to 0.5 %, {100 * predicted:.2f} % on average | {len(near)} | "
        f"{100 * measured:.2f} % on average, {right:.0f} % in the predicted direction |"
    ) in ACCURACY


def test_how_good_the_choice_is() -> None:
    """Figures of docs/explanation/accuracy.md and of the answer's trust line, on the testbeds."""
    sweeps = [sweep for sweep in recorded_sweeps() if sweep.regret is not None]  # over caps
    regrets = [sweep.regret or 0.0 for sweep in sweeps]
    flat = 0
    for sweep in sweeps:
        best_s = min(cases[0].measured_s for cases in sweep.choices)
        flat += any(cases[0].measured_s == best_s for cases in sweep.flat)
    good = sum(regret <= 0.01 for regret in regrets) / len(regrets)
    assert f"on {len(regrets)} sweeps of real DDP" in ACCURACY
    for row, share in (
        ("at most 1 % slower than the best measured cap", f"{100 * good:.0f} %"),
        (f"at most {100 * max(regrets):.1f} % slower", "all"),
        ("the best measured cap is among those called flat", f"{100 * flat / len(sweeps):.0f} %"),
    ):
        assert f"| {row} | {share} |" in ACCURACY
    assert f"in {good:.0%} of the sweeps" in render_tuning(tune(document("own-model")), "a")


@pytest.mark.parametrize(
    "noise",
    [
        "run.jitter={sigma: 0.02}",
        "cluster.background={rate: 1 GB/s, busy: 3 ms, every: 10 ms}",
    ],
)
def test_what_is_not_simulated_is_not_among_the_best(
    noise: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against all that fit, simulated."""
    monkeypatch.setattr("ddpsim.planning.tune._CAPS", ("default", "1", "10", "100"))
    monkeypatch.setattr("ddpsim.planning.tune._LISTS", ())
    host = "cluster.device={preset: a100-sxm-80gb, operator: 60 us}"
    asked = (host, "workload.grad_scaler=false", "run.iterations=2", noise)
    told = [least.least_step_s, lambda *_, **__: 0.0]
    simulated, found = list[int](), []
    run_many = batch.run_many

    def counted(requests: Sequence[Request], advance: Callable[[float], None]) -> list[SteadyStep]:
        simulated[-1] += len(requests)
        return run_many(requests, advance)

    monkeypatch.setattr(batch, "run_many", counted)
    for least_step_s in told:
        monkeypatch.setattr(least, "least_step_s", least_step_s)
        simulated.append(0)
        found.append(tune(document("resnet50-2x8-25gbit", *asked), Limits(global_batch=32)))
    assert found[0] == found[1]
    assert simulated[0] < 0.7 * simulated[1]
