"""Validation against rounds that are made up, so that every figure is known."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binomtest

from calibrate.fit.profile import fit_logs
from calibrate.records.record import (
    Environment,
    Layout,
    Measurement,
    Record,
    load_record,
    save_record,
)
from calibrate.records.rounds import (
    CORES_OF_RANKS,
    AllReduceSamples,
    Alone,
    Beside,
    Logged,
    Parameter,
    Rounds,
    Runs,
    Steps,
    Variant,
    VariantSamples,
)
from calibrate.records.rounds_file import save_rounds
from calibrate.testbed.campaign import Campaign
from calibrate.testbed.campaign import main as campaign
from calibrate.testbed.errors import TestbedError
from calibrate.validate.inputs import model_profile, rank_factors
from calibrate.validate.interference_exponent import interference_exponent
from calibrate.validate.page import page
from calibrate.validate.report import figures_of, summary, warnings
from calibrate.validate.steady_step import run_sigma, run_times, steady_time
from calibrate.validate.validate import validate
from ddpsim.errors import DdpsimError, ImportFailedError
from ddpsim.importers.all_reduce import AllReduceLog

ROUNDS = 9
MIB = 2**20
FORWARD, BACKWARD, OPTIMIZER = 0.1, 0.2, 0.01
NOISE = (-2, 1, 0, -1, 2, 0, 1, -1, 0)  # in thousandths


def series(seconds: float, *, second_rank: float = 1.0) -> tuple[tuple[float, float], ...]:
    """Rounds of both ranks about a median."""
    times = [seconds * (1 + n / 1000) for n in NOISE]
    return tuple((time, time * second_rank) for time in times)


@dataclass(frozen=True)
class Measured:
    """One variant as measured, seconds."""

    variant: Variant
    backward: float  # without its waiting
    exposed: float
    bucket_bytes: tuple[int, ...]


def made_up(cases: Sequence[Measured], second_rank: float = 1.0) -> Rounds:
    """Two parameters of 4 MiB, ready at half and at the end of backward; 100 MB/s."""
    return Rounds(
        environment=Environment(
            created="2026-01-01T00:00:00+00:00",
            machine="m",
            device="cpu",
            torch="2.13.0",
            backend="gloo",
            library="2.13.0",
            variables={},
            details={},
        ),
        layout=Layout(nodes=2, gpus_per_node=1, line_rate_bytes_per_s=125e6),
        model="made:up",
        batch_per_rank=4,
        parameters=(
            Parameter(name="first", numel=MIB, dtype="float32", ready_s=(BACKWARD, BACKWARD)),
            Parameter(name="last", numel=MIB, dtype="float32", ready_s=(BACKWARD / 2,) * 2),
        ),
        buffers=(),
        alone=Alone(
            whole_s=series(FORWARD + BACKWARD + OPTIMIZER, second_rank=second_rank),
            forward_s=series(FORWARD),
            backward_s=series(BACKWARD),
            optimizer_s=series(OPTIMIZER),
            hooked_backward_s=series(BACKWARD),
            hook_s=(0.0, 0.0),
        ),
        variants=tuple(_variant(case) for case in cases),
        all_reduce=tuple(
            AllReduceSamples(size_bytes=size, samples_s=series(size / 100e6))
            for size in (64 * 1024, MIB, 4 * MIB, 8 * MIB)
        ),
        elapsed_s=1.0,
    )


def _variant(case: Measured) -> VariantSamples:
    whole = FORWARD + case.backward + case.exposed + OPTIMIZER
    return VariantSamples(
        whole_s=series(whole),
        forward_s=series(FORWARD),
        backward_s=series(case.backward + case.exposed),
        optimizer_s=series(OPTIMIZER),
        variant=case.variant,
        bucket_bytes=case.bucket_bytes,
        warmup_s=series(whole),
        logged=Logged(
            forward_s=series(FORWARD),
            backward_compute_s=series(case.backward),
            comm_s=series(case.exposed + 0.05),
            overlap_s=series(0.05),
        ),
    )


BIG, SMALL = 8 * MIB / 100e6, 4 * MIB / 100e6  # all-reduces of both tensors, and of one
TWO = Measured(Variant(bucket_cap_mb=1), BACKWARD + 0.003, SMALL, (4 * MIB, 4 * MIB))
ONE = Measured(Variant(bucket_cap_mb=100), BACKWARD + 0.003, BIG, (8 * MIB,))


def write(folder: Path, *cases: Measured, name: str = "rounds.json") -> Path:
    save_rounds(made_up(cases), folder / name)
    return folder / name


def test_a_step_that_is_as_predicted(tmp_path: Path) -> None:
    """One bucket hides nothing: 100 + 200 + 84 + 10 ms; copies of 8 MiB take a few more."""
    validation = validate([write(tmp_path, TWO, ONE)])
    two, one = validation.sweeps[0].cases
    assert one.predicted_s == pytest.approx(FORWARD + BACKWARD + BIG + OPTIMIZER, rel=0.03)
    assert two.predicted_s == pytest.approx(FORWARD + BACKWARD + SMALL + OPTIMIZER, rel=0.03)
    assert one.measured_s == pytest.approx(FORWARD + BACKWARD + BIG + OPTIMIZER + 0.003)
    assert one.measured.all_reduce == pytest.approx(BIG, rel=1e-3)
    assert two.measured.all_reduce == pytest.approx(2 * SMALL, rel=1e-3)
    assert one.measured.exposed == pytest.approx(BIG, rel=0.01)
    assert one.predicted.exposed == pytest.approx(BIG, rel=0.02)
    for case in (one, two):
        parts = case.predicted
        assert parts.forward + parts.backward + parts.exposed + parts.optimizer == pytest.approx(
            case.predicted_s, rel=1e-3
        )
    assert one.buckets_agree
    assert two.buckets_agree
    assert one.exposed
    assert one.compute_only_s == pytest.approx(FORWARD + BACKWARD + OPTIMIZER, rel=1e-3)
    assert one.no_overlap_s == pytest.approx(FORWARD + BACKWARD + BIG + OPTIMIZER, rel=1e-3)
    assert validation.sweeps[0].regret == 0
    assert validation.figures
    assert validation.oversubscribed is None
    assert validation.figures.good_choices == 1
    assert validation.figures.worst_error < 0.03


def test_two_micro_batches_take_what_the_bare_model_takes_for_two(tmp_path: Path) -> None:
    """The second one: a forward of 90 ms, a backward of 230."""
    variant = Variant(bucket_cap_mb=100, accumulation_steps=2)
    rounds = made_up([Measured(variant, 0.43, BIG, (8 * MIB,))])
    two = Steps(
        whole_s=series(2 * FORWARD + 2 * BACKWARD + OPTIMIZER + 0.02),
        forward_s=series(2 * FORWARD - 0.01),
        backward_s=series(2 * BACKWARD + 0.03),
        optimizer_s=series(OPTIMIZER),
    )
    alone = rounds.alone.model_copy(update={"accumulating": two})
    save_rounds(rounds.model_copy(update={"alone": alone}), tmp_path / "rounds.json")
    case = validate([tmp_path / "rounds.json"]).sweeps[0].cases[0]
    assert case.compute_only_s == pytest.approx(0.19 + 0.43 + OPTIMIZER, rel=1e-3)
    assert case.predicted.forward == pytest.approx(0.19, rel=1e-3)


def test_slower_backward_is_named(tmp_path: Path) -> None:
    slow = Measured(ONE.variant, BACKWARD * 1.3, BIG, ONE.bucket_bytes)
    case = validate([write(tmp_path, slow)]).sweeps[0].cases[0]
    assert case.off == "backward"
    assert case.error < -0.1


def test_more_exposed_communication_is_overlap_when_the_all_reduces_are_right(
    tmp_path: Path,
) -> None:
    slow = Measured(ONE.variant, ONE.backward, BIG * 1.5, ONE.bucket_bytes)
    assert validate([write(tmp_path, slow)]).sweeps[0].cases[0].off == "overlap"


def test_a_wrong_choice_has_a_regret(tmp_path: Path) -> None:
    """Two buckets are predicted to be faster, but were measured to take longer."""
    slow = Measured(TWO.variant, TWO.backward, BIG * 2, TWO.bucket_bytes)
    validation = validate([write(tmp_path, slow, ONE)])
    ratio = (FORWARD + TWO.backward + 2 * BIG + OPTIMIZER) / (
        FORWARD + ONE.backward + BIG + OPTIMIZER
    )
    assert validation.sweeps[0].regret == pytest.approx(ratio - 1)
    assert validation.figures
    assert validation.figures.good_choices == 0


def paced(case: Measured, paces: Sequence[float], micro_batches: int = 1) -> VariantSamples:
    """Iterations on a machine that is slower now and then; the network is not."""
    variant = _variant(case)
    return variant.model_copy(
        update={
            "variant": case.variant.model_copy(update={"accumulation_steps": micro_batches}),
            "forward_s": tuple((FORWARD * pace * micro_batches, 0.05) for pace in paces),
            "whole_s": tuple((0.1, 0.6 * pace**0.5) for pace in paces),
        }
    )


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_slow_moments_of_the_machine_are_taken_off(micro_batches: int) -> None:
    """Two variants alike, one measured in worse moments: both as at the usual pace."""
    chance = np.random.default_rng(0)
    good, bad = chance.uniform(1.0, 1.1, 40).tolist(), chance.uniform(1.1, 1.4, 40).tolist()
    first, second = (paced(ONE, paces, micro_batches) for paces in (good, bad))
    rounds = made_up([ONE, TWO]).model_copy(update={"variants": (first, second)})
    usual_s = 0.6 * float(np.exp(np.median(np.log([*good, *bad])))) ** 0.5
    for alike in ((0,), (1,), (0, 1)):
        (time,) = run_times([rounds], alike)
        assert time.value == pytest.approx(usual_s, rel=1e-9)
        assert time.stderr == pytest.approx(0, abs=1e-9)


def test_forwards_count_among_those_of_as_many_micro_batches() -> None:
    """Those of several are shorter, each, for reasons that are not the machine's pace."""
    paces = np.random.default_rng(0).uniform(1.0, 1.4, 41).tolist()
    one, three = paced(ONE, paces), paced(TWO, paces, 3)
    faster = tuple((0.9 * first, second) for first, second in three.forward_s)
    three = three.model_copy(update={"forward_s": faster})
    rounds = made_up([ONE, TWO]).model_copy(update={"variants": (one, three)})
    (time,) = run_times([rounds], (1,))
    assert time.value == pytest.approx(0.6 * np.median(paces) ** 0.5)


