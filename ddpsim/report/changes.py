"""Changes of a scenario, the options to take, and why a step is so long, as text on a screen."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from textwrap import wrap

from ddpsim.report.lines import (
    as_text,
    by_text,
    command,
    labelled,
    listed,
    named_rows,
    noted_noise,
    screen_width,
    settings_of_names,
    warned,
)
from ddpsim.report.training import amount_in_words, rate_in_words
from ddpsim.result.changes import Change, Comparison, Explanation, Tuning
from ddpsim.result.model import interval_in_words
from ddpsim.units import format_bytes, format_duration, long_duration_in
from ddpsim.wording import counted

_SMALL = 0.002  # of the step: less is called no difference
_FIGURES = 61  # columns of a row
_NOTHING = 0.001  # of an interval's wider edge
_MOST_SHOWN = 100.0  # times as long: another question
_FIRST = "the baseline"
_OWN_COSTS = (
    "DDP's own costs (copies, hooks, launches) widen it only where a cluster profile tells how "
    "they vary"
)


@as_text
def render_comparison(comparison: Comparison) -> Iterator[str]:
    """One line for each option, the fastest first; impossible ones below."""
    yield f"{comparison.name[:70]}   {counted(comparison.world_size, 'rank')}"
    yield ""
    spread = interval_in_words(comparison.prediction_interval_s)
    step = format_duration(comparison.step_s)
    if comparison.baseline:
        yield from labelled("baseline", comparison.baseline)
    yield from labelled("step", f"{step}   {spread}   {comparison.samples:,} samples")
    yield from warned(comparison.warnings)
    yield ""
    possible = [change for change in comparison.changes if not change.problem]
    ordered = sorted(possible, key=lambda change: (not change.fits, change.change_s))
    figures = f"{'change':>10}{'':>8}{'80% interval':>21}{'memory':>13}"
    rows = [(change.title, _row(change)) for change in ordered]
    yield from named_rows("option", rows, figures, _FIGURES)
    yield ""
    yield from _best(comparison)
    yield from labelled(
        "change",
        "in time for the samples of one baseline step; in its 80% interval an input that both have "
        f"from one source is wrong by the same factor in both; {_OWN_COSTS}",
    )
    yield from noted_noise(comparison.noise)
    yield from settings_of_names((change.title, change.settings) for change in possible)
    if any(verdict(change).endswith("?") for change in possible):
        yield from labelled("?", "the difference is not larger than what is uncertain about it")
    yield from listed("note", by_text({change.title: change.note for change in possible}))
    yield from _new_warnings(possible, comparison.warnings)
    failed = {change.title: change.problem for change in comparison.changes if change.problem}
    yield from listed("impossible", by_text(failed))


def _best(comparison: Comparison) -> Iterator[str]:
    """The change to take: the fastest is the cheapest too, on as many GPUs."""
    if (best := comparison.best) is None or not comparison.gpus:
        return
    samples_per_s, tokens = comparison.samples_per_s(best), comparison.tokens_per_sample
    tokens_per_s = samples_per_s * tokens if tokens else None
    rate = rate_in_words(samples_per_s, tokens_per_s)
    amount = amount_in_words(samples_per_s, tokens_per_s, comparison.gpus)
    label, doubt = "best", ""
    if not is_told_apart(best):
        label, doubt = "best ?", f"; not told apart from {comparison.baseline or _FIRST}"
    text = f"{best.title}: {rate}, {amount}; it fits, and trains the same{doubt}"
    yield from labelled(label, text)


def _row(change: Change) -> str:
    memory = signed_bytes(change.memory_bytes) if change.fits else "does not fit"
    share = f"{change.change:+.1%}" if abs(change.change) < _MOST_SHOWN else "..."
    return (
        f"{signed(change.change_s):>10}{share:>8}{interval_of(change):>21}{memory:>13}"
        f"  {verdict(change)}"
    )


def interval_of(change: Change) -> str:
    """The edges of a difference, in the unit of the wider one: `-0.276 to +12.8 ms`."""
    if signed(change.low_s) == signed(change.high_s):
        return "no interval"
    widest_s = max(abs(change.low_s), abs(change.high_s))
    unit = format_duration(widest_s).split()[1]
    low, high = (_signed_in(unit, edge_s, widest_s) for edge_s in (change.low_s, change.high_s))
    return f"{low} to {high} {unit}"


def _signed_in(unit: str, seconds: float, widest_s: float) -> str:
    """A difference with its sign; 0 where three digits of the wider edge do not show it."""
    if abs(seconds) < _NOTHING * widest_s:
        return "0"
    return f"{'-' if seconds < 0 else '+'}{long_duration_in(unit, abs(seconds))}"


def is_told_apart(change: Change) -> bool:
    """Whether a change differs from the baseline by more than its interval, and by enough."""
    return change.is_sure and abs(change.change) >= _SMALL


def verdict(change: Change) -> str:
    """A difference in a word or two."""
    if abs(change.change) < _SMALL:
        return "same"
    word = "faster" if change.change_s < 0 else "slower"
    return word if change.is_sure else f"{word}?"


def in_words(change: Change) -> str:
    """Says how much a change brings, and how sure that is."""
    low, high = signed(change.low_s), signed(change.high_s)
    sure = "" if change.is_sure else ", no more than what is uncertain about it"
    return f"{change.change:+.1%}, {low} to {high} for as many samples{sure}"


def signed(seconds: float) -> str:
    """A difference in time: `+1.250 ms`."""
    text = format_duration(abs(seconds))
    return text if seconds == 0 else f"{'-' if seconds < 0 else '+'}{text}"


def signed_bytes(size_bytes: int) -> str:
    """A difference in memory: `-97.5 MiB`."""
    if size_bytes == 0:
        return "0"
    return f"{'-' if size_bytes < 0 else '+'}{format_bytes(abs(size_bytes))}"


def _new_warnings(changes: Sequence[Change], first: Sequence[str]) -> Iterator[str]:
    """Warnings of options that the baseline lacks; alike but for numbers, they stand once."""
    of_first = {_without_numbers(warning) for warning in first}
    options: dict[str, list[Change]] = {}
    for change in changes:
        for warning in change.warnings:
            options.setdefault(_without_numbers(warning), []).append(change)
    for words, warning_of in options.items():
        if words not in of_first:
            text = next(w for w in warning_of[0].warnings if _without_numbers(w) == words)
            titles = "; ".join(change.title for change in warning_of)
            yield from warned([f"{titles}: {text}"])


def _without_numbers(warning: str) -> str:
    """The words of a warning, without figures and their units."""
    return re.sub(r"[\d.,]*\d( ?[kMGTun]?[Bs]\b)?", "", warning)


@as_text
def render_explanation(
    explanation: Explanation, file: str, settings: Sequence[str] = ()
) -> Iterator[str]:
    """The answer, the critical path, what the step hangs on, and what helps.

    `file` and `settings` name the scenario in the next commands.
    """
    result = explanation.result
    whole_s = sum(phase.length_s for phase in explanation.phases)
    yield f"{result.name[:70]}   {counted(result.world_size, 'rank')}"
    yield ""
    yield from labelled("step", format_duration(result.iteration_time_s.mean))
    yield from labelled("bottleneck", f"{result.bottleneck.kind}: {result.bottleneck.text}")
    yield from warned(result.warnings)
    yield ""
    yield "  The critical path of a median step: each part begins when the one before it ends."
    for phase in explanation.phases:
        share = phase.length_s / whole_s
        yield f"  {format_duration(phase.length_s):>11}{share:>7.1%}  {phase.text}"
    yield ""
    yield "  What the step hangs on: one input changed, all else equal, without jitter."
    for each in sorted(explanation.sensitivities, key=lambda s: s.change_s):
        row = f"  {signed(each.change_s):>11}{each.change:>+7.1%}  {each.what}"
        yield from wrap(row, screen_width(), subsequent_indent=" " * 22, break_on_hyphens=False)
    yield ""
    if not explanation.helps:
        yield from labelled("helps", "no single change of an option or a link brings 1% for sure")
    label = "helps"
    for change in explanation.helps:
        note = f" ({change.note})" if change.note else ""
        yield from labelled(label, f"{change.title}{note}: {in_words(change)}")
        yield from command(file, settings, change.settings)
        label = ""


_HOW_GOOD = (
    ": on recorded testbed runs the caps so taken cost at most 1% more than the best measured ones "
    "in 94% of the sweeps"
)
_MEASURE = "; measure the first few before a long run"


@as_text
def render_tuning(tuning: Tuning, file: str, settings: Sequence[str] = ()) -> Iterator[str]:
    """`file` and `settings` name the scenario in the next command."""
    pick, fastest = tuning.pick, tuning.fastest
    yield f"{tuning.name[:70]}   {counted(tuning.world_size, 'rank')}"
    yield ""
    step = format_duration(pick.step_s or 0.0)
    if pick.settings:
        yield from labelled("take", f"{pick.title}: {step} a step")
        yield from labelled("", in_words(pick))
    else:
        reason = f"nothing that was tried is {tuning.within:.1%} faster"
        yield from labelled("take", f"the options as they are: {step} a step; {reason}")
    if fastest.settings != pick.settings:
        why = f"within {tuning.within:.1%}, so the fewest changes win"
        yield from labelled("fastest", f"{fastest.title}: {in_words(fastest)}; {why}")
    if tuning.flat_caps:
        flat = f"bucket_cap_mb within {tuning.within:.1%} of the fastest"
        yield from labelled("flat", f"{flat}: {', '.join(tuning.flat_caps)}")
    yield from noted_noise(tuning.noise)
    yield from labelled("regret", "; ".join(_regrets(tuning)))
    unfit = f", {tuning.unfit:,} of which do not keep to the limits" if tuning.unfit else ""
    limits = "; ".join(tuning.constraints)
    yield from labelled("tried", f"{tuning.tried:,} combinations{unfit}; {limits}")
    yield from listed("impossible", by_text(tuning.refused))
    for warning in tuning.warnings:
        yield from labelled("!", warning)
    yield from labelled("trust", f"a prediction{_HOW_GOOD if tuning.flat_caps else ''}{_MEASURE}")
    yield from labelled("next", "the step with these options, its interval and what bounds it")
    yield from command(file, settings, pick.settings)


def _regrets(tuning: Tuning) -> Iterator[str]:
    if tuning.own_regret is None:
        yield "the scenario's own options do not keep to the limits"
    else:
        yield f"the scenario's own options take {tuning.own_regret:.1%} longer than the fastest"
    if tuning.default_regret is not None:
        longer = f"take {tuning.default_regret:.1%} longer"
        yield f"torch's default caps, with the other options of the fastest, {longer}"
