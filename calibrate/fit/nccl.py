"""NCCL's all-reduce: how many regimes there are, and their figures, from measured times.

One node and several nodes have regimes of their own: NCCL takes other paths and other channels
(docs/explanation/profiles.md). The number of regimes, and how many of them are trees, is what has
the least Bayesian information criterion, so that a regime must earn its parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np

from calibrate.fit.nccl_regimes import (
    Floats,
    RegimeGroup,
    RegimeKind,
    Shape,
    Starts,
    kind_of,
    optional_places,
    parts_of,
    residuals_of,
    scale_of,
    times_of_kind_s,
)
from calibrate.fit.samples import Fit, FitError, Sample, fitted_sigma, valid_range
from calibrate.fit.solve import Solution, polish, robust_cost, solve
from ddpsim.importers.profiles.cluster import NcclRegime, NcclRegimes

__all__ = ["fit_nccl"]

_SHAPES: tuple[Shape, Shape] = ("tree", "ring")
LEAST_SIZES = 5  # of messages, a layout
_MOST_REGIMES = 5
_WORTH = 6.0  # of the criterion: less is no strong evidence (Kass and Raftery, 1995)
_SAME = 0.01  # relative errors below this earn nothing: logs repeat no better
_LEAST_WINS = 2  # samples for which a regime is the fastest


def fit_nccl(samples: Sequence[Sample]) -> Fit:
    """Regimes of NCCL's all-reduce; raises FitError where no layout has enough sizes."""
    samples, warnings = _with_enough_sizes(sorted(samples))
    parts = [
        tuple(sample for sample in samples if (sample.nodes > 1) == over_nodes)
        for over_nodes in (False, True)
    ]
    fits = [_fit_group(part) for part in parts if part]
    regimes = [regime.model_dump() for fit in fits for regime in fit.regimes]
    model = NcclRegimes.model_validate({"regimes": regimes})
    return Fit(
        model=model,
        sigma=fitted_sigma(model, samples),
        valid=valid_range(samples),
        warnings=(*warnings, *(line for fit in fits for line in fit.warnings)),
        correlations={pair: value for fit in fits for pair, value in fit.correlations.items()},
    )


def _with_enough_sizes(samples: Sequence[Sample]) -> tuple[list[Sample], list[str]]:
    """Those of layouts with enough message sizes, and what is said of the others.

    Raises FitError where none has enough.
    """
    sizes: dict[tuple[int, int], set[int]] = {}
    for sample in samples:
        sizes.setdefault((sample.nodes, sample.gpus_per_node), set()).add(sample.size_bytes)
    few = {layout: len(found) for layout, found in sizes.items() if len(found) < LEAST_SIZES}
    said = [
        f"message sizes on {nodes} x {gpus} ranks are too few ({count}): measure {LEAST_SIZES} or "
        "more, from a few kB to the largest bucket"
        for (nodes, gpus), count in few.items()
    ]
    if len(few) == len(sizes) > 0:
        raise FitError(said[0])
    kept = [sample for sample in samples if (sample.nodes, sample.gpus_per_node) not in few]
    return kept, [f"{line}; these do not count" for line in said]


@dataclass(frozen=True)
class _GroupFit:
    """The regimes of a group, the fastest for small messages first."""

    regimes: tuple[NcclRegime, ...]
    warnings: tuple[str, ...]
    correlations: dict[tuple[str, str], float]


@dataclass(frozen=True)
class _Candidate:
    """A number of regimes and of trees among them, fitted."""

    kinds: tuple[RegimeKind, ...]
    values: Floats
    criterion: float

    @property
    def trees(self) -> int:
        return sum(kind.shape == "tree" for kind in self.kinds)


@lru_cache(maxsize=64)
def _fit_group(samples: tuple[Sample, ...]) -> _GroupFit:
    """Logs of one node are fitted again beside those of several."""
    group = RegimeGroup.of(samples)
    candidates: list[_Candidate] = []
    starts = Starts(group)
    for count in range(1, _MOST_REGIMES + 1):
        candidates += [_fit_kinds(group, kinds, starts) for kinds in _choices(group, count)]
        best = min(candidates, key=lambda candidate: candidate.criterion)
        if len(best.kinds) < count - 1:
            break  # two regimes more have not helped
    return _described(group, _chosen(group, candidates))


def _choices(group: RegimeGroup, count: int) -> Iterator[tuple[RegimeKind, ...]]:
    """Trees for the smaller messages, rings for the larger; on one node both are a chain."""
    trees = count if len(group.layouts) > 1 and group.over_nodes else 0
    for small in range(trees + 1):
        tree, ring = (kind_of(group, shape) for shape in _SHAPES)
        yield (tree,) * small + (ring,) * (count - small)