def test_iterations_that_a_hypervisor_disturbed_do_not_count() -> None:
    rounds = made_up([TWO])
    variant = rounds.variants[0]
    count = len(variant.whole_s)

    def stolen(share: float, times: int) -> Rounds:
        of = [(0.0, share * whole[1]) if i < times else (0.0, 0.0)
              for i, whole in enumerate(variant.whole_s)]  # fmt: skip
        return rounds.model_copy(
            update={"variants": (variant.model_copy(update={"stolen_s": tuple(of)}),)}
        )

    assert rounds.calm() == rounds  # of records that do not tell
    assert stolen(0.005, 3).calm().variants[0].whole_s == variant.whole_s
    calm = stolen(0.05, 3).calm().variants[0]
    assert calm.whole_s == variant.whole_s[3:]
    assert calm.logged.comm_s == variant.logged.comm_s[3:]
    assert len(calm.stolen_s) == count - 3
    assert len(stolen(0.05, count).calm().variants[0].whole_s) == count  # all alike
    assert len(stolen(0.05, count - 1).calm().variants[0].whole_s) == count


def test_few_rounds_or_steady_ones_are_left_as_they_are() -> None:
    few, steady = paced(ONE, [1.0, 1.2, 1.4]), paced(TWO, [1.0] * 20)
    rounds = made_up([ONE, TWO]).model_copy(update={"variants": (few, steady)})
    assert run_times([rounds], (0,))[0].value == pytest.approx(0.6 * 1.2**0.5)
    assert run_times([rounds], (1,))[0].value == pytest.approx(0.6)


