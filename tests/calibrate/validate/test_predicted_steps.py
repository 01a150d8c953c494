"""Steps predicted from rounds: which part of a step is off, and bucket choices."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from measured.made_rounds import (
    BACKWARD,
    BIG,
    FORWARD,
    MIB,
    ONE,
    OPTIMIZER,
    SMALL,
    TWO,
    Measured,
    beside_all_reduces,
    made_up,
    runs_together,
    series,
    write_rounds,
)
from scipy.stats import binomtest

from calibrate.fit.profile import fit_logs
from calibrate.records.rounds import CORES_OF_RANKS, Steps, VariantSamples, save_rounds
from calibrate.records.variant import Variant
from calibrate.validate.page import page
from calibrate.validate.summary import summary, warnings
from calibrate.validate.validate import validate
from ddpsim.importers.all_reduce import AllReduceLog


def test_a_step_that_is_as_predicted(tmp_path: Path) -> None:
    """One bucket hides nothing: 100 + 200 + 84 + 10 ms; copies of 8 MiB take a few more."""
    validation = validate([write_rounds(tmp_path, TWO, ONE)])
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
    case = validate([write_rounds(tmp_path, slow)]).sweeps[0].cases[0]
    assert case.off == "backward"
    assert case.error < -0.1


def test_more_exposed_communication_is_overlap_when_the_all_reduces_are_right(
    tmp_path: Path,
) -> None:
    slow = Measured(ONE.variant, ONE.backward, BIG * 1.5, ONE.bucket_bytes)
    assert validate([write_rounds(tmp_path, slow)]).sweeps[0].cases[0].off == "overlap"


def test_a_wrong_choice_has_a_regret(tmp_path: Path) -> None:
    """Two buckets are predicted to be faster, but were measured to take longer."""
    slow = Measured(TWO.variant, TWO.backward, BIG * 2, TWO.bucket_bytes)
    validation = validate([write_rounds(tmp_path, slow, ONE)])
    ratio = (FORWARD + TWO.backward + 2 * BIG + OPTIMIZER) / (
        FORWARD + ONE.backward + BIG + OPTIMIZER
    )
    assert validation.sweeps[0].regret == pytest.approx(ratio - 1)
    assert validation.figures
    assert validation.figures.good_choices == 0


def test_a_choice_within_the_noise_is_called_so(tmp_path: Path) -> None:
    """Two buckets are predicted to be faster, and took 2 % longer, give or take as much."""
    slow = Measured(TWO.variant, TWO.backward, BIG + 0.008, TWO.bucket_bytes)
    rounds = made_up([slow, ONE])
    noisy = rounds.model_copy(update={"variants": tuple(map(uneven, rounds.variants))})
    save_rounds(noisy, tmp_path / "rounds.json")
    held = validate([tmp_path / "rounds.json"])
    (sweep,) = held.sweeps
    assert sweep.regret == pytest.approx(0.02, abs=0.003)
    assert sweep.regret_noise
    assert sweep.regret < sweep.regret_noise
    assert held.figures
    assert (held.figures.good_choices, held.figures.unsure_choices) == (0, 1)
    assert "within 1 %: 0.0% of 1 sweep, within the noise: 100.0%" in summary(held)


def uneven(variant: VariantSamples) -> VariantSamples:
    """Every other iteration takes a tenth longer, or less; the middle one stays."""
    whole_s = tuple(
        tuple((1 + (i - 4) * 0.025) * seconds for seconds in row)
        for i, row in enumerate(variant.whole_s)
    )
    return variant.model_copy(update={"whole_s": whole_s})


def test_the_machine_speed_comes_first(tmp_path: Path) -> None:
    """A layer took 1 ms beside these rounds, and half as long in the profile's records."""
    rounds = made_up([TWO, ONE])
    alone = rounds.alone.model_copy(update={"beside": beside_all_reduces(1.2, 1.1)})
    save_rounds(rounds.model_copy(update={"alone": alone}), tmp_path / "rounds.json")
    logs = [AllReduceLog("log", "", 2, 1, tuple((2**i, 1e-4 + 2**i / 1e9) for i in range(10, 24)))]
    fitted = fit_logs(logs, "m").model_copy(update={"backend": "gloo"})
    for layer_s, said in ((0.5e-3, "2.00 times as long in rounds.json as in"), (1e-3, "equally")):
        told = fitted.provenance.model_copy(update={"machine": "m", "layer_s": layer_s})
        text = fitted.model_copy(update={"provenance": told}).model_dump_json(by_alias=True)
        (tmp_path / "cluster.json").write_text(text, encoding="utf-8")
        held = validate([tmp_path / "rounds.json"], tmp_path / "cluster.json")
        assert held.machine["rounds.json"] == pytest.approx(1e-3 / layer_s, rel=1e-3)
        assert said in summary(held).splitlines()[0]