def _chosen(group: RegimeGroup, candidates: Sequence[_Candidate]) -> _Candidate:
    """The least criterion; among the near, the fewest regimes, one tree (NCCL's for latency)."""
    least = min(candidate.criterion for candidate in candidates)
    near = [c for c in candidates if c.criterion < least + _WORTH]
    wanted = 1 if group.over_nodes else 0
    return min(near, key=lambda c: (len(c.kinds), abs(c.trees - wanted), c.criterion))


def _fit_kinds(group: RegimeGroup, kinds: tuple[RegimeKind, ...], starts: Starts) -> _Candidate:
    residuals, scale = residuals_of(group, kinds), scale_of(group, kinds)
    values = solve(residuals, starts.of(kinds), scale, optional_places(kinds))
    if not _each_wins(group, kinds, values):
        return _Candidate(kinds, values, np.inf)
    samples = len(group.times_s)
    spread = max(robust_cost(residuals(values)) / samples, _SAME**2)
    criterion = samples * np.log(spread) + len(values) * np.log(samples)
    return _Candidate(kinds, values, float(criterion))


def _each_wins(group: RegimeGroup, kinds: tuple[RegimeKind, ...], values: Floats) -> bool:
    """Whether every regime is the fastest somewhere: one sample alone is no regime."""
    if len(kinds) == 1:
        return True
    times_s = [times_of_kind_s(group, kind, part) for kind, part in parts_of(kinds, values)]
    won = np.bincount(np.argmin(times_s, axis=0), minlength=len(kinds))
    return bool((won >= _LEAST_WINS).all())


def _described(group: RegimeGroup, chosen: _Candidate) -> _GroupFit:
    """Regimes in the order of the sizes that they win, with their errors and warnings."""
    kinds, scale = chosen.kinds, scale_of(group, chosen.kinds)
    ends = np.cumsum([len(kind.names) for kind in kinds])
    solution = polish(
        residuals_of(group, kinds), chosen.values, scale, optional_places(kinds), _SAME
    )
    values = np.where(solution.at_bound, 0.0, solution.values)
    values[ends - 2] = solution.values[ends - 2]  # a bandwidth divides by it
    parts = [slice(end - len(kind.names), end) for end, kind in zip(ends, kinds, strict=True)]

    def smallest_s(i: int) -> float:
        return float(times_of_kind_s(group, kinds[i], values[parts[i]])[0])

    order = sorted(range(len(kinds)), key=smallest_s)
    names = [""] * len(values)
    for number, i in enumerate(order, 1):
        said = f"regime {number} on {group.name}"
        names[parts[i]] = [f"{said}: {_SAID[name]}" for name in kinds[i].names]
    regimes = tuple(kinds[i].regime(values[parts[i]], solution.stderr[parts[i]]) for i in order)
    warnings = (*_layout_warnings(group, kinds), *_figure_warnings(names, solution))
    return _GroupFit(regimes, warnings, _correlations(names, solution))


def _figure_warnings(names: Sequence[str], solution: Solution) -> Iterator[str]:
    for name, stderr, at_bound in zip(names, solution.stderr, solution.at_bound, strict=True):
        if at_bound and not name.endswith(_SAID["hop_bytes"]):  # where zero is the usual
            yield f"{name} is at its bound"
        elif not at_bound and np.isnan(stderr):
            yield f"not enough data for {name}"


_SAID = {
    "base_s": "base",
    "inter_hop_s": "hop between nodes",
    "intra_hop_s": "hop inside a node",
    "s_per_byte": "bandwidth",
    "hop_bytes": "bytes within a hop",
}


def _correlations(names: Sequence[str], solution: Solution) -> dict[tuple[str, str], float]:
    pairs = combinations(range(len(names)), 2)
    return {
        (names[i], names[j]): float(solution.correlation[i, j])
        for i, j in pairs
        if not np.isnan(solution.correlation[i, j])
    }


def _layout_warnings(group: RegimeGroup, kinds: Sequence[RegimeKind]) -> Iterator[str]:
    nodes = sorted({nodes for nodes, _ in group.layouts})
    gpus = sorted({gpus for _, gpus in group.layouts})
    if len(group.layouts) == 1:
        elsewhere = (
            "on others is assumed"
            if group.over_nodes
            else "is taken as it is inside a node, and assumed over nodes"
        )
        yield (
            f"one layout on {group.name} ({nodes[0]} x {gpus[0]}): hops cannot be separated from "
            f"the base, so its latency {elsewhere}"
        )
    elif group.over_nodes:
        if not any("intra_hop_s" in kind.latencies for kind in kinds):
            yield (
                "not enough data for hops inside a node: the layouts over several nodes differ in "
                "their nodes alone, and hops between nodes stand for both"
            )
        if len(nodes) == 2:
            yield (
                f"only {nodes[0]} and {nodes[1]} nodes were measured: which regimes are trees is "
                "assumed (the one for the smallest messages)"
            )