def test_noise_that_the_forward_does_not_tell_of_stays() -> None:
    chance = np.random.default_rng(1)
    noise = chance.normal(0, 0.05, 400)
    still = paced(ONE, [1.0] * 400)
    forward_s = tuple((FORWARD * np.exp(n), 0.05) for n in chance.normal(0, 0.05, 400).tolist())
    whole_s = tuple((0.1, 0.6 * np.exp(n)) for n in noise.tolist())
    variant = still.model_copy(update={"forward_s": forward_s, "whole_s": whole_s})
    (time,) = run_times([made_up([ONE]).model_copy(update={"variants": (variant,)})], (0,))
    assert time.stderr == pytest.approx(1.2533 * 0.05 * 0.6 / 20, rel=0.15)
    assert abs(time.value / 0.6 - 1) < 3 * 1.2533 * 0.05 / 20


def run(*seconds: float, pace: float = 1.0) -> Rounds:
    """A run in which each variant, of buckets of its own, takes so long without noise."""
    rounds = made_up([TWO, ONE])
    variants = tuple(
        variant.model_copy(
            update={
                "whole_s": ((whole, whole),) * ROUNDS,
                "forward_s": ((pace * FORWARD, pace * FORWARD),) * ROUNDS,
            }
        )
        for variant, whole in zip(rounds.variants, seconds, strict=True)
    )
    return rounds.model_copy(update={"variants": variants})


def test_runs_say_how_well_their_mean_is_known() -> None:
    """0.5 and 0.52 s, 0.6 and 0.66: 2.8 and 6.7 % apart, 5.1 % together; the mean, 0.7 of that."""
    runs = [run(0.5, 0.6), run(0.52, 0.66)]
    cases = [run_times(runs, (variant,)) for variant in (0, 1)]
    sigma = run_sigma(cases)
    first, second = (0.02 / 2**0.5 / 0.51, 0.06 / 2**0.5 / 0.63)
    assert sigma == pytest.approx(((first**2 + second**2) / 2) ** 0.5)
    time = steady_time(cases[0], sigma)
    assert time.value == pytest.approx(0.51)
    assert time.stderr == pytest.approx(0.51 * sigma / 2**0.5)
    assert run_sigma([times[:1] for times in cases]) == 0
    assert steady_time(cases[0][:1]).stderr == pytest.approx(0)


def test_a_run_on_a_slower_machine_is_brought_to_the_usual_pace() -> None:
    """The iteration goes with its forward from run to run as it does from round to round."""
    runs = [run(0.5, 0.6), run(0.55, 0.66, pace=1.1)]
    cases = [run_times(runs, (variant,)) for variant in (0, 1)]
    assert run_sigma(cases) == pytest.approx(0, abs=1e-9)
    assert steady_time(cases[0]).value == pytest.approx(0.5 * 1.1**0.5)


