"""What is asked of a campaign and what it comes to; its errors by rate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

from scipy.stats import norm
from scipy.stats import t as student

from calibrate.fit.estimates import SIGNIFICANT
from calibrate.validate.report import Case, Sweep
from validation.markdown import markdown
from validation.recorded import (
    CAMPAIGNS,
    by_rate,
    campaign,
    figures_of_sweeps,
    later,
    own_cores,
)


def goals_table() -> str:
    """What is asked of a campaign, a row each, and what each campaign comes to."""
    columns = [goals(own_cores(folder)) for folder in CAMPAIGNS] + [goals(later().sweeps)]
    rows = ((*asked, *answers) for asked, *answers in zip(_ASKED, *columns, strict=True))
    return markdown(["", "asked", *CAMPAIGNS.values(), "faster Xeon, later runs alone"], rows)


_ASKED = (
    ("cases", ""),
    ("error, median", "2 %"),
    ("error, worst", "5 %, or the noise"),
    ("cases beyond that", "0"),
    ("skill", "everywhere"),
    ("skill where runs were repeated", ""),
    ("that of one run as the prediction of the others", ""),
    ("the truth itself would miss skill in", ""),
    ("within a third of compute only's error", ""),
    ("within a third of perfect overlap's", ""),
    ("within a third of no overlap's", ""),
    ("bucket choice within 1 %", "90 % of the sweeps"),
    ("worst choice costs", ""),
    ("exposed communication, worst", "3 % of the iteration"),
    ("cases beyond that", "0"),
    ("80 % interval holds", "70 to 90 %"),
    ("binomial test of that against 80 %", ""),
)


def goals(sweeps: Sequence[Sweep]) -> list[str]:
    """A campaign's answers, in the order of `_ASKED`."""
    figures, cases = figures_of_sweeps(sweeps), [case for sweep in sweeps for case in sweep.cases]

    def thirds(naive: str) -> str:
        return share_text(
            fmean(
                case.is_within_a_third_of(abs(getattr(case, naive) / case.measured_s - 1))
                for case in cases
                if case.exposed
            )
        )

    return [
        f"{figures.cases}",
        f"{figures.median_error:.1%}",
        f"{figures.worst_error:.1%}",
        f"{round((1 - figures.within_5_percent_or_noise) * figures.cases)} of {figures.cases}",
        share_text(figures.skilled),
        share_text(figures.repeated_skilled),
        share_text(figures.another_run_skilled),
        _missed_by_truth(sweeps),
        thirds("compute_only_s"),
        thirds("perfect_overlap_s"),
        thirds("no_overlap_s"),
        share_text(figures.good_choices),
        f"{max(sweep.regret or 0.0 for sweep in sweeps):.1%}",
        f"{figures.worst_exposed_error or 0.0:.1%}",
        f"{sum((c.exposed_error or 0.0) > _EXPOSED_ASKED for c in cases)} of {figures.cases}",
        share_text(figures.covered),
        f"p = {figures.covered_p_value:.2g}",
    ]


_EXPOSED_ASKED = 0.03


def by_rate_table() -> str:
    """Errors, skill and intervals at each rate, a row a campaign and a rate."""
    head = ["campaign", "Gbit/s", "error, median", "worst", "bias", "skill"]
    head += ["a third of the best naive error", "80 % interval holds"]
    rows = []
    for folder, name in CAMPAIGNS.items():
        for rate, sweeps in by_rate(own_cores(folder)).items():
            figures = figures_of_sweeps(sweeps)
            exposed = [case for sweep in sweeps for case in sweep.cases if case.exposed]
            third = median(case.baseline_error for case in exposed) / 3
            cells = [name, f"{rate * 8 / 1e9:g}", f"{figures.median_error:.1%}"]
            cells += [f"{figures.worst_error:.1%}", f"{figures.median_bias:+.1%}"]
            cells += [share_text(figures.skilled), f"{third:.1%}", share_text(figures.covered)]
            rows.append(cells)
    return markdown(head, rows)


def share_text(share: float | None) -> str:
    """A share in whole percent; none: a dash."""
    return "-" if share is None else f"{share:.0%}"


def _missed_by_truth(sweeps: Sequence[Sweep]) -> str:
    """The share of exposed cases in which a prediction without any error would fail the skill rule.

    Measured medians scatter about the truth by their standard errors: as if these were known, and
    as if only a sweep's own few runs, or a run's rounds, told them (Student's t).
    """
    cases = [(sweep, case) for sweep in sweeps for case in sweep.cases if case.exposed]
    limits = [max(c.baseline_error / 3, SIGNIFICANT * c.noise) / c.noise for _, c in cases]
    freedom = [s.runs - 1 if s.runs > 1 else case.rounds - 1 for s, case in cases]
    known = fmean(2 * norm.sf(limit) for limit in limits)
    told = fmean(2 * student.sf(limit, n) for limit, n in zip(limits, freedom, strict=True))
    return f"{100 * known:.0f} to {100 * told:.0f} %"


def variants_table(folder: Path) -> str:
    """Every strategy and option of a campaign without caps, over its models and rates."""
    sweeps = campaign(folder).sweeps
    found: dict[str, list[Case]] = {}
    right: dict[str, list[bool]] = {}
    for sweep in sweeps:
        for case in sweep.cases:
            found.setdefault(case.variant, []).append(case)
            pair = (case, *(each for each in sweep.cases if each.variant == case.plain))
            ranked = sweep.model_copy(update={"cases": tuple(dict.fromkeys(pair))}).ranked
            right.setdefault(case.variant, []).extend(ranked)
    rows = [
        (
            f"`{variant}`",
            f"{len(cases)}",
            f"{median(abs(case.error) for case in cases):.1%}",
            f"{max((case.error for case in cases), key=abs):+.1%}",
            f"{median(case.noise for case in cases):.1%}",
            f"{sum(right[variant])} of {len(right[variant])}" if right[variant] else "",
        )
        for variant, cases in found.items()
    ]
    head = ("variant", "cases", "error, median", "worst", "noise", "sign against DDP right")
    return markdown(head, rows)
