"""The accuracy that was reached, held: docs/validation.md has the tables."""

from __future__ import annotations

import csv
import math
import os
from pathlib import Path
from statistics import fmean, median

import pytest
from held_out import nccl_presets
from held_out.errors import (
    DEVICE_BOUND,
    HOST_BOUND,
    device_sigma,
    figures,
    held_out,
    host_sigma,
    published_operators,
    usual_efficiency_errors,
)
from held_out.judging import judged, scaled
from held_out.presets import devices_told
from held_out.records import RECORDED
from held_out.rows import published_loops
from held_out.sharded_steps import judged_steps, steps_of_unequal_gpus
from published_steps import rms
from validation import two_hosts
from validation.benchmark import benchmark_rows, reference_log
from validation.bucket_sweep import cs336_rows
from validation.folders import PAGE, ROOT
from validation.measured_devices import errors_by_model
from validation.one_gpu import compiled_errors, torchbench_rows
from validation.page import page
from validation.presets import preset_sigma
from validation.recorded import (
    CALM_EPYC,
    CAMPAIGNS,
    EPYC,
    FAST_XEON,
    SLOW_EPYC,
    XEON,
    campaign,
    later,
    rounds_of,
)
from validation.rows import levels, levels_knowing_ddp
from validation.scaling import scaled_rows, synthetic, unequal_ranks

from calibrate.validate.report import figures_of
from calibrate.validate.validate import validate
from ddpsim.cluster.from_links import PRESET_LINKS, PRESET_NETWORK
from ddpsim.prediction.interval import COMPILED, HOST, ROOFLINE, UNEQUAL_RANKS, UNKNOWN_DEVICE
from ddpsim.scenario.catalog import device_names, device_table

needs_reference = pytest.mark.skipif(
    not os.environ.get("DDPSIM_REFERENCE_DATA"),
    reason="DDPSIM_REFERENCE_DATA is not set: no log of 4 V100",
)


@pytest.mark.slow
def test_the_published_benchmark_is_predicted() -> None:
    """Bucket 25: 3 % median and 6 % worst; DDP on one GPU 2 % median.

    The rows of 4 GPUs need a log of the reference data; the others alone have a median of 3.2 %.
    """
    rows, has_log = benchmark_rows(25), reference_log() is not None
    assert len(rows) == (20 if has_log else 16)
    middle, worst = levels(rows)
    assert middle <= (0.03 if has_log else 0.035)
    assert worst <= 0.06
    single, _ = levels(tuple(row for row in rows if row.case == "1"))
    assert single <= 0.02


def test_the_published_benchmark_is_predicted_from_one_gpu() -> None:
    """Given the steps of one GPU without and with DDP, 2 to 16 GPUs: 2 % median and 5 % worst."""
    rows = benchmark_rows(25)
    middle, worst = levels_knowing_ddp(rows)
    assert sum(row.knowing_ddp_s is not None for row in rows) == len(rows) - 4
    assert middle <= 0.02
    assert worst <= 0.05


def test_the_interval_uses_what_published_jobs_take_longer_than_one_gpu_says() -> None:
    """Nine in ten take at most so much longer; the interval holds 7 to 10 in 10 of those steps."""
    for told, measured in (("images", unequal_ranks()), ("other", synthetic())):
        assert UNEQUAL_RANKS[told][:2] == pytest.approx(measured, abs=0.01)
    rows = scaled_rows(reading_images=True)
    assert len(rows) == 22
    assert fmean(row.covered for row in rows) >= 0.7
    assert all(row.longer > 0 for row in rows)  # why the interval grows upwards alone


def test_steps_with_synthetic_images_are_predicted() -> None:
    """56 on 12 machines: half within 1 %, nine in ten within 5; on H100s all within 1.5."""
    rows = scaled_rows(reading_images=False)
    assert (len(rows), len({row.source for row in rows})) == (56, 12)
    half, most = synthetic()
    assert 0 < half < 0.01
    assert most < 0.05
    assert all(abs(row.longer) < 0.015 for row in rows if row.device.startswith("h100"))
    assert sum(row.covered for row in rows) >= 54


