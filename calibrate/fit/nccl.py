"""NCCL's all-reduce: how many regimes there are, and their figures, from measured times.

One node and several nodes have regimes of their own: NCCL takes other paths and other channels
(docs/model.md). The number of regimes, and how many of them are trees, is what has the least
Bayesian information criterion, so that a regime must earn its parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Literal

import numpy as np
import numpy.typing as npt

from calibrate.fit.samples import Fit, FitError, Sample, fitted_sigma, valid_range
from calibrate.fit.solve import (
    Residuals,
    Solution,
    nonnegative,
    polish,
    robust_cost,
    solve,
)
from ddpsim.cluster.fitted.laws import Columns, all_reduce_times_s
from ddpsim.importers.profiles.cluster import Fitted, NcclRegime, NcclRegimes

__all__ = ["fit_nccl"]

Floats = npt.NDArray[np.float64]
Shape = Literal["ring", "tree"]
_SHAPES: tuple[Shape, Shape] = ("tree", "ring")
LEAST_SIZES = 5  # of messages, a layout
_MOST_REGIMES = 5
_WORTH = 6.0  # of the criterion: less is no strong evidence (Kass and Raftery, 1995)
_SAME = 0.01  # relative errors below this earn nothing: logs repeat no better
_LEAST_WINS = 2  # samples for which a regime is the fastest
_BREAKS = 14  # sizes at which a start may change its regime
_STARTS = 4  # of the most promising are followed to their end
_REGIMES_KEPT = 64  # of the last evaluated: a step of a gradient changes one of them
_QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75)  # of the ranks' shares in a stretch


def fit_nccl(samples: Sequence[Sample]) -> Fit:
    """Regimes of NCCL's all-reduce; raises FitError where no layout has enough sizes."""
    samples, warnings = _with_enough_sizes(sorted(samples))
    groups = [
        _Group.of([sample for sample in samples if (sample.nodes > 1) == over_nodes])
        for over_nodes in (False, True)
        if any((sample.nodes > 1) == over_nodes for sample in samples)
    ]
    fits = [_fit_group(group) for group in groups]
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
class _Group:
    """Samples of one node, or of several nodes, as columns."""

    columns: Columns
    times_s: Floats
    root_weights: Floats
    layouts: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> _Group:
        layouts = tuple(sorted({(sample.nodes, sample.gpus_per_node) for sample in samples}))
        return cls(
            Columns.of([sample.point for sample in samples]),
            np.array([sample.time_s for sample in samples]),
            np.sqrt([sample.weight for sample in samples]),
            layouts,
        )

    @property
    def over_nodes(self) -> bool:
        return self.layouts[0][0] > 1

    @property
    def name(self) -> str:
        return "several nodes" if self.over_nodes else "one node"

    def residuals(self, predicted_s: Floats) -> Floats:
        return np.asarray(self.root_weights * np.log(predicted_s / self.times_s))

    def rows(self, chosen: npt.NDArray[np.bool_]) -> _Group:
        return _Group(
            Columns(*(column[chosen] for column in self.columns)),
            self.times_s[chosen],
            self.root_weights[chosen],
            self.layouts,
        )


@dataclass(frozen=True)
class _Kind:
    """What is free in a regime: its shape, and which of the latencies the layouts tell apart."""

    shape: Shape
    latencies: tuple[str, ...]
    over_nodes: bool

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.latencies, "s_per_byte", "hop_bytes")

    def regime(self, values: Floats, stderr: Floats | None = None) -> NcclRegime:
        """The regime with these figures: a bandwidth is fitted as the seconds of a byte."""
        errors = np.full(len(values), np.nan) if stderr is None else stderr
        figures = {
            name: _fitted(value, error)
            for name, value, error in zip(self.names, values, errors, strict=True)
        }
        s_per_byte = figures["s_per_byte"]
        bandwidth = _fitted(1 / s_per_byte.value, (s_per_byte.stderr or np.nan) / values[-2] ** 2)
        return NcclRegime.model_construct(
            shape=self.shape,
            base_s=figures["base_s"],
            intra_hop_s=figures.get("intra_hop_s", _NONE),
            inter_hop_s=figures.get("inter_hop_s", _NONE),
            hop_bytes=figures["hop_bytes"],
            intra_bandwidth_bytes_per_s=None if self.over_nodes else bandwidth,
            inter_bandwidth_bytes_per_s=bandwidth if self.over_nodes else None,
        )


_NONE = Fitted(value=0.0)


def _fitted(value: float, stderr: float) -> Fitted:
    error = None if np.isnan(stderr) else float(stderr)
    return Fitted.model_construct(value=float(value), stderr=error)


@dataclass(frozen=True)
class _GroupFit:
    """The regimes of a group, the fastest for small messages first."""

    regimes: tuple[NcclRegime, ...]
    warnings: tuple[str, ...]
    correlations: dict[tuple[str, str], float]


