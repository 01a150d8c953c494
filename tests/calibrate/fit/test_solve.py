"""Least squares with parameters of at least zero."""

from __future__ import annotations

import numpy as np
import pytest

from calibrate.fit.solve import Floats, polish


@pytest.mark.parametrize("small", [1e-4, 1e-3])
def test_a_parameter_that_exact_times_tell_is_not_put_at_zero(small: float) -> None:
    """Without it times are wrong by a part of `small`: more than 1e-5, and less than noise is."""
    sizes = np.linspace(1.0, 10.0, 40)
    truth = np.array([1.0, small])

    def residuals(values: Floats) -> Floats:
        design = np.stack([sizes, sizes**2 / 10])
        return np.asarray(np.log((values @ design) / (truth @ design)))

    found = polish(residuals, np.array([1.1, 0.1]), np.array([1.0, 1.0]), optional=())
    assert found.values == pytest.approx(truth, rel=1e-3)
    assert not found.at_bound.any()