@pytest.mark.parametrize("device", RECORDED)
def test_half_of_the_models_predict_the_others_on_a_measured_gpu(device: str) -> None:
    """By a device file: 10.5 % median. VGG-16's convolutions reach more, Llama's host less."""
    by_model = errors_by_model(device)
    assert len(by_model) == 17
    assert median(abs(error) for errors in by_model.values() for error in errors) <= 0.105
    worst = {model: max(map(abs, errors)) for model, errors in by_model.items()}
    assert worst.pop("vgg16") < 0.8
    assert worst.pop("llama-1b") < 0.9
    assert max(worst.values()) < 0.6


def test_we_beat_the_naive_answers_that_ignore_communication() -> None:
    for row in benchmark_rows(25):
        assert abs(row.error()) < abs(row.error(row.compute_only_s))
        assert abs(row.error()) < abs(row.error(row.perfect_overlap_s))


def test_the_known_gap_of_interference_is_still_there() -> None:
    """With equal GPUs the 16-GPU rows are 4 to 8 % low: closing this is worth noticing."""
    rows = [row for row in benchmark_rows(25) if row.case == "16"]
    assert all(-0.08 < row.error(row.equal_gpus_s) < -0.04 for row in rows)


def test_the_testbed_at_500_mbit_is_predicted() -> None:
    """Backward, with all its waiting, within 4 %; whole iterations within 2 %."""
    for step, backward in two_hosts.testbed_rows():
        if step.label == "500mbit":
            assert abs(backward.error()) <= 0.04, backward
            assert abs(step.error()) <= 0.02, step


def test_the_testbed_at_2_gbit_lacks_interference() -> None:
    """Known gap: low by at most 11 %, and right where nothing overlaps (cap 100)."""
    errors = {s.case: s.error() for s, _ in two_hosts.testbed_rows() if s.label == "2gbit"}
    assert abs(errors.pop("100")) < 0.02
    assert all(-0.11 < error < -0.05 for error in errors.values()), errors


def test_the_interval_uses_the_errors_of_steps_that_others_predict() -> None:
    for kind, used in ROOFLINE.items():
        count, sigma = device_sigma(kind)
        assert -0.006 < used.sigma - sigma < 0.011, kind  # jobs under FSDP ask for more
        assert f" {count} measured steps" in used.basis, kind
    usual, compiled = usual_efficiency_errors(), compiled_errors()
    assert math.isclose(UNKNOWN_DEVICE.sigma, rms(usual), abs_tol=0.006)
    assert f" {len(usual)} measured steps" in UNKNOWN_DEVICE.basis
    assert math.isclose(COMPILED.sigma, rms(compiled), abs_tol=0.006)
    assert f" {len(compiled)} published steps" in COMPILED.basis
    assert math.isclose(HOST.sigma, host_sigma(), abs_tol=0.006)
    assert f"{len(published_operators())} measured hosts" in HOST.basis


def test_steps_are_predicted_by_those_of_other_publishers() -> None:
    """Device-bound within 7.6 % (median), host-bound within 16.1 %.

    The worst is Llama 1B at batch 1: its operators take the host half of what others do.
    """
    device = [held for held in held_out() if held.regime == DEVICE_BOUND]
    host = [held for held in held_out() if held.regime == HOST_BOUND]
    count, middle, worst, covered = figures(device)
    assert count >= 350
    assert middle <= 0.076
    assert worst <= 0.51
    assert 0.75 <= covered <= 0.88
    count, middle, worst, _ = figures(host)
    assert count >= 150
    assert middle <= 0.162
    assert worst <= 0.74
    count, middle, _, covered = figures(held_out())
    assert middle <= 0.102
    assert 0.75 <= covered <= 0.88


def test_steps_that_set_nothing_are_predicted() -> None:
    """Models of one's own, captured and compiled: 6.4 % (median), and every interval holds.

    ResNet-50 on L40S is the worst of the others: its tensors stay in the cache.
    """
    own = [one for one in judged() if one.step.compiled]
    assert len(own) == 41
    assert median(abs(one.error) for one in own) <= 0.065
    assert abs(median(one.error for one in own)) <= 0.03
    assert max(abs(one.error) for one in own) <= 0.26
    assert sum(one.is_covered for one in own) >= 33
    others = [one for one in judged() if not one.step.compiled]
    assert len(others) == 20
    assert sum(one.is_covered for one in others) >= 13


