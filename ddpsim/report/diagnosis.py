"""A diagnosis as text: what was measured, the likely causes, the check that tells them apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap

from ddpsim.report.lines import as_text, command, cut, labelled, listed, screen_width
from ddpsim.result.diagnosis import (
    HEALTHY,
    WORTH_SAYING,
    Cause,
    Diagnosis,
    Measured,
    Predicted,
    place_in_interval,
)
from ddpsim.result.model import interval_in_words
from ddpsim.units import format_bytes, format_duration, format_number
from ddpsim.wording import counted, ranks

_SHOWN = 3
_WORTH_COUNTING = 0.01  # of the causes that are not shown, together
_NOT_LISTED = "look at: the unit, debug settings, and whether the scenario is the job's own"
_MEASURED = {
    "step": "step",
    "without_sync": "step without sync",
    "exposed": "exposed communication",
    "data_wait": "wait for data",
    "all_reduce": "all-reduce",
}
_TITLES = ("step", "on 1 GPU", "no_sync", "exposed", "data wait")


@as_text
def render_diagnosis(diagnosis: Diagnosis, file: str, settings: Sequence[str] = ()) -> list[str]:
    """`file` and `settings` name the scenario in the next commands."""
    return [
        *_undecided(diagnosis),
        *_measured(diagnosis),
        *_parts_of_steps(diagnosis),
        *_facts(diagnosis),
        *_causes(diagnosis),
        *_check(diagnosis),
        "",
        *_predictions(diagnosis),
        *([] if diagnosis.is_healthy else _simulated(_shown(diagnosis), file, settings)),
        *labelled("assumed", "; ".join(diagnosis.assumptions)),
    ]


def _shown(diagnosis: Diagnosis) -> list[Cause]:
    """The likeliest cause, and up to two more that are worth a look."""
    first, *others = diagnosis.causes[:_SHOWN]
    return [first, *(each for each in others if each.probability >= WORTH_SAYING)]


def _measured(diagnosis: Diagnosis) -> Iterator[str]:
    yield f"{cut(diagnosis.name, 70)}   {ranks(diagnosis.nodes, diagnosis.gpus_per_node)}"
    yield ""
    measured = diagnosis.measured
    rows = [_row(_what(each), each.measurement.seconds, each.predicted_s) for each in measured]
    yield from listed("measured", rows)


def _row(what: str, seconds: float, predicted_s: float) -> str:
    took, predicted = format_duration(seconds), format_duration(predicted_s)
    return f"{what:<30}{took:>10}   predicted {predicted:>10}"


def _undecided(diagnosis: Diagnosis) -> Iterator[str]:
    """What to measure next where no cause stands out, and what the answer is worth."""
    check = diagnosis.check
    if diagnosis.is_decided or check is None:
        return
    likeliest = max(cause.probability for cause in diagnosis.causes)
    yield from wrap(
        f"Undecided: the likeliest cause has {likeliest:.0%}. Look next at: {check.text}. "
        f"That raises the likeliest cause to {check.expected:.0%} on average.",
        screen_width(),
        break_on_hyphens=False,
    )
    yield ""


def _parts_of_steps(diagnosis: Diagnosis) -> Iterator[str]:
    """Time of each micro-batch or sample, and of the rest, by a line through two steps."""
    for key, what in (("accumulation", "micro-batch"), ("batch", "sample")):
        counts = [getattr(each.measurement, key) for each in diagnosis.measured]
        steps = sorted(
            (count, each.measurement.seconds, each.predicted_s)
            for count, each in zip(counts, diagnosis.measured, strict=True)
            if count is not None and each.measurement.quantity == "step"
        )
        if len(steps) < 2 or steps[0][0] == steps[-1][0]:
            continue
        (few, *least), (many, *most) = steps[0], steps[-1]
        each_s = [(b - a) / (many - few) for a, b in zip(least, most, strict=True)]
        rest_s = [max(0.0, a - few * s) for a, s in zip(least, each_s, strict=True)]
        yield from labelled("", _row(f"each {what}", *each_s))
        yield from labelled("", _row("once a step", *rest_s))


def _facts(diagnosis: Diagnosis) -> Iterator[str]:
    """What logs and traces show, and whether the step is a normal one."""
    rows = [
        f"{fact.name}: {fact.seen}, "
        f"{'as expected' if fact.seen == fact.expected else f'expected {fact.expected}'}"
        for fact in diagnosis.facts
    ]
    yield from listed("seen", rows)
    if verdict := _verdict(diagnosis):
        yield from labelled("verdict", verdict)


def _verdict(diagnosis: Diagnosis) -> str:
    """Whether the steps are normal; nothing where the scenario's own was not measured."""
    interval, step = diagnosis.interval, diagnosis.step
    if interval is None or step is None:
        return ""
    verdict, place = place_in_interval(
        *(interval, step.measurement.seconds, diagnosis.mfu),
        name=interval_in_words(interval),
        is_healthy=diagnosis.is_healthy,
    )
    if other := diagnosis.misfit:
        measured = format_number(step.measurement.seconds / other.measurement.seconds)
        predicted = format_number(step.predicted_s / other.predicted_s)
        growth = f"{measured} times the step on {_setting(other)}, predicted {predicted} times"
        verdict, place = "not normal", f"{growth}; alone it is {place}"
    return ": ".join(filter(None, (verdict, place)))


