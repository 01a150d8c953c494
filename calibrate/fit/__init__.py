"""From measurements to a cluster profile: fit, residuals, and a profile in words."""

from calibrate.fit.profile import (
    fit_all_reduce,
    fit_logs,
    fit_profile,
    samples_of_logs,
    samples_of_records,
)
from calibrate.fit.residuals import residual_table, write_residual_figure
from calibrate.fit.samples import Fit, FitError, Sample
from calibrate.fit.show import show

__all__ = [
    "Fit",
    "FitError",
    "Sample",
    "fit_all_reduce",
    "fit_logs",
    "fit_profile",
    "residual_table",
    "samples_of_logs",
    "samples_of_records",
    "show",
    "write_residual_figure",
]