def test_compiled_steps_on_four_gpus_are_predicted_from_one() -> None:
    """V100 over PCIe, which set nothing: within 3.3 %, and every interval holds."""
    assert len(scaled()) == 5
    errors = [abs(one.error) for one in scaled()]
    assert max(errors) <= 0.033
    assert median(errors) <= 0.005
    assert all(one.is_covered for one in scaled())


def test_plain_convolutions_on_hopper_are_predicted_by_those_of_other_publishers() -> None:
    """VGG-16 and ResNet-34: 31 % worst, of VGG-16 in half, channels last, batch 256."""
    errors = [
        abs(held.error)
        for held in held_out()
        if held.row.device in RECORDED and held.row.model in ("vgg16", "resnet34")
        if held.regime == DEVICE_BOUND
    ]
    assert len(errors) == 23
    assert median(errors) <= 0.15
    assert max(errors) <= 0.32


def test_the_presets_are_what_published_steps_say() -> None:
    """Written by `python -m held_out.presets`."""
    devices = {name: device_table(name) for name in device_names()}
    for name, told in devices_told(devices).items():
        assert told == devices[name], name


def test_the_published_loops_are_those_of_the_reference() -> None:
    """ViT-B/16's medians, where the file that they were copied from is at hand."""
    folder = os.environ.get("DDPSIM_REFERENCE_DATA")
    if not folder:
        pytest.skip("DDPSIM_REFERENCE_DATA is not set: no file of ViT-B/16's steps")
    with (Path(folder) / "published" / "vit-b16-a100-v100-steps.csv").open() as file:
        published = sorted(round(float(row["p50_s"]), 6) for row in csv.DictReader(file))
    own = [loop.step_s for loop in published_loops() if loop.source == "willgpaik"]
    assert sorted(round(step_s, 6) for step_s in own) == published


def test_the_readme_says_how_good_estimates_are() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    for regime in (DEVICE_BOUND, HOST_BOUND):
        held = [each for each in held_out() if each.regime == regime]
        count, middle, worst, covered = figures(held)
        row = f"| {count} | {middle:.1%} | {worst:.0%} | {covered:.0%} |".replace("%", " %")
        assert f"{regime}, predicted by other publishers' steps {row}" in text


def test_a_published_step_by_batch_is_estimated() -> None:
    """Where the host sets the pace within its doubt, and elsewhere as the roofline."""
    for batch, published_s, _, estimated_s in torchbench_rows():
        limit = 0.15 if batch >= 16 else 0.40
        assert abs(estimated_s / published_s - 1) < limit, batch


def test_the_interval_uses_the_measured_errors_of_presets() -> None:
    network = preset_sigma(several_nodes=True)
    assert math.isclose(PRESET_NETWORK.sigma, network, abs_tol=0.01)
    assert preset_sigma(several_nodes=False) <= PRESET_LINKS.sigma


def test_the_unexplained_bucket_sweep_is_still_unexplained() -> None:
    """Known gap: 17 to 25 % low; the best of its sizes is told, 100 MB, within 1 %."""
    rows = cs336_rows()
    assert len(rows) == 24
    assert all(-0.25 < row.error() < -0.16 for row in rows)
    for four in zip(*[iter(rows)] * 4, strict=True):
        picked = min(four, key=lambda row: row.predicted_s)
        assert picked.measured_s <= 1.01 * min(row.measured_s for row in four)


# campaign: within 5 % or the noise, worst error, bias, worst exposed, skill, choice: the levels
LEVELS = {
    EPYC: (1.0, 0.050, 0.003, 0.0335, 0.90, 0.94),
    XEON: (1.0, 0.0475, 0.003, 0.0365, 0.81, 0.95),
    FAST_XEON: (1.0, 0.031, 0.003, 0.0335, 0.90, 1.0),
    SLOW_EPYC: (0.97, 0.090, 0.003, 0.055, 0.89, 0.87),
    CALM_EPYC: (0.99, 0.0755, 0.005, 0.046, 0.89, 0.91),
}


