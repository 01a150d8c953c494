"""A search for options as text: the ones to take, what they bring, what is as good."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddpsim.report.changes import in_words
from ddpsim.report.lines import as_text, by_text, command, labelled, listed, noted_noise
from ddpsim.result.tuning import Tuning
from ddpsim.units import format_duration
from ddpsim.wording import counted

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
        yield f"torch's default caps and the other options {tuning.default_regret:.1%} longer"
