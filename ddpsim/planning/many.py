"""Simulate many scenarios at once, for sweeps and for the spread over seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import floor, inf

from ddpsim.errors import DdpsimError, attempted
from ddpsim.prediction.api import scenario_of
from ddpsim.prediction.job import Job
from ddpsim.prediction.parts import Parts
from ddpsim.prediction.resolve import resolve
from ddpsim.result.model import Brief
from ddpsim.result.summary import SteadyStep
from ddpsim.scenario.document import Source
from ddpsim.scenario.schema import Scenario
from ddpsim.units import NS_PER_S

_BUILT = 0.25  # of the work for a scenario, about: its model and its network


def simulate_many(
    scenarios: Iterable[Source], advance: Callable[[float], None] = lambda _: None
) -> tuple[Brief, ...]:
    """The main figures of each scenario (or its file, or mapping), as `simulate` gives them.

    What scenarios share is built once, and those that differ in numbers alone (seed, bandwidth,
    times; not buckets or ranks) are simulated together. Raises ScenarioError if a file that one
    of them names does not fit it. `advance` hears how many more have ended, or parts of one.
    """
    parts, jobs = Parts(), list[Job]()
    for scenario in scenarios:
        jobs.append(resolve(scenario_of(scenario), parts=parts))
        advance(_BUILT)
    return _briefs(jobs, parts, advance)


@dataclass(frozen=True)
class AtLeast:
    """A scenario that was not simulated; `brief` has the lower bound of its step."""

    brief: Brief


@dataclass
class Best:
    """The shortest time per sample so far, of jobs that fit; others may take `within` longer."""

    fits: Callable[[Brief], bool]
    within: float
    sample_s: float = inf

    def hear(self, brief: Brief) -> None:
        """Take the time of one more job, if it fits."""
        if self.fits(brief):
            self.sample_s = min(self.sample_s, 1 / brief.throughput_samples_per_s)

    def is_out_of_reach(self, least: Brief) -> bool:
        """Whether a job with this lower bound cannot be among the best."""
        most_s = self.sample_s * (1 + self.within)
        return not self.fits(least) or 1 / least.throughput_samples_per_s > most_s


def attempt_many(
    scenarios: Iterable[Scenario],
    advance: Callable[[float], None] = lambda _: None,
    best: Best | None = None,
) -> tuple[Brief | AtLeast | DdpsimError, ...]:
    """Does what `simulate_many` does, with an error in place of each scenario that it refuses.

    With `best`, scenarios are simulated in the order of their lower bounds, and left out once their
    bound cannot be among the best.
    """
    parts, jobs = Parts(), list[Job | DdpsimError]()
    for scenario in scenarios:
        jobs.append(attempted(resolve, scenario, parts=parts))
        advance(_BUILT if isinstance(jobs[-1], Job) else 1)
    sound = [job for job in jobs if isinstance(job, Job)]
    ended = iter(
        _all(sound, parts, advance) if best is None else _best(sound, parts, advance, best)
    )
    return tuple(next(ended) if isinstance(job, Job) else job for job in jobs)


def _all(
    jobs: Sequence[Job], parts: Parts, advance: Callable[[float], None]
) -> Sequence[Brief | DdpsimError]:
    try:
        return _briefs(jobs, parts, advance)
    except DdpsimError:  # one of them: which?
        return [attempted(brief_of, job, parts) for job in jobs]


def _best(
    jobs: Sequence[Job], parts: Parts, advance: Callable[[float], None], best: Best
) -> Sequence[Brief | AtLeast | DdpsimError]:
    """Simulate ever more jobs at once; those that cannot beat the best so far are left out."""
    least = [_least(job, parts) for job in jobs]
    outcomes: dict[int, Brief | AtLeast | DdpsimError] = {}
    left = sorted(range(len(jobs)), key=lambda i: -least[i].throughput_samples_per_s)
    many = 1
    while left:
        at_once, left = _equal(left, least, many)
        some = [i for i in at_once if not best.is_out_of_reach(least[i])]
        outcomes |= {i: AtLeast(least[i]) for i in at_once}
        advance((len(at_once) - len(some)) * (1 - _BUILT))
        for i, outcome in zip(some, _all([jobs[i] for i in some], parts, advance), strict=True):
            outcomes[i] = outcome
            if isinstance(outcome, Brief):
                best.hear(outcome)
        many *= 2
    return [outcomes[i] for i in range(len(jobs))]


def _equal(places: list[int], least: Sequence[Brief], many: int) -> tuple[list[int], list[int]]:
    """The first `many` places, with all whose bound equals the last one's, and the other places.

    Equal jobs that are simulated together take one simulation.
    """
    while many < len(places) and least[places[many]] == least[places[many - 1]]:
        many += 1
    return places[:many], places[many:]


def _least(job: Job, parts: Parts) -> Brief:
    """The lower bound of a job's step, with its memory, and without its scaling."""
    from ddpsim.engine.least import least_step_s  # noqa: PLC0415 -- numpy, which steps do without

    least_ns = max(1, floor(least_step_s(job.request()) * NS_PER_S))
    ranks, memory = job.scenario.cluster.world_size, parts.memory(job)
    return SteadyStep([least_ns], 0, 0).brief(job.scenario.samples_per_rank, ranks, 0.0, memory)


def brief_of(job: Job, parts: Parts) -> Brief:
    """The main figures of one job; `parts` are shared with other jobs."""
    return _briefs([job], parts)[0]


def _briefs(
    jobs: Sequence[Job], parts: Parts, advance: Callable[[float], None] = lambda _: None
) -> tuple[Brief, ...]:
    from ddpsim.engine.batch import run_many  # noqa: PLC0415 -- numpy, which steps do without

    steps = run_many([job.request() for job in jobs], lambda part: advance((1 - _BUILT) * part))
    return tuple(
        step.brief(
            *(job.scenario.samples_per_rank, job.scenario.cluster.world_size),
            *(job.compute_only_s(), parts.memory(job)),
        )
        for job, step in zip(jobs, steps, strict=True)
    )