@dataclass(frozen=True)
class _Candidate:
    """A number of regimes and of trees among them, fitted."""

    kinds: tuple[_Kind, ...]
    values: Floats
    criterion: float

    @property
    def trees(self) -> int:
        return sum(kind.shape == "tree" for kind in self.kinds)


def _fit_group(group: _Group) -> _GroupFit:
    candidates: list[_Candidate] = []
    for count in range(1, _MOST_REGIMES + 1):
        candidates += [_fit_kinds(group, kinds) for kinds in _choices(group, count)]
        best = min(candidates, key=lambda candidate: candidate.criterion)
        if len(best.kinds) < count - 1:
            break  # two regimes more have not helped
    return _described(group, _chosen(group, candidates))


def _choices(group: _Group, count: int) -> Iterator[tuple[_Kind, ...]]:
    """Trees for the smaller messages, rings for the larger; on one node both are a chain."""
    trees = count if len(group.layouts) > 1 and group.over_nodes else 0
    for small in range(trees + 1):
        tree, ring = (_kind(group, shape) for shape in _SHAPES)
        yield (tree,) * small + (ring,) * (count - small)


def _chosen(group: _Group, candidates: Sequence[_Candidate]) -> _Candidate:
    """The least criterion; among the near, the fewest regimes, one tree (NCCL's for latency)."""
    least = min(candidate.criterion for candidate in candidates)
    near = [c for c in candidates if c.criterion < least + _WORTH]
    wanted = 1 if group.over_nodes else 0
    return min(near, key=lambda c: (len(c.kinds), abs(c.trees - wanted), c.criterion))


def _kind(group: _Group, shape: Shape) -> _Kind:
    """With the latencies that these layouts tell apart: columns that raise the design's rank."""
    wanted = ("base_s", "inter_hop_s", "intra_hop_s")
    kept: list[str] = []
    for name in wanted:
        kind = _Kind(shape, (*kept, name), group.over_nodes)
        design = _design(group, kind, 0.0)[:, : len(kept) + 1]
        if np.linalg.matrix_rank(design / np.maximum(design.max(axis=0), 1e-30)) > len(kept):
            kept.append(name)
    return _Kind(shape, tuple(kept), group.over_nodes)


def _design(group: _Group, kind: _Kind, hop_bytes: float) -> Floats:
    """Seconds that a unit of each latency, and of the seconds of a byte, adds to each time."""
    columns = []
    for i in range(len(kind.latencies) + 1):
        values = np.append(np.zeros(len(kind.latencies) + 1), hop_bytes)
        values[-2] = 1e-30  # its inverse is a bandwidth
        values[i] = 1.0
        columns.append(_times_s(group, kind, values))
    design = np.array(columns).T
    return np.where(design < 1e-12, 0.0, design)  # from the seconds of a byte that are not there


def _fit_kinds(group: _Group, kinds: tuple[_Kind, ...]) -> _Candidate:
    residuals, scale = _residuals(group, kinds), _scale(group, kinds)
    values = solve(residuals, _starts(group, kinds), scale, _optional(kinds))
    if not _each_wins(group, kinds, values):
        return _Candidate(kinds, values, np.inf)
    samples = len(group.times_s)
    spread = max(robust_cost(residuals(values)) / samples, _SAME**2)
    criterion = samples * np.log(spread) + len(values) * np.log(samples)
    return _Candidate(kinds, values, float(criterion))


def _each_wins(group: _Group, kinds: tuple[_Kind, ...], values: Floats) -> bool:
    """Whether every regime is the fastest somewhere: one sample alone is no regime."""
    if len(kinds) == 1:
        return True
    times_s = [_times_s(group, kind, part) for kind, part in _parts(kinds, values)]
    won = np.bincount(np.argmin(times_s, axis=0), minlength=len(kinds))
    return bool((won >= _LEAST_WINS).all())


def _optional(kinds: Sequence[_Kind]) -> list[int]:
    """Where the parameters have their hop_bytes."""
    return [int(end) - 1 for end in np.cumsum([len(kind.names) for kind in kinds])]


def _residuals(group: _Group, kinds: tuple[_Kind, ...]) -> Residuals:
    @lru_cache(maxsize=_REGIMES_KEPT)
    def times_s(kind: _Kind, figures: bytes) -> Floats:
        return _times_s(group, kind, np.frombuffer(figures))

    def residuals(values: Floats) -> Floats:
        each_s = [times_s(kind, part.tobytes()) for kind, part in _parts(kinds, values)]
        return group.residuals(np.min(each_s, axis=0))

    return residuals


def _parts(kinds: Sequence[_Kind], values: Floats) -> Iterator[tuple[_Kind, Floats]]:
    """Each regime's figures."""
    ends = np.cumsum([len(kind.names) for kind in kinds])
    return zip(kinds, np.split(values, ends[:-1]), strict=True)


def _times_s(group: _Group, kind: _Kind, values: Floats) -> Floats:
    """Of the whole group by one regime."""
    model = NcclRegimes.model_construct(regimes=(kind.regime(values),))
    return all_reduce_times_s(model, group.columns)