def test_files_of_the_same_are_runs_of_one_sweep(tmp_path: Path) -> None:
    """Samples of all count; another batch is another sweep."""
    slower = [
        Measured(case.variant, 1.1 * case.backward, case.exposed, case.bucket_bytes)
        for case in (TWO, ONE)
    ]
    files = [write(tmp_path, TWO, ONE), write(tmp_path, *slower, name="again.json")]
    other = made_up([TWO, ONE]).model_copy(update={"batch_per_rank": 8})
    save_rounds(other, tmp_path / "other.json")
    sweeps = validate([*files, tmp_path / "other.json"]).sweeps
    assert [(sweep.file, sweep.runs) for sweep in sweeps] == [("rounds.json", 2), ("other.json", 1)]
    both, alone = sweeps
    assert both.run_sigma == pytest.approx(0.1 * BACKWARD / 0.4 / 2**0.5, rel=0.1)
    assert alone.run_sigma is None
    for case, single in zip(both.cases, alone.cases, strict=True):
        assert case.rounds == 2 * single.rounds
        assert case.measured_s == pytest.approx(single.measured_s + 0.05 * TWO.backward, rel=1e-3)
        assert case.predicted_s == pytest.approx(single.predicted_s)
        assert case.stderr_s > 5 * single.stderr_s
        assert case.plain_s == pytest.approx(case.measured_s)
        first_s, second_s = case.runs_s
        assert first_s == pytest.approx(single.measured_s, rel=1e-3)
        assert [(c.predicted_s, c.measured_s) for c in case.by_another_run] == [
            (first_s, second_s),
            (second_s, first_s),
        ]
        assert single.by_another_run == ()
    both_of_them = figures_of([both])
    assert both_of_them
    assert both_of_them.repeated_skilled == both_of_them.skilled
    # of a bucket each they are 5.4 and 5.7 % apart, 4.9 and 5.1 of one; two standard errors: 5.2
    assert both_of_them.another_run_skilled == 0.5
    only = figures_of([alone])
    assert only
    assert only.repeated_skilled is only.another_run_skilled is None
    assert "one run as the prediction of the others: " in summary(validate(files))
    assert "rounds.json  runs 2" in summary(validate(files))
    assert "runs of the same are" in page(validate(files))


def test_a_run_counts_once(tmp_path: Path) -> None:
    path = write(tmp_path, TWO, ONE)
    again = tmp_path / "elsewhere" / ".." / "rounds.json"
    again.parent.parent.mkdir()
    with pytest.raises(DdpsimError, match=r"rounds\.json is named twice, and would count as two"):
        validate([path, again])


def together(*runs: Rounds) -> Rounds:
    """As one."""
    return Runs({Path(f"{i}"): run for i, run in enumerate(runs)}).pooled


def test_runs_together_hold_the_samples_of_all() -> None:
    first, second = made_up([TWO, ONE]), made_up([TWO, ONE], second_rank=1.2)
    both = together(first, second)
    assert both.alone.whole_s == first.alone.whole_s + second.alone.whole_s
    assert both.alone.hook_s == (0.0, 0.0)
    assert both.variants[1].variant == first.variants[1].variant
    assert both.variants[1].logged.comm_s == 2 * first.variants[1].logged.comm_s
    assert both.all_reduce[0].samples_s == 2 * first.all_reduce[0].samples_s
    assert both.elapsed_s == 2.0
    assert together(first) == first


def test_a_model_of_two_runs_is_at_the_pace_of_both() -> None:
    """Means of the runs' medians; iterations spread as within a run, and not as the runs differ."""
    first, second = made_up([ONE]), made_up([ONE])
    slower = {
        name: tuple(tuple(1.2 * s for s in row) for row in getattr(second.alone, name))
        for name in ("whole_s", "forward_s", "backward_s", "optimizer_s")
    }
    ready = tuple(
        p.model_copy(update={"ready_s": tuple(1.2 * s for s in p.ready_s if s)})
        for p in second.parameters
    )
    second = second.model_copy(
        update={"alone": second.alone.model_copy(update=slower), "parameters": ready}
    )
    alone, both = model_profile(first), model_profile(first, second)
    for name in ("forward_s", "backward_s", "optimizer_s"):
        assert both[name] == pytest.approx(1.1 * alone[name])
    for one, other in zip(alone["parameters"], both["parameters"], strict=True):
        assert other["ready_s"] == pytest.approx(1.1 * one["ready_s"])
    middle, wide = (np.array(profile["iterations_s"]) for profile in (alone, both))
    assert wide == pytest.approx(1.1 * np.concatenate([middle, middle]))
    never = ready[0].model_copy(update={"ready_s": (0.1, None)})
    unused = second.model_copy(update={"parameters": (never, ready[1])})
    assert model_profile(first, unused)["parameters"][0]["ready_s"] is None


def test_a_models_hooks_are_the_mean_of_ranks_and_runs() -> None:
    """Those of one tensor: 20 and 40 us in one run, 60 and 80 in another; the other has none."""
    rounds = made_up([ONE])
    first, last = rounds.parameters

    def run(*hook_s: float) -> Rounds:
        known = first.model_copy(update={"ddp_hook_s": hook_s})
        return rounds.model_copy(update={"parameters": (known, last)})

    hooks = [p["ddp_hook_s"] for p in model_profile(run(2e-5, 4e-5), run(6e-5, 8e-5))["parameters"]]
    assert hooks == [pytest.approx(5e-5), None]


