"""Calm steps of many jobs, simulated together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ddpsim.engine.request import Request
from ddpsim.errors import DdpsimError
from ddpsim.prediction.job import Job, Stretching, stretching

__all__ = ["CalmStep", "simulate_calm_steps"]

CalmStep = tuple[Job, Mapping[str, float]]  # a job, and factors as `Job.step_s` takes them


def simulate_calm_steps(
    asked: Iterable[CalmStep], advance: Callable[[float], None] = lambda _: None
) -> None:
    """Have each job know its step with the factors, in seconds: as `Job.step_s` gives it.

    `advance` hears what share of the work has ended.

    Left out are those of ranks that differ for good, which `Job.step_s` has a shortcut for, and all
    of them where one cannot be simulated: who asks for that one hears why.
    """
    from ddpsim.engine.batch import run_many  # noqa: PLC0415 -- numpy is slow to import

    try:
        unknown = _unknown(asked)
        requests = [request for _, _, request in unknown]
        steps = run_many(requests, lambda ended: advance(ended / max(1, len(requests))))
    except DdpsimError:
        return
    for (job, factors, _), step in zip(unknown, steps, strict=True):
        job.known_steps_s[factors] = step.mean_s


def _unknown(
    asked: Iterable[CalmStep],
) -> list[tuple[Job, Stretching, Request]]:
    """Each once, and not those that a job knows."""
    wanted = {(id(job), stretching(factors)): job for job, factors in asked}
    found = [
        (job, factors, job.calm_request(**dict(factors)))
        for (_, factors), job in wanted.items()
        if factors not in job.known_steps_s
    ]
    return [each for each in found if each[2].sums is None]
