"""Simulate many scenarios at once, for sweeps and for the spread over seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf

from ddpsim.engine.batch import run_many
from ddpsim.engine.least import least_step_s
from ddpsim.errors import DdpsimError, ScenarioError
from ddpsim.prediction.job import Job
from ddpsim.prediction.parts import Parts
from ddpsim.prediction.resolve import resolve
from ddpsim.result.model import Brief
from ddpsim.result.summary import SteadyStep
from ddpsim.scenario.schema import Scenario
from ddpsim.units import NS_PER_S

__all__ = ["attempt_many", "brief_of", "simulate_many"]

_BUILT = 0.25  # of the work for a scenario, about: its model and its network


def simulate_many(
    scenarios: Iterable[Scenario], advance: Callable[[float], None] = lambda _: None
) -> tuple[Brief, ...]:
    """The main figures of each scenario, as `simulate` gives them.

    What scenarios share is built once, and those that differ in numbers alone (seed, bandwidth,
    times; not buckets or ranks) are simulated together. Raises ScenarioError if a file that one
    of them names does not fit it. `advance` hears how many more have ended, or parts of one.
    """
    parts, jobs = Parts(), list[Job]()
    for scenario in scenarios:
        jobs.append(resolve(scenario, parts=parts))
        advance(_BUILT)
    return _briefs(jobs, parts, advance)


def attempt_many(
    scenarios: Iterable[Scenario],
    advance: Callable[[float], None] = lambda _: None,
    most_sample_s: float = inf,
) -> tuple[Brief | DdpsimError, ...]:
    """As `simulate_many`, with an error in place of each scenario that cannot be simulated.

    Where all of them take longer for a sample than `most_sample_s` none is simulated: their steps
    are the shortest that they could take.
    """
    parts, jobs = Parts(), list[Job | ScenarioError]()
    for scenario in scenarios:
        jobs.append(_job(scenario, parts))
        advance(_BUILT if isinstance(jobs[-1], Job) else 1)
    sound = [job for job in jobs if isinstance(job, Job)]
    if most_sample_s < inf and (least := _at_least(sound, parts, most_sample_s)):
        shortest = iter(least)
        advance(len(sound) * (1 - _BUILT))
        return tuple(next(shortest) if isinstance(job, Job) else job for job in jobs)
    try:
        briefs: Sequence[Brief | DdpsimError] = _briefs(sound, parts, advance)
    except DdpsimError:  # one of them: which?
        briefs = [_alone(job, parts) for job in sound]
    ended = iter(briefs)
    return tuple(next(ended) if isinstance(job, Job) else job for job in jobs)


def _job(scenario: Scenario, parts: Parts) -> Job | ScenarioError:
    try:
        return resolve(scenario, parts=parts)
    except ScenarioError as error:
        return error


def _at_least(jobs: Sequence[Job], parts: Parts, most_sample_s: float) -> list[Brief]:
    """The shortest steps that jobs could take; none where some may take `most_sample_s` or less."""
    found = []
    for job in jobs:
        least_s = least_step_s(job.request())
        if least_s <= most_sample_s * job.samples_per_rank * job.scenario.cluster.world_size:
            return []
        found.append(_brief(job, SteadyStep([round(least_s * NS_PER_S)], 0, 0), parts))
    return found


def brief_of(job: Job, parts: Parts) -> Brief:
    """The main figures of one job; `parts` are shared with other jobs."""
    return _briefs([job], parts)[0]


def _alone(job: Job, parts: Parts) -> Brief | DdpsimError:
    try:
        return brief_of(job, parts)
    except DdpsimError as error:
        return error


def _briefs(
    jobs: Sequence[Job], parts: Parts, advance: Callable[[float], None] = lambda _: None
) -> tuple[Brief, ...]:
    steps = run_many([job.request() for job in jobs], lambda part: advance((1 - _BUILT) * part))
    return tuple(_brief(job, step, parts) for job, step in zip(jobs, steps, strict=True))


def _brief(job: Job, step: SteadyStep, parts: Parts) -> Brief:
    ranks, compute_only_s = job.scenario.cluster.world_size, parts.compute_only_s(job)
    return step.brief(job.samples_per_rank, ranks, compute_only_s, parts.memory(job))