@pytest.mark.parametrize("longer_s", [2e-3, -1e-3])
def test_hooks_make_the_bare_backward_as_long_as_under_ddp(longer_s: float) -> None:
    """Timed themselves they are 60 us; what DDP does not lengthen has none."""
    rounds = made_up([ONE])
    under_ddp = tuple(tuple(s + longer_s for s in row) for row in rounds.alone.backward_s)
    timed = [
        parameter.model_copy(update={"ddp_hook_s": hook_s})
        for parameter, hook_s in zip(rounds.parameters, ((1e-5, 3e-5), (4e-5, 4e-5)), strict=True)
    ]
    alone = rounds.alone.model_copy(update={"ddp_backward_s": under_ddp})
    made = rounds.model_copy(update={"parameters": tuple(timed), "alone": alone})
    hooks = [p["ddp_hook_s"] for p in model_profile(made)["parameters"]]
    assert hooks == pytest.approx([max(0, longer_s) / 3, max(0, longer_s) * 2 / 3])


@pytest.mark.parametrize(("layers", "model", "power"), [(4, 4, 1), (2, 4, 2), (4, 2, 0.5)])
def test_a_model_suffers_by_the_power_of_what_layers_do(
    layers: float, model: float, power: float
) -> None:
    """Layers take so many times as long beside all-reduces, and the model's backward."""
    of_one = beside(layers, model)
    found = interference_exponent([of_one])
    assert found
    assert found.value == pytest.approx(power, rel=1e-3)
    assert found.stderr
    both = interference_exponent([of_one, of_one])
    assert both
    assert both.value == found.value
    assert both.stderr == pytest.approx(found.stderr / 2**0.5)
    rounds = made_up([ONE])
    assert "interference_exponent" not in model_profile(rounds)
    measured = rounds.alone.model_copy(update={"beside": of_one})
    profile = model_profile(rounds.model_copy(update={"alone": measured}))
    assert profile["interference_exponent"] == found.value
    assert profile["interference_exponent_stderr"] == found.stderr


def test_layers_that_lose_next_to_nothing_tell_no_power() -> None:
    """Nor does one run of no rounds, or of a single one."""
    assert interference_exponent([]) is None
    assert interference_exponent([beside(1.0005, 2)]) is None
    assert interference_exponent([beside(1.005, 1.01)]) is None  # the noise is a tenth of that
    single = {name: samples[:1] for name, samples in beside(2, 2)}
    assert interference_exponent([Beside(**single)]) is None


def test_a_model_that_is_not_slowed_down_has_the_power_0() -> None:
    found = interference_exponent([beside(4, 0.9)])
    assert found
    assert found.value == 0


def beside(layers: float, model: float) -> Beside:
    """Layers of 1 ms and a backward of 100, and so many times as long beside all-reduces."""
    return Beside(
        layers_s=series(1e-3),
        layers_beside_s=series(layers * 1e-3),
        backward_s=series(0.1),
        backward_beside_s=series(model * 0.1),
    )


def test_a_model_is_as_uncertain_as_its_median_iteration() -> None:
    """1.2533 x 1.4826 x its deviation of 10 ms / sqrt(3), of 310 ms; of two runs a root less."""
    rounds = made_up([ONE])
    whole = FORWARD + BACKWARD + OPTIMIZER
    rows = tuple((whole + more, whole + more) for more in (-0.01, 0.0, 0.01))
    alone = rounds.alone.model_copy(update={"whole_s": rows})
    rounds = rounds.model_copy(update={"alone": alone})
    error = 1.2533 * 1.4826 * 0.01 / 3**0.5 / whole
    assert model_profile(rounds)["sigma"] == pytest.approx(error)
    assert model_profile(rounds, rounds)["sigma"] == pytest.approx(error / 2**0.5)


def test_caps_with_the_same_buckets_are_one_choice_and_tell_the_noise(tmp_path: Path) -> None:
    """Their medians, 387 and 407 ms about 397, have a standard deviation of 14.1 ms."""
    whole = FORWARD + ONE.backward + BIG + OPTIMIZER
    again = [
        Measured(Variant(bucket_cap_mb=cap), ONE.backward, BIG + more, ONE.bucket_bytes)
        for cap, more in ((50, -0.01), (100, 0.01))
    ]
    validation = validate([write(tmp_path, TWO, *again)])
    assert [len(cases) for cases in validation.sweeps[0].choices] == [1, 2]
    figures = validation.figures
    assert figures
    assert (figures.cases, figures.distinct_cases) == (3, 2)
    assert figures.repeat_sigma == pytest.approx(2**0.5 * 0.01 / whole, rel=1e-3)
    assert validation.sweeps[0].regret == 0


