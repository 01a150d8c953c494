"""A size's work with its failures: how long, where the time goes, what would help most."""

from __future__ import annotations

from collections.abc import Iterator

from ddpsim.report.lines import columns, labelled
from ddpsim.result.capacity import Capacity, LongRun
from ddpsim.units import (
    format_long_duration,
    format_number,
    format_percent,
    long_duration_in,
)
from ddpsim.wording import counted

_REMEDIES = 4
_WORTH_NAMING = 0.0005  # of the time
_CAUSES = {
    "checkpoints": "checkpoints",
    "lost_work": "lost work",
    "slow_steps": "slower steps",
    "detection": "failures not yet noticed",
    "waiting_for_nodes": "waiting for nodes",
    "restarts": "restarts",
    "maintenance": "maintenance",
}


def failure_lines(run: LongRun | None) -> Iterator[str]:
    """How often a job is stopped, what of its time is useful, what would help, as text."""
    if run is None:
        return
    for label, text in failure_rows(run):
        yield from labelled(label, text)
    if rows := remedy_rows(run):
        yield from columns("would help", rows, whole=True)


def failure_rows(run: LongRun) -> list[tuple[str, str]]:
    """Labels, and how often a job is stopped, how often it saves, what of its time is useful."""
    lost = sorted(run.shares.items(), key=lambda entry: -entry[1])
    named = [
        f"{format_percent(share)} {_CAUSES[cause]}"
        for cause, share in lost
        if cause != "steps" and share > _WORTH_NAMING
    ]
    useful = f"{format_percent(run.shares['steps'])} of the time are steps of use on average"
    goodput = "; ".join([useful, *[", ".join(named)] * bool(named)])
    return [("failures", _failures(run)), ("checkpoints", _checkpoints(run)), ("goodput", goodput)]


def remedy_rows(run: LongRun) -> list[tuple[str, str]]:
    """The time that each of the most useful changes saves, and the change with its setting."""
    return [
        (f"-{format_long_duration(remedy.saved_s)}", f"{remedy.what} ({remedy.settings[0]})")
        for remedy in run.remedies[:_REMEDIES]
    ]


def month_rows(run: LongRun) -> list[tuple[str, str]]:
    """Labels, and what 30 days of undisturbed steps become; `run` is of `month_of`."""
    days = [long_duration_in("days", s) for s in (run.time_s.p50, run.time_s.p10, run.time_s.p90)]
    takes = "30 days of steps take {} days; 8 of 10 runs take {} to {}".format(*days)
    rows = [("calendar", takes), *failure_rows(run)]
    rows += [("would help", ": ".join(row)) for row in remedy_rows(run)]
    return rows + source_rows(run)


def _failures(run: LongRun) -> str:
    if run.mtbf_s is None:
        return f"none; the first start and all else in {run.runs:,} simulated runs"
    spares = f"; {counted(run.spares, 'spare node')}" if run.spares else ""
    return (
        f"one every {format_long_duration(run.mtbf_s)} of the whole job, "
        f"{format_number(run.interruptions)} a run{spares}; {run.runs:,} runs simulated"
    )


def _checkpoints(run: LongRun) -> str:
    if run.checkpoint_every is None or run.interval_s is None:
        return "none: each failure starts the work anew (workload.checkpoint_write)"
    text = f"every {run.checkpoint_every:,} steps, {format_long_duration(run.interval_s)} of steps"
    if run.daly_interval_s is None:
        return text
    return f"{text}; the best by Daly (2006) is {format_long_duration(run.daly_interval_s)}"


def source_lines(run: LongRun | None) -> Iterator[str]:
    """Which inputs nobody stated, and what the published ones are, as text."""
    for label, text in source_rows(run) if run else ():
        yield from labelled(label, text)


def source_rows(run: LongRun) -> list[tuple[str, str]]:
    """Labels, and which inputs nobody stated, and what the published ones are."""
    assumed = [f"{one.input} {one.source}" for one in run.sources if one.trust == "assumed"]
    rows = [("assumed", ", ".join(assumed))] if assumed else []
    published = (one for one in run.sources if one.trust == "published")
    return rows + [("published", f"{one.input}: {one.source}") for one in published]


def energy_lines(size: Capacity) -> Iterator[str]:
    """What the answer's work takes from the grid."""
    if (energy := size.energy) is None:
        return
    carbon = "" if energy.co2_kg is None else f", {format_number(energy.co2_kg / 1000)} t CO2"
    yield from labelled("energy", f"{format_number(energy.kwh / 1000)} MWh{carbon}: {energy.basis}")