@pytest.mark.parametrize(("exposed", "signs"), [(BIG, (True,)), (0.0, (False,)), (SMALL, ())])
def test_a_strategy_is_ranked_against_plain_ddp(
    tmp_path: Path, exposed: float, signs: tuple[bool, ...]
) -> None:
    """Which hides one of two all-reduces that a flat one does not; unless it is all noise."""
    plain = Measured(Variant(), TWO.backward, TWO.exposed, TWO.bucket_bytes)
    flat = Measured(Variant(strategy="naive_flat"), TWO.backward, exposed, ONE.bucket_bytes)
    validation = validate([write_rounds(tmp_path, plain, flat)])
    assert validation.sweeps[0].ranked == signs
    figures = validation.figures
    assert figures
    assert figures.ranked_cases == len(signs)
    assert figures.ranked == (float(signs[0]) if signs else None)
    assert ("faster or slower than DDP by default" in summary(validation)) == bool(signs)


def test_caps_with_the_same_buckets_are_one_choice_and_tell_the_noise(tmp_path: Path) -> None:
    """Their medians, 387 and 407 ms about 397, have a standard deviation of 14.1 ms."""
    whole = FORWARD + ONE.backward + BIG + OPTIMIZER
    again = [
        Measured(Variant(bucket_cap_mb=cap), ONE.backward, BIG + more, ONE.bucket_bytes)
        for cap, more in ((50, -0.01), (100, 0.01))
    ]
    validation = validate([write_rounds(tmp_path, TWO, *again)])
    assert [len(cases) for cases in validation.sweeps[0].choices] == [1, 2]
    figures = validation.figures
    assert figures
    assert (figures.cases, figures.distinct_cases) == (3, 2)
    assert figures.repeat_sigma == pytest.approx(2**0.5 * 0.01 / whole, rel=1e-3)
    assert validation.sweeps[0].regret == 0


def test_the_interval_is_of_the_median(tmp_path: Path) -> None:
    """A third of the iterations takes twice as long: the mean lies a quarter above the median."""
    even = runs_together(*[made_up([ONE])] * 40)
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
    figures = validate([write_rounds(tmp_path, slow, ONE)]).figures
    assert figures
    assert figures.cases == 2
    assert figures.covered == 0.5
    assert figures.covered_p_value == pytest.approx(binomtest(1, 2, 0.8).pvalue)
    assert figures.within_5_percent_or_noise == 0.5


def test_the_page_needs_no_other_file_and_holds_every_case(tmp_path: Path) -> None:
    validation = validate([write_rounds(tmp_path, TWO, ONE, name="<rounds>.json")])
    text = page(validation)
    assert "src=" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert "&lt;rounds&gt;.json" in text
    assert "best naive" in text
    assert "the share of cases that are within a third" in text
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


def test_the_order_of_all_reduces_is_no_matter(tmp_path: Path) -> None:
    rounds = made_up([TWO, ONE])
    turned = rounds.model_copy(update={"all_reduce": rounds.all_reduce[::-1]})
    found = []
    for each in (rounds, turned):
        save_rounds(each, tmp_path / "rounds.json")
        found.append(validate([tmp_path / "rounds.json"]).sweeps)
    assert found[0] == found[1]


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
