"""A size's work with its failures: how long, where the time goes, what would help most."""

from __future__ import annotations

from collections.abc import Iterator

from ddpsim.report.lines import columns, labelled
from ddpsim.result.capacity import Capacity, LongRun
from ddpsim.units import format_long_duration, format_number, format_percent
from ddpsim.wording import counted

__all__ = ["energy_lines", "failure_lines", "source_lines"]

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


def failure_lines(size: Capacity) -> Iterator[str]:
    """How often the answer's job is stopped, what of its time is useful, what would help."""
    run = size.long_run
    if run is None:
        return
    yield from labelled("failures", _failures(run))
    yield from labelled("checkpoints", _checkpoints(run))
    lost = sorted(run.shares.items(), key=lambda entry: -entry[1])
    named = [
        f"{format_percent(share)} {_CAUSES[cause]}"
        for cause, share in lost
        if cause != "steps" and share > _WORTH_NAMING
    ]
    useful = f"{format_percent(run.shares['steps'])} of the time are steps of use"
    yield from labelled("goodput", "; ".join([useful, *[", ".join(named)] * bool(named)]))
    rows = [
        (f"-{format_long_duration(remedy.saved_s)}", f"{remedy.what} ({remedy.settings[0]})")
        for remedy in run.remedies[:_REMEDIES]
    ]
    if rows:
        yield from columns("would help", rows, whole=True)


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
    said = f"every {run.checkpoint_every:,} steps, {format_long_duration(run.interval_s)} of steps"
    if run.daly_interval_s is None:
        return said
    return f"{said}; the best by Daly (2006) is {format_long_duration(run.daly_interval_s)}"


def source_lines(run: LongRun | None) -> Iterator[str]:
    """Which inputs nobody stated, and what the published ones are."""
    if run is None:
        return
    assumed = [f"{one.input} {one.source}" for one in run.sources if one.trust == "assumed"]
    if assumed:
        yield from labelled("assumed", ", ".join(assumed))
    for one in run.sources:
        if one.trust == "published":
            yield from labelled("published", f"{one.input}: {one.source}")


def energy_lines(size: Capacity) -> Iterator[str]:
    """What the answer's work takes from the grid."""
    if (energy := size.energy) is None:
        return
    carbon = "" if energy.co2_kg is None else f", {format_number(energy.co2_kg / 1000)} t CO2"
    yield from labelled("energy", f"{format_number(energy.kwh / 1000)} MWh{carbon}: {energy.basis}")
