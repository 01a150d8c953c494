"""Candidate regimes of NCCL's all-reduce: their shapes, designs, starts and residuals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Literal

import numpy as np
import numpy.typing as npt

from calibrate.fit.samples import Sample
from calibrate.fit.solve import Residuals, nonnegative, robust_cost
from ddpsim.cluster.fitted.laws import Columns, all_reduce_times_s
from ddpsim.importers.profiles.cluster import Fitted, NcclRegime, NcclRegimes

__all__ = [
    "Floats",
    "RegimeGroup",
    "RegimeKind",
    "Shape",
    "Starts",
    "kind_of",
    "optional_places",
    "parts_of",
    "residuals_of",
    "scale_of",
    "times_of_kind_s",
]

Floats = npt.NDArray[np.float64]
Shape = Literal["ring", "tree"]

_BREAKS = 14  # sizes at which a start may change its regime
_STARTS = 4  # of the most promising are followed to their end
_REGIMES_KEPT = 64  # of the last evaluated: a step of a gradient changes one of them
_QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75)  # of the ranks' shares in a stretch


@dataclass(frozen=True)
class RegimeGroup:
    """Samples of one node, or of several nodes, as columns."""

    columns: Columns
    times_s: Floats
    root_weights: Floats
    layouts: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> RegimeGroup:
        """Samples as columns."""
        layouts = tuple(sorted({(sample.nodes, sample.gpus_per_node) for sample in samples}))
        return cls(
            Columns.of([sample.point for sample in samples]),
            np.array([sample.time_s for sample in samples]),
            np.sqrt([sample.weight for sample in samples]),
            layouts,
        )

    @property
    def over_nodes(self) -> bool:
        """Whether it is of several nodes."""
        return self.layouts[0][0] > 1

    @property
    def name(self) -> str:
        """In words."""
        return "several nodes" if self.over_nodes else "one node"

    def residuals(self, predicted_s: Floats) -> Floats:
        """Weighted logarithms of predicted over measured time."""
        return np.asarray(self.root_weights * np.log(predicted_s / self.times_s))

    def rows(self, chosen: npt.NDArray[np.bool_]) -> RegimeGroup:
        """Some of the samples."""
        return RegimeGroup(
            Columns(*(column[chosen] for column in self.columns)),
            self.times_s[chosen],
            self.root_weights[chosen],
            self.layouts,
        )


@dataclass(frozen=True)
class RegimeKind:
    """What is free in a regime: its shape, and which of the latencies the layouts tell apart."""

    shape: Shape
    latencies: tuple[str, ...]
    over_nodes: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Of its free figures, in the order of the fit."""
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


def kind_of(group: RegimeGroup, shape: Shape) -> RegimeKind:
    """With the latencies that these layouts tell apart: columns that raise the design's rank."""
    wanted = ("base_s", "inter_hop_s", "intra_hop_s")
    kept: list[str] = []
    for name in wanted:
        kind = RegimeKind(shape, (*kept, name), group.over_nodes)
        design = _design(group, kind, 0.0)[:, : len(kept) + 1]
        if np.linalg.matrix_rank(design / np.maximum(design.max(axis=0), 1e-30)) > len(kept):
            kept.append(name)
    return RegimeKind(shape, tuple(kept), group.over_nodes)


def _design(group: RegimeGroup, kind: RegimeKind, hop_bytes: float) -> Floats:
    """Seconds that a unit of each latency, and of the seconds of a byte, adds to each time."""
    return _joined(_latency_columns(group, kind), _byte_column(group, kind, hop_bytes))


def _latency_columns(group: RegimeGroup, kind: RegimeKind) -> Floats:
    """Seconds that a unit of each latency adds, a row a latency: bytes within a hop change none."""
    return np.array([_unit_s(group, kind, i) for i in range(len(kind.latencies))])


def _byte_column(group: RegimeGroup, kind: RegimeKind, hop_bytes: float) -> Floats:
    """The seconds of a byte, times this, are the time of each message's bytes."""
    return _unit_s(group, kind, len(kind.latencies), hop_bytes)


def _unit_s(group: RegimeGroup, kind: RegimeKind, place: int, hop_bytes: float = 0.0) -> Floats:
    values = np.append(np.zeros(len(kind.latencies) + 1), hop_bytes)
    values[-2] = 1e-30  # its inverse is a bandwidth
    values[place] = 1.0
    return times_of_kind_s(group, kind, values)


def _joined(latency_columns: Floats, byte_column: Floats) -> Floats:
    design = np.array([*latency_columns, byte_column]).T
    return np.where(design < 1e-12, 0.0, design)  # from the seconds of a byte that are not there


def optional_places(kinds: Sequence[RegimeKind]) -> list[int]:
    """Where the parameters have their hop_bytes."""
    return [int(end) - 1 for end in np.cumsum([len(kind.names) for kind in kinds])]


def residuals_of(group: RegimeGroup, kinds: tuple[RegimeKind, ...]) -> Residuals:
    """The residuals of a group as a function of the figures of its regimes."""

    @lru_cache(maxsize=_REGIMES_KEPT)
    def times_s(kind: RegimeKind, figures: bytes) -> Floats:
        return times_of_kind_s(group, kind, np.frombuffer(figures))

    def residuals(values: Floats) -> Floats:
        each_s = [times_s(kind, part.tobytes()) for kind, part in parts_of(kinds, values)]
        return group.residuals(np.min(each_s, axis=0))

    return residuals