def _scale(group: _Group, kinds: Sequence[_Kind]) -> Floats:
    """Where a parameter alone makes the median time; for hop_bytes, the median share."""
    parts: list[Floats] = []
    for kind in kinds:
        median = np.maximum(np.median(_design(group, kind, 0.0), axis=0), 1e-30)
        linear = np.median(group.times_s) / median
        parts.append(np.append(linear, np.median(_shares(group, kind.shape))))
    return np.concatenate(parts)


def _shares(group: _Group, shape: str) -> Floats:
    ranks = group.columns.ranks if shape == "ring" else 1.0
    return np.asarray(group.columns.size_bytes / ranks)


def _starts(group: _Group, kinds: tuple[_Kind, ...]) -> list[Floats]:
    """Sizes cut into one stretch a regime, each fitted alone: the most promising of all cuts.

    Once without hop_bytes and once with: the two ends are apart, with nothing downhill between.
    """
    chosen = []
    for quantiles in ((), _QUANTILES):
        # of those that differ by rounding alone, one
        found = {
            (round(cost, 9), *(f"{value:.6g}" for value in values)): values
            for cost, values in _cut_fits(group, kinds, quantiles)
        }
        chosen += [np.array(found[key]) for key in sorted(found)[:_STARTS]]
    return chosen


def _cut_fits(
    group: _Group, kinds: tuple[_Kind, ...], quantiles: Sequence[float]
) -> Iterator[tuple[float, tuple[float, ...]]]:
    """The cost and the figures of every cut."""
    for shape in {"tree", kinds[-1].shape}:
        key = _shares(group, shape)
        grid = np.unique(key)
        wanted = min(_BREAKS, len(grid) - 1)
        breaks = np.unique(np.linspace(1, len(grid) - 1, wanted).round().astype(int)).tolist()
        stretches = _Stretches(group, key, grid, quantiles)
        for cuts in combinations(breaks, len(kinds) - 1):
            edges = (0, *cuts, len(grid))
            parts = [stretches.fit(kind, *edges[k : k + 2]) for k, kind in enumerate(kinds)]
            predicted_s = np.min([times_s for _, times_s in parts], axis=0)
            values = np.concatenate([values for values, _ in parts])
            yield robust_cost(group.residuals(predicted_s)), tuple(values.tolist())


class _Stretches:
    """Stretches of sizes, each fitted by one regime; kept, as many cuts share them."""

    def __init__(
        self, group: _Group, key: Floats, grid: Floats, quantiles: Sequence[float]
    ) -> None:
        self._group, self._key, self._grid, self._quantiles = group, key, grid, quantiles
        self._known: dict[tuple[_Kind, int, int], tuple[Floats, Floats]] = {}

    def fit(self, kind: _Kind, low: int, high: int) -> tuple[Floats, Floats]:
        """The figures of one regime, and the times it predicts for the whole group."""
        known = (kind, low, high)
        if known not in self._known:
            chosen = (self._key >= self._grid[low]) & (self._key <= self._grid[high - 1])
            values = _linear_fit(self._group.rows(chosen), kind, self._quantiles)
            self._known[known] = values, _times_s(self._group, kind, values)
        return self._known[known]


def _linear_fit(group: _Group, kind: _Kind, quantiles: Sequence[float]) -> Floats:
    """Least squares of the relative error; hop_bytes is 0, or the best of the shares' quantiles."""
    found = []
    shares = _shares(group, kind.shape)
    for hop_bytes in np.quantile(shares, quantiles) if quantiles else (0.0,):
        relative = _design(group, kind, float(hop_bytes)) / group.times_s[:, None]
        values, error = nonnegative(relative, np.ones(len(shares)))
        values[-1] = max(values[-1], 1e-9 * np.median(group.times_s / group.columns.size_bytes))
        found.append((round(error, 9), tuple(values), float(hop_bytes)))
    _, latencies, hop_bytes = min(found)
    return np.array([*latencies, hop_bytes])


def _described(group: _Group, chosen: _Candidate) -> _GroupFit:
    """Regimes in the order of the sizes that they win, with their errors and warnings."""
    kinds, scale = chosen.kinds, _scale(group, chosen.kinds)
    ends = np.cumsum([len(kind.names) for kind in kinds])
    solution = polish(_residuals(group, kinds), chosen.values, scale, _optional(kinds), _SAME)
    values = np.where(solution.at_bound, 0.0, solution.values)
    values[ends - 2] = solution.values[ends - 2]  # a bandwidth divides by it
    parts = [slice(end - len(kind.names), end) for end, kind in zip(ends, kinds, strict=True)]

    def smallest_s(i: int) -> float:
        return float(_times_s(group, kinds[i], values[parts[i]])[0])

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


def _layout_warnings(group: _Group, kinds: Sequence[_Kind]) -> Iterator[str]:
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