@pytest.mark.parametrize("folder", CAMPAIGNS, ids=lambda folder: folder.name)
def test_a_recorded_campaign_is_predicted(folder: Path) -> None:
    """The level reached; docs/validation.md says what is missing to the goal."""
    figures = campaign(folder).figures
    assert figures is not None
    within, worst, bias, worst_exposed, skilled, choices = LEVELS[folder]
    assert figures.sweeps >= 24
    assert figures.cases >= 216
    assert figures.buckets_agree == figures.cases
    assert figures.median_error <= 0.012
    assert figures.worst_error <= worst
    assert abs(figures.median_bias) <= bias
    assert figures.within_5_percent_or_noise >= within
    assert figures.median_exposed_error <= 0.013
    assert figures.worst_exposed_error <= worst_exposed
    assert figures.skilled is not None
    assert figures.skilled >= skilled
    assert figures.good_choices is not None
    assert figures.good_choices >= choices


def test_runs_of_three_copies_of_the_bare_model_are_what_was_asked() -> None:
    """In every row but skill, which the truth itself would miss."""
    figures = later().figures
    assert figures is not None
    assert (figures.sweeps, figures.cases) == (24, 216)
    assert figures.median_error <= 0.003
    assert figures.worst_error <= 0.023
    assert figures.worst_exposed_error <= 0.022
    assert figures.good_choices is not None
    assert figures.good_choices >= 0.95
    assert figures.covered is not None
    assert 0.7 <= figures.covered <= 0.9
    assert figures.covered_p_value is not None
    assert figures.covered_p_value > 0.05
    assert figures.skilled is not None
    assert figures.another_run_skilled is not None
    assert figures.skilled >= max(0.92, figures.another_run_skilled)


@pytest.mark.parametrize("folder", CAMPAIGNS, ids=lambda folder: folder.name)
def test_the_interval_holds_as_often_as_it_says(folder: Path) -> None:
    """70 to 90 % of the cases, and fewer than 80 by chance alone: one test in twenty, of all."""
    figures = campaign(folder).figures
    assert figures is not None
    assert figures.covered is not None
    assert figures.covered_p_value is not None
    assert 0.7 <= figures.covered <= 0.9
    assert figures.covered >= 0.8 or figures.covered_p_value > 0.05 / len(CAMPAIGNS)


def test_the_readme_says_how_good_it_is() -> None:
    """A row of its table for each campaign."""
    text = (ROOT / "README.md").read_text("utf-8")
    for one in (f for c in CAMPAIGNS if (f := campaign(c).figures)):
        errors = f"{one.median_error:.1%} | {one.worst_error:.1%} | {one.covered:.0%}"
        assert f" | {one.cases} | {errors} |".replace("%", " %") in text


@needs_reference
def test_the_readme_says_how_good_all_reduces_without_a_log_are() -> None:
    points = nccl_presets.points_of("InfiniBand and RoCE", "all_reduce")
    errors = [abs(math.expm1(point.error)) for point in points]
    held = nccl_presets.held(points)
    row = f"| {len(errors)} | {median(errors):.1%} | {max(errors):.1%} | {held:.0%} |"
    assert row.replace("%", " %") in (ROOT / "README.md").read_text("utf-8")


@pytest.mark.parametrize("folder", CAMPAIGNS, ids=lambda folder: folder.name)
def test_ranks_on_too_few_cores_are_reported_apart(folder: Path) -> None:
    figures = campaign(folder).oversubscribed
    assert figures is not None
    assert figures.sweeps == 2
    assert figures.median_error <= 0.12


@pytest.mark.parametrize(
    ("folder", "rounds"),
    [
        # `python tools/make_validation.py` predicts all, for minutes
        (EPYC, "rounds-wide_mlp-2gbit-2hosts*"),
        # one model at every rate, and on too few cores
        (XEON, "rounds-cnn-0.8gbit-*.json"),
        (FAST_XEON, "rounds-cnn-2gbit-*.json"),
        (SLOW_EPYC, "rounds-cnn-5gbit-*.json"),
        (CALM_EPYC, "rounds-cnn-0.2gbit-*.json"),
    ],
    ids=lambda value: value.name if isinstance(value, Path) else "",
)
@pytest.mark.slow
def test_the_report_of_a_campaign_is_up_to_date(folder: Path, rounds: str) -> None:
    """What is predicted from the recorded measurements, tick by tick."""
    report = campaign(folder)
    now = validate(rounds_of(folder, rounds), folder / "cluster.json")
    recorded = {sweep.file: sweep.cases for sweep in report.sweeps}
    assert now.sweeps
    for sweep in now.sweeps:
        assert [(c.variant, c.predicted_s) for c in sweep.cases] == [
            (c.variant, c.predicted_s) for c in recorded[sweep.file]
        ]