def _what(measured: Measured) -> str:
    measurement = measured.measurement
    if measurement.size_bytes is not None:
        return f"all-reduce of {format_bytes(measurement.size_bytes)}"
    return f"{_MEASURED[measurement.quantity]}, {_setting(measured)}"


def _setting(measured: Measured) -> str:
    """The nodes and GPUs of each, and micro-batches or samples where they are told."""
    measurement = measured.measurement
    parts = [f"{measurement.nodes} x {measurement.gpus_per_node}"]
    parts += [f"accumulation {measurement.accumulation}"] if measurement.accumulation else []
    parts += [f"batch {measurement.batch}"] if measurement.batch else []
    return ", ".join(parts)


def _causes(diagnosis: Diagnosis) -> Iterator[str]:
    """Yields the lines of each cause; of a healthy job one each, without what would help."""
    label = "likely"
    for cause in _shown(diagnosis):
        yield from labelled(label, f"{cause.probability:.0%} {cause.text}")
        label = ""
        if diagnosis.is_healthy:
            continue
        if cause.predicts is None:
            yield from _below(_NOT_LISTED)
            continue
        step = f"it predicts a step of {format_duration(cause.predicts.step_s)}"
        if cause.key == HEALTHY:
            yield from _below(step)
            continue
        if cause.mended_s:
            mended = format_duration(cause.mended_s)
            yield from _below(f"{step}; without it this job would take {mended}")
        elif diagnosis.normal is not None:
            yield from _below(f"{step}, not the measured one")
        yield from _below(f"fix: {cause.remedy}")
    rest = diagnosis.causes[len(_shown(diagnosis)) :]
    share = sum(cause.probability for cause in rest)
    if share >= _WORTH_COUNTING:
        text = f"{share:.0%} {counted(len(rest), 'other cause')}, in the table below and in --json"
        yield from labelled(label, text)


def _below(text: str) -> Iterator[str]:
    """More lines on a cause, indented."""
    for row in wrap(text, screen_width() - 16, break_on_hyphens=False):
        yield f"{'':16}{row}"


def _check(diagnosis: Diagnosis) -> Iterator[str]:
    check = diagnosis.check
    if check is None:
        return
    yield from labelled("check", check.text)
    yield f"{'':12}{check.command}"
    named = {each.key for each in (_shown(diagnosis) if diagnosis.is_decided else diagnosis.causes)}
    by_outcome: dict[str, list[str]] = {}
    for outcome in check.outcomes:
        if outcome.cause in named:
            cause = f"{_name(outcome.cause)} {outcome.probability:.0%}"
            by_outcome.setdefault(outcome.shows, []).append(cause)
    for shows, causes in by_outcome.items():
        yield from _below(f"{shows}: {', '.join(causes)}")


def _predictions(diagnosis: Diagnosis) -> Iterator[str]:
    """One row for each cause with what it predicts, and one for all others."""
    listed = [cause for cause in diagnosis.causes if cause.predicts]
    if not listed:
        return
    size = diagnosis.all_reduce_bytes
    last = f"{f'{format_bytes(size)} all-reduce':>20}" if size else ""
    titles = "".join(f"{title:>10}" for title in _TITLES)
    yield f"  {'':>4} {'would be':<20}{titles}{last}"
    for cause in listed:
        if cause.predicts:
            yield f"  {cause.probability:>4.0%} {_name(cause.key):<20}{_times(cause.predicts)}"
    rest = [cause.probability for cause in diagnosis.causes if not cause.predicts]
    yield f"  {sum(rest):>4.0%} {len(rest)} others"
    yield ""


def _times(predicted: Predicted) -> str:
    times = (
        *(predicted.step_s, predicted.one_gpu_s, predicted.without_sync_s),
        *(predicted.exposed_s, predicted.data_wait_s),
    )
    last = predicted.all_reduce_s
    row = "".join(f"{format_duration(seconds):>10}" for seconds in times)
    return row if last is None else f"{row}{format_duration(last):>20}"


def _simulated(shown: Sequence[Cause], file: str, settings: Sequence[str]) -> Iterator[str]:
    """The command that simulates the likeliest cause that a scenario can state."""
    cause = next((each for each in shown if each.settings), None)
    if cause:
        yield from labelled("simulate", f"the job with {_name(cause.key)}")
        yield from command(file, settings, cause.settings)


def _name(key: str) -> str:
    return key.replace("_", " ")
