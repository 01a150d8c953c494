"""A diagnosis as text: what was measured, the likely causes, the check that tells them apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap

from ddpsim.errors import printable
from ddpsim.report.lines import command, cut, interval_in_words, labelled, screen_width
from ddpsim.result.diagnosis import WORTH_SAYING, Cause, Diagnosis, Measured, Predicted
from ddpsim.units import format_bytes, format_duration
from ddpsim.wording import ranks

__all__ = ["render_diagnosis"]

_SHOWN = 3
_NOT_LISTED = "look at: the unit, debug settings, and whether the scenario is the job's own"
_MEASURED = {
    "step": "step",
    "without_sync": "step without sync",
    "exposed": "exposed communication",
    "data_wait": "wait for data",
    "all_reduce": "all-reduce",
}
_TITLES = ("step", "one GPU", "no_sync", "exposed", "data wait")


def render_diagnosis(diagnosis: Diagnosis, file: str, settings: Sequence[str] = ()) -> str:
    """`file` and `settings` name the scenario in the next commands."""
    lines = [
        *_measured(diagnosis),
        *_causes(diagnosis),
        *_check(diagnosis),
        "",
        *_predictions(diagnosis),
        *([] if diagnosis.is_healthy else _simulated(_shown(diagnosis), file, settings)),
        *labelled("assumed", "; ".join(diagnosis.assumptions)),
    ]
    return printable("\n".join(line.rstrip() for line in lines))


def _shown(diagnosis: Diagnosis) -> list[Cause]:
    """The likeliest, and up to two more that are worth a look."""
    first, *others = diagnosis.causes[:_SHOWN]
    return [first, *(each for each in others if each.probability >= WORTH_SAYING)]


def _measured(diagnosis: Diagnosis) -> Iterator[str]:
    yield f"{cut(diagnosis.name, 70)}   {ranks(diagnosis.nodes, diagnosis.gpus_per_node)}"
    yield ""
    label = "measured"
    for each in diagnosis.measured:
        seconds, predicted = each.measurement.seconds, each.predicted_s
        row = f"{_what(each):<30}{format_duration(seconds):>10}"
        yield from labelled(label, f"{row}   predicted {format_duration(predicted):>10}")
        label = ""
    label = "seen"
    for fact in diagnosis.facts:
        as_is = "as expected" if fact.seen == fact.expected else f"expected {fact.expected}"
        yield from labelled(label, f"{fact.name}: {fact.seen}, {as_is}")
        label = ""
    if diagnosis.normal is not None and diagnosis.interval:
        interval = interval_in_words(diagnosis.interval)
        verdict = "normal: inside" if diagnosis.normal else "not normal: outside"
        yield from labelled("verdict", f"{verdict} the {interval}")


def _what(measured: Measured) -> str:
    measurement = measured.measurement
    if measurement.size_bytes is not None:
        return f"all-reduce of {format_bytes(measurement.size_bytes)}"
    layout = f"{measurement.nodes} x {measurement.gpus_per_node}"
    return f"{_MEASURED[measurement.quantity]}, {layout}"


def _causes(diagnosis: Diagnosis) -> Iterator[str]:
    """Of a healthy job the others in one line each, without what would help against them."""
    label = "likely"
    for cause in _shown(diagnosis):
        yield from labelled(label, f"{cause.probability:.0%} {cause.text}")
        label = ""
        if diagnosis.is_healthy:
            continue
        if cause.predicts is None:
            yield from _below(_NOT_LISTED)
            continue
        if cause.mended_s:
            step, mended = format_duration(cause.predicts.step_s), format_duration(cause.mended_s)
            yield from _below(f"so the step would be {step}; without it {mended}")
        yield from _below(f"fix: {cause.remedy}")


def _below(text: str) -> Iterator[str]:
    """More of a cause, a little to the right."""
    for row in wrap(text, screen_width() - 16, break_on_hyphens=False):
        yield f"{'':16}{row}"


def _check(diagnosis: Diagnosis) -> Iterator[str]:
    check = diagnosis.check
    if check is None:
        return
    yield from labelled("check", check.text)
    yield f"{'':12}{check.command}"
    named = {each.key for each in _shown(diagnosis)}
    by_outcome: dict[str, list[str]] = {}
    for outcome in check.outcomes:
        if outcome.cause in named:
            by_outcome.setdefault(outcome.shows, []).append(_name(outcome.cause))
    for shows, causes in by_outcome.items():
        yield from _below(f"{shows}: {', '.join(causes)}")


def _predictions(diagnosis: Diagnosis) -> Iterator[str]:
    """One row for each likely cause: what else could be looked at, and an empty line."""
    if not any(cause.predicts for cause in diagnosis.causes):
        return
    size = diagnosis.all_reduce_bytes
    last = f"{f'{format_bytes(size)} all-reduce':>21}" if size else ""
    titles = "".join(f"{title:>11}" for title in _TITLES)
    yield f"  {'would be':<20}{titles}{last}"
    for cause in diagnosis.causes:
        if cause.predicts:
            yield f"  {_name(cause.key):<20}{_times(cause.predicts)}"
    yield ""


def _times(predicted: Predicted) -> str:
    times = (
        *(predicted.step_s, predicted.one_gpu_s, predicted.without_sync_s),
        *(predicted.exposed_s, predicted.data_wait_s),
    )
    last = predicted.all_reduce_s
    row = "".join(f"{format_duration(seconds):>11}" for seconds in times)
    return row if last is None else f"{row}{format_duration(last):>21}"


def _simulated(shown: Sequence[Cause], file: str, settings: Sequence[str]) -> Iterator[str]:
    """The likeliest cause that a scenario can say, as a command."""
    cause = next((each for each in shown if each.settings), None)
    if cause:
        yield from labelled("simulate", f"the job with {_name(cause.key)}")
        yield from command(file, settings, cause.settings)


def _name(key: str) -> str:
    return key.replace("_", " ")