def parts_of(kinds: Sequence[RegimeKind], values: Floats) -> Iterator[tuple[RegimeKind, Floats]]:
    """Each regime's figures."""
    ends = np.cumsum([len(kind.names) for kind in kinds])
    return zip(kinds, np.split(values, ends[:-1]), strict=True)


def times_of_kind_s(group: RegimeGroup, kind: RegimeKind, values: Floats) -> Floats:
    """Of the whole group by one regime."""
    model = NcclRegimes.model_construct(regimes=(kind.regime(values),))
    return all_reduce_times_s(model, group.columns)


def scale_of(group: RegimeGroup, kinds: Sequence[RegimeKind]) -> Floats:
    """Where a parameter alone makes the median time; for hop_bytes, the median share."""
    parts: list[Floats] = []
    for kind in kinds:
        median = np.maximum(np.median(_design(group, kind, 0.0), axis=0), 1e-30)
        linear = np.median(group.times_s) / median
        parts.append(np.append(linear, np.median(_shares(group, kind.shape))))
    return np.concatenate(parts)


def _shares(group: RegimeGroup, shape: str) -> Floats:
    ranks = group.columns.ranks if shape == "ring" else 1.0
    return np.asarray(group.columns.size_bytes / ranks)


class Starts:
    """Where fits of a group's regimes start: each kind is fitted to a stretch of sizes once."""

    def __init__(self, group: RegimeGroup) -> None:
        self._group = group
        self._stretches: dict[tuple[Shape, tuple[float, ...]], _Stretches] = {}

    def of(self, kinds: tuple[RegimeKind, ...]) -> list[Floats]:
        """Sizes cut into one stretch a regime, each fitted alone: the most promising of all cuts.

        Once without hop_bytes and once with: the two ends are apart, with nothing downhill between.
        """
        chosen = []
        for quantiles in ((), _QUANTILES):
            # of those that differ by rounding alone, one
            found = {
                (round(cost, 9), *(f"{value:.6g}" for value in values)): values
                for cost, values in self._cut_fits(kinds, quantiles)
            }
            chosen += [np.array(found[key]) for key in sorted(found)[:_STARTS]]
        return chosen

    def _cut_fits(
        self, kinds: tuple[RegimeKind, ...], quantiles: tuple[float, ...]
    ) -> Iterator[tuple[float, tuple[float, ...]]]:
        """The cost and the figures of every cut."""
        for shape in {"tree", kinds[-1].shape}:
            stretches = self._stretches_by(shape, quantiles)
            for cuts in combinations(stretches.breaks, len(kinds) - 1):
                edges = (0, *cuts, stretches.end)
                parts = [stretches.fit(kind, *edges[k : k + 2]) for k, kind in enumerate(kinds)]
                predicted_s = np.min([times_s for _, times_s in parts], axis=0)
                values = np.concatenate([values for values, _ in parts])
                yield robust_cost(self._group.residuals(predicted_s)), tuple(values.tolist())

    def _stretches_by(self, shape: Shape, quantiles: tuple[float, ...]) -> _Stretches:
        known = (shape, quantiles)
        if known not in self._stretches:
            self._stretches[known] = _Stretches(self._group, shape, quantiles)
        return self._stretches[known]


class _Stretches:
    """Stretches of the ranks' shares, each fitted by one regime; many cuts have the same ones."""

    def __init__(self, group: RegimeGroup, shape: Shape, quantiles: tuple[float, ...]) -> None:
        self._group, self._quantiles = group, quantiles
        self._key = _shares(group, shape)
        self._grid = np.unique(self._key)
        self._fits: dict[tuple[RegimeKind, int, int], tuple[Floats, Floats]] = {}
        self._latencies: dict[RegimeKind, Floats] = {}

    @property
    def end(self) -> int:
        """The edge beyond the largest share."""
        return len(self._grid)

    @property
    def breaks(self) -> list[int]:
        """The edges between which stretches may lie."""
        wanted = min(_BREAKS, self.end - 1)
        places = np.linspace(1, self.end - 1, wanted).round().astype(int)
        return [int(place) for place in np.unique(places)]

    def fit(self, kind: RegimeKind, low: int, high: int) -> tuple[Floats, Floats]:
        """The figures of one regime, and the times it predicts for the whole group."""
        known = (kind, low, high)
        if known not in self._fits:
            chosen = (self._key >= self._grid[low]) & (self._key <= self._grid[high - 1])
            latencies = self._latency_columns(kind)[:, chosen]
            values = _linear_fit(self._group.rows(chosen), kind, latencies, self._quantiles)
            self._fits[known] = values, times_of_kind_s(self._group, kind, values)
        return self._fits[known]

    def _latency_columns(self, kind: RegimeKind) -> Floats:
        if kind not in self._latencies:
            self._latencies[kind] = _latency_columns(self._group, kind)
        return self._latencies[kind]


def _linear_fit(
    group: RegimeGroup, kind: RegimeKind, latency_columns: Floats, quantiles: Sequence[float]
) -> Floats:
    """Least squares of the relative error; hop_bytes is 0, or the best of the shares' quantiles."""
    found = []
    shares = _shares(group, kind.shape)
    for hop_bytes in np.quantile(shares, quantiles) if quantiles else (0.0,):
        design = _joined(latency_columns, _byte_column(group, kind, float(hop_bytes)))
        values, error = nonnegative(design / group.times_s[:, None], np.ones(len(shares)))
        values[-1] = max(values[-1], 1e-9 * np.median(group.times_s / group.columns.size_bytes))
        found.append((round(error, 9), tuple(values), float(hop_bytes)))
    _, latencies, hop_bytes = min(found)
    return np.array([*latencies, hop_bytes])
