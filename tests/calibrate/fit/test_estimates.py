"""Medians, lines and means, with their standard errors."""

from __future__ import annotations

import math

import numpy as np
import pytest

from calibrate.fit.estimates import averaged, line, mean_time, median_time, pooled, trimmed_mean
from ddpsim.importers.profiles.cluster import Fitted


def test_the_middle_of_samples_minds_no_outlier() -> None:
    assert trimmed_mean([1.0]) == 1.0
    assert trimmed_mean([1.0, 2.0]) == 1.5
    assert trimmed_mean([1.0, 2.0, 90.0]) == 2.0
    assert mean_time([1.0]) == 1.0
    assert mean_time([1.0, 2.0]) == 1.5
    assert mean_time([1.0, 2.0, 90.0]) == 2.0
    assert mean_time([1.0] * 15 + [5.0] * 4 + [1000.0]) == 2.0  # rare and slow counts
    assert trimmed_mean([*range(1, 20), 1000]) == pytest.approx(np.mean(range(3, 19)))


@pytest.mark.parametrize("unit", [1.0, 1e-9])
def test_a_line_is_known_as_well_as_its_points(unit: float) -> None:
    """The textbook's errors of a weighted line, whatever the unit of what goes with it."""
    x, errors = (0.0, 1.0, 2.0, 4.0), (0.1, 0.2, 0.4, 0.1)
    points = [Fitted(value=3 + 2 * at, stderr=own) for at, own in zip(x, errors, strict=True)]
    weights = [1 / own**2 for own in errors]
    whole, first, second = (
        sum(weight * at**power for weight, at in zip(weights, x, strict=True)) for power in range(3)
    )
    determinant = whole * second - first**2
    intercept, slope = line([unit * at for at in x], points)
    assert (intercept.value, slope.value) == (pytest.approx(3), pytest.approx(2 / unit))
    assert intercept.stderr == pytest.approx(math.sqrt(second / determinant))
    assert slope.stderr == pytest.approx(math.sqrt(whole / determinant) / unit)


def test_a_point_far_off_pulls_a_line_as_if_it_were_two_errors_off() -> None:
    """100 errors of 0.1, in the middle of 11 points: 0.2 / 10 and not 10 / 11 of them all."""
    points = [Fitted(value=1 + 2 * at, stderr=0.1) for at in range(11)]
    points[5] = Fitted(value=points[5].value + 10, stderr=0.1)
    intercept, slope = line(range(11), points)
    assert slope.value == pytest.approx(2)
    assert intercept.value == pytest.approx(1.02, abs=1e-3)
    assert intercept.stderr is not None
    assert intercept.stderr > 0.2  # and not 0.06, as the own errors of all 11 say


def test_points_further_off_than_they_say_make_a_line_as_uncertain_as_they_scatter() -> None:
    """Off by +1, -1, -1, +1, ten times what they say: the textbook's errors, of s = sqrt(4 / 2)."""
    off = (1, -1, -1, 1)  # so a line fits none better than the true one
    points = [Fitted(value=10 + 2 * at + off[at], stderr=0.1) for at in range(4)]
    intercept, slope = line(range(4), points)
    assert (intercept.value, slope.value) == (pytest.approx(10), pytest.approx(2))
    assert intercept.stderr == pytest.approx(math.sqrt(2) * math.sqrt(14 / 20))
    assert slope.stderr == pytest.approx(math.sqrt(2) * math.sqrt(4 / 20))


def test_standard_errors_of_a_median_and_of_means() -> None:
    """Of 1, 2, 3, 4 and 100 the median absolute deviation is 1, whatever the last."""
    middle = median_time([4, 1, 3, 100, 2])
    two = [Fitted(value=1, stderr=0.3), Fitted(value=3, stderr=0.4)]
    for found, value, stderr in (
        (middle, 3, 1.2533 * 1.4826 / math.sqrt(5)),
        (averaged(two), 2, 0.5 / 2),
        (pooled(two), 2, math.hypot(0.5 / 2, math.sqrt(2) / math.sqrt(2))),
    ):
        assert (found.value, found.stderr) == (value, pytest.approx(stderr))
    assert median_time([3.0]) == Fitted(value=3.0)
    for mean in (averaged, pooled):
        assert mean([*two, Fitted(value=5)]) == Fitted(value=3)


def test_a_line_that_nothing_rises_along_has_no_slope_and_no_error_of_it() -> None:
    intercept, slope = line([1, 2, 3], [Fitted(value=value, stderr=0.1) for value in (3, 2, 1)])
    assert (intercept.value, slope) == (pytest.approx(2), Fitted(value=0.0))
