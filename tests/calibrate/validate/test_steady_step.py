"""The steady step of rounds that a machine or a hypervisor disturbed."""

from __future__ import annotations

import numpy as np
import pytest
from measured.made_rounds import FORWARD, ONE, TWO, made_up, paced, run_of

from calibrate.records.rounds import Rounds, Samples, rank_medians
from calibrate.validate.steady_step import run_sigma, run_times, steady_time


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


def test_all_medians_are_of_the_calm_iterations() -> None:
    """What was taken of all iterations alike, ready times among it, shortens with the backward."""
    rounds = made_up([ONE])
    alone = rounds.alone
    disturbed = set(range(len(alone.whole_s) // 3))

    def longer(samples: Samples, by: float) -> Samples:
        return tuple(
            tuple((by if i in disturbed else 1.0) * s for s in row) for i, row in enumerate(samples)
        )

    update = {
        "backward_s": longer(alone.backward_s, 1.5),
        "stolen_s": tuple(
            tuple((0.2 if i in disturbed else 0.0) * s for s in row)
            for i, row in enumerate(alone.whole_s)
        ),
        "ddp_backward_s": alone.backward_s,
    }
    found = rounds.model_copy(update={"alone": alone.model_copy(update=update)})
    calm = found.calm()
    before, after = (rank_medians(each.alone.backward_s) for each in (found, calm))
    shorter = [a / b for a, b in zip(after, before, strict=True)]
    pairs = [(p.ready_s, q.ready_s) for p, q in zip(found.parameters, calm.parameters, strict=True)]
    pairs += zip(found.alone.ddp_backward_s, calm.alone.ddp_backward_s, strict=True)
    for usual, brought in pairs:
        assert brought == pytest.approx([s * by for s, by in zip(usual, shorter, strict=True)])


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


def test_runs_say_how_well_their_mean_is_known() -> None:
    """0.5 and 0.52 s, 0.6 and 0.66: 2.8 and 6.7 % apart, 5.1 % together; the mean, 0.7 of that."""
    runs = [run_of(0.5, 0.6), run_of(0.52, 0.66)]
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
    runs = [run_of(0.5, 0.6), run_of(0.55, 0.66, pace=1.1)]
    cases = [run_times(runs, (variant,)) for variant in (0, 1)]
    assert run_sigma(cases) == pytest.approx(0, abs=1e-9)
    assert steady_time(cases[0]).value == pytest.approx(0.5 * 1.1**0.5)
