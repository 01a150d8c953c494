"""What files say of a job, as text on one screen."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from ddpsim.report.lines import as_text, listed
from ddpsim.result.learned import Learned
from ddpsim.units import format_duration

_SAME = 1.1  # of steps that two files or programs tell of one job


@as_text
def render_learned(
    learned: Sequence[Learned], assumed: Sequence[str], scenario: str | None
) -> Iterator[str]:
    """Each file with what it says; what was assumed; and what to run next.

    `scenario`: the file that was written, if any.
    """
    for each in learned:
        yield f"{each.file}   {each.kind}"
        yield from listed("", each.facts)
        yield ""
    yield from listed("assumed", assumed)
    yield from _next(learned, scenario)


def _next(learned: Sequence[Learned], scenario: str | None) -> Iterator[str]:
    if scenario is None:
        files = " ".join(dict.fromkeys(shlex.quote(each.file) for each in learned))
        yield f"{'next':<12}ddpsim import {files} -o scenario.yaml"
        return
    file = shlex.quote(scenario)
    yield f"{'next':<12}ddpsim run {file}"
    steps_s = [each.step_s for each in learned if each.step_s]
    differ = bool(steps_s) and max(steps_s) > _SAME * min(steps_s)
    if differ:
        times = ", ".join(dict.fromkeys(map(format_duration, steps_s)))
        yield f"{'':<12}steps differ ({times}): choose the job's own"
    step_s = steps_s[0] if steps_s and not differ else None
    inputs = [each for each in learned if each.option]
    # where steps differ, or only NCCL's log is there, the user fills in the step's time
    measured = format_duration(step_s) if step_s else "STEP TIME"
    has_step = not steps_s and any(each.option == "--traces" for each in inputs)
    options = [] if has_step else [f"--measured {shlex.quote(measured)}"]
    options += [f"{each.option} {shlex.quote(each.file)}" for each in inputs]
    if steps_s or inputs:
        yield f"{'':<12}ddpsim diagnose {file} {' '.join(options)}"
