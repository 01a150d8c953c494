"""Many scenarios at once, for sweeps and for the spread over seeds."""

from __future__ import annotations

from collections.abc import Iterable

from ddpsim.engine.many import run_many
from ddpsim.job import Parts, resolve
from ddpsim.result.model import Brief
from ddpsim.scenario.schema import Scenario

__all__ = ["simulate_many"]


def simulate_many(scenarios: Iterable[Scenario]) -> tuple[Brief, ...]:
    """The figures of each scenario's step, as `simulate` gives them, without its story.

    What scenarios share is built once, and those that differ in numbers alone (seed, bandwidth,
    times; not buckets or ranks) are simulated together. Raises ScenarioError if a file that one
    of them names does not fit it.
    """
    parts = Parts()
    jobs = [resolve(scenario, parts=parts) for scenario in scenarios]
    steps = run_many([job.request() for job in jobs])
    return tuple(
        step.brief(job.samples_per_rank, job.scenario.cluster.world_size, parts.compute_only_s(job))
        for job, step in zip(jobs, steps, strict=True)
    )
