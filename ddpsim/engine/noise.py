"""Seeded slowdowns of compute: constant per rank (stragglers), and per iteration (jitter)."""

from __future__ import annotations

from collections.abc import Sequence

from ddpsim.scenario.schema import Cluster, Run

__all__ = ["Slowdowns", "draw_slowdowns"]

Slowdowns = Sequence[Sequence[float]]


def draw_slowdowns(cluster: Cluster, run: Run, iterations: int) -> Slowdowns | None:
    """Time multipliers [rank][iteration]; None when every rank and iteration is alike.

    Stragglers and jitter draw from streams of their own, so that turning one on or off does not
    change the other.
    """
    if cluster.stragglers is None and run.jitter is None:
        return None
    import numpy as np  # noqa: PLC0415 -- slow to import, and needed only here

    for_stragglers, for_jitter = np.random.SeedSequence(run.seed).spawn(2)
    factors = np.ones((cluster.world_size, iterations))
    if cluster.stragglers and cluster.stragglers.sigma:
        draws = np.random.default_rng(for_stragglers).standard_normal(cluster.world_size)
        factors *= np.exp(cluster.stragglers.sigma * draws)[:, None]
    for rank, factor in ((cluster.stragglers and cluster.stragglers.factors) or {}).items():
        factors[rank] *= factor
    if run.jitter:
        draws = np.random.default_rng(for_jitter).standard_normal(factors.shape)
        factors *= np.exp(run.jitter.sigma * draws)
    rows: list[list[float]] = factors.tolist()
    return rows
