"""The model that rounds tell of: its times, hooks, and what it suffers from all-reduces."""

from __future__ import annotations

import numpy as np
import pytest
from measured.made_rounds import BACKWARD, FORWARD, ONE, OPTIMIZER, beside_all_reduces, made_up

from calibrate.fit.estimates import interference_exponent
from calibrate.records.rounds import Beside, Rounds
from calibrate.validate.inputs import model_profile, rank_factors


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
    alone, both = (model_profile(*runs)["measured"] for runs in ((first,), (first, second)))
    for name in ("forward_s", "backward_s", "optimizer_s"):
        assert both[name] == pytest.approx(1.1 * alone[name])
    assert both["ready_s"] == pytest.approx([1.1 * ready_s for ready_s in alone["ready_s"]])
    middle, wide = (np.array(profile["iterations_s"]) for profile in (alone, both))
    assert wide == pytest.approx(1.1 * np.concatenate([middle, middle]))
    never = ready[0].model_copy(update={"ready_s": (0.1, None)})
    unused = second.model_copy(update={"parameters": (never, ready[1])})
    assert model_profile(first, unused)["measured"]["ready_s"][0] is None


def test_a_models_hooks_are_the_mean_of_ranks_and_runs() -> None:
    """Those of one tensor: 20 and 40 us in one run, 60 and 80 in another; the other has none."""
    rounds = made_up([ONE])
    first, last = rounds.parameters

    def run(*hook_s: float) -> Rounds:
        known = first.model_copy(update={"ddp_hook_s": hook_s})
        return rounds.model_copy(update={"parameters": (known, last)})

    hooks = model_profile(run(2e-5, 4e-5), run(6e-5, 8e-5))["measured"]["ddp_hook_s"]
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
    hooks = model_profile(made)["measured"]["ddp_hook_s"]
    assert hooks == pytest.approx([max(0, longer_s) / 3, max(0, longer_s) * 2 / 3])


@pytest.mark.parametrize(("layers", "model", "power"), [(4, 4, 1), (2, 4, 2), (4, 2, 0.5)])
def test_a_model_suffers_by_the_power_of_what_layers_do(
    layers: float, model: float, power: float
) -> None:
    """Layers take so many times as long beside all-reduces, and the model's backward."""
    of_one = beside_all_reduces(layers, model)
    found = interference_exponent([of_one])
    assert found
    assert found.value == pytest.approx(power, rel=1e-3)
    assert found.stderr
    both = interference_exponent([of_one, of_one])
    assert both
    assert both.value == found.value
    assert both.stderr == pytest.approx(found.stderr / 2**0.5)
    rounds = made_up([ONE])
    assert "interference_exponent" not in model_profile(rounds)["measured"]
    measured = rounds.alone.model_copy(update={"beside": of_one})
    profile = model_profile(rounds.model_copy(update={"alone": measured}))
    assert profile["measured"]["interference_exponent"] == found.value
    assert profile["measured"]["interference_exponent_stderr"] == found.stderr


def test_layers_that_lose_next_to_nothing_tell_no_power() -> None:
    """Nor does one run of no rounds, or of a single one."""
    assert interference_exponent([]) is None
    assert interference_exponent([beside_all_reduces(1.0005, 2)]) is None
    assert (
        interference_exponent([beside_all_reduces(1.005, 1.01)]) is None
    )  # the noise is a tenth of that
    single = {name: samples[:1] for name, samples in beside_all_reduces(2, 2)}
    assert interference_exponent([Beside(**single)]) is None


def test_a_model_that_is_not_slowed_down_has_the_power_0() -> None:
    found = interference_exponent([beside_all_reduces(4, 0.9)])
    assert found
    assert found.value == 0


def test_a_model_is_as_uncertain_as_its_median_iteration() -> None:
    """1.2533 x 1.4826 x its deviation of 10 ms / sqrt(3), of 310 ms; of two runs a root less."""
    rounds = made_up([ONE])
    whole = FORWARD + BACKWARD + OPTIMIZER
    rows = tuple((whole + more, whole + more) for more in (-0.01, 0.0, 0.01))
    alone = rounds.alone.model_copy(update={"whole_s": rows})
    rounds = rounds.model_copy(update={"alone": alone})
    error = 1.2533 * 1.4826 * 0.01 / 3**0.5 / whole
    assert model_profile(rounds)["measured"]["sigma"] == pytest.approx(error)
    assert model_profile(rounds, rounds)["measured"]["sigma"] == pytest.approx(error / 2**0.5)


def test_ranks_that_differ_by_chance_are_alike() -> None:
    assert rank_factors(made_up([ONE])) == ()
    assert rank_factors(made_up([ONE], second_rank=1.1)) == pytest.approx((1 / 1.05, 1.1 / 1.05))


def test_the_model_is_that_of_the_rounds() -> None:
    profile = model_profile(made_up([ONE]))
    assert profile["measured"]["forward_s"] == FORWARD
    assert profile["measured"]["ready_s"] == [BACKWARD, BACKWARD / 2]