def test_the_interval_is_of_the_median(tmp_path: Path) -> None:
    """A third of the iterations takes twice as long: the mean lies a quarter above the median."""
    even = together(*[made_up([ONE])] * 40)
    whole_s = tuple(
        tuple((2 if i % 3 == 0 else 1) * seconds for seconds in row)
        for i, row in enumerate(even.alone.whole_s)
    )
    alone = even.alone.model_copy(update={"whole_s": whole_s})
    uneven = even.model_copy(update={"alone": alone})
    intervals = []
    for name, rounds in (("even.json", even), ("uneven.json", uneven)):
        save_rounds(rounds, tmp_path / name)
        intervals.append(validate([tmp_path / name]).sweeps[0].cases[0].interval_s)
    assert intervals[0]
    assert intervals[1] == pytest.approx(intervals[0], rel=0.05)


def test_figures_count_what_the_intervals_hold(tmp_path: Path) -> None:
    slow = Measured(TWO.variant, TWO.backward * 2, BIG * 2, TWO.bucket_bytes)
    figures = validate([write(tmp_path, slow, ONE)]).figures
    assert figures
    assert figures.cases == 2
    assert figures.covered == 0.5
    assert figures.covered_p_value == pytest.approx(binomtest(1, 2, 0.8).pvalue)
    assert figures.within_5_percent_or_noise == 0.5


def test_ranks_that_differ_by_chance_are_alike() -> None:
    assert rank_factors(made_up([ONE])) == ()
    assert rank_factors(made_up([ONE], second_rank=1.1)) == pytest.approx((1 / 1.05, 1.1 / 1.05))


def test_the_model_is_that_of_the_rounds() -> None:
    profile = model_profile(made_up([ONE]))
    assert profile["forward_s"] == FORWARD
    assert [p["ready_s"] for p in profile["parameters"]] == [BACKWARD, BACKWARD / 2]


def test_the_page_needs_no_other_file_and_holds_every_case(tmp_path: Path) -> None:
    validation = validate([write(tmp_path, TWO, ONE, name="<rounds>.json")])
    text = page(validation)
    assert "src=" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert "&lt;rounds&gt;.json" in text
    assert "best naive" in text
    assert "Skill: the share of cases that are within a third" in text
    assert "rounds>.json" in summary(validation)


@pytest.mark.parametrize(
    ("cores", "shared"),
    [("0 | 1", False), ("0,1 | 0,1", True), ("0,1,2,3 | 0,1,2,3", False), ("0 | 1 | 0", True)],
)
def test_ranks_that_share_cores_are_reported_apart(
    tmp_path: Path, cores: str, *, shared: bool
) -> None:
    rounds = made_up([ONE])
    here = rounds.environment.model_copy(update={"details": {CORES_OF_RANKS: cores}})
    save_rounds(rounds.model_copy(update={"environment": here}), tmp_path / "rounds.json")
    validation = validate([tmp_path / "rounds.json"])
    assert validation.sweeps[0].oversubscribed == shared
    assert (validation.figures is None) == shared
    assert (validation.oversubscribed is not None) == shared
    assert ("OVERSUBSCRIBED" in summary(validation)) == shared


def test_too_few_rounds_are_refused(tmp_path: Path) -> None:
    rounds = made_up([ONE])
    variant = rounds.variants[0]
    parts = ("whole_s", "forward_s", "backward_s", "optimizer_s")
    logged = {name: samples[:2] for name, samples in variant.logged}
    two = {part: getattr(variant, part)[:2] for part in parts}
    short = variant.model_copy(update=two | {"logged": variant.logged.model_copy(update=logged)})
    save_rounds(rounds.model_copy(update={"variants": (short,)}), tmp_path / "two.json")
    with pytest.raises(DdpsimError, match=r"two\.json: 2 rounds tell nothing of the noise"):
        validate([tmp_path / "two.json"])


def test_a_profile_of_another_cluster_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, ONE)
    profile = tmp_path / "cluster.json"
    logs = [AllReduceLog("log", "", 2, 1, tuple((2**i, 1e-4 + 2**i / 1e9) for i in range(10, 24)))]
    fitted = fit_logs(logs, "another")
    elsewhere = fitted.provenance.model_copy(update={"machine": "another"})
    for update, message in (
        (
            {"provenance": elsewhere, "backend": "gloo"},
            "on 'm', but the profile cluster.json on 'a",
        ),
        ({"backend": "nccl"}, "with 'gloo', but the profile cluster.json with 'nccl': validate"),
    ):
        made = fitted.model_copy(update=update)
        profile.write_text(made.model_dump_json(by_alias=True), encoding="utf-8")
        with pytest.raises(DdpsimError, match=message):
            validate([path], profile)


def test_one_machine_by_two_names_is_one(tmp_path: Path) -> None:
    """A log leaves out what the driver says before a GPU's name."""
    rounds = made_up([ONE])
    told = rounds.environment.model_copy(update={"machine": "NVIDIA A100-SXM4-40GB"})
    save_rounds(rounds.model_copy(update={"environment": told}), tmp_path / "rounds.json")
    logs = [AllReduceLog("log", "", 2, 1, tuple((2**i, 1e-4 + 2**i / 1e9) for i in range(10, 24)))]
    fitted = fit_logs(logs, "m").model_copy(update={"backend": "gloo"})
    made = fitted.provenance.model_copy(update={"machine": "A100-SXM4-40GB"})
    profile = tmp_path / "cluster.json"
    text = fitted.model_copy(update={"provenance": made}).model_dump_json(by_alias=True)
    profile.write_text(text, encoding="utf-8")
    assert validate([tmp_path / "rounds.json"], profile).sweeps


