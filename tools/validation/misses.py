"""Why predictions of campaigns miss, in figures, and what an earlier measurement would say."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from statistics import median

from calibrate.records.rounds_file import load_runs
from calibrate.validate.inputs import model_profile
from calibrate.validate.report import Case, Sweep
from validation.campaign_tables import goals, share_text
from validation.recorded import (
    CALM_EPYC,
    CAMPAIGNS,
    EPYC,
    SLOW_EPYC,
    XEON,
    by_rate,
    campaign,
    figures_of_sweeps,
    own_cores,
    rounds_of,
)


def misses() -> dict[str, str]:
    """The figures in what is said of why predictions miss."""

    def cases(folder: Path, rate: float, model: str = "") -> list[Case]:
        found = [s for s in by_rate(own_cores(folder))[rate * 1e9 / 8] if model in s.model]
        return [case for sweep in found for case in sweep.cases]

    def percents(errors: Iterable[float]) -> str:
        sizes = [100 * abs(error) for error in errors]
        return f"{min(sizes):.1f} to {max(sizes):.1f}"

    def middle_ms(found: list[Case]) -> float:
        return 1e3 * median(case.predicted_s - case.measured_s for case in found)

    noises = {folder: figures_of_sweeps(own_cores(folder)).median_stderr for folder in CAMPAIGNS}
    restless = [noises.pop(folder) for folder in (SLOW_EPYC, CALM_EPYC)]
    slow = [case for model in ("cnn", "mixer") for case in cases(SLOW_EPYC, 2, model)]
    calm = [case for rate in (2, 5) for case in cases(CALM_EPYC, rate, "deep_mlp")]
    beyond = goals(own_cores(CALM_EPYC))[2].partition(" ")[0]
    xeon = cases(XEON, 0.2)
    exposed_ms = 1e3 * median(case.predicted.exposed - case.measured.exposed for case in xeon)
    epyc = [-middle_ms(cases(EPYC, rate)) for rate in (0.8, 1.5, 2, 3.5, 5)]
    shared = [campaign(folder).oversubscribed for folder in CAMPAIGNS]
    lows = [-100 * figures.median_bias for figures in shared if figures]
    regrets = [s.regret or 0.0 for f in CAMPAIGNS for s in campaign(f).sweeps if s.oversubscribed]
    return {
        "SLOW_EPYC_LONG": percents(case.error for case in slow if case.variant in ("1", "5")),
        "SLOW_EPYC_NOISE": f"{min(restless) / max(noises.values()):.1f} to "
        f"{max(restless) / min(noises.values()):.1f}",
        "CALM_EPYC_SHORT": percents(case.error for case in calm),
        "CALM_EPYC_BEYOND": beyond,
        "XEON_EXPOSED": f"{exposed_ms:.1f}",
        "XEON_LONG": f"{middle_ms(xeon):.1f}",
        "XEON_5_LONG": f"{100 * median(case.error for case in cases(XEON, 5)):.1f}",
        "XEON_5_WORST": f"{100 * max(case.error for case in cases(XEON, 5, 'wide_mlp')):.1f}",
        "EPYC_SHORT": f"{-middle_ms(cases(EPYC, 0.2)):.1f}",
        "EPYC_SHORT_ELSEWHERE": f"{min(epyc):.1f} to {max(epyc):.1f}",
        "SHARED_LOW": f"{min(lows):.0f} to {max(lows):.0f}",
        "SHARED_WORST": f"{100 * max(figures.worst_error for figures in shared if figures):.0f}",
        "SHARED_REGRET": f"{100 * max(regrets):.0f}",
    }


def as_measured_before(folder: Path, began: str) -> list[Sweep]:
    """The same sweeps, with what an earlier campaign measured in the place of the prediction.

    Each brought to the bare model's forward and backward as they were this time.
    """
    text = (folder / "earlier.csv").read_text("utf-8").splitlines()
    rows = csv.DictReader(line for line in text if not line.startswith("#"))
    known = {(row["file"], row["variant"]): row for row in rows if row["began"] == began}

    def predicted(sweep: Sweep, case: Case) -> Case:
        before = known[sweep.file, case.variant]
        slower_s = _bare_s(folder)[sweep.file] - float(before["bare_s"])
        return case.model_copy(update={"predicted_s": float(before["measured_s"]) + slower_s})

    return [
        sweep.model_copy(update={"cases": tuple(predicted(sweep, c) for c in sweep.cases)})
        for sweep in own_cores(folder)
    ]


@cache
def _bare_s(folder: Path) -> dict[str, float]:
    """Of each sweep, by its file, the seconds of the bare model's forward and backward."""
    profiles = {runs.first_file: model_profile(*runs.each) for runs in load_runs(rounds_of(folder))}
    return {file: p["forward_s"] + p["backward_s"] for file, p in profiles.items()}


def with_skill(sweeps: Sequence[Sweep]) -> str:
    """Errors and skill in words."""
    figures = figures_of_sweeps(sweeps)
    return (
        f"median {figures.median_error:.1%}, worst {figures.worst_error:.1%}, skill "
        f"{share_text(figures.skilled)}"
    )
