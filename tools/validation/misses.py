"""The known gaps of the campaigns, in figures."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from statistics import median

from calibrate.validate.report import Case
from validation.recorded import (
    CALM_EPYC,
    CAMPAIGNS,
    EPYC,
    SLOW_EPYC,
    XEON,
    by_rate,
    campaign,
    own_cores,
)


def misses() -> dict[str, str]:
    """By the names that the template has for them."""

    def cases(folder: Path, rate: float, model: str = "") -> list[Case]:
        found = [s for s in by_rate(own_cores(folder))[rate * 1e9 / 8] if model in s.model]
        return [case for sweep in found for case in sweep.cases]

    def percents(errors: Iterable[float]) -> str:
        sizes = [100 * abs(error) for error in errors]
        return f"{min(sizes):.1f} to {max(sizes):.1f}"

    def middle_ms(found: list[Case]) -> float:
        return 1e3 * median(case.predicted_s - case.measured_s for case in found)

    slow = [case for model in ("cnn", "mixer") for case in cases(SLOW_EPYC, 2, model)]
    calm = [case for rate in (2, 5) for case in cases(CALM_EPYC, rate, "deep_mlp")]
    shared = [campaign(folder).oversubscribed for folder in CAMPAIGNS]
    lows = [-100 * figures.median_bias for figures in shared if figures]
    regrets = [s.regret or 0.0 for f in CAMPAIGNS for s in campaign(f).sweeps if s.oversubscribed]
    return {
        "SLOW_EPYC_LONG": percents(case.error for case in slow if case.variant in ("1", "5")),
        "CALM_EPYC_SHORT": percents(case.error for case in calm),
        "XEON_5_LONG": f"{100 * median(case.error for case in cases(XEON, 5)):.1f}",
        "XEON_5_WORST": f"{100 * max(case.error for case in cases(XEON, 5, 'wide_mlp')):.1f}",
        "EPYC_SHORT": f"{-middle_ms(cases(EPYC, 0.2)):.1f}",
        "SHARED_LOW": f"{min(lows):.0f} to {max(lows):.0f}",
        "SHARED_WORST": f"{100 * max(figures.worst_error for figures in shared if figures):.1f}",
        "SHARED_REGRET": f"{100 * max(regrets):.0f}",
    }