def test_another_processor_of_the_same_name_is_refused(tmp_path: Path) -> None:
    """Where both are told: older files do not tell."""
    rounds = made_up([ONE])
    told = rounds.environment.model_copy(update={"details": {"processor": "model 2"}})
    save_rounds(rounds.model_copy(update={"environment": told}), tmp_path / "rounds.json")
    logs = [AllReduceLog("log", "", 2, 1, tuple((2**i, 1e-4 + 2**i / 1e9) for i in range(10, 24)))]
    fitted = fit_logs(logs, "m").model_copy(update={"backend": "gloo"})
    profile = tmp_path / "cluster.json"
    for processor in ("", "model 2", "model 3"):
        made = fitted.provenance.model_copy(update={"machine": "m", "processor": processor})
        text = fitted.model_copy(update={"provenance": made}).model_dump_json(by_alias=True)
        profile.write_text(text, encoding="utf-8")
        if processor != "model 3":
            assert validate([tmp_path / "rounds.json"], profile).sweeps
    said = (
        "rounds.json and the profile cluster.json were measured on machines that call themselves "
        "'m', but one is model 2 and the other model 3: validate each cluster against its own"
    )
    with pytest.raises(DdpsimError, match=said):
        validate([tmp_path / "rounds.json"], profile)


def test_rounds_over_links_of_which_nobody_knows_are_refused(tmp_path: Path) -> None:
    """Several kinds were measured: which of them are these?"""
    rounds = made_up([ONE])
    unknown = rounds.layout.model_copy(update={"line_rate_bytes_per_s": None})
    save_rounds(rounds.model_copy(update={"layout": unknown}), tmp_path / "rounds.json")
    logs = [AllReduceLog("log", "", 2, 1, tuple((2**i, 1e-4 + 2**i / 1e9) for i in range(10, 24)))]
    fitted = fit_logs(logs, "m")
    known = fitted.model_copy(
        update={
            "backend": "gloo",
            "valid": fitted.valid.model_copy(update={"line_rates_bytes_per_s": (1e8, 2e8)}),
        }
    )
    profile = tmp_path / "cluster.json"
    profile.write_text(known.model_dump_json(by_alias=True), encoding="utf-8")
    said = (
        "rounds.json does not say the line rate of its nodes' links, and the profile cluster.json "
    )
    with pytest.raises(DdpsimError, match=f"{said}was measured on 2 kinds of them"):
        validate([tmp_path / "rounds.json"], profile)


@pytest.mark.parametrize(
    ("place", "spoilt", "message"),
    [
        (("alone", "forward_s"), [], "alone.forward_s: has 0 rounds, wanted 9"),
        (("alone", "whole_s", 1), [0.1], "alone.whole_s: a round of 1 rank, but the layout has 2"),
        (("alone", "backward_s", 0), [0, 0.1], "alone.backward_s: 0 s is no time of an iteration"),
        (("alone", "optimizer_s", 0, 1), -1, "alone.optimizer_s: -1 s is no time"),
        (("alone", "hook_s"), [0.0], "alone.hook_s: of 1 rank, but the layout has 2"),
        (("parameters", 1, "ready_s"), [0.1] * 3, "parameters.1.ready_s: of 3 ranks"),
        (("variants", 1, "stolen_s"), [[0, 0]], "variants.1.stolen_s: has 1 round, wanted 9"),
        (("variants", 0, "logged", "comm_s", 2), [0.1] * 3, "logged.comm_s: a round of 3 ranks"),
        (("variants",), [], "variants: wanted one or more"),
        (("all_reduce", 0, "samples_s"), [], "samples_s: has 0 rounds, wanted one or more"),
    ],
)
def test_samples_that_do_not_fit_together_are_refused(
    tmp_path: Path, place: tuple[str | int, ...], spoilt: object, message: str
) -> None:
    path = write(tmp_path, TWO, ONE)
    document = json.loads(path.read_text())
    part, last = document, place[-1]
    for key in place[:-1]:
        part = part[key]
    part[last] = spoilt
    path.write_text(json.dumps(document))
    with pytest.raises(ImportFailedError, match=re.escape(message)):
        validate([path])


def test_rounds_that_cannot_be_simulated_are_named(tmp_path: Path) -> None:
    rounds = made_up([TWO, ONE])
    late = rounds.parameters[0].model_copy(update={"ready_s": (1.0, 1.0)})
    parameters = (late, *rounds.parameters[1:])
    save_rounds(rounds.model_copy(update={"parameters": parameters}), tmp_path / "late.json")
    with pytest.raises(DdpsimError) as raised:
        validate([tmp_path / "late.json"])
    assert str(raised.value).startswith("late.json cannot be simulated: workload.profile: ")
    assert str(tmp_path) not in str(raised.value)


