"""What holds the others up, and what a step would take without it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any, Literal

from ddpsim.engine.batch import mean_steps_s
from ddpsim.engine.noise import lasting_factors
from ddpsim.prediction.job import Job
from ddpsim.prediction.resolve import resolve
from ddpsim.result.model import Straggler


def stragglers(job: Job) -> Iterator[Straggler]:
    """What holds other ranks up: each cause is taken away alone, in a step without noise."""
    cluster, whole_s = job.scenario.cluster, job.step_s()

    def cost_s(**changed: Any) -> float:
        without = job.scenario.having("cluster", **changed)
        return max(0.0, whole_s - resolve(without, parts=job.parts_for_another).step_s())

    others = cluster.other_nodes or {}
    for node, other in others.items():
        for text, keys in (
            (f"node {node}'s {other.device.name if other.device else ''}", ("device",)),
            (f"node {node}'s links", ("intra_node", "inter_node")),
        ):
            if any(getattr(other, key) for key in keys):
                usual = other.having(**dict.fromkeys(keys))
                kind: Literal["rank", "link"] = "rank" if keys == ("device",) else "link"
                yield Straggler(kind, text, cost_s(other_nodes=others | {node: usual}))
    if cluster.stragglers:
        together_s = cost_s(stragglers=None) if cluster.stragglers.sigma else 0.0
        yield from _slow_ranks(job, whole_s, together_s)
    for rank, part in (cluster.weak_links or {}).items():
        kept = {r: p for r, p in (cluster.weak_links or {}).items() if r != rank}
        text = f"the link to rank {rank}, with {part:.0%} of its bandwidth"
        yield Straggler("link", text, cost_s(weak_links=kept or None))


def _slow_ranks(job: Job, whole_s: float, together_s: float) -> Iterator[Straggler]:
    """What the slowest rank costs beside the median one, and what all that are drawn cost.

    `together_s`: what ranks of unequal speed cost beside equal ones; 0: none are drawn.
    """
    import numpy as np  # noqa: PLC0415 -- slow to import

    cluster, request = job.scenario.cluster, job.calm_request()
    factors = lasting_factors(cluster, job.scenario.run.seed)
    rank, middle = int(factors.argmax()), float(np.median(factors))
    if factors[rank] <= middle or request.sums is None or request.slowdowns is None:
        return
    of_node = [times for node, times in job.node_times.items() if rank in cluster.ranks_of(node)]
    sums = request.sums.changed(rank, prod([middle, *of_node]))
    slowdowns = sums.slowdowns(request.slowdowns.shape[1])
    (calm_s,) = mean_steps_s([replace(request, sums=sums, slowdowns=slowdowns)])
    times = f"{factors[rank] / middle:.2f} x the median's"
    yield Straggler("rank", f"rank {rank}, whose compute takes {times}", max(0.0, whole_s - calm_s))
    if together_s:
        text = f"ranks of unequal speed (rank {rank}'s compute takes {times})"
        yield Straggler("rank", text, together_s)
