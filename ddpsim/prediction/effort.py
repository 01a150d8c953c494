"""The time and memory of an answer, to be announced before a long one begins."""

from __future__ import annotations

from ddpsim.prediction.job import Job
from ddpsim.units import format_bytes, format_duration

_LONG_S, _MUCH_BYTES = 5.0, 500e6  # from here on an answer is announced
# fits of a few long jobs on one core of an AMD EPYC: within a factor of two
_STEPS, _PERIODS = 12, 8  # that an answer simulates, of all its variants
_COMPILED_S, _COMPILED_BYTES = 100e-6, 6_000  # an instruction of a step, over all variants
_OF_ONE_RANK_S = 0.5e-6  # an instruction, each time it is evaluated
_OF_PART_S, _OF_RANK_S = 40e-6, 0.012e-6  # works that follow each other in arrays; each of a rank
_LASTING = 0.2  # of that where ranks differ for good
_BYTES, _RANK_BYTES = 60e6, 5_000


def long_answer(job: Job) -> str | None:
    """Says about how much time and memory an answer takes; None where that is little."""
    request = job.request()
    program, ranks = request.program, request.plan.period
    longest = max(len(step.launched) for step in program.kinds)
    is_alone = ranks == 1 and request.is_calm
    parts = max(len(step.parts) for step in program.kinds)
    rank_s = _OF_RANK_S * (1 if request.varies else _LASTING)
    of_ranks_s = parts * _OF_PART_S + longest * ranks * rank_s
    step_s = longest * _OF_ONE_RANK_S if is_alone else of_ranks_s
    evaluated = _STEPS + _PERIODS * program.strategy.period
    needs_s = longest * _COMPILED_S + evaluated * step_s
    needs_bytes = _BYTES + longest * _COMPILED_BYTES + request.varies * ranks * _RANK_BYTES
    if needs_s < _LONG_S and needs_bytes < _MUCH_BYTES:
        return None
    needs = f"about {format_duration(needs_s)} of one core and {format_bytes(round(needs_bytes))}"
    steps = f"steps of {longest:,} instructions on {ranks:,} ranks"
    return f"this takes {needs} of memory: {steps}"