def test_the_order_of_all_reduces_is_no_matter(tmp_path: Path) -> None:
    rounds = made_up([TWO, ONE])
    turned = rounds.model_copy(update={"all_reduce": rounds.all_reduce[::-1]})
    found = []
    for each in (rounds, turned):
        save_rounds(each, tmp_path / "rounds.json")
        found.append(validate([tmp_path / "rounds.json"]).sweeps)
    assert found[0] == found[1]


def test_no_rounds_are_refused() -> None:
    with pytest.raises(DdpsimError, match="no rounds"):
        validate([])


class _Testbed:
    """A testbed that writes what the ranks would have, or fails."""

    ran: list[str]

    def __init__(self, rates: Sequence[float], cores: Sequence[set[int]]) -> None:
        assert len(rates) == len(cores)
        self.rates = rates

    def __enter__(self) -> _Testbed:  # noqa: PYI034 -- typing.Self is of Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, commands: list[list[str]], variables: dict[str, str], timeout_s: float) -> None:
        import json

        assert variables["MALLOC_MMAP_MAX_"] == "0"
        options = json.loads(commands[0][-1])
        assert options["line_rate_bytes_per_s"] == self.rates[0]
        if "cnn" in options.get("model", ""):
            raise TestbedError("host 1 was killed")
        self.write(Path(options["output"]))

    def write(self, path: Path) -> None:
        path.write_text("{}")


@pytest.mark.parametrize(("again_s", "kept_s"), [(1.1, 1.1), (1.4, 1.3)])
def test_what_ran_on_a_slow_machine_is_measured_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again_s: float, kept_s: float
) -> None:
    """Bare compute took 1 s beside one line rate and 1.3 beside another: the calmer try stays."""

    def record(path: Path, seconds: float) -> None:
        compute = Measurement(kind="compute", variant="gemm alone", samples_s=(seconds,) * 3)
        rounds = made_up([])
        record = Record(
            environment=rounds.environment, layout=rounds.layout, measurements=(compute,)
        )
        save_record(record, path)

    record(tmp_path / "record-1gbit-2hosts.json", 1.0)
    record(tmp_path / "record-3gbit-2hosts.json", 1.3)
    monkeypatch.setattr("calibrate.testbed.campaign.Testbed", _Testbed)
    monkeypatch.setattr(_Testbed, "write", lambda _, path: record(path, again_s))
    said: list[str] = []
    assert Campaign(tmp_path, fit_rates=(1.0, 3.0), again_above=1.2).run(said.append) == 0
    assert [line.split()[0] for line in said] == ["there", "there", "slower", "measured"]
    (kept,) = load_record(tmp_path / "record-3gbit-2hosts.json").measurements
    assert kept.samples_s[0] == kept_s
    assert len(list(tmp_path.iterdir())) == 2


def test_a_campaign_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("calibrate.testbed.campaign.Testbed", _Testbed)
    there = tmp_path / "rounds-transformer-2gbit-2hosts.json"
    there.write_text("kept")
    said: list[str] = []
    models = ("transformer", "cnn", "mine:make")
    assert Campaign(tmp_path, rates=(2.0,), models=models).run(said.append) == 1
    assert [line.split()[0] for line in said] == ["there", "FAILED", "measured"]
    assert "host 1 was killed" in said[1]
    assert there.read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "rounds-make-2gbit-2hosts.json",
        "rounds-transformer-2gbit-2hosts.json",
    ]
    assert campaign([str(tmp_path), "--rates", "2", "--models", "transformer"]) == 0
    assert "there" in capsys.readouterr().out


def test_a_campaign_measures_all_once_before_it_measures_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("calibrate.testbed.campaign.Testbed", _Testbed)
    options = ["--rates", "2,5", "--models", "mixer,transformer", "--runs", "2"]
    assert campaign([str(tmp_path), *options]) == 0
    measured = [line.split()[2] for line in capsys.readouterr().out.splitlines()]
    once = [f"rounds-{m}-{r}gbit-2hosts" for r in (2, 5) for m in ("mixer", "transformer")]
    assert measured == [f"{name}{run}.json" for run in ("", ".run2") for name in once]


def test_a_copy_of_rounds_is_no_second_run(tmp_path: Path) -> None:
    paths = [tmp_path / "one.json", tmp_path / "two.json"]
    for path in paths:
        save_rounds(made_up([Measured(Variant(), BACKWARD, 0.05, (8 * MIB,))]), path)
    with pytest.raises(DdpsimError, match=r"two\.json hold the same rounds"):
        validate(paths)


def test_what_run_would_warn_of_is_warned_of(tmp_path: Path) -> None:
    path = tmp_path / "rounds.json"
    rounds = made_up([Measured(Variant(), BACKWARD, 0.05, (8 * MIB,))])
    first, last = rounds.parameters
    save_rounds(
        rounds.model_copy(update={"parameters": (first.model_copy(update={"sparse": True}), last)}),
        path,
    )
    held = validate([path])
    (warning,) = warnings(held)
    assert "sparse" in warning
    assert f"WARNING {warning}" in summary(held)
    assert "sparse" in page(held)
    twice = held.model_copy(
        update={"sweeps": (*held.sweeps, held.sweeps[0].model_copy(update={"warnings": ()}))}
    )
    assert warnings(twice) == (f"{warning} (1 of 2 sweeps)",)
