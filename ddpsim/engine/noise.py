"""Seeded slowdowns of compute: constant per rank (stragglers), and per iteration (jitter)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

from ddpsim.scenario.cluster import Cluster
from ddpsim.scenario.run import Run
from ddpsim.units import to_ns

if TYPE_CHECKING:
    from numpy import float64, int64
    from numpy.random import Generator
    from numpy.typing import NDArray

# a rank's share of its speed beside gloo: measured over so many bytes, whose next are nearly as if
# drawn anew (correlation 0.5 8 MB later, 0.2 to 0.4 32 MB later; two Xeon cores, 3 and 5 Gbit/s)
BURST_BYTES = 48 * 2**20

KeptDeviations: TypeAlias = "NDArray[float64]"
Slowdowns: TypeAlias = "NDArray[float64]"
Stalls: TypeAlias = "NDArray[int64]"


def draw_slowdowns(
    cluster: Cluster,
    run: Run,
    iterations: int,
    observed_s: Sequence[Sequence[float]] = (),
    node_times: Mapping[int, float] = MappingProxyType({}),
    warmup: int = 0,
) -> Slowdowns | None:
    """Time multipliers [rank][iteration]; None when every rank and iteration is alike.

    `warmup`: so many iterations more come first, which do not vary: so what is drawn for a steady
    step does not depend on how many others come before it.
    `node_times`: how many times as long a node's devices compute, of nodes unlike the others.
    `observed_s`: iterations as measured, [iteration][rank], whose spread is drawn from where the
    run states no jitter. Stragglers and jitter draw from streams of their own, so that turning one
    on or off does not change the other.
    """
    is_uneven = cluster.stragglers is not None or bool(node_times)
    if not is_uneven and not steps_vary(run, observed_s):
        return None
    import numpy as np  # noqa: PLC0415 -- slow to import, and needed only here

    for_jitter = np.random.SeedSequence(run.seed).spawn(2)[1]
    factors = np.ones((cluster.world_size, warmup + iterations))
    steady = factors[:, warmup:]
    if is_uneven:
        factors *= lasting_factors(cluster, run.seed, node_times).reshape(-1, 1)
    if run.jitter:
        draws = np.random.default_rng(for_jitter).standard_normal(steady.shape)
        steady *= np.exp(run.jitter.sigma * draws)
    elif observed_s:
        steady *= _resampled(np.array(observed_s), np.random.default_rng(for_jitter), *steady.shape)
    return factors


def vary(slowdowns: Slowdowns | None, stalls: Stalls | None) -> bool:
    """Whether what was drawn makes one step unlike another; what lasts for good does not."""
    if stalls is not None:
        return True
    return slowdowns is not None and bool((slowdowns != slowdowns[:, :1]).any())


def steps_vary(run: Run, observed_s: Sequence[Sequence[float]]) -> bool:
    """Whether the run draws each step anew: by its jitter, or else from measured iterations."""
    return bool(observed_s) if run.jitter is None else run.jitter.sigma > 0


def rank_factors(
    cluster: Cluster, seed: int, node_times: Mapping[int, float] = MappingProxyType({})
) -> dict[int, float]:
    """Each rank's own time multiplier, for the whole run; empty where none differs."""
    if cluster.stragglers is None and not node_times:
        return {}
    return dict(enumerate(lasting_factors(cluster, seed, node_times).tolist()))


def lasting_factors(
    cluster: Cluster, seed: int, node_times: Mapping[int, float] = MappingProxyType({})
) -> NDArray[float64]:
    """Each rank's own time multiplier, for the whole run, [ranks]; ones where none differs."""
    import numpy as np  # noqa: PLC0415 -- see above

    stragglers = cluster.stragglers
    factors = np.ones(cluster.world_size)
    for node, times in node_times.items():
        factors[cluster.ranks_of(node)] = times
    if stragglers and stragglers.sigma:
        stream = np.random.SeedSequence(seed).spawn(2)[0]
        draws = np.random.default_rng(stream).standard_normal(cluster.world_size)
        return np.asarray(factors * np.exp(stragglers.sigma * draws))
    for rank, times in ((stragglers and stragglers.factors) or {}).items():
        factors[rank] *= times
    return factors


def draw_stalls(run: Run, ranks: int, iterations: int, warmup: int = 0) -> Stalls | None:
    """Ticks for which each rank stands still in each iteration, [rank][iteration]; None: never.

    `warmup`: so many iterations more come first, without any.
    """
    if run.stalls is None:
        return None
    import numpy as np  # noqa: PLC0415 -- see above

    draw = np.random.default_rng(np.random.SeedSequence(run.seed).spawn(3)[2])
    stalls = draw.random((ranks, iterations)) < run.stalls.probability
    drawn = np.zeros((ranks, warmup + iterations), dtype=np.int64)
    drawn[:, warmup:] = stalls * to_ns(run.stalls.duration_s)
    return drawn


def draw_kept_deviations(
    seed: int, ranks: int, iterations: int, sent_bytes: int, warmup: int = 0
) -> KeptDeviations:
    """How unevenly ranks fare beside transfers, in standard deviations, [rank][iteration][burst].

    Of `sent_bytes` an iteration each `BURST_BYTES` are a burst, and what is left is one. For each
    rank the normal distribution's quantiles in an order of its own, so that in few iterations too
    the good ones and the bad ones cancel. `warmup`: so many iterations more come first, without.
    """
    from statistics import NormalDist  # noqa: PLC0415 -- slow to import too

    import numpy as np  # noqa: PLC0415 -- see above

    draw, normal = np.random.default_rng(np.random.SeedSequence(seed).spawn(4)[3]), NormalDist()
    bursts = 1 + sent_bytes // BURST_BYTES
    count = iterations * bursts
    quantiles = [normal.inv_cdf((i + 0.5) / count) for i in range(count)]
    drawn = np.array([draw.permutation(quantiles) for _ in range(ranks)])
    deviations = np.zeros((ranks, warmup + iterations, bursts))
    deviations[:, warmup:] = drawn.reshape(ranks, iterations, bursts)
    return deviations


def _resampled(
    observed_s: NDArray[float64], draw: Generator, ranks: int, iterations: int
) -> NDArray[float64]:
    """Multipliers [rank][iteration] from measured times, none twice before all were drawn.

    Where every rank was measured, an iteration is drawn for all of them at once: what slows ranks
    together stays together, and a slow rank stays slow. Otherwise each rank draws for itself,
    from all that were measured, each relative to its median.
    """
    import numpy as np  # noqa: PLC0415 -- see above

    medians_s = np.median(observed_s, axis=0)

    def order(count: int) -> NDArray[np.int64]:
        rounds = -(-iterations // count)
        return np.concatenate([draw.permutation(count) for _ in range(rounds)])[:iterations]

    if observed_s.shape[1] == ranks:
        return np.asarray((observed_s / medians_s.mean())[order(len(observed_s))].T)
    pool = (observed_s / medians_s).ravel()
    return np.array([pool[order(len(pool))] for _ in range(ranks)])