@pytest.mark.parametrize("folder", CAMPAIGNS, ids=lambda folder: folder.name)
def test_the_report_holds_every_sweep_that_was_recorded(folder: Path) -> None:
    first = {path.name for path in folder.glob("rounds-*.json") if ".run" not in path.name}
    report = campaign(folder)
    assert {sweep.file for sweep in report.sweeps} == first
    for told, oversubscribed in ((report.figures, False), (report.oversubscribed, True)):
        found = figures_of([s for s in report.sweeps if s.oversubscribed == oversubscribed])
        assert told is not None
        assert found is not None
        for name in ("cases", "worst_error", "median_error", "skilled", "good_choices", "covered"):
            assert getattr(told, name) == pytest.approx(getattr(found, name))


@needs_reference
@pytest.mark.slow
def test_the_page_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the table of 72 steps under FSDP, a minute of work: see the two tests below.

    What fits of published sweeps say is held in tests/cluster/test_published_sweeps.py.
    """
    text = PAGE.read_text("utf-8")

    def part(head: str) -> str:
        return text[text.index(head) :].partition("\n\n")[0]

    levels = [line[2:].partition(": ") for line in part("- odd rows of all sweeps").splitlines()]
    for function, told in (
        ("levels_table", part("| steps | number | median |")),
        ("nccl_sweeps.table", part("| sweep | preset |").splitlines()),
        ("nccl_carried.carried_table", part("| fitted -> predicted nodes |").splitlines()),
        ("nccl_carried.levels", {what: level for what, _, level in levels}),
    ):
        monkeypatch.setattr(f"validation.page.{function}", lambda told=told: told)
    assert text == page()


def test_language_models_under_fsdp_are_predicted_without_their_publisher() -> None:
    """One in sixteen of 72 jobs: within 8 % (median), all held; all that ran are said to fit."""
    judged = judged_steps(16)
    assert len(judged) == 5
    assert median(abs(one.error) for one in judged) <= 0.08
    assert max(abs(one.error) for one in judged) <= 0.2
    assert fmean(one.is_covered for one in judged) >= 0.75
    assert all(one.fits for one in judged)


def test_llama_2_under_fsdp1_is_predicted() -> None:
    """7B to 70B on 128 A100 and 96 H100, which set nothing: within 13 %, and all intervals hold."""
    judged = judged_steps(publisher="ibm-fms")
    assert len(judged) == 8
    assert median(abs(one.error) for one in judged) <= 0.052
    assert max(abs(one.error) for one in judged) <= 0.13
    assert all(one.is_covered and one.fits for one in judged)


def test_llama_8b_under_torchtitan_is_predicted() -> None:
    """Eager, compiled and float8 on 8 and 128 H100: time within 8.5 %, memory 2 to 5 % less."""
    judged = judged_steps(publisher="torchtitan")
    assert len(judged) == 6
    assert max(abs(one.error) for one in judged) <= 0.085
    assert all(one.is_covered and one.fits for one in judged)
    assert all(-0.05 <= (one.memory_error or 0.0) <= -0.02 for one in judged)
    few, many = judged[:3], judged[3:]
    for a, b in zip(few, many, strict=True):  # what 128 GPUs lose of 8 is not all seen
        published, predicted = a.job.step_s / b.job.step_s, a.predicted / b.predicted
        assert abs(predicted - published) <= 0.03


@pytest.mark.slow
def test_unequal_gpus_are_what_128_of_them_lose() -> None:
    """GPUs that differ by the published 1.48 %: the eager step of 8 over that of 128."""
    few, *_, many = [
        one.job for one in judged_steps(publisher="torchtitan") if not one.job.compiled
    ]
    steps_s = [fmean(steps_of_unequal_gpus(job, 0.0148, range(4))) for job in (few, many)]
    assert steps_s[0] / steps_s[1] == pytest.approx(few.step_s / many.step_s, abs=0.012)
